"""Checkpoints as folders and files: the manifest, the checksum of every byte, and which of several is still whole. No torch.

`<run>/checkpoints/step-N/manifest.json` lists every other file with its size and XXH3-128, and carries a checksum of itself. A checkpoint
that proves to be damaged is told by its first wrong file, set aside as `step-N.damaged`, and the next older one is tried; the folder that
was set aside goes once a newer checkpoint stands.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from pipelinerl.errors import CheckpointDamaged, ConfigError
from pipelinerl.messages import Damage
from pipelinerl.storage import checksum
from pipelinerl.storage.schema import OLDEST_MIGRATED, SCHEMA, refusal

MANIFEST = "manifest.json"
_REASON = "damage.txt"
"""File in a folder that was set aside, which says why."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class File:
    """One file of a checkpoint, as it was written."""

    bytes: int
    xxh3: str
    """XXH3-128, 32 hexadecimal digits."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The manifest of a checkpoint."""

    schema: int = SCHEMA
    version: int
    """Steps whose gradients it holds."""
    commit: str
    """The ledger's, under which the last of them was sealed."""
    num_samples: int
    samples: str
    """Digest of every sample it was trained on; see `trainer.data.sample_digest`."""
    files: dict[str, File]
    """All but the manifest itself, by name."""
    trackers: dict[str, str] = dataclasses.field(default_factory=dict)
    """Under which id each tracker knows the run."""

    @property
    def num_bytes(self) -> int:
        return sum(file.bytes for file in self.files.values())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Complete a checkpoint's folder, down to the disk. Raises `OSError`."""
    content = msgspec.to_builtins(manifest)
    draft = folder / f"{MANIFEST}.draft"
    with open(draft, "w") as file:
        json.dump(content | {"checksum": _checksum(content)}, file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(folder / MANIFEST)
    sync(folder)


def read_manifest(folder: Path) -> Manifest:
    """Read a manifest. Raises `CheckpointDamaged` where it is not as it was written, `ConfigError` where another version wrote it."""
    path = folder / MANIFEST
    content = read_content(folder)
    try:
        if (reason := refusal(content["schema"], what=str(path))) is not None:
            raise ConfigError(reason)
        manifest = msgspec.convert(content, Manifest)
        int(manifest.samples, 16)
    except (ValueError, KeyError) as error:  # msgspec's own is a ValueError
        raise CheckpointDamaged(f"{path} was damaged after it was written: {error}") from None
    if folder.suffix == "" and folder.name != name_of(manifest.version):
        raise CheckpointDamaged(f"{path} is of version {manifest.version}, expected that of its folder")
    return manifest


def read_content(folder: Path) -> dict[str, Any]:
    """Read a manifest of any schema, without its checksum. Raises `CheckpointDamaged` where it is not as it was written."""
    path = folder / MANIFEST
    try:
        content: Any = json.loads(path.read_bytes())
        if not isinstance(content, dict):
            raise ValueError(f"it holds a {type(content).__name__}")
        said = content.pop("checksum", None)
        if "schema" not in content and said is None:  # before it had either
            return content | {"schema": OLDEST_MIGRATED}
        if said != (expected := _checksum(content)):
            raise ValueError(f"its checksum is {expected}, expected {said}")
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{path} was damaged after it was written: {error}") from None
    return content


def check_files(folder: Path, manifest: Manifest, names: Iterable[str] | None = None) -> None:
    """Read every file of a manifest, or those of `names`. Raises `CheckpointDamaged` for the first that is not as it was written."""
    for name in manifest.files if names is None else names:
        path, expected = folder / name, manifest.files[name]
        size = path.stat().st_size if path.is_file() else None
        if size != expected.bytes:
            raise CheckpointDamaged(f"{path} was damaged after it was written: it has {size} bytes, expected {expected.bytes}")
        try:
            found = checksum.of_file(path)
        except OSError as error:  # a disk that cannot read a block says so itself
            raise CheckpointDamaged(f"{path} cannot be read: {error}") from None
        if found != expected.xxh3:
            raise CheckpointDamaged(f"{path} was damaged after it was written: its XXH3-128 is {found}, expected {expected.xxh3}")


def complete(folder: Path) -> list[Path]:
    """Return the checkpoints of a folder that were written to their end, oldest first."""
    return sorted(path for path in folder.glob("step-*") if not path.suffix and (path / MANIFEST).is_file())


def newest_whole(folder: Path) -> tuple[Path, Manifest, list[str]] | None:
    """Return the newest checkpoint whose every byte is as it was written, and what is wrong with each newer one; None where there is none.

    Sets nothing aside. Raises `ConfigError` where one is of another version of this program.
    """
    damage: list[str] = []
    for path in reversed(complete(folder)):
        try:
            manifest = read_manifest(path)
            check_files(path, manifest)
        except CheckpointDamaged as error:
            damage.append(str(error))
        else:
            return path, manifest, damage
    if damage:
        raise CheckpointDamaged("; ".join(damage) + ". No older checkpoint is whole: restore one")
    return None


def set_aside(checkpoint: Path, reason: str) -> None:
    """Take a damaged checkpoint's name from it, and note why."""
    aside = checkpoint.with_name(checkpoint.name + ".damaged")
    shutil.rmtree(aside, ignore_errors=True)
    checkpoint.rename(aside)
    (aside / _REASON).write_text(reason)
    sync(checkpoint.parent)


def set_aside_before(folder: Path) -> tuple[Damage, ...]:
    """Return the checkpoints that were set aside, before or after any restart, and that no newer one replaces."""
    found = ((_version_of(path), path / _REASON) for path in sorted(folder.glob("step-*.damaged")))
    return tuple(Damage(version=version, reason=path.read_text() if path.is_file() else "was damaged") for version, path in found)


def remove_older(folder: Path, *, keep: int) -> int:
    """Remove all but the newest checkpoints, and what was set aside before; return the oldest version a trainer may still start from.

    The model that the run began with is the checkpoint of version 0: it counts as one of those kept while there are too few.
    """
    found = complete(folder)
    # Renamed first, so that half a folder never has a checkpoint's name; one that cannot be removed now is when a trainer starts.
    for old in found[:-keep]:
        shutil.rmtree(old.rename(old.with_name(old.name + ".old")), ignore_errors=True)
    for aside in folder.glob("step-*.damaged"):
        if found and _version_of(aside) <= _version_of(found[-1]):
            shutil.rmtree(aside, ignore_errors=True)
    return oldest_kept(folder, keep=keep)


def oldest_kept(folder: Path, *, keep: int) -> int:
    """Return the oldest version that a trainer may still start from."""
    found = complete(folder)
    return _version_of(found[0]) if len(found) >= keep else 0


def name_of(version: int) -> str:
    """Return the name of a checkpoint's folder."""
    return f"step-{version:06}"


def sync(folder: Path) -> None:
    """Have a folder's entries on the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _version_of(path: Path) -> int:
    return int(path.name.removeprefix("step-").partition(".")[0])


def _checksum(content: dict[str, Any]) -> str:
    return checksum.of_bytes(json.dumps(content, sort_keys=True, separators=(",", ":")).encode())
