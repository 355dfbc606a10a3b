"""Published cases, simulated: PipelineRL's throughput and lag, and Applied Compute's table of expected staleness.

PipelineRL (arXiv 2509.19128, appendix A) counts time in flashes and takes lengths that are spread evenly. Of its engines it says
U(192) = 0.384; with the linear slope of 0.002 per sequence that this implies, a pass lasts 1 / 0.002 = 500 flashes, whatever its number of
sequences. Of its trainer it says 17.08 tokens per flash on 84 GPUs, so 4.918 flashes a token and GPU.

Applied Compute's rows tell concurrency C, rollouts of a batch B, room q (batches) in the queue, the ratio rho of the speeds of generation
and training, and the mean of a group's longest over the mean. What bounds their runs is the queue, not a staleness bound, so K is out of
the way here. Where rho > 1 the queue fills: its room is then what `pipeline.queue_bytes` allows.
"""

from __future__ import annotations

import dataclasses
import functools

from orchestrator.simulate.draws import Distribution, fixed
from orchestrator.simulate.run import Simulated, simulate
from orchestrator.simulate.summary import summary_of
from orchestrator.simulate.world import EngineWorld, ScoringWorld, TrainerWorld, World
from pipelinerl.config import Config
from pipelinerl.config.file import parse
from scripts.bench import harness

LENGTH = 256
"""Longest completion of PipelineRL's case: rates do not depend on it, and the lag counts in steps."""
FLASHES = 84 / 17.08
"""Of training, for a token on one GPU."""
PASS_FLASHES = 192 / 0.384
WHOLE = {"name": "reinforce_pp", "overrides": {"advantage": {"kl_coef": 0.0}}}
"""A method that needs no siblings, and whose rule over the whole step has the trainer begin with whole batches, as both papers' do."""


def config(
    *,
    engines: int,
    slots: int,
    groups: int,
    group_size: int,
    steps: int,
    staleness: int,
    mode: str = "streaming",
    row_tokens: int = 1 << 22,
    **more: int,
) -> Config:
    """Settings of a case; by default a step is one row, since the cases know no packing."""
    tree = {
        "model": {"path": "unused"},
        "data": {"source": "unused"},
        "reward": [{"function": "unused:reward"}],
        "rollout": {"group_size": group_size, "max_tokens": row_tokens},
        "engine": {"kind": "fake", "count": engines, "max_running": slots},
        "batch": {"groups_per_step": groups, "max_tokens": row_tokens, "min_group_size": 1},
        "pipeline": {"max_staleness": staleness, "mode": mode, "max_running": engines * slots, **more},
        "trainer": {"steps": steps},
        "algorithm": WHOLE,
        "scorer": {"slots": 4096},
        "checkpoint": {"every": 1 << 20},
    }
    return parse(tree, origin="published case")


def pipeline_rl(*, mode: str, engines: int, trainer_gpus: int, slots: int, groups: int, steps: int) -> Simulated:
    """One run in flashes: a second is a flash."""
    world = World(
        engine=EngineWorld(pass_s=((1, PASS_FLASHES),)),
        trainer=TrainerWorld(token_s=FLASHES / trainer_gpus),
        scoring=ScoringWorld(score_s=fixed(0.0)),
        prompt_tokens=fixed(1.0),
        lengths=Distribution(kind="uniform", low=1.0, high=float(LENGTH)),
    )
    settings = config(engines=engines, slots=slots, groups=groups, group_size=1, steps=steps, staleness=10**6, mode=mode)
    return simulate(settings, world)


def pipeline_rl_rows(found: harness.Measured, *, quick: bool) -> None:
    """Add PipelineRL's case: 128 GPUs, batches of 128 rollouts, 44 GPUs with 192 slots each generate, 84 train."""
    steps = 400 if quick else 800
    small = pipeline_rl(mode="streaming", engines=44, trainer_gpus=84, slots=192, groups=128, steps=steps)
    rate, lag = _steady(small)
    _, big_lag = _steady(pipeline_rl(mode="streaming", engines=44, trainer_gpus=84, slots=192, groups=2048, steps=steps // 10))
    batches = 134  # the lag that the paper allows both, 133, in batches of a conventional step
    in_turns = summary_of(pipeline_rl(mode="sync", engines=128, trainer_gpus=128, slots=256, groups=batches * 128, steps=3))
    ours = {
        "tokens per flash, pipeline": (16.9, rate),
        "tokens per flash, in turns": (10.7, in_turns.tokens_per_s),
        "speed-up": (1.57, rate / in_turns.tokens_per_s),
        "largest lag in flight, batches of 128": (132.0, float(lag)),
        "largest lag in flight, batches of 2,048": (8.25, float(big_lag)),
    }
    for name, (published, mine) in ours.items():
        _add(found, "PipelineRL", name, published, mine)


def _steady(ended: Simulated) -> tuple[float, int]:
    """Return tokens per flash and the largest lag in flight, of a run's middle: at first all begin at once, the last are not replaced."""
    totals = ended.totals
    first, last = int(0.45 * len(totals.step_tokens)), int(0.75 * len(totals.step_tokens))
    window_s = totals.step_ends_s[last - 1] - totals.step_ends_s[first - 1]
    return sum(totals.step_tokens[first:last]) / window_s, max(totals.step_in_flight[first:last])


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A row of Applied Compute's table."""

    concurrency: int
    batch: int
    queue: int
    rho: float
    tail: float
    predicted: float


APPLIED_COMPUTE = (
    Row(120, 240, 2, 0.63, 1.42, 1.34),
    Row(240, 120, 2, 0.92, 1.43, 3.86),
    Row(128, 128, 2, 1.07, 1.44, 3.29),
    Row(240, 120, 1, 0.86, 1.42, 3.34),
    Row(120, 120, 1, 0.67, 1.42, 1.95),
    Row(128, 128, 1, 1.14, 1.45, 2.24),
)
GROUP = 8
MEAN = 400.0


def applied_compute_rows(found: harness.Measured, *, quick: bool) -> None:
    """Add the mean staleness of each row: of a sample's oldest token, over samples."""
    for row in APPLIED_COMPUTE:
        ended = _applied_compute(row, steps=60 if quick else 200)
        oldest = ended.totals.oldest
        mine = sum(age * num for age, num in oldest.items()) / oldest.total()
        name = f"C {row.concurrency}, B {row.batch}, q {row.queue}, rho {row.rho}"
        _add(found, "Applied Compute, mean staleness", name, row.predicted, mine, is_absolute=True)


def _applied_compute(row: Row, *, steps: int) -> Simulated:
    """A pass lasts a second, whatever runs: C slots write C tokens a second, and the trainer takes 1 / rho of the time for them."""
    room = round((row.queue - 0.5) * row.batch * 13 * MEAN / 3)  # half a batch is in the step being filled, the rest in three queues
    settings = config(
        engines=1,
        slots=row.concurrency,
        groups=row.batch // GROUP,
        group_size=GROUP,
        steps=steps,
        staleness=1000,
        queue_bytes=room,
        row_tokens=1 << 11,
    )
    world = World(
        engine=EngineWorld(pass_s=((1, 1.0),)),
        trainer=TrainerWorld(token_s=row.rho / row.concurrency),
        scoring=ScoringWorld(score_s=fixed(0.0)),
        prompt_tokens=fixed(1.0),
        lengths=Distribution(kind="lognormal", mean=MEAN, cv=spread_of(row.tail)),
    )
    return simulate(settings, world)


@functools.cache
def spread_of(tail: float) -> float:
    """Return the spread of lognormal lengths at which the longest of a group is `tail` times as long as the mean."""
    import numpy as np

    normal = np.random.default_rng(0).standard_normal((20_000, GROUP))
    low, high = 0.01, 3.0
    for _ in range(40):
        middle = (low + high) / 2
        lengths = Distribution(kind="lognormal", mean=1.0, cv=middle).at(normal)
        low, high = (middle, high) if lengths.max(axis=1).mean() / lengths.mean() < tail else (low, middle)
    return (low + high) / 2


def _add(found: harness.Measured, case: str, figure: str, published: float, mine: float, *, is_absolute: bool = False) -> None:
    error = f"{mine - published:+.2f}" if is_absolute else f"{100 * (mine / published - 1):+.1f} %"
    found.rows.append({"case": case, "figure": figure, "published": published, "simulated": mine, "error": error})
