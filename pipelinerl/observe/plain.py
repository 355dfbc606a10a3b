"""A run in plain lines, where the output is no terminal: what starts, what is waited for, steps, evaluations, alarms, errors.

Reads what the live view reads. Something is printed in the first second, and then at least every `QUIET_S`, twice as long each time nothing
is new, so that a log shows at any moment what the run is doing, and a reward that hangs is named.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from pipelinerl.observe.fold import rows
from pipelinerl.observe.fold.rows import Alarm, EvaluationRow
from pipelinerl.observe.fold.state import RunState
from pipelinerl.observe.renamed import Line
from pipelinerl.observe.report import units

PLAIN_LINES = 50
"""About so many lines of steps for a whole run."""
QUIET_S, LONGEST_QUIET_S = 8.0, 64.0
"""Without a line, after which what is waited for is told: the first time, and at most, as it doubles while nothing is new."""
STUCK_S = 5.0
"""Reward calls of which none ends for so long are told beside what is waited for."""
BRIEF_S = 1.0
"""Waits that are shorter tell nothing: a run that is well waits for something all the time."""
SILENT_S = 10.0
"""Without a line from the orchestrator, which writes twice a second."""


@dataclasses.dataclass(slots=True, kw_only=True)
class PlainLines:
    """Says which plain lines are due."""

    began: float = 0.0
    """Unix seconds of the start that is followed; what is older is an earlier life's, and no news."""
    next_step: int = 1
    _news: list[str] = dataclasses.field(default_factory=list)
    _seen: set[object] = dataclasses.field(default_factory=set)
    _told_at: float | None = None
    _quiet_s: float = QUIET_S

    def take(self, lines: Iterable[Line]) -> None:
        """Note what is news in these lines of the journal."""
        for line in lines:
            if line["t"] >= self.began and (words := self._news_of(line)) is not None:
                self._news.append(self._timed(line["t"], words))

    def due(self, state: RunState) -> str | None:
        """A line for the log where enough steps were done since the last one, else None."""
        done = state.num_steps_done
        if done < self.next_step or not state.steps:
            return None
        self.next_step = done + max(1, (state.num_steps or 0) // PLAIN_LINES)
        return plain_line(state)

    def lines(self, state: RunState, *, now: float) -> list[str]:
        """Everything due by now, in Unix seconds: news, the line of a step, or, after a while without either, what is waited for."""
        due, self._news = self._news, []
        if state.steps and state.steps[-1].t >= self.began and (line := self.due(state)) is not None:
            due.append(line)
        self._told_at = now if self._told_at is None else self._told_at
        if due:
            self._told_at, self._quiet_s = now, QUIET_S
        elif now - self._told_at >= self._quiet_s and state.end_reason is None:
            self._told_at, self._quiet_s = now, min(2 * self._quiet_s, LONGEST_QUIET_S)
            due.append(self._timed(now, waiting_words(state, now=now, began=self.began)))
        return due

    def _timed(self, t: float, words: str) -> str:
        return f"{t - self.began:.0f} s: {words}" if self.began else words

    def _news_of(self, line: Line) -> str | None:
        match line["kind"], rows.row_of(line):
            case "run", _:
                return "the orchestrator is up; engines, scorers and trainer load"
            case "joined", _:
                return f"engine {line.get('engine_id')} is ready"
            case "left", _:
                return f"engine {line.get('engine_id')} is gone"
            case "scale", _:
                refused = line.get("refused")
                names = ("engines", "prm", "trainer", "tensor_parallel_size")
                counts = {name: line.get(name) for name in names} | rows.numbers(line.get("rewards"))
                wanted = " ".join(f"{name}={count}" for name, count in counts.items() if count is not None)
                return f"{wanted} is asked for" + (f", and refused: {refused}" if refused else "")
            case _, rows.TrainerRanksRow() as trainer if trainer.epoch:
                return trainer.words
            case _, rows.RolesRow() as roles if roles.is_news:
                return roles.words
            case _, rows.MemberRow() as member if (member.of, member.state) != ("engines", "live"):  # of these, `joined` tells
                return f"{member.name} is {member.state}".replace("is left", "has left") + f": {member.reason}".rstrip(": ")
            case "trainer", _:
                return "the trainer is ready"
            case _, rows.StatusRow() as status:
                return self._first_of(status)
            case _, EvaluationRow() as evaluation:
                return held_out_words(evaluation)
            case "evaluation_dropped", _:
                return f"the evaluation of version {line.get('version')} was dropped: {line.get('error')}"
            case _, Alarm() as alarm:
                return f"alarm over: {alarm.name}" if alarm.is_over else f"ALARM {alarm}. {alarm.change}"
            case "step", _ if (line.get("trainer") or {}).get("policies_skipped"):
                return "a policy found no room, so engines go on with an earlier one; logs/trainer.log says where"
            case "mismatch", _:
                return f"step {line.get('step')}: {line.get('words')}"
            case _, rows.FunctionErrorRow() as error if self._is_first(error.key):
                return error_words(error)
        return None

    def _first_of(self, status: rows.StatusRow) -> str | None:
        first = [
            words
            for queue, words in (("trajectories", "the first completion is there"), ("scored", "the first score is there"))
            if queue in status.queues and status.queues[queue].num_items_total and self._is_first(words)
        ]
        return "; ".join(first) or None

    def _is_first(self, key: object) -> bool:
        is_first = key not in self._seen
        self._seen.add(key)
        return is_first


def waiting_words(state: RunState, *, now: float, began: float) -> str:
    """Say what the run waits for: the longest wait that tells anything, reward calls that do not end, a silent orchestrator."""
    status = state.status
    if status is None or status.t < began:
        return "waiting for the orchestrator to begin"
    if now - status.t > SILENT_S:
        return f"the orchestrator has written nothing for {now - status.t:.0f} s; its log: logs/orchestrator.log"
    waits = [(name, seconds) for name, seconds in status.waits if seconds >= BRIEF_S and not rows.is_idle(name)]
    words = [f"waiting for {wait_words(name)} for {seconds:.0f} s" for name, seconds in waits[:1]]
    if state.scored_at is not None and now - state.scored_at >= STUCK_S:
        names = ", ".join(state.rewards)
        stuck = f"{units.plural(state.num_reward_calls, 'reward call')} under way, none has ended for {now - state.scored_at:.0f} s"
        words.append(stuck + (f" ({names})" if names else ""))
    done = f"step {state.num_steps_done}/{state.num_steps or '?'}"
    return "; ".join([*words, done]) if state.num_steps_done or not words else "; ".join(words)


def wait_words(name: str) -> str:
    """`generation: a free engine slot` as `a free engine slot (generation)`."""
    stage, _, what = name.partition(": ")
    return f"{what} ({stage})"


def error_words(error: rows.FunctionErrorRow) -> str:
    """One cause of failures on one line."""
    where = f" at {error.where}" if error.where else ""
    return f"ERROR {error.function} ({error.kind}): {error.cause}{where}"


def held_out_words(row: EvaluationRow) -> str:
    """An evaluation on one line, by component where there are several."""
    parts = ", ".join(f"{name} {units.dashed(value)}" for name, value in row.components.items()) if len(row.components) > 1 else ""
    return f"held-out {units.dashed(row.reward_mean)} at version {units.whole(row.version)}" + (f" ({parts})" if parts else "")


def plain_line(state: RunState) -> str:
    """The state on one line, for a log."""
    step = state.steps[-1]
    useful = "" if state.useful_tokens_per_s is None else f", useful {units.dashed(state.useful_tokens_per_s)} tok/s"
    parts = [
        f"step {state.num_steps_done}/{state.num_steps or '?'}",
        f"reward {units.dashed(step.reward_mean)}",
        f"staleness {units.dashed(step.staleness_mean)}/{units.dashed(step.staleness_max, units.whole)}",
        f"generated {units.dashed(state.generated_tokens_per_s)} tok/s",
        f"trained {units.dashed(state.trained_tokens_per_s)} tok/s{useful}",
        f"trainer waited {units.whole_percent(state.trainer_wait_fraction)}",
        f"engines idle {units.whole_percent(state.engine_idle_fraction)}",
        f"slots empty {units.whole_percent(state.engine_empty_fraction)}",
    ]
    if state.last_evaluation is not None:
        parts.append(f"held-out {units.dashed(state.last_evaluation.reward_mean)}")
    if state.seconds_left:
        parts.append(f"{units.duration(state.seconds_left)} left")
    if state.errors.now:
        parts.append(f"function errors {units.whole(sum(error.count for error in state.errors.now.values()))}")
    if state.active_alarms:
        parts.append(f"alarms: {', '.join(state.active_alarms)}")
    if off := rows.imbalance(state.identity):
        parts.append(f"ACCOUNTS OFF BY {off}")
    return "  ".join(parts)


def end_lines(state: RunState) -> list[str]:
    """The end of the run: failures of functions by cause, alarms that still hold, the accounts."""
    errors = [f"{error_words(error)}, {units.whole(error.count)} times" for error in state.errors.commonest()]
    return [*errors, *(f"ALARM {alarm}" for alarm in state.active_alarms.values()), f"ended: {state.end_reason}; {identity_words(state)}"]


def identity_words(state: RunState) -> str:
    """The conservation identity on one line."""
    off = rows.imbalance(state.identity)
    if off is None:
        return units.NOT_RECORDED
    return units.account(state.identity, off=off) + (f"  off by {units.whole(off)}" if off else "")
