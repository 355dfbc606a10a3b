"""The parts of a pipeline: a `Stage` is one loop, a `Channel` joins two of them and is bounded in bytes.

A full channel makes its producer wait; nothing is dropped. Ending is closing: a closed channel gives what is left, then ends its
reader's loop. Channels keep the clock of their event loop, so that the same stages run on a simulated one.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import AsyncIterator, Callable
from typing import Generic, Protocol, TypeVar

from pipelinerl.runtime.watch import Watch

_T = TypeVar("_T")


class Stage(Protocol):
    """One loop of the pipeline. Its docstring says what it takes, gives, waits for, is woken by, how it fails and ends."""

    name: str

    async def run(self) -> None:
        """Run until the stage's input is closed."""
        ...


class Channel(Generic[_T]):
    """A queue between two stages, first in first out, bounded in bytes.

    One item larger than the bound passes when the channel is empty, so that no item can block it for ever. Whoever asks a peer for an
    item of known size claims room for it before it asks, so that the answer, which cannot wait, finds it.
    """

    def __init__(
        self,
        name: str,
        *,
        giver: str,
        taker: str,
        watch: Watch,
        bound_bytes: int,
        size: Callable[[_T], int] = lambda _: 1,
        label: Callable[[_T], str] | None = None,
    ) -> None:
        """`label` names an item in the verdict on a stall."""
        self.name = name
        self.giver = giver
        """Stage that puts."""
        self.taker = taker
        """Stage that gets."""
        self.bound_bytes = bound_bytes
        self.num_bytes = 0
        self.claimed_bytes = 0
        """Bytes of items that were asked for and are to come: with `num_bytes` never more than `bound_bytes`, but for one item alone."""
        self.num_items_ever = 0
        self.is_closed = False
        self.on_put: Callable[[_T], None] = lambda item: None
        """Called with each item that is added."""
        self._watch = watch
        self._size = size
        self._label = label
        watch.explain(self._explain)
        self._items: collections.deque[_T] = collections.deque()
        self._getters: collections.deque[asyncio.Future[None]] = collections.deque()
        self._putters: collections.deque[asyncio.Future[None]] = collections.deque()

    def __len__(self) -> int:
        return len(self._items)

    async def put(self, item: _T) -> None:
        """Add an item, waiting while the channel is full. Raises `RuntimeError` on a closed channel: our own mistake."""
        await self._wait_for_room(self._size(item))
        self.put_now(item)

    async def claim(self, num_bytes: int) -> None:
        """Wait as `put` does, and keep the room for an item of that size, which `put_claimed` must put later."""
        await self._wait_for_room(num_bytes)
        self.claimed_bytes += num_bytes

    def put_claimed(self, item: _T) -> None:
        """Add an item, of the size that was claimed for it, without waiting."""
        self.claimed_bytes -= self._size(item)
        assert self.claimed_bytes >= 0, f"{self.name}: more was put than was claimed"
        self.put_now(item)

    @property
    def is_full(self) -> bool:
        """True at the bound or above it: for givers that cannot wait, which then ask for no more."""
        return bool(self._items) and self.num_bytes >= self.bound_bytes

    def put_now(self, item: _T) -> None:
        """Add an item without waiting: for items that are bounded elsewhere, which the caller says where it calls."""
        if self.is_closed:
            raise RuntimeError(f"channel {self.name} is closed; {self.giver} must not put into it")
        self._items.append(item)
        self.num_bytes += self._size(item)
        self.num_items_ever += 1
        self.on_put(item)
        self._watch.moved()
        _wake(self._getters)

    async def get(self) -> _T | None:
        """Take the next item, waiting for one; None once the channel is closed and empty."""
        if not self._items and not self.is_closed:
            with self._watch.waiting(self.taker, self.name):
                while not self._items and not self.is_closed:
                    await _park(self._getters)
        return self.get_now()

    def get_now(self) -> _T | None:
        """Take the next item; None where there is none. Never waits."""
        if not self._items:
            return None
        item = self._items.popleft()
        self.num_bytes -= self._size(item)
        if self._putters:
            _wake(self._putters)
        return item

    async def __aiter__(self) -> AsyncIterator[_T]:
        while (item := await self.get()) is not None:
            yield item

    async def _wait_for_room(self, size: int) -> None:
        if self._lacks_room(size):
            with self._watch.waiting(self.giver, f"room in {self.name}"):
                while self._lacks_room(size):
                    await _park(self._putters)

    def _lacks_room(self, size: int) -> bool:
        is_alone = not self._items and not self.claimed_bytes
        return not is_alone and self.num_bytes + self.claimed_bytes + size > self.bound_bytes

    def _explain(self) -> str:
        first = f", the first {self._label(self._items[0])}" if self._items and self._label is not None else ""
        return f"{self.giver} has given {self.num_items_ever} {self.name}; {len(self)} wait to be taken by {self.taker}{first}"

    def close(self) -> None:
        """Say that nothing more will be put; safe to repeat."""
        self.is_closed = True
        while self._getters:
            _wake(self._getters)


class Signal:
    """Something changed: wakes everyone who waits for it. Waiters look at the state itself, so a missed wake-up cannot matter."""

    def __init__(self) -> None:
        self._waiters: collections.deque[asyncio.Future[None]] = collections.deque()

    def set(self) -> None:
        while self._waiters:
            _wake(self._waiters)

    async def wait(self) -> None:
        await _park(self._waiters)


async def _park(queue: collections.deque[asyncio.Future[None]]) -> None:
    future = asyncio.get_running_loop().create_future()
    queue.append(future)
    try:
        await future
    except asyncio.CancelledError:
        if future in queue:
            queue.remove(future)
        else:  # the wake-up was meant for us, and we go: somebody else must have it
            _wake(queue)
        raise


def _wake(queue: collections.deque[asyncio.Future[None]]) -> None:
    while queue:
        future = queue.popleft()
        if not future.done():
            future.set_result(None)
            return
