"""The transport on one machine: the trainer writes a buffer in shared memory once, and every engine reads the very same bytes.

A buffer is a file in `/dev/shm`, named `pipelinerl-<run token>-<k>`, readable by its owner only; its manifest lies beside it. Engines may
point their parameters straight into it: fetching copies nothing, and a buffer is read for as long as an engine serves from it.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import re
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from pipelinerl.errors import NoRoom, WeightsError
from pipelinerl.weights.manifest import Manifest, open_manifest
from pipelinerl.weights.shared_names import FOLDER, Owner
from pipelinerl.weights.transport import Payload, WeightBuffer

NAME = re.compile(r"pipelinerl-[0-9a-zA-Z]+-[0-9]+")
MANIFEST_SUFFIX = ".manifest"


class SharedMemorySender:
    """Weight buffers in shared memory: a `Sender`."""

    def __init__(self, token: str, *, folder: Path = FOLDER) -> None:
        """Remove what a dead run of the same token left behind. Buffers are made when first needed."""
        assert NAME.fullmatch(f"pipelinerl-{token}-0"), token
        self._token, self._folder = token, folder
        self._owner = Owner(token, folder=folder)

    def make(self, number: int, num_bytes: int) -> WeightBuffer:
        # By process, too: engines keep weight buffers mapped by name, and a trainer that starts again must not be taken for the one before.
        name = f"pipelinerl-{self._token}-{os.getpid()}{number}"
        file = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            _reserve(file, name, num_bytes=num_bytes, folder=self._folder)
            mapped = mmap.mmap(file, max(1, num_bytes))
        except BaseException:
            os.unlink(self._folder / name)
            raise
        finally:
            os.close(file)
        return WeightBuffer(name=name, memory=torch.frombuffer(mapped, dtype=torch.uint8)[:num_bytes])

    def offer(self, buffer: WeightBuffer, manifest: Manifest, encoded: bytes) -> None:
        write_beside(buffer.name, MANIFEST_SUFFIX, encoded, folder=self._folder)

    def close(self) -> None:
        self._owner.close()


class SharedMemoryReceiver:
    """Opens weight buffers by name, and keeps them open: the trainer uses a few in turn. A `Receiver`."""

    def __init__(
        self,
        *,
        folder: Path = FOLDER,
        open_buffer: Callable[[str], torch.Tensor] | None = None,
        suffix: str = "",
        pattern: re.Pattern[str] = NAME,
    ) -> None:
        """`open_buffer` opens a name of `pattern`, by default by mapping the file of that name. The file of this `suffix` lives as long
        as the buffer."""
        self._folder = folder
        self._open = open_buffer or (lambda name: attach(name, folder=folder))
        self._suffix = suffix
        self._pattern = pattern
        self._opened: dict[str, torch.Tensor] = {}

    def fetch(self, name: str, digest: str, spare: Callable[[Manifest], torch.Tensor]) -> Payload:
        encoded = read_beside(name, MANIFEST_SUFFIX, folder=self._folder, pattern=self._pattern)
        manifest = open_manifest(encoded, digest=digest, name=name)
        if name not in self._opened:
            opened = self._open(name)
            kept = [name for name in self._opened if (self._folder / (name + self._suffix)).exists()]  # not those of a dead trainer
            self._opened = {name: self._opened[name] for name in kept} | {name: opened}
        payload = self._opened[name]
        if len(payload) < manifest.num_bytes:
            raise WeightsError(
                f"weight buffer {name} has {len(payload)} bytes, its manifest says {manifest.num_bytes}: it is truncated; not taken"
            )
        payload = payload[: manifest.num_bytes]
        return Payload(manifest=manifest, data=payload if manifest.base_version is None else payload.cpu())

    def close(self) -> None:
        self._opened.clear()


def write_beside(name: str, suffix: str, data: bytes, *, folder: Path = FOLDER) -> None:
    """Write what goes with a buffer, readable by its owner only. Raises `WeightsError` where it cannot be."""
    # Under a new name first: whoever reads the manifest of a buffer reads the old one or the new one, never half of each.
    path = folder / (name + suffix)
    draft = path.with_suffix(".draft")
    try:
        with open(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600), "wb") as file:
            file.write(data)
        draft.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            draft.unlink()
        raise NoRoom(f"cannot write the {suffix[1:]} of {name}, {len(data)} bytes, in {folder}: {error}. Make room there") from None


def read_beside(name: str, suffix: str, *, folder: Path = FOLDER, pattern: re.Pattern[str] = NAME) -> bytes:
    """Read what was written beside a buffer. `name` comes off the wire. Raises `WeightsError` where it is no buffer's, or not ours."""
    with open(_open(name, folder, suffix=suffix, pattern=pattern), "rb") as file:
        return file.read()


def attach_to_write(name: str, *, folder: Path = FOLDER) -> torch.Tensor:
    """Map a buffer that another process of the trainer made, to write a part: [bytes] uint8. Raises `WeightsError` as `attach` does."""
    return torch.frombuffer(_map(name, folder, is_written=True), dtype=torch.uint8)


def attach(name: str, *, folder: Path = FOLDER) -> torch.Tensor:
    """Map a buffer for reading: [bytes] uint8, the trainer's own bytes, never to be written (the kernel ends a process that tries).

    `name` comes off the wire. Raises `WeightsError` where it is not a weight buffer's name, or the file is missing or not ours.
    """
    mapped = _map(name, folder, is_written=False)
    # By address, because torch warns of every buffer that Python calls read-only. The array keeps the mapping alive, the tensor the array.
    array = (ctypes.c_uint8 * len(mapped)).from_address(np.frombuffer(mapped, np.uint8).ctypes.data)
    array.mapped = mapped  # pyright: ignore[reportAttributeAccessIssue]
    return torch.frombuffer(array, dtype=torch.uint8)


def _map(name: str, folder: Path, *, is_written: bool) -> mmap.mmap:
    file = _open(name, folder, mode=os.O_RDWR if is_written else os.O_RDONLY)
    try:
        return mmap.mmap(file, 0, prot=mmap.PROT_READ | (mmap.PROT_WRITE if is_written else 0))
    except ValueError:
        end = "written" if is_written else "taken"
        raise WeightsError(f"weight buffer {name} in {folder} is an empty file: it was truncated; not {end}") from None
    finally:
        os.close(file)


def _open(name: str, folder: Path, *, suffix: str = "", mode: int = os.O_RDONLY, pattern: re.Pattern[str] = NAME) -> int:
    if not pattern.fullmatch(name):
        raise WeightsError(f"{name!r} is not the name of a weight buffer: expected pipelinerl-<run token>-<number>")
    try:
        file = os.open(folder / (name + suffix), mode | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsError(
            f"cannot open {name}{suffix} in {folder}: {error.strerror}; is the trainer alive, and on this machine?"
        ) from None
    state = os.fstat(file)
    if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
        os.close(file)
        raise WeightsError(f"{name} in {folder} is not a plain file of user {os.geteuid()}: another user's file stands in its place")
    return file


def _reserve(file: int, name: str, *, num_bytes: int, folder: Path) -> None:
    # Reserved, not only sized: writing to a page that the file system has no room for would kill the process with SIGBUS.
    system = os.statvfs(folder)
    room = system.f_bavail * system.f_frsize
    try:
        if num_bytes > room:
            raise OSError(f"{room} bytes free")
        os.posix_fallocate(file, 0, max(1, num_bytes))
    except OSError as error:
        raise NoRoom(
            f"no room for {name} of {num_bytes} bytes in {folder}: {error}. A run keeps three policies there, and more while an engine"
            ' lags: enlarge it (a container: its shared-memory size), remove what dead runs left in it, or set weights.transport = "files"'
        ) from None
