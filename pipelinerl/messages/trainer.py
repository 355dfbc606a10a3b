"""Messages between the orchestrator and the trainer: rows to train on, steps, policies, checkpoints."""

from __future__ import annotations

from typing import Annotated

import msgspec

from pipelinerl.messages.base import Alive, Failed, Figures, Float32, Id, Int32, Mask, Message, Stop, Text, check_lengths
from pipelinerl.messages.engine import Routes, Tensor, Transports


class Damage(msgspec.Struct, frozen=True):
    """A checkpoint that proved not to be as it was written, and was set aside."""

    version: int
    reason: Text
    """The file, what was found in it, and what was expected."""


class TrainerReady(Message, frozen=True):
    """A data-parallel replica of the trainer holds version `version` and pulls micro-batches from step `version` on."""

    replica: int
    num_replicas: int
    process_id: int
    version: int
    machine: Id = ""
    """See `EngineReady`."""
    transports: Transports = ()
    """See `EngineReady`."""
    commit: Id = ""
    """The ledger's, under which the last step in these weights was sealed; empty where it started from `model.path`."""
    saved: int | None = None
    """Version of its newest checkpoint; None: this one. A trainer that outlives the orchestrator holds steps that no checkpoint does."""
    saved_commit: Id = ""
    """The commit that a checkpoint of version `saved` names."""
    oldest: int | None = None
    """The same as in `CheckpointSaved`, for version `saved`."""
    damaged: Annotated[tuple[Damage, ...], msgspec.Meta(max_length=1 << 10)] = ()
    """Checkpoints, newer than this one, that could not be used."""
    suspects: Annotated[tuple[Id, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Rows, each as `step/row`, that the trainer before this one was working on when it died."""


class LayoutFixed(Message, frozen=True):
    """Tell the trainer the layout every engine asked for; sent before its first publication."""

    tensors: Annotated[tuple[Tensor, ...], msgspec.Meta(max_length=1 << 20)]
    num_engines: int = 1
    """Engines that may read different policies at once."""
    transport: Id = "shared_memory"
    """The transport of policies: shared_memory, cuda_ipc, files, gloo or nccl."""
    rollback_epoch: int = 0
    """The newest that an engine may know of, see `StageWeights`: a trainer that starts again goes on in it."""


class TakeMicroBatch(Message, frozen=True):
    """Pull the next row of a step, or its seal."""

    replica: int
    step: int
    index: int
    """0-based position within the step; asking again for the same one is harmless."""


class MicroBatch(Message, frozen=True):
    """One packed row for one data-parallel replica: samples laid end to end."""

    step: int
    index: int
    token_ids: Int32
    """[R] int32."""
    loss_mask: Mask
    """[R] bool, true where the token enters the loss."""
    logprobs: Float32
    """[R] float32, natural log under the engine; 0.0 where `loss_mask` is false."""
    versions: Int32
    """[R] int32, `UNSAMPLED` where `loss_mask` is false."""
    advantages: Float32
    """[R] float32."""
    lengths: Int32
    """[N] int32, tokens of each sample in order; sums to R. Empty for a zero-loss row."""
    rollout_ids: Annotated[tuple[Id, ...], msgspec.Meta(max_length=1 << 20)]
    """[N], for error messages."""
    rewards: Float32 | None = None
    """[N] float32, for rules that read which samples are correct; None only where nobody scored them."""
    truncated: Mask | None = None
    """[N] bool, true where the completion reached its longest length; None only where no engine made the samples."""
    group_ids: Int32 | None = None
    """[N] int32, equal for siblings, for advantages that the trainer makes; None only where nobody grouped the samples."""
    weights: Float32 | None = None
    """[N] float32, `Sample.weight`; None: all 1."""
    engine_ids: Int32 | None = None
    """[N] int32, which engine sampled it, in an episode its last turn; -1 where that is not known. None: of none."""
    teacher_ids: Int32 | None = None
    """[N] int32, which of `reference.teachers`, in their order, judges it; None in a run without them."""
    routes: Routes | None = None
    """[R] rows; None where nothing is known of any token."""

    def __post_init__(self) -> None:
        name = f"MicroBatch {self.step}/{self.index}"
        check_lengths(self, "token_ids", "loss_mask", "logprobs", "versions", "advantages")
        if int(self.lengths.sum()) != len(self.token_ids) or len(self.lengths) != len(self.rollout_ids):
            raise ValueError(
                f"{name}: lengths {self.lengths.tolist()} must sum to {len(self.token_ids)} tokens and name {len(self.rollout_ids)} samples"
            )
        if self.routes is not None and self.routes.num_rows != len(self.token_ids):
            raise ValueError(f"{name}: routes of {self.routes.num_rows} tokens, expected {len(self.token_ids)}")
        for column in (self.rewards, self.truncated, self.group_ids, self.weights, self.engine_ids, self.teacher_ids):
            if column is not None and len(column) != len(self.lengths):
                raise ValueError(f"{name}: a column of {len(column)} entries for {len(self.lengths)} samples; expected one for each")


class StepClosed(Message, frozen=True):
    """A step is whole: how many micro-batches it has and what its sums are divided by."""

    step: int
    num_micro_batches: int
    """Per replica."""
    num_tokens: int
    """Tokens with a loss, over all replicas, counted before any rejection."""
    num_samples: int
    """Samples over all replicas, and rollouts that were stopped early: as many as were started and have not failed."""
    commit: Id = ""
    """The ledger's commit that holds every row of this step and of those before; a checkpoint of the next version names it."""


class EngineMismatch(Message, frozen=True):
    """The distance of an engine's log-probabilities from the trainer's, over the tokens of it that a step trained."""

    engine_id: int
    num_sequences: int
    num_tokens: int
    kl_sum: float
    """Sum of k3 over its tokens, nats: its mean is an estimate of KL(engine || trainer)."""


class StepDone(Message, frozen=True):
    """The trainer has applied the optimizer step; `step` samples are trained."""

    step: int
    metrics: Figures
    """Loss, grad norm, meters of the objective, seconds per phase."""
    engines: Annotated[tuple[EngineMismatch, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """One for each engine that sampled something of the step."""


class PolicyPublished(Message, frozen=True):
    """A new policy lies in a weight buffer, whole."""

    version: int
    buffer: Id
    digest: Id
    """See `StageWeights`."""
    num_bytes: int
    """That travel."""
    publish_s: float
    """Seconds the trainer spent writing it."""
    rollback_epoch: int = 0
    """See `StageWeights`: 0 until the trainer rolls back."""


class WeightBufferReleased(Message, frozen=True):
    """No engine reads this weight buffer any more; the trainer may write it again."""

    buffer: Id


class PolicyHeld(Message, frozen=True):
    """Every engine samples under this policy or a later one: changes may be laid over it."""

    version: int | None
    """None: some engine needs a whole policy, because it refused one or lost what it held."""
    rollback_epoch: int = 0
    """Of that version, see `StageWeights`."""


class CheckpointSaved(Message, frozen=True):
    """A checkpoint of `version` is whole on disk: a trainer that starts again starts from it."""

    version: int
    commit: Id
    """The ledger's commit that its manifest names."""
    num_bytes: int
    save_s: float
    """Seconds from its begin to its last byte on disk; training went on meanwhile."""
    oldest: int | None = None
    """Oldest version that a trainer may still start from (0: the model the run began with): rows from its step on must stay. None: this
    one."""


class CheckpointFailed(Message, frozen=True):
    """A checkpoint could not be written; the one before is untouched."""

    version: int
    error: Text


class EndTraining(Message, frozen=True):
    """Tell the trainer to train no further: it saves and publishes what it has, says `TrainingEnded`, and waits for `Stop`."""

    reason: Text


class TrainingEnded(Message, frozen=True):
    """The trainer trains no further; all it had to say of its steps, policies and checkpoints came before."""

    version: int
    """Its last policy."""


FromTrainer = (
    TrainerReady | TakeMicroBatch | StepDone | PolicyPublished | CheckpointSaved | CheckpointFailed | TrainingEnded | Alive | Failed
)
ToTrainer = LayoutFixed | MicroBatch | StepClosed | WeightBufferReleased | PolicyHeld | EndTraining | Stop
