"""The training loop: rows in, policies out. `train` builds its parts, `run_steps` is the loop."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.layout import check_layout
from pipelinerl.messages import PolicyPublished, StepDone, StepSealed, Stop, ToTrainer, TrainerReady
from pipelinerl.metrics import Journal
from pipelinerl.transport.zmq import ZmqLink
from trainer.checkpoint import save_model
from trainer.feed import Feed
from trainer.model import Model, Weights
from trainer.optimizer import Optimizer, Schedule
from trainer.parallel import Replicas
from trainer.phases import Phases
from trainer.publish import Publisher
from trainer.step import Step
from trainer.torch_engine import TorchEngine
from trainer.waves import Waves

MAX_LOGPROB_GAP = {"float32": 1e-4, "bfloat16": 0.5}
"""Default of `trainer.max_logprob_gap`, by dtype: several times what rounding alone does; smaller would end healthy runs."""


def train(config: Config, run_folder: Path) -> None:
    """Train until the last step, or until told to stop; either way `<run>/model` then holds the last policy."""
    layout = config.trainer.layout
    check_layout(layout, config.model.path)
    replicas = Replicas(ranks=config.trainer.ranks, deadline_s=config.trainer.silent_after_s, layout=layout)
    model = Model(
        config.model.path,
        dtype=config.model.dtype,
        temperature=config.rollout.temperature,
        device=replicas.device,
        replicas=replicas,
        recomputes=config.trainer.recompute,
        has_float32_head=config.trainer.float32_head,
    )
    step = _make_step(config, model=model, replicas=replicas)
    weights = Weights(model, is_wanted=replicas.rank == 0)
    publisher = None
    if replicas.rank == 0:
        publisher = Publisher(
            weights.present, tied_names=model.tied_names(), run_folder=run_folder, deadline_s=config.trainer.silent_after_s
        )

    def save() -> None:
        save_model(model, run_folder / "model", source=config.model.path)

    with contextlib.ExitStack() as at_end:
        at_end.callback(replicas.close)
        journal = at_end.enter_context(contextlib.closing(Journal(run_folder, f"trainer-{replicas.rank}")))
        if publisher is not None:
            at_end.callback(publisher.close)
        feed = None
        if replicas.is_leader:
            feed = at_end.enter_context(_make_feed(config, run_folder, replicas=replicas, publisher=publisher))
        waves = at_end.enter_context(Waves(feed, replicas=replicas, lay_out=step.lay_out))
        run_steps(
            config.trainer.steps,
            waves=waves,
            step=step,
            weights=weights,
            publisher=publisher,
            send=feed.send if feed is not None and publisher is not None else lambda message: None,
            phases=Phases(journal, waves=waves),
            save=save,
        )
        # Engines may still have to attach the last policy: its buffer stays until the orchestrator says that the run is over.
        waves.wait_for_stop(config.trainer.silent_after_s)


def run_steps(
    num_steps: int,
    *,
    waves: Waves,
    step: Step,
    weights: Weights,
    publisher: Publisher | None,
    send: Callable[[StepDone | PolicyPublished], None],
    phases: Phases,
    save: Callable[[], None],
) -> None:
    """Train step after step, and publish a policy after each; end after the last, or once told to stop, all ranks after the same row."""
    for number in range(num_steps):
        sealed = _add_rows(waves=waves, step=step, phases=phases)
        if sealed is None:
            break
        with phases("optimizer"):
            metrics = step.finish(sealed)
        policy = None
        with phases("publish"):
            weights.gather()
            if publisher is not None:
                policy = publisher.publish(number + 1)
        if number + 1 == num_steps:
            save()
        send(StepDone(step=number, metrics=metrics | phases.finish_step(num_tokens=metrics["num_tokens"])))
        if policy is not None:
            send(policy)
    else:
        return
    save()


def _add_rows(*, waves: Waves, step: Step, phases: Phases) -> StepSealed | None:
    """Train on rows as they come until the step is sealed; None where told to stop before."""
    while True:
        with phases("wait"):
            wave = waves.take()
        match wave:
            case (batch, row):
                with phases("forward_backward"):
                    step.add(batch, row)
            case StepSealed():
                return wave
            case Stop():
                return None


def _make_feed(config: Config, run_folder: Path, *, replicas: Replicas, publisher: Publisher | None) -> Feed:
    return Feed(
        lambda: ZmqLink(run_folder, "trainer", replicas.number, accepts=ToTrainer, deadline_s=config.trainer.ready_deadline_s),
        ready=TrainerReady(replica=replicas.number, num_replicas=replicas.layout.replicas, process_id=os.getpid(), version=0),
        num_steps=config.trainer.steps,
        silent_after_s=config.trainer.silent_after_s,
        publisher=publisher,
    )


def _make_step(config: Config, *, model: Model, replicas: Replicas) -> Step:
    section = config.trainer
    optimizer = Optimizer(
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
        holdings=model.holdings,
        replicas=replicas,
    )
    method = method_of(config.algorithm, group_size=config.rollout.group_size)
    return Step(
        TorchEngine(model, optimizer=optimizer, replicas=replicas),
        method=method,
        replicas=replicas,
        max_completion_tokens=config.rollout.max_tokens,
        max_logprob_gap=section.max_logprob_gap or MAX_LOGPROB_GAP[config.model.dtype],
    )
