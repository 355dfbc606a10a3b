"""The engine on plain torch: Hugging Face's model code, DTensor and FSDP2 around it."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from trainer.engine import Loss, Outputs
from trainer.model import Model
from trainer.optimizer import Optimizer, Update
from trainer.parallel import Replicas
from trainer.row import Row, empty_row


class TorchEngine:
    """A `Model` and an `Optimizer` on the ranks of `Replicas`."""

    def __init__(self, model: Model, *, optimizer: Optimizer, replicas: Replicas) -> None:
        self._model = model
        self._optimizer = optimizer
        self._shares_passes = replicas.shares_passes
        self._part = replicas.part

    def train(self, row: Row | None, loss: Loss) -> None:
        """See `trainer.engine`: computed at once."""
        if row is not None:
            loss(self._run(row)).backward()
        elif self._shares_passes:
            outputs = self._run(empty_row(self._model.device, part=self._part))
            (outputs.logprobs.sum() + outputs.entropy.sum()).backward()

    def logprobs(self, row: Row | None) -> Outputs | None:
        """See `trainer.engine`."""
        with torch.no_grad():
            if row is not None:
                return self._run(row)
            if self._shares_passes:
                self._run(empty_row(self._model.device, part=self._part))
        return None

    def update(self, index: int, *, denominator: float) -> Update:
        """See `trainer.engine`."""
        return self._optimizer.step(index, denominator=denominator)

    def drop(self) -> None:
        """See `trainer.engine`."""
        self._optimizer.drop()

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See `trainer.engine`."""
        return self._model.stream()

    def _run(self, row: Row) -> Outputs:
        logprobs, entropy = self._model.logprobs(row)
        return Outputs(logprobs=logprobs, entropy=entropy)
