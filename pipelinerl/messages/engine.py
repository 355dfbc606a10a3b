"""What the orchestrator and inference engines say to each other: requests, completions, and the swap of weights."""

from __future__ import annotations

import enum
from typing import Annotated

import msgspec
import numpy as np

from pipelinerl.messages.base import Failed, Float32, Id, Int32, Message, Starting, Stop, Text, UInt8, check_lengths

StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
"""A text that ends a completion."""


class Finish(enum.StrEnum):
    """Why an engine stopped a sequence."""

    STOP = "stop"
    """It sampled a stop token."""
    LENGTH = "length"
    """It reached `max_tokens` or the context length: the text is truncated."""
    CANCELLED = "cancelled"
    """The orchestrator asked for it."""
    ERROR = "error"
    """The engine refused the request or failed; `Completion.error` says why. Of an episode also: its environment failed."""


class Sampling(Message, frozen=True):
    """How to sample one completion."""

    max_tokens: int
    temperature: float = 1.0
    """0.0 is greedy."""
    top_p: float = 1.0
    top_k: int = 0
    """0 keeps the whole vocabulary."""
    stop_token_ids: Annotated[tuple[int, ...], msgspec.Meta(max_length=4096)] = ()
    """Whatever ends a completion; an engine adds what it reads of an end of sequence in the model's folder."""
    stop: Annotated[tuple[StopText, ...], msgspec.Meta(max_length=64)] = ()
    """Texts that end a completion with the token that completes one of them; they stay in it."""
    seed: int | None = None
    """None draws from the engine's own generator."""


class Generate(Message, frozen=True):
    """Ask an engine for one completion."""

    rollout_id: Id
    attempt: int
    """Counts re-issues of one rollout; results of an older attempt are fenced."""
    token_ids: Int32
    """[P] int32; of an episode the prompt and all that came after it so far."""
    sampling: Sampling
    turn: int = 0
    """Of an episode: how many turns there were before; their answers are fenced, too."""
    chunk_tokens: int = 0
    """Tokens between two `Tokens` that tell of the sequence while it is being written; 0: only its `Completion` does."""


class Tokens(Message, frozen=True):
    """What an engine has sampled of a sequence that goes on. The `Completion` holds them once more, and those after the last chunk."""

    rollout_id: Id
    attempt: int
    start: int
    """Position of the first of these among the sampled tokens."""
    token_ids: Int32
    """int32."""


class Cancel(Message, frozen=True):
    """Withdraw a request; the engine answers with a `Completion` whose finish is `CANCELLED`."""

    rollout_id: Id
    attempt: int


class Routes(Message, frozen=True):
    """Which experts of a mixture each token was sent to, layer by layer; `pipelinerl.data.expert_routes` makes tables of it."""

    num_layers: int
    top_k: int
    width: int
    """Bytes of one expert's number: 1, or 2 where the model has more than 255. All bits set: not known."""
    experts: UInt8
    """[rows * num_layers * top_k * width], a row for each token."""

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
    """One engine reply: tokens, and for each the log-probability and the version under which it was sampled."""

    rollout_id: Id
    attempt: int
    token_ids: Int32
    """[T] int32, end-of-sequence token included where it was sampled."""
    logprobs: Float32
    """[T] float32, natural log under the distribution sampled from (temperature applied)."""
    versions: Int32
    """[T] int32, version of the weights that computed the token's logits; never falls along the sequence."""
    finish: Finish
    turn: int = 0
    """As in `Generate`."""
    error: Text = ""
    """The engine's own words where `finish` is `ERROR`, else empty."""
    routes: Routes | None = None
    """[P + T - 1] rows, the last token was sent nowhere; None where the model has no experts, or they are not replayed."""
    recomputed: Recomputed = ()
    """Tokens there were each time that a swap had the KV cache computed anew: never falls, 0 .. T."""
    started_at: float = 0.0
    """Unix seconds: when the engine took the request."""
    finished_at: float = 0.0
    """Unix seconds: when it sampled the last token."""

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
    """Where one tensor of a policy lies in a published buffer."""

    name: Id
    """Hugging Face parameter name."""
    shape: Annotated[tuple[int, ...], msgspec.Meta(max_length=16)]
    dtype: Id
    """torch dtype name, for example "float32"."""
    offset_bytes: int
    num_bytes: int


Transports = Annotated[tuple[Id, ...], msgspec.Meta(max_length=8)]
Attempts = Annotated[dict[Id, int], msgspec.Meta(max_length=1 << 17)]
"""By rollout id: its attempt."""


class EngineReady(Message, frozen=True):
    """An engine has loaded a model and takes requests; said again to an orchestrator that takes the place of one that died."""

    engine_id: int
    process_id: int
    max_model_tokens: int
    """Longest prompt plus completion it serves."""
    max_running: int
    """Sequences it decodes at once; more wait in its queue."""
    tensors: Annotated[tuple[Tensor, ...], msgspec.Meta(max_length=1 << 20)]
    """The layout it wants a published policy in: names, order and offsets; the trainer writes exactly this."""
    machine: Id = ""
    """Equal for processes that can share memory."""
    transports: Transports = ()
    """Transports between devices that it could take."""
    version: int = 0
    """It samples under."""
    rollback_epoch: int = 0
    """Of that version, see `StageWeights`."""
    running: Attempts = msgspec.field(default_factory=dict)
    """What an orchestrator that is gone had asked for. It goes on with these, and answers those that `Reattach` names."""


class Reattach(Message, frozen=True):
    """Of the rollouts an engine announced as running, those whose answers are wanted; it drops the others without a word."""

    rollouts: Attempts


class EngineLoad(Message, frozen=True):
    """An engine's gauges, sent every second; also its sign of life."""

    engine_id: int
    version: int
    num_running: int
    num_waiting: int
    num_tokens: int
    """Tokens sampled since it started."""
    num_steps: int
    """Forward passes since it started."""
    busy_s: float
    """Seconds in forward passes since it started."""
    idle_s: float
    """Seconds without a request since it started."""
    kv_used: float | None = None
    """Part of its KV cache that sequences hold."""


class StageWeights(Message, frozen=True):
    """Tell an engine that a policy is published: stage it while decoding goes on, then commit between two forward passes."""

    version: int
    buffer: Id
    """Name of the buffer that holds it; also says by which transport it is reached."""
    digest: Id
    """xxh3-128 of the policy's manifest, hexadecimal; the manifest lies in the buffer and holds the digest of every tensor."""
    when_idle: bool = False
    """True commits only once no sequence runs; False at the next boundary between two forward passes."""
    rollback_epoch: int = 0
    """Counts rollbacks. Within a rollback epoch an engine's version never falls; a later rollback epoch may begin below: an explicit
    rollback.
    """
    kv_max_staleness: int | None = None
    """Versions the oldest part of a running sequence's KV cache may lag behind this one; beyond, it is recomputed. None: any number."""
    kv_max_mean_staleness: float | None = None
    """The same for the mean over the tokens of the cache, each under the version that sampled it."""


class WeightsStaged(Message, frozen=True):
    """An engine has a version whole and verified beside the one it serves: its acknowledgement. The commit follows by itself."""

    engine_id: int
    version: int
    stage_s: float
    """Seconds from `StageWeights` until the bytes were fetched and verified; decoding went on meanwhile."""
    rollback_epoch: int = 0


class WeightsCommitted(Message, frozen=True):
    """An engine samples under `version` from now on."""

    engine_id: int
    version: int
    pause_s: float
    """Seconds the swap kept the engine from its next forward pass."""
    stage_s: float
    """As `WeightsStaged` said."""
    num_running: int
    """Sequences that went on across the swap."""
    num_recomputed_tokens: int = 0
    """Tokens, of prompts and completions, whose KV cache was dropped to be computed again under this version."""
    rollback_epoch: int = 0


class WeightsRefused(Message, frozen=True):
    """An engine could not take a version; it serves on with its old one."""

    engine_id: int
    version: int
    error: Text
    rollback_epoch: int = 0


FromEngine = Starting | EngineReady | EngineLoad | Tokens | Completion | WeightsStaged | WeightsCommitted | WeightsRefused | Failed
"""What an engine may say to the orchestrator."""
ToEngine = Generate | Cancel | Reattach | StageWeights | Stop
"""What the orchestrator may say to an engine."""


def _is_constant(versions: Int32) -> bool:
    """One version throughout, as in most rollouts: a third of the time of looking whether they fall."""
    column = versions.tobytes()
    return column[versions.itemsize :] == column[: -versions.itemsize]
