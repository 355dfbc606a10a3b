"""The critic: a second model on the same ranks that learns to predict, before every token, what the rest of the rollout will earn."""

from __future__ import annotations

import torch

from pipelinerl.algorithms.loss.critic import clipped_value_loss
from pipelinerl.algorithms.loss.meters import Meters
from trainer.model import Model
from trainer.optimizer import Optimizer, Update
from trainer.parallel import Replicas
from trainer.row import Row, empty_row


class Critic:
    """A value model and its optimizer. Every rank calls the same methods for the same rows, as for `trainer.engine.Engine`."""

    def __init__(self, model: Model, *, optimizer: Optimizer, replicas: Replicas, clip: float) -> None:
        """`clip` is the distance from the values at the start of the step within which an improvement counts."""
        self._model = model
        self._optimizer = optimizer
        self._shares_passes = replicas.shares_passes
        self._part = replicas.part
        self._clip = clip

    def values(self, row: Row | None) -> torch.Tensor | None:
        """[K] float32, the value of the state before each trained token; None for a zero-loss row."""
        if row is None and not self._shares_passes:
            return None
        with torch.no_grad():
            values = self._model.values(row or empty_row(self._model.device, part=self._part))
        return None if row is None else values

    def train(self, row: Row | None, *, old_values: torch.Tensor | None, returns: torch.Tensor | None) -> Meters:
        """Add the gradient of the value loss summed over a row, not divided; return its meters.

        `old_values` are those at the start of the step, `returns` the targets, both [K]; None for a zero-loss row.
        """
        if row is None:
            if self._shares_passes:
                self._model.values(empty_row(self._model.device, part=self._part)).sum().backward()
            return no_value_meters(self._model.device)
        assert old_values is not None
        assert returns is not None
        values = self._model.values(row)
        loss, clipped = clipped_value_loss(
            values, old_values=old_values, returns=returns, trains=torch.ones_like(returns, dtype=torch.bool), clip=self._clip
        )
        loss.backward()
        errors = returns - values.detach()
        sums = (loss.detach(), clipped, values.detach(), errors, errors.square(), returns, returns.square())
        return {name: numbers.sum().double() for name, numbers in zip(_METERS, sums, strict=True)}

    def update(self, index: int, *, denominator: float) -> Update:
        """Apply the gradients of all ranks, divided by `denominator`, as optimizer step `index`; start collecting anew."""
        return self._optimizer.step(index, denominator=denominator)

    def drop(self) -> None:
        """Forget the rows since the last update."""
        self._optimizer.drop()


_METERS = (
    "value_loss_sum",
    "value_clipped_sum",
    "value_sum",
    "value_error_sum",
    "value_error_square_sum",
    "return_sum",
    "return_square_sum",
)


def no_value_meters(device: torch.device) -> Meters:
    """The meters of a row without a token."""
    return {name: torch.zeros((), dtype=torch.float64, device=device) for name in _METERS}


def finish_value_meters(numbers: dict[str, float]) -> dict[str, float]:
    """The same means per token, with those that only serve to compute the explained variance, 1 - Var(G - V) / Var(G), put into it.

    Where all returns are equal nothing is to be explained, and the number is left out.
    """
    helpers = ("value_error", "value_error_square", "return_square")
    if "return_square" not in numbers:
        return numbers
    spread = numbers["return_square"] - numbers["return"] ** 2
    unexplained = numbers["value_error_square"] - numbers["value_error"] ** 2
    told = {name: value for name, value in numbers.items() if name not in helpers}
    return told | ({"value_explained_variance": 1 - unexplained / spread} if spread > 1e-12 else {})
