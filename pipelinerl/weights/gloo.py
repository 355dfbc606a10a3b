"""The transport between machines without special hardware: torch.distributed's gloo, one group of two for each call."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
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
    options._devices = [_device(address, os.getpid())]
    return _Channel(kind(dist.PrefixStore(prefix, store), rank, 2, options), other=1 - rank, deadline=deadline)


@functools.cache
def _device(address: str, process_id: int) -> Any:
    """The socket on which this process listens at an address, and the thread that serves all its connections; a fork needs its own."""
    kind: Any = dist.ProcessGroupGloo
    return kind.create_device(hostname=address)


class _Channel:
    def __init__(self, group: Any, *, other: int, deadline: timedelta) -> None:
        self._group, self._other, self._deadline = group, other, deadline

    def begin_send(self, tensor: torch.Tensor) -> Callable[[], None]:
        send = self._open().send
        return self._waiting_for([send([chunk], self._other, 0) for chunk in _chunks(tensor)])

    def begin_receive(self, tensor: torch.Tensor) -> Callable[[], None]:
        receive = self._open().recv
        return self._waiting_for([receive([chunk], self._other, 0) for chunk in _chunks(tensor)])

    def send(self, tensor: torch.Tensor) -> None:
        self.begin_send(tensor)()

    def receive(self, tensor: torch.Tensor) -> None:
        self.begin_receive(tensor)()

    def abort(self) -> None:
        """The connection is closed once nobody waits for anything of it; gloo itself wakes none of them."""
        self._group = None

    def _open(self) -> Any:
        if (group := self._group) is None:
            raise RuntimeError("this end has hung up")
        return group

    def _waiting_for(self, works: list[Any]) -> Callable[[], None]:
        def wait() -> None:
            for work in works:
                work.wait(self._deadline)

        return wait


def _chunks(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tensor.view(-1).view(torch.uint8).split(CHUNK_BYTES) if tensor.numel() else ()
