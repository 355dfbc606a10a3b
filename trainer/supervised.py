"""Supervised fine-tuning with the model, the packed rows and the optimizer of RL: a warm start before it, or training by itself."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

from pipelinerl.config import Config
from trainer.build import adapters_of
from trainer.checkpoint import save_model
from trainer.demonstrations import Demonstration, Demonstrations
from trainer.model import Model
from trainer.optimizer import Optimizer, Schedule
from trainer.parallel import Replicas
from trainer.row import arrange


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SftProgress:
    """One optimizer step."""

    step: int
    """1 .. `num_steps`."""
    num_steps: int
    loss: float
    """Mean over the completion tokens of the batch, nats."""
    grad_norm: float
    """Before clipping."""
    tokens_per_s: float
    """Tokens of prompts and completions, since the start."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SftReport:
    """What a whole fine-tuning did."""

    losses: tuple[float, ...]
    """Of every step, nats per completion token."""
    num_tokens: int
    """Of prompts and completions."""
    elapsed_s: float
    """From the first step to the last; loading and saving left out."""
    folder: Path
    """Where the model was saved."""


def train_sft(config: Config, *, on_progress: Callable[[SftProgress], None] = lambda progress: None) -> SftReport:
    """Train `model.path` on `sft.source` in this process, and save it to `sft.output` (default: over `model.path`).

    The same config and seed give the same weights, bit by bit, on the same machine with the same number of threads. Raises `ConfigError`
    and `DataError`.
    """
    section = config.sft
    demonstrations = Demonstrations(config)
    replicas = Replicas(ranks=1, deadline_s=0.0)
    model = Model(config.model.path, dtype=config.model.dtype, temperature=1.0, device=replicas.device, adapters=adapters_of(config))
    optimizer = Optimizer(
        model.parameters(),
        schedule=Schedule(
            learning_rate=section.learning_rate,
            num_steps=section.steps,
            warmup_steps=section.warmup_steps,
            final_fraction=section.final_learning_rate_fraction,
        ),
        betas=config.trainer.betas,
        weight_decay=config.trainer.weight_decay,
        max_grad_norm=config.trainer.max_grad_norm,
    )
    losses: list[float] = []
    num_tokens = 0
    started = time.perf_counter()
    for step, batch in zip(range(section.steps), demonstrations.batches(), strict=False):
        num_trained = sum(len(token_ids) - num_prompt for token_ids, num_prompt in batch)
        total = sum(_add_row(model, row) for row in _rows(batch, max_tokens=config.batch.max_tokens))
        update = optimizer.step(step, denominator=num_trained)
        losses.append(total / num_trained)
        num_tokens += sum(len(token_ids) for token_ids, _ in batch)
        speed = num_tokens / (time.perf_counter() - started)
        on_progress(SftProgress(step=step + 1, num_steps=section.steps, loss=losses[-1], grad_norm=update.grad_norm, tokens_per_s=speed))
    elapsed_s = time.perf_counter() - started
    folder = section.output or config.model.path
    save_model(model, folder, source=config.model.path)
    return SftReport(losses=tuple(losses), num_tokens=num_tokens, elapsed_s=elapsed_s, folder=folder)


def _rows(batch: list[Demonstration], *, max_tokens: int) -> Iterator[list[Demonstration]]:
    """Split a batch into rows of at most `max_tokens`."""
    row: list[Demonstration] = []
    num_tokens = 0
    for demonstration in batch:
        if row and num_tokens + len(demonstration[0]) > max_tokens:
            yield row
            row, num_tokens = [], 0
        row.append(demonstration)
        num_tokens += len(demonstration[0])
    yield row


def _add_row(model: Model, row: list[Demonstration]) -> float:
    """Add the gradient of a row's summed negative log-probabilities; return the sum."""
    arranged = arrange(
        np.concatenate([token_ids for token_ids, _ in row]),
        trains=np.concatenate([np.arange(len(token_ids)) >= num_prompt for token_ids, num_prompt in row]),
        lengths=np.array([len(token_ids) for token_ids, _ in row], np.int32),
        names=[f"sample {index} of the row" for index in range(len(row))],
        device=model.device,
    )
    assert arranged is not None, "a demonstration ends with an end-of-sequence token, which has a loss"
    loss = -torch.sum(model.logprobs(arranged)[0])
    loss.backward()
    return loss.item()
