"""`serve`: carry out what clients ask for, one request after the other, until told to stop."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from pathlib import Path

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.errors import CheckpointDamaged, DataError, PipelineError
from pipelinerl.messages import (
    CloseModel,
    ForwardBackward,
    LoadModel,
    Message,
    OpenModel,
    OptimizerStep,
    OptimizerStepDone,
    PublishModel,
    RequestDone,
    RequestFailed,
    SaveModel,
    ServingTrainerReady,
    Stop,
    ToServingTrainer,
)
from pipelinerl.observe.journal import Journal
from pipelinerl.planning.memory import rank_bytes, read_weights
from pipelinerl.runtime import startup
from pipelinerl.runtime.machine import machine_id
from pipelinerl.transport.zmq import ZmqLink
from pipelinerl.weights.transports import device_transports
from trainer.backend import Backend, Outputs
from trainer.build import Trained, build_served
from trainer.optimizer import AdamSettings
from trainer.parallel.replicas import Replicas
from trainer.serving.connection import Connection
from trainer.serving.models import Models
from trainer.serving.passes import Passes
from trainer.weights.publisher import Publisher


def serve(config: Config, run_folder: Path, *, fence: Callable[[], None] = lambda: None) -> None:
    """Load the model, say so, and carry out requests until told to stop. Nothing is saved but what a client asks to save.

    `fence` is called before anything lasting is written; see `pipelinerl.runtime.lease`.
    """
    replicas = Replicas(ranks=config.trainer.ranks, deadline_s=config.trainer.silent_after_s, layout=config.trainer.layout)
    trained = build_served(config, replicas=replicas)
    publisher = Publisher(
        trained.model.tensors,
        tied_names=trained.model.tied_names,
        run_folder=run_folder,
        deadline_s=config.trainer.silent_after_s,
        address=config.weights.address,
        adapters=trained.model.adapters if config.lora.rank else None,
        training_bytes=rank_bytes(config, read_weights(config.model.path), method=method_of(config)),
    )
    with contextlib.ExitStack() as at_end:
        at_end.callback(replicas.close)
        startup.write(at_end.enter_context(contextlib.closing(Journal(run_folder, "trainer-0"))))
        at_end.callback(publisher.close)
        deadline_s = config.trainer.ready_deadline_s
        connection = at_end.enter_context(
            Connection(
                lambda: ZmqLink(run_folder, "trainer", 0, accepts=ToServingTrainer, deadline_s=deadline_s),
                ready=lambda: ServingTrainerReady(
                    process_id=os.getpid(), version=publisher.newest, machine=machine_id(), transports=device_transports()
                ),
                publisher=publisher,
            )
        )
        server = ModelServer(trained, replicas=replicas, publisher=publisher, config=config, fence=fence)
        while not isinstance(request := connection.take(), Stop):
            if request is None:
                server.forget_models()
                continue
            connection.busy_with = type(request).__name__
            if (answer := server.answer(request)) is not None:
                connection.answer(answer)
            connection.busy_with = "waiting for requests"


class ModelServer:
    """Carries out requests: what a client did wrong, and what a disk refuses, is its answer; any other error ends the process."""

    def __init__(
        self,
        trained: Trained,
        *,
        replicas: Replicas,
        publisher: Publisher,
        config: Config,
        fence: Callable[[], None] = lambda: None,
    ) -> None:
        read = functools.partial(Outputs.of, extras=trained.model.extras)
        self._backend = Backend(trained.model, optimizer=trained.optimizer, replicas=replicas, read=read)
        self._optimizer = trained.optimizer
        self._models = Models(trained, base=config.model.path)
        self._passes = Passes(
            backend=self._backend, device=replicas.device, max_row_tokens=config.batch.max_tokens, num_words=trained.model.num_words
        )
        self._publisher = publisher
        self._seed = config.run.seed
        self._fence = fence

    def forget_models(self) -> None:
        """Forget every model."""
        self._models.forget()

    def answer(self, request: Message) -> Message | None:
        """Carry out a request; None where it has no answer."""
        if isinstance(request, CloseModel):
            self._models.close(request.model_id)
            return None
        request_id: int = getattr(request, "request_id")  # noqa: B009  # every other request has one
        try:
            return self._carry_out(request) or RequestDone(request_id=request_id)
        except (DataError, CheckpointDamaged) as error:
            return RequestFailed(request_id=request_id, error=str(error), is_asker_wrong=True)
        except (PipelineError, OSError) as error:
            return RequestFailed(request_id=request_id, error=f"{type(error).__name__}: {error}", is_asker_wrong=False)

    def _carry_out(self, request: Message) -> Message | None:
        match request:
            case OpenModel():
                self._models.open(request.model_id, seed=self._seed if request.seed is None else request.seed)
            case ForwardBackward():
                self._models.use(request.model_id)
                return self._passes.run(request)
            case OptimizerStep():
                return self._step(request)
            case SaveModel():
                self._fence()
                self._models.save(request)
            case LoadModel():
                self._models.load(request.model_id, Path(request.folder), has_optimizer=request.has_optimizer)
            case PublishModel():
                return self._publish(request)
            case _:
                raise TypeError(f"a serving trainer does not take {type(request).__name__}")
        return None

    def _step(self, request: OptimizerStep) -> OptimizerStepDone:
        self._models.use(request.model_id)
        self._optimizer.use(
            AdamSettings(
                learning_rate=request.learning_rate,
                betas=(request.beta1, request.beta2),
                eps=request.eps,
                weight_decay=request.weight_decay,
                max_grad_norm=request.max_grad_norm or float("inf"),
            )
        )
        try:
            update = self._backend.update(0, denominator=1.0)
        except PipelineError as error:  # a gradient that is not finite: the weights are as they were
            self._backend.drop()
            raise DataError(f"{error}. What was collected is dropped, and the weights are as they were") from None
        return OptimizerStepDone(request_id=request.request_id, grad_norm=update.grad_norm, learning_rate=update.learning_rate)

    def _publish(self, request: PublishModel) -> Message | None:
        """The announcement, which is the answer; None once the run ends."""
        if request.model_id:
            self._models.use(request.model_id)
            return self._publisher.publish(request.version)
        with self._models.showing(Path(request.folder) if request.folder else None):
            return self._publisher.publish(request.version)
