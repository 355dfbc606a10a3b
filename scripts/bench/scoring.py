#!/usr/bin/env python
"""Measures what scoring costs the engines: the same run with rewards of 0, 1 and 5 times the generation time, inline and as a stage.

The orchestrator is the product's, with all its stages and rules; engines, scorer and trainer are the simulated peers of the tests, on
simulated time: a scorer can be as slow as wished on any machine, and two runs give the same figures. The trainer is fast: engines are
what limits. Speeds are those of the steady state, from a fifth to four fifths of the steps. What a whole run took stands beside them: it
ends one reward's time later, during which engines have nothing left to do, whatever the number of steps.

`inline` holds an engine's slot until the rollout is scored, as where the reward is called inside the rollout (its lag is counted from then
on). As a stage, calls wait for nobody's slot; `too few slots` is a stage whose scorer takes half of what engines make: then it limits.
Rollouts being scored take of the staleness bound: with bound K and batches of B groups of G, (K + 1) B G samples at most are between their
admission and their step, each for as long as it is written, waits for its siblings and is scored. So a stage keeps engines busy only while
(K + 1) B G >= samples/s * seconds on the way. The bound here is wide but for one row (`stage, bound 4`), which shows that limit.

Then the same in real processes: launcher, orchestrator, transport and scorer are the product's, rewards sleep in worker processes, one for
each call under way; the engine is the rehearsals' one with a pause for each forward pass, the trainer the rehearsals' own. `idle` is the
part of engines' slots in which no sequence is decoded.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import random
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from pipelinerl.messages import Completion, Message, Outcome, Request, Result, ScoredTrajectory, ScorerReady, Stop
from scripts.bench import harness
from scripts.bench.paced import processes
from tests.sim import peers
from tests.sim.memory import MemoryLink
from tests.sim.run import Cast, config, mean_baseline, run

NUM_ENGINES, SLOTS = 2, 32
MAX_TOKENS = 48
STEP_S = 0.01
MEAN_TOKENS = 24
GENERATION_S = MEAN_TOKENS * STEP_S
"""Of a rollout of mean length."""
SAMPLES_PER_STEP = 32
GOAL = 0.97
STALENESS = 40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The figures of one run in its steady state."""

    samples_per_s: float
    """Trained."""
    tokens_per_s: float
    """Sampled for what was trained: in a steady state what the engines sample."""
    whole_tokens_per_s: float
    """Of all engines, from the run's first second to its last."""
    decoding: float
    """Part of the engines' slots in which a sequence is decoded; the table has the rest of them as idle."""
    lag_s: float
    """From a rollout's last token to its group's last score, median."""


def simulate(
    latency_s: float, *, is_inline: bool = False, calls_at_once: int = 100_000, max_staleness: int = STALENESS, steps: int
) -> Figures:
    """Run the whole pipeline once."""
    settings = config(
        rollout={"group_size": 4, "max_tokens": MAX_TOKENS},
        engine={"count": NUM_ENGINES, "max_running": SLOTS},
        pipeline={"max_staleness": max_staleness, "max_running": NUM_ENGINES * SLOTS if is_inline else NUM_ENGINES * SLOTS * 5 // 4},
        trainer={"steps": steps},
        batch={"groups_per_step": SAMPLES_PER_STEP // 4, "max_tokens": 1024},
    )
    lags: list[float] = []

    def credit(siblings: tuple[ScoredTrajectory, ...]) -> Any:
        now = asyncio.get_running_loop().time()
        lags.extend(now - member.trajectory.finished_at for member in siblings)
        return mean_baseline(siblings)

    engine = functools.partial(_engine_that_holds, latency_s=latency_s) if is_inline else peers.engine
    scorer = functools.partial(_scorer, latency_s=0.0 if is_inline else latency_s, calls_at_once=calls_at_once)
    with tempfile.TemporaryDirectory() as folder:
        done = run(
            settings,
            folder=Path(folder),
            world=peers.World(step_s=STEP_S, token_s=1e-7, mean_tokens=MEAN_TOKENS),
            cast=Cast(engine=engine, scorer=scorer),
            group_advantages=credit,
        )
    assert done.ending.reason == "finished", done.ending.reason
    status = [line for line in done.lines if line["kind"] == "status"]
    first, last = steps // 5, steps * 4 // 5
    trained = [(step, num_tokens, ended_s) for *_, step, _, _, _, num_tokens, _, ended_s in done.rows if step is not None]
    done_s = {step: ended_s for step, _, ended_s in trained}
    seconds = done_s[last] - done_s[first]
    steady = [line for line in status if first <= line["step"] <= last]
    return Figures(
        samples_per_s=(last - first) * SAMPLES_PER_STEP / seconds,
        tokens_per_s=sum(num_tokens for step, num_tokens, _ in trained if first < step <= last) / seconds,
        whole_tokens_per_s=status[-1]["generated_tokens"] / status[-1]["elapsed_s"],
        decoding=float(np.mean([sum(engine["num_running"] for engine in line["engines"]) for line in steady])) / (NUM_ENGINES * SLOTS),
        lag_s=float(np.median(lags)),
    )


async def _engine_that_holds(link: MemoryLink, *, latency_s: float, **options: Any) -> None:
    """An engine whose answer comes when it is scored: until then the rollout holds its slot."""
    send = link.send

    def send_scored(message: Message) -> None:
        if isinstance(message, Completion):
            asyncio.get_running_loop().call_later(latency_s, send, message)
        else:
            send(message)

    link.send = send_scored  # pyright: ignore[reportAttributeAccessIssue]
    await peers.engine(link, **options)


async def _scorer(link: MemoryLink, *, latency_s: float, calls_at_once: int, num_slots: int, world: peers.World) -> None:
    """Every call takes about `latency_s`, so many at once; the rest waits here."""
    del num_slots
    loop, chance = asyncio.get_running_loop(), random.Random(world.seed)
    link.send(ScorerReady(scorer_id=0, process_id=0, num_slots=min(calls_at_once, 1000)))
    heartbeat = loop.create_task(peers.beat(link))
    slots = asyncio.Semaphore(calls_at_once)

    async def call(request: Request) -> None:
        async with slots:
            await asyncio.sleep(latency_s * (0.5 + chance.random()))
        reward = float(request.task.completions[0].sum() % 2)
        scored = {"rewards": (reward,), "components": ({"reward": reward},)}
        link.send(Result(request_id=request.request_id, outcome=Outcome.OK, **scored, duration_s=latency_s))

    async with asyncio.TaskGroup() as group:
        while not isinstance(message := await link.wait(), Stop):
            if isinstance(message, Request):
                group.create_task(call(message))
    heartbeat.cancel()


def measure(arguments: Any) -> harness.Measured:
    found = harness.Measured(
        notes=[
            f"simulated: {NUM_ENGINES} engines of {SLOTS} slots, steps of {SAMPLES_PER_STEP} samples, staleness bound {STALENESS} or said",
            processes.CONDITIONS,
        ]
    )
    _simulated(found, is_quick=arguments.quick)
    latencies, seconds = ((5,), 3.0) if arguments.quick else ((1, 5), 15.0)
    processes.measure_all(found, latencies=latencies, seconds=seconds, goal=GOAL)
    return found


def _simulated(found: harness.Measured, *, is_quick: bool) -> None:
    go: Callable[..., Figures] = functools.partial(simulate, steps=50 if is_quick else 600)
    alone = go(0.0)

    def add(name: str, times: float, figures: Figures) -> None:
        found.rows.append(
            {
                "what": "simulated",
                "scoring": name,
                "reward / generation time": times,
                "samples/s": figures.samples_per_s,
                "tokens/s": figures.tokens_per_s,
                "of reward at once": figures.tokens_per_s / alone.tokens_per_s,
                "whole run": figures.whole_tokens_per_s / alone.whole_tokens_per_s,
                "idle": 1.0 - figures.decoding,
                "lag s": figures.lag_s,
            }
        )

    add("reward at once", 0.0, alone)
    for times in (1, 5):
        latency_s = times * GENERATION_S
        enough = go(latency_s)
        rollouts_made = alone.tokens_per_s / MEAN_TOKENS * latency_s
        add("stage", float(times), enough)
        if times == 5 or not is_quick:
            add("inline", float(times), go(latency_s, is_inline=True))
            add("stage, bound 4", float(times), go(latency_s, max_staleness=4))
        if not is_quick:
            add("stage, too few slots", float(times), go(latency_s, calls_at_once=max(1, int(rollouts_made / 2))))
        name = f"simulated: engine tokens/s with a reward of {times}x as a stage over none"
        found.goals.append(harness.at_least(name, enough.tokens_per_s / alone.tokens_per_s, GOAL))


if __name__ == "__main__":
    harness.run("scoring", measure)
