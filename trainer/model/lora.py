"""Low-rank adapters (LoRA, arXiv:2106.09685): chosen matrices become W + alpha / rank * B A, W frozen, A and B trained.

A matrix keeps its place and name in the model, so that sharding, checkpoints and export see a model like any other with two more tensors in
some layers. `peft` is not used: it renames every matrix it touches, which plans for parallelism and the names that engines load go by.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator

import torch
import torch.nn.functional as F

from pipelinerl.errors import ConfigError
from pipelinerl.weights.reshard import Box

_TENSORS = (".lora_A", ".lora_B")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """The matrices that get an adapter, and its size."""

    rank: int
    alpha: float
    """The factor of B A, times `rank`: doubling the rank then leaves the size of an update as it was."""
    targets: tuple[str, ...]
    """Last part of the names of the matrices."""
    seed: int = 0
    """The seed of the random A; B starts at 0, so that the first policy is the model as it was."""


class LoraLinear(torch.nn.Linear):
    """A linear layer with an adapter, in the place of one without."""

    def __init__(self, base: torch.nn.Linear, *, rank: int, alpha: float, generator: torch.Generator, dtype: torch.dtype) -> None:
        super().__init__(base.in_features, base.out_features, bias=base.bias is not None, device="meta")
        self.weight, self.bias = base.weight, base.bias
        start = _drawn(rank, base.in_features, generator=generator)
        self.lora_A = torch.nn.Parameter(start.to(device=base.weight.device, dtype=dtype))
        self.lora_B = torch.nn.Parameter(base.weight.new_zeros(base.out_features, rank, dtype=dtype))
        self.scale = alpha / rank
        self.is_on = True

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Compute what `torch.nn.Linear` does, and add the adapter's part where it is on."""
        output = super().forward(input)
        return output + F.linear(F.linear(input, self.lora_A), self.lora_B) * self.scale if self.is_on else output

    def merged(self, weight: torch.Tensor, first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        """W + scale B A of whole tensors, computed in float32, in W's dtype."""
        return torch.addmm(weight.float(), second.float(), first.float(), alpha=self.scale).to(weight.dtype)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Merger:
    """Merges an adapter into parts of its weight."""

    layer: LoraLinear
    first: torch.Tensor
    """[rank, in]: A, whole."""
    second: torch.Tensor
    """[out, rank]: B, whole."""

    def __call__(self, part: torch.Tensor, box: Box) -> torch.Tensor:
        """The values of a policy in a box of the weight, of which `part` are the weight's own."""
        (row, end_row), (column, end_column) = box
        return self.layer.merged(part, self.first[:, column:end_column], self.second[row:end_row])


def add_adapters(module: torch.nn.Module, adapters: Adapters, *, dtype: torch.dtype) -> None:
    """Give each matrix of the targets an adapter of this dtype, freeze all else. Raises `ConfigError` for a target that names no matrix."""
    generator = torch.Generator().manual_seed(adapters.seed)
    module.requires_grad_(False)
    chosen = [
        (name, part) for name, part in module.named_modules() if isinstance(part, torch.nn.Linear) and _last(name) in adapters.targets
    ]
    missing = set(adapters.targets) - {_last(name) for name, _ in chosen}
    if missing:
        known = sorted({_last(name) for name, part in module.named_modules() if isinstance(part, torch.nn.Linear)})
        raise ConfigError(
            f"lora.targets: {type(module).__name__} has no linear layer {', '.join(sorted(missing))}; it has {', '.join(known)}"
        )
    for name, part in chosen:
        parent = module.get_submodule(name.rpartition(".")[0])
        layer = LoraLinear(part, rank=adapters.rank, alpha=adapters.alpha, generator=generator, dtype=dtype)
        setattr(parent, _last(name), layer)


def draw_adapters(module: torch.nn.Module, *, seed: int) -> None:
    """Have all adapters begin anew, as `add_adapters` lets them begin with this seed."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for layer in adapted(module).values():
            layer.lora_A.copy_(_drawn(*layer.lora_A.shape, generator=generator))
            layer.lora_B.zero_()


def adapted(module: torch.nn.Module) -> dict[str, LoraLinear]:
    """The layers with an adapter, by name."""
    return {name: part for name, part in module.named_modules() if isinstance(part, LoraLinear)}


def is_adapter(name: str) -> bool:
    """Say whether a tensor of this name is part of an adapter."""
    return name.endswith(_TENSORS)


@contextlib.contextmanager
def switched_off(module: torch.nn.Module) -> Iterator[None]:
    """Compute with the model as it was before its adapters."""
    layers = adapted(module).values()
    for layer in layers:
        layer.is_on = False
    try:
        yield
    finally:
        for layer in layers:
            layer.is_on = True


def _drawn(rank: int, in_features: int, *, generator: torch.Generator) -> torch.Tensor:
    """[rank, in] float32, uniform, as `torch.nn.Linear` begins."""
    bound = 1 / math.sqrt(in_features)
    return torch.empty(rank, in_features).uniform_(-bound, bound, generator=generator)


def _last(name: str) -> str:
    return name.rpartition(".")[2]
