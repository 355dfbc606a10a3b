"""Policies that are LoRA adapters alone (arXiv:2106.09685): the names of their tensors, and the choice to send them so.

The weights under the adapters stay as they were loaded, in the trainer and in the engines. Tensors are named as PEFT names them:
`base_model.model.<module>.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank], to be multiplied as alpha / rank * B A.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator, Mapping

import torch

from pipelinerl.config import LoraSection, WeightsSection
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Tensor
from pipelinerl.weights.base import plan_layout

MAX_VERSIONS = 8
"""Most adapters that are served side by side without being asked to. More take memory, for sequences that are all but stale."""
_EXPERT = re.compile(r"\.experts\.[0-9]+\.")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """The shape that all adapters of a run share."""

    rank: int
    alpha: float
    """Adapters are multiplied by alpha / rank."""
    targets: tuple[str, ...]
    """Last part of the names of the matrices that have one."""
    num_versions: int = 4
    """Versions served side by side, at most."""


def choose_adapters(
    lora: LoraSection, weights: WeightsSection, *, max_staleness: int, is_pipelined: bool = False, has_device: bool | None = None
) -> tuple[AdapterShape | None, tuple[str, ...]]:
    """Choose the adapters that engines serve separately, None where policies are whole; where adapters are trained, say why in a sentence.

    `is_pipelined`: engines run several forward passes at once; `has_device`: forward passes run on a GPU; default: where torch finds one.

    With staleness bound K a sequence begun under version v can train with step v + K at the latest, so when version v + K + 1 comes, what
    still runs under v is stale already: K + 1 versions, v to v + K, are all that anything useful is sampled under.
    """
    if not lora.rank:
        return None, ()
    match weights.adapters:
        case "auto" if is_pipelined:
            are_separate, why = False, "along a pipeline whole policies are taken"
        case "auto" if torch.cuda.is_available() if has_device is None else has_device:
            are_separate, why = True, "megabytes travel in place of a model, and sequences end under the version they began with"
        case "auto":
            are_separate, why = False, "on a CPU a forward pass with separate adapters takes 1.4 to 2.6 times as long"
        case wanted:
            are_separate, why = wanted == "separate", "weights.adapters says so"
    if not are_separate:
        return None, (f"adapters are merged before they travel: {why}",)
    num_versions = weights.adapter_versions or min(max_staleness + 1, MAX_VERSIONS)
    shape = AdapterShape(rank=lora.rank, alpha=lora.alpha, targets=lora.targets, num_versions=num_versions)
    return shape, (f"adapters are served separately, {num_versions} versions side by side: {why}",)


def published_name(name: str) -> str:
    """The name under which the trainer's tensor `<module>.lora_A` or `.lora_B` travels, and lies in an exported folder."""
    return f"base_model.model.{name}.weight"


def are_adapters(layout: Iterable[Tensor]) -> bool:
    """Tell whether a layout is that of adapters alone."""
    return any(tensor.name.endswith((".lora_A.weight", ".lora_B.weight")) for tensor in layout)


def adapter_layout(shapes: Mapping[str, tuple[int, ...]], shape: AdapterShape, *, dtype: str) -> tuple[Tensor, ...]:
    """Lay out an adapter's tensors in a policy's buffer, for a model whose checkpoint has tensors of these `shapes`.

    Experts have none, here as in the trainer. Raises `ConfigError` where nothing fits.
    """
    tensors = dict(_tensors_of(shapes, shape, dtype=getattr(torch, dtype)))
    if not tensors:
        raise ConfigError(
            f"lora.targets: the model has no matrix named {', '.join(shape.targets)}: an adapter would have nothing to change"
        )
    return plan_layout(tensors)


def _tensors_of(shapes: Mapping[str, tuple[int, ...]], shape: AdapterShape, *, dtype: torch.dtype) -> Iterator[tuple[str, torch.Tensor]]:
    for name, size in sorted(shapes.items()):
        module = name.removesuffix(".weight")
        if len(size) == 2 and module.rpartition(".")[2] in shape.targets and not _EXPERT.search(name):
            yield published_name(f"{module}.lora_A"), torch.empty((shape.rank, size[1]), dtype=dtype, device="meta")
            yield published_name(f"{module}.lora_B"), torch.empty((size[0], shape.rank), dtype=dtype, device="meta")
