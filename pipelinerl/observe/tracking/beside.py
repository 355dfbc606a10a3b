"""The trackers of a run as processes beside it: what one has not handed on is in the journal, and `pipelinerl track RUN` sends it."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.sidecars import Sidecar

REST_S = 30.0
"""For a tracker, after the run. Longer keeps machines waiting for a network; shorter leaves more to `pipelinerl track`."""
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "prometheus": "prometheus_client"}


def trackers(run_folder: Path, to: Sequence[str]) -> tuple[Sidecar, ...]:
    """The trackers named in `to`."""
    remedy = f"pipelinerl track {run_folder}"
    return tuple(Sidecar(name=f"track-{name}", command=tuple(command(run_folder, name)), rest_s=REST_S, remedy=remedy) for name in to)


def track(run_folder: Path, to: Sequence[str]) -> bool:
    """Send everything the trackers named in `to` lack, and return whether all of it went."""
    missing_packages(to)
    return all([_send(run_folder, name) for name in to])


def _send(run_folder: Path, name: str) -> bool:
    print(f"{name}: reading {run_folder / 'journal'} and sending what {name} lacks of it", flush=True)
    if code := subprocess.call(command(run_folder, name, once=True)):
        print(f"{name}: ended with exit code {code} before everything was sent; what is sent is not sent again", flush=True)
        return False
    print(f"{name}: done. {where_to_look(run_folder, name)}", flush=True)
    return True


def where_to_look(run_folder: Path, name: str) -> str:
    """Tell where to look at what was sent, and what is left to do."""
    if name != "wandb":
        return f"To look at it: tensorboard --logdir {run_folder / 'tensorboard'}"
    state = json.loads((run_folder / "tracking" / "wandb.json").read_text())
    if state.get("url"):
        return f"To look at it: {state['url']}"
    written = sorted((run_folder / "tracking" / "wandb").glob(f"offline-run-*-{state['id']}"))
    folders = " ".join(map(str, written)) or str(run_folder / "tracking" / "wandb")
    why = "WANDB_MODE says so" if os.environ.get("WANDB_MODE") else "no key was found (`wandb login`)"
    return f"It was written offline, as {why}. Where there is a network: wandb sync {folders}"


def missing_packages(to: Sequence[str]) -> None:
    """Raise `ConfigError` where a tracker is unknown or its package is not installed: before a run, not within it."""
    if unknown := [name for name in to if name not in PACKAGES]:
        raise ConfigError(f"no tracker is called {', '.join(unknown)}; known are {', '.join(PACKAGES)}")
    missing = [name for name in to if importlib.util.find_spec(PACKAGES[name]) is None]
    if missing:
        raise ConfigError(f"tracking.to names {', '.join(missing)}, which is not installed here: pip install 'pipelinerl[track]'")


def command(run_folder: Path, name: str, *, once: bool = False) -> list[str]:
    """The tracker's command line."""
    return [
        sys.executable,
        "-m",
        "pipelinerl.observe.tracking",
        "--run-folder",
        str(run_folder),
        "--to",
        name,
        *(["--once"] if once else []),
    ]
