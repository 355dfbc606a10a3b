"""Requests under way and their answers. A request that is sent again (the same owner, the same number) is the same future.

An answer stays for `KEPT_S` after it was made, so that a reply that was lost on its way can be asked for again; then its future is
forgotten, and the client hears 410. Where answers take more than `max_held_bytes`, the oldest are forgotten sooner. Answers of requests
that stand in the ledger are kept there instead.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import time
import traceback
from collections.abc import Awaitable, Callable

import msgspec

from pipelinerl.tinker.backend import Refusal
from pipelinerl.tinker.ledger import Answer

KEPT_S = 900.0
"""Longer keeps more memory; shorter forgets what a client that was away for a while has still to fetch."""
POLL_S = 20.0
"""Longest wait of one `retrieve_future`; the client asks again. Its own limit is 45 s."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Future:
    task: asyncio.Future[Answer]
    num_bytes: int
    """Of the request while it waits, of the answer from then on."""
    is_in_ledger: bool
    done_at: float | None = None


class Futures:
    """All futures of one server."""

    def __init__(self, *, max_pending: int, max_held_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.num_pending = 0
        """Requests without an answer so far."""
        self.num_pending_bytes = 0
        """Bytes of their bodies."""
        self._num_kept_bytes = 0
        """Bytes of answers."""
        self._max_pending, self._max_held_bytes = max_pending, max_held_bytes
        self._clock = clock
        self._futures: collections.OrderedDict[str, _Future] = collections.OrderedDict()

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._futures

    @property
    def is_full(self) -> bool:
        """True where no more requests are taken."""
        self._forget()
        return self.num_pending >= self._max_pending or self.num_pending_bytes >= self._max_held_bytes

    def begin(self, request_id: str, work: Awaitable[Answer], *, num_bytes: int, is_in_ledger: bool = False) -> None:
        """Take a request whose body has so many bytes. `is_in_ledger`: its answer is kept there, but for one that fails."""
        task = asyncio.ensure_future(work)
        future = self._futures[request_id] = _Future(task=task, num_bytes=num_bytes, is_in_ledger=is_in_ledger)
        self.num_pending += 1
        self.num_pending_bytes += num_bytes
        task.add_done_callback(lambda _: self._done(request_id, future))

    async def answer(self, request_id: str, *, wait_s: float = POLL_S) -> Answer | None:
        """Wait for an answer; None where it is not there in time. Raises `KeyError` for a request that is not known, or not any more."""
        task = self._futures[request_id].task
        await asyncio.wait((task,), timeout=wait_s)
        if not task.done():
            return None
        if task.cancelled():
            return {"error": "the request was cancelled", "category": "user"}
        match task.exception():
            case None:
                return task.result()
            case Refusal() as refusal:
                return {"error": str(refusal), "category": "user" if refusal.is_asker_wrong else "server"}
            case error:
                return {"error": f"{type(error).__name__}: {error}", "category": "server"}

    def cancel(self, request_id: str) -> None:
        """Give a request up; one that is not known is ignored."""
        if (future := self._futures.get(request_id)) is not None:
            future.task.cancel()

    def close(self) -> None:
        """Give up all that is under way."""
        for future in self._futures.values():
            future.task.cancel()

    def _done(self, request_id: str, future: _Future) -> None:
        future.done_at = self._clock()
        self.num_pending -= 1
        self.num_pending_bytes -= future.num_bytes
        error = None if future.task.cancelled() else future.task.exception()
        if future.is_in_ledger and not future.task.cancelled() and error is None:
            self._futures.pop(request_id, None)
            return
        future.num_bytes = 0 if future.task.cancelled() or error is not None else _size_of(future.task.result())
        self._num_kept_bytes += future.num_bytes
        self._forget()
        if error is not None and not isinstance(error, Refusal):  # a bug of ours: the client hears one line of it
            traceback.print_exception(error)

    def _forget(self) -> None:
        """Forget answers that were there for long, and the oldest while all of them take too much. Requests that wait are passed over."""
        forgotten: list[str] = []
        for request_id, future in self._futures.items():
            if future.done_at is None:
                continue
            if self._clock() - future.done_at < KEPT_S and self._num_kept_bytes <= self._max_held_bytes:
                break
            self._num_kept_bytes -= future.num_bytes
            forgotten.append(request_id)
        for request_id in forgotten:
            del self._futures[request_id]


def _size_of(answer: Answer) -> int:
    return len(answer) if isinstance(answer, bytes) else len(msgspec.json.encode(answer))
