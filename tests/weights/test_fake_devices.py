"""Commit, digests and the writing of a policy on tensors without memory, away from the host: each operation has to take that device, dtype
and shape, and none may bring anything to the host. (A torch without CUDA cannot slice fake tensors of a CUDA device; meta tensors it can.)
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pipelinerl.weights import position_sums
from pipelinerl.weights.base import num_bytes, plan_layout, views
from pipelinerl.weights.swap import CopySwap, Placed, SparseSwap
from pipelinerl.weights.timeline import HostTimeline

LAYOUT = plan_layout({"a": torch.zeros(1000), "b": torch.zeros(7, 5, dtype=torch.bfloat16)})


def test_digests_are_computed_on_the_device() -> None:
    buffer = torch.empty(1003, dtype=torch.uint8, device="meta")
    sums = position_sums._sums(buffer)
    assert (sums.device.type, sums.dtype, tuple(sums.shape)) == ("meta", torch.int64, (2,))


def placed() -> list[Placed]:
    return [
        Placed(
            parameter=torch.nn.Parameter(torch.empty(tensor.shape, device="meta", dtype=getattr(torch, tensor.dtype)), requires_grad=False),
            offset_bytes=tensor.offset_bytes,
            num_bytes=tensor.num_bytes,
        )
        for tensor in LAYOUT
    ]


@pytest.mark.parametrize("kind", [CopySwap, SparseSwap])
def test_a_policy_staged_on_the_device_is_committed_there(kind: type[CopySwap]) -> None:
    parameters = placed()
    swap = kind(parameters, timeline=HostTimeline())
    swap.stage(torch.empty(num_bytes(LAYOUT), dtype=torch.uint8, device="meta"))
    swap.commit()
    assert all(one.parameter.device.type == "meta" for one in parameters)


def test_a_delta_is_written_on_the_device() -> None:
    swap = SparseSwap(placed(), timeline=HostTimeline())
    bits = swap.bits_of(LAYOUT[1])
    assert (bits.device.type, bits.dtype, len(bits)) == ("meta", torch.int16, 35)
    places = torch.empty(3, dtype=torch.int64, device="meta")
    swap.stage_delta([(bits, places, torch.empty(3, dtype=torch.int16, device="meta"))])
    swap.commit()


def test_a_policy_is_written_from_the_trainers_weights_on_the_device() -> None:
    memory = torch.empty(num_bytes(LAYOUT), dtype=torch.uint8, device="meta")
    weights: dict[str, Any] = {"a": torch.empty(1000, device="meta"), "b": torch.empty(7, 5, device="meta")}
    for name, view in views(memory, LAYOUT).items():
        assert view.device.type == "meta"
        view.copy_(weights[name])
