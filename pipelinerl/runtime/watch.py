"""Every wait has a name, a peer and a deadline; and something watches that the whole moves.

`wait_for` bounds one wait. `Watch` knows what every stage waits for right now, counts progress, and ends the run with `Stalled`,
which names the waits and carries all stacks, when nothing moved for the limit. `guarded` watches the event loop itself, from a thread:
a stage that never gives it back would hold up every other watch.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import faulthandler
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeVar

from pipelinerl.errors import PeerSilent, Stalled

_T = TypeVar("_T")

FILE_POLL_S = 0.02
"""Seconds between two looks for a file. A shared file system tells nobody of a new file, so this one wait looks again and again."""


LOOKS = 16
"""Looks within a limit: a stall is noticed at most a sixteenth of the limit too late. More would wake an idle process for nothing."""


async def wait_for(awaitable: Awaitable[_T], *, peer: str, what: str, deadline_s: float) -> _T:
    """Await with a deadline. Raises `PeerSilent` naming the peer, what was awaited and how long."""
    try:
        async with asyncio.timeout(deadline_s):
            return await awaitable
    except TimeoutError:
        raise PeerSilent(f"waited {deadline_s:g} s for {peer} {what}") from None


def wait_for_file(path: Path, *, peer: str, deadline_s: float) -> str:
    """Wait until `peer` has written `path`, and return its text. Raises `PeerSilent`."""
    end = time.monotonic() + deadline_s
    while True:
        with contextlib.suppress(FileNotFoundError):
            return path.read_text(errors="replace")
        if time.monotonic() > end:
            raise PeerSilent(f"waited {deadline_s:g} s for {peer} to write {path}: is it running? See its log in the run folder")
        time.sleep(FILE_POLL_S)


@dataclasses.dataclass(slots=True, kw_only=True)
class Wait:
    """One wait under way."""

    stage: str
    what: str
    since: float
    """On the event loop's clock, seconds."""


class Watch:
    """Knows what every stage waits for, and whether anything moves."""

    def __init__(self, *, stall_limit_s: float) -> None:
        self.stall_limit_s = stall_limit_s
        self.num_moves = 0
        self._waits: dict[int, Wait] = {}
        self._next = 0
        self.waited_s: dict[str, float] = {}
        """Seconds spent in finished waits, by `stage: what`."""
        self._explanations: list[Callable[[], str | None]] = []
        self.is_idle: Callable[[], bool] = lambda: False
        """Returns whether nobody is to blame where nothing moves: a script does work of its own, and awaits nothing."""

    def moved(self) -> None:
        """Tell that something of the run's work got done."""
        self.num_moves += 1

    def explain(self, explanation: Callable[[], str | None]) -> None:
        """Have the verdict on a stall include what `explanation()` then says: for a stage that waits without a wait of its own."""
        self._explanations.append(explanation)

    @contextlib.contextmanager
    def waiting(self, stage: str, what: str) -> Iterator[None]:
        """Mark a wait of `stage` for `what` while the block runs."""
        loop = asyncio.get_running_loop()
        key, self._next = self._next, self._next + 1
        wait = self._waits[key] = Wait(stage=stage, what=what, since=loop.time())
        try:
            yield
        finally:
            del self._waits[key]
            name = f"{stage}: {what}"
            self.waited_s[name] = self.waited_s.get(name, 0.0) + loop.time() - wait.since

    def waits(self) -> list[Wait]:
        """The waits under way, longest first."""
        return sorted(self._waits.values(), key=lambda wait: wait.since)

    def all_waited_s(self) -> dict[str, float]:
        """Seconds waited so far, by `stage: what`, waits under way included."""
        now = asyncio.get_running_loop().time()
        total = dict(self.waited_s)
        for wait in self._waits.values():
            name = f"{wait.stage}: {wait.what}"
            total[name] = total.get(name, 0.0) + now - wait.since
        return total

    async def run(self) -> None:
        """Raise `Stalled` when nothing moved for `stall_limit_s`."""
        loop = asyncio.get_running_loop()
        last_moves, last_change = self.num_moves, loop.time()
        while True:
            await asyncio.sleep(self.stall_limit_s / LOOKS)
            if self.num_moves != last_moves or self.is_idle():
                last_moves, last_change = self.num_moves, loop.time()
            elif loop.time() - last_change >= self.stall_limit_s:
                raise Stalled(self._verdict(loop.time() - last_change))

    def _verdict(self, quiet_s: float) -> str:
        now = asyncio.get_running_loop().time()
        lines = [f"  {wait.stage} waits for {wait.what} since {now - wait.since:.0f} s" for wait in self.waits()]
        lines += [f"  {text}" for explanation in self._explanations if (text := explanation()) is not None]
        return f"nothing moved for {quiet_s:.0f} s\n" + "\n".join(lines or ["  no stage is waiting"]) + "\n" + all_stacks()


@contextlib.contextmanager
def guarded(limit_s: float, *, end: Callable[[str], None]) -> Iterator[None]:
    """Watch the running event loop while the block runs: `end` is called, in another thread, where the loop turns no more for `limit_s`.

    Nothing in the loop can run then, so `end` has to end the process.
    """
    loop = asyncio.get_running_loop()
    turned_at = time.monotonic()
    is_over = threading.Event()

    def turn() -> None:
        nonlocal turned_at, next_turn
        turned_at = time.monotonic()
        next_turn = loop.call_later(limit_s / LOOKS, turn)

    def look() -> None:
        while not is_over.wait(limit_s / LOOKS):
            stuck_s = time.monotonic() - turned_at
            if stuck_s >= limit_s:
                what = "something in it waits or computes, and lets nobody else go on"
                end(f"the event loop has not turned for {stuck_s:.0f} s: {what}\n{all_stacks()}")
                return

    next_turn = loop.call_soon(turn)
    thread = threading.Thread(target=look, name="guard", daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_over.set()
        next_turn.cancel()
        thread.join()


def all_stacks() -> str:
    """The Python stacks of every thread of this process, as text."""
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
