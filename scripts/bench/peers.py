#!/usr/bin/env python
"""How does this project compare with what a user would take instead? Side by side: same cores, model, task, batch, learning rate.

Systems: TRL's GRPOTrainer with transformers' generation, in an environment of its own that the bench makes; a plain synchronous loop over
vLLM and transformers, both on every core in turns (`beside/plain_loop.py`); and this project's three modes, engine and trainer on a core
each. TRL's asynchronous trainer cannot run here: it sends weights to a vLLM server by NCCL alone, which needs CUDA devices.

Tasks: `long tail`, answers of 4 to 200 tokens whose lengths are the prompts' (`beside/countdown.py`), and `demo`, uniform answers of 7
tokens, the kindest to a loop that waits for its longest sequence. All systems start from one warm-started model and draw the same prompts.

Seconds run from the command to the step's end, start-up included; samples/s from the first token sampled to the last step's end, so that
no pipeline's head start counts as speed. `area` is the mean reward over all samples of a run. Memory is the peak of the process tree,
shared pages counted once. Lines are those that a user writes, without prompts and reward. Runs are made seed by seed, every system in turn,
and each is a file: call again where it was interrupted (`--budget-s`). A full run takes about 40 minutes.
"""

from __future__ import annotations

import functools
import itertools
import os
import shutil
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from scripts.bench import harness
from scripts.bench.beside import countdown, page, systems
from scripts.bench.beside.systems import Run, Task
from scripts.bench.beside.trl_environment import trl_python
from scripts.bench.demo_runs import prepare, program, warm_start
from scripts.bench.figure import write_lines
from scripts.bench.pieces import BUDGET, Pieces

Key = tuple[str, str, int]
"""Task, system, seed."""
Made = dict[Key, dict[str, Any]]
"""The figures of runs."""
FOLDER = Path("runs/bench-peers")
SYSTEMS = ("TRL", "plain loop", "sync", "one step off", "streaming")
SYNCHRONOUS = ("plain loop", "sync")
SEEDS = (0, 1, 2)
REACHED = (0.7, 0.8, 0.9)
"""Mean rewards of five steps that runs are timed to."""
WARM_STEPS, QUICK_WARM_STEPS = 400, 30
LONG_TAIL, DEMO = "long tail", "demo"


def measure(arguments: Any) -> harness.Measured | None:
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("peers needs two cores: one for an engine, one for a trainer")
    quick: bool = arguments.quick
    folder = FOLDER / ("quick" if quick else "full")
    if arguments.again or quick:
        shutil.rmtree(folder, ignore_errors=True)
    python, reason = _trl(quick=quick)
    chosen = [system for system in (("TRL", "plain loop", "streaming") if quick else SYSTEMS) if python or system != "TRL"]
    of_tasks, seeds = ([LONG_TAIL], SEEDS[:1]) if quick else ([LONG_TAIL, DEMO], SEEDS)
    wanted: list[Key] = [(task, system, seed) for task in of_tasks for seed in seeds for system in chosen]
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    pieces = Pieces(folder / "figures", wanted, budget_s=arguments.budget_s)
    tasks = functools.cache(functools.partial(task_of, folder=folder, quick=quick))
    while (missing := pieces.missing) and pieces.may_start:
        task, system, seed = key = missing[0]
        print(f"peers: {task}, {system}, seed {seed}; {len(missing)} runs left", flush=True)
        start = functools.partial(
            systems.run, system, tasks(task), seed=seed, folder=folder / "runs" / "-".join(map(str, key)), trl_python=python
        )
        turns = harness.in_turns(1, {"run": start})
        pieces.keep(key, _figures(turns["run"][0]) | {"speeds": turns.speeds.values})
    made = pieces.made
    found = _table(made)
    found.notes += [reason] if reason else []
    if missing:
        harness.show("peers, so far", found)
        print(f"peers: {len(made)} of {len(wanted)} runs made; call again for the others", flush=True)
        return None
    found.curves = _curves(made)
    if quick:
        found.goals.append(harness.at_least("systems that trained", len({system for _, system, _ in made}), len(chosen)))
    else:
        found.goals += _goals(made)
    return found


def _publish(record: dict[str, Any]) -> None:
    """Draw what the results page shows, and write its part of the page, from what is stored."""
    if not record["options"]["quick"]:
        draw(record["curves"], harness.RESULTS)
        page.write(record)


# --- tasks ---------------------------------------------------------------------------------------------------------------------------


def _trl(*, quick: bool) -> tuple[Path | None, str]:
    """TRL's interpreter, or why there is none. A quick run does not wait for an installation."""
    environment = FOLDER / "trl"
    if quick and not (environment / "ready").exists():
        return None, "TRL was left out: its environment is not there yet; a full run makes it"
    python, why = trl_python(environment)
    return python, f"TRL was left out: {why}" if why else ""


def task_of(name: str, *, folder: Path = FOLDER / "full", quick: bool = False) -> Task:
    """Return a task of this bench, with its model warm-started where it was not yet."""
    return _long_tail(folder, quick=quick) if name == LONG_TAIL else _demo(folder)


def _long_tail(folder: Path, *, quick: bool) -> Task:
    home = folder / "long-tail"
    if not (home / "warm").exists():
        shutil.rmtree(home, ignore_errors=True)
        countdown.make_model(home / "fresh", 0)
        settings = {"model.path": home / "fresh", "sft.output": home / "unfinished"}
        told = [f'{key}="{value}"' for key, value in settings.items()]
        steps = QUICK_WARM_STEPS if quick else WARM_STEPS
        program("trainer.sft", str(systems.HERE / "ours.toml"), *told, f"sft.steps={steps}", "trainer.cores=[]")
        (home / "unfinished").rename(home / "warm")
    return Task(
        module="scripts.bench.beside.countdown",
        model=home / "warm",
        steps=4 if quick else 52,
        groups_per_step=8,
        max_tokens=countdown.LONGEST + 8,
        context=countdown.MAX_TOKENS,
        learning_rate=1.2e-4,
    )


def _demo(folder: Path) -> Task:
    home = folder / "demo"
    if not (home / "ready").exists():
        warm_start(prepare(home))
        (home / "ready").touch()
    return Task(
        module="pipelinerl.demo.sort_digits",
        model=home / "demo-model-sft",
        steps=60,
        groups_per_step=32,
        max_tokens=8,
        context=32,
        learning_rate=2e-4,
    )


# --- figures -------------------------------------------------------------------------------------------------------------------------


def _figures(run: Run) -> dict[str, Any]:
    """What is kept of a run."""
    rewards = [step.reward for step in run.steps]
    smooth = [statistics.fmean(rewards[max(0, at - 4) : at + 1]) for at in range(len(rewards))]
    first, last = run.steps[0].seconds, run.steps[-1].seconds
    per_step = len(run.lengths) / len(run.steps)
    return {
        "first_step_s": first,
        "reached_s": {
            str(goal): next((step.seconds for step, mean in zip(run.steps, smooth, strict=True) if mean >= goal), None) for goal in REACHED
        },
        "samples_per_s": len(run.lengths) / (last - run.began_s),
        "area": statistics.fmean(rewards),
        "last": smooth[-1],
        "peak_mib": run.peak_mib,
        "lengths": np.percentile(run.lengths, [50, 90, 100]).tolist(),
        "length_mean": statistics.fmean(run.lengths),
        "parts": run.parts,
        "curve": [[step.seconds, per_step * (at + 1), mean] for at, (step, mean) in enumerate(zip(run.steps, smooth, strict=True))],
    }


def _table(made: Made) -> harness.Measured:
    rows, notes = [], []
    for task, system in dict.fromkeys((task, system) for task, system, _ in made):
        runs = [run for (its_task, its_system, _), run in made.items() if (its_task, its_system) == (task, system)]
        means = {
            name: statistics.fmean(run[name] for run in runs) for name in ("first_step_s", "samples_per_s", "area", "last", "peak_mib")
        }
        lengths = [statistics.fmean(run["lengths"][at] for run in runs) for at in range(3)]
        rows.append(
            {
                "task": task,
                "system": system,
                "first step s": means["first_step_s"],
                **{f"s to {goal}": _each([run["reached_s"][str(goal)] for run in runs]) for goal in REACHED},
                "samples/s": means["samples_per_s"],
                "area": means["area"],
                "last": means["last"],
                "MiB": means["peak_mib"],
                "lines": systems.lines_written(system),
                "tokens: mean": statistics.fmean(run["length_mean"] for run in runs),
                "p50, p90, most": ", ".join(f"{length:.0f}" for length in lengths),
            }
        )
        parts = {name: statistics.fmean(run["parts"][name] for run in runs) for name in runs[0]["parts"]}
        notes.append(f"{task}, {system}: " + ", ".join(f"{name} {part:.2f}" for name, part in parts.items()))
    return harness.Measured(rows=rows, notes=[*notes, "parts are of the time between the first step's end and the last one's"])


def _each(values: list[float | None]) -> str:
    """One for each seed, as text."""
    return " / ".join("never" if value is None else f"{value:.0f}" for value in values)


def _curves(made: Made) -> dict[str, Any]:
    """Seconds, samples and reward of every run of the first seed, by task and system."""
    curves: dict[str, Any] = {}
    for (task, system, seed), run in made.items():
        if seed == SEEDS[0]:
            curves.setdefault(task, {})[system] = [[round(value, 4) for value in point] for point in run["curve"]]
    return curves


def draw(curves: Mapping[str, Mapping[str, list[list[float]]]], folder: Path) -> None:
    """Write the figures of the results page: reward over seconds and over samples, of each task."""
    for task, by_system in curves.items():
        for at, name, unit in ((0, "seconds", "seconds since the command, start-up included"), (1, "samples", "samples trained")):
            write_lines(
                folder / f"peers-{task.replace(' ', '-')}-{name}.svg",
                {system: [(point[at], point[2]) for point in points] for system, points in by_system.items()},
                label=f"Mean reward over {name}, {task}",
                x_label=unit,
                y_label="mean reward of five steps",
            )


# --- goals ---------------------------------------------------------------------------------------------------------------------------


def _goals(made: Made) -> Iterator[harness.Goal]:
    """Of the long tail; the demo, whose answers are all of one length, is shown beside it and promised nothing."""
    present = {system for _, system, _ in made}
    rate: Callable[[dict[str, Any]], float] = lambda run: run["samples_per_s"]  # noqa: E731
    pace: Callable[[dict[str, Any]], float] = lambda run: 1.0 / (run["reached_s"]["0.9"] or float("inf"))  # noqa: E731
    others = [(other, 2.0) for other in SYNCHRONOUS] + ([("TRL", 5.0)] if "TRL" in present else [])
    for (other, goal), (name, figure) in itertools.product(others, (("samples/s", rate), ("pace to reward 0.9", pace))):
        value, speeds = _over(made, figure, other)
        yield harness.at_least(f"streaming over {other}, {name}", value, goal, work=harness.Work.CPU, speeds=speeds)
    if "TRL" in present:
        value, speeds = _over(made, lambda run: run["first_step_s"], "TRL")
        yield harness.at_most("start to first step over TRL's", value, 1.0, work=harness.Work.CPU, speeds=speeds)
    area = {system: statistics.fmean(made[LONG_TAIL, system, seed]["area"] for seed in SEEDS) for system in present}
    best = max(area[system] for system in present & {*SYNCHRONOUS, "TRL"})
    yield harness.at_least("reward per sample, area, over the best synchronous system's", area["streaming"] / best, 0.97)


def _over(made: Made, figure: Callable[[dict[str, Any]], float], other: str) -> tuple[float, harness.Speeds]:
    """The median over the seeds of streaming's figure over another system's, and the machine in the seed in the middle by drift."""
    ratios, speeds = [], []
    for seed in SEEDS:
        runs = made[LONG_TAIL, "streaming", seed], made[LONG_TAIL, other, seed]
        ours, theirs = map(figure, runs)
        ratios.append(ours / theirs if theirs else float("inf") if ours else 0.0)  # a reward that is never reached has no pace
        speeds.append(harness.Speeds(tuple(speed for run in runs for speed in run["speeds"])))
    return statistics.median(ratios), sorted(speeds, key=lambda one: one.drift)[len(speeds) // 2]


if __name__ == "__main__":
    again = {"--again": {"action": "store_true", "help": "forget the runs made before"}}
    harness.run("peers", measure, options={**BUDGET, **again}, then=_publish)
