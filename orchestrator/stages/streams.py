"""Streams give a script results as they come: `async for` gives each when it is there, `await` all of them, in the order of their coming.

A stream is at work from the call that made it, whether or not anybody reads it. So a script that asks for the next rollouts before it
trains on the last ones has them sampled meanwhile.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Awaitable, Callable, Generator
from typing import Any, Generic, TypeVar

from pipelinerl.runtime.stage import Signal

_T = TypeVar("_T")


@dataclasses.dataclass(slots=True, kw_only=True)
class Room:
    """The room for results that wait to be read, of every stream of a kind."""

    what: str
    bound_bytes: int
    num_bytes: int = 0

    @property
    def is_full(self) -> bool:
        return self.num_bytes >= self.bound_bytes


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class Intake(Generic[_T]):
    """The end of a stream at which results arrive."""

    what: str
    """Names the call, for messages."""
    call: int
    """Its number in the record."""
    room: Room
    num_bytes: Callable[[_T], int]
    """Gives the bytes of a result."""
    num_left: int = 0
    """Results that were asked for and that the script does not have."""
    num_unadmitted: int = 0
    """Prompts of them that no engine has been asked for."""
    step: int = 0
    """The step that they are for."""
    is_whole: bool = True
    """False while more may be asked for."""
    then: Callable[[_T], None] | None = None
    """Takes each result as it comes, in place of a reader, where there is room for it further on."""
    is_awaited_whole: bool = False
    """True where a reader awaits all results at once: it is woken once, by the last, or where they fill their room."""
    ready: collections.deque[_T] = dataclasses.field(default_factory=collections.deque)
    failure: BaseException | None = None
    changed: Signal = dataclasses.field(default_factory=Signal)
    """Set when results are due, or not awaited any more."""
    reader: asyncio.Task[Any] | None = dataclasses.field(default_factory=asyncio.current_task)
    """The task that has made the stream, or read it last."""
    is_abandoned: bool = False
    """True where nobody can read it any more, and there was something left to read."""

    @property
    def is_over(self) -> bool:
        """True where the script has all that will come."""
        return self.failure is not None or self.is_finished

    @property
    def is_finished(self) -> bool:
        """True where the script has all that it has asked for."""
        return self.is_whole and not self.num_left

    @property
    def is_due(self) -> bool:
        """True where there is something for the reader."""
        if not self.is_awaited_whole:
            return bool(self.ready)
        return bool(self.ready) and ((self.is_whole and len(self.ready) == self.num_left) or self.room.is_full)

    def put(self, result: _T) -> None:
        if not self.is_abandoned:
            self.ready.append(result)
            self.room.num_bytes += self.num_bytes(result)
            if self.is_due:
                self.changed.set()

    def take(self) -> list[_T]:
        """Take the next result, or all that are there where they are awaited at once."""
        taken = [self.ready.popleft() for _ in range(len(self.ready) if self.is_awaited_whole else 1)]
        self.room.num_bytes -= sum(map(self.num_bytes, taken))
        self.num_left -= len(taken)
        return taken

    def abandon(self) -> None:
        """Note that nobody can read any more, and give the room back."""
        self.is_abandoned = True
        self.room.num_bytes -= sum(map(self.num_bytes, self.ready))
        self.ready.clear()


class Stream(Generic[_T]):
    """The end of a stream at which a script reads: an async iterator, and an awaitable of all results."""

    def __init__(
        self, intake: Intake[_T], *, take: Callable[[Intake[_T]], Awaitable[list[_T]]], abandon: Callable[[Intake[Any]], None]
    ) -> None:
        """`take` waits until results are due, and gives them, none at the end; `abandon` is told of a stream that is let go of before
        its end.
        """
        self.intake = intake
        self._take = take
        self._abandon = abandon

    def __aiter__(self) -> Stream[_T]:
        return self

    async def __anext__(self) -> _T:
        self.intake.is_awaited_whole = False
        if not (taken := await self._take(self.intake)):
            raise StopAsyncIteration
        return taken[0]

    def __await__(self) -> Generator[Any, None, list[_T]]:
        return self._all().__await__()

    def __del__(self) -> None:
        if not self.intake.is_over:
            self._abandon(self.intake)

    async def _all(self) -> list[_T]:
        self.intake.is_awaited_whole, found = True, list[_T]()
        while taken := await self._take(self.intake):
            found += taken
        return found


class Coming(Generic[_T]):
    """What a call is going to give. The call is under way, whether or not anybody awaits it; it may be awaited more than once."""

    def __init__(self, wait: Callable[[], Awaitable[_T]]) -> None:
        """`wait` waits for it; whoever awaits first calls it."""
        self._wait = wait
        self._lock = asyncio.Lock()
        self._found: list[_T] = []

    def __await__(self) -> Generator[Any, None, _T]:
        return self._once().__await__()

    async def _once(self) -> _T:
        async with self._lock:
            if not self._found:
                self._found.append(await self._wait())
        return self._found[0]
