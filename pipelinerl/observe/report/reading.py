"""Journals -> typed tables. A journal of days is large, so it is read as a stream: gauges are thinned on the way, spans are read
a second time, once it is known which stretch of the run is to be shown. Everything here and in the figures is linear in the journal.

A half-written line (a process was killed, or is writing) is left out; a line that cannot be decoded is counted, never fatal.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path
from typing import Any, Generic, TypeVar

from pipelinerl.errors import DataError
from pipelinerl.observe.alarms.names import Alarm
from pipelinerl.observe.alarms.rules import Alarms
from pipelinerl.observe.lines import JournalTail, json_object
from pipelinerl.observe.renamed import Line
from pipelinerl.observe.report import rows
from pipelinerl.observe.report.rows import EndRow, EvaluationRow, Failure, FunctionErrorRow, StatusRow, StepRow, SwapRow
from pipelinerl.observe.segments import journals_of

_T = TypeVar("_T")

STATUS_ROWS = 4000
"""Gauges kept at most. More would draw nothing finer than a pixel; fewer would blur a diagnosis of few minutes."""


class Thinned(Generic[_T]):
    """A list that stays short: when full, every second row goes and from then on only every second one is taken. The last one stays."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._rows: list[_T] = []
        self._stride = 1
        self._num_seen = 0
        self._last: _T | None = None

    def add(self, row: _T) -> None:
        """Take the next row."""
        if self._num_seen % self._stride == 0:
            self._rows.append(row)
            if len(self._rows) > self._limit:
                del self._rows[1::2]
                self._stride *= 2
        self._num_seen += 1
        self._last = row

    def rows(self) -> list[_T]:
        """The rows kept, in order, the last one included."""
        if self._last is None or self._rows[-1] is self._last:
            return list(self._rows)
        return [*self._rows, self._last]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """Everything the report shows of a run, except its spans."""

    folder: Path
    config: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Resolved settings; empty where the run line is missing."""
    derived: dict[str, Any] = dataclasses.field(default_factory=dict)
    began: float | None = None
    """Unix seconds of the first line; None for an empty journal."""
    ended: float | None = None
    """Unix seconds of the last line."""
    steps: tuple[StepRow, ...] = ()
    """By step number; of a step that was undone and done again, the later one."""
    statuses: tuple[StatusRow, ...] = ()
    swaps: tuple[SwapRow, ...] = ()
    evaluations: tuple[EvaluationRow, ...] = ()
    end: EndRow | None = None
    """None for a run that has not ended, or was killed."""
    failures: tuple[Failure, ...] = ()
    """Last words of the processes that failed, the first one first."""
    alarms: tuple[Alarm, ...] = ()
    """Alarms of learning that hold at the end."""
    past_alarms: tuple[Alarm, ...] = ()
    """Those that were raised and ended."""
    function_errors: tuple[FunctionErrorRow, ...] = ()
    """Failures of users' functions by cause, over all lives of the run, the commonest first."""
    machine: dict[str, int] = dataclasses.field(default_factory=dict)
    """`cores` and `devices` of the orchestrator's; empty where that is not recorded."""
    num_unreadable: int = 0
    whole_from: float = 0.0
    """Unix seconds from which on every span is as it was written; before, they are summed by the minute."""

    def setting(self, *path: str) -> Any:
        """A configured value by section and key; None where it is not recorded."""
        value: Any = self.config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value

    def since_start(self, t: float) -> float:
        """Seconds from the run's first line to `t`."""
        return t - (self.began or 0.0)

    @property
    def name(self) -> str:
        return str(self.setting("run", "name") or self.folder.name)

    @functools.cached_property
    def worked_from(self) -> float | None:
        """Unix seconds of the last gauges before the first token; of the first line where that is not recorded. Models load until then."""
        first = min((row.t for rows in (self.steps, self.evaluations) for row in rows), default=math.inf)
        first = min(first, next((status.t for status in self.statuses if status.generated_tokens), math.inf))
        return max((status.t for status in self.statuses if status.t < first < math.inf), default=self.began)

    @property
    def duration_s(self) -> float | None:
        return None if self.began is None or self.ended is None else self.ended - self.began

    @property
    def last_status(self) -> StatusRow | None:
        return self.statuses[-1] if self.statuses else None


class Learning:
    """The alarms of learning that a run's lines raise, as the orchestrator raised them."""

    def __init__(self) -> None:
        self.rules = Alarms()
        self._has_begun = False

    def take(self, line: Line) -> None:
        """Take a line of any kind."""
        match line["kind"]:
            case "run" if not self._has_begun:
                self._has_begun = True
                config = _object(line.get("config"))
                correct = rows.number(_object(config.get("algorithm")).get("correct_reward"))
                bound = rows.number(_object(config.get("trainer")).get("max_mismatch_kl"))
                given = {"correct_reward": correct, "max_mismatch_kl": bound}
                self.rules = Alarms(**{name: value for name, value in given.items() if value is not None})
            case "step" if rows.number(line.get("step")) is not None:
                self.rules.take_step(line)
            case "evaluation":
                self.rules.take_evaluation(line)


class FunctionErrors:
    """Failures of users' functions by cause. Each life of a run counts from zero."""

    def __init__(self) -> None:
        self._before: dict[tuple[str, str, str], FunctionErrorRow] = {}
        self._now: dict[tuple[str, str, str], FunctionErrorRow] = {}

    def begin_life(self) -> None:
        """What comes now counts from zero."""
        self._before, self._now = {row.key: row for row in self.rows()}, {}

    def take(self, row: FunctionErrorRow) -> None:
        """Take a cause's newest count."""
        first = self._now.get(row.key, row)
        self._now[row.key] = dataclasses.replace(row, t=first.t)

    def rows(self) -> tuple[FunctionErrorRow, ...]:
        """By cause, the commonest first."""
        together = dict(self._before)
        for key, row in self._now.items():
            before = together.get(key)
            together[key] = row if before is None else dataclasses.replace(row, t=before.t, count=row.count + before.count)
        return tuple(sorted(together.values(), key=lambda row: -row.count))


def read_tables(run_folder: Path) -> Tables:
    """Read every journal of a run once."""
    tail = JournalTail(run_folder)
    statuses: Thinned[Line] = Thinned(STATUS_ROWS)
    steps: dict[int, StepRow] = {}
    swaps: list[SwapRow] = []
    evaluations: list[EvaluationRow] = []
    found: dict[str, Line] = {}
    learning = Learning()
    errors = FunctionErrors()
    began = ended = None
    whole_from = 0.0
    for line in tail.new_lines():
        began = line["t"] if began is None else min(began, line["t"])
        ended = line["t"] if ended is None else max(ended, line["t"])
        learning.take(line)
        match line["kind"]:
            case "function_error":
                errors.take(rows.function_error_row(line))
            case "status":
                statuses.add(line)
            case "step" if rows.number(line.get("step")) is not None:
                steps[line["step"]] = rows.step_row(line)
            case "swap" if rows.number(line.get("engine_id")) is not None:
                swaps.append(rows.swap_row(line))
            case "evaluation":
                evaluations.append(rows.evaluation_row(line))
            case "work" if (end := rows.number(line.get("end"))) is not None:
                whole_from = max(whole_from, end)
            case "run":
                errors.begin_life()
                found = {"run": line}  # an earlier end was not the end: the run was resumed
            case "end":
                found["end"] = line
    run = found.get("run", {})
    return Tables(
        folder=run_folder,
        config=_object(run.get("config")),
        derived=_object(run.get("derived")),
        began=began,
        ended=ended,
        steps=tuple(steps[step] for step in sorted(steps)),
        statuses=tuple(rows.status_row(line) for line in statuses.rows()),
        swaps=tuple(sorted(swaps, key=lambda swap: swap.t)),
        evaluations=tuple(sorted(evaluations, key=lambda evaluation: evaluation.t)),
        end=rows.end_row(found["end"]) if "end" in found else None,
        failures=read_failures(run_folder),
        alarms=tuple(learning.rules.active.values()),
        past_alarms=tuple(alarm for alarm in learning.rules.raised if alarm not in learning.rules.active.values()),
        function_errors=errors.rows(),
        machine={name: value for name, value in rows.numbers(run.get("machine")).items() if isinstance(value, int)},
        num_unreadable=tail.num_unreadable,
        whole_from=whole_from,
    )


def has_journal(run_folder: Path) -> Path:
    """The same folder; raises `DataError` where it holds no journal."""
    if not journals_of(run_folder / "journal"):
        raise DataError(f"no journal in {run_folder / 'journal'}: name the folder of a run, the one that holds its journal folder")
    return run_folder


def read_failures(run_folder: Path) -> tuple[Failure, ...]:
    """What `process.crash_report` left behind, in order of time."""
    found = [record for path in (run_folder / "failures").glob("*.json") if (record := json_object(path.read_bytes())) is not None]
    failures = [
        Failure(t=rows.number(record.get("t")) or 0.0, process=str(record.get("process", "?")), error=str(record.get("error", "")))
        for record in found
    ]
    return tuple(sorted(failures, key=lambda failure: failure.t))


def _object(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
