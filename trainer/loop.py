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

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.config.backends import check_model
from pipelinerl.config.layout import check_layout
from pipelinerl.messages import (
    CheckpointFailed,
    CheckpointSaved,
    Command,
    ComputeLogprobs,
    LogprobsComputed,
    MicroBatch,
    SaveCheckpoint,
    StepClosed,
    StepDone,
    Stop,
    ToTrainer,
    TrainerReady,
    TrainingEnded,
)
from pipelinerl.observe.journal import Journal
from pipelinerl.planning.memory import rank_bytes, read_weights
from pipelinerl.runtime import startup
from pipelinerl.runtime.machine import machine_id
from pipelinerl.transport.zmq import ZmqLink
from pipelinerl.weights.host_memory import give_back_freed
from pipelinerl.weights.timeline import timeline_of
from pipelinerl.weights.transports import device_transports
from trainer.build import adapters_of, build_critic, build_policy, build_steps, state_of
from trainer.checkpoint.checkpoints import Checkpoints
from trainer.checkpoint.model_folder import save_adapter, save_model
from trainer.controllers import Controllers
from trainer.data.loader import LoadedRow, RowLoader
from trainer.data.rows_in_progress import RowsInProgress, interrupted_rows
from trainer.data.sample_digest import SampleDigest
from trainer.logprobs import compute_logprobs
from trainer.orchestrator_client import OrchestratorClient
from trainer.parallel.replicas import Replicas
from trainer.rows.packed_row import PackedRow
from trainer.step_timer import StepTimer
from trainer.steps import Steps, TrainedStep
from trainer.weights.async_publisher import AsyncPublisher
from trainer.weights.in_place import mover
from trainer.weights.publisher import Publisher
from trainer.weights.sharded_weights import ShardedWeights


def train(config: Config, run_folder: Path, *, fence: Callable[[], None] = lambda: None) -> None:
    """Train, from the newest checkpoint on, until the last step or until told to stop; either way `<run>/model` then holds the policy.

    `fence` is called before anything lasting is written; see `pipelinerl.runtime.lease`.
    """
    layout = config.trainer.layout
    check_layout(layout, config.model.path)
    check_model(config.trainer.backend, layout, config.model.path)
    replicas = Replicas(ranks=config.trainer.ranks, deadline_s=config.trainer.silent_after_s, layout=layout)
    policy, critic = build_policy(config, replicas=replicas), build_critic(config, replicas=replicas)
    controllers = Controllers(method_of(config))
    checkpoints = Checkpoints(
        run_folder / "checkpoints",
        state=lambda: state_of(policy, critic) | controllers.state(),
        rank=replicas.rank,
        num_ranks=replicas.size,
        keep=config.checkpoint.keep,
        fence=fence,
    )
    restored, sample_digest = checkpoints.restore(), SampleDigest()
    if restored is not None:
        for trained in (policy, critic):
            if trained is not None:
                trained.optimizer.round()
        sample_digest.restore(num_samples=restored.num_samples, digest=restored.samples)
    first, commit = (restored.version, restored.commit) if restored is not None else (0, "")
    steps = build_steps(config, policy=policy, critic=critic, replicas=replicas, first_step=first, controllers=controllers)
    move = mover(policy.model, policy.optimizer) if config.is_colocated else None
    sharded = (
        ShardedWeights(policy.model, replicas=replicas, run_folder=run_folder, address=config.weights.address, move=move)
        if policy.model.is_sharded
        else None
    )
    adapters = policy.model.adapters if sharded is None else policy.model.described_adapters
    publisher = None

    def rest(*, is_new: bool = False) -> None:
        for trained in (policy, critic) if config.is_colocated else ():
            if trained is not None:
                trained.optimizer.give_back(is_new=is_new)
        if config.is_colocated:
            give_back_freed()

    rest(is_new=not first)

    if replicas.rank == 0:
        publisher = Publisher(
            policy.model.tensors if sharded is None else sharded.described,
            tied_names=policy.model.tied_names,
            run_folder=run_folder,
            deadline_s=config.trainer.silent_after_s,
            address=config.weights.address,
            sends_deltas=config.weights.delta,
            for_devices=replicas.device.type != "cpu",
            write=None if sharded is None else sharded.lead,
            shards=None if sharded is None else sharded.sender,
            adapters=adapters if config.lora.rank else None,
            in_place=config.is_colocated,
            move=move if sharded is None else None,
            training_bytes=rank_bytes(config, read_weights(config.model.path), method=method_of(config)),
        )

    def checkpoint(version: int, commit: str) -> None:
        num_samples, samples = sample_digest.whole(
            lambda sums: replicas.sum(sums, what=f"to count the samples of version {version}"), device=replicas.device
        )
        checkpoints.begin(version, commit=commit, num_samples=num_samples, samples=samples)

    with contextlib.ExitStack() as at_end:
        at_end.callback(replicas.close)
        journal = at_end.enter_context(contextlib.closing(Journal(run_folder, f"trainer-{replicas.rank}")))
        startup.write(journal)
        if publisher is not None:
            at_end.callback(publisher.close)
        if sharded is not None:
            at_end.callback(sharded.close)
        client = None
        if replicas.is_leader:
            ready = TrainerReady(
                replica=replicas.number,
                num_replicas=layout.replicas,
                process_id=os.getpid(),
                version=first,
                commit=commit,
                saved=first,
                saved_commit=commit,
                suspects=interrupted_rows(run_folder) if replicas.rank == 0 else (),
                oldest=checkpoints.oldest,
                damaged=tuple(one for one in checkpoints.damaged if one.version > first),
                machine=machine_id(),
                transports=device_transports(),
            )
            deadline_s = config.trainer.ready_deadline_s
            client = OrchestratorClient(
                lambda: ZmqLink(run_folder, "trainer", replicas.number, accepts=ToTrainer, deadline_s=deadline_s),
                ready=ready,
                num_steps=config.trainer.steps,
                silent_after_s=config.trainer.silent_after_s,
                publisher=publisher,
            )
            at_end.enter_context(client)
        in_progress = RowsInProgress(run_folder, rank=replicas.rank, replica=replicas.number, num_replicas=layout.replicas)

        def lay_out(batch: MicroBatch) -> PackedRow | None:
            with in_progress(batch):
                return steps.own.lay_out(batch)

        loader = at_end.enter_context(RowLoader(client, replicas=replicas, lay_out=lay_out, split=steps.split))
        send = client.send if client is not None and publisher is not None else lambda message: None
        loop = Loop(
            loader=loader,
            steps=steps,
            async_publisher=at_end.enter_context(
                AsyncPublisher(publisher, sharded=sharded, send=send, timeline=timeline_of(replicas.device))
            ),
            send=send,
            timer=StepTimer(journal, loader=loader),
            sample_digest=sample_digest,
            in_progress=in_progress,
            checkpoint=checkpoint,
            take_news=checkpoints.take_news,
            wait_for_checkpoint=checkpoints.wait,
            checkpoint_every=config.checkpoint.every,
            publishes_first=config.is_colocated,
            rest=rest,
        )
        version = loop.run(first, config.trainer.steps)
        checkpoints.wait()
        fence()
        save_model(policy.model, run_folder / "model", source=config.model.path, stop_token_ids=config.rollout.stop_token_ids)
        if (adapters := adapters_of(config)) is not None:
            save_adapter(policy.model, run_folder / "adapter", adapters=adapters, source=config.model.path)
        if critic is not None:
            save_model(critic.model, run_folder / "critic", source=config.model.path)
        loop.tell_news()
        send(TrainingEnded(version=version))
        # Engines may still have to attach the last policy: its buffer stays until the orchestrator says that the run is over.
        loader.wait_for_stop(config.trainer.silent_after_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Loop:
    """The training loop and what it drives."""

    loader: RowLoader
    steps: Steps
    async_publisher: AsyncPublisher
    send: Callable[[StepDone | LogprobsComputed | CheckpointSaved | CheckpointFailed | TrainingEnded], None]
    """Sends to the orchestrator where this rank publishes; elsewhere it does nothing."""
    timer: StepTimer
    sample_digest: SampleDigest
    in_progress: RowsInProgress
    checkpoint: Callable[[int, str], None]
    """Begins to write a version, which the ledger knows by its commit."""
    take_news: Callable[[], Sequence[CheckpointSaved | CheckpointFailed]]
    wait_for_checkpoint: Callable[[], None]
    """Waits until what was begun is written, or has failed."""
    checkpoint_every: int
    """Steps."""
    publishes_first: bool = False
    """Publish also the policy that engines have loaded themselves: those that are asleep have it no more."""
    rest: Callable[[], None] = lambda: None
    """Gives memory back that the next step takes again: engines are about to need it."""

    def run(self, first: int, num_steps: int) -> int:
        """Train step after step, and publish a policy after each; end after the last, or once told to, all ranks alike.

        Returns the last version.
        """
        if first or self.publishes_first:
            self.async_publisher.begin(first)  # no engine can have it: who starts here is not who trained it
        commit, version = "", first
        saved = first
        for number in range(first, num_steps):
            while isinstance(sealed := self._add_rows(), Command):
                if isinstance(sealed, ComputeLogprobs):
                    with self.timer("logprobs"):
                        self.send(compute_logprobs(sealed, steps=self.steps))
                    continue
                with self.timer("checkpoint"):
                    if commit and saved < number:
                        self.checkpoint(number, commit)
                        saved = number
                    self.wait_for_checkpoint()
                self.tell_news()  # somebody waits for it
            if sealed is None:
                if commit and saved < number:
                    self.checkpoint(number, commit)
                break
            with self.timer("publish"):
                self.async_publisher.wait()
            step = self.steps.sealed(sealed)
            with self.timer("forward_backward"):
                step.train_held(sealed)
            with self.timer("optimizer"):
                metrics = step.finish(sealed)
            self.sample_digest.finish_step()
            commit = sealed.commit
            version = number + 1
            is_due = version % self.checkpoint_every == 0 or version == num_steps
            self._finish_step(number, metrics, step=step, is_due=is_due, commit=commit)
            saved = version if is_due else saved
        self.async_publisher.wait(is_last=True)
        return version

    def tell_news(self) -> None:
        """Tell what became of checkpoints."""
        for news in self.take_news():
            if isinstance(news, CheckpointFailed):
                with contextlib.suppress(OSError):  # the log may lie on the same full disk
                    print(news.error, file=sys.stderr, flush=True)
            self.send(news)

    def _finish_step(self, number: int, metrics: dict[str, float], *, step: TrainedStep, is_due: bool, commit: str) -> None:
        """Publish before a checkpoint: engines wait for the one, and nobody for the other. Both count among the next step's seconds."""
        seconds = self.timer.finish_step(num_tokens=metrics["num_tokens"]) | self.async_publisher.take_metrics()
        self.send(StepDone(step=number, metrics=metrics | seconds, engines=step.engines))
        with self.timer("publish"):
            self.async_publisher.begin(number + 1)
            self.rest()  # while a thread takes digests
        if is_due:
            with self.timer("checkpoint"):
                self.checkpoint(number + 1, commit)
        self.tell_news()

    def _add_rows(self) -> StepClosed | Command | None:
        """Train on rows as they come until the step is sealed, or, before its first row, until a command comes; None where told to stop."""
        while True:
            with self.timer("wait"):
                loaded = self.loader.take()
            match loaded:
                case LoadedRow():
                    with self.timer("forward_backward"), self.in_progress(loaded.batch):
                        for part in loaded.parts:
                            self.steps.of(part.batch.loss).add(part.batch, part.row, has_gradient=part.has_gradient)
                    self.sample_digest.add(loaded.batch)
                case StepClosed() | SaveCheckpoint() | ComputeLogprobs():
                    return loaded
                case Stop():
                    return None
