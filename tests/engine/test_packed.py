"""Packed kernels follow a swap: all at its commit, none before, and only what changed is packed. vLLM's own packing: `test_canary`."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from pipelinerl.engine.vllm.packed import Kernel, PackedKernels, PackedSwap
from pipelinerl.weights.swap import Placed

NUM_BYTES = 4 * 4 * 4


class Packing:
    """A packing that keeps a copy as it is."""

    def __init__(self) -> None:
        self.copies: list[torch.Tensor] = []

    def __call__(self, layer: torch.nn.Module, weight: torch.Tensor) -> Kernel:
        copy = weight.clone()
        self.copies.append(copy)
        return lambda input, weight, bias: functional.linear(input, copy, bias)


def _swap(packing: Packing) -> tuple[list[torch.nn.Linear], PackedSwap]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(4, 4, bias=False).requires_grad_(False) for _ in range(2)]
    weights = [layer.get_parameter("weight") for layer in layers]
    placed = [Placed(parameter=one, offset_bytes=NUM_BYTES * number, num_bytes=NUM_BYTES) for number, one in enumerate(weights)]
    return layers, PackedSwap(placed, PackedKernels(layers, make=packing))


def _compute(layer: Any) -> torch.Tensor:
    return layer.cpu_linear(torch.eye(4), layer.weight, None).t()


def test_packed_kernels_change_at_the_commit_and_no_earlier() -> None:
    layers, swap = _swap(Packing())
    before = [layer.weight.clone() for layer in layers]
    policy = torch.randn(2, 4, 4)
    swap.stage(policy.view(-1).view(torch.uint8))
    assert all(torch.equal(_compute(layer), old) for layer, old in zip(layers, before, strict=True))
    swap.commit()
    assert all(torch.equal(_compute(layer), new) for layer, new in zip(layers, policy, strict=True))
    assert all(torch.equal(layer.weight, new) for layer, new in zip(layers, policy, strict=True))


def test_a_matrix_that_did_not_change_is_not_packed_again() -> None:
    layers, swap = _swap(packing := Packing())
    assert len(packing.copies) == 2
    policy = torch.stack((layers[0].weight, torch.randn(4, 4)))
    swap.stage(policy.view(-1).view(torch.uint8))
    assert [copy.tolist() for copy in packing.copies[2:]] == [policy[1].tolist()]
    swap.commit()
    assert all(torch.equal(_compute(layer), new) for layer, new in zip(layers, policy, strict=True))
