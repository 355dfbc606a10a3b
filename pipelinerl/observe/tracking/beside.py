"""Starts a run's trackers beside it and, when it has ended, gives them time to hand on the rest.

Nothing depends on a tracker: it may fail, hang or be killed, and the run goes on. At the end it gets `REST_S`; what it has not
handed on by then is in the journal, and `pipelinerl track RUN` sends it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.process import end_all, how_it_ended, note

REST_S = 30.0
"""For all trackers together, after the run. Longer keeps machines waiting for a network; shorter leaves more to `pipelinerl track`."""
PACKAGES = {"wandb": "wandb", "tensorboard": "tensorboard", "prometheus": "prometheus_client"}


@contextlib.contextmanager
def trackers(run_folder: Path, to: Sequence[str]) -> Iterator[None]:
    """Run the trackers named in `to` while the block runs. Each writes `<run>/logs/track-<name>.log`."""
    started = {name: _start(run_folder, name) for name in to}
    is_over = threading.Event()
    for name, process in started.items():
        threading.Thread(target=_reap, args=(run_folder, name, process, is_over), name=f"track-{name}", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
        for name, code in zip(started, end_all(started.values(), grace_s=REST_S), strict=True):
            if code:
                print(
                    f"{name} has not got everything (its log: {run_folder / 'logs' / f'track-{name}.log'}); pipelinerl track {run_folder}"
                )


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


def _reap(run_folder: Path, name: str, process: subprocess.Popen[bytes], is_over: threading.Event) -> None:
    """Wait for a tracker's end, which leaves no zombie then; where the run goes on without it, say so at once."""
    code = process.wait()
    if is_over.is_set():
        return
    goes_on = f"the run goes on without it, and `pipelinerl track {run_folder}` sends what it lacks"
    line = f"the tracker {name} {how_it_ended(code)}: {goes_on}"
    print(line, file=sys.stderr, flush=True)
    note(run_folder, line)


def _start(run_folder: Path, name: str) -> subprocess.Popen[bytes]:
    (run_folder / "logs").mkdir(exist_ok=True)
    with open(run_folder / "logs" / f"track-{name}.log", "ab") as log:
        return subprocess.Popen(command(run_folder, name), stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
