"""Splits a row in two: the samples that have a gradient, and those whose gradient is exactly zero, which cost no backward pass."""

from __future__ import annotations

import numpy as np

from pipelinerl.algorithms.signal import MIN_FRACTION
from pipelinerl.data.expert_routes import routes_of, table_of
from pipelinerl.messages import Int32, Mask, MicroBatch, Nodes


def split_by_gradient(batch: MicroBatch) -> tuple[MicroBatch, MicroBatch]:
    """The samples of a row that have an advantage, and those that have none; either may be a row without a sample."""
    num_samples = len(batch.lengths)
    sample = np.repeat(np.arange(num_samples), batch.lengths)
    has_one = np.bincount(sample, weights=(batch.advantages != 0) & batch.loss_mask, minlength=num_samples) > 0
    if batch.lengths[~has_one].sum() < MIN_FRACTION * len(batch.token_ids):
        has_one[:] = True
    return _chosen(batch, has_one), _chosen(batch, ~has_one)


def without_samples(batch: MicroBatch) -> MicroBatch:
    """The zero-loss row in the place of `batch`."""
    return _chosen(batch, np.zeros(len(batch.lengths), np.bool_))


def _chosen(batch: MicroBatch, samples: Mask) -> MicroBatch:
    """The row with some of its samples; `samples` is [N] bool."""
    if samples.all():
        return batch
    tokens = np.repeat(samples, batch.lengths)
    of_samples = {name: getattr(batch, name) for name in ("rewards", "truncated", "group_ids", "weights", "engine_ids", "teacher_ids")}
    return MicroBatch(
        step=batch.step,
        index=batch.index,
        token_ids=batch.token_ids[tokens],
        loss_mask=batch.loss_mask[tokens],
        logprobs=batch.logprobs[tokens],
        versions=batch.versions[tokens],
        advantages=batch.advantages[tokens],
        lengths=batch.lengths[samples],
        rollout_ids=tuple(name for name, is_chosen in zip(batch.rollout_ids, samples.tolist(), strict=True) if is_chosen),
        routes=None if batch.routes is None else routes_of(table_of(batch.routes)[tokens]),
        loss=batch.loss,
        images=batch.images,
        images_of=tuple(
            numbers for numbers, is_chosen in zip(batch.images_of, samples.tolist(), strict=bool(batch.images_of)) if is_chosen
        ),
        nodes=None if batch.nodes is None else _of_samples(batch.nodes, samples, lengths=batch.lengths),
        **{name: None if column is None else column[samples] for name, column in of_samples.items()},
    )


def _of_samples(nodes: Nodes, samples: Mask, *, lengths: Int32) -> Nodes:
    """The nodes of some of the samples of these lengths."""
    is_chosen = samples[np.searchsorted(np.cumsum(lengths), np.cumsum(nodes.lengths))]
    new_index = np.cumsum(is_chosen, dtype=np.int32) - 1
    parents = np.where(nodes.parents < 0, -1, new_index[nodes.parents]).astype(np.int32)
    return Nodes(parents=parents[is_chosen], lengths=nodes.lengths[is_chosen])
