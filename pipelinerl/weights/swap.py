"""The swap of a staged policy into the model, between two forward passes: the part that sequences wait for.

Each mode keeps the same promise: `stage` does everything slow, `commit` is short and leaves all parameters of one version. They differ in
what they cost and in what breaks them; `choose_swap_mode` picks one when the engine starts.

    PointerSwap  changes the one address behind which all parameters lie: microseconds, however many and however large they are. It needs
                 that nobody has kept their addresses.
    SparseSwap   is a CopySwap for whole policies; of a delta it writes only what changed, without a second copy of the model.
    CopySwap     copies the staged buffer into the parameters: as long as a memcpy of the model. It works where addresses are captured.
"""

from __future__ import annotations

import bisect
import dataclasses
import enum
import logging
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from pipelinerl.errors import ConfigError
from pipelinerl.messages import Tensor
from pipelinerl.weights.host_memory import give_back
from pipelinerl.weights.timeline import Timeline, timeline_of

log = logging.getLogger(__name__)

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class SwapMode(enum.StrEnum):
    """The way a policy takes effect; the shortest pause first."""

    POINTER = "pointer"
    """The parameters point into the staged buffer."""
    SPARSE = "sparse"
    """A delta is written into the parameters, in place; only where deltas are sent."""
    COPY = "copy"
    """The staged buffer is copied into the parameters, in place."""


class Staging(enum.StrEnum):
    """The memory in which a staged policy waits, where parameters are in a device's."""

    DEVICE = "device"
    """Beside them: the copy in the pause is as fast as the device's memory; 16 GB take an H100 about 12 ms (estimated)."""
    HOST = "host"
    """In pinned memory of the host, where the device has no room: the copy in the pause is as fast as PCIe, 0.3 to 0.6 s (estimated)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """A parameter of the running model, and its place in a policy's buffer."""

    parameter: torch.nn.Parameter
    offset_bytes: int
    num_bytes: int
    """From its first byte to its last."""
    is_view: bool = False
    """Another parameter owns the memory: this one is tied to it, or shows a part of it in another order."""

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        """The parameter's bytes in a buffer, as the parameter is shaped."""
        part = buffer[self.offset_bytes : self.offset_bytes + self.num_bytes].view(self.parameter.dtype)
        return part.as_strided(self.parameter.shape, self.parameter.stride()) if self.is_view else part.view(self.parameter.shape)


class WeightSwap(Protocol):
    """Brings a staged policy into force. `stage` may run in another thread than `commit`, never at the same time."""

    def spare(self) -> torch.Tensor:
        """A buffer ([bytes] uint8) that the model does not read: for transports that bring no memory of their own."""
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


def choose_swap_mode(wanted: str, obstacles: Mapping[SwapMode, Sequence[str]], *, sends_deltas: bool = False) -> tuple[SwapMode, str]:
    """The swap mode, and a sentence that says why. `wanted` is "auto" or a mode; `obstacles` are what would break each.

    `sends_deltas`: policies may arrive as changes; without them a sparse swap has nothing to write.

    Raises `ConfigError` with all of them where the mode wanted, or every mode, would leave the model with other weights than it says.
    """
    modes = [mode for mode in SwapMode if sends_deltas or mode is not SwapMode.SPARSE] if wanted == "auto" else [SwapMode(wanted)]
    for mode in modes:
        if not obstacles.get(mode):
            passed = [f"{other} would break: {obstacles[other][0]}" for other in modes[: modes.index(mode)]]
            why = "; ".join(passed) or ("nothing stands against the shortest pause" if wanted == "auto" else "weights.swap_mode says so")
            return mode, f"policies are committed by {mode}: {why}"
    found = "\n".join(f"  - {mode}: {reason}" for mode in modes for reason in obstacles[mode])
    raise ConfigError(f"this model cannot take new weights by {' or '.join(modes)} here:\n{found}")


def make_swap(mode: SwapMode, parameters: Sequence[Placed], *, gathers: bool = True, staging: Staging = Staging.DEVICE) -> WeightSwap:
    """The swap of a mode for these parameters, with the memory that it will need.

    `gathers`: they may be moved now, into one piece of memory; not where somebody has kept their addresses, and never on a device, where
    two models would have to fit meanwhile. Where the device has no room after all for what `staging` wants there, the host has it.
    """
    if mode is SwapMode.POINTER:
        return PointerSwap(parameters)
    kind = SparseSwap if mode is SwapMode.SPARSE else CopySwap
    try:
        return kind(parameters, gathers=gathers, staging=staging)
    except torch.OutOfMemoryError as error:
        log.warning("the next policy waits on the host, and swaps take longer, because the device has no room for it: %s", error)
        return kind(parameters, gathers=gathers, staging=Staging.HOST)


def gather(parameters: Sequence[Placed]) -> torch.Tensor:
    """Move parameters into one new storage, each where a policy's buffer has it, and return that: [bytes] uint8, on their device."""
    home = torch.zeros(_num_bytes(parameters), dtype=torch.uint8, device=parameters[0].parameter.device)
    for placed in parameters:
        placed.view(home).copy_(placed.parameter.data)
        placed.parameter.data = placed.view(home)
    return home


CAN_SWAP_POINTER = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""True where this torch can change the address of a storage in place."""


class PointerSwap:
    """Has the storage that all parameters are views of lie elsewhere: in the staged buffer. One pointer changes, whatever the model.

    The storage owns no memory: buffers do, and the one that the model has left is kept until the next is staged, because unmapping it
    inside the pause would take as long as a copy.
    """

    def __init__(self, parameters: Sequence[Placed]) -> None:
        self._live = gather(parameters)
        self._num_bytes = len(self._live)
        self._private = [self._live]
        self._storage = _storage_at(self._live, self._num_bytes)
        self._policy = torch.empty(0, dtype=torch.uint8).set_(self._storage)
        """[bytes] uint8: what the model reads, wherever it lies."""
        for placed in parameters:
            placed.parameter.data = placed.view(self._policy)
        self._staged: tuple[torch.Tensor, torch.UntypedStorage] | None = None
        self._left: torch.Tensor | None = None

    def spare(self) -> torch.Tensor:
        free = [buffer for buffer in self._private if buffer is not self._live]
        if not free:
            free = [torch.zeros(self._num_bytes, dtype=torch.uint8)]
            self._private += free
        return free[0]

    def stage(self, buffer: torch.Tensor) -> None:
        self._left = None
        own = next((one for one in self._private if one.data_ptr() == buffer.data_ptr()), buffer)
        self._staged = own, _storage_at(buffer, self._num_bytes)

    def commit(self) -> None:
        assert self._staged is not None
        self._left = self._live
        self._live, storage = self._staged
        self._storage._swap_data_ptr_(storage)  # pyright: ignore[reportAttributeAccessIssue]  # torch's stubs do not know it
        self._staged = None

    def save(self, buffer: torch.Tensor) -> None:
        buffer[: self._num_bytes].copy_(self._policy)

    def discard(self) -> int:
        """Give back what this process holds of policies; the model has none until one is committed. Returns the bytes.

        A weight buffer that the model points into is somebody else's, and only not read any more.
        """
        self._left = None
        return sum(give_back(buffer) for buffer in self._private)


class CopySwap:
    """Copies the staged buffer into the parameters where they are: in one piece, where they could be gathered."""

    def __init__(
        self,
        parameters: Sequence[Placed],
        *,
        gathers: bool = True,
        staging: Staging = Staging.DEVICE,
        timeline: Timeline | None = None,
    ) -> None:
        """Raises `torch.OutOfMemoryError` where the device has no room for `staging`."""
        device = parameters[0].parameter.device
        self._timeline = timeline or timeline_of(device)
        self._parameters = sorted((one for one in parameters if not one.is_view), key=lambda placed: placed.offset_bytes)
        self._num_bytes = _num_bytes(parameters)
        gathers = gathers and device.type == "cpu"
        self._pieces = [(0, gather(parameters))] if gathers else [(one.offset_bytes, _bytes_of(one)) for one in self._parameters]
        """(offset in a policy's buffer, the model's own memory [bytes] uint8) of each piece."""
        self._spare: torch.Tensor | None = None
        self._beside: torch.Tensor | None = None
        """[bytes] uint8, where parameters are in a device's memory: what is staged waits there. Made now, before anything else takes the
        room."""
        if device.type != "cpu":
            on_device = staging is Staging.DEVICE
            self._beside = (
                torch.empty(self._num_bytes, dtype=torch.uint8, device=device) if on_device else self._timeline.pinned(self._num_bytes)
            )
        self._staged: torch.Tensor | None = None

    def spare(self) -> torch.Tensor:
        if self._spare is None:
            self._spare = self._timeline.pinned(self._num_bytes)  # a device reads it faster than memory that may be moved
        return self._spare

    def stage(self, buffer: torch.Tensor) -> None:
        self._staged = self._bring(buffer[: self._num_bytes])

    def commit(self) -> None:
        assert self._staged is not None
        for start, target in self._pieces:
            target.copy_(self._staged[start : start + len(target)], non_blocking=True)
        self._timeline.finish()  # so that the pause is that of the copies, and the next policy is not written over what they read
        self._staged = None

    def save(self, buffer: torch.Tensor) -> None:
        for start, source in self._pieces:
            buffer[start : start + len(source)].copy_(source)

    def discard(self) -> int:
        """As `PointerSwap.discard`; what lies on a device is the device's own matter."""
        self._spare = None
        return sum(give_back(piece) for _, piece in self._pieces if piece.device.type == "cpu")

    def _bring(self, buffer: torch.Tensor) -> torch.Tensor:
        """The staged bytes on the parameters' device, or where that reads them fastest: brought there now, beside the forward passes, and
        not in the pause."""
        if self._beside is None or self._parameters[0].parameter.device == buffer.device:
            return buffer
        if self._beside.device == buffer.device and self._spare is not None and buffer.data_ptr() == self._spare.data_ptr():
            return buffer  # pinned as well: a copy beside it would win nothing
        with self._timeline.beside():
            self._beside.copy_(buffer, non_blocking=True)
        return self._beside


class SparseSwap(CopySwap):
    """Copies whole policies, and writes changes where they belong.

    A delta is kept as [count] indices and new bits for each parameter, on the parameter's own device.
    """

    def __init__(
        self,
        parameters: Sequence[Placed],
        *,
        gathers: bool = True,
        staging: Staging = Staging.DEVICE,
        timeline: Timeline | None = None,
    ) -> None:
        super().__init__(parameters, gathers=gathers, staging=staging, timeline=timeline)
        self._starts = [placed.offset_bytes for placed in self._parameters]
        self._changes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]] | None = None
        """Parameter as a flat tensor of integers, indices, new bits."""

    def stage(self, buffer: torch.Tensor) -> None:
        self._changes = None
        super().stage(buffer)

    @property
    def device(self) -> torch.device:
        """The parameters' own."""
        return self._parameters[0].parameter.device

    def bits_of(self, tensor: Tensor) -> torch.Tensor:
        """The present bits of a checkpoint tensor, [elements] signed integers of the element's size: the model's own memory."""
        placed = self._parameters[bisect.bisect_right(self._starts, tensor.offset_bytes) - 1]
        bits = placed.parameter.data.view(-1).view(_INTEGERS[placed.parameter.element_size()])
        start = (tensor.offset_bytes - placed.offset_bytes) // bits.element_size()
        return bits[start : start + tensor.num_bytes // bits.element_size()]

    def stage_delta(self, changes: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> None:
        """Get ready to write, for each `(bits, indices, new bits)`, the new bits into `bits` (of `bits_of`)."""
        self._changes = changes

    def commit(self) -> None:
        if self._changes is None:
            super().commit()
            return
        for bits, indices, new in self._changes:
            bits.index_copy_(0, indices, new)
        self._timeline.finish()
        self._changes = None


def _storage_at(buffer: torch.Tensor, num_bytes: int) -> torch.UntypedStorage:
    """A storage that lies where the buffer does, and does not keep it alive."""
    assert len(buffer) >= num_bytes, f"{len(buffer)} bytes staged, the model has {num_bytes}"
    storage: Any = torch._C._construct_storage_from_data_pointer(buffer.data_ptr(), buffer.device, num_bytes)
    return storage  # torch's stubs call it by an older class


def _bytes_of(placed: Placed) -> torch.Tensor:
    return placed.parameter.data.view(-1).view(torch.uint8)


def _num_bytes(parameters: Sequence[Placed]) -> int:
    return max(placed.offset_bytes + placed.num_bytes for placed in parameters)
