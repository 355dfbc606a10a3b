"""Supervised fine-tuning beside RL: some demonstrations in every step, in the same update as the step's rollouts.

The objective of a step is RL's loss, as its method has it, plus `coef` times the mean negative log-likelihood per completion token of the
step's demonstrations (as the SFT terms of LUFFY, arXiv:2504.14945, and HPT, arXiv:2509.04419, with a constant coefficient). RL's sums are
divided by a count D that only the seal tells. So the demonstrations are trained behind the step's last row: with N completion tokens their
sum is multiplied by `coef` * D / N, and the one division by D leaves `coef` times their mean. A step without a token of RL has D = 1, and
trains them alone.

The likelihood is the policy's at the temperature it samples with. Which rows a step has follows from seed and step, so checkpoints hold
nothing of the stream.
"""

from __future__ import annotations

import torch

from pipelinerl.data.images import ImageProcessor
from trainer.backend import Backend, Outputs
from trainer.data.demonstrations import Demonstrations
from trainer.data.sft_rows import SftRows
from trainer.parallel.replicas import Replicas


class SftStream:
    """The demonstrations beside RL. Every rank calls the same methods in the same order."""

    def __init__(
        self,
        demonstrations: Demonstrations,
        *,
        backend: Backend[Outputs],
        replicas: Replicas,
        max_tokens: int,
        coef: float,
        image_processor: ImageProcessor | None = None,
    ) -> None:
        """`backend` is that of the policy; a row has at most `max_tokens`."""
        self._demonstrations = demonstrations
        self._rows = SftRows(backend, replicas=replicas, max_tokens=max_tokens, image_processor=image_processor)
        self._replicas = replicas
        self._coef = coef
        self._total: torch.Tensor | None = None
        """Sum over this replica's rows of the pass under way, nats; None where it has had none."""
        self._num_tokens = 0

    def train(self, step: int, *, divisor: float) -> None:
        """Add the gradient of a step's demonstrations, so that it is `coef` times that of their mean once it is divided by `divisor`."""
        batch = self._demonstrations.batch_at(step)
        self._num_tokens = sum(one.num_trained for one in batch)
        self._total = self._rows.train(batch, weight=self._coef * divisor / self._num_tokens)

    def finish(self, step: int) -> dict[str, float]:
        """Numbers of the pass, over all replicas: the mean loss in nats per token, without `coef`, and of how many tokens."""
        total, self._total = self._total, None
        if total is None:
            return {}
        self._replicas.sum(total, what=f"to add up the SFT loss of step {step}")
        return {"sft_loss": float(total) / self._num_tokens, "sft_tokens": float(self._num_tokens)}
