"""How a staged policy takes effect, between two forward passes: the part of a swap that sequences wait for.

Each way keeps the same promise: `stage` does everything slow, `commit` is short and leaves all parameters of one version. They differ in
what they cost and in what breaks them; `choice` picks one when the engine starts.

    Flip      points parameters into the staged buffer: about a microsecond each, however large. Needs nobody to have kept their addresses.
    Scatter   like Copy for whole policies; of changes it writes only what changed, and keeps no second copy of the model for them.
    Copy      copies the staged buffer into the parameters: as long as a memcpy of the model. Works where addresses are captured.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
from collections.abc import Mapping, Sequence
from typing import Protocol

import torch

from pipelinerl.errors import ConfigError
from pipelinerl.messages import Tensor

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Way(enum.StrEnum):
    """How a policy is committed; the shortest pause first."""

    FLIP = "flip"
    """Pointers into the staged buffer."""
    SCATTER = "scatter"
    """What changed into the parameters, in place; only where changes are sent."""
    COPY = "copy"
    """The staged buffer into the parameters, in place."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A parameter of the running model, and its place in a policy's buffer."""

    parameter: torch.nn.Parameter
    offset_bytes: int
    num_bytes: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's bytes in a buffer, as the parameter is shaped."""
        part = buffer[self.offset_bytes : self.offset_bytes + self.num_bytes]
        return part.view(self.parameter.dtype).view(self.parameter.shape)


class Commit(Protocol):
    """Brings a staged policy into force. `stage` may run in another thread than `commit`, never at the same time."""

    def spare(self) -> torch.Tensor:
        """A buffer ([bytes] uint8) that the model does not read: for roads that bring no memory of their own."""
        ...

    def stage(self, buffer: torch.Tensor) -> None:
        """Get ready to commit the policy in `buffer`, which nobody writes from now on until another one is committed."""
        ...

    def save(self, buffer: torch.Tensor) -> None:
        """Write the policy in force into `buffer`."""
        ...

    def commit(self) -> None:
        """Bring the staged policy into force."""
        ...


def choose(wanted: str, obstacles: Mapping[Way, Sequence[str]], *, sends_changes: bool = False) -> tuple[Way, str]:
    """The way to commit, and a sentence that says why. `wanted` is "auto" or a way; `obstacles` are what would break each.

    `sends_changes`: policies may arrive as changes; without them nothing is there to scatter.

    Raises `ConfigError` with all of them where the way wanted, or every way, would leave the model with other weights than it says.
    """
    ways = [way for way in Way if sends_changes or way is not Way.SCATTER] if wanted == "auto" else [Way(wanted)]
    for way in ways:
        if not obstacles.get(way):
            passed = [f"{other} would break: {obstacles[other][0]}" for other in ways[: ways.index(way)]]
            why = "; ".join(passed) or ("nothing stands against the shortest pause" if wanted == "auto" else "weights.commit says so")
            return way, f"policies are committed by {way}: {why}"
    found = "\n".join(f"  - {way}: {reason}" for way in ways for reason in obstacles[way])
    raise ConfigError(f"this model cannot take new weights by {' or '.join(ways)} here:\n{found}")


def make(way: Way, parameters: Sequence[Placed]) -> Commit:
    """The commit of a way for these parameters."""
    return {Way.FLIP: Flip, Way.SCATTER: Scatter, Way.COPY: Copy}[way](parameters)


MAX_VIEWED = 8
"""Buffers whose views are kept. Fewer make views anew while staging; more keep the memory of buffers that a dead trainer has left."""


class Flip:
    """Points every parameter into the staged buffer.

    The parameters' first storage is kept: dropping the last reference to it would unmap it inside the pause.
    """

    def __init__(self, parameters: Sequence[Placed]) -> None:
        self._parameters = parameters
        self._num_bytes = _num_bytes(parameters)
        self._first = [placed.parameter.data for placed in parameters]
        self._private: list[torch.Tensor] = []
        self._views: dict[int, tuple[torch.Tensor, list[tuple[torch.nn.Parameter, torch.Tensor]]]] = {}
        """By address: a buffer that was staged before, and each parameter with its view of it. A road uses few buffers, in turn."""
        self._staged: int | None = None
        self._live: int | None = None

    def spare(self) -> torch.Tensor:
        free = [buffer for buffer in self._private if buffer.data_ptr() != self._live]
        if not free:
            free = [torch.zeros(self._num_bytes, dtype=torch.uint8)]
            self._private += free
        return free[0]

    def stage(self, buffer: torch.Tensor) -> None:
        address = buffer.data_ptr()
        if address not in self._views:
            if len(self._views) >= MAX_VIEWED:
                self._views = {live: views for live, views in self._views.items() if live == self._live}
            self._views[address] = buffer, [(placed.parameter, placed.view(buffer)) for placed in self._parameters]
        self._staged = address

    def commit(self) -> None:
        assert self._staged is not None
        for parameter, view in self._views[self._staged][1]:
            parameter.data = view
        self._live, self._staged = self._staged, None

    def save(self, buffer: torch.Tensor) -> None:
        _save(self._parameters, buffer)


class Copy:
    """Copies the staged buffer into the parameters where they are."""

    def __init__(self, parameters: Sequence[Placed]) -> None:
        self._parameters = parameters
        self._num_bytes = _num_bytes(parameters)
        self._targets = [placed.parameter.data for placed in parameters]
        self._spare: torch.Tensor | None = None
        self._staged: list[torch.Tensor] | None = None

    def spare(self) -> torch.Tensor:
        if self._spare is None:
            self._spare = torch.zeros(self._num_bytes, dtype=torch.uint8)
        return self._spare

    def stage(self, buffer: torch.Tensor) -> None:
        self._staged = [placed.view(buffer) for placed in self._parameters]

    def commit(self) -> None:
        assert self._staged is not None
        with torch.no_grad():
            torch._foreach_copy_(self._targets, self._staged)
        self._staged = None

    def save(self, buffer: torch.Tensor) -> None:
        _save(self._parameters, buffer)


class Scatter(Copy):
    """Copies whole policies, and writes changes where they belong.

    Changes are kept as [count] indices and new bits for each parameter, on the parameter's own device.
    """

    def __init__(self, parameters: Sequence[Placed]) -> None:
        super().__init__(sorted(parameters, key=lambda placed: placed.offset_bytes))
        self._starts = [placed.offset_bytes for placed in self._parameters]
        self._changes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
        """Parameter as a flat tensor of integers, indices, new bits."""

    def stage(self, buffer: torch.Tensor) -> None:
        self._changes = None
        super().stage(buffer)

    def bits_of(self, tensor: Tensor) -> torch.Tensor:
        """The present bits of a checkpoint tensor, [elements] signed integers of the element's size: the model's own memory."""
        placed = self._parameters[bisect.bisect_right(self._starts, tensor.offset_bytes) - 1]
        bits = placed.parameter.data.view(-1).view(_INTEGERS[placed.parameter.element_size()])
        start = (tensor.offset_bytes - placed.offset_bytes) // bits.element_size()
        return bits[start : start + tensor.num_bytes // bits.element_size()]

    def stage_changes(self, changes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        """Get ready to write, for each `(bits, indices, new bits)`, the new bits into `bits` (of `bits_of`)."""
        self._changes = changes

    def commit(self) -> None:
        if self._changes is None:
            super().commit()
            return
        for bits, indices, new in self._changes:
            bits.index_copy_(0, indices, new)
        self._changes = None


def _save(parameters: Sequence[Placed], buffer: torch.Tensor) -> None:
    for placed in parameters:
        placed.view(buffer).copy_(placed.parameter.data)


def _num_bytes(parameters: Sequence[Placed]) -> int:
    return max(placed.offset_bytes + placed.num_bytes for placed in parameters)
