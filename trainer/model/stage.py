"""A run of layers on this rank, and the seam behind which the code of several libraries computes them.

Everything else of the trainer is the same whoever computes: rows and their layout, attention, log-probabilities, the loss, the schedule of
a pipeline, the optimizer, publishing, checkpoints. A library brings its modules and its way to cut them over ranks. To add one is to write
a `build` like that of `trainer.model.transformers_stage`, and to name it in `trainer.model.model` and `pipelinerl.config.backends`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from transformers import PreTrainedModel

from pipelinerl.config.trainer_memory import ActivationCheckpointing
from trainer.model.columns import WordColumns
from trainer.parallel.replicas import Replicas
from trainer.parallel.sharding import ParameterSharding
from trainer.rows.packed_row import PackedRow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """What a stage is to be: what every library is told."""

    replicas: Replicas
    index: int
    """The stage's place in the pipeline; 0 without one."""
    words: WordColumns | None
    """The last step of a language model; None for a value model."""
    dtype: torch.dtype
    """Of the computation."""
    held_dtype: torch.dtype
    """Of sharded weights, which take the updates."""
    device: torch.device
    activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    is_compiled: bool = False
    """The parts of layers beside attention are compiled."""
    prefetch_layers: int = 1
    """Sharded layers that are gathered ahead of the one that computes."""
    is_offloaded: bool = False

    @property
    def is_first(self) -> bool:
        """True for the stage with the embeddings."""
        return self.index == 0

    @property
    def is_last(self) -> bool:
        """True for the stage with the output layer."""
        return self.index == self.replicas.layout.num_stages - 1


class Stage(Protocol):
    """A `torch.nn.Module` that holds this rank's share of the weights of a run of layers."""

    rows: Sequence[PackedRow]
    """Of a pipeline: the rows that go through its stages together; a stage is given the number of one."""
    length: int
    """Of a pipeline: tokens to which hidden states are padded."""
    module: PreTrainedModel
    """The model as transformers has it, which knows names and settings; where another library computes, its weights are on no device."""
    words: WordColumns | None
    shardings: Sequence[ParameterSharding]
    """How each of `trainable` is spread over the ranks."""

    def __call__(self, given: PackedRow | torch.Tensor, number: torch.Tensor | None = None) -> Any:
        """Return the columns of the row `given`; a stage of a pipeline is called as `trainer.parallel.pipeline` says."""
        ...

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        """This rank's piece of every parameter that is trained, tied ones once, by the names that checkpoints know."""
        ...

    def weights(self) -> Mapping[str, torch.Tensor]:
        """This rank's piece of every weight by transformers' name, tied ones by each; a `DTensor` where it is not the whole."""
        ...

    def placed(self, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Give those of `pieces` spread like this stage's parameters: the same memory, each at its place in the whole, as a box."""
        ...
