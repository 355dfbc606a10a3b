"""What a simulated run says in a few figures, and which assumption each of them hangs on most."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from orchestrator.simulate.draws import Distribution
from orchestrator.simulate.run import Simulated
from orchestrator.simulate.world import World

WARM_UP_STEPS = 1
"""Steps left out of rates, as the report of a run leaves them out: until the first one the pipeline fills."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The figures of a run. Rates and fractions are from the end of the first step to the end of the last."""

    tokens_per_s: float
    """Sampled tokens trained."""
    samples_per_s: float
    step_s: float
    run_s: float
    """Until every engine holds the last policy."""
    staleness_mean: float
    """Over trained tokens, in versions."""
    staleness_max: float
    engines_idle_fraction: float
    """Part of the engines' time in which none of their sequences ran, swaps left out."""
    trainer_idle_fraction: float
    """Part of the trainer's time in which it waited for rows."""


FIGURES = {
    "tokens_per_s": ("tokens/s", "sampled tokens trained"),
    "samples_per_s": ("samples/s", "trained"),
    "step_s": ("s", "one optimizer step"),
    "run_s": ("s", "the whole run"),
    "staleness_mean": ("versions", "mean age of a trained token"),
    "staleness_max": ("versions", "the oldest"),
    "engines_idle_fraction": ("", "of the engines' time without a sequence"),
    "trainer_idle_fraction": ("", "of the trainer's time without rows"),
}
"""Unit and meaning of each figure."""


def summary_of(simulated: Simulated) -> Summary:
    """Return the figures of a simulated run."""
    totals, num_engines = simulated.totals, simulated.config.engine.count
    first = WARM_UP_STEPS if len(totals.step_ends_s) > 2 else 0
    start_s = totals.step_ends_s[first - 1] if first else 0.0
    window_s = totals.step_ends_s[-1] - start_s
    idle_s = totals.gauges[-1][1] - (totals.gauges[first - 1][1] if first else 0.0)
    ages = totals.ages
    num_steps = len(totals.step_ends_s) - first
    return Summary(
        tokens_per_s=sum(totals.step_tokens[first:]) / window_s,
        samples_per_s=sum(totals.step_samples[first:]) / window_s,
        step_s=window_s / num_steps,
        run_s=simulated.seconds,
        staleness_mean=sum(age * num for age, num in ages.items()) / max(1, ages.total()),
        staleness_max=float(max(ages, default=0)),
        engines_idle_fraction=idle_s / (num_engines * window_s),
        trainer_idle_fraction=sum(totals.waits_s[first:]) / window_s,
    )


def _scaled(distribution: Distribution, factor: float) -> Distribution:
    return dataclasses.replace(
        distribution,
        mean=distribution.mean * factor,
        low=distribution.low * factor,
        high=distribution.high * factor,
        recorded=tuple((np.array(distribution.recorded) * factor).tolist()),
    )


def _engine(world: World, factor: float) -> World:
    engine = world.engine
    passes = tuple((num, seconds * factor) for num, seconds in engine.pass_s)
    changed = dataclasses.replace(
        engine, pass_s=passes, kv_token_s=engine.kv_token_s * factor, prefill_token_s=engine.prefill_token_s * factor
    )
    return dataclasses.replace(world, engine=changed)


def _trainer(world: World, factor: float) -> World:
    trainer = world.trainer
    seconds = {name: getattr(trainer, name) * factor for name in ("row_s", "token_s", "square_s", "step_s")}
    return dataclasses.replace(world, trainer=dataclasses.replace(trainer, **seconds))


def _sync(world: World, factor: float) -> World:
    sync = world.sync
    changed = dataclasses.replace(
        sync,
        publish_s=sync.publish_s * factor,
        publish_beside_s=sync.publish_beside_s * factor,
        num_bytes=sync.num_bytes * factor,
        stage_s=_scaled(sync.stage_s, factor),
        idle_stage_s=None if sync.idle_stage_s is None else _scaled(sync.idle_stage_s, factor),
        pause_s=sync.pause_s * factor,
    )
    return dataclasses.replace(world, sync=changed)


def _scoring(world: World, factor: float) -> World:
    scoring = world.scoring
    changed = dataclasses.replace(
        scoring,
        score_s=_scaled(scoring.score_s, factor),
        reply_s=_scaled(scoring.reply_s, factor),
        prm_batch_s=scoring.prm_batch_s * factor,
        prm_step_s=scoring.prm_step_s * factor,
        prm_token_s=scoring.prm_token_s * factor,
    )
    return dataclasses.replace(world, scoring=changed)


ASSUMPTIONS: Mapping[str, Callable[[World, float], World]] = {
    "seconds of an engine's pass": _engine,
    "seconds of training": _trainer,
    "seconds of a policy's way": _sync,
    "seconds of scores and replies": _scoring,
    "lengths of completions": lambda world, factor: dataclasses.replace(world, lengths=_scaled(world.lengths, factor)),
    "room in KV caches": lambda world, factor: dataclasses.replace(
        world, engine=dataclasses.replace(world.engine, kv_tokens=world.engine.kv_tokens * factor)
    ),
}
"""What a simulation assumes, part by part, and how it is made more or less."""


def hangs_on(world: World, usual: Summary, *, run: Callable[[World], Summary], change: float = 0.1) -> dict[str, tuple[str, float]]:
    """Return for each figure the assumption on which it hangs most, and the figure's change, in parts of itself, where that is `change`
    higher.

    Draws are the same in every run (`draws`), so a change is not chance. A figure that no assumption moves is left out.
    """
    strongest: dict[str, tuple[str, float]] = {}
    for what, changed in ASSUMPTIONS.items():
        other = run(changed(world, 1 + change))
        for name in FIGURES:
            before, after = getattr(usual, name), getattr(other, name)
            if not before:
                continue
            effect = after / before - 1
            if abs(effect) > max(1e-3, abs(strongest.get(name, ("", 0.0))[1])):
                strongest[name] = (what, effect)
    return strongest
