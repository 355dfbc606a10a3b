#!/usr/bin/env python
"""What does it cost to write the built-in loop as a script? `pipelinerl run` and `examples/scripts/streaming.py`, in turns.

`--part orchestrator` needs no engine: the orchestrator's processor time for each sample, among peers that answer at once in memory, in one
process. The rest is with real engines: both stream the demo from one warm-started model, with a core for the engine and one for the
trainer, by the same settings (`beside/ours.toml`). Speed is samples per second of the steady stretch, the script's over that of the run
beside it. That both train the same is seen in turns (`pipeline.mode = "sync"`), where what an engine samples follows from the seed alone
and no race decides what a step is made of: the rollouts of each step, with their rewards and lengths. `--quick` does this alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import gc
import runpy
import shutil
import sqlite3
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from orchestrator.controller import driven
from orchestrator.ledger.ledger import Ledger
from orchestrator.scripted_run import ScriptedRun
from pipelinerl.observe.report.comparison import per_second
from pipelinerl.observe.report.measures import measure as measures_of
from pipelinerl.observe.report.reading import read_tables
from scripts.bench import harness, peers
from scripts.bench.beside import systems
from scripts.bench.instant_peers import GROUP_SIZE, Meter, Peers, config_of, hubs_of, run_of

FOLDER = Path("runs/bench-scripted-loop")
SCRIPT = systems.ROOT / "examples" / "scripts" / "streaming.py"
WAYS = {"pipelinerl run": ["-m", "pipelinerl", "run"], "script": [str(SCRIPT)]}
STEPS, SAME_STEPS = 40, 3
TOKENS, GROUPS_PER_STEP, IN_FLIGHT = 30, 16, 380
"""Of the part without engines, about as in the demo's run with real ones."""


def measure(arguments: Any) -> harness.Measured:
    if arguments.part == "orchestrator":
        return _orchestrator(rounds=5 if arguments.quick else 15, steps=40 if arguments.quick else 80)
    shutil.rmtree(FOLDER, ignore_errors=True)
    same = {way: _steps_of(_run(way, f"trainer.steps={SAME_STEPS}", "pipeline.mode=sync", "pipeline.max_staleness=0")) for way in WAYS}
    num_same = sum(same["script"][step] == same["pipelinerl run"][step] for step in range(SAME_STEPS))
    found = harness.Measured(goals=[harness.at_least(f"first steps with the same rollouts, of {SAME_STEPS}", num_same, SAME_STEPS)])
    lines = sum(bool(line.strip()) for line in SCRIPT.read_text().splitlines())
    found.goals.append(harness.at_most("lines of the script, imports and main included", lines, 60))
    if not arguments.quick:
        rates = harness.in_turns(arguments.rounds, {way: functools.partial(_samples_per_s, way) for way in WAYS})
        found.rows = [{"way": way, "samples/s": " / ".join(f"{rate:.1f}" for rate in each)} for way, each in rates.items()]
        ratio = harness.median_ratio(rates["script"], rates["pipelinerl run"])
        found.goals.append(harness.at_least("samples/s over `pipelinerl run`", ratio, 0.98, work=harness.Work.CPU, speeds=rates.speeds))
    return found


# --- among peers that answer at once -----------------------------------------------------------------------------------------------


def _orchestrator(*, rounds: int, steps: int) -> harness.Measured:
    costs = harness.in_turns(rounds, {way: functools.partial(_cost_us, way, steps=steps) for way in WAYS})
    found = harness.Measured(rows=[_described(way, each) for way, each in costs.items()])
    ratio = harness.median_ratio(costs["script"], costs["pipelinerl run"])
    found.goals.append(
        harness.at_most("processor time a sample over the pipeline's", ratio, 1.05, work=harness.Work.CPU, speeds=costs.speeds)
    )
    return found


def _described(way: str, costs: list[float]) -> harness.Row:
    return {"way": way, "µs CPU a sample": statistics.median(costs), "each": " / ".join(f"{each:.0f}" for each in costs)}


def _cost_us(way: str, *, steps: int) -> float:
    """Microseconds of this process for each sample of a run, without those of its first and last steps."""
    config = config_of(num_engines=1, max_running=512, groups_per_step=GROUPS_PER_STEP, steps=steps, max_staleness=3, num_tokens=TOKENS)
    per_step = GROUPS_PER_STEP * GROUP_SIZE
    answering = Peers(num_engines=1, num_tokens=TOKENS, in_flight=IN_FLIGHT, steps=steps, num_rollouts=steps * per_step)
    gc.collect()  # what the run before has left is not this one's

    async def run() -> Meter:
        with contextlib.ExitStack() as opened:
            folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
            ledger = opened.enter_context(contextlib.closing(Ledger(folder / "ledger.sqlite")))
            journal = opened.enter_context(contextlib.closing(Meter(folder)))
            run = run_of(config, hubs_of(answering), journal, ledger, in_script=way == "script")
            if way == "script":
                asked = ScriptedRun(run, config=config, folder=folder, prompt_of=_none, decode=str, demonstration=_none)
                async with driven(run, asked, launcher=None):
                    await runpy.run_path(str(SCRIPT))["train"](asked)
            else:
                await run.run()
            assert run.result is not None
            assert run.result.rollouts.trained == steps * per_step, run.result
        return journal

    times = [cpu for _, cpu in asyncio.run(run()).steps]
    first, last = steps // 5, steps - 5
    return 1e6 * (times[last] - times[first]) / ((last - first) * per_step)


def _none(*row: Any, **where: Any) -> Any:
    raise AssertionError("the loop draws its prompts from their source")


# --- with real engines -------------------------------------------------------------------------------------------------------------


def _run(way: str, *changes: str) -> Path:
    """Run one of the two; return its run folder."""
    folder = FOLDER / f"{len(list(FOLDER.glob('*')))}"
    _, _, _, _, *settings = systems.ours("streaming", peers.task_of(peers.DEMO), seed=0, folder=folder)
    subprocess.run([sys.executable, *WAYS[way], *settings, "pipeline.max_staleness=3", *changes], check=True, stdout=subprocess.DEVNULL)
    (found,) = folder.glob("run-2*")
    return found


def _samples_per_s(way: str) -> float:
    tables = read_tables(_run(way, f"trainer.steps={STEPS}"))
    rate = per_second(tables, measures_of(tables))
    assert rate is not None, "every step was trained"
    return rate


def _steps_of(run_folder: Path) -> dict[int, set[tuple[Any, ...]]]:
    """Return what each step was made of: the rollouts' names, rewards and lengths."""
    steps: dict[int, set[tuple[Any, ...]]] = {}
    with contextlib.closing(sqlite3.connect(f"file:{run_folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        for step, *rollout in ledger.execute("SELECT step, rollout_id, reward, num_tokens FROM ended_rollouts WHERE status = 'trained'"):
            steps.setdefault(step, set()).add(tuple(rollout))
    return steps


if __name__ == "__main__":
    options = {
        "--part": {"choices": ["orchestrator"], "help": "the part without engines"},
        "--rounds": {"type": int, "default": 2, "help": "runs of each way with real engines"},
    }
    harness.run("scripted_loop", measure, options=options)
