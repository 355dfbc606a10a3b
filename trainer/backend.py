"""The machinery that holds a model, between the RL step and torch: five methods, whatever way the model is sharded.

The backend owns the model, its optimizer and every collective inside a row; the step owns what is trained and why. Inside is plain torch:
Hugging Face's model code, DTensor and FSDP2 around it, torch's pipelines along it.

A pipeline is worth its waits only with several rows in it. So where ranks share the layers, rows are put off until there are
`ROWS_PER_RANK` for each of them, and what is left is computed when the step is whole.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from trainer.model.model import Model
from trainer.optimizer import Optimizer, Update
from trainer.parallel.replicas import Replicas
from trainer.rows.arrange import empty_row
from trainer.rows.packed_row import PackedRow

ROWS_PER_RANK = 4
"""Rows of one pass through a pipeline, for each of its p ranks: of m p rows, the plain schedule waits for (p - 1) / (m p + p - 1) of the
pass, which is 1/9 with p = 2. More would wait longer for rows to come; activations are held of p rows at once, whatever this is."""

Columns = Sequence[torch.Tensor]
"""The columns that `trainer.model.Model.outputs` gives."""
Output = TypeVar("Output")
"""The same columns under names."""


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


class Backend(Generic[Output]):
    """A `Model` and an `Optimizer` on the ranks of `Replicas`. Every rank calls the same methods in the same order."""

    def __init__(self, model: Model, *, optimizer: Optimizer, replicas: Replicas, read: Callable[[Columns], Output]) -> None:
        """`read` names the model's columns: `Outputs.of` for a language model."""
        self._model = model
        self._optimizer = optimizer
        self._read = read
        self._shares_passes = replicas.shares_passes
        self._context_shard = replicas.context_shard
        self._num_ranks = replicas.layout.pipeline
        self._put_off: list[tuple[PackedRow, Callable[[Columns], torch.Tensor]]] = []
        """Rows that wait for others to go through the pipeline with."""
        self._has_rows = False
        """A row was trained, or a zero-loss one passed, since `complete`."""

    def train(self, row: PackedRow | None, loss: Callable[[Output], torch.Tensor]) -> None:
        """Add the gradient of `loss` over one row, not divided; None is the zero-loss row, whose loss is never asked for.

        `loss` gives a row's raw loss sum of its outputs, a scalar with gradient. The row may be computed later, together with others, but
        before `complete` returns. `loss` is called with the same outputs on every rank of a replica.
        """
        if row is None and not self._shares_passes:
            return
        self._has_rows = True
        of_columns = _nothing if row is None else self._of_columns(loss)
        row = row or self._empty_row()
        if row.parts:
            self._train_parts(row, of_columns)
            return
        if self._model.pipeline is None:
            of_columns(self._model.outputs(row)).backward()
            return
        self._put_off.append((row, of_columns))
        if len(self._put_off) == ROWS_PER_RANK * self._num_ranks:
            self.complete()

    def _train_parts(self, row: PackedRow, loss: Callable[[Columns], torch.Tensor]) -> None:
        """Add the gradient of a row whose parts do not fit the memory together, though its loss may need all of its tokens at once.

        The loss is taken of outputs without gradient; what it says of each is then handed to the parts, which are computed once more.
        """
        with torch.no_grad():
            columns = [column.requires_grad_() for column in self._model.outputs(row)]
        loss(columns).backward()
        assert row.order is not None, "who lays parts out says where their tokens are"
        gradients = [torch.zeros_like(column) for column in columns]
        for gradient, column in zip(gradients, columns, strict=True):
            if column.grad is not None:
                gradient[row.order] = column.grad
        start = 0
        for part in row.parts:
            end = start + len(part.trained)
            pairs = [(out, gradient[start:end]) for out, gradient in zip(self._model.outputs(part), gradients, strict=True)]
            outputs, own = zip(*[pair for pair in pairs if pair[0].requires_grad], strict=True)
            torch.autograd.backward(outputs, own)
            start = end

    def complete(self) -> None:
        """Compute the rows that were put off, and reduce the gradients that were held."""
        held, self._put_off = self._put_off, []
        has_rows, self._has_rows = self._has_rows, False
        if self._model.pipeline is not None and held:
            held += [(self._empty_row(), _nothing)] * (-len(held) % self._num_ranks)
            self._model.pipeline.train([row for row, _ in held], [loss for _, loss in held])
            self._optimizer.collect()
        if self._model.holds_gradients and has_rows:
            self._model.sum_gradients(self._empty_row())

    def outputs(self, row: PackedRow | None) -> Output | None:
        """Compute the outputs of a row without gradient; None for a zero-loss row, which has none."""
        with torch.no_grad():
            if row is not None:
                return self._read(self._model.outputs(row))
            if self._shares_passes:
                self._model.outputs(self._empty_row())
        return None

    def update(self, index: int, *, denominator: float) -> Update:
        """Apply the gradients of all ranks, divided by `denominator`, as optimizer step `index`; start collecting anew."""
        assert not self._put_off, "rows are put off: complete comes before update"
        return self._optimizer.step(index, denominator=denominator)

    def drop(self) -> None:
        """Forget the rows since the last update."""
        self._put_off.clear()
        self._has_rows = False
        self._model.forget_gradients()
        self._optimizer.drop()

    def _of_columns(self, loss: Callable[[Output], torch.Tensor]) -> Callable[[Columns], torch.Tensor]:
        return lambda columns: loss(self._read(columns))

    def _empty_row(self) -> PackedRow:
        return empty_row(self._model.device, context_shard=self._context_shard)


def _nothing(columns: Columns) -> torch.Tensor:
    """The loss of a zero-loss row: 0, with a gradient of 0."""
    return torch.stack([column.sum() for column in columns]).sum()
