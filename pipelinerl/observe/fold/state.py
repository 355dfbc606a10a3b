"""The state of a run, folded from its journal line by line: a view that is redrawn twice a second never reads a line again."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from pipelinerl.observe.fold import rows
from pipelinerl.observe.fold.counters import empty_fraction, growth, growth_of_all, total
from pipelinerl.observe.fold.rows import (
    BATCH_WAIT,
    Alarm,
    EndRow,
    EvaluationRow,
    Failure,
    FunctionErrorRow,
    RunRow,
    StatusRow,
    StepRow,
    SwapRow,
)
from pipelinerl.observe.renamed import Line

WINDOW_S = 10.0
"""Gauges are averaged over the last so many seconds. Shorter flickers with every step; longer hides a change."""
STEPS_KEPT = 60
"""Width of the reward's sparkline."""
STEPS_FOR_PACE = 20
"""Steps from which the time left is told."""


class RunState:
    """The state that the lines so far add up to: the last gauges, the last few seconds of them, and the last few steps."""

    def __init__(self) -> None:
        self.run: RunRow | None = None
        """The newest start."""
        self.began: float | None = None
        """Unix seconds of the earliest line; None before the first one."""
        self.last_t: float | None = None
        """Unix seconds of the latest line."""
        self.status: StatusRow | None = None
        self.recent: collections.deque[StatusRow] = collections.deque()
        """Gauges of the last `WINDOW_S`."""
        self.steps: collections.deque[StepRow] = collections.deque(maxlen=STEPS_KEPT)
        self.first_evaluation: EvaluationRow | None = None
        self.last_evaluation: EvaluationRow | None = None
        self.last_pause_s: float | None = None
        self.trainer_ranks: rows.TrainerRanksRow | None = None
        self.roles: rows.RolesRow | None = None
        """None before an orchestrator has said it."""
        self.num_steps: int | None = None
        self.identity: dict[str, float] = {}
        """Counts of rollouts by how they ended, with `admitted` and `in_flight`; empty before the first gauges."""
        self.alarms: dict[str, tuple[Alarm, int | None]] = {}
        """Alarms of learning since this start, by name, the newest last: as raised, and the step at which it ended, None while it holds."""
        self.errors = FunctionErrors()
        self.scored_at: float | None = None
        """Unix seconds since which reward calls are under way and none has ended; None where none is, or none was told."""
        self.end: EndRow | None = None
        self._num_scored = -1.0
        self._failed: str | None = None

    def fold(self, line: Line) -> rows.Row | None:
        """Take one journal line and return its row; None for a kind that no view shows."""
        self.see(line)
        row = rows.row_of(line)
        match row:
            case RunRow():
                self._begin(row)
            case StatusRow():
                self._take_status(row)
            case StepRow():
                self.steps.append(row)
            case SwapRow():
                self.last_pause_s = row.pause_s
            case EvaluationRow():
                self.last_evaluation = row
                self.first_evaluation = self.first_evaluation or row
            case Alarm():
                raised, _ = self.alarms.pop(row.name, (row, None))
                self.alarms[row.name] = (raised, row.step) if row.is_over else (row, None)
            case FunctionErrorRow():
                self.errors.take(row, step=self.num_steps_done)
            case EndRow():
                self.end = row
                self.identity = row.rollouts or self.identity
            case rows.TrainerRanksRow():
                self.trainer_ranks = row
            case rows.RolesRow():
                self.roles = row
            case rows.MemberRow() | None:
                pass
        return row

    def see(self, line: Line) -> None:
        """Take the time of a line, and nothing else of it."""
        self.began = line["t"] if self.began is None else min(self.began, line["t"])
        self.last_t = line["t"] if self.last_t is None else max(self.last_t, line["t"])

    def fail(self, failures: Sequence[Failure]) -> None:
        """Take the crash reports of processes that stand now: a process that was started again has none, and those from before the run was
        resumed are old."""
        began = self.run.t if self.run else 0.0
        words = (f"{failure.process} failed: {' '.join(failure.error.split())}" for failure in failures if failure.t >= began)
        self._failed = next(words, None)

    @property
    def name(self) -> str:
        return str(self.setting("run", "name") or "")

    @property
    def sequence_slots(self) -> int | None:
        """Sequences that one engine decodes at once."""
        return self.setting("engine", "max_running")

    @property
    def rewards(self) -> list[str]:
        """Reward functions and models, as configured."""
        entries = [entry for entry in self.setting("reward") or () if isinstance(entry, dict)]
        return [str(entry.get("function") or entry.get("model")) for entry in entries]

    def setting(self, *path: str) -> Any:
        """A configured value by section and key; None where it is not recorded."""
        return self.run.setting(*path) if self.run else None

    @property
    def active_alarms(self) -> dict[str, Alarm]:
        """Alarms of learning that hold, by name."""
        return {name: alarm for name, (alarm, over) in self.alarms.items() if over is None}

    @property
    def end_reason(self) -> str | None:
        """The reason why the run ended; None while it goes on."""
        return (self.end.reason or "no reason recorded") if self.end else self._failed

    @property
    def num_reward_calls(self) -> float:
        """Reward calls under way."""
        return sum(scorer.num_running or 0 for scorer in self.status.scorers) if self.status else 0

    @property
    def num_steps_done(self) -> int:
        if self.steps:
            return self.steps[-1].step + 1
        return int(self.status.step or 0) if self.status else 0

    @property
    def seconds_left(self) -> float | None:
        """At the pace of the last steps; None before the second step."""
        recent = list(self.steps)[-STEPS_FOR_PACE:]
        if self.num_steps is None or len(recent) < 2 or recent[-1].step <= recent[0].step:
            return None
        pace_s = (recent[-1].t - recent[0].t) / (recent[-1].step - recent[0].step)
        return pace_s * max(0, self.num_steps - self.num_steps_done)

    @property
    def generated_tokens_per_s(self) -> float | None:
        """Over the last seconds."""
        return self._per_second(growth(status.generated_tokens for status in self.recent))

    @property
    def trained_tokens_per_s(self) -> float | None:
        """Sampled tokens that were trained, over the last steps that began within about the last seconds: steps are too coarse for a
        window of seconds."""
        return self._per_second_of_steps(lambda step: step.num_trained_tokens)

    @property
    def useful_tokens_per_s(self) -> float | None:
        """Those of them whose advantage is not zero; None where that is not recorded."""
        return self._per_second_of_steps(lambda step: step.num_useful_tokens)

    def _per_second_of_steps(self, count: Callable[[StepRow], float | None]) -> float | None:
        recent = list(self.steps)
        since = next((at for at, step in enumerate(recent) if step.t >= recent[-1].t - WINDOW_S), 0) if recent else 0
        recent = recent[max(0, since - 1) :]
        tokens = total(count(step) for step in recent[1:])
        if tokens is None or recent[-1].t <= recent[0].t:
            return None
        return tokens / (recent[-1].t - recent[0].t)

    @property
    def trainer_wait_fraction(self) -> float | None:
        """Part of the last seconds that the trainer waited for a micro-batch; before it is told, of the last step."""
        waited = self._per_second(growth(status.waited_s.get(BATCH_WAIT) for status in self.recent))
        if waited is None and self.steps:
            spent = [self.steps[-1].trainer.get(name) for name in ("wait_s", "forward_backward_s", "optimizer_s", "publish_s")]
            total_s = sum(value or 0.0 for value in spent)
            waited = spent[0] / total_s if spent[0] is not None and total_s else None
        return _clipped(waited)

    @property
    def engine_idle_fraction(self) -> float | None:
        """Part of the last seconds that engines stood without a request, over all engines."""
        idle_s = growth_of_all(list(self.recent), lambda row: {engine.engine_id: engine.idle_s for engine in row.engines})
        num_engines = len(self.status.engines) if self.status else 0
        return _clipped(self._per_second(None if idle_s is None or not num_engines else idle_s / num_engines))

    @property
    def engine_empty_fraction(self) -> float | None:
        """Part of the engines' sequence slots that stood empty in the last seconds because admission was closed."""
        return empty_fraction(list(self.recent), slots_per_engine=self.sequence_slots)

    def _begin(self, row: RunRow) -> None:
        self.run = row
        self.num_steps = row.setting("trainer", "steps") or self.num_steps
        self.end = None  # an earlier end was not the end: the run is resumed
        self.alarms.clear()
        self.errors.begin_life()
        self.recent.clear()

    def _take_status(self, status: StatusRow) -> None:
        self.status = status
        self.identity = status.rollouts or self.identity
        self.recent.append(status)
        while self.recent[0].t < status.t - WINDOW_S:
            self.recent.popleft()
        self.num_steps = int(status.num_steps) if status.num_steps else self.num_steps
        num_scored = sum(scorer.num_scored or 0 for scorer in status.scorers)
        if num_scored != self._num_scored or not self.num_reward_calls or self.scored_at is None:
            self._num_scored, self.scored_at = num_scored, status.t if self.num_reward_calls else None
        self.last_pause_s = status.last_pause_s if status.last_pause_s is not None else self.last_pause_s

    def _per_second(self, amount: float | None) -> float | None:
        length_s = self.recent[-1].t - self.recent[0].t if self.recent else 0.0
        return None if amount is None or length_s <= 0 else amount / length_s


def _clipped(fraction: float | None) -> float | None:
    return None if fraction is None else min(1.0, max(0.0, fraction))


class FunctionErrors:
    """Failures of users' functions by cause. Each start of a run counts from zero."""

    def __init__(self) -> None:
        self.now: dict[tuple[str, str, str], FunctionErrorRow] = {}
        """Since this start, by function, place and cause, each with the time of its first failure."""
        self.first_step: dict[tuple[str, str, str], int] = {}
        """The step that was under way at the first failure since this start."""
        self._before: dict[tuple[str, str, str], FunctionErrorRow] = {}

    def begin_life(self) -> None:
        """The run is started again: count from zero."""
        self._before = {row.key: row for row in self.rows()}
        self.now.clear()
        self.first_step.clear()

    def take(self, row: FunctionErrorRow, *, step: int) -> None:
        """Take a cause's newest count."""
        self.now[row.key] = dataclasses.replace(row, t=self.now.get(row.key, row).t)
        self.first_step.setdefault(row.key, step)

    def commonest(self) -> list[FunctionErrorRow]:
        """Return the errors since this start, the commonest first."""
        return sorted(self.now.values(), key=lambda row: -row.count)

    def rows(self) -> list[FunctionErrorRow]:
        """Return the errors over all starts, the commonest first."""
        together = dict(self._before)
        for key, row in self.now.items():
            before = together.get(key)
            together[key] = row if before is None else dataclasses.replace(row, t=before.t, count=row.count + before.count)
        return sorted(together.values(), key=lambda row: -row.count)
