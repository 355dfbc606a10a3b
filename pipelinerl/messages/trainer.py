"""Messages between the orchestrator and the trainer: rows to train on, steps, policies, checkpoints."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
import numpy as np

from pipelinerl.messages.base import Alive, Failed, Figures, Float32, Id, Images, Int32, Mask, Message, Nodes, Stop, Text, check_lengths
from pipelinerl.messages.engine import Routes, Shards, Tensor, Transports


class Damage(msgspec.Struct, frozen=True):
    """A checkpoint that was found damaged when it was read, and was set aside."""

    version: int
    reason: Text
    """Text that names the file, what was found in it, and what was expected."""


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
    """The ledger's commit that closed the last step in these weights; empty where the trainer started from `model.path`."""
    saved: int | None = None
    """Version of its newest checkpoint; None means `version`. A trainer that outlives the orchestrator holds steps that no checkpoint
    holds."""
    saved_commit: Id = ""
    """The ledger's commit that the checkpoint of version `saved` names."""
    oldest: int | None = None
    """The same as in `CheckpointSaved`, for version `saved`."""
    damaged: Annotated[tuple[Damage, ...], msgspec.Meta(max_length=1 << 10)] = ()
    """Checkpoints, newer than this one, that could not be used."""
    suspects: Annotated[tuple[Id, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Rows, each as `step/row`, that the trainer before this one was working on when it died."""


class LayoutFixed(Message, frozen=True):
    """Tell the trainer the layout that every engine asked for; sent before its first publication."""

    tensors: Annotated[tuple[Tensor, ...], msgspec.Meta(max_length=1 << 20)]
    num_engines: int = 1
    """Number of engines that may read different policies at once."""
    transport: Id = "shared_memory"
    """The weight transport: shared_memory, cuda_ipc, files, gloo, nccl, sharded+gloo or sharded+nccl."""
    shards: Shards = ()
    """What each rank of an engine holds, where policies travel from shard to shard; empty: one rank holds everything."""
    rollback_epoch: int = 0
    """The newest rollback epoch that an engine may know, see `StageWeights`; a trainer that starts again continues in it."""
    num_apart: int = 0
    """Number of engines with devices of their own, which read copies of policies, where others take turns with the trainer."""


class TakeMicroBatch(Message, frozen=True):
    """Ask for the next row of a step, or for the `StepClosed` that ends it."""

    replica: int
    step: int
    index: int
    """Position within the step, from 0; asking again for the same position is harmless."""


class MicroBatch(Message, frozen=True):
    """One packed row for one data-parallel replica: samples laid end to end."""

    step: int
    index: int
    token_ids: Int32
    """[R] int32."""
    loss_mask: Mask
    """[R] bool, true where the token enters the loss."""
    logprobs: Float32
    """[R] float32, natural log as the engine computed it; 0.0 where `loss_mask` is false."""
    versions: Int32
    """[R] int32; `UNSAMPLED` where `loss_mask` is false."""
    advantages: Float32
    """[R] float32."""
    lengths: Int32
    """[N] int32, number of tokens of each sample in order; they sum to R. Empty for a zero-loss row."""
    rollout_ids: Annotated[tuple[Id, ...], msgspec.Meta(max_length=1 << 20)]
    """[N], for error messages."""
    rewards: Float32 | None = None
    """[N] float32, for rules that read which samples are correct; None only where the samples were not scored."""
    truncated: Mask | None = None
    """[N] bool, true where the completion reached the maximum length; None only where no engine made the samples."""
    group_ids: Int32 | None = None
    """[N] int32, equal for siblings, for advantages that the trainer computes; None only where the samples have no groups."""
    weights: Float32 | None = None
    """[N] float32, `Sample.weight`; None means that all are 1."""
    engine_ids: Int32 | None = None
    """[N] int32, the engine that sampled it, in an episode its last turn; -1 where it is not known. None where no sample's is known."""
    teacher_ids: Int32 | None = None
    """[N] int32, index into `reference.teachers` of the teacher that judges it; None in a run without teachers."""
    routes: Routes | None = None
    """[R] rows; None where no token's experts are known."""
    nodes: Nodes | None = None
    """Nodes of all samples in order, a whole one as one node; None where no sample branches."""
    loss: Id = ""
    """The method whose loss the step has; empty for the run's own."""
    images: Images = ()
    """The images of all samples, each once."""
    images_of: Annotated[tuple[tuple[int, ...], ...], msgspec.Meta(max_length=1 << 20)] = ()
    """[N] which of `images` each sample's prompt has, in order; empty where none has any."""

    def __post_init__(self) -> None:
        name = f"MicroBatch {self.step}/{self.index}"
        check_lengths(self, "token_ids", "loss_mask", "logprobs", "versions", "advantages")
        if int(self.lengths.sum()) != len(self.token_ids) or len(self.lengths) != len(self.rollout_ids):
            raise ValueError(
                f"{name}: lengths {self.lengths.tolist()} must sum to {len(self.token_ids)} tokens and name {len(self.rollout_ids)} samples"
            )
        if self.routes is not None and self.routes.num_rows != len(self.token_ids):
            raise ValueError(f"{name}: routes of {self.routes.num_rows} tokens, expected {len(self.token_ids)}")
        if self.nodes is not None:
            self._check_nodes(self.nodes, name=name)
        named = {number for numbers in self.images_of for number in numbers}
        if len(self.images_of) not in (0, len(self.lengths)) or not named <= set(range(len(self.images))):
            raise ValueError(
                f"{name}: images_of {self.images_of}, expected numbers below {len(self.images)} for {len(self.lengths)} samples"
            )

    def _check_nodes(self, nodes: Nodes, *, name: str) -> None:
        sample_ends, node_ends = np.cumsum(self.lengths), np.cumsum(nodes.lengths)
        sample_of = np.searchsorted(sample_ends, node_ends)
        if int(nodes.lengths.sum()) != len(self.token_ids) or not np.isin(sample_ends, node_ends).all():
            raise ValueError(
                f"{name}: nodes of {nodes.lengths.tolist()} tokens, expected them to make up samples of {self.lengths.tolist()}"
            )
        if (sample_of[nodes.parents] != sample_of)[nodes.parents >= 0].any():
            raise ValueError(f"{name}: nodes with parents {nodes.parents.tolist()}, expected each in the sample of its parent")
        for column in (self.rewards, self.truncated, self.group_ids, self.weights, self.engine_ids, self.teacher_ids):
            if column is not None and len(column) != len(self.lengths):
                raise ValueError(f"{name}: a column of {len(column)} entries for {len(self.lengths)} samples; expected one for each")


class Demonstration(Message, frozen=True):
    """A prompt and what should follow it, for supervised fine-tuning."""

    token_ids: Int32
    """[L] int32, of prompt, completion and the token that ends it."""
    num_prompt: int
    """Tokens of the prompt, which have no loss."""
    images: Images = ()
    """Of the prompt, in the order of their placeholders."""

    def __post_init__(self) -> None:
        if not 0 < self.num_prompt < len(self.token_ids):
            raise ValueError(f"Demonstration: {self.num_prompt} of {len(self.token_ids)} tokens are the prompt's, expected some of each")

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        """Tokens with a loss: the completion's, and the one that ends it."""
        return self.num_tokens - self.num_prompt


class StepClosed(Message, frozen=True):
    """A step is complete: this says how many micro-batches it has and by which counts its sums are divided."""

    step: int
    num_micro_batches: int
    """Number of micro-batches for each replica."""
    num_tokens: int
    """Number of tokens with a loss, over all replicas, counted before any rejection."""
    num_samples: int
    """Number of samples over all replicas, plus rollouts that were stopped early: as many as were started and have not failed."""
    commit: Id = ""
    """The ledger's commit that holds every row of this step and of the steps before; a checkpoint of the next version names it."""
    loss: Id = ""
    """As in `MicroBatch`."""
    demonstrations: Annotated[tuple[Demonstration, ...], msgspec.Meta(max_length=1 << 20)] = ()
    """Those that a supervised step is made of, which has no micro-batch: every replica trains its share. Empty for any other step."""


class EngineMismatch(Message, frozen=True):
    """The distance of an engine's log-probabilities from the trainer's, over the tokens of a step that this engine sampled."""

    engine_id: int
    num_sequences: int
    num_tokens: int
    kl_sum: float
    """Sum of the k3 estimator over these tokens, in nats; its mean is an estimate of KL(engine || trainer)."""


class StepDone(Message, frozen=True):
    """The trainer has applied the optimizer step; the samples of `step` are trained."""

    step: int
    metrics: Figures
    """Loss, grad norm, meters of the objective, seconds per phase."""
    engines: Annotated[tuple[EngineMismatch, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """One entry for each engine that sampled tokens of the step."""


class PolicyPublished(Message, frozen=True):
    """A new policy is complete in a weight buffer."""

    version: int
    buffer: Id
    digest: Id
    """See `StageWeights`."""
    num_bytes: int
    """Number of bytes that engines fetch."""
    publish_s: float
    """Seconds that the trainer spent writing the policy."""
    rollback_epoch: int = 0
    """See `StageWeights`; 0 until the trainer rolls back."""
    copy: Id = ""
    """The weight buffer, of the same digest, for engines with devices of their own, where others read `buffer` in turns with the trainer.
    Empty where all engines read `buffer`.
    """


class WeightBufferReleased(Message, frozen=True):
    """No engine reads this weight buffer any more; the trainer may write it again."""

    buffer: Id


class PolicyHeld(Message, frozen=True):
    """Every engine samples under this policy or a later one, so it may be the delta base of further policies."""

    version: int | None
    """None where some engine needs a whole policy, because it refused one or lost the one it held."""
    rollback_epoch: int = 0
    """Rollback epoch of that version, see `StageWeights`."""


class SaveCheckpoint(Message, frozen=True):
    """Tell the trainer to write a checkpoint of its newest version before it goes on, whether or not one is due."""

    version: int


class LogprobModel(enum.StrEnum):
    """A model of the trainer that says how likely tokens are."""

    POLICY = "policy"
    """The newest policy, whether or not it is published."""
    REFERENCE = "reference"
    """The frozen model of `reference.path`, or each row's own of `reference.teachers`."""


class ComputeLogprobs(Message, frozen=True):
    """Ask the trainer how likely rows are to a model, before it goes on from the version that it has."""

    request_id: int
    model: LogprobModel
    rows: Annotated[tuple[MicroBatch, ...], msgspec.Meta(max_length=1 << 16)]
    """One for each replica, in order; fewer where the last replicas have none."""


class LogprobsComputed(Message, frozen=True):
    """The answer to `ComputeLogprobs`."""

    request_id: int
    logprobs: Float32
    """[K] float32, natural log at the temperature of `rollout.temperature`, of every token with a loss, row after row."""


class CheckpointSaved(Message, frozen=True):
    """A checkpoint of `version` is complete on disk; a trainer that starts again starts from it."""

    version: int
    commit: Id
    """The ledger's commit that its manifest names."""
    num_bytes: int
    save_s: float
    """Seconds from the beginning of the save to its last byte on disk; training went on meanwhile."""
    oldest: int | None = None
    """Oldest version that a trainer may still start from (0 is the model the run began with); rows from its step on must be kept. None
    means `version`."""


class CheckpointFailed(Message, frozen=True):
    """A checkpoint could not be written; the previous one is untouched."""

    version: int
    error: Text


class EndTraining(Message, frozen=True):
    """Tell the trainer to stop training: it saves and publishes what it has, sends `TrainingEnded`, and waits for `Stop`."""

    reason: Text


class TrainingEnded(Message, frozen=True):
    """The trainer has stopped training; all messages about its steps, policies and checkpoints came before this one."""

    version: int
    """The last policy that the trainer published."""


FromTrainer = (
    TrainerReady
    | TakeMicroBatch
    | StepDone
    | PolicyPublished
    | LogprobsComputed
    | CheckpointSaved
    | CheckpointFailed
    | TrainingEnded
    | Alive
    | Failed
)
Command = SaveCheckpoint | ComputeLogprobs
"""What the trainer does between two steps."""
ToTrainer = LayoutFixed | MicroBatch | StepClosed | Command | WeightBufferReleased | PolicyHeld | EndTraining | Stop
