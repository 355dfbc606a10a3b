"""The critic: a second model on the same ranks, trained beside the policy, from which advantages per token are made.

A *value model* learns to predict, before every token, what the rest of the rollout will earn. An *implicit process reward model* (PRIME,
arXiv:2502.01456) is a language model phi that is trained on outcomes alone: beta (log phi - log ref), summed over a completion, is its
logit of the completion being correct, and what one token adds to the sum is that token's process reward. Those of a step are read before
phi learns from the step, so that one forward pass serves (verl: update "after").
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import torch

from pipelinerl.algorithms.loss import critic as losses
from pipelinerl.algorithms.loss.columns import sequences_of
from pipelinerl.algorithms.loss.meters import Meters
from pipelinerl.messages import StepClosed
from trainer.advantages import HeldRow
from trainer.backend import Backend
from trainer.optimizer import Update

LossSums = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""(the raw loss sum of a row, a scalar with gradient; what its meters are sums of)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Critic:
    """A model that says what a token is worth. Every rank calls the same methods for the same rows, as for its `backend`."""

    backend: Backend[torch.Tensor]
    """Its outputs are [K] float32, what it says of each trained token."""
    loss: Callable[[torch.Tensor, HeldRow], LossSums]
    meters: tuple[str, ...]
    """Raw sums that `train` reports of a row, in the order in which `loss` gives them."""
    counted: Callable[[StepClosed], int]
    """Counts in a step what the loss is a mean over: tokens or sequences."""

    def train(self, held: HeldRow, *, report: Callable[[Meters], None]) -> None:
        """Add the gradient of its loss summed over a row, not divided. The row may be computed later, see `Backend.train`."""

        def loss(outputs: torch.Tensor) -> torch.Tensor:
            total, parts = self.loss(outputs, held)
            sums = (total.detach(), *parts)
            report({name: numbers.sum().double() for name, numbers in zip(self.meters, sums, strict=True)})
            return total

        self.backend.train(held.row, loss)

    def update(self, sealed: StepClosed) -> Update:
        """Apply the gradients of all ranks, divided by what the step has of what the loss is a mean over; start collecting anew."""
        return self.backend.update(sealed.step, denominator=float(max(self.counted(sealed), 1)))


def value_critic(backend: Backend[torch.Tensor], *, clip: float = 0.0, delta: float = 0.0) -> Critic:
    """A value model: [K] values of the state before each trained token; its loss is a mean over tokens, towards the returns.

    `clip` is the distance from the values at the start of the step within which an improvement counts; with `delta` the loss is Huber's
    instead, linear beyond so large an error.
    """

    def loss(values: torch.Tensor, held: HeldRow) -> LossSums:
        old_values, returns = held.values, held.returns
        assert old_values is not None
        assert returns is not None
        loss_mask = torch.ones_like(returns, dtype=torch.bool)
        if delta:
            total, clipped = losses.huber_value_loss(values, returns=returns, loss_mask=loss_mask, delta=delta)
        else:
            total, clipped = losses.clipped_value_loss(values, old_values=old_values, returns=returns, loss_mask=loss_mask, clip=clip)
        errors = returns - values.detach()
        return total, (clipped, values.detach(), errors, errors.square(), returns, returns.square())

    names = ("value_loss", "value_clipped", "value", "value_error", "value_error_square", "return", "return_square")
    meters = tuple(f"{name}_sum" for name in names)
    return Critic(backend=backend, loss=loss, meters=meters, counted=lambda sealed: sealed.num_tokens)


def implicit_prm(backend: Backend[torch.Tensor], *, beta: float) -> Critic:
    """An implicit process reward model: [K] log phi of each trained token; its loss is the mean cross-entropy of a sequence's outcome."""

    def loss(logprobs: torch.Tensor, held: HeldRow) -> LossSums:
        columns = held.columns
        assert columns is not None
        correct, reference_logprobs = columns.required("correct"), columns.required("reference_logprobs")
        total, num_right = losses.implicit_prm_loss(
            logprobs, reference_logprobs=reference_logprobs, correct=correct, sequences=sequences_of(columns), beta=beta
        )
        return total, (num_right, torch.tensor(len(correct)))

    meters = ("prm_loss_sum", "prm_accuracy_sum", "prm_sequences_sum")
    return Critic(backend=backend, loss=loss, meters=meters, counted=lambda sealed: sealed.num_samples)


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
