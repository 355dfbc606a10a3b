"""Lies that a peer with a valid key can tell: each with the kind under which the orchestrator must refuse it.

A lie is made of a true message, so that nothing but one thing about it is wrong, and said before it; those that are bytes break the wire's
own rules. What is plausible and false is not here: `liar` forges log-probabilities within their range, which only the trainer can see.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np

from orchestrator.rules.validation.violations import Kind
from pipelinerl.messages import (
    Alive,
    CheckpointFailed,
    CheckpointSaved,
    Completion,
    EngineLoad,
    EngineReady,
    Finish,
    Generate,
    Message,
    Outcome,
    PolicyPublished,
    Result,
    Routes,
    ScorerLoad,
    ScorerReady,
    StepDone,
    TakeMicroBatch,
    TrainerReady,
    WeightsCommitted,
    WeightsRefused,
    WeightsStaged,
)
from pipelinerl.transport import frame
from pipelinerl.transport.codec import encode

MALFORMED, SCHEMA = "malformed", "schema"
"""Kinds of the transport, which cannot read these."""
FLOOD = 64
"""Answers to nothing, said at once."""
_FAR = 1_000_000
"""Beyond every vocabulary, version and step of a rehearsal."""
_swap = msgspec.structs.replace


@dataclasses.dataclass(slots=True, kw_only=True)
class Known:
    """The knowledge by which a peer lies."""

    chance: random.Random
    identity: int
    """Of its end of the session."""
    asked: dict[str, Generate] = dataclasses.field(default_factory=dict)
    """What an engine's process was asked, by rollout id."""
    said: dict[type[Message], Any] = dataclasses.field(default_factory=dict)
    """By type: the last that the process truly said."""

    def number(self) -> int:
        """Another one for every lie, so that no two are the same bytes."""
        return self.chance.randrange(_FAR)


@dataclasses.dataclass(frozen=True, slots=True)
class Forgery:
    """One way to lie."""

    kind: str
    name: str
    make: Callable[[Any, Known], Message | bytes | list[Message] | None]
    """Of a true message; None where this one does not lend itself to it."""
    is_answer: bool = False
    """It is about an attempt: where that was given up meanwhile, it is fenced in place of being refused."""
    is_frame: bool = False
    """Bytes for the wire itself, outside of the session: they die with their connection."""
    replaces: bool = False
    """It is said in place of the truth."""


def _of_completion(kind: str, name: str, make: Callable[[Completion, Known], Message | bytes | None]) -> Forgery:
    return Forgery(kind, name, lambda said, known: make(said, known) if len(said.token_ids) > 1 else None, is_answer=True)


def _last(column: np.ndarray, value: float) -> np.ndarray:
    return np.append(column[:-1], value).astype(column.dtype)


def _broken(said: Message, **fields: Any) -> bytes:
    """A message that its own class would refuse to be."""
    return msgspec.msgpack.encode(msgspec.msgpack.decode(encode(said)) | fields)


def _column(values: np.ndarray, code: int) -> msgspec.msgpack.Ext:
    return msgspec.msgpack.Ext(code, values.tobytes())


def _too_long(said: Completion, known: Known) -> Completion | None:
    asked = known.asked.get(said.rollout_id)
    if asked is None:
        return None
    num = asked.sampling.max_tokens + 1
    versions = np.full(num, said.versions[0], np.int32)
    return _swap(said, token_ids=np.resize(said.token_ids, num), logprobs=np.resize(said.logprobs, num), versions=versions, recomputed=())


def _anothers(said: Completion, known: Known) -> Completion | None:
    """The first attempt at a rollout that another engine was asked for: groups are first asked for in order, so none of an earlier group
    can be on its way here."""
    newest = max(int(name.partition("/")[0]) for name in (*known.asked, said.rollout_id))
    sibling = said.rollout_id.partition("/")[2]
    others = [name for group in range(max(0, newest - 8), newest) if (name := f"{group}/{sibling}") not in known.asked]
    return _swap(said, rollout_id=known.chance.choice(others), attempt=0, started_at=known.chance.random()) if others else None


def _routes(said: Completion, known: Known) -> Completion | None:
    asked = known.asked.get(said.rollout_id)
    if asked is None or said.routes is not None:
        return None
    experts = np.zeros(len(asked.token_ids) + len(said.token_ids) - 1, np.uint8)
    return _swap(said, routes=Routes(num_layers=1, top_k=1, width=1, experts=experts))


def _another_process(known: Known) -> int:
    return 10 * _FAR + known.number()


COMPLETIONS = (
    _of_completion(Kind.TOKENS, "a token beyond the vocabulary", lambda said, _: _swap(said, token_ids=_last(said.token_ids, _FAR))),
    _of_completion(Kind.TOKENS, "a token below 0", lambda said, _: _swap(said, token_ids=_last(said.token_ids, -5))),
    _of_completion(Kind.LOGPROBS, "NaN", lambda said, _: _swap(said, logprobs=_last(said.logprobs, np.nan))),
    _of_completion(Kind.LOGPROBS, "-inf", lambda said, _: _swap(said, logprobs=_last(said.logprobs, -np.inf))),
    _of_completion(Kind.LOGPROBS, "above 0", lambda said, _: _swap(said, logprobs=_last(said.logprobs, 3.0))),
    _of_completion(Kind.VERSIONS, "a version nobody published", lambda said, _: _swap(said, versions=_last(said.versions, _FAR))),
    _of_completion(Kind.VERSIONS, "a version before all", lambda said, _: _swap(said, versions=np.full_like(said.versions, -1))),
    _of_completion(Kind.LENGTH, "more tokens than asked for", _too_long),
    _of_completion(
        Kind.FINISH,
        "stopped at no token",
        lambda said, _: _swap(
            said, token_ids=said.token_ids[:0], logprobs=said.logprobs[:0], versions=said.versions[:0], recomputed=(), finish=Finish.STOP
        ),
    ),
    _of_completion(Kind.BOUNDS, "begun at no time", lambda said, _: _swap(said, started_at=float("inf"))),
    _of_completion(Kind.ROUTES, "routes of a model without experts", _routes),
    _of_completion(MALFORMED, "columns of two lengths", lambda said, _: _broken(said, logprobs=_column(said.logprobs[:-1], 2))),
    _of_completion(MALFORMED, "versions that fall", lambda said, _: _broken(said, versions=_column(_last(said.versions, -9), 1))),
    _of_completion(MALFORMED, "a list without bound", lambda said, _: _broken(said, recomputed=[0] * 70_000)),
    _of_completion(MALFORMED, "a column of another type", lambda said, _: _broken(said, token_ids=_column(said.logprobs, 2))),
    _of_completion(Kind.UNASKED, "an attempt nobody was given", lambda said, known: _swap(said, attempt=1000 + known.number())),
    _of_completion(Kind.UNASKED, "another engine's rollout", _anothers),
)


def _flood(load: EngineLoad, known: Known) -> list[Message] | None:
    said = known.said.get(Completion)
    return [_swap(said, attempt=1000 + _FAR * (1 + each) + known.number()) for each in range(FLOOD)] if said is not None else None


def _ready(kind: type[Message], **fields: Any) -> Callable[[Message, Known], Message | None]:
    """An announcement of another process, with something wrong."""

    def make(_: Message, known: Known) -> Message | None:
        ready = known.said.get(kind)
        return _swap(ready, process_id=_another_process(known), **fields) if ready is not None else None

    return make


ENGINE = (
    Forgery(Kind.IDENTITY, "another engine's gauges", lambda load, known: _swap(load, engine_id=30_000 + known.number())),
    Forgery(Kind.BOUNDS, "gauges that are no number", lambda load, known: _swap(load, busy_s=float("nan"), num_tokens=known.number())),
    Forgery(Kind.BOUNDS, "gauges below 0", lambda load, known: _swap(load, num_tokens=-1 - known.number())),
    Forgery(
        Kind.VERSIONS,
        "a policy committed that nobody published",
        lambda load, known: WeightsCommitted(
            engine_id=load.engine_id, version=_FAR + known.number(), pause_s=0.0, stage_s=0.0, num_running=0
        ),
    ),
    Forgery(
        Kind.VERSIONS,
        "a policy staged that nobody published",
        lambda load, known: WeightsStaged(engine_id=load.engine_id, version=_FAR + known.number(), stage_s=0.0),
    ),
    Forgery(
        Kind.VERSIONS,
        "a policy refused that nobody published",
        lambda load, known: WeightsRefused(engine_id=load.engine_id, version=-1 - known.number(), error="so they say"),
    ),
    Forgery(Kind.VERSIONS, "ready with a version nobody published", _ready(EngineReady, version=_FAR)),
    Forgery(Kind.BOUNDS, "ready for a thousand million sequences", _ready(EngineReady, max_running=10**9)),
    Forgery(Kind.BOUNDS, "more running than it was asked", _ready(EngineReady, running={f"{n}/0": 0 for n in range(20_000)})),
    Forgery(MALFORMED, "running without bound", _ready(EngineReady, running={f"{n}/0": 0 for n in range(140_000)})),
    Forgery(MALFORMED, "a trainer's message", lambda _, known: StepDone(step=known.number(), metrics={})),
    Forgery(Kind.UNASKED, "a flood of answers to nothing", _flood),
)


def _of_score(kind: str, name: str, make: Callable[[Result, Known], Message | bytes | None]) -> Forgery:
    return Forgery(kind, name, lambda said, known: make(said, known) if said.rewards else None, is_answer=True)


def _no_number(said: Result) -> tuple[dict[str, float], ...]:
    return tuple(dict.fromkeys(found, float("nan")) for found in said.components)


SCORES = (
    _of_score(
        Kind.SCORES,
        "of a function that is none",
        lambda said, _: _swap(said, components=({"no_such_function": 1.0},) * len(said.rewards), rewards=(1.0,) * len(said.rewards)),
    ),
    _of_score(Kind.SCORES, "not the sum of its parts", lambda said, _: _swap(said, rewards=tuple(each + 1.0 for each in said.rewards))),
    _of_score(Kind.SCORES, "a part that is no number", lambda said, _: _swap(said, components=_no_number(said))),
    _of_score(
        Kind.SCORES, "stopped, which it cannot know", lambda said, _: _swap(said, outcome=Outcome.STOPPED, rewards=(), components=())
    ),
    _of_score(Kind.BOUNDS, "in no time", lambda said, _: _swap(said, duration_s=float("nan"))),
    _of_score(MALFORMED, "a reward that is no number", lambda said, _: _broken(said, rewards=(float("inf"),) * len(said.rewards))),
    _of_score(Kind.UNASKED, "a request that nobody made", lambda said, known: _swap(said, request_id=_FAR + known.number())),
)
SCORER = (
    Forgery(
        Kind.UNASKED,
        "a failure of a request that nobody made",
        lambda _, known: Result(request_id=_FAR + known.number(), outcome=Outcome.ERROR, error="so they say"),
    ),
    Forgery(Kind.IDENTITY, "another scorer's gauges", lambda load, known: _swap(load, scorer_id=7 + known.number())),
    Forgery(Kind.BOUNDS, "gauges that are no number", lambda load, known: _swap(load, busy_s=float("nan"), num_scored=known.number())),
    Forgery(Kind.BOUNDS, "ready for a thousand million calls", _ready(ScorerReady, num_slots=10**9)),
    Forgery(MALFORMED, "an engine's message", lambda _, known: WeightsStaged(engine_id=0, version=known.number(), stage_s=0.0)),
)


def _trained(known: Known) -> int:
    """Steps in its weights."""
    done, ready = known.said.get(StepDone), known.said.get(TrainerReady)
    return done.step + 1 if done is not None else ready.version if ready is not None else 0


def _saved(**fields: Any) -> Callable[[Message, Known], Message | None]:
    """A checkpoint of the newest version, with something wrong."""

    def make(_: Message, known: Known) -> Message | None:
        version = _trained(known)
        saved = CheckpointSaved(version=version, commit=f"forged-{known.number()}", num_bytes=0, save_s=0.0)
        return _swap(saved, **fields) if version else None

    return make


def _published(version: Callable[[Known], int], *, publish_s: float = 0.0) -> Callable[[Message, Known], Message]:
    def make(_: Message, known: Known) -> Message:
        return PolicyPublished(version=version(known), buffer=f"forged-{known.number()}", digest="", num_bytes=0, publish_s=publish_s)

    return make


def _oldest(_: Message, known: Known) -> Message | None:
    saved = known.said.get(CheckpointSaved)
    return _swap(saved, oldest=saved.version + 1 + known.number(), save_s=known.chance.random()) if saved is not None else None


STEPS = (
    Forgery(
        Kind.BOUNDS,
        "figures that are no number",
        lambda said, known: _swap(said, metrics={"loss": float("nan"), "number": known.number()}),
        replaces=True,
    ),
    Forgery(Kind.STEPS, "a step far ahead", lambda said, known: _swap(said, step=said.step + 1000 + known.number())),
)
TRAINER = (
    Forgery(Kind.STEPS, "a step before all", lambda _, known: StepDone(step=-1 - known.number(), metrics={})),
    Forgery(Kind.STEPS, "a policy far ahead", _published(lambda known: _trained(known) + 1000 + known.number())),
    Forgery(Kind.STEPS, "a policy before all", _published(lambda known: -1 - known.number())),
    Forgery(Kind.BOUNDS, "a policy in no time", _published(lambda _: 0, publish_s=float("nan"))),
    Forgery(Kind.STEPS, "a checkpoint of another ledger", _saved()),
    Forgery(Kind.STEPS, "a checkpoint far ahead", _saved(version=_FAR)),
    Forgery(Kind.STEPS, "a checkpoint beyond any integer", _saved(version=2**64 - 1)),
    Forgery(Kind.STEPS, "a checkpoint that forgets its own rows", _oldest),
    Forgery(
        Kind.STEPS,
        "a checkpoint that failed far ahead",
        lambda _, known: CheckpointFailed(version=_FAR + known.number(), error="so they say"),
    ),
    Forgery(Kind.STEPS, "a pull of a step before all", lambda _, known: TakeMicroBatch(replica=0, step=-1 - known.number(), index=0)),
    Forgery(
        Kind.STEPS,
        "a pull of a row before all",
        lambda _, known: TakeMicroBatch(replica=0, step=_trained(known), index=-1 - known.number()),
    ),
    Forgery(Kind.IDENTITY, "another replica's pull", lambda _, known: TakeMicroBatch(replica=5, step=known.number(), index=0)),
    Forgery(Kind.STEPS, "ready with a version beyond the run", _ready(TrainerReady, version=10**9, saved=None)),
    Forgery(Kind.STEPS, "ready with another ledger's weights", _ready(TrainerReady, version=1, saved=None, commit="forged")),
    Forgery(Kind.BOUNDS, "ready with more replicas than there are", _ready(TrainerReady, num_replicas=7)),
    Forgery(MALFORMED, "an engine's message", lambda _, known: WeightsStaged(engine_id=0, version=known.number(), stage_s=0.0)),
)
FRAMES = (
    Forgery(
        MALFORMED,
        "half a frame",
        lambda _, known: frame.pack(frame.Kind.MESSAGES, known.identity, 0, known.chance.randrange(2**32), 0)[:36],
        is_frame=True,
    ),
    Forgery(MALFORMED, "bytes that are no frame", lambda _, known: known.chance.randbytes(64), is_frame=True),
    Forgery(
        MALFORMED,
        "an acknowledgement of what was never sent",
        lambda _, known: frame.pack(frame.Kind.ACK, known.identity, 0, 0, 2**62 + known.number()),
        is_frame=True,
    ),
    Forgery(
        SCHEMA, "a frame of another build", lambda _, known: b"PL" + bytes([frame.WIRE + 1]) + known.chance.randbytes(61), is_frame=True
    ),
    Forgery(MALFORMED, "a message that is none", lambda _, known: known.chance.randbytes(64)),
)
OCCASIONS: dict[type[Message], tuple[Forgery, ...]] = {
    Completion: COMPLETIONS,
    EngineLoad: ENGINE + FRAMES,
    Result: SCORES,
    ScorerLoad: SCORER + FRAMES,
    StepDone: STEPS,
    Alive: TRAINER + FRAMES,
}
"""On which true message which lies are told."""
