"""Every message and every value that flows through the pipeline, in flow order.

    Prompt -> Generate -> Completion -> Trajectory -> ScoredTrajectory -> Group -> Sample -> MicroBatch -> StepSealed -> PolicyPublished

All are frozen; each later one contains, or is computed from, the earlier; none is edited. Tagged by class name on the wire, so a
reordered or unknown field never decodes without a word. Token columns are numpy arrays, carried as raw bytes. Columns of one length
are checked on construction, hence also when they come off the wire: a `ValueError` there becomes a `WireError` in the codec. Texts, tuples
and dictionaries have a greatest length, checked off the wire, before any of it is made; only a prompt's columns are free, in size and depth
bounded as a whole.

Legend for shapes: `P` prompt tokens, `T` sampled tokens, `L` tokens of a whole trajectory, `R` tokens of a packed row, `N` samples.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt

Int32 = npt.NDArray[np.int32]
Float32 = npt.NDArray[np.float32]
Mask = npt.NDArray[np.bool_]
UInt8 = npt.NDArray[np.uint8]

MAX_DEPTH = 32
"""Lists and objects within one another in a prompt's columns. Deeper ones could exhaust the stack of whoever walks them."""
Id = Annotated[str, msgspec.Meta(max_length=512)]
"""A name or a digest."""
Text = Annotated[str, msgspec.Meta(max_length=16 << 20)]
"""Prompts, and words for a person."""
StopText = Annotated[str, msgspec.Meta(min_length=1, max_length=4096)]
"""A text that ends a completion."""
Figures = Annotated[dict[Id, float], msgspec.Meta(max_length=4096)]
"""Values by name."""

UNSAMPLED = -1
"""Version of a token that no policy sampled: prompt tokens, tool output, padding."""


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


class Outcome(enum.StrEnum):
    """How a score ended. Only `OK` trains; the others are counted by reason and never become 0.0."""

    OK = "ok"
    """Every reward function returned finite numbers."""
    TIMEOUT = "timeout"
    """A reward function did not return within its deadline; its process was killed."""
    ERROR = "error"
    """A reward function raised, or its process died."""
    INVALID = "invalid"
    """A reward function returned something that is not a finite number (None, NaN, a wrong length)."""
    STOPPED = "stopped"
    """It was stopped early, by a coin (`Flag`): there is nothing to score. Its siblings count what was predicted of it."""


class Fate(enum.StrEnum):
    """How an admitted rollout ended: exactly one of these."""

    TRAINED = "trained"
    """Its gradient is in the policy of a completed step."""
    FILTERED = "filtered"
    """A rule set it aside on purpose, for example a group whose rewards are all equal."""
    STALE = "stale"
    """Its oldest token was older than the staleness bound when its batch was cut."""
    FAILED = "failed"
    """It has no usable score: the engine or a reward function failed."""
    CANCELLED = "cancelled"
    """The run ended, or it was withdrawn, before it was trained."""


class Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What crosses a process or a stage."""


def check_lengths(owner: Message, *names: str) -> None:
    """Raise `ValueError` naming the columns of `owner` whose lengths differ from the first's."""
    if len({len(getattr(owner, name)) for name in names}) > 1:
        lengths = {name: len(getattr(owner, name)) for name in names}
        raise ValueError(f"{type(owner).__name__}: columns differ in length: {lengths}; expected one length")


def _is_constant(versions: Int32) -> bool:
    """One version throughout, as in most rollouts: a third of the time of looking whether they fall."""
    column = versions.tobytes()
    return column[versions.itemsize :] == column[: -versions.itemsize]


def check_depth(prompt: Prompt) -> None:
    """Raise `ValueError` for columns or chat messages that are nested deeper than `MAX_DEPTH`."""
    level: list[Any] = [*prompt.columns.values(), *prompt.chat]
    for _ in range(MAX_DEPTH):
        level = [inner for value in level if isinstance(value, dict | list | tuple) for inner in _inside(value)]
        if not level:
            return
    raise ValueError(f"Prompt {prompt.prompt_id}: its columns are nested deeper than {MAX_DEPTH} levels")


def _inside(value: dict[Any, Any] | list[Any] | tuple[Any, ...]) -> Iterable[Any]:
    return value.values() if isinstance(value, dict) else value


# --- prompts -------------------------------------------------------------------------------------------------------------------


class Prompt(Message, frozen=True):
    """A task to sample from."""

    prompt_id: Id
    """Stable identity in its source, `<epoch>:<row>`."""
    text: Text
    """What the model sees, before tokenisation, chat template applied."""
    token_ids: Int32
    """[P] int32."""
    columns: dict[str, Any] = {}
    """The source row's other columns, plain JSON values, handed to reward functions by name."""
    chat: tuple[dict[str, Any], ...] = ()
    """The row's chat messages, before the template made `text` of them; empty where it holds text. For reward functions that know chats."""

    def __post_init__(self) -> None:
        check_depth(self)


# --- orchestrator <-> engine ---------------------------------------------------------------------------------------------------


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
    """Which experts of a mixture each token was sent to, layer by layer; `pipelinerl.routes` makes tables of it."""

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


Roads = Annotated[tuple[Id, ...], msgspec.Meta(max_length=8)]
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
    roads: Roads = ()
    """Roads between devices that it could take."""
    version: int = 0
    """It samples under."""
    lineage: int = 0
    """Of that version, see `StageWeights`."""
    running: Attempts = {}
    """What an orchestrator that is gone had asked for. It goes on with these, and answers those that `Adopt` names."""


class Adopt(Message, frozen=True):
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
    slot: Id
    """Name of the buffer that holds it; also says by which road it is reached."""
    digest: Id
    """xxh3-128 of the policy's manifest, hexadecimal; the manifest lies in the slot and holds the digest of every tensor."""
    when_idle: bool = False
    """True commits only once no sequence runs; False at the next boundary between two forward passes."""
    lineage: int = 0
    """Counts rollbacks. Within a lineage an engine's version never falls; a later lineage may begin below: an explicit rollback."""
    kv_span: int | None = None
    """Versions the oldest part of a running sequence's KV cache may lag behind this one; beyond, it is recomputed. None: any number."""
    kv_lag: float | None = None
    """The same for the mean over the tokens of the cache, each under the version that sampled it."""


class WeightsStaged(Message, frozen=True):
    """An engine has a version whole and verified beside the one it serves: its acknowledgement. The commit follows by itself."""

    engine_id: int
    version: int
    stage_s: float
    """Seconds from `StageWeights` until the bytes were fetched and verified; decoding went on meanwhile."""
    lineage: int = 0


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
    lineage: int = 0


class WeightsRefused(Message, frozen=True):
    """An engine could not take a version; it serves on with its old one."""

    engine_id: int
    version: int
    error: Text
    lineage: int = 0


# --- orchestrator <-> scorer ---------------------------------------------------------------------------------------------------


class ScorerReady(Message, frozen=True):
    """A scorer has loaded its reward functions."""

    scorer_id: int
    process_id: int
    num_slots: int
    """Calls it runs at once."""


class FunctionLoad(Message, frozen=True):
    """How one reward function does, since its scorer started; durations over its last calls."""

    num_calls: int
    """Tries, retried ones included."""
    num_failed: Annotated[dict[Id, int], msgspec.Meta(max_length=16)]
    """Tries that ended as timeout, error or invalid, by outcome."""
    num_retries: int
    """Tries that followed a failed one."""
    p50_s: float
    p95_s: float
    max_s: float
    slowest: Id
    """Rollout of the longest of them."""
    breaker: Id
    """closed, open or half-open."""


class FunctionKind(enum.StrEnum):
    """What a user's function is for."""

    REWARD = "reward"
    ENVIRONMENT = "environment"
    PRM = "prm"
    """A process reward model, or the judge in its place."""
    SOURCE = "source"
    """It yields prompts."""
    LOSS = "loss"
    """A loss, an advantage, a mask or a weight."""


class FunctionFailed(Message, frozen=True):
    """Calls of a function failed by one cause: told at once for the first, then of the further ones together. See `function_errors`."""

    function: Id
    kind: FunctionKind
    outcome: Outcome
    cause: Annotated[str, msgspec.Meta(max_length=1000)]
    """On one line: exception type and message, or what was returned, or how the process ended."""
    where: Annotated[str, msgspec.Meta(max_length=4096)] = ""
    """`file:line`; empty where nobody knows."""
    traceback: Annotated[str, msgspec.Meta(max_length=16384)] = ""
    """Of the first failure; empty in what is told of further ones."""
    rollout_id: Id = ""
    """Of the first failure."""
    num_new: Annotated[int, msgspec.Meta(ge=1)] = 1
    """Failures by this cause since the last time it was told."""
    num_calls: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Calls of the function so far, all of them."""


class ScorerLoad(Message, frozen=True):
    """A scorer's gauges, sent every second; also its sign of life."""

    scorer_id: int
    num_running: int
    num_scored: int
    busy_s: float
    """Seconds of reward calls since it started, summed over slots."""
    functions: Annotated[dict[Id, FunctionLoad], msgspec.Meta(max_length=4096)] = {}
    """By the function's name; without those that were not called yet."""


class Turns(Message, frozen=True):
    """Where the turns of an episode lie among the tokens after the prompt. Between two of them lies what the environment said."""

    starts: Int32
    """[K] int32, position of each turn's first token, the first 0."""
    ends: Int32
    """[K] int32, position of its last token."""
    states: Annotated[tuple[Id, ...], msgspec.Meta(max_length=1 << 16)]
    """[K] name of the state that each turn answers: equal for equal states of sibling rollouts."""

    def __post_init__(self) -> None:
        check_lengths(self, "starts", "ends", "states")
        borders = np.stack((self.starts, self.ends), 1).ravel()
        if not len(borders) or borders[0] != 0 or (self.ends < self.starts).any() or (self.starts[1:] <= self.ends[:-1] + 1).any():
            raise ValueError(
                f"Turns: from {self.starts.tolist()} to {self.ends.tolist()}, expected at least one, the first from 0, each with a token"
                " and at least one of the environment before the next"
            )

    def mask(self, num_tokens: int) -> Mask:
        """[num_tokens] true where the policy sampled the token."""
        sampled = np.zeros(num_tokens, np.bool_)
        for start, end in zip(self.starts.tolist(), self.ends.tolist(), strict=True):
            sampled[start : end + 1] = True
        return sampled


class Reply(Message, frozen=True):
    """Ask a scorer what the environment replies to the last turn of an episode."""

    episode_id: Id
    """Name of the rollout."""
    attempt: int
    prompt: Prompt
    token_ids: Int32
    """[T] int32, the tokens after the prompt; the scorer decodes them."""
    turns: Turns
    finish: Finish
    """Of the last turn."""

    @property
    def turn(self) -> int:
        """Number of the last turn, from 0."""
        return len(self.turns.starts) - 1

    @property
    def rollout_id(self) -> str:
        """Under which the request is known: a late answer to an earlier turn is none to this one. No rollout has such a name."""
        return f"{self.episode_id}/turn/{self.turn}"


class Heard(Message, frozen=True):
    """What an environment said."""

    token_ids: Int32
    """int32, at least one: its text, tokenised here and never again."""
    state: Id
    """Name of the state that the next turn answers."""

    def __post_init__(self) -> None:
        if not len(self.token_ids):
            raise ValueError("Heard: no token; expected some, or no `Heard` at all where the episode is over")


class Replied(Message, frozen=True):
    """A scorer's answer to `Reply`."""

    episode_id: Id
    attempt: int
    turn: int
    """The one replied to, from 0."""
    outcome: Outcome
    """A rollout whose environment is not `OK` fails as that."""
    heard: Heard | None = None
    """None where the environment says that the episode is over, or failed."""
    error: Text = ""
    """What went wrong, with the function's name; empty where `outcome` is `OK`."""
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        if self.heard is not None and self.outcome is not Outcome.OK:
            raise ValueError(f"Replied {self.rollout_id}: outcome {self.outcome} with something heard; only ok has that")

    @property
    def rollout_id(self) -> str:
        """As of `Reply`."""
        return f"{self.episode_id}/turn/{self.turn}"


class Score(Message, frozen=True):
    """Ask a scorer for the reward of one trajectory."""

    rollout_id: Id
    attempt: int
    prompt: Prompt
    token_ids: Int32
    """[T] int32, the tokens after the prompt; the scorer decodes them."""
    finish: Finish
    turns: Turns | None = None
    """None in a run without an environment: all of it is one turn."""


class ScoreGroup(Message, frozen=True):
    """Ask a scorer for the rewards that compare siblings; sent once every sibling has an outcome of its own."""

    group_id: int
    members: Annotated[tuple[Score, ...], msgspec.Meta(max_length=1 << 16)]
    """Siblings that are scored, in order; at least two, of one prompt."""

    @property
    def rollout_id(self) -> str:
        """Under which the request is known; no rollout has such a name."""
        return f"group/{self.group_id}"

    @property
    def attempt(self) -> int:
        return 0


class Scored(Message, frozen=True):
    """A scorer's answer."""

    rollout_id: Id
    attempt: int
    outcome: Outcome
    reward: float | None
    """Weighted sum of the components; None unless `outcome` is `OK`."""
    components: Figures = {}
    """Reward of each function that applied, by its name, before weighting."""
    error: Text = ""
    """What went wrong, with the function's name; empty where `outcome` is `OK`."""
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        has_reward = self.reward is not None and math.isfinite(self.reward)
        if has_reward != (self.outcome is Outcome.OK) or (self.reward is not None and not has_reward):
            raise ValueError(
                f"Scored {self.rollout_id}: outcome {self.outcome} with reward {self.reward}; only ok has one, and it is finite"
            )


class GroupScored(Message, frozen=True):
    """A scorer's answer to `ScoreGroup`."""

    group_id: int
    outcome: Outcome
    """One for the whole group: functions that compare siblings fail together."""
    rewards: Annotated[tuple[float, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Weighted sum of the components of each member; empty unless `outcome` is `OK`."""
    components: Annotated[tuple[Figures, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """As `Scored.components`, for each member."""
    error: Text = ""
    duration_s: float = 0.0

    def __post_init__(self) -> None:
        check_lengths(self, "rewards", "components")
        if bool(self.rewards) != (self.outcome is Outcome.OK) or not all(map(math.isfinite, self.rewards)):
            raise ValueError(f"GroupScored {self.group_id}: outcome {self.outcome} with rewards {self.rewards}; only ok has them, finite")

    @property
    def rollout_id(self) -> str:
        return f"group/{self.group_id}"

    @property
    def attempt(self) -> int:
        return 0


class PrmReady(Message, frozen=True):
    """A process reward model is loaded."""

    prm_id: int
    process_id: int
    version: Id
    """Name of its weights: scores of different ones are never mixed within a trace."""


class PrmLoad(Message, frozen=True):
    """Its gauges since it started, sent every second while it is not inside a forward pass; also its sign of life."""

    prm_id: int
    num_traces: int
    """Being followed."""
    num_steps: int
    """Steps scored."""
    num_taken: int
    """Tokens of the policy taken."""
    num_computed: int
    """Tokens of its own computed: a trace costs about one prefill."""
    num_asked: int
    """Tokens of its own that every step from scratch would have cost."""
    busy_s: float


class TraceTokens(Message, frozen=True):
    """Tell a process reward model how a trace goes on."""

    rollout_id: Id
    attempt: int
    start: int
    """Position of the first of these among the policy's sampled tokens; 0 begins the trace, anew where it was begun before."""
    token_ids: Int32
    """int32, of the policy."""
    is_last: bool
    prompt_token_ids: Int32 | None = None
    """[P] int32, of the policy; None but where `start` is 0."""


class StepsScored(Message, frozen=True):
    """A process reward model has taken tokens of a trace, and scored the steps that they complete: maybe none."""

    rollout_id: Id
    attempt: int
    num_taken: int
    """Tokens of the policy taken so far."""
    first: int
    """Index of the first of these steps in its trace."""
    ends: Int32
    """int32, position of each step's last token among the policy's sampled tokens; rises."""
    scores: Float32
    """float32, one for each step."""
    is_last: bool
    """The trace is complete: nothing follows."""
    version: Id
    outcome: Outcome = Outcome.OK
    """Of the whole trace so far; a trace with one step that cannot be scored cannot train."""
    error: Text = ""

    def __post_init__(self) -> None:
        check_lengths(self, "ends", "scores")


# --- inside the orchestrator ---------------------------------------------------------------------------------------------------


class Trajectory(Message, frozen=True):
    """A finished rollout: the whole token sequence as the engine saw and sampled it."""

    rollout_id: Id
    group_id: int
    sibling: int
    """0 .. group size - 1; the group size for a greedy one."""
    attempt: int
    prompt: Prompt
    token_ids: Int32
    """[L] int32, prompt included."""
    trains: Mask
    """[L] bool, true where the policy sampled the token."""
    logprobs: Float32
    """[L] float32, natural log under the policy that sampled; 0.0 where `trains` is false."""
    versions: Int32
    """[L] int32, version that sampled the token; `UNSAMPLED` where `trains` is false."""
    finish: Finish
    error: Text = ""
    engine_id: int = -1
    admitted_at: float = 0.0
    """Seconds on the run's clock."""
    finished_at: float = 0.0
    """Seconds on the run's clock."""
    routes: Routes | None = None
    """[L - 1] rows; as in `Completion`."""
    turns: Turns | None = None
    """None in a run without an environment, and where nothing was sampled."""
    outcome: Outcome = Outcome.OK
    """Of its environment; with another than `OK`, `finish` is `ERROR` and the rollout fails as that."""
    recomputed: Recomputed = ()
    """As in `Completion`: of the tokens after the prompt."""
    is_greedy: bool = False
    """Sampled at temperature 0 beside its siblings, only for its reward, which is their baseline: it never trains."""

    def __post_init__(self) -> None:
        check_lengths(self, "token_ids", "trains", "logprobs", "versions")
        if self.routes is not None and self.routes.num_rows != len(self.token_ids) - 1:
            rows, expected = self.routes.num_rows, len(self.token_ids) - 1
            raise ValueError(f"Trajectory {self.rollout_id}: routes of {rows} tokens, expected {expected}, all but the last")

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)

    @property
    def num_bytes(self) -> int:
        """Of its token columns: ids, mask, log-probabilities, versions, and where a mixture sent each token, which is most of it."""
        return 13 * self.num_tokens + (0 if self.routes is None else self.routes.experts.nbytes)

    @property
    def num_trained_tokens(self) -> int:
        return int(np.count_nonzero(self.trains))

    @property
    def oldest_version(self) -> int | None:
        """Version of the oldest sampled token; None where nothing was sampled."""
        sampled = self.versions[self.trains]
        return int(sampled.min()) if len(sampled) else None


class TraceScores(Message, frozen=True):
    """What a process reward model said of a trajectory."""

    ends: Int32
    """[K] int32, position of each step's last token among the tokens after the prompt; rises."""
    scores: Float32
    """[K] float32, finite."""
    version: Id
    """Of the process reward model."""

    def __post_init__(self) -> None:
        check_lengths(self, "ends", "scores")


class Flag(Message, frozen=True):
    """A process reward model found a rollout hopeless while it was being written, and a coin decided whether it went on."""

    step: int
    """Index of the step that flagged it."""
    predicted: float
    """That step's score: what is expected of the rollout's reward, known before the coin fell."""
    probability: float
    """Of going on; above 0."""
    stops: bool

    def __post_init__(self) -> None:
        if not 0.0 < self.probability <= 1.0 or not math.isfinite(self.predicted):
            raise ValueError(f"Flag: probability {self.probability}, predicted {self.predicted}; expected one in (0, 1], and finite")

    @property
    def weight(self) -> float:
        """Of the rollout in every sum: 0 where it stops, else 1 / probability, so that its mean over the coin is 1."""
        return 0.0 if self.stops else 1.0 / self.probability


class ScoredTrajectory(Message, frozen=True):
    """A trajectory and what the scoring stage says of it."""

    trajectory: Trajectory
    score: Scored
    steps: TraceScores | None = None
    """None in a run without a process reward model, and where it could not score the trace; of a stopped one, those up to the stop."""
    flag: Flag | None = None
    """None where no coin fell: then it went on with probability 1."""

    @property
    def weight(self) -> float:
        """In every sum over rollouts that were started."""
        return 1.0 if self.flag is None else self.flag.weight


class Group(Message, frozen=True):
    """The sibling rollouts of one prompt, all finished and all scored (whatever the outcome)."""

    group_id: int
    members: tuple[ScoredTrajectory, ...]


class Sample(Message, frozen=True):
    """One training row: a trajectory with an advantage for each token."""

    trajectory: Trajectory
    reward: float
    advantages: Float32
    """[L] float32; 0.0 where the trajectory does not train."""
    weight: float = 1.0
    """Multiplies whatever it adds to the loss: 1 / the probability with which it was not stopped early."""

    def __post_init__(self) -> None:
        if len(self.advantages) != self.trajectory.num_tokens:
            got, expected = len(self.advantages), self.trajectory.num_tokens
            raise ValueError(f"Sample {self.trajectory.rollout_id}: {got} advantages for {expected} tokens; expected one for each")

    @property
    def num_tokens(self) -> int:
        """L."""
        return self.trajectory.num_tokens


# --- orchestrator <-> trainer --------------------------------------------------------------------------------------------------


class Damage(msgspec.Struct, frozen=True):
    """A checkpoint that proved not to be as it was written, and was set aside."""

    version: int
    reason: Text
    """Which file, what was found, what was expected."""


class TrainerReady(Message, frozen=True):
    """A data-parallel replica of the trainer holds version `version` and pulls micro-batches from step `version` on."""

    replica: int
    num_replicas: int
    process_id: int
    version: int
    machine: Id = ""
    """As in `EngineReady`."""
    roads: Roads = ()
    """As in `EngineReady`."""
    commit: Id = ""
    """The ledger's, under which the last step in these weights was sealed; empty where it started from `model.path`."""
    saved: int | None = None
    """Version of its newest checkpoint; None: this one. A trainer that outlives the orchestrator holds steps that no checkpoint does."""
    saved_commit: Id = ""
    """The commit that a checkpoint of version `saved` names."""
    oldest: int | None = None
    """As in `CheckpointSaved`, of version `saved`."""
    damaged: Annotated[tuple[Damage, ...], msgspec.Meta(max_length=1 << 10)] = ()
    """Checkpoints, newer than this one, that could not be used."""
    suspects: Annotated[tuple[Id, ...], msgspec.Meta(max_length=1 << 16)] = ()
    """Rows, each as `step/row`, that the trainer before this one had in hand when it died."""


class LayoutFixed(Message, frozen=True):
    """Tell the trainer the layout every engine asked for; sent before its first publication."""

    tensors: Annotated[tuple[Tensor, ...], msgspec.Meta(max_length=1 << 20)]
    num_engines: int = 1
    """Engines that may read different policies at once."""
    road: Id = "shared_memory"
    """How policies travel: shared_memory, cuda_ipc, files, gloo or nccl."""
    lineage: int = 0
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
    trains: Mask
    """[R] bool, true where the token enters the loss."""
    logprobs: Float32
    """[R] float32, natural log under the engine; 0.0 where `trains` is false."""
    versions: Int32
    """[R] int32, `UNSAMPLED` where `trains` is false."""
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
    teachers: Int32 | None = None
    """[N] int32, which of `reference.teachers`, in their order, judges it; None in a run without them."""
    routes: Routes | None = None
    """[R] rows; None where nothing is known of any token."""

    def __post_init__(self) -> None:
        name = f"MicroBatch {self.step}/{self.index}"
        check_lengths(self, "token_ids", "trains", "logprobs", "versions", "advantages")
        if int(self.lengths.sum()) != len(self.token_ids) or len(self.lengths) != len(self.rollout_ids):
            raise ValueError(
                f"{name}: lengths {self.lengths.tolist()} must sum to {len(self.token_ids)} tokens and name {len(self.rollout_ids)} samples"
            )
        if self.routes is not None and self.routes.num_rows != len(self.token_ids):
            raise ValueError(f"{name}: routes of {self.routes.num_rows} tokens, expected {len(self.token_ids)}")
        for column in (self.rewards, self.truncated, self.group_ids, self.weights, self.engine_ids, self.teachers):
            if column is not None and len(column) != len(self.lengths):
                raise ValueError(f"{name}: a column of {len(column)} entries for {len(self.lengths)} samples; expected one for each")


class StepSealed(Message, frozen=True):
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
    """How far an engine's log-probabilities are from the trainer's, over what a step trained of it."""

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
    """Of each engine that sampled something of the step."""


class PolicyPublished(Message, frozen=True):
    """A new policy lies in a slot, whole."""

    version: int
    slot: Id
    digest: Id
    """As in `StageWeights`."""
    num_bytes: int
    """That travel."""
    publish_s: float
    """Seconds the trainer spent writing it."""
    lineage: int = 0
    """As in `StageWeights`: 0 until the trainer rolls back."""


class SlotReleased(Message, frozen=True):
    """No engine reads this slot any more; the trainer may write it again."""

    slot: Id


class PolicyHeld(Message, frozen=True):
    """Every engine samples under this policy or a later one: changes may be laid over it."""

    version: int | None
    """None: some engine needs a whole policy, because it refused one or lost what it held."""
    lineage: int = 0
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


# --- every role ----------------------------------------------------------------------------------------------------------------


class Starting(Message, frozen=True):
    """A process takes over the name of one that ended, and announces itself once it has loaded; what the other was asked for is lost."""

    process_id: int


class Alive(Message, frozen=True):
    """A sign of life from a peer that has nothing else to say."""

    busy_with: Text = ""
    """What it is doing, for the message of a deadline that runs out."""


class Stop(Message, frozen=True):
    """Tell a peer to save what is its to save, and end."""

    reason: Text


class EndTraining(Message, frozen=True):
    """Tell the trainer to train no further: it saves and publishes what it has, says `TrainingEnded`, and waits for `Stop`."""

    reason: Text


class TrainingEnded(Message, frozen=True):
    """The trainer trains no further; all it had to say of its steps, policies and checkpoints came before."""

    version: int
    """Its last policy."""


class Failed(Message, frozen=True):
    """A peer's last words: the error that ends it."""

    error: Text


class Unread(Message, frozen=True):
    """Stands in the orchestrator for bytes of a peer that are none of its messages; no peer can send it."""

    reason: Id
    """Under which the transport counted them."""
    words: Text
    rollout_id: Id = ""
    """What they would have been about, as far as they tell: an attempt that nobody will answer any more. Empty: they do not tell."""
    attempt: int = 0
    turn: int = 0


FromEngine = Starting | EngineReady | EngineLoad | Tokens | Completion | WeightsStaged | WeightsCommitted | WeightsRefused | Failed
"""What an engine may say to the orchestrator."""
ToEngine = Generate | Cancel | Adopt | StageWeights | Stop
"""What the orchestrator may say to an engine."""
FromScorer = ScorerReady | ScorerLoad | FunctionFailed | Replied | Scored | GroupScored | PrmReady | PrmLoad | StepsScored | Failed
ToScorer = Reply | Score | ScoreGroup | TraceTokens | Cancel | Stop
FromTrainer = (
    TrainerReady | TakeMicroBatch | StepDone | PolicyPublished | CheckpointSaved | CheckpointFailed | TrainingEnded | Alive | Failed
)
ToTrainer = LayoutFixed | MicroBatch | StepSealed | SlotReleased | PolicyHeld | EndTraining | Stop
