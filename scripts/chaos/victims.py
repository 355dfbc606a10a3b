"""Finds the processes that may be killed: those of a run, by role, whose command lines name the run's folder."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from pipelinerl.runtime.process import ancestors

_MODULES = {
    "orchestrator": "orchestrator",
    "orchestrator.serving": "orchestrator",
    "pipelinerl.engine": "engine",
    "pipelinerl.gateway": "gateway",
    "pipelinerl.rewards": "scorer",
    "pipelinerl.rewards.prm.process": "prm",
    "scripts.chaos.trainer": "trainer",
    "trainer": "trainer",
}


def find(role: str, run_folder: Path) -> list[int]:
    """Process ids of a role. Of the engines these are the children of the warm parent; of the others, never what they have forked, but
    for "worker": what the scorers have.
    """
    if role == "worker":
        scorers = set(find("scorer", run_folder))
        return [process_id for process_id in _everybody() if process_id not in scorers and not scorers.isdisjoint(ancestors(process_id))]
    running = {process_id: (parent_id, _module_of(words)) for process_id, parent_id, words in _processes(run_folder)}
    return [
        process_id
        for process_id, (parent_id, module) in running.items()
        if _MODULES.get(module) == role and (running.get(parent_id, (0, ""))[1] == module) == (role == "engine")
    ]


def _module_of(words: list[str]) -> str:
    """Return the module that `python -m` runs, in a storm or not."""
    ran = words[words.index("-m") + 1 :][:2] if "-m" in words else [""]
    return ran[-1] if ran[0] == "scripts.chaos.storm" else ran[0]


def is_alive(process_id: int) -> bool:
    """False once a process has ended, also before anybody took note of it."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    return False


def _processes(run_folder: Path) -> Iterator[tuple[int, int, list[str]]]:
    """(process id, parent's id, words of the command line) of every live process that names the folder."""
    for process_id in _everybody():
        folder = Path("/proc", str(process_id))
        with contextlib.suppress(OSError, ValueError):
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
            state, parent_id = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            if str(run_folder) in words and state not in "ZX":
                yield process_id, int(parent_id), words


def _everybody() -> Iterator[int]:
    return (int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit())
