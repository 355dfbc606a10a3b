"""Supervised fine-tuning with the trainer of RL: its model in any layout, its packing, its optimizer, its checkpoints.

A fine-tuning that was interrupted goes on from its newest checkpoint when it is started again; what it was trained on is drawn by the seed,
so the steps after it are those that would have been.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.backends import check_model
from pipelinerl.config.layout import check_layout
from pipelinerl.errors import CheckpointDamaged, ConfigError
from pipelinerl.messages import CheckpointFailed
from pipelinerl.storage.checkpoint_folder import Manifest, complete, read_manifest
from trainer.backend import Backend, Outputs
from trainer.build import Trained, build_sft, image_processor_of, state_of
from trainer.checkpoint.checkpoints import Checkpoints
from trainer.checkpoint.model_folder import refuse_to_replace, save_model
from trainer.data.demonstrations import Demonstrations
from trainer.data.sft_rows import SftRows
from trainer.parallel.replicas import Replicas


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
    """The outcome of a whole fine-tuning."""

    losses: tuple[float, ...]
    """The loss of every step, nats per completion token."""
    num_tokens: int
    """Tokens of prompts and completions."""
    elapsed_s: float
    """Seconds from the first step to the last; loading and saving left out."""
    folder: Path
    """The folder that the model was saved to."""


def train_sft(config: Config, *, on_progress: Callable[[SftProgress], None] = lambda progress: None) -> SftReport:
    """Train `model.path` on `sft.source`, and save it to `config.sft_output`; every rank of `trainer.ranks` calls it.

    The same config and seed give the same weights, bit by bit, on the same machine with the same number of threads, interrupted or not.
    Raises `ConfigError` and `DataError`.
    """
    section = config.sft
    refuse_to_replace(config.sft_output)
    demonstrations = Demonstrations(config)
    check_layout(config.trainer.layout, config.model.path)
    check_model(config.trainer.backend, config.trainer.layout, config.model.path)
    replicas = Replicas(ranks=config.trainer.ranks, deadline_s=config.trainer.silent_after_s, layout=config.trainer.layout)
    with contextlib.ExitStack() as at_end:
        at_end.callback(replicas.close)
        tuned = build_sft(config, replicas=replicas)
        backend = Backend(tuned.model, optimizer=tuned.optimizer, replicas=replicas, read=Outputs.of)
        rows = SftRows(backend, replicas=replicas, max_tokens=config.batch.max_tokens, image_processor=image_processor_of(config))
        folder = config.sft_output
        checkpoints = _Resumable(config, folder, tuned=tuned, replicas=replicas)
        first = checkpoints.restore()
        losses: list[float] = []
        num_tokens = 0
        started = time.perf_counter()
        for step in range(first, section.steps):
            batch = demonstrations.batch_at(step)
            total = rows.train(batch)
            backend.complete()
            num_trained = sum(one.num_trained for one in batch)
            replicas.sum(total, what=f"to add up the loss of step {step}")
            update = backend.update(step, denominator=num_trained)
            losses.append(float(total) / num_trained)
            num_tokens += sum(one.num_tokens for one in batch)
            speed = num_tokens / (time.perf_counter() - started)
            numbers = {"loss": losses[-1], "grad_norm": update.grad_norm, "tokens_per_s": speed}
            on_progress(SftProgress(step=step + 1, num_steps=section.steps, **numbers))
            checkpoints.begin_if_due(step + 1)
        elapsed_s = time.perf_counter() - started
        checkpoints.wait()
        save_model(tuned.model, folder, source=config.model.path, stop_token_ids=config.rollout.stop_token_ids)
        checkpoints.remove()
    return SftReport(losses=tuple(losses), num_tokens=num_tokens, elapsed_s=elapsed_s, folder=folder)


class _Resumable:
    """The checkpoints of one fine-tuning, beside its output, until it is done."""

    def __init__(self, config: Config, folder: Path, *, tuned: Trained, replicas: Replicas) -> None:
        self._folder = folder.with_name(folder.name + ".checkpoints")
        self._every = config.checkpoint.every
        self._is_first = replicas.rank == 0
        self._optimizer = tuned.optimizer
        settings = json.dumps([config.sft.model_dump(mode="json"), config.run.seed, str(config.model.path), config.batch.max_tokens])
        self._settings = hashlib.blake2b(settings.encode(), digest_size=8).hexdigest()
        self._checkpoints = Checkpoints(
            self._folder,
            state=lambda: state_of(tuned),
            rank=replicas.rank,
            num_ranks=replicas.size,
            keep=config.checkpoint.keep,
        )

    def restore(self) -> int:
        """Load the newest whole one; return how many steps it holds. Raises `ConfigError` where they were trained with other settings."""
        for found in complete(self._folder):
            with contextlib.suppress(CheckpointDamaged):
                self._check_settings(read_manifest(found))
        restored = self._checkpoints.restore()
        self._optimizer.round()
        return restored.version if restored is not None else 0

    def begin_if_due(self, version: int) -> None:
        """Begin to write a version, where one is due; say where an earlier one failed."""
        self._tell_failures()
        if version % self._every == 0:
            self._checkpoints.begin(version, commit=self._settings, num_samples=0, samples="0")

    def wait(self) -> None:
        """Wait for what is being written; say where that failed."""
        self._checkpoints.wait()
        self._tell_failures()

    def remove(self) -> None:
        """Remove them: the model is saved."""
        if self._is_first:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _check_settings(self, manifest: Manifest) -> None:
        if manifest.commit != self._settings:
            raise ConfigError(
                f"{self._folder} holds a fine-tuning that was interrupted, with other settings than these (sft, run.seed, model.path or"
                " batch.max_tokens): set them as they were to go on with it, or remove the folder to begin anew"
            )

    def _tell_failures(self) -> None:
        for news in self._checkpoints.take_news():
            if isinstance(news, CheckpointFailed):
                print(news.error, file=sys.stderr, flush=True)
