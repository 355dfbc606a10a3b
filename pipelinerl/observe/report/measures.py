"""The time that every part of a run spent in the steady stretch: the diagnosis reasons from it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from pipelinerl.observe.fold import counters
from pipelinerl.observe.fold.rows import ADMISSION_WAIT, BATCH_WAIT, StatusRow, StepRow
from pipelinerl.observe.report.reading import Tables

WARM_UP_STEPS = 1
"""Steps left out at the start: until the first one the pipeline fills. With fewer than three steps nothing is left out."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Measures:
    """Seconds and tokens between two moments; None: not recorded. Seconds of several peers are summed over them."""

    first_step: int
    last_step: int
    has_start_up: bool
    """The stretch begins with the run and holds the time until the first request, because nothing tells when the first step began."""
    window_s: float
    """Seconds from the end of the step before `first_step` to the end of `last_step`."""
    mode: str
    num_engines: int
    engine_busy_s: float | None
    engine_idle_s: float | None
    engine_pause_s: float | None
    """None where no swap was recorded at all."""
    num_swaps: int
    mean_running: float | None
    """Sequences decoded at once, over all engines."""
    num_sequence_slots: int | None
    """Sequences all engines could decode at once."""
    kv_used: float | None
    """Part of one of the KV cache that sequences hold, in the fullest engine of each moment."""
    num_drafted: float | None
    """Drafted tokens that engines verified."""
    num_accepted: float | None
    """Of these, the ones that became part of a completion."""
    num_scoring_slots: int | None
    scorer_busy_s: float | None
    trainer_wait_s: float | None
    trainer_compute_s: float | None
    trainer_core_wait_s: float | None
    """Of the seconds of computing, those in which its thread was ready and others had its core."""
    trainer_publish_s: float | None
    """Seconds in which writing a policy kept it from training."""
    trainer_publish_async_s: float | None
    """Seconds in which one was written while training went on."""
    num_ranks: int
    admission_wait_s: float | None
    empty_fraction: float | None
    """Part of one: sequence slots that stood empty while admission was closed."""
    generated_tokens: float | None
    trained_tokens: float | None
    useful_tokens: float | None
    """Trained tokens whose advantage is not zero."""
    dispatch: dict[str, float]
    """What the rules that send rollouts one by one have done since the run began; empty without them."""

    def engine_fraction(self, value_s: float | None) -> float | None:
        """Parts of one of the engines' time."""
        return None if value_s is None else value_s / (self.num_engines * self.window_s)

    def trainer_fraction(self, value_s: float | None) -> float | None:
        """Parts of one of the trainer's time."""
        return None if value_s is None else value_s / self.window_s

    @property
    def engine_rest_s(self) -> float | None:
        """Seconds in which engines had requests but were in no forward pass and no swap."""
        if self.engine_busy_s is None or self.engine_idle_s is None:
            return None
        return max(0.0, self.num_engines * self.window_s - self.engine_busy_s - self.engine_idle_s - (self.engine_pause_s or 0.0))

    @property
    def scoring_fraction(self) -> float | None:
        """Parts of one of the scoring slots' time spent in reward calls."""
        if self.scorer_busy_s is None or not self.num_scoring_slots:
            return None
        return self.scorer_busy_s / (self.num_scoring_slots * self.window_s)


def measure(tables: Tables) -> Measures | None:
    """Measure the stretch from the end of the first step to the end of the last; None where no step was done or no time passed."""
    done = list(tables.steps)
    warm_up = WARM_UP_STEPS if len(done) > 2 else 0
    steps = done[warm_up:]
    start = done[0].t if warm_up else _start_of_first(done, began=tables.began)
    if not steps or start is None or steps[-1].t <= start:
        return None
    end = steps[-1].t
    statuses, status_s = _bracket(tables.statuses, start, end)
    scale = (end - start) / status_s if status_s else 1.0

    def grown(value: float | None) -> float | None:
        return None if value is None else value * scale

    last = statuses[-1] if statuses else None
    num_engines = max(1, round(counters.mean(len(row.engines) for row in statuses if row.engines) or 1))
    if not last:
        num_engines = int(tables.setting("engine", "count") or 1)
    slots = tables.setting("engine", "max_running")
    swaps = [swap for swap in tables.swaps if start < swap.t <= end]
    pauses = counters.total(swap.pause_s for swap in swaps)
    return Measures(
        first_step=steps[0].step,
        last_step=steps[-1].step,
        has_start_up=start == tables.began,
        window_s=end - start,
        mode=str(tables.setting("pipeline", "mode") or "streaming"),
        num_engines=num_engines,
        engine_busy_s=grown(counters.growth_of_all(statuses, lambda row: {engine.engine_id: engine.busy_s for engine in row.engines})),
        engine_idle_s=grown(counters.growth_of_all(statuses, lambda row: {engine.engine_id: engine.idle_s for engine in row.engines})),
        engine_pause_s=pauses,
        num_swaps=len(swaps),
        mean_running=counters.mean(counters.total(engine.num_running for engine in row.engines) for row in statuses),
        num_sequence_slots=num_engines * slots if isinstance(slots, int) else None,
        kv_used=counters.mean(_fullest(row) for row in statuses),
        num_drafted=grown(counters.growth_of_all(statuses, lambda row: {engine.engine_id: engine.num_drafted for engine in row.engines})),
        num_accepted=grown(counters.growth_of_all(statuses, lambda row: {engine.engine_id: engine.num_accepted for engine in row.engines})),
        num_scoring_slots=_num_scoring_slots(tables, last),
        scorer_busy_s=grown(counters.growth_of_all(statuses, lambda row: {scorer.scorer_id: scorer.busy_s for scorer in row.scorers})),
        trainer_wait_s=_trainer_wait_s(steps, statuses, scale),
        trainer_compute_s=_of_trainer(steps, "forward_backward_s", "optimizer_s"),
        trainer_core_wait_s=_of_trainer(steps, "core_wait_s"),
        trainer_publish_s=_of_trainer(steps, "publish_s"),
        trainer_publish_async_s=_of_trainer(steps, "publish_async_s"),
        num_ranks=int(tables.setting("trainer", "ranks") or 1),
        admission_wait_s=grown(counters.growth(row.waited_s.get(ADMISSION_WAIT) for row in statuses)),
        empty_fraction=counters.empty_fraction(statuses, slots_per_engine=slots if isinstance(slots, int) else None),
        generated_tokens=grown(counters.growth(row.generated_tokens for row in statuses)),
        trained_tokens=counters.total(step.num_trained_tokens for step in steps),
        useful_tokens=counters.total(step.num_useful_tokens for step in steps),
        dispatch=last.dispatch if last else {},
    )


def _fullest(status: StatusRow) -> float | None:
    return max((engine.kv_used for engine in status.engines if engine.kv_used is not None), default=None)


def _start_of_first(steps: Sequence[StepRow], *, began: float | None) -> float | None:
    """When the trainer began the first step, by its own account of it; else when the run began."""
    spent_s = _of_trainer(steps[:1], "wait_s", "forward_backward_s", "optimizer_s", "publish_s")
    return began if not spent_s or began is None else max(began, steps[0].t - spent_s)


def _bracket(statuses: Sequence[StatusRow], start: float, end: float) -> tuple[list[StatusRow], float]:
    """The gauges within the stretch and the seconds they cover, a little less than the stretch itself."""
    inside = [status for status in statuses if start <= status.t <= end]
    return inside, inside[-1].t - inside[0].t if len(inside) > 1 else 0.0


def _of_trainer(steps: Sequence[StepRow], *names: str) -> float | None:
    return counters.total(step.trainer.get(name) for step in steps for name in names)


def _trainer_wait_s(steps: Sequence[StepRow], statuses: Sequence[StatusRow], scale: float) -> float | None:
    told = _of_trainer(steps, "wait_s")
    if told is not None:
        return told
    seen = counters.growth(row.waited_s.get(BATCH_WAIT) for row in statuses)
    return None if seen is None else seen * scale


def _num_scoring_slots(tables: Tables, last: StatusRow | None) -> int | None:
    slots = tables.setting("scorer", "slots")
    num_scorers = max(1, len(last.scorers)) if last else 1
    return num_scorers * slots if isinstance(slots, int) else None
