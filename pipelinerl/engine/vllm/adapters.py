"""LoRA adapters that are served side by side by vLLM, each a version of the policy: a `weights.swap.WeightSwap`.

An adapter is staged like any policy and verified tensor by tensor, in memory: no disk is written or read. vLLM keeps adapters in rows of
one tensor per layer. There is one row more than versions are served, and no sequence reads it: staging writes there, beside the forward
passes, and the commit exchanges two entries of the table that says which row an adapter is in. So the pause is microseconds, whatever the
adapter's size. Where a model is spread over ranks, each has rows of its own, and all exchange the same two entries (`Rows`).

A sequence is sampled to its end under the adapter it began with, so its tokens are of one version and its KV cache is of that version, too.
Where all versions that may be served side by side have sequences, those of the oldest go on under the newest, and each token says so.
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from vllm.lora.lora_model import LoRAModel
from vllm.lora.peft_helper import PEFTHelper
from vllm.lora.request import LoRARequest

from pipelinerl.errors import VersionNotHeld
from pipelinerl.messages import StageWeights, Tensor
from pipelinerl.weights.adapters import AdapterShape
from pipelinerl.weights.base import num_bytes, views
from pipelinerl.weights.timeline import Timeline, timeline_of

Versions = Mapping[int, int]
"""The version of the adapter in each place that sequences are served from."""


def adapter_options(shape: AdapterShape) -> dict[str, Any]:
    """vLLM engine arguments that make room for the versions served and the one being staged, on the matrices that have adapters."""
    return {
        "enable_lora": True,
        "max_loras": shape.num_versions + 1,
        "max_cpu_loras": shape.num_versions + 1,
        "max_lora_rank": max(8, 1 << (shape.rank - 1).bit_length()),
        "lora_target_modules": list(shape.targets),
    }


class Rows(Protocol):
    """The rows of adapters in a model's layers, wherever the model lies. A place is what vLLM knows an adapter by: its row is looked up."""

    def spare(self) -> torch.Tensor:
        """See `WeightSwap.spare`."""
        ...

    def save(self, buffer: torch.Tensor) -> None:
        """See `WeightSwap.save`."""
        ...

    def stage(self, buffer: torch.Tensor, *, place: int) -> None:
        """Write the adapter in `buffer` into the row of a place that no sequence is served under."""
        ...

    def commit(self, *, place: int, staged_at: int, undone: Sequence[int]) -> None:
        """Have `place` mean the row that was staged, and `staged_at` the one it left; those undone hold the staged adapter, too."""
        ...


class Adapters:
    """The adapters a vLLM engine holds, and which of them each request is served under."""

    def __init__(self, rows: Rows, *, num_versions: int) -> None:
        """Version 0 is an adapter that changes nothing."""
        self.moved: frozenset[str] = frozenset()
        """Requests that the last commit had go on under another version."""
        self._rows = rows
        self._num_versions = num_versions
        self._version = 0
        """Version of the staged adapter."""
        self._unserved = num_versions + 1
        """The place whose row is written next."""
        self.versions: Versions = {1: 0}
        """The version of the adapter in each place, in the order in which they were filled. A commit makes another: a forward pass that is
        under way keeps the one that it was launched under."""
        self._served: dict[str, int] = {}
        """Place by rollout."""

    def request_for(self, rollout_id: str, *, rollback_epoch: int, version: int | None = None) -> LoRARequest:
        """The adapter under which vLLM serves a new request: the newest, or that of a version. Raises `VersionNotHeld`."""
        places = [place for place, held in self.versions.items() if version in (None, held)]
        if not places:
            raise VersionNotHeld(f"the adapter of version {version} is not here: {sorted(self.versions.values())} are")
        place = places[-1]
        self._served[rollout_id] = place
        return LoRARequest(lora_name=f"v{self.versions[place]}.{rollback_epoch}", lora_int_id=place, lora_path="in memory")

    def served_under(self, versions: Versions, rollout_ids: Sequence[str]) -> np.ndarray:
        """[N] int32, the version that each of these running requests was sampled under where those were in force."""
        return np.array([versions[self._served[rollout_id]] for rollout_id in rollout_ids], np.int32)

    def ended(self, rollout_id: str) -> None:
        """Forget a request."""
        self._served.pop(rollout_id, None)

    def is_next(self, order: StageWeights) -> None:
        """Note which version is staged."""
        self._version = order.version

    def spare(self) -> torch.Tensor:
        return self._rows.spare()

    def save(self, buffer: torch.Tensor) -> None:
        self._rows.save(buffer)

    def stage(self, buffer: torch.Tensor) -> None:
        self._rows.stage(buffer, place=self._unserved)

    def commit(self) -> None:
        undone = [place for place, version in self.versions.items() if version > self._version]
        place = self._place_for_one_more()
        self._rows.commit(place=place, staged_at=self._unserved, undone=[other for other in undone if other != place])
        self.moved = frozenset(rollout_id for rollout_id, served in self._served.items() if served in {place, *undone})
        kept = {other: version for other, version in self.versions.items() if other != place}
        self.versions = kept | dict.fromkeys((*(other for other in undone if other != place), place), self._version)

    def _place_for_one_more(self) -> int:
        """A place for one more version: one never used, else one that no sequence needs, else the oldest."""
        used = collections.Counter(self._served.values())
        places = (place for place in range(1, self._num_versions + 2) if place != self._unserved)
        free = next((place for place in places if place not in self.versions), None)
        return free or next((place for place in self.versions if not used[place]), next(iter(self.versions)))


class AdapterRows:
    """Rows of adapters in a process's own layers: `Rows`."""

    def __init__(
        self,
        manager: Any,
        *,
        layout: tuple[Tensor, ...],
        shape: AdapterShape,
        device: torch.device,
        timeline: Timeline | None = None,
    ) -> None:
        """`manager` is the worker's LoRA manager. All rows begin with an adapter that changes nothing."""
        self._manager = manager
        self._layout = layout
        self._shape = shape
        self._timeline = timeline or timeline_of(device)
        self._left: object = None
        """The end of what the device had been told to do at the last commit: passes that may still read the row which it left."""
        self._num_bytes = num_bytes(layout)
        self._buffer = torch.zeros(self._num_bytes, dtype=torch.uint8)
        self._live = torch.zeros(self._num_bytes, dtype=torch.uint8)
        self._staged: tuple[torch.Tensor, Any] | None = None
        for place in range(1, shape.num_versions + 2):
            manager.add_adapter(self._model_in(self._live, place=place))
            manager.activate_adapter(place)

    def spare(self) -> torch.Tensor:
        return self._buffer

    def save(self, buffer: torch.Tensor) -> None:
        buffer[: self._num_bytes].copy_(self._live)

    def stage(self, buffer: torch.Tensor, *, place: int) -> None:
        taken = buffer[: self._num_bytes].clone()  # the trainer writes its buffer again
        model = self._model_in(taken, place=place)
        self._manager._create_merged_loras_inplace(model)  # q, k and v in one, as the layers have them; B scaled
        self._write(model, self._row_of(place))
        self._staged = taken, model

    def commit(self, *, place: int, staged_at: int, undone: Sequence[int]) -> None:
        assert self._staged is not None
        self._live, model = self._staged
        self._staged = None
        self._left = self._timeline.mark()
        self._exchange(place, staged_at)
        for other in undone:  # a rollback, which is rare: what no longer counts is overwritten, inside the pause
            self._write(model, self._row_of(other))

    def _row_of(self, place: int) -> int:
        return self._manager.lora_index_to_id.index(place)

    def _exchange(self, place: int, other: int) -> None:
        """Have each of two places mean the row that was the other's; vLLM reads the table before every forward pass."""
        table = self._manager.lora_index_to_id
        one, two = table.index(place), table.index(other)
        table[one], table[two] = other, place

    def _write(self, model: Any, row: int) -> None:
        with self._timeline.beside(self._left):
            for name, layer in self._manager.modules.items():
                weights = self._manager._get_lora_layer_weights(model, name)
                if weights is None:
                    layer.reset_lora(row)
                else:
                    layer.set_lora(row, weights.lora_a, weights.lora_b)

    def _model_in(self, buffer: torch.Tensor, *, place: int) -> Any:
        """The adapter in a buffer as vLLM has it, in memory of its own."""
        config = {
            "peft_type": "LORA",
            "r": self._shape.rank,
            "lora_alpha": self._shape.alpha,
            "target_modules": list(self._shape.targets),
            "bias": "none",
        }
        return LoRAModel.from_lora_tensors(
            place,
            views(buffer.clone(), self._layout),
            PEFTHelper.from_dict(config),
            device="cpu",
            dtype=self._manager.lora_config.lora_dtype,
            model_vocab_size=self._manager.vocab_size,
        )
