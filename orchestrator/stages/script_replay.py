"""A script that goes on is led through the calls of the one before: each is answered from the record, up to the last step decided upon.

Calls are matched in the order in which each task of the script made them, and what was waited for comes in the order in which it came: so
what the script computes of it, its variables, are what they were, if it is the same script. From there on it lives: streams that were not
read to their end then give what is left, which engines and scorers go on with.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import weakref
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

from orchestrator.ledger.answers import Answers, Event, Kind
from orchestrator.stages.script_waits import ScriptWaits
from pipelinerl.errors import ScriptDiverged

_T = TypeVar("_T")


class ScriptReplay:
    """Numbers the calls of a script, and answers those of its record. Without `answers` nothing is recorded."""

    def __init__(self, answers: Answers | None, *, next_step: int, waits: ScriptWaits) -> None:
        """`next_step` is the first that is not decided upon. Raises `ScriptDiverged` for a record that does not lead there."""
        self.live = asyncio.Event()
        """Set once the script is where the one before was."""
        self._answers = answers
        self._waits = waits
        self._next_step = next_step
        self._call_of_step: dict[int, int] = {}
        self._events = _up_to(answers.events, next_step) if answers is not None else []
        self._has_happened = [False] * len(self._events)
        self._cursor = 0
        by_kind: dict[Kind, dict[int, collections.deque[int]]] = {kind: collections.defaultdict(collections.deque) for kind in Kind}
        for at, event in enumerate(self._events):
            by_kind[event.kind][event.call].append(at)
        self._calls: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
        """Recorded calls that were not made again, by task."""
        for (at,) in by_kind[Kind.CALLED].values():
            self._calls[self._events[at].task].append(at)
        self._unseen = list(self._calls)
        """Recorded tasks that have not called again, in the order of their first calls."""
        self._tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()
        self._num_tasks = len(self._unseen)
        self._answered = {call: at for call, (at,) in by_kind[Kind.ANSWERED].items()}
        self._results, self._admitted = by_kind[Kind.RESULT], by_kind[Kind.ADMITTED]
        self._num_recorded = self._num_calls = len(by_kind[Kind.CALLED])
        late = answers.events[len(self._events) :] if answers is not None else []
        self._late = {event.call: event for event in late if event.kind is Kind.ANSWERED and event.call < self._num_recorded}
        """Answers that came after the last step was decided upon, to calls before it."""
        self._has_answer = self._answered.keys() | self._late.keys()
        if answers is not None:
            answers.drop([event for event in late if event not in self._late.values()])
        self.groups = frozenset(event.number for event in self._events if event.kind is Kind.ADMITTED)
        """The groups that were asked for until then."""
        self.sampled = frozenset(event.words for event in self._events if event.kind is Kind.RESULT and event.number >= 0)
        """The rollouts that were read, before they were scored, until then."""
        if not self._events:
            self.live.set()

    @property
    def is_kept(self) -> bool:
        """True where this process goes on from a record."""
        return bool(self._events)

    def begin(self, name: str, *given: object, step: int = -1) -> int:
        """Note a call with what it is given, and return its number. Raises `ScriptDiverged` where the record has another one."""
        words = self._words(name, given)
        task = self._task(words)
        if recorded := self._calls.get(task):
            event = self._events[at := recorded.popleft()]
            if event.words != words:
                other = "with other arguments" if _name(event) == name else f"where it called {_name(event)}"
                raise self._diverged(f"call {event.call + 1} of the script is {name}, {other} when it was recorded")
            self._happen(at)
            call = event.call
        else:
            call, self._num_calls = self._num_calls, self._num_calls + 1
            self.note(call, Kind.CALLED, words=words, number=step, task=task)
        if step >= 0:
            self._call_of_step[step] = call
        return call

    def is_recorded(self, call: int) -> bool:
        """Return whether a call was made before."""
        return call < self._num_recorded

    def answer(self, call: int, make: Callable[[], _T], *, encode: Callable[[_T], bytes], decode: Callable[[bytes], _T]) -> _T:
        """Return the answer to a call that waits for nothing."""
        if (at := self._answered.pop(call, None)) is not None and self._answers is not None:
            self._happen(at)
            return decode(self._answers.body(self._events[at]))
        found = make()
        self._keep(call, lambda: encode(found))
        return found

    async def wait(
        self, call: int, make: Callable[[], Awaitable[_T]], *, encode: Callable[[_T], bytes] | None, decode: Callable[[bytes], _T]
    ) -> _T:
        """Return the answer to a call that waits, in its turn. Without `encode`, `done` records it."""
        if self._answers is not None:
            if (at := self._answered.pop(call, None)) is not None:
                await self._turn(at)
                return decode(self._answers.body(self._events[at]))
            if (late := self._late.pop(call, None)) is not None:
                await self.over(call)
                return decode(self._answers.body(late))
        found = await make()
        await self.over(call)
        if encode is not None:
            self._keep(call, lambda: encode(found))
        return found

    async def over(self, call: int) -> None:
        """Wait for the end of the record: what it does not hold came after all that it holds."""
        if not self.live.is_set():
            with self._waits.waiting(f"its turn: call {call + 1} is answered after all that the record has"):
                while not self.live.is_set():
                    self.check_turn()
                    self._waits.check()
                    await self._waits.changed.wait()

    def check_turn(self) -> None:
        """Raise `ScriptDiverged` where the task that waits here is the one whose call comes next in the record."""
        event = None if self.live.is_set() else self._events[self._cursor]
        if event is not None and event.kind is Kind.CALLED and self._tasks.get(_current_task()) == event.task:
            raise self._diverged(f"the script waits for something else than it had when it made call {event.call + 1}, {_name(event)}")

    def done(self, step: int, body: bytes) -> None:
        """Record, at once, the answer to the call that made a step, where that call is known and has none."""
        if (call := self._call_of_step.pop(step, None)) is not None and call not in self._has_answer:
            self._keep(call, lambda: body)
            self.flush()

    def admitted(self, call: int) -> list[int]:
        """Return the groups that the first prompts of a call became, in order; -1: quarantined."""
        places = self._admitted.pop(call, ())
        for at in places:
            self._happen(at)
        return [self._events[at].number for at in places]

    def results(self, call: int) -> list[Event]:
        """Return the results of a call that are left to be read from the record."""
        return [self._events[at] for at in self._results.get(call, ())]

    def body(self, event: Event) -> bytes:
        """Return what an event holds."""
        assert self._answers is not None, "events are of a record"
        return self._answers.body(event)

    async def take(self, call: int) -> Event | None:
        """Wait for the turn of the next recorded result of a call; None where none is left."""
        if not (left := self._results.get(call)):
            return None
        event = self._events[left[0]]
        await self._turn(left[0])
        left.popleft()
        return event

    def note(self, call: int, kind: Kind, *, words: str = "", number: int = -1, task: int = 0, body: Callable[[], bytes] = bytes) -> None:
        """Record an event of a script that lives."""
        if self._answers is not None:
            self._answers.add(call, kind, words=words, number=number, task=task, body=body())

    def flush(self) -> None:
        """Write what was recorded."""
        if self._answers is not None:
            self._answers.flush()

    def check_over(self) -> None:
        """Raise `ScriptDiverged` where a script ends in the middle of its record."""
        if not self.live.is_set():
            event = self._events[self._cursor]
            raise ScriptDiverged(f"the script ends, and its record goes on with {event.kind} of call {event.call + 1} {event.words}")

    def _keep(self, call: int, encode: Callable[[], bytes]) -> None:
        self.note(call, Kind.ANSWERED, body=encode)

    def _words(self, name: str, given: tuple[object, ...]) -> str:
        if self._answers is None:
            return name
        digest = hashlib.blake2b(digest_size=8)
        for one in given:
            digest.update(one if isinstance(one, bytes) else repr(one).encode())
        return f"{name} [{digest.hexdigest()}]"

    def _task(self, words: str) -> int:
        """Return the number of the task that calls; one that is new is the next recorded one that began with such a call."""
        task = _current_task()
        if task not in self._tasks:
            known = next((one for one in self._unseen if self._events[self._calls[one][0]].words == words), None)
            if known is None and not self._tasks and self._unseen:
                known = self._unseen[0]  # its first call is not what was recorded
            if known is None:
                known, self._num_tasks = self._num_tasks, self._num_tasks + 1
            else:
                self._unseen.remove(known)
            self._tasks[task] = known
        return self._tasks[task]

    def _diverged(self, words: str) -> ScriptDiverged:
        return ScriptDiverged(
            f"{words}. A script that goes on is led through its calls up to step {self._next_step - 1}: keep its code, its seeds and the"
            " settings as they were, or go on without replay=True"
        )

    async def _turn(self, at: int) -> None:
        event = self._events[at]
        with self._waits.waiting(f"its turn: call {event.call + 1} is answered after what the record has before it"):
            while self._cursor != at:
                self.check_turn()
                self._waits.check()
                await self._waits.changed.wait()
        self._happen(at)

    def _happen(self, at: int) -> None:
        self._has_happened[at] = True
        while self._cursor < len(self._events) and self._has_happened[self._cursor]:
            self._cursor += 1
        if self._cursor == len(self._events):
            self.live.set()
        self._waits.changed.set()


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "scripts run in tasks"
    return task


def _name(event: Event) -> str:
    """Return what a recorded call is named, without the digest of what it was given."""
    return event.words.rpartition(" ")[0]


def _up_to(events: list[Event], next_step: int) -> list[Event]:
    """Return the events up to the call of the last step that was decided upon."""
    last = max((at for at, event in enumerate(events) if event.kind is Kind.CALLED and 0 <= event.number < next_step), default=-1)
    found = events[last].number + 1 if last >= 0 else 0
    if found != next_step:
        raise ScriptDiverged(
            f"the record of the script's calls leads up to step {found}, and step {next_step} of the run comes next: it was begun, or went"
            " on, without replay=True. Go on without it"
        )
    return events[: last + 1]
