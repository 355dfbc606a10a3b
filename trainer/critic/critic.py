"""The critic: a second model on the same ranks, trained beside the policy, from which advantages per token are made.

`ValueCritic` learns to predict, before every token, what the rest of the rollout will earn. The other kind: `trainer.critic.implicit_prm`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch

from pipelinerl.algorithms.loss.critic import clipped_value_loss, huber_value_loss
from pipelinerl.algorithms.loss.meters import Meters
from pipelinerl.messages import StepClosed
from trainer.advantages import HeldRow
from trainer.optimizer import Update
from trainer.rows.packed_row import PackedRow
from trainer.torch_engine import TorchEngine

Report = Callable[[Meters], None]


class Critic(Protocol):
    """Every rank calls the same methods for the same rows, as for `trainer.engine.Engine`."""

    @property
    def meters(self) -> tuple[str, ...]:
        """Raw sums that `train` reports of a row."""
        ...

    def values(self, row: PackedRow | None) -> torch.Tensor | None:
        """[K] float32, what it says of each trained token, without gradient; None for a zero-loss row."""
        ...

    def train(self, held: HeldRow, *, report: Report) -> None:
        """Add the gradient of its loss summed over a row, not divided. The row may be computed later, but before `complete` returns."""
        ...

    def complete(self) -> None:
        """Compute the rows that were put off."""
        ...

    def update(self, sealed: StepClosed) -> Update:
        """Apply the gradients of all ranks, divided by what the step has of what the loss is a mean over; start collecting anew."""
        ...

    def drop(self) -> None:
        """Forget the rows since the last update."""
        ...


class ValueCritic:
    """A value model: [K] values of the state before each trained token."""

    meters: tuple[str, ...] = (
        "value_loss_sum",
        "value_clipped_sum",
        "value_sum",
        "value_error_sum",
        "value_error_square_sum",
        "return_sum",
        "return_square_sum",
    )

    def __init__(self, engine: TorchEngine[torch.Tensor], *, clip: float = 0.0, delta: float = 0.0) -> None:
        """`clip` is the distance from the values at the start of the step within which an improvement counts; with `delta` the loss is
        Huber's instead, linear beyond so large an error."""
        self._engine = engine
        self._clip = clip
        self._delta = delta

    def values(self, row: PackedRow | None) -> torch.Tensor | None:
        """See `Critic`."""
        return self._engine.outputs(row)

    def train(self, held: HeldRow, *, report: Report) -> None:
        """See `Critic`: the clipped or the Huber loss, towards the returns."""

        def loss(values: torch.Tensor) -> torch.Tensor:
            old_values, returns = held.values, held.returns
            assert old_values is not None
            assert returns is not None
            loss_mask = torch.ones_like(returns, dtype=torch.bool)
            if self._delta:
                loss, clipped = huber_value_loss(values, returns=returns, loss_mask=loss_mask, delta=self._delta)
            else:
                loss, clipped = clipped_value_loss(values, old_values=old_values, returns=returns, loss_mask=loss_mask, clip=self._clip)
            errors = returns - values.detach()
            sums = (loss.detach(), clipped, values.detach(), errors, errors.square(), returns, returns.square())
            report({name: numbers.sum().double() for name, numbers in zip(self.meters, sums, strict=True)})
            return loss

        self._engine.train(held.row, loss)

    def update(self, sealed: StepClosed) -> Update:
        """See `Critic`: a mean over tokens."""
        return self._engine.update(sealed.step, denominator=float(max(sealed.num_tokens, 1)))

    def complete(self) -> None:
        """See `Critic`."""
        self._engine.complete()

    def drop(self) -> None:
        """See `Critic`."""
        self._engine.drop()


def finish_critic_meters(numbers: dict[str, float]) -> dict[str, float]:
    """Turn means per token into what is logged; numbers of a run without a critic are left as they are.

    Of values: those that only serve to compute the explained variance, 1 - Var(G - V) / Var(G), are put into it; where all returns are
    equal nothing is to be explained, and it is left out. Of an implicit process reward model: means per sequence.
    """
    if "return_square" in numbers:
        helpers = ("value_error", "value_error_square", "return_square")
        spread = numbers["return_square"] - numbers["return"] ** 2
        unexplained = numbers["value_error_square"] - numbers["value_error"] ** 2
        told = {name: value for name, value in numbers.items() if name not in helpers}
        return told | ({"value_explained_variance": 1 - unexplained / spread} if spread > 1e-12 else {})
    if "prm_sequences" in numbers:
        per_token = numbers["prm_sequences"]
        of_sequence = {name: numbers[name] / per_token for name in ("prm_loss", "prm_accuracy")}
        return {name: value for name, value in numbers.items() if name != "prm_sequences"} | of_sequence
    return numbers
