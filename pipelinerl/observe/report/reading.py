"""Everything that the report keeps of a run, as typed tables. The fold is read as a stream: gauges are thinned on the way, and spans are
read a second time, once it is known which stretch of the run is shown. Everything here and in the figures is linear in the journal.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipelinerl.errors import DataError
from pipelinerl.observe.alarms.rules import Alarms
from pipelinerl.observe.fold import rows
from pipelinerl.observe.fold.followed import read_failures
from pipelinerl.observe.fold.rows import (
    Alarm,
    EndRow,
    EvaluationRow,
    Failure,
    FunctionErrorRow,
    RunRow,
    StartUpRow,
    StatusRow,
    StepRow,
    SwapRow,
)
from pipelinerl.observe.fold.state import RunState
from pipelinerl.observe.fold.thinned import Thinned
from pipelinerl.observe.lines import JournalTail
from pipelinerl.observe.renamed import Line
from pipelinerl.observe.report.clients import ClientModel, ClientModels
from pipelinerl.observe.segments import journals_of

STATUS_ROWS = 4000
"""Gauges kept at most. More would draw nothing finer than a pixel; fewer would blur a diagnosis of few minutes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tables:
    """Everything the report shows of a run, except its spans."""

    folder: Path
    run: RunRow = dataclasses.field(default_factory=RunRow)
    """The newest start; without settings where its line is missing."""
    began: float | None = None
    """Unix seconds of the first line; None for an empty journal."""
    ended: float | None = None
    """Unix seconds of the last line."""
    steps: tuple[StepRow, ...] = ()
    """By step number; of a step that was undone and done again, the later one."""
    statuses: tuple[StatusRow, ...] = ()
    swaps: tuple[SwapRow, ...] = ()
    members: tuple[rows.MemberRow, ...] = ()
    trainer_ranks: tuple[rows.TrainerRanksRow, ...] = ()
    roles: tuple[rows.RolesRow, ...] = ()
    """Engines that have joined, left or were lost, in their order."""
    evaluations: tuple[EvaluationRow, ...] = ()
    end: EndRow | None = None
    """None for a run that has not ended, or was killed."""
    failures: tuple[Failure, ...] = ()
    """Crash reports of the processes that failed, the first one first."""
    alarms: tuple[Alarm, ...] = ()
    """Alarms of learning that hold at the end."""
    past_alarms: tuple[Alarm, ...] = ()
    """Those that were raised and ended."""
    function_errors: tuple[FunctionErrorRow, ...] = ()
    """Failures of users' functions by cause, over all starts of the run, the commonest first."""
    clients: tuple[ClientModel, ...] = ()
    """What the clients of a server trained; none in a run."""
    start_up: tuple[StartUpRow, ...] = ()
    """What processes did until the first step was trained, by when they began with it."""
    num_unreadable: int = 0
    whole_from: float = 0.0
    """Unix seconds from which on every span is as it was written; before, they are summed by the minute."""

    def setting(self, *path: str) -> Any:
        """A configured value by section and key; None where it is not recorded."""
        return self.run.setting(*path)

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


def read_tables(run_folder: Path) -> Tables:
    """Read every journal of a run once."""
    tail, state, learning = JournalTail(run_folder), RunState(), None
    statuses: Thinned[Line] = Thinned(STATUS_ROWS)
    steps: dict[int, StepRow] = {}
    swaps: list[SwapRow] = []
    members: list[rows.MemberRow] = []
    trainer_ranks: list[rows.TrainerRanksRow] = []
    roles: list[rows.RolesRow] = []
    evaluations: list[EvaluationRow] = []
    start_up: list[StartUpRow] = []
    whole_from, clients = 0.0, ClientModels()
    for line in tail.new_lines():
        if line["kind"] == "status":  # most lines are of this kind, and few of them stay: those are typed in the end
            statuses.add(line)
            state.see(line)
            continue
        if line["kind"] == "work":
            whole_from = max(whole_from, rows.number(line.get("end")) or 0.0)
        if line["kind"] == "startup":
            start_up.append(rows.read(StartUpRow, line))
        if line["kind"] == "client_step":
            clients.add(line)
        match state.fold(line):
            case RunRow() as row:
                learning = learning or _learning(row)
            case StepRow() as row:
                steps[row.step] = row
                (learning := learning or Alarms()).take_step(row)
            case EvaluationRow() as row:
                evaluations.append(row)
                (learning := learning or Alarms()).take_evaluation(row)
            case SwapRow() as row if row.engine_id >= 0:
                swaps.append(row)
            case rows.MemberRow() as row:
                members.append(row)
            case rows.TrainerRanksRow() as row:
                trainer_ranks.append(row)
            case rows.RolesRow() as row:
                roles.append(row)
            case _:
                pass
    learning = learning or Alarms()
    return Tables(
        folder=run_folder,
        run=state.run or RunRow(),
        began=state.began,
        ended=state.last_t,
        steps=tuple(steps[step] for step in sorted(steps)),
        statuses=tuple(rows.read(StatusRow, line) for line in statuses.rows()),
        swaps=tuple(sorted(swaps, key=lambda swap: swap.t)),
        members=tuple(members),
        trainer_ranks=tuple(trainer_ranks),
        roles=tuple(roles),
        evaluations=tuple(sorted(evaluations, key=lambda evaluation: evaluation.t)),
        end=state.end,
        failures=read_failures(run_folder),
        alarms=tuple(learning.active.values()),
        past_alarms=tuple(alarm for alarm in learning.raised if alarm not in learning.active.values()),
        function_errors=tuple(state.errors.rows()),
        clients=clients.rows(),
        start_up=_until_first_step(start_up, steps),
        num_unreadable=tail.num_unreadable,
        whole_from=whole_from,
    )


def _until_first_step(start_up: Iterable[StartUpRow], steps: Mapping[int, StepRow]) -> tuple[StartUpRow, ...]:
    """Of processes that were started again the last time before the first step; what they did after it held no first step up."""
    end = min((step.t for step in steps.values()), default=math.inf)
    last = {(row.process, row.what): row for row in sorted(start_up, key=lambda row: row.end) if row.end <= end}
    return tuple(sorted(last.values(), key=lambda row: row.start))


def _learning(run: RunRow) -> Alarms:
    """The alarms' rules with the bounds that the run was begun with."""
    correct, bound = rows.number(run.setting("algorithm", "correct_reward")), rows.number(run.setting("trainer", "max_mismatch_kl"))
    given = {"correct_reward": correct, "max_mismatch_kl": bound}
    return Alarms(**{name: value for name, value in given.items() if value is not None})


def has_journal(run_folder: Path) -> Path:
    """Return the same folder; raises `DataError` where it holds no journal."""
    if not journals_of(run_folder / "journal"):
        raise DataError(f"no journal in {run_folder / 'journal'}: name the folder of a run, the one that holds its journal folder")
    return run_folder
