"""Batches of demonstrations as the model takes them: packed into rows as in RL, one row per replica at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipelinerl.data.images import ImageProcessor, each_once
from pipelinerl.data.packing import Packing
from pipelinerl.messages import Demonstration
from trainer.backend import Backend, Outputs
from trainer.parallel.replicas import Replicas
from trainer.rows.arrange import arrange
from trainer.rows.images import row_images
from trainer.rows.packed_row import PackedRow


class SftRows:
    """Adds the gradients of batches. Every rank calls it with the same batch."""

    def __init__(
        self, backend: Backend[Outputs], *, replicas: Replicas, max_tokens: int, image_processor: ImageProcessor | None = None
    ) -> None:
        """`max_tokens` of a row; `image_processor` of a model that takes images."""
        self._backend = backend
        self._replicas = replicas
        self._max_tokens = max_tokens
        self._image_processor = image_processor

    def train(self, batch: Sequence[Demonstration], *, weight: float = 1.0) -> torch.Tensor:
        """Add the gradient of `weight` times the negative log-likelihood of the completions, summed over their tokens.

        Returns that sum over this replica's rows, in nats and without the weight; it is whole once the backend's `complete` has returned.
        """
        total = torch.zeros((), device=self._replicas.device)

        def loss(outputs: Outputs) -> torch.Tensor:
            negative = -outputs.logprobs.sum()
            total.add_(negative.detach())
            return weight * negative

        rows = self._packed(batch)
        num_replicas = self._replicas.layout.replicas
        for start in range(0, len(rows), num_replicas):
            mine = start + self._replicas.number
            self._backend.train(self._lay_out(rows[mine]) if mine < len(rows) else None, loss)
        return total

    def _packed(self, batch: Sequence[Demonstration]) -> list[list[Demonstration]]:
        """The same on every rank."""
        packing: Packing[Demonstration] = Packing(max_tokens=self._max_tokens, num_replicas=self._replicas.layout.replicas)
        full = [row for one in batch for row in packing.add(one)]
        return full + packing.flush()

    def _lay_out(self, row: Sequence[Demonstration]) -> PackedRow | None:
        images, images_of = each_once([one.images for one in row])
        columns: dict[str, Any] = {
            "loss_mask": np.concatenate([np.arange(one.num_tokens) >= one.num_prompt for one in row]),
            "lengths": np.array([one.num_tokens for one in row], np.int32),
            "names": [f"sample {index} of the row" for index in range(len(row))],
        }
        token_ids = np.concatenate([one.token_ids for one in row])
        return arrange(
            token_ids,
            **columns,
            images=row_images(images, images_of, token_ids=token_ids, **columns, processor=self._image_processor),
            device=self._replicas.device,
            context_shard=self._replicas.context_shard,
        )
