"""The transport between GPUs: NCCL through CuPy, a communicator for each engine, so that none can hold up another.

To make one takes NCCL a good part of a second, and memory of both devices; so both ends keep theirs from one policy to the next, and agree
in the store, before each, that it is the same one. Whoever aborts it forgets it, and the next policy gets a new one.

Bytes travel in uint8 buckets, two at each end: while one is under way, the next is copied to the device, or the one before from it. NCCL
by itself waits for ever for a peer that is gone, and says nothing; so whoever hangs up says so in the store, and every bucket has a
deadline, after which the communicator is aborted.
Both ends meet in the store before they enter NCCL, because entering it cannot be aborted.

What touches a device is behind `Library`: tests run the same protocol over a stand-in on the host. Policies begin and end in the memory of
the host, where their digests are taken.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from pipelinerl.errors import WeightsError
from pipelinerl.weights.point_to_point import DEADLINE_S, ENGINE, TRAINER, Connect, PointToPointReceiver, PointToPointSender
from pipelinerl.weights.timeline import timeline_of

BUCKET_BYTES = 16 << 20
"""Size of each of two buckets. Larger ones hide NCCL's latency better and take more of the device's memory."""
NONE = "none"
"""What an engine says that has no communicator yet."""
POLL_S = 0.0002
"""Between two looks whether a bucket has arrived: short beside the millisecond that a bucket takes."""
ASK_S = 0.05
"""Between two questions whether the other end has hung up; each goes to the trainer's store."""


class Communicator(Protocol):
    """A communicator of two. `send` and `receive` begin in order and return at once, as NCCL's do."""

    def bucket(self, num_bytes: int) -> torch.Tensor:
        """Memory that it can send from and receive into: [bytes] uint8."""
        ...

    def send(self, part: torch.Tensor) -> Any:
        """Begin to send a part of a bucket; return what `is_done` asks about."""
        ...

    def receive(self, part: torch.Tensor) -> Any:
        """Begin to fill a part of a bucket; return what `is_done` asks about."""
        ...

    def is_done(self, work: Any) -> bool:
        """Tell whether it is done; raises `RuntimeError` where it failed."""
        ...

    def abort(self) -> None:
        """Leave at once, whatever is under way."""
        ...


class Library(Protocol):
    """A library that makes communicators."""

    def unique_id(self) -> bytes:
        """A name for one communicator; the trainer makes it, and both ends must have it."""
        ...

    def connect(self, unique_id: bytes, rank: int) -> Communicator:
        """Enter the communicator of two as `rank`."""
        ...

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        """Memory of the host from which buckets are filled beside what else runs: [bytes] uint8."""
        ...


def sender(library: Library | None = None, *, address: str = "127.0.0.1", deadline_s: float = DEADLINE_S) -> PointToPointSender:
    """The trainer's end. Raises `WeightsError` where there is no NCCL."""
    found = library or Cupy()
    return PointToPointSender("nccl", _Connect(found), address=address, deadline_s=deadline_s, reserve=found.host_memory)


def receiver(library: Library | None = None, *, deadline_s: float = DEADLINE_S) -> PointToPointReceiver:
    """An engine's end; what is missing here is said at the first fetch."""
    return PointToPointReceiver("nccl", _Connect(library), deadline_s=deadline_s)


def connector(library: Library | None = None) -> Connect:
    """Connects one end to one other, or a server to its callers. Raises `WeightsError` where there is no NCCL."""
    return _Connect(library or Cupy())


class _Connect:
    def __init__(self, library: Library | None) -> None:
        self._library = library
        self._kept: dict[str, Communicator] = {}
        """Communicators that work, by their name in hexadecimal digits: one for each engine, or to the one trainer."""

    def __call__(self, store: dist.Store, prefix: str, rank: int, /, *, address: str, deadline: timedelta) -> _Channel:
        """See `point_to_point.Connect`; the store's own deadline bounds the wait for the other end."""
        self._library = self._library or Cupy()
        if rank == TRAINER:
            store.wait([f"{prefix}/here/{ENGINE}"], deadline)
            kept = store.get(f"{prefix}/here/{ENGINE}").decode()
            name = kept if kept in self._kept else self._library.unique_id().hex()
            store.set(f"{prefix}/id", name)
        else:
            store.set(f"{prefix}/here/{ENGINE}", next(iter(self._kept), NONE))
            store.wait([f"{prefix}/id"], deadline)
            name = store.get(f"{prefix}/id").decode()
        if name not in self._kept:
            if rank == ENGINE:  # the one of a trainer that is gone, or that has aborted it
                self._forget(*self._kept)
            store.set(f"{prefix}/ready/{rank}", "1")  # both: entering NCCL cannot be aborted
            store.wait([f"{prefix}/ready/{1 - rank}"], deadline)
            self._kept[name] = self._library.connect(bytes.fromhex(name), rank)
        line = _Line(store, f"{prefix}/gone", rank)
        return _Channel(self._kept[name], line=line, deadline_s=deadline.total_seconds(), forget=lambda: self._forget(name))

    def _forget(self, *names: str) -> None:
        for name in names:
            if (communicator := self._kept.pop(name, None)) is not None:
                communicator.abort()


class _Line:
    """The store's entry by which each end says that it has hung up, and sees that the other has."""

    def __init__(self, store: dist.Store, prefix: str, rank: int) -> None:
        self._store, self._prefix, self._rank = store, prefix, rank

    def hang_up(self) -> None:
        with contextlib.suppress(RuntimeError):  # the trainer, and its store with it, may be gone: then nobody is left to hear
            self._store.set(f"{self._prefix}/{self._rank}", "1")

    def is_hung_up(self) -> bool:
        return self._store.check([f"{self._prefix}/{1 - self._rank}"])


class _Channel:
    """See `point_to_point.Channel`."""

    def __init__(self, communicator: Communicator, *, line: _Line, deadline_s: float, forget: Callable[[], None]) -> None:
        self._communicator = communicator
        self._forget = forget
        self._line = line
        self._deadline_s = deadline_s
        self._buckets = [communicator.bucket(BUCKET_BYTES) for _ in range(2)]
        self._arriving: collections.deque[tuple[Any, torch.Tensor, torch.Tensor]] = collections.deque()
        """At most two: what is asked whether it is done, the bucket, and where its bytes go."""
        self._num_begun = self._num_arrived = 0

    def begin_send(self, tensor: torch.Tensor) -> Callable[[], None]:
        """It is sent when it is waited for: what is begun twice would take the buckets from each other."""
        return functools.partial(self.send, tensor)

    def begin_receive(self, tensor: torch.Tensor) -> Callable[[], None]:
        for part in _parts(tensor):
            if len(self._arriving) == len(self._buckets):
                self._take()
            bucket = self._buckets[self._num_begun % 2][: len(part)]
            self._arriving.append((self._communicator.receive(bucket), bucket, part))
            self._num_begun += 1
        last = self._num_begun

        def wait() -> None:
            while self._num_arrived < last:
                self._take()

        return wait

    def send(self, tensor: torch.Tensor) -> None:
        under_way: list[Any] = []
        for number, part in enumerate(_parts(tensor)):
            if len(under_way) == len(self._buckets):
                self._wait(under_way.pop(0))
            bucket = self._buckets[number % 2][: len(part)]
            bucket.copy_(part, non_blocking=True)  # from pinned memory beside the other bucket's way; sending it waits for that
            under_way.append(self._communicator.send(bucket))
        for work in under_way:
            self._wait(work)

    def receive(self, tensor: torch.Tensor) -> None:
        self.begin_receive(tensor)()

    def abort(self) -> None:
        self._line.hang_up()
        self._forget()

    def _take(self) -> None:
        work, bucket, part = self._arriving.popleft()
        self._wait(work)
        part.copy_(bucket)
        self._num_arrived += 1

    def _wait(self, work: Any) -> None:
        now = time.monotonic()
        end, next_question = now + self._deadline_s, now + ASK_S
        while not self._communicator.is_done(work):
            now = time.monotonic()
            if now > end:
                raise RuntimeError(f"waited {self._deadline_s:g} s for the other end to take or send at most {BUCKET_BYTES} bytes")
            if now > next_question:
                next_question = now + ASK_S
                if self._line.is_hung_up():
                    raise RuntimeError("the other end has hung up")
            time.sleep(POLL_S)


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """A tensor's bytes, a bucket at a time."""
    flat = tensor.view(-1).view(torch.uint8)
    return flat.split(BUCKET_BYTES) if len(flat) else ()


class Cupy:
    """NCCL as CuPy has it, apart from torch's own communicators: a `Library`."""

    def __init__(self) -> None:
        """Raises `WeightsError` where CuPy, NCCL or a GPU is missing."""
        try:
            from cupy.cuda import nccl  # pyright: ignore[reportMissingImports]
        except ImportError as error:
            raise WeightsError(f"the transport nccl needs CuPy with NCCL, which is not installed here: {error}") from None
        if not (nccl.available and torch.cuda.is_available()):
            raise WeightsError("the transport nccl needs a CUDA device and CuPy with NCCL, and one of them is missing here")
        self._nccl: Any = nccl

    def unique_id(self) -> bytes:
        return unique_id_of(self._nccl)

    def connect(self, unique_id: bytes, rank: int) -> Communicator:
        return _CupyCommunicator(self._nccl, communicator_of(self._nccl, unique_id, rank), other=1 - rank)

    def host_memory(self, num_bytes: int) -> torch.Tensor:
        return timeline_of(torch.device("cuda")).pinned(num_bytes)


def unique_id_of(nccl: Any) -> bytes:
    """A new communicator's name, [128] bytes, from CuPy's module: it gives bytes from CuPy 14 on, before it a tuple of signed numbers."""
    return bytes(part & 0xFF for part in nccl.get_unique_id())


def communicator_of(nccl: Any, unique_id: bytes, rank: int) -> Any:
    """Enter a communicator of two by CuPy's module, whichever form of the name it takes. Raises `RuntimeError` where it takes neither."""
    signed = tuple(part - 256 if part > 127 else part for part in unique_id)
    refusals = []
    for name in (unique_id, signed):
        try:
            return nccl.NcclCommunicator(2, name, rank)
        except (TypeError, ValueError) as error:  # of its arguments, before it has done anything
            refusals.append(str(error))
    raise RuntimeError(f"this CuPy takes no communicator's name of {len(unique_id)} bytes: {'; '.join(refusals)}")


class _CupyCommunicator:
    def __init__(self, nccl: Any, communicator: Any, *, other: int) -> None:
        self._nccl = nccl
        self._communicator = communicator
        self._other = other
        self._stream = torch.cuda.Stream()  # of its own: the forward passes of this device do not wait for a peer

    def bucket(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, device="cuda")

    def send(self, part: torch.Tensor) -> Any:
        return self._begin(self._communicator.send, part)

    def receive(self, part: torch.Tensor) -> Any:
        return self._begin(self._communicator.recv, part)

    def is_done(self, work: Any) -> bool:
        self._communicator.check_async_error()
        return work.query()

    def abort(self) -> None:
        self._communicator.abort()

    def _begin(self, call: Any, part: torch.Tensor) -> Any:
        self._stream.wait_stream(torch.cuda.current_stream())  # what fills the bucket, or empties it, comes first
        call(part.data_ptr(), len(part), self._nccl.NCCL_UINT8, self._other, self._stream.cuda_stream)
        return self._stream.record_event()
