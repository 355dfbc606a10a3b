"""The transport between machines without special hardware: torch.distributed's gloo, one group of two for each call."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipelinerl.weights.point_to_point import DEADLINE_S, PointToPointReceiver, PointToPointSender

CHUNK_BYTES = 16 << 20
"""One send. Larger ones only delay the notice that a peer has stopped; smaller ones cost a round of the event loop each."""


def sender(address: str = "127.0.0.1", *, deadline_s: float = DEADLINE_S) -> PointToPointSender:
    """The trainer's end."""
    return PointToPointSender("gloo", connect, address=address, deadline_s=deadline_s)


def receiver(*, deadline_s: float = DEADLINE_S) -> PointToPointReceiver:
    """An engine's end."""
    return PointToPointReceiver("gloo", connect, deadline_s=deadline_s)


def connect(store: dist.Store, prefix: str, rank: int, /, *, address: str, deadline: timedelta) -> _Channel:
    """See `point_to_point.Connect`. Each call is a connection of its own, so none inherits a failure."""
    kind: Any = dist.ProcessGroupGloo  # torch's own type stubs know neither its options nor send and recv
    options = kind._Options()
    options._timeout = deadline
    options._devices = [kind.create_device(hostname=address)]
    return _Channel(kind(dist.PrefixStore(prefix, store), rank, 2, options), other=1 - rank, deadline=deadline)


class _Channel:
    def __init__(self, group: Any, *, other: int, deadline: timedelta) -> None:
        self._group, self._other, self._deadline = group, other, deadline

    def send(self, tensor: torch.Tensor) -> None:
        for chunk in _chunks(tensor):
            self._group.send([chunk], self._other, 0).wait(self._deadline)

    def receive(self, tensor: torch.Tensor) -> None:
        for chunk in _chunks(tensor):
            self._group.recv([chunk], self._other, 0).wait(self._deadline)

    def abort(self) -> None:
        self._group.abort()


def _chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.view(-1).view(torch.uint8).split(CHUNK_BYTES) if tensor.numel() else ()
