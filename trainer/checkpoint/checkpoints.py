"""Checkpoints, from which a restarted trainer goes on: `<run>/checkpoints/step-N/`, written while training goes on.

A checkpoint is copied to memory between two steps, and from there written by a thread, each rank its share
(torch.distributed.checkpoint), to a draft; flushed to the disk; given its manifest; and then renamed. So a folder without the ending
`.draft` was whole when it got its name, and whatever interrupts the writing leaves the one before as it was. The rename is the commit
point of the run: see `orchestrator.ledger.ledger`, whose commit the manifest names. Only after that do older checkpoints go, beyond `keep`.

A folder that a disk damaged is found when it is read: each file's XXH3-128 is in the manifest (`pipelinerl.storage.checkpoint_folder`), and
is computed again before anything is loaded, each rank reading its part of the files. All ranks take the newest checkpoint that none of
them finds damaged; the newer ones are set aside and told.

The metadata of torch.distributed.checkpoint is a pickle: a run folder is its owner's alone (mode 0700), and must not come from elsewhere.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import shutil
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from pipelinerl.errors import CheckpointDamaged, ConfigError
from pipelinerl.messages import CheckpointFailed, CheckpointSaved, Damage
from pipelinerl.observe.tracking.identity import ids_of
from pipelinerl.storage import checkpoint_folder
from pipelinerl.storage.checkpoint_folder import Manifest, check_files, complete, name_of, read_manifest
from trainer.checkpoint.hashing_writer import HashingWriter
from trainer.parallel.objects import gathered

OPTIONAL_PARTS = frozenset({"coefficients"})
"""Parts that begin anew where a checkpoint has none of them: a resumed run may have another coefficient follow a target."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Saving:
    """A checkpoint being written."""

    version: int
    draft: Path
    writer: HashingWriter
    manifest: dict[str, Any]
    future: concurrent.futures.Future[Any]
    started: float


class Checkpoints:
    """The checkpoints of one run. Every rank calls everything, in the same order; rank 0 gives them their names."""

    def __init__(
        self,
        folder: Path,
        *,
        state: Callable[[], dict[str, Any]],
        rank: int,
        num_ranks: int,
        keep: int,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        """`state()` gives the tensors to save, by name, the very ones in use: restoring writes into them. `keep` newest folders stay.

        `fence` is called before a checkpoint takes its name, and raises where another launcher has taken the run over.
        """
        fence()
        self._fence = fence
        self._folder = folder
        self._state = state
        self._rank = rank
        self._num_ranks = num_ranks
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
        """Load the newest checkpoint that is whole into the tensors in use; None where there is none.

        Newer ones that are damaged are set aside and told. Raises `ConfigError` for one that does not fit this model.
        """
        names = self._of_every_rank([path.name for path in complete(self._folder)])[0]  # a shared file system shows others theirs later
        for name in reversed(names):
            folder = self._folder / name
            manifest, damage = self._verify(folder)
            if manifest is not None and not damage:
                return self._load(folder, manifest)
            if self._rank == 0:
                before = f"{damage}. It is set aside as {folder.name}.damaged, and the checkpoint before it is used"
                print(before, file=sys.stderr, flush=True)
                checkpoint_folder.set_aside(folder, damage)
        return None

    @property
    def damaged(self) -> tuple[Damage, ...]:
        """Damaged checkpoints that were set aside and not replaced by a newer one since."""
        return checkpoint_folder.set_aside_before(self._folder)

    @property
    def oldest(self) -> int:
        """The oldest version that a trainer may still start from."""
        return checkpoint_folder.oldest_kept(self._folder, keep=self._keep)

    def _of_every_rank(self, value: Any) -> list[Any]:
        return [value] if self._is_alone else gathered(value, group=self._group)

    def _verify(self, folder: Path) -> tuple[Manifest | None, str]:
        """Read this rank's share of a checkpoint's files; return its manifest, and what any rank found wrong with it."""
        manifest, damage, refused = None, "", ""
        try:
            manifest = read_manifest(folder)
            check_files(folder, manifest, sorted(manifest.files)[self._rank :: self._num_ranks])
        except CheckpointDamaged as error:
            damage = str(error)
        except ConfigError as error:
            refused = str(error)
        found = self._of_every_rank([damage, refused])
        if reasons := [reason for _, reason in found if reason]:
            raise ConfigError(reasons[0])
        return manifest, next((reason for reason, _ in found if reason), "")

    def _load(self, folder: Path, manifest: Manifest) -> Manifest:
        reader = dcp.FileSystemReader(folder)
        try:
            state = self._state()
            held = reader.read_metadata().state_dict_metadata
            for part in OPTIONAL_PARTS & state.keys():
                state[part] = {name: tensor for name, tensor in state[part].items() if f"{part}.{name}" in held}
            dcp.load({part: tensors for part, tensors in state.items() if tensors}, storage_reader=reader, no_dist=self._is_alone)
        except (dcp.CheckpointException, RuntimeError, ValueError, KeyError, OSError) as error:
            raise ConfigError(
                f"{folder} cannot be loaded into this model and optimizer: {type(error).__name__}: {error}. It holds version"
                f" {manifest.version} of the run; resume with the model the run began with"
            ) from error
        return manifest

    def begin(self, version: int, *, commit: str, num_samples: int, samples: str) -> None:
        """Copy the present state, and write it from here on; waits for the one before to be written."""
        self.wait()
        draft = self._folder / f"{name_of(version)}.draft"
        writer = HashingWriter(draft)
        started = time.perf_counter()
        future = dcp.async_save(self._state(), storage_writer=writer, process_group=self._group, no_dist=self._is_alone)
        assert isinstance(future, concurrent.futures.Future)
        about = {"version": version, "commit": commit, "num_samples": num_samples, "samples": samples}
        self._saving = _Saving(version=version, draft=draft, writer=writer, manifest=about, future=future, started=started)

    def wait(self) -> None:
        """Wait until what was begun is written, or has failed."""
        if self._saving is not None:
            concurrent.futures.wait([self._saving.future])
            self._finish(self._saving)

    def take_news(self) -> list[CheckpointSaved | CheckpointFailed]:
        """Return what became of checkpoints since the last call. Never waits."""
        if self._saving is not None and self._saving.future.done():
            self._finish(self._saving)
        news, self._news = self._news, []
        return news

    def _finish(self, saving: _Saving) -> None:
        self._saving = None
        try:
            saving.future.result()
            if self._rank == 0:
                num_bytes, oldest = self._publish(saving)
                save_s = time.perf_counter() - saving.started
                commit = saving.manifest["commit"]
                self._news.append(CheckpointSaved(version=saving.version, commit=commit, num_bytes=num_bytes, save_s=save_s, oldest=oldest))
        except (OSError, RuntimeError, dcp.CheckpointException) as error:  # a full disk, above all: training goes on without it
            self._news.append(CheckpointFailed(version=saving.version, error=self._explain(saving, error)))
            if self._rank == 0:
                shutil.rmtree(saving.draft, ignore_errors=True)

    def _publish(self, saving: _Saving) -> tuple[int, int]:
        """Complete the draft and give it its name. Then remove what is older than needed; return (bytes, oldest version that is left)."""
        manifest = Manifest(**saving.manifest, files=dict(sorted(saving.writer.files.items())), trackers=ids_of(self._folder.parent))
        checkpoint_folder.write_manifest(saving.draft, manifest)
        self._fence()
        saving.draft.rename(saving.draft.with_suffix(""))
        checkpoint_folder.sync(self._folder)
        return manifest.num_bytes, checkpoint_folder.remove_older(self._folder, keep=self._keep)

    def _explain(self, saving: _Saving, error: BaseException) -> str:
        before = next(reversed(complete(self._folder)), None)
        reasons = [str(reason) for reason in error.failures.values()] if isinstance(error, dcp.CheckpointException) else [str(error)]
        room = shutil.disk_usage(self._folder).free
        kept = f"{before.name} is untouched" if before else "there is none before it"
        return (
            f"checkpoint {saving.version} could not be written to {self._folder}: {'; '.join(dict.fromkeys(reasons))}. {room >> 20} MiB are"
            f" free there; {kept}, and training goes on. Make room: the next one is due as planned"
        )
