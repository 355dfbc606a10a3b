"""The steps of a run by their loss: a script may train each of its steps with another one (`pipelinerl.algorithms.step_loss`).

All of them train the same policy, with the same optimizer, and compare engines with the trainer in the same way. A step of demonstrations
comes whole with its seal.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch

from pipelinerl.algorithms.method import CRITICS, REFERENCE_OFFERS, Method
from pipelinerl.algorithms.signal import gradient_needs_advantage
from pipelinerl.algorithms.step_loss import SFT
from pipelinerl.messages import EngineMismatch, MicroBatch, StepClosed
from trainer.controllers import Controllers
from trainer.critic import Critic
from trainer.data.sft_rows import SftRows
from trainer.data.split import split_by_gradient, without_samples
from trainer.model.reference import Reference
from trainer.model.teachers import Teachers
from trainer.step import Step


class TrainedStep(Protocol):
    """What ends a step."""

    engines: tuple[EngineMismatch, ...]

    def train_held(self, sealed: StepClosed) -> None: ...

    def finish(self, sealed: StepClosed) -> dict[str, float]: ...


class SupervisedStep:
    """A step of demonstrations: the mean negative log-likelihood of their completions' tokens, at the temperature of rollouts."""

    def __init__(self, step: Step, *, max_tokens: int) -> None:
        """`step` is that of the run's own loss, beside which this one trains; a row has at most `max_tokens`."""
        self.engines: tuple[EngineMismatch, ...] = ()
        self._backend, self._replicas = step.backend, step.replicas
        self._rows = SftRows(step.backend, replicas=step.replicas, max_tokens=max_tokens)
        self._total = torch.zeros(())

    def train_held(self, sealed: StepClosed) -> None:
        """Add the gradients of the demonstrations, of which every replica trains its share."""
        self._total = self._rows.train(sealed.demonstrations)
        self._backend.complete()

    def finish(self, sealed: StepClosed) -> dict[str, float]:
        """Update the weights; return the step's numbers, the same on every rank. `loss` is in nats per trained token."""
        self._replicas.sum(self._total, what=f"to add up the loss of step {sealed.step}")
        update = self._backend.update(sealed.step, denominator=sealed.num_tokens)
        loss = float(self._total) / sealed.num_tokens
        num_tokens = float(sum(one.num_tokens for one in sealed.demonstrations))
        numbers = {"loss": loss, "sft_loss": loss, "sft_tokens": float(sealed.num_tokens), "num_tokens": num_tokens}
        return numbers | {
            "grad_norm": update.grad_norm,
            "learning_rate": update.learning_rate,
            "num_trained_tokens": float(sealed.num_tokens),
        }


class Steps:
    """A `Step` for each loss that was asked for; every rank asks for the same ones in the same order."""

    def __init__(
        self,
        own: Step,
        *,
        method_of: Callable[[str], Method],
        critic_of: Callable[[Method], Critic | None],
        reference: Callable[[], Reference | Teachers | None],
        max_tokens: int,
    ) -> None:
        """`own` has the run's own loss. `method_of` gives the method that a loss names, `critic_of` what trains its critic; `reference`
        loads the frozen model, the first time, or returns None where the config names none. A row has at most `max_tokens`.
        """
        self.own = own
        self.reference = reference
        self._method_of = method_of
        self._critic_of = critic_of
        self._supervised = SupervisedStep(own, max_tokens=max_tokens)
        self._others: dict[str, Step] = {}

    def of(self, loss: str) -> Step:
        """Return the step that rows of this loss are added to."""
        if not loss:
            return self.own
        if loss not in self._others:
            self._others[loss] = self._make(self._method_of(loss))
        return self._others[loss]

    def sealed(self, sealed: StepClosed) -> TrainedStep:
        """Return what ends a step."""
        return self._supervised if sealed.loss == SFT else self.of(sealed.loss)

    def split(self, batch: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
        """As `Step.split`, by the loss of the row; any thread may call it."""
        if not batch.loss:
            return self.own.split(batch)
        splits = gradient_needs_advantage(self._method_of(batch.loss)) and self.own.replicas.layout.pipeline == 1
        return split_by_gradient(batch) if splits else (batch, without_samples(batch))

    def _make(self, method: Method) -> Step:
        return dataclasses.replace(
            self.own,
            method=method,
            reference=self.reference() if method.needs & REFERENCE_OFFERS else None,
            critic=self._critic_of(method) if method.needs & CRITICS else None,
            controllers=Controllers(method),
        )
