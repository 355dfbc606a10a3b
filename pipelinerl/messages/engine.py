"""Messages between the orchestrator and inference engines: requests, completions, and the swap of weights."""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
import numpy as np

from pipelinerl.messages.base import Failed, Float32, Id, Images, Int32, Message, Starting, Stop, Text, UInt8, check_lengths

StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
"""A text that ends a completion."""


class Finish(enum.StrEnum):
    """Why an engine stopped a sequence."""

    STOP = "stop"
    """It sampled a stop token."""
    LENGTH = "length"
    """It reached `max_tokens` or the context length, so the text is truncated."""
    CANCELLED = "cancelled"
    """The orchestrator asked for it."""
    ERROR = "error"
    """The engine refused the request or failed, and `Completion.error` says why; or the environment of the episode failed."""
    NOT_HELD = "not held"
    """The request names a version that the engine does not hold, or not any more; nothing was sampled."""


class Sampling(Message, frozen=True):
    """The sampling parameters of one completion."""

    max_tokens: int
    temperature: float = 1.0
    """0.0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)] = ()
    """The tokens that end a completion; an engine adds the end-of-sequence tokens that it reads in the model's folder."""
    stop: Annotated[tuple[StopText, ...], msgspec.Meta(max_length=64)] = ()
    """Texts that end a completion: it ends with the token that completes one of them, and the text stays in it."""
    seed: int | None = None
    """None means that the engine's own generator is used."""
    ignores_ends: bool = False
    """True samples through the end-of-sequence tokens: only `stop_token_ids` and `stop` end the completion."""
    has_prompt_logprobs: bool = False
    """True asks for the log-probabilities of the prompt's own tokens, too."""
    structured_outputs: Annotated[tuple[dict[str, Any], ...], msgspec.Meta(max_length=64)] = ()
    """Constraints of this turn and of those that follow it (`rollout.structured_outputs`): an engine holds to the first."""

    def of_turn(self, number: int) -> Sampling:
        """Return the parameters of a conversation's turn of this number, from 0; the last constraint is that of all further turns."""
        if not self.structured_outputs:
            return self
        return msgspec.structs.replace(self, structured_outputs=self.structured_outputs[number:] or self.structured_outputs[-1:])


ImageDigest = Annotated[bytes, msgspec.Meta(max_length=16)]


class Generate(Message, frozen=True):
    """Ask an engine for one completion."""

    rollout_id: Id
    attempt: int
    """Number of times that the rollout was issued before; results of an older attempt are dropped."""
    token_ids: Int32
    """[P] int32; in an episode, the prompt and everything that came after it so far."""
    sampling: Sampling
    turn: int = 0
    """Number of turns of the episode before this one; late answers to those are dropped, too."""
    chunk_tokens: int = 0
    """Tokens between two `Tokens` messages about the sequence while it is being written; 0 means that only its `Completion` is sent."""
    version: int | None = None
    """The version to sample under, of those that an engine serves side by side; None means the one it committed last."""
    images: Images = ()
    """The images whose placeholders `token_ids` has, in their order; on the wire, empty where the engine has it (`engine.held_images`)."""
    num_written: int = 0
    """Number of the last of `token_ids` that another engine has sampled: this one goes on after them, and answers with what it adds."""
    image_digests: Annotated[tuple[ImageDigest, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Of `images`, on the wire alone."""

    def __post_init__(self) -> None:
        if self.image_digests and len(self.image_digests) != len(self.images):
            raise ValueError(f"Generate of {self.rollout_id}: {len(self.image_digests)} digests for {len(self.images)} images")


class Tokens(Message, frozen=True):
    """A chunk of tokens that an engine has sampled of a sequence that goes on. The `Completion` repeats them, and adds those after the last
    chunk.
    """

    rollout_id: Id
    attempt: int
    start: int
    """Position of the first of these among the sampled tokens."""
    token_ids: Int32
    """int32, the tokens of this chunk."""


class Cancel(Message, frozen=True):
    """Withdraw a request; the engine answers with a `Completion` whose finish is `CANCELLED`."""

    rollout_id: Id
    attempt: int


class Routes(Message, frozen=True):
    """The experts of a mixture-of-experts model to which each token was sent, layer by layer; `pipelinerl.data.expert_routes` makes tables
    of them.
    """

    num_layers: int
    top_k: int
    width: int
    """Bytes of one expert's number: 1, or 2 where the model has more than 255 experts. A number with all bits set means not known."""
    experts: UInt8
    """[rows * num_layers * top_k * width] bytes, one row for each token."""

    def __post_init__(self) -> None:
        row = self.num_layers * self.top_k * self.width
        if self.width not in (1, 2) or row <= 0 or len(self.experts) % row:
            raise ValueError(
                f"Routes: {len(self.experts)} bytes are no rows of {self.num_layers} x {self.top_k} numbers of {self.width} bytes"
            )

    @property
    def num_rows(self) -> int:
        return len(self.experts) // (self.num_layers * self.top_k * self.width)


Recomputed = Annotated[tuple[int, ...], msgspec.Meta(max_length=1 << 16)]


class Completion(Message, frozen=True):
    """An engine's answer to a `Generate`: tokens, each with its log-probability and the version under which it was sampled."""

    rollout_id: Id
    attempt: int
    token_ids: Int32
    """[T] int32; the end-of-sequence token is included where it was sampled."""
    logprobs: Float32
    """[T] float32, natural log under the distribution sampled from (temperature applied)."""
    versions: Int32
    """[T] int32, version of the weights that computed the token's logits; it never falls along the sequence."""
    finish: Finish
    turn: int = 0
    """The turn of the `Generate` that this answers."""
    error: Text = ""
    """The engine's own error message where `finish` is `ERROR`, else empty."""
    routes: Routes | None = None
    """[P + T - 1] rows, because the last token was sent nowhere; None where the model has no experts, or they are not replayed."""
    recomputed: Recomputed = ()
    """Number of sampled tokens at each swap that had the KV cache computed anew: 0 .. T each, and they never fall."""
    started_at: float = 0.0
    """Time at which the engine took the request, in Unix seconds."""
    finished_at: float = 0.0
    """Time at which the engine sampled the last token, in Unix seconds."""
    num_written: int = 0
    """The same number as in the `Generate` that this answers: tokens that another engine has sampled before these."""
    prompt_logprobs: Float32 | None = None
    """[P] float32, natural log of each token of the prompt at temperature 1, NaN for the first; None where nobody asked, or nothing was
    sampled."""

    def __post_init__(self) -> None:
        if not len(self.token_ids) == len(self.logprobs) == len(self.versions):
            check_lengths(self, "token_ids", "logprobs", "versions")
        if not _is_constant(self.versions) and np.count_nonzero(self.versions[1:] < self.versions[:-1]):
            raise ValueError(f"Completion {self.rollout_id}: versions fall along the sequence: {self.versions.tolist()}")
        if self.recomputed and list(places := (0, *self.recomputed, len(self.token_ids))) != sorted(places):
            raise ValueError(
                f"Completion {self.rollout_id}: its KV cache was computed anew after {list(self.recomputed)} of {len(self.token_ids)}"
                f" tokens: expected places that rise, from 0 to {len(self.token_ids)}"
            )


class Tensor(Message, frozen=True):
    """The place of one tensor of a policy in a published buffer."""

    name: Id
    """Hugging Face parameter name."""
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=16)]
    dtype: Id
    """Name of the torch dtype, for example "float32"."""
    offset_bytes: int
    num_bytes: int


Boxes = Annotated[tuple[tuple[tuple[int, int], ...], ...], msgspec.Meta(max_length=1 << 10)]
Shards = Annotated[tuple[Annotated[dict[Id, Boxes], msgspec.Meta(max_length=1 << 20)], ...], msgspec.Meta(max_length=1 << 12)]
"""By rank of an engine: the boxes of each tensor that it holds, first and one past the last index in every dimension."""
Transports = Annotated[tuple[Id, ...], msgspec.Meta(max_length=8)]
Attempts = Annotated[dict[Id, int], msgspec.Meta(max_length=1 << 17)]
"""Attempt numbers by rollout id."""
NumTokens = Annotated[dict[Id, int], msgspec.Meta(max_length=1 << 17)]
"""Numbers of tokens by rollout id."""


class EngineReady(Message, frozen=True):
    """An engine has loaded a model and takes requests. It is sent again to an orchestrator that takes the place of one that died."""

    engine_id: int
    process_id: int
    max_model_tokens: int
    """Maximum length of prompt plus completion that the engine serves."""
    max_running: int
    """Number of sequences that the engine decodes at once; more wait in its queue."""
    tensors: Annotated[tuple[Tensor, ...], msgspec.Meta(max_length=1 << 20)]
    """The layout in which the engine wants a published policy: names, order and offsets. The trainer writes exactly this."""
    shards: Shards = ()
    """What each rank of the engine holds; empty: one rank holds everything."""
    machine: Id = ""
    """An id that is equal for processes that can share memory."""
    transports: Transports = ()
    """Weight transports between devices that the engine supports."""
    version: int = 0
    """Version under which the engine samples."""
    rollback_epoch: int = 0
    """Rollback epoch of that version, see `StageWeights`."""
    running: Attempts = msgspec.field(default_factory=dict)
    """Rollouts that an orchestrator which is gone had asked for. The engine goes on with them, and answers those that `Reattach` names."""
    kv_tokens: int | None = None
    """Tokens that the KV cache holds; None where the engine has no such bound."""
    tensor_parallel_size: int = 1
    """Ranks of the engine that share every matrix."""
    request_id: int = 0
    """The request that brought it (`Member.request_id`): its number may be another engine's by now."""


class Reattach(Message, frozen=True):
    """The rollouts whose answers are wanted, among those that an engine announced as running; it drops the others silently."""

    rollouts: Attempts


class EngineLoad(Message, frozen=True):
    """An engine's gauges, sent every second; also its sign of life."""

    engine_id: int
    version: int
    num_running: int
    num_waiting: int
    num_tokens: int
    """Tokens sampled since the engine started."""
    num_steps: int
    """Forward passes since the engine started."""
    busy_s: float
    """Seconds in forward passes since the engine started."""
    idle_s: float
    """Seconds without a request since the engine started."""
    kv_used: float | None = None
    """Fraction of the KV cache that sequences hold; None where the engine does not report it."""
    num_context_tokens: int = 0
    """Tokens of the sequences that passes have sampled for, their prompts among them, summed over passes since the engine started: over
    `num_tokens`, the mean context of a sampled token."""
    num_drafted: int = 0
    """Drafted tokens that passes have verified (`engine.speculation`) since the engine started."""
    num_accepted: int = 0
    """Of these, the tokens that became part of a completion."""


class EngineSequences(Message, frozen=True):
    """What an engine has, and what of it waits for room; sent with each `EngineLoad` where sequences may move (`pipeline.migration`)."""

    engine_id: int
    written: NumTokens
    """Tokens that it has sampled of each of its sequences, by rollout id: 0 or more."""
    waiting: Annotated[dict[Id, float], msgspec.Meta(max_length=1 << 17)] = msgspec.field(default_factory=dict)
    """Seconds for which sequences have waited for a slot or for room in the KV cache, at least since the report before; by rollout id.
    A sequence that passes go over, or that came since, is not among them.
    """


class StageWeights(Message, frozen=True):
    """Tell an engine that a policy is published: stage it while decoding goes on, then commit between two forward passes."""

    version: int
    buffer: Id
    """Name of the buffer that holds the policy; the name also says by which transport the buffer is reached."""
    digest: Id
    """xxh3-128 of the policy's manifest, hexadecimal; the manifest lies in the buffer and holds the digest of every tensor."""
    when_idle: bool = False
    """True commits only once no sequence runs; False commits at the next boundary between two forward passes."""
    rollback_epoch: int = 0
    """Number of returns to an older checkpoint so far. An engine's version never falls within a rollback epoch; a later epoch may begin at
    a lower version, because it is an explicit rollback.
    """
    kv_max_staleness: int | None = None
    """Number of versions that the oldest part of a running sequence's KV cache may lag behind this one; a cache that lags further is
    recomputed. None allows any number."""
    kv_max_mean_staleness: float | None = None
    """The same bound for the mean over the tokens of the cache, each with the version that sampled it."""


class WeightsStaged(Message, frozen=True):
    """An engine acknowledges a version: it holds it, whole and verified, beside the one it serves. The commit follows by itself."""

    engine_id: int
    version: int
    stage_s: float
    """Seconds from `StageWeights` until the bytes were fetched and verified; the engine went on decoding meanwhile."""
    rollback_epoch: int = 0


class WeightsCommitted(Message, frozen=True):
    """An engine samples under `version` from now on."""

    engine_id: int
    version: int
    pause_s: float
    """Seconds the swap kept the engine from its next forward pass."""
    stage_s: float
    """The same number as in `WeightsStaged`."""
    num_running: int
    """Sequences that went on across the swap."""
    num_recomputed_tokens: int = 0
    """Number of tokens, of prompts and completions, whose KV cache was dropped in order to be computed again under this version."""
    rollback_epoch: int = 0


class WeightsRefused(Message, frozen=True):
    """An engine could not take a version, and goes on serving its old one."""

    engine_id: int
    version: int
    error: Text
    rollback_epoch: int = 0


class Sleep(Message, frozen=True):
    """Tell an engine to give back the memory of its weights and its KV cache, between two forward passes, and to keep its sequences.

    Its policy is then gone. The next one that it commits wakes it, be it of the version that it had.
    """

    phase_id: int
    """Of the training phase that begins, larger than of those before; an engine that has slept through it is not sent to sleep again."""


class Asleep(Message, frozen=True):
    """An engine sleeps: it reads no policy, and runs no forward pass until it commits one."""

    engine_id: int
    phase_id: int
    """Of the `Sleep` that this answers."""
    sleep_s: float
    """Seconds it took."""
    num_bytes: int
    """Bytes given back to the system, or to the device."""
    num_running: int
    """Sequences that go on once it wakes."""


FromEngine = (
    Starting
    | EngineReady
    | EngineLoad
    | EngineSequences
    | Tokens
    | Completion
    | WeightsStaged
    | WeightsCommitted
    | WeightsRefused
    | Asleep
    | Failed
)
"""The messages of an engine to the orchestrator."""
ToEngine = Generate | Cancel | Reattach | StageWeights | Sleep | Stop
"""The messages of the orchestrator to an engine."""


def _is_constant(versions: Int32) -> bool:
    """Return true where all versions are equal, as in most rollouts. This takes a third of the time of checking that they never fall."""
    column = versions.tobytes()
    return column[versions.itemsize :] == column[: -versions.itemsize]
