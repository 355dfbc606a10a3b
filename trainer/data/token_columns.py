"""The loss's view of a packed row: its trained tokens only, with what the trainer's models say of each."""

from __future__ import annotations

import numpy as np
import torch

from pipelinerl.algorithms.loss import TokenColumns
from pipelinerl.messages import MicroBatch
from trainer.backend import Outputs
from trainer.rows.packed_row import PackedRow


def columns_of(
    batch: MicroBatch,
    row: PackedRow,
    outputs: Outputs,
    *,
    correct_reward: float,
    reference_logprobs: torch.Tensor | None = None,
    keeps_old: bool = False,
) -> TokenColumns:
    """Join a row with the policy's outputs and the reference's log-probabilities ([K]); a sample with `correct_reward` is correct.

    `keeps_old` where the method reads the policy at the start of the step, and this is it.
    """
    device = row.trained.device
    sample_of = np.repeat(np.arange(len(batch.lengths)), batch.lengths)

    def on_device(column: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(column).to(device, non_blocking=True)

    def trained(column: np.ndarray) -> torch.Tensor:
        return on_device(column[batch.loss_mask])

    return TokenColumns(
        logprobs=outputs.logprobs,
        behaviour_logprobs=trained(batch.logprobs),
        advantages=trained(batch.advantages),
        loss_mask=torch.ones_like(row.trained, dtype=torch.bool),
        versions=trained(batch.versions),
        sequence_ids=trained(sample_of),
        trained_version=batch.step,
        positions=row.trained,
        entropy=outputs.entropy,
        reference_logprobs=reference_logprobs,
        divergence=outputs.divergence,
        old_logprobs=outputs.logprobs.detach() if keeps_old else None,
        weights=None if batch.weights is None else on_device(batch.weights.copy()),  # what came off the wire is read-only
        correct=None if batch.rewards is None else on_device(batch.rewards >= correct_reward),
        truncated=None if batch.truncated is None else on_device(batch.truncated.copy()),
    )


def no_columns(device: torch.device, *, has_reference: bool, has_divergence: bool = False) -> TokenColumns:
    """A row without a token."""
    nothing, no_ids = torch.zeros(0, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    return TokenColumns(
        logprobs=nothing,
        behaviour_logprobs=nothing,
        advantages=nothing,
        loss_mask=no_ids.bool(),
        versions=no_ids,
        sequence_ids=no_ids,
        trained_version=0,
        positions=no_ids,
        entropy=nothing,
        reference_logprobs=nothing if has_reference else None,
        divergence=nothing if has_divergence else None,
        old_logprobs=nothing,
        correct=no_ids.bool(),
        truncated=no_ids.bool(),
    )
