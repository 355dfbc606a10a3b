"""Starts a run's trackers beside it and, when it has ended, gives them time to hand on the rest.

A tracker belongs to nobody's fate: it may fail, hang or be killed, and the run goes on. At the end it gets `REST_S`; what it has not
handed on by then is in the journal, and `pipelinerl track RUN` sends it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelinerl.errors import ConfigError

REST_S = 30.0
"""For all trackers together, after the run. Longer keeps machines waiting for a network; shorter leaves more to `pipelinerl track`."""
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "prometheus": "prometheus_client"}


@contextlib.contextmanager
def trackers(run_folder: Path, to: Sequence[str]) -> Iterator[None]:
    """Run the trackers named in `to` while the block runs. Each writes `<run>/logs/track-<name>.log`."""
    started = {name: _start(run_folder, name) for name in to}
    try:
        yield
    finally:
        for process in started.values():
            process.terminate()
        end = time.monotonic() + REST_S
        for name, process in started.items():
            try:
                code = process.wait(timeout=max(0.1, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                code = process.wait()
            if code:
                print(
                    f"{name} has not got everything (its log: {run_folder / 'logs' / f'track-{name}.log'}); pipelinerl track {run_folder}"
                )


def track(run_folder: Path, to: Sequence[str]) -> bool:
    """Send everything the trackers named in `to` lack, and return whether all of it went."""
    missing_packages(to)
    return all([subprocess.call(command(run_folder, name, once=True)) == 0 for name in to])


def missing_packages(to: Sequence[str]) -> None:
    """Raise `ConfigError` where a tracker is unknown or its package is not installed: before a run, not within it."""
    if unknown := [name for name in to if name not in PACKAGES]:
        raise ConfigError(f"no tracker is called {', '.join(unknown)}; known are {', '.join(PACKAGES)}")
    missing = [name for name in to if importlib.util.find_spec(PACKAGES[name]) is None]
    if missing:
        raise ConfigError(f"tracking.to names {', '.join(missing)}, which is not installed here: pip install 'pipelinerl[track]'")


def command(run_folder: Path, name: str, *, once: bool = False) -> list[str]:
    """The tracker's command line."""
    return [sys.executable, "-m", "pipelinerl.tracking", "--run-folder", str(run_folder), "--to", name, *(["--once"] if once else [])]


def _start(run_folder: Path, name: str) -> subprocess.Popen[bytes]:
    (run_folder / "logs").mkdir(exist_ok=True)
    with open(run_folder / "logs" / f"track-{name}.log", "ab") as log:
        return subprocess.Popen(command(run_folder, name), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
