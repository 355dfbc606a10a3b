"""The run's parts of `real`: from the command to the first trained step, process by process, and how long the engine idles."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.observe.fold.rows import StartUpRow, StepRow
from pipelinerl.observe.report.reading import Tables, read_tables
from scripts.bench.demo_runs import lines_of

LOOK_EVERY_S = 0.1
T = TypeVar("T")


def prompts() -> Iterator[dict[str, str]]:
    """Prompts of the run: short, each another."""
    number = 0
    while True:
        number += 1
        yield {"prompt": f"{number:06d}"}


def reward(completion: str) -> float:
    """Some siblings get it, some do not."""
    return float(len(completion) % 2)


def settings(folder: Path, model: Path, *, num_steps: int, max_running: int = 32) -> Path:
    """Write the run of a 135 M model on two cores. With few sequences at once the engine is the limit, else the trainer."""
    module = Path(__file__).resolve()
    path = folder / "real.toml"
    path.write_text(
        f"""
[run]
name = "real"
folder = "{folder}"
[model]
path = "{model}"
dtype = "float32"
max_tokens = 256
[data]
source = "{module}:prompts"
[rollout]
group_size = 8
max_tokens = 16
[[reward]]
function = "{module}:reward"
[engine]
max_running = {max_running}
cores = [0]
[batch]
groups_per_step = 2
max_tokens = 1024
[pipeline]
max_staleness = 4
[trainer]
steps = {num_steps}
learning_rate = 1e-5
cores = [1]
"""
    )
    return path


def prepare_demo(folder: str) -> str:
    """Make the demo's model and settings, and return the path of these."""
    path = demo_config(folder=Path(folder), seed=0)
    make_demo_model(Path(folder) / "demo-model", seed=0)
    return str(path)


def command_of_run(path: Path) -> list[str]:
    return [str(Path(sys.executable).with_name("pipelinerl")), "run", str(path)]


def command_of_demo(folder: Path, *, warm_start_steps: int) -> list[str]:
    program = str(Path(sys.executable).with_name("pipelinerl"))
    return [program, "demo", "--folder", str(folder / "demo"), f"sft.steps={warm_start_steps}"]


def start(command: list[str], *, folder: Path, deadline_s: float) -> dict[str, Any]:
    """Run a command until its first step is trained, then end it: seconds to that step, and the parts of the start.

    They count from where the launcher's do: the command's begin, or, of the demo, the end of its warm start.
    """

    def look(tables: Tables) -> dict[str, Any] | None:
        if not tables.steps or not tables.start_up:
            return None
        began = min(row.start for row in tables.start_up if row.process == "launcher")
        return {"first_step_s": tables.steps[0].t - began, "processes": [*_timeline(tables.start_up, began), *_last(tables, began)]}

    return _until(look, command, folder=folder, deadline_s=deadline_s)


def idle(command: list[str], *, folder: Path, steps: range, deadline_s: float) -> dict[str, float]:
    """Run a command through these steps, then end it: the parts of that time in which engine and trainer had nothing to do."""

    def look(tables: Tables) -> dict[str, float] | None:
        by_number = {row.step: row for row in tables.steps}
        if steps[-1] not in by_number:
            return None
        return _idle(lines_of(tables.folder), by_number[steps[0]], by_number[steps[-1]])

    return _until(look, command, folder=folder, deadline_s=deadline_s)


def _idle(lines: Mapping[str, list[dict[str, Any]]], first: StepRow, last: StepRow) -> dict[str, float]:
    loads = [line for line in lines["load"] if line["process"] == "engine-0" and first.t <= line["t"] <= last.t]
    took_s = loads[-1]["t"] - loads[0]["t"]
    waits = [line for line in lines["span"] if line["process"] == "trainer-0" and line["name"] == "wait"]
    waited_s = sum(max(0.0, min(line["end"], last.t) - max(line["start"], first.t)) for line in waits)
    return {
        "engine without a sequence": (loads[-1]["idle_s"] - loads[0]["idle_s"]) / took_s,
        "trainer without a row": waited_s / (last.t - first.t),
    }


def _timeline(rows: tuple[StartUpRow, ...], began: float) -> list[dict[str, Any]]:
    return [{"what": f"{row.process} {row.what}", "from s": row.start - began, "seconds": row.end - row.start} for row in rows]


def _last(tables: Tables, began: float) -> list[dict[str, Any]]:
    end, first = max(row.end for row in tables.start_up), tables.steps[0].t
    return [{"what": "first step: generated, scored and trained", "from s": end - began, "seconds": first - end}]


def _until(look: Callable[[Tables], T | None], command: list[str], *, folder: Path, deadline_s: float) -> T:
    """Run a command until `look` finds in the run's journals what it looks for, then end it, and return that."""
    known = set(folder.glob("**/journal"))
    began = time.monotonic()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    try:
        while time.monotonic() < began + deadline_s and child.poll() is None:
            for journal in set(folder.glob("**/journal")) - known:
                if _has_step(journal) and (found := look(read_tables(journal.parent))) is not None:
                    return found
            time.sleep(LOOK_EVERY_S)
    finally:
        for _ in range(2):  # asked once it saves, asked twice it ends all
            with contextlib.suppress(ProcessLookupError):
                os.kill(child.pid, signal.SIGINT)
            time.sleep(0.5)
        _, told = child.communicate()
    raise SystemExit(f"{' '.join(command)} did not come far enough within {deadline_s:g} s: {told[-2000:]}")


def _has_step(journal: Path) -> bool:
    path = journal / "orchestrator.jsonl"
    return path.exists() and b'"kind": "step"' in path.read_bytes()
