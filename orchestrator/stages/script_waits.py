"""How the calls of a script wait: for what the run gives, or for the error that has ended it."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import weakref
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch

_T = TypeVar("_T")


class Changes(Signal):
    """Wakes who waits for anything but a stream; `set_all` those, too, who wait for one stream alone."""

    def __init__(self) -> None:
        super().__init__()
        self._others: collections.Counter[Signal] = collections.Counter()

    def set_all(self) -> None:
        self.set()
        for signal in self._others:
            signal.set()

    @contextmanager
    def reaching(self, signal: Signal) -> Iterator[None]:
        """Have `set_all` wake, within the block, those too who wait for `signal`."""
        self._others[signal] += 1
        try:
            yield
        finally:
            self._others[signal] -= 1
            if not self._others[signal]:
                del self._others[signal]


@dataclasses.dataclass(slots=True, kw_only=True)
class ScriptWaits:
    """The waits of a script's calls. Time that the script spends without a call is nobody's stall."""

    watch: Watch
    owner: str
    """The stage in whose name calls wait."""
    changed: Changes = dataclasses.field(default_factory=Changes)
    """Set whenever something may be there that a call waits for. A stream has a signal of its own, for its results: so what many streams
    wait for wakes one task, and not all of theirs.
    """
    feeders: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)
    """Tasks of the stage that wait on nobody's behalf."""
    check_streams: Callable[[], None] = lambda: None
    """The callback raises where streams of the script were misused."""
    tasks: asyncio.TaskGroup | None = None
    """The group that the stage's work runs in; None before it runs."""
    _callers: weakref.WeakSet[asyncio.Task[Any]] = dataclasses.field(default_factory=weakref.WeakSet)
    """The tasks of the script that have waited for something."""
    _num_waiting: int = 0
    """Calls that wait for something."""
    _failure: BaseException | None = None
    """Why the run is over."""

    def __post_init__(self) -> None:
        self.watch.is_idle = lambda: not self._num_waiting

    def fail(self, error: BaseException) -> None:
        """End every wait of the script with this error."""
        self._failure = self._failure or error
        self.changed.set_all()

    def check(self) -> None:
        """Raise what has ended the run, or what `check_streams` finds."""
        if self._failure is not None:
            raise self._failure
        self.check_streams()

    async def until(self, look: Callable[[], _T | None], what: str, *, check: Callable[[], None] = lambda: None) -> _T:
        """Wait until `look` gives something. Raises what has ended the run, and what `check` raises."""
        with self.waiting(what):
            while (found := look()) is None:
                self.check()
                check()
                await self.changed.wait()
        return found

    async def beside(self, work: Coroutine[Any, Any, _T], what: str, *, check: Callable[[], None] = lambda: None) -> _T:
        """Wait for work of the run's own. Raises as `until` does."""
        assert self.tasks is not None, "calls come once the stages run"
        task = self.tasks.create_task(work)
        task.add_done_callback(lambda _: self.changed.set())
        # Work that was cancelled says that the run is over, and why is told in a moment.
        return (await self.until(lambda: task if task.done() and not task.cancelled() else None, what, check=check)).result()

    def is_only_caller(self, task: asyncio.Task[Any] | None) -> bool:
        """Return whether no other task of the script that has waited for something goes on."""
        return all(other is task or other.done() for other in self._callers)

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Mark a wait of the script."""
        task = asyncio.current_task()
        is_script = task not in self.feeders
        if task is not None and is_script:
            self._callers.add(task)
        self._num_waiting += is_script
        try:
            with self.watch.waiting(self.owner, what):
                yield
        finally:
            self._num_waiting -= is_script
