"""The run's part of `real`: from the command to the first trained step, process by process, and how long the engine idles."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from scripts.bench.demo_runs import lines_of

LOOK_EVERY_S = 0.05
ROLES = {"orchestrator": "orchestrator", "pipelinerl.engine": "engines", "pipelinerl.rewards": "scorer-0", "trainer": "trainer"}
"""Names of processes, by the module that Python is told to run."""
READY = {
    "engines": ("engine-0", "choice"),
    "trainer": ("trainer-0", "span"),
    "scorer-0": ("scorer-0", "load"),
    "orchestrator": ("orchestrator", "run"),
}
"""The journal and the kind of the line that a process first writes when it is ready."""


def prompts() -> Iterator[dict[str, str]]:
    """Prompts of the run: short, each another."""
    number = 0
    while True:
        number += 1
        yield {"prompt": f"{number:06d}"}


def reward(completion: str) -> float:
    """Some siblings get it, some do not."""
    return float(len(completion) % 2)


def settings(folder: Path, model: Path, *, num_steps: int) -> Path:
    """Write the run of a 135 M model on two cores."""
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
max_running = 32
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


def start(command: list[str], *, folder: Path, deadline_s: float) -> dict[str, Any]:
    """Run a command until its first step is trained, then end it: seconds to that step, and the timeline of every process."""
    began = time.time()
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True)
    seen: dict[str, dict[str, float]] = {}
    try:
        while time.time() < began + deadline_s and child.poll() is None:
            _look(child.pid, seen, began=began)
            if first := _first_step(folder, began):
                return {"first_step_s": first[0] - began, "processes": _timeline(seen, first[1], began=began)}
            time.sleep(LOOK_EVERY_S)
    finally:
        if child.poll() is None:
            os.killpg(child.pid, signal.SIGINT)
            time.sleep(1.0)
        for process in [*psutil.Process(child.pid).children(recursive=True)] if child.poll() is None else []:
            process.kill()
        if child.poll() is None:
            child.kill()
        child.wait()
    raise SystemExit(
        f"no step was trained within {deadline_s:g} s by {' '.join(command)}: {child.stderr.read()[-2000:] if child.stderr else ''}"
    )


def command_of_run(path: Path) -> list[str]:
    return [str(Path(sys.executable).with_name("pipelinerl")), "run", str(path)]


def _look(parent: int, seen: dict[str, dict[str, float]], *, began: float) -> None:
    try:
        processes = [psutil.Process(parent), *psutil.Process(parent).children(recursive=True)]
    except psutil.Error:
        return
    for process in processes:
        try:
            line, used = process.cmdline(), process.cpu_times()
            name = _name(line, is_parent=process.pid == parent)
            if name == "engines" and process.parent() is not None and process.ppid() != parent:
                name = "engine-0 (forked)"
            known = seen.setdefault(f"{name}", {"began": process.create_time() - began, "cpu": 0.0})
            known["cpu"] = max(known["cpu"], used.user + used.system)
        except psutil.Error:
            continue


def _name(line: list[str], *, is_parent: bool) -> str:
    if is_parent:
        return "pipelinerl (launcher)"
    module = line[line.index("-m") + 1] if "-m" in line else line[-1] if line else "?"
    return ROLES.get(module, module)


def _first_step(folder: Path, began: float) -> tuple[float, Path] | None:
    """When the first step of a run begun since was booked, and its folder."""
    for journal in folder.glob("*/journal/orchestrator.jsonl"):
        if journal.stat().st_mtime < began:
            continue
        for text in journal.read_text().splitlines():
            if '"step"' in text and (line := _line(text)).get("kind") == "step" and line["t"] > began:
                return line["t"], journal.parents[1]
    return None


def _line(text: str) -> dict[str, Any]:
    try:
        return json.loads(text)
    except ValueError:
        return {}  # half written


def _timeline(seen: dict[str, dict[str, float]], run_folder: Path, *, began: float) -> list[dict[str, Any]]:
    lines = lines_of(run_folder)
    rows = []
    for name, known in sorted(seen.items(), key=lambda item: item[1]["began"]):
        process, kind = READY.get("engines" if name.startswith("engine") else name, ("", ""))
        ready = [line.get("start", line["t"]) for line in lines.get(kind, ()) if line.get("process") == process]
        rows.append({"process": name, "began s": known["began"], "ready s": min(ready) - began if ready else "", "cpu s": known["cpu"]})
    return rows
