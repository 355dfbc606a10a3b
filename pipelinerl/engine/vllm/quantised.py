"""INT8 rollouts on a CPU: the linear layers of an engine compute in eight bits, from policies that arrive in full precision.

A policy's bytes stay what the trainer published: its digests are verified, and the parameters are plain views of it. Beside them each layer
holds its weight as int8, one scale for each output (the largest magnitude is 127), packed for oneDNN; activations are quantised for each
token as they come. A policy's int8 weights are made while it is staged, and take force in the same commit as its other parameters, so no
forward pass mixes versions. Embeddings, norms, the output head, routers and experts keep full precision.

The engine reports the log-probabilities of what it really sampled from. The trainer's differ by the quantisation: `mismatch_kl/...` shows
by how much, and the importance weight of the method corrects it as it corrects staleness.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from vllm import _custom_ops as ops
from vllm.model_executor.layers.linear import LinearBase
from vllm.platforms import current_platform

from pipelinerl.engine.vllm.packed import Kernel, PackedKernels, PackedSwap, layers_to_pack, packed_kernel
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.machine import memory_bytes
from pipelinerl.weights.swap import Placed

_LARGEST = 127
_ROUTERS = ("gate", "router")
"""Names of layers that choose experts: a logit that is a little off there sends a token to another expert."""
_CACHED_SHAPES = 32
"""Numbers of rows for which oneDNN keeps a compiled kernel: vLLM's own choice."""


def check_kernel() -> None:
    """Raise `ConfigError` naming the kernel where this build or machine cannot compute in int8."""
    if not current_platform.is_cpu():
        raise ConfigError(
            f'engine.quantization is "int8", which is made with vLLM\'s CPU kernel onednn_scaled_mm, and vLLM runs on'
            f" {current_platform.device_name} here. Leave it out."
        )
    missing = [name for name in ("create_onednn_scaled_mm_handler", "onednn_scaled_mm", "dynamic_scaled_int8_quant") if not _has(name)]
    if missing:
        raise ConfigError(
            f'engine.quantization is "int8", and this build of vLLM has no kernel torch.ops._C.{missing[0]}. Leave it out, or install'
            " a build that has it."
        )


def _has(name: str) -> bool:
    return hasattr(torch.ops._C, name)


class Int8Kernel:
    """The product with one weight, [outputs, inputs], in int8; called as `torch.nn.functional.linear`."""

    def __init__(self, weight: torch.Tensor) -> None:
        """Quantise a weight in floating point, which stays as it is."""
        self._scales = weight.abs().amax(1, keepdim=True).float().clamp_min(torch.finfo(torch.float32).tiny) / _LARGEST
        """[outputs, 1] float32; oneDNN reads them where they lie."""
        quantised = (weight / self._scales).round().clamp_(-_LARGEST, _LARGEST).to(torch.int8)
        self._packed = ops.create_onednn_scaled_mm(quantised.t(), self._scales, weight.dtype, True, False, _CACHED_SHAPES)

    def __call__(self, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return x W^T + bias, [..., outputs] in the dtype of `x`; `weight`, in full precision, is not read."""
        rows = x.reshape(-1, x.shape[-1])
        quantised, scales, _ = ops.onednn_scaled_int8_quant(rows, None, None, True)
        found = torch.empty((len(rows), self._packed.n), dtype=x.dtype)
        ops.onednn_scaled_mm(self._packed, quantised, found, scales, None, None, bias)
        return found.reshape(*x.shape[:-1], self._packed.n)


def make_int8_swap(model: torch.nn.Module, parameters: Sequence[Placed], *, num_engines: int) -> PackedSwap:
    """Return the pointer swap whose linear layers compute in int8, and whose other matrices are packed where that pays.

    Raises `ConfigError` where the model has no layer for it.
    """
    linear = {id(layer): layer for layer in _linear_layers(model)}
    if not linear:
        raise ConfigError('engine.quantization is "int8", and the model has no linear layer that vLLM computes with one weight')
    packed = layers_to_pack(model, memory_bytes=memory_bytes(), num_copies=2 * num_engines)

    def make(layer: torch.nn.Module, weight: torch.Tensor) -> Kernel:
        return Int8Kernel(weight) if id(layer) in linear else packed_kernel(layer, weight)

    return PackedSwap(parameters, PackedKernels([*linear.values(), *(layer for layer in packed if id(layer) not in linear)], make=make))


def _linear_layers(model: torch.nn.Module) -> Iterator[torch.nn.Module]:
    for name, module in model.named_modules():
        if isinstance(module, LinearBase) and hasattr(module, "cpu_linear") and name.rpartition(".")[2] not in _ROUTERS:
            yield module
