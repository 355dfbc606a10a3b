"""Answers how likely rows are to the policy or to the frozen model beside it, for whoever asks between two steps."""

from __future__ import annotations

import dataclasses

import torch

from pipelinerl.messages import ComputeLogprobs, LogprobModel, LogprobsComputed, MicroBatch
from trainer.rows.packed_row import PackedRow
from trainer.step import Step, teacher_ids
from trainer.steps import Steps


def compute_logprobs(asked: ComputeLogprobs, *, steps: Steps) -> LogprobsComputed:
    """Compute this replica's row, and gather those of all replicas. Every rank calls it, and returns the same answer."""
    replicas = steps.own.replicas
    mine = replicas.number
    found = _of_row(asked.rows[mine] if mine < len(asked.rows) else None, asked.model, steps=steps)
    sizes = [int(row.loss_mask.sum()) for row in asked.rows]
    whole = torch.zeros(sum(sizes), device=replicas.device)
    if found is not None:
        start = sum(sizes[:mine])
        whole[start : start + len(found)] = found.float()
    replicas.sum(whole, what="to gather log-probabilities")
    return LogprobsComputed(request_id=asked.request_id, logprobs=whole.cpu().numpy())


def _of_row(batch: MicroBatch | None, model: LogprobModel, *, steps: Steps) -> torch.Tensor | None:
    """[K] of a row; None without one."""
    row = None if batch is None else _lay_out(batch, step=steps.own)
    if model is LogprobModel.POLICY:
        outputs = steps.own.backend.outputs(row)
        return None if outputs is None else outputs.logprobs
    reference = steps.reference()
    assert reference is not None, "who asks for the reference has named one"
    return reference.judge(row)[0]


def _lay_out(batch: MicroBatch, *, step: Step) -> PackedRow | None:
    row = step.lay_out(batch)
    if row is None or batch.teacher_ids is None:
        return row
    return dataclasses.replace(row, teacher_ids=teacher_ids(batch, device=step.replicas.device))
