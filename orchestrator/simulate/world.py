"""How long everything takes, and how often it fails: what a simulation assumes beside the run's own settings.

Each field says what it is; `origins` says where the value comes from, so that every printed figure can name what it hangs on.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, TypeVar

import numpy as np

from orchestrator.simulate.draws import Distribution, fixed

_NOTHING, _ONE = fixed(0.0), fixed(1.0)
_CALL_S, _REPLY_S = fixed(0.01), fixed(0.05)
_PROMPT, _LENGTH = fixed(64.0), fixed(256.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineWorld:
    """One engine."""

    pass_s: tuple[tuple[float, float], ...] = ((1, 0.02),)
    """(sequences, seconds) of a forward pass that samples for so many, without its reads of KV caches: linear between and beyond."""
    kv_token_s: float = 0.0
    """Seconds of a pass for each token in the caches of the sequences that it samples for."""
    prefill_token_s: float = 0.0
    """Seconds of a pass for each token of a prompt that it computes."""
    pass_tokens: int = 8192
    """Tokens of the largest pass: prompts that do not fit go on in the next."""
    kv_tokens: float = math.inf
    """Tokens that the KV cache holds."""
    has_prefix_cache: bool = True
    """Siblings on one engine and one version share their prompt, turns of an episode all that came before."""
    block_tokens: int = 16
    """Tokens of a block of the KV cache: only whole ones are shared by siblings, or found again by the next turn."""
    tokens_per_pass: float = 1.0
    """Tokens of a sequence in a pass that verifies drafts (`engine.speculation`), the mean. Such a pass lasts as long as one that samples
    for as many sequences as it has tokens."""
    answer_s: float = 0.0
    """From the end of a pass until the orchestrator has the answer."""
    restart_s: float = 30.0
    """From the death of a process until the next one has the model loaded."""


def block_tokens_of(options: Mapping[str, Any]) -> int:
    """Return the tokens of a block of an engine's KV cache, as its options say, or vLLM does (16)."""
    return int(options.get("block_size") or EngineWorld().block_tokens)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SyncWorld:
    """The way of a policy from the trainer to the engines."""

    publish_s: float = 0.0
    """Seconds in which the trainer does nothing else."""
    publish_beside_s: float = 0.0
    """Seconds beside the next step's rows, until the policy is announced."""
    num_bytes: float = 0.0
    """That travel to each engine."""
    sender_rate: float = math.inf
    """Bytes per second that leave the trainer, to all engines together."""
    receiver_rate: float = math.inf
    """Bytes per second into one engine."""
    stage_s: Distribution = _NOTHING
    """Seconds of an engine's staging beside the transfer, while sequences run: it goes on between their passes."""
    idle_stage_s: Distribution | None = None
    """The same of an engine without a sequence; None: as long."""
    pause_s: float = 0.0
    """Seconds between two passes in which the engine swaps."""
    sleep_s: float = 0.0
    """Seconds in which an engine that shares its device with the trainer gives its memory away."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainerWorld:
    """The trainer; seconds are of one replica."""

    row_s: float = 0.0
    """Seconds of a row, whatever is in it."""
    token_s: float = 1e-5
    """Seconds of a row for each of its tokens."""
    square_s: float = 0.0
    """Seconds of a row for each square of a sample's tokens: attention."""
    forward_part: float = 1.0
    """What a token without a gradient takes, of these: no backward pass. 1: all have one."""
    answer_s: float = 0.0
    """Seconds that a score or a reply takes from the trainer's work, where orchestrator, scorers and rewards share its core."""
    wake_s: float = 0.0
    """Seconds that these take from it each time that they wake up."""
    step_s: float = 0.0
    """Seconds of a step beside its rows: reductions and the optimizer."""
    checkpoint_s: float = 0.0
    """Seconds in which a checkpoint holds up training."""
    restart_s: float = 60.0
    """From the death of a process until the next one trains."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScoringWorld:
    """Rewards, environment and process reward model."""

    score_s: Distribution = _CALL_S
    """Seconds of one call."""
    group_score_s: Distribution = _CALL_S
    """Seconds of a call that compares siblings."""
    failed_fraction: float = 0.0
    """Part of the calls that end in an error."""
    overhead_s: float = 0.0
    """From a completion until its call begins, and from its end until its group is batched, beside all waits."""
    reply_s: Distribution = _REPLY_S
    """Seconds of an environment's reply."""
    reply_tokens: int = 0
    """Tokens of it."""
    turns: Distribution = _ONE
    """Turns of an episode."""
    prm_batch_s: float = 0.0
    """Seconds of a batch in the process reward model, whatever is in it."""
    prm_step_s: float = 0.0
    """Seconds for each of its steps."""
    prm_token_s: float = 0.0
    """Seconds for each of its tokens."""
    prm_step_tokens: float = 0.0
    """Tokens from one step of a completion to the next, where they are more than those of a chunk; else each chunk is a step."""
    hopeless_fraction: float = 0.0
    """Part of the rollouts that the process reward model flags, each at a step drawn evenly."""


_ENGINE, _SYNC, _TRAINER, _SCORING = EngineWorld(), SyncWorld(), TrainerWorld(), ScoringWorld()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All of it."""

    engine: EngineWorld = _ENGINE
    sync: SyncWorld = _SYNC
    trainer: TrainerWorld = _TRAINER
    scoring: ScoringWorld = _SCORING
    admit_s: float = 0.0
    """Seconds between two groups that are sent to engines while nothing holds them back: what the orchestrator takes for one."""
    prompt_tokens: Distribution = _PROMPT
    lengths: Distribution = _LENGTH
    """Tokens that a rollout would write without a limit."""
    length_factors: tuple[float, ...] = (1.0,)
    """How many times as long as `lengths` completions are, at evenly spaced places of the run from its first group to its last; from one
    place to the next each group's are longer by the same factor. (1, 8): answers grow, as a reasoning run's do; (1, 8, 1): they swing."""
    prompt_factors: tuple[float, ...] = (1.0,)
    """The same of prompts: (1, 1, 96, 96) has short ones for a third of the run and long ones for the last, as where tasks take turns."""
    likeness: float = 0.0
    """Correlation of the lengths of siblings."""
    reward_mean: float = 0.5
    """Of completions that end by themselves."""
    truncated_reward_mean: float | None = None
    """Of those that end at their limit; None: the same."""
    reward_spread: float = 0.3
    """How far prompts differ in difficulty: 0 not at all, 1: each is always right or always wrong."""
    num_prompts: int = 1 << 40
    """Rows of the source."""
    slowdowns: Mapping[str, float] = dataclasses.field(default_factory=dict)
    """How much longer work lasts beside other work, by `kind/other`, of engine, trainer and prm; see `cores`. Empty: own devices."""
    report_every_s: float = 1.0
    """Seconds between two reports of an engine's gauges, which adaptive concurrency follows."""
    origins: Mapping[str, str] = dataclasses.field(default_factory=dict)
    """Where values come from, by field or part: a run, a plan, or a guess."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Faults, each at the beginning of a step drawn by seed, all of them different."""

    engine: int = 0
    """Deaths of an engine's process: what it had is asked for again, elsewhere."""
    trainer: int = 0
    """Deaths of the trainer: it goes on from its newest checkpoint."""
    scorer: int = 0
    """Times for which every call takes `slowness` times as long."""
    link: int = 0
    """Times for which no policy travels."""
    lasts_s: float = 60.0
    """Seconds of a slow scorer or a lost link."""
    slowness: float = 10.0


NO_FAULTS = Faults()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slowness:
    """How many times as long each part's work takes as usual, where its device is slower now and then."""

    engine: float = 1.0
    trainer: float = 1.0
    prm: float = 1.0


USUAL = Slowness()


def slowed(world: World, slowness: Slowness) -> World:
    """Return a world in which passes, rows and batches take so many times as long, and all else what it took."""
    engine = _times(slowness.engine, world.engine, "kv_token_s", "prefill_token_s")
    return dataclasses.replace(
        world,
        engine=dataclasses.replace(engine, pass_s=tuple((sequences, seconds * slowness.engine) for sequences, seconds in engine.pass_s)),
        trainer=_times(slowness.trainer, world.trainer, "row_s", "token_s", "square_s", "answer_s", "wake_s", "step_s"),
        scoring=_times(slowness.prm, world.scoring, "prm_batch_s", "prm_step_s", "prm_token_s"),
    )


_Part = TypeVar("_Part", EngineWorld, TrainerWorld, ScoringWorld)


def _times(factor: float, part: _Part, *names: str) -> _Part:
    return dataclasses.replace(part, **{name: factor * getattr(part, name) for name in names})


def faults_by_step(faults: Faults, *, num_steps: int, seed: int) -> dict[int, list[str]]:
    """Draw the step at whose first row each fault happens."""
    chance = np.random.default_rng((seed, 3))
    kinds = [kind for kind in ("engine", "trainer", "scorer", "link") for _ in range(getattr(faults, kind))]
    found: dict[int, list[str]] = {}
    for kind in kinds:
        found.setdefault(int(chance.integers(min(1, num_steps - 1), num_steps)), []).append(kind)
    return found


def world_as_data(world: World) -> dict[str, Any]:
    """Return a world as JSON values; what is not bounded is None."""
    return {field.name: _plain(getattr(world, field.name)) for field in dataclasses.fields(world)}


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, tuple):
        return [_plain(each) for each in value]
    return None if isinstance(value, float) and math.isinf(value) else value
