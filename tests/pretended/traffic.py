"""What a function does on the pretended device: tensors that are there and have no memory, and every way of one to the host, noted.

torch's own rules of dtype, shape and device hold for each operation (`FakeTensorMode`): one that mixes host and device is an error, as
it is on a GPU. Streams are torch's, over a driver that has nothing to do. A number that the host asks for is made up: 1, or True.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA = torch.device("cuda", 0)
GIB = 1 << 30
WAYS = ("copy_", "_to_copy")
"""Operations that bring a tensor from one device to another."""


@dataclasses.dataclass(kw_only=True)
class Traffic:
    """What crossed between host and device, as operation, dtype and shape, and on which streams the device worked."""

    fetched: list[str] = dataclasses.field(default_factory=list)
    """To the host, which waits for it."""
    brought: list[str] = dataclasses.field(default_factory=list)
    """To the device."""
    launched: list[tuple[int, str]] = dataclasses.field(default_factory=list)
    """The stream (0: the one that is there from the start) and operation of all that the device was told to do."""

    modes: tuple[Any, ...] = ()
    """By which tensors of this thread have no memory, and are noted."""

    def forget(self) -> None:
        """What came before is not what is asked about."""
        for noted in (self.fetched, self.brought, self.launched):
            noted.clear()

    def in_a_thread(self, work: Callable[..., Any]) -> Callable[..., Any]:
        """The same work, for another thread to do on this device: torch's modes are each thread's own."""

        def done(*arguments: Any, **options: Any) -> Any:
            with contextlib.ExitStack() as stack:
                for mode in self.modes:
                    stack.enter_context(mode)
                return work(*arguments, **options)

        return done

    def streams_of(self, operation: str) -> list[int]:
        return [stream for stream, name in self.launched if name == operation]


@contextlib.contextmanager
def on_a_device() -> Iterator[Traffic]:
    """Within it tensors have no memory, and those of "cuda" are a device's, of compute capability 9.0 and 80 GiB."""
    traffic = Traffic()
    with contextlib.ExitStack() as stack:
        for name, answer in _CUDA.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, answer))
        for name, method in (("tolist", _tolist), ("numpy", _numpy), ("data_ptr", _address)):
            stack.enter_context(mock.patch.object(FakeTensor, name, method(traffic)))
        traffic.modes = _Fake(allow_non_fake_inputs=True), _Noted(traffic)
        for mode in traffic.modes:
            stack.enter_context(mode)
        yield traffic


_CUDA: dict[str, Any] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "current_device": lambda: 0,
    "get_device_capability": lambda device=None: (9, 0),
    "mem_get_info": lambda device=None: (70 * GIB, 80 * GIB),
    "memory_reserved": lambda device=None: 0,
    "memory_allocated": lambda device=None: 0,
}
"""What a torch built without CUDA has in name alone."""


class _Fake(FakeTensorMode):
    @property
    def avoid_device_init(self) -> bool:
        return True


class _Noted(TorchDispatchMode):
    def __init__(self, traffic: Traffic) -> None:
        super().__init__()
        self._traffic = traffic

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        name = func._schema.name.partition("::")[2]
        if name == "_local_scalar_dense":
            _fetch(self._traffic, "number", args[0])
            return _one(args[0].dtype)
        given = _tensors((args, kwargs))
        if func.namespace not in ("aten", "prim") and len({one.device for one in given}) > 1:  # fake tensors look at torch's own alone
            raise RuntimeError(f"{func} is given tensors of host and device: {', '.join(map(_said, given))}")
        found = func(*args, **(kwargs or {}))
        made = [given[0]] if name == "copy_" else _tensors(found)
        if func.namespace != "prim" and CUDA in {one.device for one in (*given, *made)}:
            self._traffic.launched.append((torch.accelerator.current_stream().stream_id, name))
        if name in WAYS and (given[-1].device == CUDA) != (made[0].device == CUDA):
            where = self._traffic.brought if made[0].device == CUDA else self._traffic.fetched
            where.append(f"{name} {_said(given[-1])}")
        return found


def _tolist(traffic: Traffic) -> Any:
    def tolist(self: torch.Tensor) -> Any:
        _fetch(traffic, "numbers", self)
        return np.full(tuple(self.shape), _one(self.dtype)).tolist()

    return tolist


def _numpy(traffic: Traffic) -> Any:
    def numpy(self: torch.Tensor) -> np.ndarray:
        if self.device == CUDA:
            raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy the tensor to host memory first.")
        return np.ones(tuple(self.shape), str(self.dtype).removeprefix("torch."))

    return numpy


def _address(traffic: Traffic) -> Any:
    def data_ptr(self: torch.Tensor) -> int:
        return self.untyped_storage()._cdata * 64 + int(self.storage_offset()) * self.element_size()

    return data_ptr


def _fetch(traffic: Traffic, what: str, tensor: torch.Tensor) -> None:
    if tensor.device == CUDA:
        traffic.fetched.append(f"{what} {_said(tensor)}")


def _one(dtype: torch.dtype) -> bool | int | float:
    return True if dtype == torch.bool else 1.0 if dtype.is_floating_point else 1


def _tensors(tree: Any) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def _said(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
