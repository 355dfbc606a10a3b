"""Tensors without values, and a count of their memory.

Within `Shapes`, a tensor of floating point numbers has a shape, a dtype and no memory (torch's FakeTensor), so that a model of any size
fits here. Tensors of integers and booleans that come from the host are real: lengths, token ids, the rows of a pipeline and the splits of
an exchange decide what is computed. Where they would come from floating point numbers, they are what an even load makes them: every expert
is chosen as often as another. A number read from a tensor without values is 1.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from trainer.dry_run.collectives import kind_of

_aten = torch.ops.aten


class Shapes(TorchDispatchMode):
    """Where tensors have shapes only. Counts their live bytes, by storage, as long as it is entered."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = 0
        self.peak_bytes = 0
        """Largest number of bytes alive at once since `forget_peak`."""
        self._sizes: dict[int, int] = {}
        """Bytes of every storage that is alive, by its address."""
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._at_exit = contextlib.ExitStack()

    def __enter__(self) -> Shapes:
        with contextlib.ExitStack() as opened:
            opened.enter_context(mock.patch.object(torch.UntypedStorage, "resize_", self._resizing()))  # FSDP's, which is no operator
            opened.enter_context(self._fake)
            self._at_exit = opened.pop_all()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._at_exit.close()

    def forget_peak(self) -> None:
        """Count the largest number of bytes anew."""
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if func is _aten._local_scalar_dense.default and isinstance(tensors[0], FakeTensor):
            return 1.0 if tensors[0].is_floating_point() else 1
        if _is_of_integers(func, tensors, kwargs):
            with _disable_current_modes():
                found = func(*args, **kwargs)
                _receive_evenly(kind_of(func), tensors)
            return found
        found = func(*args, **kwargs)
        if func is _aten.topk.default:
            found = (found[0], _evenly(found[1].shape, among=args[0].shape[-1]))
        for tensor in tree_leaves(found):
            if isinstance(tensor, FakeTensor):
                self._track(tensor.untyped_storage())
        return found

    def _track(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = 0
            self._resize(storage._cdata, storage.nbytes())
            weakref.finalize(storage, self._free, storage._cdata)

    def _resize(self, address: int, num_bytes: int) -> None:
        self.live_bytes += num_bytes - self._sizes[address]
        self._sizes[address] = num_bytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _free(self, address: int) -> None:
        self.live_bytes -= self._sizes.pop(address)

    def _resizing(self) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
        resize = torch.UntypedStorage.resize_

        def counted(storage: torch.UntypedStorage, num_bytes: int) -> torch.UntypedStorage:
            if storage._cdata in self._sizes:
                self._resize(storage._cdata, num_bytes)
            return resize(storage, num_bytes)

        return counted


@contextlib.contextmanager
def pretended_group(*, rank: int, size: int) -> Iterator[None]:
    """Be one of `size` ranks whose collectives reach nobody: torch's `fake` backend. A single rank has no group."""
    from torch.distributed.tensor.debug import _clear_sharding_prop_cache
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if size == 1:
        yield
        return
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # of this rank: DTensor believes that a process stays the same one


def _is_of_integers(func: Any, tensors: Sequence[torch.Tensor], kwargs: Mapping[str, Any]) -> bool:
    """Say whether an operation is one among real integers and booleans, and gives such."""
    if any(isinstance(tensor, FakeTensor) or tensor.is_floating_point() for tensor in tensors):
        return False
    dtype = kwargs.get("dtype")
    if dtype is not None:
        return not dtype.is_floating_point
    return bool(tensors) or func is _aten.arange.default


def _receive_evenly(kind: str | None, tensors: Sequence[torch.Tensor]) -> None:
    """Fill what integers another rank would have sent."""
    if kind == "all_to_all":
        tensors[0].copy_(tensors[1])
    elif kind == "receive":  # the vote of a pipeline's stages, all of which know the shapes that they take and give
        tensors[0].fill_(1)


def _evenly(shape: torch.Size, *, among: int) -> torch.Tensor:
    with _disable_current_modes():
        return (torch.arange(shape.numel()) % among).view(shape)
