"""An implicit process reward model (PRIME, arXiv:2502.01456): a language model phi that is trained on outcomes alone.

beta (log phi - log ref), summed over a completion, is its logit of the completion being correct; what one token adds to the sum is that
token's process reward. Those of a step are read before phi learns from the step, so that one forward pass serves (verl: update "after").
"""

from __future__ import annotations

import torch

from pipelinerl.algorithms.loss.columns import sequences_of
from pipelinerl.algorithms.loss.critic import implicit_prm_loss
from pipelinerl.messages import StepClosed
from trainer.advantages import HeldRow
from trainer.critic.critic import Report
from trainer.engine import Outputs
from trainer.optimizer import Update
from trainer.rows.packed_row import PackedRow
from trainer.torch_engine import TorchEngine


class ImplicitPrm:
    """A `trainer.critic.critic.Critic` whose values are log phi of each trained token."""

    meters: tuple[str, ...] = ("prm_loss_sum", "prm_accuracy_sum", "prm_sequences_sum")

    def __init__(self, engine: TorchEngine[Outputs], *, beta: float) -> None:
        self._engine = engine
        self._beta = beta

    def values(self, row: PackedRow | None) -> torch.Tensor | None:
        """See `Critic`."""
        outputs = self._engine.outputs(row)
        return None if outputs is None else outputs.logprobs

    def train(self, held: HeldRow, *, report: Report) -> None:
        """See `Critic`: cross-entropy of each sequence's outcome."""

        def loss(outputs: Outputs) -> torch.Tensor:
            columns = held.columns
            assert columns is not None
            sequences, correct = sequences_of(columns), columns.required("correct")
            loss, num_right = implicit_prm_loss(
                outputs.logprobs,
                reference_logprobs=columns.required("reference_logprobs"),
                correct=correct,
                sequences=sequences,
                beta=self._beta,
            )
            sums = (loss.detach(), num_right, torch.tensor(len(correct)))
            report({name: number.double() for name, number in zip(self.meters, sums, strict=True)})
            return loss

        self._engine.train(held.row, loss)

    def update(self, sealed: StepClosed) -> Update:
        """See `Critic`: a mean over sequences."""
        return self._engine.update(sealed.step, denominator=float(max(sealed.num_samples, 1)))

    def complete(self) -> None:
        """See `Critic`."""
        self._engine.complete()

    def drop(self) -> None:
        """See `Critic`."""
        self._engine.drop()
