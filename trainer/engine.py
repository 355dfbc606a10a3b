"""The interface between the RL step and the machinery that holds the model: five methods, whatever way the model is sharded.

The engine owns the model, its optimizer and every collective inside a row. The step owns what is trained and why. `trainer.torch_engine`
is the one engine there is; Megatron-Core, on GPUs, would be another.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from trainer.optimizer import Update
from trainer.rows.packed_row import PackedRow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """The model's outputs for a row's trained tokens, in the order of the packed row. Legend: `K` tokens with a loss."""

    logprobs: torch.Tensor
    """[K] float32, natural log of the probability of each, temperature applied; with gradient."""
    entropy: torch.Tensor
    """[K] float32, nats, of the distribution each was drawn from; with gradient."""
    square_sums: torch.Tensor | None = None
    """[K] float32, sum of the squared probabilities of all words there, without gradient; where the model was told to give them."""
    divergence: torch.Tensor | None = None
    """[K] float32, nats, from the teacher's distribution there, with gradient; where the model was told to give it."""

    @classmethod
    def of(cls, columns: Sequence[torch.Tensor], *, extras: Sequence[str] = ()) -> Outputs:
        """Name the columns of `trainer.model.Model.outputs`; `extras` are its names for those after the second, which rows without
        a teacher lack the last of."""
        return cls(logprobs=columns[0], entropy=columns[1], **dict(zip(extras, columns[2:], strict=False)))


Loss = Callable[[Outputs], torch.Tensor]
"""A function of a row's outputs: its raw loss sum, a scalar with gradient."""


class Engine(Protocol):
    """A model and its optimizer, spread over ranks. Every rank calls the same methods in the same order."""

    def train(self, row: PackedRow | None, loss: Loss) -> None:
        """Add the gradient of `loss` over one row, not divided; None is the zero-loss row, whose loss is never asked for.

        The row may be computed later, together with others, but before `complete` returns. `loss` is called with the same outputs on every
        rank of a replica.
        """
        ...

    def complete(self) -> None:
        """Compute the rows that were put off."""
        ...

    def outputs(self, row: PackedRow | None) -> Outputs | None:
        """Compute the outputs of a row without gradient; None for a zero-loss row, which has none."""
        ...

    def update(self, index: int, *, denominator: float) -> Update:
        """Apply the gradients of all ranks, divided by `denominator`, as optimizer step `index`; start collecting anew."""
        ...

    def drop(self) -> None:
        """Forget the rows since the last update."""
        ...
