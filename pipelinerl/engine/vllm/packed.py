"""vLLM's packed matrix kernels for CPUs, and how they follow a swap.

A kernel that reads a weight as it lies in a checkpoint arranges it for the processor's registers anew in every forward pass. vLLM does so
once, when a model is loaded, which makes passes of few tokens a quarter to a half faster; but a new policy has no way into such a copy.
So layers are loaded plain (`keep_plain_weights`), which every part of the swap relies on, and get kernels here that hold a packed copy
beside the plain weight: a policy's copy is made while it is staged, and all kernels change over in one assignment when it is committed.

A packed copy takes as much memory again as the matrices, twice while a policy is staged.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch.nn import functional

from pipelinerl.runtime.machine import memory_bytes
from pipelinerl.weights.swap import Placed, PointerSwap
from pipelinerl.weights.throttle import throttle

PACK_FROM_BYTES = 32 << 20
"""Size of a model's matrices from which they are packed. Smaller models are at home in a core's caches, where packing gains little."""
SHARE_OF_MEMORY = 1 / 4
"""Part of the machine's memory that the packed copies of all engines may take: plain kernels are slower, and need none."""

Kernel = Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor]
"""(input, plain weight, bias) to output."""


class PackedKernels:
    """The kernels of a model's matrices; all of them change over at once."""

    def __init__(self, layers: Sequence[torch.nn.Module], *, make: Callable[[torch.nn.Module, torch.Tensor], Kernel] | None = None) -> None:
        """Take over the kernels of these layers. `pack` and `exchange` come before the next forward pass.

        `make` makes a layer's kernel of its weight; by default vLLM's own for it, in full precision.
        """
        self._kernels: list[Kernel] = []
        self._make = make or packed_kernel
        self.layers = layers
        for index, layer in enumerate(layers):
            vars(layer)["cpu_linear"] = _Kernel(self, index)

    def pack(self, weights: Sequence[torch.Tensor], *, held: Sequence[torch.Tensor] = ()) -> list[Kernel]:
        """Pack a weight for each layer, which stay as they are; `throttle` is called between two of them.

        `held` are the weights in force: what is as it was, as are all matrices without an adapter, keeps its kernel.
        """
        made: list[Kernel] = []
        for index, (layer, weight) in enumerate(zip(self.layers, weights, strict=True)):
            is_new = not held or not torch.equal(weight, held[index])
            made.append(self._make(layer, weight) if is_new else self._kernels[index])
            throttle()
        return made

    def exchange(self, kernels: list[Kernel]) -> list[Kernel]:
        """Compute with these from now on; returns those before."""
        before, self._kernels = self._kernels, kernels
        return before

    def __getitem__(self, index: int) -> Kernel:
        return self._kernels[index]


def packed_kernel(layer: torch.nn.Module, weight: torch.Tensor) -> Kernel:
    """vLLM's kernel for a weight, which stays as it is."""
    from vllm.model_executor.layers import utils

    holder: Any = types.SimpleNamespace(weight=weight, bias=None)
    _dispatch(utils)(holder, remove_weight=False)
    return holder.cpu_linear


class _Kernel:
    """A layer's own of the kernels in force."""

    def __init__(self, kernels: PackedKernels, index: int) -> None:
        self._kernels, self._index = kernels, index

    def __call__(self, input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return self._kernels[self._index](input, weight, bias)


class PackedSwap:
    """A pointer swap whose matrices are packed, too: see `pipelinerl.weights.swap.WeightSwap`."""

    def __init__(self, parameters: Sequence[Placed], kernels: PackedKernels) -> None:
        self._plain = PointerSwap(parameters)
        self._kernels = kernels
        placed = {id(one.parameter): one for one in parameters}
        self._placed = [placed[id(layer.weight)] for layer in kernels.layers]
        kernels.exchange(kernels.pack([one.parameter.data for one in self._placed]))
        self._staged: list[Kernel] = []
        self._left: list[Kernel] = []
        """Let go of while the next policy is staged: giving back their memory takes longer than a pause may."""

    def __str__(self) -> str:
        return f"{len(self._placed)} matrices are packed for the processor while a policy is staged"

    def spare(self) -> torch.Tensor:
        return self._plain.spare()

    def stage(self, buffer: torch.Tensor) -> None:
        self._left.clear()
        self._plain.stage(buffer)
        held = [one.parameter.data for one in self._placed]
        self._staged = self._kernels.pack([one.view(buffer) for one in self._placed], held=held)

    def commit(self) -> None:
        self._plain.commit()
        self._left = self._kernels.exchange(self._staged)
        self._staged = []

    def save(self, buffer: torch.Tensor) -> None:
        self._plain.save(buffer)


def make_packed_swap(model: torch.nn.Module, parameters: Sequence[Placed], *, num_engines: int) -> PackedSwap | None:
    """The pointer swap with packed kernels; None where the model has none. `num_engines`: those of the run, each of which packs its own."""
    layers = layers_to_pack(model, memory_bytes=memory_bytes(), num_copies=2 * num_engines)
    return PackedSwap(parameters, PackedKernels(layers)) if layers else None


def pack_for_good(model: torch.nn.Module, *, num_engines: int) -> str:
    """Pack the matrices of a model whose own weights never change; returns what is to be said of it."""
    layers = layers_to_pack(model, memory_bytes=memory_bytes(), num_copies=num_engines)
    kernels = PackedKernels(layers)
    kernels.exchange(kernels.pack([cast(torch.Tensor, layer.weight) for layer in layers]))
    return f"; {len(layers)} matrices are packed for the processor" if layers else ""


def is_plain(kernel: Any) -> bool:
    """True for a kernel that computes with the weight it is given, or with one that follows it."""
    return kernel is functional.linear or isinstance(kernel, _Kernel)


def layers_to_pack(model: torch.nn.Module, *, memory_bytes: int, num_copies: int) -> list[torch.nn.Module]:
    """The layers that vLLM would pack here and whose copy follows a swap; none where packing does not pay or has no room."""
    from vllm.model_executor.layers.utils import check_cpu_sgl_kernel
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

    head = getattr(model, "lm_head", None)

    def packs(layer: torch.nn.Module) -> bool:
        weight, bias = getattr(layer, "weight", None), getattr(layer, "bias", None)
        if getattr(layer, "cpu_linear", None) is not functional.linear or weight is None or weight.dim() != 2 or not weight.numel():
            return False
        if isinstance(layer, VocabParallelEmbedding) and not isinstance(layer, ParallelLMHead) and layer is not head:
            return False  # looked up, never multiplied with
        # vLLM turns the bias of these into another dtype, which a policy's bytes then no longer are.
        return bias is None or not check_cpu_sgl_kernel(weight.shape[0], weight.shape[1], weight.dtype)

    layers = [layer for layer in model.modules() if packs(layer)]
    num_bytes = sum(cast(torch.Tensor, layer.weight).nbytes for layer in layers)
    fits = num_copies * num_bytes <= SHARE_OF_MEMORY * memory_bytes
    return layers if num_bytes >= PACK_FROM_BYTES and fits else []


def _dispatch(utils: Any) -> Callable[..., None]:
    """vLLM's own choice of a kernel for a layer, from under `keep_plain_weights`."""
    return getattr(utils.dispatch_cpu_unquantized_gemm, "packs", utils.dispatch_cpu_unquantized_gemm)
