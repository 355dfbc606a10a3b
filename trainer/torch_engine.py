"""The engine on plain torch: Hugging Face's model code, DTensor and FSDP2 around it, torch's pipelines along it.

A pipeline is worth its waits only with several rows in it. So where ranks share the layers, rows are put off until there are
`ROWS_PER_RANK` for each of them, and what is left is computed when the step is whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from trainer.engine import Loss, Outputs
from trainer.model import Model
from trainer.optimizer import Optimizer, Update
from trainer.parallel import Replicas
from trainer.row import Row, empty_row

ROWS_PER_RANK = 4
"""Rows of one pass through a pipeline, for each of its p ranks: of m p rows, the plain schedule waits for (p - 1) / (m p + p - 1) of the
pass, which is 1/9 with p = 2. More would wait longer for rows to come; activations are held of p rows at once, whatever this is."""


class TorchEngine:
    """A `Model` and an `Optimizer` on the ranks of `Replicas`."""

    def __init__(self, model: Model, *, optimizer: Optimizer, replicas: Replicas) -> None:
        self._model = model
        self._optimizer = optimizer
        self._shares_passes = replicas.shares_passes
        self._part = replicas.part
        self._num_ranks = replicas.layout.pipeline
        self._put_off: list[tuple[Row, Loss]] = []
        """Rows that wait for others to go through the pipeline with."""

    def train(self, row: Row | None, loss: Loss) -> None:
        """See `trainer.engine`: computed at once, but in a pipeline."""
        if row is None:
            if not self._shares_passes:
                return
            row, loss = self._empty_row(), _nothing
        if self._model.pipeline is None:
            loss(self._run(row)).backward()
            return
        self._put_off.append((row, loss))
        if len(self._put_off) == ROWS_PER_RANK * self._num_ranks:
            self.complete()

    def complete(self) -> None:
        """See `trainer.engine`."""
        held, self._put_off = self._put_off, []
        if self._model.pipeline is not None and held:
            held += [(self._empty_row(), _nothing)] * (-len(held) % self._num_ranks)
            self._model.pipeline.train([row for row, _ in held], [_of_outputs(loss) for _, loss in held])
            self._optimizer.collect()

    def logprobs(self, row: Row | None) -> Outputs | None:
        """See `trainer.engine`."""
        with torch.no_grad():
            if row is not None:
                return self._run(row)
            if self._shares_passes:
                self._run(self._empty_row())
        return None

    def update(self, index: int, *, denominator: float) -> Update:
        """See `trainer.engine`."""
        assert not self._put_off, "rows are put off: complete comes before update"
        return self._optimizer.step(index, denominator=denominator)

    def drop(self) -> None:
        """See `trainer.engine`."""
        self._put_off.clear()
        self._optimizer.drop()

    def _run(self, row: Row) -> Outputs:
        logprobs, entropy = self._model.logprobs(row)
        return Outputs(logprobs=logprobs, entropy=entropy)

    def _empty_row(self) -> Row:
        return empty_row(self._model.device, part=self._part)


def _nothing(outputs: Outputs) -> torch.Tensor:
    """The loss of a zero-loss row: 0, with a gradient of 0."""
    return outputs.logprobs.sum() + outputs.entropy.sum()


def _of_outputs(loss: Loss) -> Callable[[tuple[torch.Tensor, torch.Tensor]], torch.Tensor]:
    return lambda columns: loss(Outputs(logprobs=columns[0], entropy=columns[1]))
