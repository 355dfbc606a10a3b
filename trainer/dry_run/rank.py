"""One rank of a run's trainer, dry: its model is built, sharded and stepped by the trainer's own code, on tensors without values.

What comes out is counted, not worked out: bytes of weights, gradients and optimizer state, the largest number of bytes alive in a step, and
every collective of that step. The rank's device is a CPU: tables of logits are cut as there (`trainer.model.room`), and attention is taken
block by block. What a library or an allocator takes beside tensors is not in it.
"""

from __future__ import annotations

import dataclasses
import gc
import os
from collections.abc import Iterable
from unittest import mock

import numpy as np
import torch

from pipelinerl.config import Config
from pipelinerl.messages import MicroBatch, StepClosed
from trainer.build import build_critic, build_policy, build_step
from trainer.dry_run.collectives import Collective, Collectives
from trainer.dry_run.shapes import Shapes, pretended_group
from trainer.parallel.replicas import Replicas
from trainer.parallel.sharding import local
from trainer.step import Step

NO_LIMIT = 1e30
"""Of distances between trainer and engine, which are 1 here like every number that is read."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankFigures:
    """What one rank holds, in bytes, and what it sends in one step."""

    weights_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    """All else that lasts from step to step: moments, float32 copies of weights, what models beside the policy hold."""
    step_bytes: int
    """Most that a step takes beside the three: activations, gathered weights, tables of logits."""
    collectives: dict[tuple[str, int], Collective]
    """Of one step, by kind and number of ranks."""


def dry_run(config: Config, *, rank: int = 0, num_rows: int = 1, sample_tokens: int = 1024) -> RankFigures:
    """Train one step of `num_rows` rows for each replica as `rank` of the run's trainer would, and count.

    A row is `batch.max_tokens` long and made of samples of `sample_tokens`, of which the first quarter is the prompt. Of `model.path`,
    config.json is read. One at a time in a process, in which no process group is open.
    """
    layout = config.trainer.layout
    config = without_limits(config)
    numbers = {"RANK": str(rank), "WORLD_SIZE": str(layout.ranks), "LOCAL_RANK": "0"}
    with (
        mock.patch.dict(os.environ, numbers),
        mock.patch("torch.accelerator.is_available", return_value=False),
        pretended_group(rank=rank, size=layout.ranks),
        Shapes() as shapes,
        Collectives() as collectives,
    ):
        replicas = Replicas(ranks=layout.ranks, deadline_s=config.trainer.silent_after_s, layout=layout)
        policy, critic = build_policy(config, replicas=replicas), build_critic(config, replicas=replicas)
        step = build_step(config, policy=policy, critic=critic, replicas=replicas, first_step=0)
        gc.collect()
        state_bytes, weights_bytes = shapes.live_bytes, _bytes(policy.model.pieces().values())
        shapes.forget_peak()
        collectives.found.clear()
        train_rows(step, config, num_rows=num_rows, sample_tokens=sample_tokens)
        gradients_bytes = policy.optimizer.gradient.nbytes
        return RankFigures(
            weights_bytes=weights_bytes,
            gradients_bytes=gradients_bytes,
            optimizer_bytes=state_bytes - weights_bytes - gradients_bytes,
            step_bytes=shapes.peak_bytes - state_bytes,
            collectives=dict(collectives.found),
        )


def without_limits(config: Config) -> Config:
    """The same run, which lets trainer and engine be as far apart as they are."""
    limits = {"max_logprob_gap": NO_LIMIT, "max_mismatch_kl": NO_LIMIT}
    return config.model_copy(update={"trainer": config.trainer.model_copy(update=limits)})


def train_rows(step: Step, config: Config, *, num_rows: int, sample_tokens: int) -> None:
    """Train one step of the rows that `dry_run` describes."""
    num_samples, num_tokens = 0, 0
    for index in range(num_rows):
        batch = _row(config.batch.max_tokens, sample_tokens=sample_tokens, index=index)
        num_samples, num_tokens = num_samples + len(batch.lengths), num_tokens + int(batch.loss_mask.sum())
        step.add(batch)
    num_replicas = config.trainer.layout.replicas
    sealed = StepClosed(step=0, num_micro_batches=num_rows, num_tokens=num_tokens * num_replicas, num_samples=num_samples * num_replicas)
    step.train_held(sealed)
    step.finish(sealed)


def _bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of what lies in memory, once where several tensors share it."""
    storages = [local(tensor).untyped_storage() for tensor in tensors]
    return sum({storage._cdata: storage.nbytes() for storage in storages}.values())


def _row(num_tokens: int, *, sample_tokens: int, index: int) -> MicroBatch:
    length = min(num_tokens, sample_tokens)
    num = num_tokens // length
    mask = np.tile(np.arange(length) >= length // 4, num)
    return MicroBatch(
        step=0,
        index=index,
        lengths=np.full(num, length, np.int32),
        rollout_ids=tuple(f"{index}-{number}" for number in range(num)),
        token_ids=np.repeat(np.arange(num, dtype=np.int32), length),  # else samples would share their beginnings
        loss_mask=mask,
        logprobs=np.zeros(num * length, np.float32),
        versions=np.where(mask, 0, -1).astype(np.int32),
        advantages=np.where(mask, 1.0, 0.0).astype(np.float32),
        rewards=np.ones(num, np.float32),
        truncated=np.zeros(num, np.bool_),
        group_ids=np.zeros(num, np.int32),
        engine_ids=np.zeros(num, np.int32),
    )
