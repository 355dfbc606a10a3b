"""The training loop: rows in, policies out. `train` builds its parts, `Loop` is the loop.

A trainer is told nothing of whether it is the first of its run: it starts from the newest checkpoint, and asks for the steps after it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.messages import (
    CheckpointFailed,
    CheckpointSaved,
    MicroBatch,
    PolicyPublished,
    StepDone,
    StepSealed,
    Stop,
    ToTrainer,
    TrainerReady,
)
from pipelinerl.metrics import Journal
from pipelinerl.transport.zmq import ZmqLink
from pipelinerl.weights.slots import machine
from trainer.checkpoint import save_model
from trainer.checkpoints import Checkpoints
from trainer.feed import Feed
from trainer.lineage import Lineage
from trainer.model import Model
from trainer.optimizer import Optimizer, Schedule
from trainer.parallel import Replicas
from trainer.phases import Phases
from trainer.publish import Publisher
from trainer.step import Step

MAX_LOGPROB_GAP = {"float32": 1e-4, "bfloat16": 0.5}
"""Default of `trainer.max_logprob_gap`, by dtype: several times what rounding alone does; smaller would end healthy runs."""


def train(config: Config, run_folder: Path) -> None:
    """Train, from the newest checkpoint on, until the last step or until told to stop; either way `<run>/model` then holds the policy."""
    replicas = Replicas(ranks=config.trainer.ranks, deadline_s=config.trainer.silent_after_s)
    model = Model(config.model.path, dtype=config.model.dtype, temperature=config.rollout.temperature, device=replicas.device)
    optimizer = _make_optimizer(config, model)
    checkpoints = Checkpoints(
        run_folder / "checkpoints",
        state=lambda: _state_of(model, optimizer),
        rank=replicas.rank,
        num_ranks=replicas.size,
        keep=config.checkpoint.keep,
    )
    restored, lineage = checkpoints.restore(), Lineage()
    if restored is not None:
        lineage.restore(num_samples=restored.num_samples, digest=restored.samples)
    first, commit = (restored.version, restored.commit) if restored is not None else (0, "")
    step = _make_step(config, model=model, optimizer=optimizer, replicas=replicas, first_step=first)
    publisher = None
    if replicas.rank == 0:
        publisher = Publisher(
            model.tensors,
            tied_names=model.tied_names(),
            run_folder=run_folder,
            deadline_s=config.trainer.silent_after_s,
            address=config.weights.address,
            sends_changes=config.weights.delta,
        )
    feed = Feed(
        lambda: ZmqLink(run_folder, "trainer", replicas.rank, accepts=ToTrainer, deadline_s=config.trainer.ready_deadline_s),
        ready=TrainerReady(
            replica=replicas.rank,
            num_replicas=replicas.size,
            process_id=os.getpid(),
            version=first,
            commit=commit,
            machine=machine(),
        ),
        num_steps=config.trainer.steps,
        silent_after_s=config.trainer.silent_after_s,
        publisher=publisher,
    )

    def checkpoint(version: int, commit: str) -> None:
        num_samples, samples = lineage.whole(
            lambda sums: replicas.sum(sums, what=f"to count the samples of version {version}"), device=replicas.device
        )
        checkpoints.begin(version, commit=commit, num_samples=num_samples, samples=samples)

    def finish() -> None:
        checkpoints.wait()
        if replicas.rank == 0:
            save_model(model, run_folder / "model", source=config.model.path)

    with contextlib.ExitStack() as at_end:
        at_end.callback(replicas.close)
        journal = at_end.enter_context(contextlib.closing(Journal(run_folder, f"trainer-{replicas.rank}")))
        if publisher is not None:
            at_end.callback(publisher.close)
        at_end.enter_context(feed)
        loop = Loop(
            feed=feed,
            step=step,
            replicas=replicas,
            publisher=publisher,
            phases=Phases(journal, feed=feed),
            lineage=lineage,
            checkpoint=checkpoint,
            take_news=checkpoints.take_news,
            checkpoint_every=config.checkpoint.every,
        )
        loop.run(first, config.trainer.steps)
        finish()
        loop.tell_news()
        # Engines may still have to attach the last policy: its buffer stays until the orchestrator says that the run is over.
        feed.wait_for_stop(config.trainer.silent_after_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The training loop and what it drives."""

    feed: Feed
    step: Step
    replicas: Replicas
    publisher: Publisher | None
    phases: Phases
    lineage: Lineage
    checkpoint: Callable[[int, str], None]
    """Begins to write a version, which the ledger knows by its commit."""
    take_news: Callable[[], Sequence[CheckpointSaved | CheckpointFailed]]
    checkpoint_every: int
    """Steps."""

    def run(self, first: int, num_steps: int) -> None:
        """Train step after step, and publish a policy after each; end after the last, or once any replica is told to stop."""
        if first:
            self._publish(first)  # no engine can have it: who starts here is not who trained it
        commit = ""
        for number in range(first, num_steps):
            sealed = self._add_rows()
            is_whole = self.replicas.all_agree(sealed is not None, what=f"to agree that step {number} is whole")
            if sealed is None or not is_whole:
                if commit and number % self.checkpoint_every:
                    self.checkpoint(number, commit)
                return
            with self.phases("forward_backward"):
                self.step.train_held()
            with self.phases("optimizer"):
                metrics = self.step.finish(sealed)
            self.lineage.finish_step()
            commit = sealed.commit
            self._finish_step(number, metrics, is_due=(number + 1) % self.checkpoint_every == 0 or number + 1 == num_steps, commit=commit)

    def tell_news(self) -> None:
        """Tell what became of checkpoints."""
        for news in self.take_news():
            if isinstance(news, CheckpointFailed):
                print(news.error, file=sys.stderr, flush=True)
            if self.replicas.rank == 0:
                self.feed.send(news)

    def _finish_step(self, number: int, metrics: dict[str, float], *, is_due: bool, commit: str) -> None:
        """Publish first: engines wait for it, and for a checkpoint nobody does."""
        policy = self._make_policy(number + 1)
        if is_due:
            with self.phases("checkpoint"):
                self.checkpoint(number + 1, commit)
        if self.publisher is not None:
            self.feed.send(StepDone(step=number, metrics=metrics | self.phases.finish_step(num_tokens=metrics["num_tokens"])))
        if policy is not None:
            self.feed.send(policy)
        self.tell_news()

    def _publish(self, version: int) -> None:
        policy = self._make_policy(version)
        if policy is not None:
            self.feed.send(policy)

    def _make_policy(self, version: int) -> PolicyPublished | None:
        if self.publisher is None:
            return None
        with self.phases("publish"):
            return self.publisher.publish(version)

    def _add_rows(self) -> StepSealed | None:
        """Train on rows as they come until the step is sealed; None where told to stop before."""
        while True:
            with self.phases("wait"):
                item = self.feed.take()
            match item:
                case MicroBatch():
                    with self.phases("forward_backward"):
                        self.step.add(item)
                    self.lineage.add(item)
                case StepSealed():
                    return item
                case Stop():
                    return None


def _make_optimizer(config: Config, model: Model) -> Optimizer:
    section = config.trainer
    return Optimizer(
        model.parameters(),
        schedule=Schedule(
            learning_rate=section.learning_rate,
            num_steps=section.steps,
            warmup_steps=section.warmup_steps,
            final_fraction=section.final_learning_rate_fraction,
        ),
        betas=section.betas,
        weight_decay=section.weight_decay,
        max_grad_norm=section.max_grad_norm,
    )


def _make_step(config: Config, *, model: Model, optimizer: Optimizer, replicas: Replicas, first_step: int) -> Step:
    return Step(
        model,
        optimizer=optimizer,
        method=method_of(config.algorithm, group_size=config.rollout.group_size, max_staleness=config.pipeline.max_staleness),
        replicas=replicas,
        max_completion_tokens=config.rollout.max_tokens,
        max_logprob_gap=config.trainer.max_logprob_gap or MAX_LOGPROB_GAP[config.model.dtype],
        max_mismatch_kl=config.trainer.max_mismatch_kl,
        correct_reward=config.algorithm.correct_reward,
        first_step=first_step,
    )


def _state_of(model: Model, optimizer: Optimizer) -> dict[str, Any]:
    """The tensors of a checkpoint: those in use, so that loading one writes into them."""
    parameters = parameters_of(model)
    return {"model": parameters, "optimizer": optimizer.tensors(list(parameters))}


def parameters_of(model: Model) -> dict[str, torch.Tensor]:
    """The trained weights in use, by name, in the order in which the optimizer has them."""
    return {name: parameter.detach() for name, parameter in model.module.named_parameters() if parameter.requires_grad}
