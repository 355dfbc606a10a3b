"""What a trainer that starts again starts from: `<run>/checkpoints/step-N/`, written while training goes on.

A checkpoint is copied to memory between two steps, and from there written by a thread, each rank its share
(torch.distributed.checkpoint), to a draft; flushed to the disk; given its manifest; and then renamed. So a folder without the ending
`.draft` is whole, always, and whatever interrupts the writing leaves the one before as it was. The rename is the commit point of the run:
see `orchestrator.state.ledger`, whose commit the manifest names. Older checkpoints go only after that, and the newest never does: nobody
can come to need a folder that was removed.

The metadata of torch.distributed.checkpoint is a pickle: a run folder is its owner's alone (mode 0700), and must not come from elsewhere.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import json
import os
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from pipelinerl.errors import ConfigError
from pipelinerl.messages import CheckpointFailed, CheckpointSaved
from pipelinerl.tracking.identity import ids_of

_MANIFEST = "manifest.json"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a checkpoint says of itself."""

    version: int
    """Steps whose gradients it holds."""
    commit: str
    """The ledger's, under which the last of them was sealed."""
    num_samples: int
    samples: str
    """Digest of every sample it was trained on; see `trainer.lineage`."""
    files: dict[str, int]
    """Sizes in bytes."""
    trackers: dict[str, str] = dataclasses.field(default_factory=dict)
    """Under which id each tracker knows the run."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Saving:
    """A checkpoint being written."""

    version: int
    draft: Path
    manifest: dict[str, Any]
    future: concurrent.futures.Future[Any]
    started: float


class Checkpoints:
    """The checkpoints of one run. Every rank calls everything, in the same order; rank 0 gives them their names."""

    def __init__(self, folder: Path, *, state: Callable[[], dict[str, Any]], rank: int, num_ranks: int, keep: int) -> None:
        """`state()` gives the tensors to save, by name, the very ones in use: restoring writes into them. `keep` newest folders stay."""
        self._folder = folder
        self._state = state
        self._rank = rank
        self._is_alone = num_ranks == 1
        self._keep = keep
        self._saving: _Saving | None = None
        self._news: list[CheckpointSaved | CheckpointFailed] = []
        # Writing goes on beside training, whose collectives it must not get in between: it has a group of its own.
        group = None if self._is_alone else dist.new_group(backend="gloo")
        assert not isinstance(group, int), "every rank is in it"
        self._group = group
        if self._is_alone:  # said at every save, and meant: one rank needs no process group
            warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)
        if rank == 0:
            folder.mkdir(parents=True, exist_ok=True)
            for path in [*folder.glob("step-*.draft"), *folder.glob("step-*.old")]:
                shutil.rmtree(path, ignore_errors=True)

    def restore(self) -> Manifest | None:
        """Load the newest checkpoint into the tensors in use; None where there is none. Raises `ConfigError` for one that does not fit."""
        folder = newest(self._folder)
        if folder is None:
            return None
        manifest = read_manifest(folder)
        try:
            dcp.load(self._state(), storage_reader=dcp.FileSystemReader(folder), no_dist=self._is_alone)
        except (dcp.CheckpointException, RuntimeError, ValueError, KeyError, OSError) as error:
            raise ConfigError(
                f"{folder} cannot be loaded into this model and optimizer: {type(error).__name__}: {error}. It holds version"
                f" {manifest.version} of the run; resume with the model the run began with"
            ) from error
        return manifest

    def begin(self, version: int, *, commit: str, num_samples: int, samples: str) -> None:
        """Copy the present state, and write it from here on; waits for the one before to be written."""
        self.wait()
        draft = self._folder / f"step-{version:06}.draft"
        writer = dcp.FileSystemWriter(draft, sync_files=True)
        started = time.perf_counter()
        future = dcp.async_save(self._state(), storage_writer=writer, process_group=self._group, no_dist=self._is_alone)
        assert isinstance(future, concurrent.futures.Future)
        about = {"version": version, "commit": commit, "num_samples": num_samples, "samples": samples}
        self._saving = _Saving(version=version, draft=draft, manifest=about, future=future, started=started)

    def wait(self) -> None:
        """Wait until what was begun is written, or has failed."""
        if self._saving is not None:
            concurrent.futures.wait([self._saving.future])
            self._finish(self._saving)

    def take_news(self) -> list[CheckpointSaved | CheckpointFailed]:
        """What became of checkpoints since the last look. Never waits."""
        if self._saving is not None and self._saving.future.done():
            self._finish(self._saving)
        news, self._news = self._news, []
        return news

    def _finish(self, saving: _Saving) -> None:
        self._saving = None
        try:
            saving.future.result()
            if self._rank == 0:
                num_bytes = self._publish(saving)
                save_s = time.perf_counter() - saving.started
                commit = saving.manifest["commit"]
                self._news.append(CheckpointSaved(version=saving.version, commit=commit, num_bytes=num_bytes, save_s=save_s))
        except (OSError, RuntimeError, dcp.CheckpointException) as error:  # a full disk, above all: training goes on without it
            self._news.append(CheckpointFailed(version=saving.version, error=self._explain(saving, error)))
            if self._rank == 0:
                shutil.rmtree(saving.draft, ignore_errors=True)

    def _publish(self, saving: _Saving) -> int:
        """Complete the draft and give it its name; return its size. Then remove what is older than needed."""
        files = {path.name: path.stat().st_size for path in sorted(saving.draft.iterdir())}
        manifest = saving.draft / _MANIFEST
        with open(manifest, "w") as file:
            json.dump(saving.manifest | {"trackers": ids_of(self._folder.parent), "files": files}, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        _sync(saving.draft)
        saving.draft.rename(saving.draft.with_suffix(""))
        _sync(self._folder)
        for old in _whole(self._folder)[: -self._keep]:
            # Renamed first, so that half a folder never has a checkpoint's name; one that cannot be removed now is when a trainer starts.
            shutil.rmtree(old.rename(old.with_name(old.name + ".old")), ignore_errors=True)
        return sum(files.values())

    def _explain(self, saving: _Saving, error: BaseException) -> str:
        before = newest(self._folder)
        reasons = [str(reason) for reason in error.failures.values()] if isinstance(error, dcp.CheckpointException) else [str(error)]
        room = shutil.disk_usage(self._folder).free
        kept = f"{before.name} is untouched" if before else "there is none before it"
        return (
            f"checkpoint {saving.version} could not be written to {self._folder}: {'; '.join(dict.fromkeys(reasons))}. {room >> 20} MiB are"
            f" free there; {kept}, and training goes on. Make room: the next one is due as planned"
        )


def newest(folder: Path) -> Path | None:
    """The newest whole checkpoint of a folder."""
    found = _whole(folder)
    return found[-1] if found else None


def read_manifest(folder: Path) -> Manifest:
    """Raises `ConfigError` where it is damaged, or where a file that it lists is missing or has another size."""
    path = folder / _MANIFEST
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
        int(manifest.samples, 16)
    except (OSError, ValueError, RecursionError) as error:  # msgspec's own is a ValueError
        raise ConfigError(f"{path} is not a checkpoint's manifest: {error}; it was damaged after it was written: restore it") from None
    for name, size in manifest.files.items():
        path = folder / name
        found = path.stat().st_size if path.is_file() else None
        if found != size:
            raise ConfigError(
                f"{path} has {found} bytes, expected {size}: the checkpoint was damaged after it was written; restore the folder"
            )
    return manifest


def _whole(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(path for path in folder.glob("step-*") if not path.suffix and (path / _MANIFEST).is_file())


def _sync(folder: Path) -> None:
    """Have a folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
