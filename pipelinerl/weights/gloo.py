"""The transport between machines without special hardware: torch.distributed's gloo, one group of two for each call."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from pipelinerl.weights.point_to_point import DEADLINE_S, PointToPointReceiver, PointToPointSender


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
        self._group.send([tensor], self._other, 0).wait(self._deadline)

    def receive(self, tensor: torch.Tensor) -> None:
        self._group.recv([tensor], self._other, 0).wait(self._deadline)

    def abort(self) -> None:
        self._group.abort()
