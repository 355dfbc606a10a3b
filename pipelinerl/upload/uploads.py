"""Copies what becomes whole in a run folder to an object store: the newest checkpoint, and the models that a run leaves at its end.

A checkpoint that was overtaken meanwhile is left out. The objects' list goes last (`manifest.json`, `files.json`): what has none is not
whole. Every file's XXH3-128 is computed of the bytes that are sent, so that a checkpoint which a disk damaged gets no list. Where the
store fails, it is tried again, with pauses that grow.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import msgspec

from pipelinerl.errors import CheckpointDamaged
from pipelinerl.storage import checksum
from pipelinerl.storage.checkpoint_folder import MANIFEST, File, complete, read_manifest
from pipelinerl.upload.object_store import ObjectStore

FILES = "files.json"
"""The list of a model's objects, each with its bytes and XXH3-128."""
MODELS = ("model", "adapter", "critic")
"""Folders that a run leaves at its end; see docs/following.md."""
LOOK_EVERY_S = 2.0
FIRST_RETRY_S, LAST_RETRY_S = 5.0, 300.0
"""Pause before a store that failed is tried again: doubled each time, from the first to the last."""
LAST_TRIES = 3
"""After the run, before what is left is left."""

log = logging.getLogger(__name__)


class Uploads:
    """What of a run folder is in the store, and what is not yet."""

    def __init__(self, run_folder: Path, store: ObjectStore, *, keep: int) -> None:
        """Everything goes under the run folder's name; as many checkpoints stay there as on the disk (`keep`)."""
        self._run_folder = run_folder
        self._store = store
        self._keep = keep
        self._there: dict[str, tuple[int, int]] = {}
        """Folders that need no other look, by name: inode and time of change."""
        self.damaged: dict[str, str] = {}
        """What could not be sent whole, and why, by its folder in the run's: a newer checkpoint that could takes it away."""

    def look(self) -> None:
        """Send what became whole since the last look. Raises whatever the store raises."""
        self._send_settings()
        for folder in complete(self._run_folder / "checkpoints")[-1:]:
            self._once(folder, f"checkpoints/{folder.name}", self._send_checkpoint)
        for name in MODELS:
            if (folder := self._run_folder / name).is_dir():
                self._once(folder, name, self._send_model)

    def _send_settings(self) -> None:
        """With them, what is in the store can be exported as a run folder can."""
        path = self._run_folder / "config.json"
        if self._is_new(path, path.name):
            self._store.write(self._under(path.name), path.read_bytes())
            self._there[path.name] = _state_of(path)

    def _once(self, folder: Path, name: str, send: Callable[[Path, str], None]) -> None:
        if not self._is_new(folder, name):
            return
        state, started = _state_of(folder), time.perf_counter()
        try:
            send(folder, name)
        except CheckpointDamaged as error:
            self.damaged[_kind_of(name)] = str(error)
            log.warning("%s: not sent: %s", name, error)
        except FileNotFoundError:
            if folder.exists():  # it is the store's
                raise
            log.info("%s: overtaken by a newer one while it was sent", name)
            self._store.remove(self._under(name))
            return
        else:
            self.damaged.pop(_kind_of(name), None)
        self._there[name] = state
        log.info("%s: in the store after %.1f s", name, time.perf_counter() - started)

    def _is_new(self, path: Path, name: str) -> bool:
        return self._there.get(name) != _state_of(path)

    def _send_checkpoint(self, folder: Path, name: str) -> None:
        manifest = read_manifest(folder)
        self._send(folder, name, files=manifest.files, last=(MANIFEST, (folder / MANIFEST).read_bytes()))
        self._remove_older()

    def _send_model(self, folder: Path, name: str) -> None:
        paths = sorted(path for path in folder.rglob("*") if path.is_file())
        files = {str(path.relative_to(folder)): File(bytes=path.stat().st_size, xxh3=checksum.of_file(path)) for path in paths}
        self._send(folder, name, files=files, last=(FILES, json.dumps(msgspec.to_builtins(files), indent=1).encode()))

    def _send(self, folder: Path, name: str, *, files: Mapping[str, File], last: tuple[str, bytes]) -> None:
        """Send a folder's files, and their list after them; nothing where the store has that very list."""
        end, listed = self._under(f"{name}/{last[0]}"), last[1]
        if (before := self._store.read(end)) == listed:
            return
        if before is not None:
            self._store.remove(end)  # the list of what was: it must not stand beside files of two kinds
        for file, expected in files.items():
            if (sent := self._store.send(folder / file, self._under(f"{name}/{file}"))) != expected:
                raise CheckpointDamaged(f"{folder / file} was damaged after it was written: {sent} was read, expected {expected}")
        self._store.write(end, listed)

    def _remove_older(self) -> None:
        """Leave the newest checkpoints that are whole; a list goes before its files."""
        found = self._store.folders(self._under("checkpoints"))
        whole = [name for name in found if self._store.read(self._under(f"checkpoints/{name}/{MANIFEST}")) is not None]
        for name in set(found) - set(whole[-self._keep :]):
            self._store.remove(self._under(f"checkpoints/{name}/{MANIFEST}"))
            self._store.remove(self._under(f"checkpoints/{name}"))

    def _under(self, name: str) -> str:
        return f"{self._run_folder.name}/{name}"


def follow(uploads: Uploads, *, until: threading.Event, sleep: Callable[[float], object] = time.sleep) -> bool:
    """Send what becomes whole until `until` is set, and then the rest; whether everything was sent."""
    retry_s, tries = FIRST_RETRY_S, 0
    while True:
        is_last = until.is_set()
        try:
            uploads.look()
        except Exception as error:  # the boundary to code that is not ours: a store's failure is a line in the log
            tries += is_last
            is_given_up = tries == LAST_TRIES
            log.warning("%s: %s; %s", type(error).__name__, error, "given up" if is_given_up else f"trying again in {retry_s:g} s")
            if is_given_up:
                return False
            (sleep if is_last else until.wait)(FIRST_RETRY_S if is_last else retry_s)
            retry_s = min(2 * retry_s, LAST_RETRY_S)
            continue
        retry_s = FIRST_RETRY_S
        if is_last:
            return not uploads.damaged
        until.wait(LOOK_EVERY_S)


def _kind_of(name: str) -> str:
    return name.partition("/")[0]


def _state_of(path: Path) -> tuple[int, int]:
    state = path.stat()
    return state.st_ino, state.st_mtime_ns
