"""What the journal lines so far add up to, for a view that is redrawn twice a second: folded line by line, never read again."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from pipelinerl.observe.renamed import Line
from pipelinerl.observe.report import rows
from pipelinerl.observe.report.counters import empty_fraction, growth, growth_of_all
from pipelinerl.observe.report.rows import BATCH_WAIT, EvaluationRow, Failure, FunctionErrorRow, StatusRow, StepRow

WINDOW_S = 10.0
"""Gauges are averaged over the last so many seconds. Shorter flickers with every step; longer hides a change."""
STEPS_KEPT = 60
"""Width of the reward's sparkline."""
STEPS_FOR_PACE = 20
"""Steps from which the time left is told."""


class RunState:
    """What the lines so far add up to: the last gauges, the last few seconds of them, and the last few steps."""

    def __init__(self) -> None:
        self.status: StatusRow | None = None
        self.recent: collections.deque[StatusRow] = collections.deque()
        """Gauges of the last `WINDOW_S`."""
        self.steps: collections.deque[StepRow] = collections.deque(maxlen=STEPS_KEPT)
        self.first_evaluation: EvaluationRow | None = None
        self.last_evaluation: EvaluationRow | None = None
        self.last_pause_s: float | None = None
        self.name = ""
        self.num_steps: int | None = None
        self.sequence_slots: int | None = None
        """Sequences that one engine decodes at once."""
        self.identity: dict[str, float] = {}
        """Counts of the conservation identity; empty before the first gauges."""
        self.rewards: list[str] = []
        """Reward functions, as configured."""
        self.alarms: dict[str, str] = {}
        """Alarms of learning that hold, by name: since when and what was seen."""
        self.function_errors: dict[tuple[str, str, str], FunctionErrorRow] = {}
        """By function, place and cause, in this life of the run."""
        self.scored_at: float | None = None
        """Unix seconds since which reward calls are under way and none has ended; None where none is, or none was told."""
        self._num_scored = -1.0
        self._ended: str | None = None
        self._failed: str | None = None
        self._began = 0.0

    def fold(self, line: Line) -> None:
        """Take one journal line; kinds it does not show are passed over."""
        match line["kind"]:
            case "run":
                self._begin(line)
            case "status":
                self._take_status(rows.status_row(line))
            case "step" if rows.number(line.get("step")) is not None:
                self.steps.append(rows.step_row(line))
            case "swap":
                self.last_pause_s = rows.number(line.get("pause_s"))
            case "evaluation":
                self.last_evaluation = rows.evaluation_row(line)
                self.first_evaluation = self.first_evaluation or self.last_evaluation
            case "alarm" if line.get("is_over"):
                self.alarms.pop(str(line.get("name")), None)
            case "alarm":
                self.alarms[str(line.get("name"))] = alarm_words(line)
            case "function_error":
                row = rows.function_error_row(line)
                self.function_errors[row.key] = row
            case "end":
                end = rows.end_row(line)
                self._ended = end.reason or "no reason recorded"
                self.identity = end.identity or self.identity

    def fail(self, failures: Sequence[Failure]) -> None:
        """Take the last words of processes that stand now: of one that was started again they are gone, those from before the run was
        resumed are old."""
        words = (f"{failure.process} failed: {' '.join(failure.error.split())}" for failure in failures if failure.t >= self._began)
        self._failed = next(words, None)

    @property
    def end_reason(self) -> str | None:
        """None while the run goes on."""
        return self._ended or self._failed

    @property
    def num_reward_calls(self) -> float:
        """Under way."""
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
        recent = list(self.steps)
        since = next((at for at, step in enumerate(recent) if step.t >= recent[-1].t - WINDOW_S), 0) if recent else 0
        recent = recent[max(0, since - 1) :]
        if len(recent) < 2 or recent[-1].t <= recent[0].t:
            return None
        return sum(step.num_trained_tokens or 0 for step in recent[1:]) / (recent[-1].t - recent[0].t)

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

    def _begin(self, line: Line) -> None:
        config = line.get("config") or {}
        self.name = str(config.get("run", {}).get("name", ""))
        self.num_steps = config.get("trainer", {}).get("steps", self.num_steps)
        self.sequence_slots = config.get("engine", {}).get("max_running")
        self.rewards = [str(entry.get("function")) for entry in config.get("reward") or () if isinstance(entry, dict)]
        self._ended = None  # an earlier end was not the end: the run is resumed
        self.alarms.clear()
        self.function_errors.clear()
        self.recent.clear()
        self._began = line["t"]

    def _take_status(self, status: StatusRow) -> None:
        self.status = status
        self.identity = status.identity or self.identity
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


def alarm_words(line: Line) -> str:
    """`truncation since step 20: 54% of samples ...`."""
    return f"{line.get('name')} since step {line.get('began')}: {line.get('figure')}"
