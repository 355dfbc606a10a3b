"""The transport of files: every policy is a safetensors file under its version's name, which anything that reads safetensors can load.

For engines on other machines with a shared file system, for other sites, and where shared memory is too small. A file appears under its
name whole or not at all: it is written under another name, flushed to the disk, and renamed. Its manifest is in its metadata.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from pipelinerl.errors import NoRoom, WeightsError
from pipelinerl.weights.base import views
from pipelinerl.weights.manifest import Manifest, open_manifest
from pipelinerl.weights.transport import Payload, WeightBuffer

NAME = re.compile(r"policy-[0-9]+(-delta)?\.safetensors")
CHANGES = "changes"
"""Name of the only tensor of a file that holds changes."""


class FilesSender:
    """Weight buffers in a folder: a `Sender`. All share one buffer, because only one is written at a time."""

    def __init__(self, folder: Path) -> None:
        """Make the folder, readable by its owner only, and remove what a dead run left in it."""
        self._folder = folder
        self._buffer = torch.zeros(0, dtype=torch.uint8)
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            raise WeightsError(f"cannot make {folder} for published policies: {error.strerror}") from None
        self.close()

    def make(self, number: int, num_bytes: int) -> WeightBuffer:
        if len(self._buffer) != num_bytes:
            self._buffer = torch.zeros(num_bytes, dtype=torch.uint8)
        return WeightBuffer(name=f"unwritten-{number}", memory=self._buffer)

    def offer(self, buffer: WeightBuffer, manifest: Manifest, encoded: bytes) -> None:
        before = self._folder / buffer.name
        buffer.name = f"policy-{manifest.version}{'' if manifest.base_version is None else '-delta'}.safetensors"
        path = self._folder / buffer.name
        draft = path.with_suffix(".draft")
        try:
            save_file(_tensors(buffer.memory, manifest), draft, metadata={"format": "pt", "manifest": encoded.decode()})
            os.chmod(draft, 0o600)
            _flush(draft)
            draft.replace(path)
            _flush(self._folder)
        except (OSError, SafetensorError) as error:
            with contextlib.suppress(OSError):
                draft.unlink()
            raise NoRoom(
                f"cannot write policy {manifest.version}, {manifest.num_bytes} bytes, to {path}: {error}"
                f" ({shutil.disk_usage(self._folder).free} bytes free); engines go on with the policy before. Make room there: a run keeps"
                " three policies, and more while an engine lags"
            ) from None
        if before != path:
            before.unlink(missing_ok=True)

    def close(self) -> None:
        for path in [*self._folder.glob("policy-*.safetensors"), *self._folder.glob("policy-*.draft")]:
            path.unlink(missing_ok=True)


class FilesReceiver:
    """Reads policies from a folder: a `Receiver`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def fetch(self, name: str, digest: str, spare: Callable[[Manifest], torch.Tensor]) -> Payload:
        if not NAME.fullmatch(name):
            raise WeightsError(f"{name!r} is not the name of a weight buffer: expected policy-<version>.safetensors")
        try:
            with safe_open(self._folder / name, framework="pt") as file:
                manifest = open_manifest((file.metadata() or {}).get("manifest", "").encode(), digest=digest, name=name)
                if manifest.base_version is not None:
                    return Payload(manifest=manifest, data=file.get_tensor(CHANGES).clone())
                payload = spare(manifest)
                for name, view in views(payload, [proof.tensor for proof in manifest.proofs]).items():
                    view.copy_(file.get_tensor(name))
        except FileNotFoundError:
            raise WeightsError(f"cannot open {name} in {self._folder}: no such file; does this machine see the trainer's folder?") from None
        except (OSError, SafetensorError, RuntimeError) as error:
            raise WeightsError(f"weight buffer {name} in {self._folder} is truncated or damaged: {error}; not taken") from error
        return Payload(manifest=manifest, data=payload[: manifest.num_bytes])

    def close(self) -> None:
        """Nothing stays open."""


def _tensors(buffer: torch.Tensor, manifest: Manifest) -> dict[str, torch.Tensor]:
    if manifest.base_version is not None:
        return {CHANGES: buffer[: manifest.num_bytes]}
    return views(buffer, [proof.tensor for proof in manifest.proofs])


def _flush(path: Path) -> None:
    """Have the disk hold it, so that a name never outlives its bytes in a crash of the machine."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
