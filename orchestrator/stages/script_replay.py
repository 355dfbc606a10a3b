"""A script that goes on is led through the calls of the one before: each is answered from the record, up to the last step decided upon.

Calls are matched in the order in which each task of the script made them, whichever policy they ask, and what was waited for comes in the
order in which it came: so what the script computes of it, its variables, are what they were, if it is the same script. From there on it
lives: streams that were not read to their end then give what is left, which engines and scorers go on with.
"""

from __future__ import annotations

import asyncio
import collections
import hashlib
import weakref
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec
import numpy as np

from orchestrator.ledger.answers import Answers, Event, Kind
from orchestrator.stages.script_waits import ScriptWaits
from pipelinerl.errors import ScriptDiverged
from pipelinerl.messages import Float32

_T = TypeVar("_T")


class ScriptRecord:
    """What a script called and was answered, of all its policies in one order, and how far one that goes on is along it. Without `answers`
    nothing is recorded.
    """

    def __init__(self, answers: Answers | None, *, next_steps: Mapping[str, int]) -> None:
        """`next_steps` are the first steps that are not decided upon, by policy. Raises `ScriptDiverged` for a record that does not lead
        there.
        """
        self.live = asyncio.Event()
        """Set once the script is where the one before was."""
        self.answers = answers
        self._next_steps = next_steps
        self._policies: list[tuple[ScriptWaits, Callable[[], None]]] = []
        """How each waits, and what writes its ledger."""
        self.events = _up_to(answers.events, next_steps) if answers is not None else []
        """The events up to the last step that was decided upon."""
        self._has_happened = [False] * len(self.events)
        self._cursor = 0
        by_kind: dict[Kind, dict[int, collections.deque[int]]] = {kind: collections.defaultdict(collections.deque) for kind in Kind}
        for at, event in enumerate(self.events):
            by_kind[event.kind][event.call].append(at)
        self._calls: dict[int, collections.deque[int]] = collections.defaultdict(collections.deque)
        """Recorded calls that were not made again, by task."""
        for (at,) in by_kind[Kind.CALLED].values():
            self._calls[self.events[at].task].append(at)
        self.calls_of: dict[str, set[int]] = collections.defaultdict(set)
        """The recorded calls of each policy."""
        for call, (at,) in by_kind[Kind.CALLED].items():
            self.calls_of[_policy(self.events[at])].add(call)
        self._unseen = list(self._calls)
        """Recorded tasks that have not called again, in the order of their first calls."""
        self._tasks: weakref.WeakKeyDictionary[asyncio.Task[Any], int] = weakref.WeakKeyDictionary()
        self._num_tasks = len(self._unseen)
        self.answered = {call: at for call, (at,) in by_kind[Kind.ANSWERED].items()}
        """The places of answers, by call."""
        self.results, self.admitted = by_kind[Kind.RESULT], by_kind[Kind.ADMITTED]
        """The places of what a stream gave, and of groups, by call."""
        self.num_recorded = self._num_calls = len(by_kind[Kind.CALLED])
        late = answers.events[len(self.events) :] if answers is not None else []
        self.late = {event.call: event for event in late if event.kind is Kind.ANSWERED and event.call < self.num_recorded}
        """Answers that came after the last step was decided upon, to calls before it."""
        self.has_answer = self.answered.keys() | self.late.keys()
        """The calls whose answer is recorded."""
        if answers is not None:
            answers.drop([event for event in late if event not in self.late.values()])
        if not self.events:
            self.live.set()

    def join(self, waits: ScriptWaits, write: Callable[[], None]) -> None:
        """Have a policy wait for its turns; `write` writes its ledger."""
        self._policies.append((waits, write))

    def begin(self, words: str, step: int) -> int:
        """Note a call, and return its number. Raises `ScriptDiverged` where the record has another one."""
        assert self.answers is not None, "calls are recorded"
        task = self._task(words)
        if not (recorded := self._calls.get(task)):
            call, self._num_calls = self._num_calls, self._num_calls + 1
            self.answers.add(call, Kind.CALLED, words=words, number=step, task=task)
            return call
        event = self.events[at := recorded.popleft()]
        if event.words != words:
            name = words.rpartition(" ")[0]
            other = "with other arguments" if _name(event) == name else f"where it called {_name(event)}"
            raise self._diverged(f"call {event.call + 1} of the script is {name}, {other} when it was recorded")
        self.happen(at)
        return event.call

    def check_turn(self) -> None:
        """Raise `ScriptDiverged` where the task that waits here is the one whose call comes next in the record."""
        event = None if self.live.is_set() else self.events[self._cursor]
        if event is not None and event.kind is Kind.CALLED and self._tasks.get(_current_task()) == event.task:
            raise self._diverged(f"the script waits for something else than it had when it made call {event.call + 1}, {_name(event)}")

    def check_over(self) -> None:
        """Raise `ScriptDiverged` where a script ends in the middle of its record."""
        if not self.live.is_set():
            event = self.events[self._cursor]
            raise ScriptDiverged(f"the script ends, and its record goes on with {event.kind} of call {event.call + 1} {event.words}")

    async def turn(self, at: int, waits: ScriptWaits) -> None:
        """Wait for the turn of an event."""
        event = self.events[at]
        with waits.waiting(f"its turn: call {event.call + 1} is answered after what the record has before it"):
            while self._cursor != at:
                self.check_turn()
                waits.check()
                await waits.changed.wait()
        self.happen(at)

    def happen(self, at: int) -> None:
        """Note that an event has happened again."""
        self._has_happened[at] = True
        while self._cursor < len(self.events) and self._has_happened[self._cursor]:
            self._cursor += 1
        if self._cursor == len(self.events):
            self.live.set()
        for waits, _ in self._policies:
            waits.changed.set_all()

    def flush(self) -> None:
        """Write what was recorded."""
        if self.answers is not None:
            self.answers.flush()

    def write_ledgers(self) -> None:
        """Write the ledger of each policy, where there are several: what one decides upon has the record of all lead there, and no ledger
        may know less than the record.
        """
        if self.answers is not None and len(self._policies) > 1:
            for _, write in self._policies:
                write()

    def _task(self, words: str) -> int:
        """Return the number of the task that calls; one that is new is the next recorded one that began with such a call."""
        task = _current_task()
        if task not in self._tasks:
            known = next((one for one in self._unseen if self.events[self._calls[one][0]].words == words), None)
            if known is None and not self._tasks and self._unseen:
                known = self._unseen[0]  # its first call is not what was recorded
            if known is None:
                known, self._num_tasks = self._num_tasks, self._num_tasks + 1
            else:
                self._unseen.remove(known)
            self._tasks[task] = known
        return self._tasks[task]

    def _diverged(self, words: str) -> ScriptDiverged:
        steps = ", ".join(f"step {step - 1}" + (f" of policy {policy}" if policy else "") for policy, step in self._next_steps.items())
        return ScriptDiverged(
            f"{words}. A script that goes on is led through its calls up to {steps}: keep its code, its seeds and the settings as they"
            " were, or go on without replay=True"
        )


class ScriptReplay:
    """The calls of one policy: numbers them, and answers those of the record."""

    def __init__(
        self, record: ScriptRecord | None = None, *, policy: str = "", waits: ScriptWaits, write: Callable[[], None] = lambda: None
    ) -> None:
        """`policy` is its name where there are several; `write` writes its ledger."""
        self._record = record = record or ScriptRecord(None, next_steps={})
        self._policy = policy
        self._waits = waits
        record.join(waits, write)
        own = [event for event in record.events if event.call in record.calls_of[policy]]
        self._call_of_step = {event.number: event.call for event in own if event.kind is Kind.CALLED and event.number >= 0}
        """Also those that this process is still to make: their steps may be done before."""
        self.groups = frozenset(event.number for event in own if event.kind is Kind.ADMITTED)
        """The groups that were asked for until the last step that was decided upon."""
        self.sampled = frozenset(event.words for event in own if event.kind is Kind.RESULT and event.number >= 0)
        """The rollouts that were read, before they were scored, until then."""

    @property
    def live(self) -> asyncio.Event:
        """Set once the script is where the one before was."""
        return self._record.live

    @property
    def is_kept(self) -> bool:
        """True where this process goes on from a record."""
        return bool(self._record.events)

    @property
    def is_recording(self) -> bool:
        return self._record.answers is not None

    def begin(self, name: str, given: Iterable[object] = (), *, step: int = -1) -> int:
        """Note a call with what it is given, and return its number; 0 where nothing is recorded.

        Raises `ScriptDiverged` where the record has another call.
        """
        if not self.is_recording:
            return 0
        call = self._record.begin(_words(f"{self._policy}.{name}" if self._policy else name, given), step)
        if step >= 0:
            self._call_of_step[step] = call
        return call

    def is_recorded(self, call: int) -> bool:
        """Return whether a call was made before."""
        return call < self._record.num_recorded

    def answer(self, call: int, make: Callable[[], _T], *, encode: Callable[[_T], bytes], decode: Callable[[bytes], _T]) -> _T:
        """Return the answer to a call that waits for nothing."""
        if (at := self._record.answered.pop(call, None)) is not None:
            self._record.happen(at)
            return decode(self.body(self._record.events[at]))
        found = make()
        self._keep(call, lambda: encode(found))
        return found

    async def wait(
        self, call: int, make: Callable[[], Awaitable[_T]], *, encode: Callable[[_T], bytes] | None, decode: Callable[[bytes], _T]
    ) -> _T:
        """Return the answer to a call that waits, in its turn. Without `encode`, `done` records it."""
        if (at := self._record.answered.pop(call, None)) is not None:
            await self._record.turn(at, self._waits)
            return decode(self.body(self._record.events[at]))
        if (late := self._record.late.pop(call, None)) is not None:
            await self.over(call)
            return decode(self.body(late))
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
        self._record.check_turn()

    def done(self, step: int, body: bytes) -> None:
        """Record, at once, the answer to the call that made a step, where that call is known and has none."""
        if (call := self._call_of_step.get(step)) is not None and call not in self._record.has_answer:
            self._record.has_answer.add(call)
            self._keep(call, lambda: body)
            self._record.flush()

    def admitted(self, call: int) -> list[int]:
        """Return the groups that the first prompts of a call became, in order; -1: quarantined."""
        places = self._record.admitted.pop(call, ())
        for at in places:
            self._record.happen(at)
        return [self._record.events[at].number for at in places]

    def results(self, call: int) -> list[Event]:
        """Return the results of a call that are left to be read from the record."""
        return [self._record.events[at] for at in self._record.results.get(call, ())] if self._record.events else []

    def body(self, event: Event) -> bytes:
        """Return what an event holds."""
        assert self._record.answers is not None, "events are of a record"
        return self._record.answers.body(event)

    async def take(self, call: int) -> Event | None:
        """Wait for the turn of the next recorded result of a call; None where none is left."""
        if not self._record.events or not (left := self._record.results.get(call)):
            return None
        event = self._record.events[left[0]]
        await self._record.turn(left[0], self._waits)
        left.popleft()
        return event

    def note(self, call: int, kind: Kind, *, words: str = "", number: int = -1, body: bytes = b"") -> None:
        """Record an event of a script that lives."""
        if self._record.answers is not None:
            self._record.answers.add(call, kind, words=words, number=number, body=body)

    def flush(self) -> None:
        """Write what was recorded, before the ledger hears of a step."""
        self._record.write_ledgers()
        self._record.flush()

    def check_over(self) -> None:
        """Raise `ScriptDiverged` where a script ends in the middle of its record."""
        self._record.check_over()

    def _keep(self, call: int, encode: Callable[[], bytes]) -> None:
        if self.is_recording:
            self.note(call, Kind.ANSWERED, body=encode())


def encode_columns(columns: Sequence[Float32]) -> bytes:
    """Encode log-probabilities for the record."""
    return msgspec.msgpack.encode([column.tobytes() for column in columns])


def decode_columns(body: bytes) -> list[Float32]:
    """Decode what `encode_columns` has made."""
    return [np.frombuffer(column, np.float32) for column in msgspec.msgpack.decode(body)]


def _current_task() -> asyncio.Task[Any]:
    task = asyncio.current_task()
    assert task is not None, "scripts run in tasks"
    return task


def _words(name: str, given: Iterable[object]) -> str:
    digest = hashlib.blake2b(digest_size=8)
    for one in given:
        digest.update(one if isinstance(one, bytes) else repr(one).encode())
    return f"{name} [{digest.hexdigest()}]"


def _name(event: Event) -> str:
    """Return what a recorded call is named, without the digest of what it was given."""
    return event.words.rpartition(" ")[0]


def _policy(event: Event) -> str:
    """Return whose call was recorded; an empty name where there is one policy."""
    policy, dot, _ = _name(event).partition(".")
    return policy if dot else ""


def _up_to(events: list[Event], next_steps: Mapping[str, int]) -> list[Event]:
    """Return the events up to the call of the last step that was decided upon, of whichever policy."""
    steps = [(at, _policy(event), event.number) for at, event in enumerate(events) if event.kind is Kind.CALLED and event.number >= 0]
    last = max((at for at, policy, step in steps if step < next_steps.get(policy, 0)), default=-1)
    for policy, next_step in next_steps.items():
        found = max((step + 1 for at, of, step in steps if of == policy and at <= last), default=0)
        if found < next_step:
            whose = f" of policy {policy}" if policy else ""
            raise ScriptDiverged(
                f"the record of the script's calls leads up to step {found}{whose}, and step {next_step} of the run comes next: it was"
                " begun, or went on, without replay=True. Go on without it"
            )
    return events[: last + 1]
