"""Rows for every rank, in lock step: one row per replica is a round, and all ranks see the same rounds end at the same place.

A thread works ahead of the training loop: it takes the replica's next row off the client where this rank holds the connection, hands it to
the other ranks of the replica, and lays it out on the device. So the loop finds the next row ready, and never waits for a wire, a peer or a
copy while there is a row. Over the wire a row travels once per replica; ranks pass it on as it came, through a group of their own.

A round that any replica cannot have, because it was told to stop, is none for the others either: all end after the same row. Likewise all
ranks compute the same parts of a round: what has a gradient on some rank, and what has none on some rank, see `trainer.data.split`.
"""

from __future__ import annotations

import dataclasses
import datetime
import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from pipelinerl.errors import PeerSilent
from pipelinerl.messages import Command, MicroBatch, StepClosed, Stop
from pipelinerl.transport.codec import Decoder, encode
from trainer.data.split import without_samples
from trainer.orchestrator_client import OrchestratorClient
from trainer.parallel.replicas import Replicas
from trainer.rows.packed_row import PackedRow

READY_AHEAD = 1
"""Rows laid out on the device and not yet taken, beside one in the thread's hands. More would hold device memory for nothing."""
GRACE_S = 30.0
"""Seconds by which other ranks wait longer for a leader than it waits for the orchestrator: its error, which names whom, comes first."""
CLOSE_S = 5.0


Shared = MicroBatch | StepClosed | Command
"""What the ranks of a replica hear alike."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedPart:
    """One pass of a round; a row without a sample where only other ranks have something to compute."""

    batch: MicroBatch
    row: PackedRow | None
    has_gradient: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LoadedRow:
    """One rank's row of a round, laid out on the device."""

    batch: MicroBatch
    """The row as it came off the wire."""
    parts: tuple[LoadedPart, ...]


Item = LoadedRow | StepClosed | Command | Stop


class RowLoader:
    """The source of rows for the training loop of one rank. Use as a context, inside that of the client."""

    def __init__(
        self,
        client: OrchestratorClient | None,
        *,
        replicas: Replicas,
        lay_out: Callable[[MicroBatch], PackedRow | None],
        split: Callable[[MicroBatch], tuple[MicroBatch, MicroBatch]] = lambda batch: (batch, without_samples(batch)),
    ) -> None:
        """`client` is the connection where this rank is a replica's leader. Every rank calls this at the same time.

        `split` gives what of a row has a gradient, and what has none.
        """
        assert (client is not None) == replicas.is_leader
        self._busy_with = "starting"
        self._client = client
        self._replicas = replicas
        self._lay_out = lay_out
        self._split = split
        self._ready: queue.Queue[Item | Exception] = queue.Queue(READY_AHEAD)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="loader", daemon=True)
        timeout = datetime.timedelta(seconds=replicas.deadline_s + GRACE_S)
        self._all = dist.new_group(backend="gloo", timeout=timeout) if replicas.size > 1 else None
        self._replica = _group_of_replica(replicas, timeout)

    def __enter__(self) -> RowLoader:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._is_closing.set()
        if self._client is not None:
            self._client.wake()
        self._thread.join(CLOSE_S)

    @property
    def busy_with(self) -> str:
        """The training loop's present work; ranks that are connected to the orchestrator tell it."""
        return self._busy_with

    @busy_with.setter
    def busy_with(self, what: str) -> None:
        self._busy_with = what
        if self._client is not None:
            self._client.busy_with = what

    def take(self) -> Item:
        """Wait for this rank's next row with its layout, for the seal after a step's last, or for a command between two steps.

        Raises as `OrchestratorClient.take`, and `DataError`.
        """
        item = self._ready.get()  # the thread sees to the deadline
        if isinstance(item, Stop | Exception):
            self._ready.put(item)  # nothing comes after it
        if isinstance(item, Exception):
            raise item
        return item

    def wait_for_stop(self, deadline_s: float) -> None:
        """Wait until the orchestrator itself has told this replica to stop, at most so long. Raises as `take` does."""
        if self._client is not None:
            self._client.wait_for_stop(deadline_s)
        self._thread.join(deadline_s)

    def _serve(self) -> None:
        item: Item | Exception | None = None
        while not isinstance(item, Stop | Exception) and not self._is_closing.is_set():
            try:
                item = self._next()
            except Exception as error:  # the thread's boundary: the training loop raises it
                item = error
            self._put(item)

    def _put(self, item: Item | Exception) -> None:
        while not self._is_closing.is_set():
            try:
                return self._ready.put(item, timeout=0.2)
            except queue.Full:  # the loop computes; look whether it has ended
                continue

    def _next(self) -> Item:
        item = self._client.take() if self._client is not None else None
        found = [len(half.token_ids) > 0 for half in self._split(item)] if isinstance(item, MicroBatch) else [False, False]
        stops, *are_there = self._any(isinstance(item, Stop), *found)
        if stops:
            return item if isinstance(item, Stop) else Stop(reason="another replica was told to stop")
        item = self._shared(item)
        if not isinstance(item, MicroBatch):
            return item
        halves = [half for half in zip(self._split(item), (True, False), are_there, strict=True) if half[2]]
        parts = [LoadedPart(batch=half, row=self._lay_out(half), has_gradient=has_gradient) for half, has_gradient, _ in halves]
        return LoadedRow(batch=item, parts=tuple(parts))

    def _any(self, *claims: bool) -> list[bool]:
        """Say of each claim whether it holds on any rank."""
        if self._all is None:
            return list(claims)
        flags = torch.tensor([float(claim) for claim in claims])
        self._bounded(lambda: dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._all), "to agree on the next row")
        return [bool(flag) for flag in flags.tolist()]

    def _shared(self, item: Shared | Stop | None) -> Shared:
        """Pass what the leader took to every rank of its replica."""
        if self._replica is None:
            assert isinstance(item, Shared)
            return item
        frame = b"" if item is None else encode(item)
        size = torch.tensor(len(frame))
        self._bounded(lambda: dist.broadcast(size, group_src=0, group=self._replica), "to pass on a row")
        content = torch.frombuffer(bytearray(frame or int(size)), dtype=torch.uint8)
        self._bounded(lambda: dist.broadcast(content, group_src=0, group=self._replica), "to pass on a row")
        return item if isinstance(item, Shared) else _DECODER.decode(content.numpy().tobytes())

    def _bounded(self, collective: Callable[[], object], what: str) -> None:
        if self._is_closing.is_set():
            raise PeerSilent("the training loop has ended")
        self._replicas.bounded(collective, what)


_DECODER: Decoder[Shared] = Decoder(Shared)


def _group_of_replica(replicas: Replicas, timeout: datetime.timedelta) -> dist.ProcessGroup | None:
    """The ranks that work on the same rows as this one, its leader first; None where it works alone."""
    if replicas.layout.ranks_per_replica == 1:
        return None
    groups: list[Any] = [dist.new_group(members, backend="gloo", timeout=timeout) for members in replicas.ranks_of_replicas]
    return groups[replicas.number]
