"""`python -m pipelinerl.launch.gpu_checks.whole_runs run|resume`: whole runs of the demo on this machine, short ones; figures as JSON.

The demo's model is untrained and its rewards are near 0: it is checked that everything works together, not that anything is learned.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelinerl.demo.sort_digits import make_model
from pipelinerl.observe.fold.rows import StepRow, row_of
from pipelinerl.observe.lines import read_journal
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.runtime.process import ancestors

NUM_STEPS = 4
KILLED_AFTER = 2
"""Steps, after which the trainer is killed."""
DEADLINE_S = 500.0
"""For one run, or until it is where its trainer is killed; below the deadlines of the table, so that it is this that says why."""
GAPS = {"gap_mean": "logprob_gap_mean", "gap_p999": "logprob_gap_p999", "gap_max": "logprob_gap_max"}
"""Keys in the trainer's metrics, by what they are called here. Steps with tokens of their own version have them, the quantile if enough."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m pipelinerl.launch.gpu_checks.whole_runs", description=__doc__)
    parser.add_argument("what", choices=("run", "resume"))
    what = parser.parse_args().what
    unseen = [] if usable_gpus() else ["any GPU: engine and trainer ran on the CPU, policies went through shared memory"]
    with tempfile.TemporaryDirectory(prefix="gpu-checks-", ignore_cleanup_errors=True) as folder:
        print(json.dumps((_run if what == "run" else _resume)(Path(folder)) | {"unseen": unseen}))


def _run(folder: Path) -> dict[str, Any]:
    """A run of the demo: its seconds, and by how much engine and trainer differ in the worst of its steps."""
    started = time.monotonic()
    if error := _error_of(_command(folder)):
        raise SystemExit(error)
    steps = _steps(folder)
    if not any(GAPS["gap_mean"] in step.trainer for step in steps):
        raise SystemExit(f"the run ended well, and its journal tells of no gap between engine and trainer in {len(steps)} steps")
    return {
        "seconds": time.monotonic() - started,
        "num_steps": len(steps),
        "where": ", ".join(gpu.name for gpu in usable_gpus()) or "CPUs",
        **{name: max((step.trainer[key] for step in steps if key in step.trainer), default=None) for name, key in GAPS.items()},
    }


def _resume(folder: Path) -> dict[str, Any]:
    """The same, its trainer killed: how far it comes, by itself or with `--resume`."""
    with _started(_command(folder)) as process:
        end = time.monotonic() + DEADLINE_S
        while (killed_at := len(_steps(folder))) < KILLED_AFTER:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"the run ended, or {DEADLINE_S:g} s passed, before step {KILLED_AFTER}: {_first_failure(folder)}")
            time.sleep(0.1)
        trainers = _trainers(process.pid)
        if not trainers:
            raise SystemExit(f"no process of the trainer is there to be killed after step {killed_at}")
        for trainer in trainers:
            with contextlib.suppress(ProcessLookupError):
                os.kill(trainer, signal.SIGKILL)
        code = process.wait(DEADLINE_S)
    error = _error_of((*_command(folder), "--resume")) if code else ""
    return {
        "killed_at": killed_at,
        "num_steps": len(_steps(folder)),
        "num_wanted": NUM_STEPS,
        "went_on_by_itself": not code,
        "error": error,
    }


def _command(folder: Path) -> tuple[str, ...]:
    model = folder / "model"
    if not model.exists():
        make_model(model, seed=0)
    shares = ("engine.shares_gpus=true", f"engine.kv_cache_bytes={1 << 30}") if len(usable_gpus()) == 1 else ()
    settings = (f'run.folder="{folder}/runs"', f'model.path="{model}"', f"trainer.steps={NUM_STEPS}", "evaluation.every=0", *shares)
    demo = Path(__file__).parents[2] / "demo" / "demo.toml"
    return sys.executable, "-m", "pipelinerl", "run", str(demo), *settings


@contextlib.contextmanager
def _started(command: tuple[str, ...]) -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.terminate()


def _error_of(command: tuple[str, ...]) -> str:
    """Run to the end; the run's own words where that is not a good one, else nothing."""
    with _started(command) as process:
        _, complained = process.communicate(timeout=DEADLINE_S)
    if not process.returncode:
        return ""
    return complained.decode(errors="replace").strip() or f"the run ended with {process.returncode}"


def _steps(folder: Path) -> list[StepRow]:
    """The steps that were trained, each once, in order."""
    found: dict[float, StepRow] = {}
    for path in sorted(folder.glob("runs/*/journal/orchestrator.jsonl")):
        found |= {row.step: row for line in read_journal(path) if isinstance(row := row_of(line), StepRow)}
    return [found[number] for number in sorted(found)]


def _trainers(launcher: int) -> list[int]:
    """Processes of the trainer that descend from a launcher, `torchrun` among them."""
    found = []
    for path in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if path.name.isdecimal() and b"\0trainer" in path.joinpath("cmdline").read_bytes() and launcher in ancestors(int(path.name)):
                found.append(int(path.name))
    return found


def _first_failure(folder: Path) -> str:
    for path in sorted(folder.glob("runs/*/failures/*.json")):
        return json.loads(path.read_text())["error"]
    return "no process wrote why"


if __name__ == "__main__":
    main()
