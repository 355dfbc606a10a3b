"""The order of what a device does beside the host: copies that forward passes do not wait for, and the moment at which copies are done.

On a device a call returns when the work is launched, not when it is done. A pause timed around calls would then leave out the copies, and a
buffer would be written again while the copy before still reads it. On the host a call is done when it returns.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Protocol

import torch


class Timeline(Protocol):
    """One device's work, as seen by the thread that asks."""

    def mark(self) -> object:
        """The present end of what this thread has launched."""
        ...

    def beside(self, after: object = None) -> contextlib.AbstractContextManager[None]:
        """What is launched within runs beside everything else, once all before the mark `after` is done; it is done at the end of it."""
        ...

    def finish(self) -> None:
        """Return when all is done that this thread has launched where forward passes run."""
        ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        """Memory of the host that the device reads by itself, [bytes] uint8."""
        ...


def timeline_of(device: torch.device) -> Timeline:
    """The timeline of a device, or of the host."""
    return HostTimeline() if device.type == "cpu" else DeviceTimeline(device)


class HostTimeline:
    """Everything is done when it returns."""

    def mark(self) -> object:
        return None

    def beside(self, after: object = None) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def finish(self) -> None:
        """Nothing is under way."""

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.zeros(num_bytes, dtype=torch.uint8)


@functools.cache
def _stream_beside(device: torch.device) -> torch.Stream:
    """The stream of this process for all that is done beside forward passes: on theirs a copy would stand between two of them.

    There is one: torch keeps what was freed on a stream for the same stream alone, so on a new one each time (torch deals 32 in turns)
    the tables of digests, half a gigabyte, would be taken anew for every policy, until the device is full and all wait for it.
    """
    return torch.Stream(device)


class DeviceTimeline:
    """Streams and events of an accelerator."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> object:
        return torch.accelerator.current_stream(self._device).record_event()

    @contextlib.contextmanager
    def beside(self, after: object = None) -> Iterator[None]:
        stream = _stream_beside(self._device)
        if isinstance(after, torch.Event):
            stream.wait_event(after)
        with stream:
            yield
        stream.synchronize()

    def finish(self) -> None:
        event = torch.accelerator.current_stream(self._device).record_event()
        event.synchronize()

    def pinned(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
