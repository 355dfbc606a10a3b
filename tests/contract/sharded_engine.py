"""An engine of two ranks that take policies as vLLM's do, without vLLM: what calls them, and the model they hold parts of, are small."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from pipelinerl.engine.vllm import ranks
from pipelinerl.engine.vllm.rank import PolicyRank
from pipelinerl.engine.vllm.ranks import Ranks, ShardedPolicies
from pipelinerl.engine.vllm.weights import checkpoint_shapes
from pipelinerl.weights.receiver import WeightReceiver
from pipelinerl.weights.reshard import Box
from pipelinerl.weights.transport import Receiver
from tests.contract.weight_transports import LAYOUT, SHAPES, Engine, same_bits, tensors

BOXES: tuple[dict[str, Box], ...] = (
    {"embed": ((0, 20), (0, 16)), "norm": ((0, 16),), "head": ((0, 16), (0, 25))},
    {"embed": ((20, 50), (0, 16)), "norm": ((0, 16),), "scale": (), "head": ((0, 16), (25, 50))},
)
"""By rank: cut by rows, unevenly; held by both; held by one alone, as along a pipeline; cut by columns."""


class Shard(torch.nn.Module):
    """What one rank holds."""

    def __init__(self, boxes: dict[str, Box]) -> None:
        super().__init__()
        self.boxes = boxes
        for name, box in boxes.items():
            parameter = torch.nn.Parameter(tensors(0)[name][slices(box)].clone(), requires_grad=False)
            self.register_parameter(name, parameter)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            if name in self.boxes:
                self.get_parameter(name).copy_(tensor[slices(self.boxes[name])])


class Worker(PolicyRank):
    """What vLLM mixes a rank into."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = Shard(BOXES[rank])
        self.model_config = SimpleNamespace(enforce_eager=True)

    def get_model(self) -> torch.nn.Module:
        return self.model


class Executor:
    """Calls every rank, in this process."""

    model_executor = SimpleNamespace(is_failed=False)

    def __init__(self) -> None:
        self.workers = [Worker(rank) for rank in range(len(BOXES))]

    def collective_rpc(self, method: str, args: tuple[Any, ...] = ()) -> list[Any]:
        return [getattr(worker, method)(*args) for worker in self.workers]


class ShardedEngine(Engine):
    """Two ranks that take policies from a transport."""

    def __init__(self, receiver: Receiver, *, mode: str = "pointer") -> None:
        ranks.ASK_EVERY_S = 0.001
        self.executor = Executor()
        with tempfile.TemporaryDirectory() as folder:
            save_file(tensors(0), Path(folder) / "model.safetensors")
            shapes = checkpoint_shapes(Path(folder))
            both = Ranks(self.executor)
            policies = ShardedPolicies(both, folder=Path(folder), shapes=shapes, wanted=mode, sends_deltas=True)
        assert {tensor.name for tensor in policies.layout} == {tensor.name for tensor in LAYOUT if tensor.num_bytes}
        for worker in self.executor.workers:
            worker._policy_whole = both._layout = LAYOUT  # which has a tensor without elements, as no model does
        self._receiver = receiver
        self.weight_receiver = WeightReceiver(policies, layout=LAYOUT, receiver=receiver, verify=both.verify)

    @property
    def parameters(self) -> dict[str, torch.nn.Parameter]:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Put together from both; what both hold must be the same."""
        made = {name: torch.zeros(shape, dtype=dtype) for name, (shape, dtype) in SHAPES.items()}
        for worker in self.executor.workers:
            for name, box in worker.model.boxes.items():
                made[name][slices(box)] = worker.model.get_parameter(name).data
        for worker in self.executor.workers:
            for name, box in worker.model.boxes.items():
                assert same_bits(made[name][slices(box)].contiguous(), worker.model.get_parameter(name).data), name
        return {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in made.items()}


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(first, end) for first, end in box)
