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

BOXES: tuple[dict[str, list[Box]], ...] = (
    {"embed": [((0, 12), (0, 16)), ((30, 38), (0, 16))], "norm": [((0, 16),)], "head": [((0, 16), (0, 25))]},
    {"embed": [((12, 30), (0, 16)), ((38, 50), (0, 16))], "norm": [((0, 16),)], "scale": [()], "head": [((0, 16), (25, 50))]},
)
"""By rank: two things fused, each cut by its own rows, unevenly; held by both; held by one alone, as along a pipeline; cut by columns."""


class Shard(torch.nn.Module):
    """What one rank holds."""

    def __init__(self, boxes: dict[str, list[Box]]) -> None:
        super().__init__()
        self.boxes = boxes
        for name, parts in boxes.items():
            held = [tensors(0)[name][slices(box)] for box in parts]
            parameter = torch.nn.Parameter(torch.cat(held) if len(held) > 1 else held[0].clone(), requires_grad=False)
            self.register_parameter(name, parameter)

    def load_weights(self, weights: Iterator[tuple[str, torch.Tensor]]) -> None:
        for name, tensor in weights:
            for part, box in self.parts_of(name):
                part.copy_(tensor[slices(box)])

    def parts_of(self, name: str) -> Iterator[tuple[torch.Tensor, Box]]:
        """The parts of a parameter, which lie one after the other, with the box that each is."""
        first = 0
        for box in (boxes := self.boxes.get(name, [])):
            whole = self.get_parameter(name).data
            yield (whole[first : first + box[0][1] - box[0][0]] if len(boxes) > 1 else whole), box
            first += box[0][1] - box[0][0] if box else 0


class Worker(PolicyRank):
    """What vLLM mixes a rank into."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.model = Shard(BOXES[rank])
        self.model_config = SimpleNamespace(enforce_eager=True, dtype=torch.bfloat16)

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
        held = [(name, *part) for worker in self.executor.workers for name in worker.model.boxes for part in worker.model.parts_of(name)]
        for name, part, box in held:
            made[name][slices(box)] = part
        for name, part, box in held:
            assert same_bits(made[name][slices(box)].contiguous(), part), name
        return {name: torch.nn.Parameter(tensor, requires_grad=False) for name, tensor in made.items()}


def slices(box: Box) -> tuple[slice, ...]:
    """A box as an index."""
    return tuple(slice(first, end) for first, end in box)
