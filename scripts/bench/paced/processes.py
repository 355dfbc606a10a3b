"""Whole runs in processes of their own, with an engine whose forward passes take a fixed time and rewards that take as long as asked."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sqlite3
import statistics
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from pipelinerl.config.file import load
from pipelinerl.launch.launcher import Launcher
from pipelinerl.launch.roles import Role, roles_of
from pipelinerl.launch.run_folder import make_run_folder
from scripts.bench import harness
from scripts.bench.demo_runs import lines_of, prepare
from scripts.bench.paced.engine import MEAN_TOKENS
from scripts.chaos import victims

PASS_S = 0.02
SLOTS = 16
SAMPLES_PER_STEP = 16
"""Few: a run is measured from its first step on, which is late where engines hold their slots until a reward is there."""
GROUP_SIZE = 4
GENERATION_S = MEAN_TOKENS * PASS_S
STALENESS = 40
WARM_S = 1.0
"""After the first step, before the figures begin."""
CONDITIONS = (
    f"processes: one engine of {SLOTS} slots, {PASS_S * 1e3:g} ms for a forward pass, {MEAN_TOKENS} tokens on average, steps of"
    f" {SAMPLES_PER_STEP} samples, staleness bound {STALENESS}; a worker process for each reward call under way"
)


def measure_all(found: harness.Measured, *, latencies: tuple[int, ...], seconds: float, goal: float) -> None:
    """Add the rows and goals of reward at once, inline and as a stage, at so many times the generation time."""
    alone = _measure(0.0, seconds=seconds)
    _add(found, "reward at once", 0.0, alone, alone=alone)
    for times in latencies:
        for name, is_inline in (("inline", True), ("stage", False)):
            _add(found, name, times, _measure(times * GENERATION_S, is_inline=is_inline, seconds=seconds), alone=alone)
        text = f"processes: engine tokens/s with a reward of {times}x as a stage over none"
        found.goals.append(harness.at_least(text, found.rows[-1]["of reward at once"], goal, work=harness.Work.CPU))


def _add(found: harness.Measured, name: str, times: float, figures: harness.Row, *, alone: harness.Row) -> None:
    head = {"what": "processes", "scoring": name, "reward / generation time": float(times)}
    speeds = {column: figures[column] for column in ("samples/s", "tokens/s")}
    ratio = figures["tokens/s"] / alone["tokens/s"]
    found.rows.append(head | speeds | {"of reward at once": ratio, "whole run": ""} | figures)


def _measure(latency_s: float, *, is_inline: bool = False, seconds: float) -> harness.Row:
    """The steady state of one run: idle is a part of the engine's slots, lag from a last token to its score, median."""
    call_s, hold_s = (0.0, latency_s) if is_inline else (latency_s, 0.0)
    overrides = [f"scorer.slots={max(2, round(1.6 * SLOTS / GENERATION_S * call_s))}", f"engine.max_running={SLOTS}"]
    overrides += [f"pipeline.max_running={SLOTS if is_inline else SLOTS * 5 // 4}"]
    with run_of(overrides, call_s=call_s, hold_s=hold_s, seconds=seconds) as run_folder:
        return _read(run_folder, seconds=seconds)


@contextlib.contextmanager
def run_of(
    overrides: Sequence[str],
    *,
    call_s: float = 0.0,
    hold_s: float = 0.0,
    seconds: float,
    further: Callable[[Path], Sequence[Role]] = lambda _: (),
) -> Iterator[Path]:
    """Have a run go on for some seconds after its first step; yield its folder. `further` are processes of the bench's own, beside it."""
    with tempfile.TemporaryDirectory() as folder:
        settings = prepare(Path(folder))
        plugins = Path(__file__).with_name("rewards.py")
        always = ["run.name=paced", "trainer.steps=100000", "evaluation.every=0", "checkpoint.every=100000"]
        always += [f"batch.groups_per_step={SAMPLES_PER_STEP // GROUP_SIZE}", f"rollout.group_size={GROUP_SIZE}"]
        always += [f'data.source="{plugins}:prompts"', f"rollout.max_tokens={2 * MEAN_TOKENS}", "model.max_tokens=104"]
        always += [f'reward=[{{function="{plugins}:reward", options={{seconds={call_s}}}}}]', f"pipeline.max_staleness={STALENESS}"]
        always += ['engine.kind="fake"', "engine.count=1", "engine.cores=[]", "trainer.cores=[]"]
        config = load(settings, overrides=[*always, *overrides])
        config = config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"source": None})})
        run_folder = make_run_folder(config)
        roles = (*(_role(role, run_folder, hold_s=hold_s) for role in roles_of(config, run_folder)), *further(run_folder))
        asyncio.run(_run(roles, run_folder, seconds=seconds))
        yield run_folder


def _role(role: Role, run_folder: Path, *, hold_s: float) -> Role:
    """Engine and trainer are those without a model."""
    run = ("--run-folder", str(run_folder))
    if role.name == "engines":
        command = (sys.executable, "-m", "scripts.bench.paced.engine", *run, "--pass-s", str(PASS_S), "--hold-s", str(hold_s))
        return Role(name=role.name, command=command, has_nothing_to_save=True)
    if role.name == "trainer":
        return Role(name=role.name, command=(sys.executable, "-m", "scripts.chaos.trainer", *run))
    return role


async def _run(roles: tuple[Role, ...], run_folder: Path, *, seconds: float) -> None:
    """Let the run go on for some seconds after its first step, and have it end."""
    launcher = Launcher(roles, run_folder, stopped_limit_s=30.0)
    running = asyncio.create_task(launcher.run())
    journal = run_folder / "journal" / "orchestrator.jsonl"
    async with asyncio.timeout(120):
        while not (journal.exists() and '"kind": "step"' in journal.read_text()):
            assert not running.done(), "the run ended before its first step"
            await asyncio.sleep(0.2)
    await asyncio.wait({running}, timeout=WARM_S + seconds + 1.0)
    for process_id in victims.find("orchestrator", run_folder):
        os.kill(process_id, signal.SIGTERM)
    await running


def _read(run_folder: Path, *, seconds: float) -> harness.Row:
    lines = lines_of(run_folder)
    begin = lines["step"][0]["t"] + WARM_S
    # An engine reports once a second, so its first report after `begin` and the last one up to the end are exact.
    loads = [line for line in lines["load"] if "num_steps" in line and begin <= line["t"] <= begin + seconds + 1.0]
    first, last = loads[0], loads[-1]
    tokens_per_s = (last["num_tokens"] - first["num_tokens"]) / (last["t"] - first["t"])
    with sqlite3.connect(run_folder / "ledger.sqlite") as ledger:
        query = (
            "SELECT b.t - a.t FROM events a JOIN events b ON a.rollout_id = b.rollout_id AND b.kind = 'scored' WHERE a.kind = 'generated'"
        )
        lags = [lag for (lag,) in ledger.execute(query)]
        (mean_tokens,) = ledger.execute("SELECT avg(num_tokens) FROM events WHERE kind = 'generated'").fetchone()
    return {
        "samples/s": tokens_per_s / mean_tokens,
        "tokens/s": tokens_per_s,
        "idle": 1.0 - tokens_per_s * PASS_S / SLOTS,
        "lag s": statistics.median(lags),
    }
