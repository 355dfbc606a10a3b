"""Messages between the server of outside training loops (`orchestrator.serving`) and the trainer: what a client asks for, one by one.

Requests are carried out in the order in which they were sent, and each is answered once, by its `request_id`. A *model* is what one client
trains: weights, or an adapter over those of `model.path`, the moments of its optimizer, and the gradient collected since its last step.

Legend: `N` data, `R` positions of all data end to end.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from pipelinerl.messages.base import Alive, Failed, Figures, Float32, Id, Int32, Mask, Message, Stop, Text, check_lengths
from pipelinerl.messages.engine import Transports
from pipelinerl.messages.trainer import LayoutFixed, PolicyPublished, WeightBufferReleased

Columns = Annotated[dict[Id, Float32], msgspec.Meta(max_length=64)]


class ServingTrainerReady(Message, frozen=True):
    """A trainer takes requests. It holds no model: those of a trainer, or for a server, before it are gone."""

    process_id: int
    version: int = 0
    """The newest version that it has published."""
    machine: Id = ""
    """See `EngineReady`."""
    transports: Transports = ()


class OpenModel(Message, frozen=True):
    """Begin a model: the weights of `model.path`, or a fresh adapter over them."""

    request_id: int
    model_id: Id
    seed: int | None = None
    """The seed of a fresh adapter; None: the run's."""


class CloseModel(Message, frozen=True):
    """Forget a model. Not answered."""

    model_id: Id


class ForwardBackward(Message, frozen=True):
    """Add the gradient of a loss over some data, not divided by anything, to what a model has collected."""

    request_id: int
    model_id: Id
    loss: Id
    options: Figures
    token_ids: Int32
    """[R] int32, what the model reads."""
    targets: Int32
    """[R] int32, the token whose log-probability is taken behind each."""
    wanted: Mask
    """[R] bool, true where that is computed; elsewhere the answer holds 0.0."""
    lengths: Int32
    """[N] int32, positions of each datum; they sum to R."""
    columns: Columns
    """[R] float32 each, what the loss reads by name: weights, advantages, ..."""
    is_forward_only: bool = False
    """True computes the loss and adds no gradient."""

    def __post_init__(self) -> None:
        check_lengths(self, "token_ids", "targets", "wanted")
        if int(self.lengths.sum()) != len(self.token_ids) or (len(self.lengths) and self.lengths.min() < 1):
            raise ValueError(f"ForwardBackward: lengths {self.lengths.tolist()}, expected positive ones that sum to {len(self.token_ids)}")
        for name, column in self.columns.items():
            if len(column) != len(self.token_ids):
                raise ValueError(f"ForwardBackward: column {name} has {len(column)} entries, expected {len(self.token_ids)}")


class OptimizerStep(Message, frozen=True):
    """Apply the gradient that a model has collected, as AdamW does, and collect anew."""

    request_id: int
    model_id: Id
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    max_grad_norm: float
    """0 does not clip."""


class SaveModel(Message, frozen=True):
    """Write a model to a folder, whole or not at all."""

    request_id: int
    model_id: Id
    folder: Id
    has_optimizer: bool
    """False leaves the optimizer's moments out: the weights are to be sampled from."""
    may_replace: bool = False
    has_gradient: bool = False
    """True: with the gradient collected since its last step, if there is any, so that nothing before this has to be asked for again."""
    save_id: Id = ""
    """Where the folder was written under the same name, the model is saved already; empty: under none."""


class LoadModel(Message, frozen=True):
    """Give a model, which is begun where there is none, what a folder holds."""

    request_id: int
    model_id: Id
    folder: Id
    has_optimizer: bool
    """False begins the optimizer anew; True brings the gradient, too, where the folder holds one."""


class PublishModel(Message, frozen=True):
    """Publish weights to the engines as a version: those of a model, or of a saved one's folder, or, of neither, those all begin with."""

    request_id: int
    version: int
    model_id: Id = ""
    folder: Id = ""


class ForwardBackwardDone(Message, frozen=True):
    """The answer to `ForwardBackward`."""

    request_id: int
    logprobs: Float32
    """[R] float32, natural log, at temperature 1; 0.0 where none was wanted."""
    loss: float
    """The sum over all data."""
    num_computed: int
    """Tokens that went through the model: what several data begin with alike counts once."""


class OptimizerStepDone(Message, frozen=True):
    """The answer to `OptimizerStep`."""

    request_id: int
    grad_norm: float
    """Before clipping."""
    learning_rate: float


class RequestDone(Message, frozen=True):
    """The answer to a request that has nothing to say but that it was carried out."""

    request_id: int


class RequestFailed(Message, frozen=True):
    """The answer to a request that was not carried out; the model is as it was."""

    request_id: int
    error: Text
    is_asker_wrong: bool
    """True where the same request would fail again."""


TrainingRequest = OpenModel | ForwardBackward | OptimizerStep | SaveModel | LoadModel | PublishModel
TrainingAnswer = ForwardBackwardDone | OptimizerStepDone | RequestDone | RequestFailed
FromServingTrainer = (
    ServingTrainerReady | ForwardBackwardDone | OptimizerStepDone | RequestDone | RequestFailed | PolicyPublished | Alive | Failed
)
ToServingTrainer = (
    LayoutFixed
    | WeightBufferReleased
    | OpenModel
    | CloseModel
    | ForwardBackward
    | OptimizerStep
    | SaveModel
    | LoadModel
    | PublishModel
    | Stop
)
