"""Policies that are LoRA adapters (arXiv:2106.09685): only the adapter travels, and several versions of it are served side by side.

The base weights stay as they were loaded. An adapter is staged like any policy, verified tensor by tensor, and becomes one more of vLLM's,
in memory: no disk is written or read. A sequence is sampled to its end under the adapter it began with, so its tokens are of one version.
Where all places are taken by adapters with sequences, the oldest one's sequences go on under the new one; each token says which.

Tensors are named as PEFT names them: `base_model.model.<module>.lora_A.weight` [rank, in] and `.lora_B.weight` [out, rank].
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from pipelinerl.engine.vllm_weights import checkpoint_shapes
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Tensor
from pipelinerl.weights.base import num_bytes, plan_layout, views


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AdapterShape:
    """What every adapter of a run has in common."""

    rank: int
    alpha: float
    """Adapters are multiplied by alpha / rank."""
    targets: tuple[str, ...]
    """Last part of the names of the matrices that have one."""
    num_places: int = 4
    """Versions served side by side. More cost memory and, on some kernels, time; fewer change the adapter under more sequences."""

    def options(self) -> dict[str, Any]:
        """vLLM engine arguments. One place more on the host, so that none is evicted behind our back."""
        return {
            "enable_lora": True,
            "max_loras": self.num_places,
            "max_cpu_loras": self.num_places + 1,
            "max_lora_rank": max(8, 1 << (self.rank - 1).bit_length()),
        }


def adapter_layout(folder: Path, shape: AdapterShape, *, dtype: str) -> tuple[Tensor, ...]:
    """Where each tensor of an adapter lies in a policy's buffer, for the model in `folder`. Raises `ConfigError` where nothing fits."""
    tensors: dict[str, torch.Tensor] = {}
    for name, (rows, *columns) in sorted(checkpoint_shapes(folder).items()):
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] in shape.targets and len(columns) == 1:
            for part, size in (("lora_A", (shape.rank, columns[0])), ("lora_B", (rows, shape.rank))):
                tensors[f"base_model.model.{module}.{part}.weight"] = torch.empty(size, dtype=getattr(torch, dtype), device="meta")
    if not tensors:
        raise ConfigError(f"{folder} has no matrix named {', '.join(shape.targets)}: an adapter would have nothing to change")
    return plan_layout(tensors)


class Adapters:
    """The adapters a vLLM engine holds: a `weights.commit.Commit`, and which of them each request is served under."""

    def __init__(self, manager: Any, *, layout: tuple[Tensor, ...], shape: AdapterShape, device: torch.device) -> None:
        """`manager` is the worker's LoRA manager."""
        self._manager = manager
        self._layout = layout
        self._shape = shape
        self._device = device
        self._num_bytes = num_bytes(layout)
        self._spare = torch.zeros(self._num_bytes, dtype=torch.uint8)
        self._live: torch.Tensor = torch.zeros(self._num_bytes, dtype=torch.uint8)
        self._staged: tuple[torch.Tensor, Any] | None = None
        self._versions: dict[int, int] = {}
        """By place, in the order they were filled: the version of its adapter."""
        self._served: dict[str, int] = {}
        """Place by rollout; None of those that run without an adapter."""
        self.staged_version = 0
        """Version of what is staged; set by whoever stages."""

    def request_for(self, rollout_id: str, *, lineage: int) -> LoRARequest | None:
        """What vLLM is told to serve a new request under: the newest adapter; None before there is one."""
        if not self._versions:
            return None
        place = next(reversed(self._versions))
        self._served[rollout_id] = place
        return LoRARequest(lora_name=f"v{self._versions[place]}.{lineage}", lora_int_id=place, lora_path="in memory")

    def version_of(self, rollout_id: str) -> int:
        """The version a running request is sampled under; 0, the model as it was loaded, without an adapter."""
        return self._versions.get(self._served.get(rollout_id, 0), 0)

    def ended(self, rollout_id: str) -> None:
        """Forget a request."""
        self._served.pop(rollout_id, None)

    def spare(self) -> torch.Tensor:
        return self._spare

    def save(self, buffer: torch.Tensor) -> None:
        buffer[: self._num_bytes].copy_(self._live)

    def stage(self, buffer: torch.Tensor) -> None:
        taken = buffer[: self._num_bytes].clone()  # vLLM scales B in place, and the trainer writes its buffer again
        self._staged = taken, self._model_of(views(taken.clone(), self._layout))

    def commit(self) -> None:
        assert self._staged is not None
        self._live, model = self._staged
        place = self._place()
        model.id = place
        self._manager.remove_adapter(place)
        self._manager.add_adapter(model)
        self._manager.activate_adapter(place)
        self._versions[place] = self.staged_version
        self._staged = None

    def _place(self) -> int:
        """A place for one more adapter: a free one, else one that no sequence needs, else the oldest."""
        used = collections.Counter(self._served.values())
        free = next((place for place in range(1, self._shape.num_places + 1) if place not in self._versions), None)
        place = free or next((place for place in self._versions if not used[place]), next(iter(self._versions)))
        self._versions.pop(place, None)
        return place

    def _model_of(self, tensors: Mapping[str, torch.Tensor]) -> Any:
        config = {
            "peft_type": "LORA",
            "r": self._shape.rank,
            "lora_alpha": self._shape.alpha,
            "target_modules": list(self._shape.targets),
            "bias": "none",
        }
        return LoRAModel.from_lora_tensors(
            1,
            dict(tensors),
            PEFTHelper.from_dict(config),
            device=str(self._device),
            dtype=self._manager.lora_config.lora_dtype,
            model_vocab_size=self._manager.vocab_size,
        )
