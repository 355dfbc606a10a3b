#!/usr/bin/env python
"""What scoring costs the engines: the same run with rewards of 0, 1 and 5 times the generation time, inline and as a stage of their own.

The orchestrator is the product's, with all its stages and rules; engines, scorer and trainer are the simulated peers of the tests, on
simulated time: a scorer can be as slow as wished on any machine, and two runs give the same figures. The trainer is fast: engines are
what limits. Figures are of whole runs, filling and draining of the pipeline included: a reward that takes long delays the first step, which
a short run feels more than a long one.

`inline` holds an engine's slot until the rollout is scored, as where the reward is called inside the rollout (its lag is counted from then
on). As a stage, calls wait for nobody's slot; `too few slots` is a stage whose scorer takes half of what engines make: then it limits.
The staleness bound has to allow for rewards that take long: rollouts being scored are older by the time they train. The bound here is wide.
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

from pipelinerl.messages import Completion, Message, Outcome, Score, Scored, ScoredTrajectory, ScorerReady, Stop
from pipelinerl.transport.memory import MemoryLink
from scripts.bench import harness
from tests.sim import peers
from tests.sim.run import Cast, config, mean_baseline, run

NUM_ENGINES, SLOTS = 2, 32
MAX_TOKENS = 48
STEP_S = 0.01
MEAN_TOKENS = 24
GENERATION_S = MEAN_TOKENS * STEP_S
"""Of a rollout of mean length."""
GOAL = 0.97
QUICK_GOAL = 0.95
"""A reward of 5x delays the first step by 1.2 of the 40 seconds of a quick run."""
STALENESS = 40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """What one run did, from its first second to its last."""

    samples_per_s: float
    """Trained."""
    tokens_per_s: float
    """Of all engines."""
    decoding: float
    """Part of the engines' slots in which a sequence is decoded."""
    lag_s: float
    """From a rollout's last token to its group's last score, median."""


def measure(latency_s: float, *, is_inline: bool = False, calls_at_once: int = 100_000, steps: int) -> Figures:
    """Run the whole pipeline once."""
    settings = config(
        rollout={"group_size": 4, "max_tokens": MAX_TOKENS},
        engine={"count": NUM_ENGINES, "max_running": SLOTS},
        pipeline={"max_staleness": STALENESS, "max_running": NUM_ENGINES * SLOTS if is_inline else NUM_ENGINES * SLOTS * 5 // 4},
        trainer={"steps": steps},
        batch={"groups_per_step": 8, "max_tokens": 1024},
    )
    lags: list[float] = []

    def credit(survivors: tuple[ScoredTrajectory, ...]) -> Any:
        now = asyncio.get_running_loop().time()
        lags.extend(now - member.trajectory.finished_at for member in survivors)
        return mean_baseline(survivors)

    engine = functools.partial(_engine_that_holds, latency_s=latency_s) if is_inline else peers.engine
    scorer = functools.partial(_scorer, latency_s=0.0 if is_inline else latency_s, calls_at_once=calls_at_once)
    with tempfile.TemporaryDirectory() as folder:
        done = run(
            settings,
            folder=Path(folder),
            world=peers.World(step_s=STEP_S, token_s=1e-7, mean_tokens=MEAN_TOKENS),
            cast=Cast(engine=engine, scorer=scorer),
            credit=credit,
        )
    assert done.ending.reason == "finished", done.ending.reason
    status = [line for line in done.lines if line["kind"] == "status"]
    seconds = status[-1]["elapsed_s"]
    return Figures(
        samples_per_s=done.ending.identity.trained / seconds,
        tokens_per_s=status[-1]["generated_tokens"] / seconds,
        decoding=float(np.mean([sum(engine["num_running"] for engine in line["engines"]) for line in status])) / (NUM_ENGINES * SLOTS),
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

    async def call(request: Score) -> None:
        async with slots:
            await asyncio.sleep(latency_s * (0.5 + chance.random()))
        reward = float(request.token_ids.sum() % 2)
        link.send(Scored(rollout_id=request.rollout_id, attempt=request.attempt, outcome=Outcome.OK, reward=reward, duration_s=latency_s))

    async with asyncio.TaskGroup() as group:
        while not isinstance(message := await link.wait(), Stop):
            if isinstance(message, Score):
                group.create_task(call(message))
    heartbeat.cancel()


def main() -> None:
    arguments = harness.options(__doc__ or "").parse_args()
    steps = 300 if arguments.quick else 1000
    go: Callable[..., Figures] = functools.partial(measure, steps=steps)
    alone = go(0.0)
    rows: list[list[Any]] = [["reward at once", 0.0, alone.samples_per_s, alone.tokens_per_s, 1.0, alone.decoding, alone.lag_s]]
    goals = []
    for times in (1, 5):
        latency_s = times * GENERATION_S
        enough = go(latency_s)
        rollouts_made = alone.tokens_per_s / MEAN_TOKENS * latency_s
        for name, figures in (
            ("inline", go(latency_s, is_inline=True)),
            ("stage", enough),
            ("stage, too few slots", go(latency_s, calls_at_once=max(1, int(rollouts_made / 2)))),
        ):
            ratio = figures.tokens_per_s / alone.tokens_per_s
            rows.append([name, float(times), figures.samples_per_s, figures.tokens_per_s, ratio, figures.decoding, figures.lag_s])
        goals.append(
            harness.Goal(
                name=f"engine tokens/s with a reward of {times}x as a stage over none",
                value=enough.tokens_per_s / alone.tokens_per_s,
                goal=QUICK_GOAL if arguments.quick else GOAL,
            )
        )
    harness.finish(
        "scoring",
        arguments=arguments,
        columns=["scoring", "reward / generation time", "samples/s", "engine tokens/s", "of reward at once", "slots decoding", "lag s"],
        rows=rows,
        goals=goals,
        notes=[f"simulated time; {steps} steps of 32 samples, {NUM_ENGINES} engines of {SLOTS} slots, staleness bound {STALENESS}"],
    )


if __name__ == "__main__":
    main()
