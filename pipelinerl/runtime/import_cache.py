"""What `import transformers` finds out anew in every process, kept from one to the next: two thirds of the processor time it takes.

It reads 3,000 files of its own, twice, to know which of them defines which class, and the file lists of all packages, to know which
distribution each belongs to. Both change with what is installed alone. They are kept as JSON in the user's cache folder, under a digest of
the distributions in sight: what is damaged, cannot be written or was found under others is found out as before.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.abc import MetaPathFinder
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import xxhash

_HOOKED = "transformers.utils.import_utils"
"""The module that finds out both."""
_INSTALLED_IN = ("site-packages", "dist-packages")
"""Folders of packages that change only by an installation. In others somebody works on transformers, whose files are read each time."""
_NUM_KEPT = 8
"""Files of other installations, and of processes with other paths, that stay beside the newest."""

Structure = dict[Any, Any]
"""transformers' own form: by a set of backends (frozenset), names by module; by the name of a folder, the folder's structure."""


class _Folder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A structure as JSON has it."""

    modules: list[tuple[list[str], dict[str, list[str]]]]
    """(backends, names by module)."""
    folders: dict[str, _Folder]


class _Found(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    packages: dict[str, list[str]]
    """Distributions by importable name."""
    models: _Folder


def remember_transformers() -> None:
    """Have this process's import of transformers, if it is still to come, use what another has found; safe to repeat."""
    if _HOOKED not in sys.modules and not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())


class _Finder(MetaPathFinder):
    """Finds one module, once, as Python would, and has it executed by `_execute`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _HOOKED:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.origin is not None and spec.loader is not None and Path(spec.origin).parents[2].name in _INSTALLED_IN:
            vars(spec.loader)["exec_module"] = functools.partial(_execute, spec.loader.exec_module)
        return spec


def _execute(execute: Callable[[ModuleType], None], module: ModuleType) -> None:
    """Execute the module, and have it read no file whose content is known."""
    assert module.__file__ is not None
    models = Path(module.__file__).parents[1] / "models"
    path = _cache_folder() / f"transformers-{_installation()}.json"
    found = _read(path)
    with contextlib.nullcontext() if found is None else _answers(found.packages):
        execute(module)
    if (scan := getattr(module, "create_import_structure_from_path", None)) is None:
        return

    def structure_of(given: str | os.PathLike[str]) -> Structure:
        nonlocal found
        if Path(given) not in (models, models / "__init__.py"):
            return scan(given)
        if found is None:
            found = _Found(packages=dict(vars(module).get("PACKAGE_DISTRIBUTION_MAPPING", {})), models=_folder_of(scan(given)))
            _write(path, found)
        return _structure_of(found.models)

    vars(module)["create_import_structure_from_path"] = structure_of


@contextlib.contextmanager
def _answers(packages: Mapping[str, list[str]]) -> Iterator[None]:
    """Have Python's own search for the distributions of packages give this answer."""
    search, importlib.metadata.packages_distributions = importlib.metadata.packages_distributions, lambda: packages
    try:
        yield
    finally:
        importlib.metadata.packages_distributions = search


def _folder_of(structure: Structure) -> _Folder:
    return _Folder(
        modules=[
            (sorted(backends), {module: sorted(names) for module, names in by_module.items()})
            for backends, by_module in structure.items()
            if isinstance(backends, frozenset)
        ],
        folders={name: _folder_of(inner) for name, inner in structure.items() if isinstance(name, str)},
    )


def _structure_of(folder: _Folder) -> Structure:
    modules = {frozenset(backends): {module: set(names) for module, names in by_module.items()} for backends, by_module in folder.modules}
    return {**modules, **{name: _structure_of(inner) for name, inner in folder.folders.items()}}


def _installation() -> str:
    """A digest of this Python and of the distributions on its path, with the time at which each was installed."""
    told: list[object] = [sys.version]
    for folder in sys.path:
        with contextlib.suppress(OSError), os.scandir(folder or ".") as entries:
            infos = sorted((entry.name, entry.stat().st_mtime_ns) for entry in entries if entry.name.endswith((".dist-info", ".egg-info")))
            told += [os.path.abspath(folder), *infos] if infos else []
    return xxhash.xxh3_64_hexdigest(repr(told).encode())


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "pipelinerl"


def _read(path: Path) -> _Found | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Found)
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _write(path: Path, found: _Found) -> None:
    """Keep it, whole or not at all, and few of those before it."""
    draft = path.with_suffix(f".{os.getpid()}")
    with contextlib.suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        draft.write_bytes(msgspec.json.encode(found))
        draft.replace(path)
        others = sorted(path.parent.glob("transformers-*"), key=lambda other: other.stat().st_mtime, reverse=True)
        for other in others[_NUM_KEPT:]:
            other.unlink()
