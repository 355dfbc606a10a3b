"""Journal lines -> points: each number of the table of metrics under its name, and the axis on which it stands.

The names are those people know from prime-rl, verl and TRL. A first part belongs to one axis (`AXES`): numbers of a step stand over
the step, gauges over the seconds since the run began, evaluations over the version asked. An axis never goes back: a run that is
resumed does some steps again, and of those the first account stays here; journal and report show the last.

The same lines always give the same points, however often and in how many pieces they are read: gauges are thinned by the journal's
clock, not by ours.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from pipelinerl.observe.fold.rows import Alarm, EvaluationRow, FunctionErrorRow, RunRow, StatusRow, StepRow, SwapRow
from pipelinerl.observe.fold.state import RunState
from pipelinerl.observe.metrics.gauges import ERRORS, EVALUATION, GAUGES, SWAPS, evaluation_metrics, gauges_of
from pipelinerl.observe.metrics.steps import COUNTED, STEP_METRICS, TRAINER_METRICS, trainer_metric
from pipelinerl.observe.metrics.table import first_parts
from pipelinerl.observe.renamed import Line

GAUGES_EVERY_S = 10.0
"""Gauges are written twice a second; trackers get one in so many seconds. More is 17,000 rows a day and no plot shows them."""

STEP, SECONDS, VERSION = "progress/step", "progress/seconds", "eval/version"
AXES = {
    STEP: first_parts(*STEP_METRICS, *TRAINER_METRICS, *COUNTED),
    SECONDS: first_parts(*GAUGES, *SWAPS, ERRORS),
    VERSION: first_parts(*EVALUATION),
}
"""Axis -> first parts of the names that stand over it."""

_RAISED = re.compile(r"(\w+)\(")
"""An exception's type, at the head of a cause."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Numbers of one moment."""

    line: int
    """Number of the journal line it comes from, from 0."""
    t: float
    """Unix seconds."""
    axis: str
    at: float
    """The place on the axis."""
    values: dict[str, float]


class Namer:
    """Folds the orchestrator's journal, line by line, into points."""

    def __init__(self) -> None:
        self._state = RunState()
        self._reached: dict[str, float] = {}
        self._next_gauges_t = 0.0
        self._began = 0.0
        self._num_samples = self._num_tokens = 0.0
        self._swaps: list[SwapRow] = []
        self._alarms: dict[str, float] = {}
        """Every alarm of learning that was ever raised: 1 while it holds, else 0."""
        self._errors: dict[str, float] = {}
        """Failures of users' functions, by name of their cause."""

    def points(self, number: int, line: Line) -> Iterator[Point]:
        """The points of the journal's line `number`."""
        match self._state.fold(line):
            case RunRow() as row:
                self._began = self._began or row.t
            case StepRow() as row:
                yield from self._point(number, row.t, STEP, row.step, self._of_step(row))
            case Alarm() as row:
                self._alarms[row.name] = 0.0 if row.is_over else 1.0
            case SwapRow() as row:
                self._swaps.append(row)
            case FunctionErrorRow() as row:
                name = _error_name(row)
                self._errors[name] = max(row.count, self._errors.get(name, 0.0))
                yield from self._point(number, line["t"], SECONDS, line["t"] - self._began, {name: self._errors[name]})
            case StatusRow() as row if row.t >= self._next_gauges_t:
                self._next_gauges_t = row.t + GAUGES_EVERY_S
                values = gauges_of(self._state, self._swaps) | self._errors
                self._swaps = []
                yield from self._point(number, row.t, SECONDS, row.t - self._began, values)
            case EvaluationRow() as row if row.version is not None:
                yield from self._point(number, row.t, VERSION, row.version, evaluation_metrics(row))
            case _:
                pass

    def _point(self, line: int, t: float, axis: str, at: float, values: dict[str, float]) -> Iterator[Point]:
        if at <= self._reached.get(axis, -1.0):
            return
        self._reached[axis] = at
        yield Point(line=line, t=t, axis=axis, at=at, values=values)

    def _of_step(self, row: StepRow) -> dict[str, float]:
        self._num_samples += row.num_samples or 0
        self._num_tokens += row.num_trained_tokens or 0
        counted = (self._num_samples, self._num_tokens, self._state.trained_tokens_per_s, self._state.useful_tokens_per_s, self._alarms)
        found = {trainer_metric(name)[1]: value for name, value in row.trainer.items()}
        pairs = [(metric, getattr(row, metric.field)) for metric in STEP_METRICS] + list(zip(COUNTED, counted, strict=True))
        return {name: value for metric, values in pairs for name, value in metric.named(values).items()} | found


def _error_name(row: FunctionErrorRow) -> str:
    """`errors/<function>/<exception or outcome> <file:line>`: by cause, in few enough words for a name."""
    raised = _RAISED.match(row.cause)
    what = raised[1] if raised else row.outcome or "error"
    return f"errors/{_tame(row.function)}/{what} {_tame(row.where.rpartition('/')[2])}".rstrip()


def _tame(text: str) -> str:
    return text.replace("/", ".")[:100]
