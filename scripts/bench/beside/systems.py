"""The systems that are compared: how each is started on a task, and what its run left."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scripts.bench.beside.memory import peak_of
from scripts.bench.demo_runs import lines_of

HERE = Path(__file__).parent
ROOT = HERE.parents[2]
OURS = {"sync": "sync", "one step off": "one_step_off", "streaming": "streaming"}
"""`pipeline.mode` of ours."""
LIMIT_S = 540.0
"""Of one run, start and end included."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is learnt, from which model, and how much of it: the same for all systems."""

    module: str
    model: Path
    steps: int
    groups_per_step: int
    max_tokens: int
    """Of a completion."""
    context: int
    learning_rate: float
    group_size: int = 8


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """One step of a run."""

    seconds: float
    """Since the command was given."""
    reward: float
    """Mean of the samples that it trained on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """What a run left."""

    began_s: float
    """When it began to sample, seconds since the command."""
    steps: Sequence[Step]
    lengths: Sequence[int]
    """Sampled tokens of what it trained on, ends included."""
    peak_mib: float
    parts: dict[str, float]
    """Where the time went: parts of it, from the first step to the last."""


def run(system: str, task: Task, *, seed: int, folder: Path, trl_python: Path | None) -> Run:
    """Run a system from its command to its end. Raises `RuntimeError` with the end of its log where it fails or takes too long."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if system in OURS:
        command, read = ours(OURS[system], task, seed=seed, folder=folder), _read_ours
    else:
        python = trl_python if system == "TRL" else Path(sys.executable)
        command, read = _theirs(python, SCRIPTS[system], task, seed=seed, folder=folder), _read_theirs
    began = time.time()
    peak_mib = call(command, folder / "log")
    return read(folder, began, peak_mib)


SCRIPTS = {"TRL": "trl_grpo.py", "plain loop": "plain_loop.py"}


def lines_written(system: str) -> int:
    """Lines that a user writes, without blank ones, comments and docstrings. Prompts, reward and model are not counted."""
    text = (HERE / SCRIPTS.get(system, "ours.toml")).read_text()
    if system in OURS:
        text = text.partition("[sft]")[0]  # the warm start is nobody's
    text = re.sub(r'^\s*""".*?"""$', "", text, flags=re.DOTALL | re.MULTILINE)
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in text.splitlines())


def call(command: Sequence[str], log: Path) -> float:
    """Run a command in a session of its own, and return the peak of its tree's memory, MiB."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    with log.open("w") as file:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=file, stderr=file, start_new_session=True)
        with peak_of(process.pid) as peak:
            try:
                code = process.wait(LIMIT_S)
            except BaseException as error:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                process.wait()
                if not isinstance(error, subprocess.TimeoutExpired):
                    raise
                code = f"stopped after {LIMIT_S:.0f} s"
    if code:
        raise RuntimeError(f"{' '.join(command)}: {code}; the end of {log}:\n{log.read_text()[-3000:]}")
    return peak.mib


# --- ours ----------------------------------------------------------------------------------------------------------------------------


def ours(mode: str, task: Task, *, seed: int, folder: Path) -> list[str]:
    """Return the command of this project's run of a task."""
    settings = {
        "run.folder": str(folder),
        "run.name": "run",
        "run.seed": seed,
        "model.path": str(task.model),
        "model.max_tokens": task.context,
        "data.source": f"{task.module}:train_prompts",
        "reward": f'[{{function="{task.module}:reward"}}]',
        "rollout.group_size": task.group_size,
        "rollout.max_tokens": task.max_tokens,
        "batch.groups_per_step": task.groups_per_step,
        "pipeline.mode": mode,
        "trainer.steps": task.steps,
        "trainer.learning_rate": task.learning_rate,
    }
    told = [f"{key}={json.dumps(value) if key != 'reward' else value}" for key, value in settings.items()]
    return [sys.executable, "-m", "pipelinerl", "run", str(HERE / "ours.toml"), *told]


def _read_ours(folder: Path, began: float, peak_mib: float) -> Run:
    (run_folder,) = folder.glob("run-2*")
    lines = lines_of(run_folder)
    with contextlib.closing(sqlite3.connect(f"file:{run_folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        lengths = [row[0] for row in ledger.execute("SELECT num_tokens FROM ended_rollouts WHERE status = 'trained'")]
    steps = lines["step"]
    return Run(
        began_s=min(line["start"] for line in lines["span"] if line["process"].startswith("engine")) - began,
        steps=[Step(seconds=line["t"] - began, reward=line["reward_mean"]) for line in steps],
        lengths=lengths,
        peak_mib=peak_mib,
        parts=_parts(lines),
    )


def _parts(lines: dict[str, list[dict[str, Any]]]) -> dict[str, float]:
    """What the engine and the trainer did between the first step and the last."""
    steps = lines["step"]
    seconds = steps[-1]["t"] - steps[0]["t"]
    spent = {name: sum(line["trainer"].get(f"{name}_s", 0.0) for line in steps[1:]) for name in ("wait", "forward_backward", "optimizer")}
    loads = [line for line in lines["load"] if "num_steps" in line and steps[0]["t"] <= line["t"] <= steps[-1]["t"] + 1.0]
    parts = {f"trainer: {name}": part / seconds for name, part in spent.items()}
    if len(loads) > 1:
        first, last = loads[0], loads[-1]
        within = last["t"] - first["t"]
        parts["engine: busy"] = (last["busy_s"] - first["busy_s"]) / within
        parts["engine: sequences a pass"] = (last["num_tokens"] - first["num_tokens"]) / max(1, last["num_steps"] - first["num_steps"])
    return parts


# --- theirs --------------------------------------------------------------------------------------------------------------------------


def _theirs(python: Path | None, script: str, task: Task, *, seed: int, folder: Path) -> list[str]:
    told = dataclasses.asdict(task) | {"seed": seed, "task": task.module, "folder": str(folder / "out"), "batch_tokens": 4096}
    (folder / "told.json").write_text(json.dumps(told | {"journal": str(folder / "steps.jsonl")}, default=str))
    return [str(python), str(HERE / script), str(folder / "told.json")]


def _read_theirs(folder: Path, began: float, peak_mib: float) -> Run:
    first, *others = sorted(folder.glob("steps.jsonl*"))
    by_rank = [[json.loads(line) for line in path.read_text().splitlines()] for path in (first, *others)]
    whole = [_joined(lines) for lines in zip(*by_rank, strict=True)]
    seconds = whole[-1]["t"] - whole[0]["t"]
    return Run(
        began_s=whole[0]["t"] - sum(whole[0]["parts"].values()) - began,
        steps=[Step(seconds=line["t"] - began, reward=line["reward_mean"]) for line in whole],
        lengths=[length for line in whole for length in line["lengths"]],
        peak_mib=peak_mib,
        parts={name: sum(line["parts"][name] for line in whole[1:]) / seconds for name in whole[0]["parts"]},
    )


def _joined(lines: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """One step of all ranks, which have samples in equal parts."""
    lengths = [length for line in lines for length in line["lengths"]]
    return {**lines[0], "reward_mean": sum(line["reward_mean"] for line in lines) / len(lines), "lengths": lengths}
