"""The numbers at the top of the report, each computed here and nowhere else."""

from __future__ import annotations

import dataclasses

from pipelinerl.observe.fold import counters
from pipelinerl.observe.fold.rows import EvaluationRow, imbalance
from pipelinerl.observe.report.measures import Measures, measure
from pipelinerl.observe.report.reading import Tables

FINAL_STEPS = 10
"""Steps averaged into the first and the final reward. One step is noise; many would hide the end of a short run."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Headline:
    """The numbers that a reader wants first. None: the run did not record it."""

    first_reward: float | None
    final_reward: float | None
    num_averaged: int
    """Steps in each of the two rewards above."""
    held_out_before: EvaluationRow | None
    held_out_after: EvaluationRow | None
    num_steps_done: int
    num_steps: int | None
    """Steps the run was to take."""
    num_samples: float | None
    num_trained_tokens: float | None
    num_useful_tokens: float | None
    """Trained tokens whose advantage is not zero; None where that was not recorded."""
    num_generated_tokens: float | None
    generated_tokens_per_s: float | None
    trained_tokens_per_s: float | None
    useful_tokens_per_s: float | None
    measured: Measures | None
    """The steady stretch that both rates are about; None where no step was done."""
    pause_p50_s: float | None
    pause_p99_s: float | None
    num_swaps: int
    staleness_mean: float | None
    """Over all trained tokens, in versions."""
    staleness_max: float | None
    identity: dict[str, float]
    imbalance: int | None
    """Admitted less everything it must have become; 0 balances, None: no identity recorded."""
    reasons: dict[str, float]


def headline(tables: Tables) -> Headline:
    """Compute the headline numbers of a run."""
    steps, last = tables.steps, tables.last_status
    few = max(1, min(FINAL_STEPS, len(steps) // 2))
    pauses = [swap.pause_s for swap in tables.swaps if swap.pause_s is not None]
    planned = last.num_steps if last and last.num_steps else tables.setting("trainer", "steps")
    identity = (tables.end.rollouts if tables.end else {}) or (last.rollouts if last else {})
    generated = counters.growth([0.0, *(status.generated_tokens for status in tables.statuses)])
    trained = counters.total(step.num_trained_tokens for step in steps)
    measured = measure(tables)
    return Headline(
        first_reward=counters.mean(step.reward_mean for step in steps[:few]),
        final_reward=counters.mean(step.reward_mean for step in steps[-few:]),
        num_averaged=few,
        held_out_before=tables.evaluations[0] if tables.evaluations else None,
        held_out_after=tables.evaluations[-1] if len(tables.evaluations) > 1 else None,
        num_steps_done=len(steps),
        num_steps=int(planned) if planned else None,
        num_samples=counters.total(step.num_samples for step in steps),
        num_trained_tokens=trained,
        num_useful_tokens=counters.total(step.num_useful_tokens for step in steps),
        num_generated_tokens=generated,
        generated_tokens_per_s=_rate(measured, measured.generated_tokens if measured else None),
        trained_tokens_per_s=_rate(measured, measured.trained_tokens if measured else None),
        useful_tokens_per_s=_rate(measured, measured.useful_tokens if measured else None),
        measured=measured,
        pause_p50_s=counters.quantile(pauses, 0.5),
        pause_p99_s=counters.quantile(pauses, 0.99),
        num_swaps=len(tables.swaps),
        staleness_mean=_staleness_mean(tables),
        staleness_max=max((step.staleness_max for step in steps if step.staleness_max is not None), default=None),
        identity=identity,
        imbalance=imbalance(identity),
        reasons=last.reasons if last else {},
    )


def _rate(measured: Measures | None, tokens: float | None) -> float | None:
    return None if measured is None or tokens is None else tokens / measured.window_s


def staleness_by_age(tables: Tables) -> dict[int, float]:
    """Trained tokens of the whole run by age in versions, youngest first."""
    ages: dict[int, float] = {}
    for step in tables.steps:
        for age, tokens in step.staleness.items():
            ages[age] = ages.get(age, 0) + tokens
    return dict(sorted(ages.items()))


def _staleness_mean(tables: Tables) -> float | None:
    ages = staleness_by_age(tables)
    num_tokens = sum(ages.values())
    return sum(age * tokens for age, tokens in ages.items()) / num_tokens if num_tokens else None
