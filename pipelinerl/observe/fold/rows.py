"""Journal lines as typed rows: one dataclass per kind of line that a view shows, and `read`, which alone reads a line's fields.

A run that ended early, or an older journal, lacks fields: a number that is missing or not finite is None, and a missing table is empty,
so every view has to say what it shows in its place. Nothing here raises on a line that has `t` and `kind`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, TypeVar

from pipelinerl.observe.fold.members import MemberRow
from pipelinerl.observe.fold.roles import RolesRow
from pipelinerl.observe.fold.trainer_ranks import TrainerRanksRow
from pipelinerl.observe.renamed import Line

ADMISSION_WAIT = "generation: an admission credit"
"""Key of `waited_s`: groups could not be admitted, so engines are not refilled."""
BATCH_WAIT = "trainer: a micro-batch"
"""Key of `waited_s`: the trainer asked for a micro-batch that was not there yet."""
EXITS = ("trained", "filtered", "stale", "failed", "cancelled")
"""The ways out of the pipeline; with `in_flight` they add up to `admitted`."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunRow:
    """A start of the run: its settings, which are empty where they are not recorded."""

    t: float = 0.0
    config: Line = dataclasses.field(default_factory=dict)
    """Resolved settings."""
    derived: Line = dataclasses.field(default_factory=dict)
    machine: dict[str, int] = dataclasses.field(default_factory=dict)
    """`cores` and `devices` of the orchestrator's machine; empty where that is not recorded."""

    def setting(self, *path: str) -> Any:
        """A configured value by section and key; None where it is not recorded."""
        value: Any = self.config
        for key in path:
            value = value.get(key) if isinstance(value, dict) else None
        return value


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EngineGauge:
    """One engine as the orchestrator last heard of it; seconds and counts are since it started."""

    engine_id: int
    version: float | None = None
    num_running: float | None = None
    num_waiting: float | None = None
    num_tokens: float | None = None
    num_steps: float | None = None
    busy_s: float | None = None
    idle_s: float | None = None
    kv_used: float | None = None
    """Part of its KV cache that sequences hold."""
    num_drafted: float | None = None
    """Drafted tokens that its passes verified (`engine.speculation`)."""
    num_accepted: float | None = None
    """Of these, the ones that became part of a completion."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ScorerGauge:
    """One scorer as the orchestrator last heard of it."""

    scorer_id: int
    num_running: float | None = None
    num_scored: float | None = None
    busy_s: float | None = None
    """Seconds of reward calls since it started, summed over its slots."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class QueueGauge:
    """One queue between two stages."""

    items: float | None = None
    bytes: float | None = None
    bound_bytes: float | None = None
    num_items_total: float | None = None
    """Items put into it since the orchestrator started."""

    @property
    def fill_fraction(self) -> float | None:
        """Bytes held of the bytes allowed."""
        return self.bytes / self.bound_bytes if self.bytes is not None and self.bound_bytes else None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StatusRow:
    """The gauges of one moment."""

    t: float
    """Unix seconds."""
    version: float | None = None
    step: float | None = None
    num_steps: float | None = None
    groups_running: float | None = None
    groups_accepted: float | None = None
    generated_tokens: float | None = None
    """Since the run began."""
    trained_tokens: float | None = None
    """Since the run began."""
    reward_mean: float | None = None
    staleness_mean: float | None = None
    staleness_max: float | None = None
    last_pause_s: float | None = None
    elapsed_s: float | None = None
    memory_bytes: float | None = None
    """Resident memory of the orchestrator."""
    rollouts: dict[str, float] = dataclasses.field(default_factory=dict)
    reasons: dict[str, float] = dataclasses.field(default_factory=dict)
    waited_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds waited since the run began, by `stage: what`."""
    waits: tuple[tuple[str, float], ...] = ()
    """Waits under way, longest first: `stage: what` and seconds."""
    engines: tuple[EngineGauge, ...] = ()
    members: tuple[MemberRow, ...] = ()
    """Engines that join, drain or are lost."""
    scorers: tuple[ScorerGauge, ...] = ()
    prm: dict[str, float] = dataclasses.field(default_factory=dict)
    """Gauges of the process reward model; empty in a run without one."""
    environment: dict[str, float] = dataclasses.field(default_factory=dict)
    """Gauges of an environment; empty in a run without one."""
    gateway: dict[str, float] = dataclasses.field(default_factory=dict)
    """Gauges of the gateway and of what it has lent to agents; empty in a run without one."""
    dispatch: dict[str, float] = dataclasses.field(default_factory=dict)
    """What the rules that send rollouts one by one have done since the run began; empty in a run without them."""
    queues: dict[str, QueueGauge] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One optimizer step."""

    t: float = 0.0
    """Unix seconds."""
    step: int
    version: float | None = None
    reward_mean: float | None = None
    reward_std: float | None = None
    greedy_reward_mean: float | None = None
    """Mean over the greedy siblings, under a method that has some."""
    num_groups: float | None = None
    num_samples: float | None = None
    num_tokens: float | None = None
    num_trained_tokens: float | None = None
    num_useful_tokens: float | None = None
    """Trained tokens whose advantage is not zero; absent where the trainer makes the advantages."""
    length_mean: float | None = None
    turns_mean: float | None = None
    truncated_fraction: float | None = None
    repeated_fraction: float | None = None
    """4-grams that a sample has said before; absent where samples are short."""
    zero_variance_fraction: float | None = None
    filtered_groups: float | None = None
    """Groups that the method filtered while the step was being filled."""
    stale_groups: float | None = None
    """Groups dropped for their age while the step was being filled."""
    engine_mismatch: tuple[str, ...] = ()
    """Sentences about engines whose log-probabilities differ from the trainer's (`pipelinerl.algorithms.mismatch`)."""
    staleness_mean: float | None = None
    """Versions, over trained tokens; the part in flight came while the rollout was sampled, the part in queue after it."""
    staleness_min: float | None = None
    staleness_max: float | None = None
    staleness_in_flight_mean: float | None = None
    staleness_in_flight_max: float | None = None
    staleness_in_queue_mean: float | None = None
    staleness_in_queue_max: float | None = None
    in_flight_s_mean: float | None = None
    in_queue_s_mean: float | None = None
    elapsed_s: float | None = None
    staleness: dict[int, float] = dataclasses.field(default_factory=dict)
    """Trained tokens by age in versions."""
    components: dict[str, float] = dataclasses.field(default_factory=dict)
    trainer: dict[str, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SwapRow:
    """One engine's change of version."""

    t: float
    engine_id: int = -1
    """-1 where it was not told."""
    version: float | None = None
    pause_s: float | None = None
    stage_s: float | None = None
    num_running: float | None = None
    num_recomputed_tokens: float | None = None
    """Tokens whose KV cache was dropped, to be computed again under the new version."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationRow:
    """One pass over the held-out prompts."""

    t: float = 0.0
    version: float | None = None
    reward_mean: float | None = None
    num_prompts: float | None = None
    num_samples: float | None = None
    """Answers to each prompt."""
    pass_at: dict[str, float] = dataclasses.field(default_factory=dict)
    """By k: the chance that one of k answers is correct."""
    components: dict[str, float] = dataclasses.field(default_factory=dict)
    """Mean of each reward function, before weighting."""
    oldest_version: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Alarm:
    """An alarm of learning that was raised, or, with `is_over`, that ended."""

    name: str = ""
    """A `config.alarm_names.AlarmName`; of an older run it may be one that is gone."""
    began: int = 0
    """Step from which on it holds; of an evaluation, the version."""
    step: int = 0
    """At which it was noticed."""
    figure: str = ""
    """The observation, in one sentence."""
    change: str = ""
    """The change to make."""
    is_over: bool = False

    def __str__(self) -> str:
        return f"{self.name} since step {self.began}: {self.figure}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FunctionErrorRow:
    """Failures of a user's function by one cause, within one start of the run."""

    t: float
    """Unix seconds of the first failure."""
    function: str = ""
    kind: str = ""
    cause: str = ""
    where: str = ""
    outcome: str = ""
    count: float = 1
    num_calls: float | None = None
    """Calls of the function."""

    @property
    def key(self) -> tuple[str, str, str]:
        return self.function, self.where, self.cause


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EndRow:
    """The end of the run."""

    t: float
    reason: str = ""
    rollouts: dict[str, float] = dataclasses.field(default_factory=dict)
    elapsed_s: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StartUpRow:
    """A part of a process's start, or, of the orchestrator, of the whole run's."""

    process: str = "?"
    what: str = ""
    start: float = 0.0
    """Unix seconds."""
    end: float = 0.0
    """Unix seconds."""


R = TypeVar("R")
Row = RunRow | StatusRow | StepRow | SwapRow | EvaluationRow | FunctionErrorRow | Alarm | EndRow | MemberRow | TrainerRanksRow | RolesRow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error that ended a process."""

    t: float = 0.0
    process: str = "?"
    error: str = ""


def row_of(line: Line) -> Row | None:
    """The typed row of a journal line; None for a kind that no view shows, and for a line without what its row stands for."""
    kind = _KINDS.get(line["kind"])
    needed = {StepRow: "step", MemberRow: "engine_id"}.get(kind) if kind is not None else None
    if kind is None or (needed is not None and number(line.get(needed)) is None):
        return None
    return read(kind, {**line, "kind": line.get("function_kind")} if kind is FunctionErrorRow else line)


def read(row: type[R], line: Line) -> R:
    """The row, or gauge, that a line's fields make, each read by its type; one that is missing or of another type keeps its default."""
    return row(**{name: value for name, of in _readers(row) if (value := of(line.get(name))) is not None})


def number(value: Any) -> float | None:
    """A finite number as it is, anything else None."""
    kind = type(value)
    return value if kind is int or (kind is float and math.isfinite(value)) else None


def numbers(value: Any) -> dict[str, float]:
    """The finite numbers of a JSON object; empty where there is no object."""
    items = value.items() if isinstance(value, dict) else ()
    return {str(name): finite for name, entry in items if (finite := number(entry)) is not None}


def is_idle(wait: str) -> bool:
    """Return true where a wait, `stage: what`, is a wait for work: it is long where the stage is quick, and says nothing of who is slow."""
    return wait.partition(": ")[2] in _IDLE


_FOR_INPUT = ("trajectories", "generated", "scored", "group_scored", "prm_scored", "rows", "policies", "completions", "scores", "turns")
_IDLE = frozenset((*_FOR_INPUT, "starts", "comparisons", "step scores", "packed", "sampled", "room in prompts"))


def imbalance(identity: dict[str, float]) -> int | None:
    """Admitted less everything it must have become: 0 when it balances, None where no identity was recorded."""
    if "admitted" not in identity:
        return None
    return int(identity["admitted"] - sum(identity.get(name, 0) for name in ("in_flight", *EXITS)))


def _object(value: Any) -> Line:
    return value if isinstance(value, dict) else {}


def _objects(value: Any) -> list[Line]:
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


def _gauges(row: type[R], identity: str) -> Callable[[Any], tuple[R, ...]]:
    """Reads the gauges of a fleet; an entry that does not say whose it is is left out."""
    return lambda value: tuple(read(row, entry) for entry in _objects(value) if identity in entry)


_BY_TYPE: dict[str, Callable[[Any], Any]] = {
    "int": number,
    "float": number,
    "float | None": number,
    "bool": bool,
    "str": lambda value: None if value is None else str(value),
    "Line": _object,
    "dict[str, float]": numbers,
    "dict[str, int]": lambda value: {name: count for name, count in numbers(value).items() if isinstance(count, int)},
    "dict[int, float]": lambda value: {int(name): count for name, count in numbers(value).items() if name.lstrip("-").isdigit()},
    "dict[str, QueueGauge]": lambda value: {
        str(name): read(QueueGauge, entry) for name, entry in _object(value).items() if isinstance(entry, dict)
    },
    "tuple[str, ...]": lambda value: tuple(map(str, value)) if isinstance(value, list) else (),
    "tuple[tuple[str, float], ...]": lambda value: tuple(
        (f"{wait.get('stage')}: {wait.get('what')}", number(wait.get("seconds")) or 0.0) for wait in _objects(value)
    ),
    "tuple[EngineGauge, ...]": _gauges(EngineGauge, "engine_id"),
    "tuple[ScorerGauge, ...]": _gauges(ScorerGauge, "scorer_id"),
    "tuple[MemberRow, ...]": _gauges(MemberRow, "engine_id"),
}
"""Reads a field by its type: None where the line has nothing that fits."""
_KINDS: dict[str, type[Row]] = {
    "run": RunRow,
    "status": StatusRow,
    "step": StepRow,
    "swap": SwapRow,
    "evaluation": EvaluationRow,
    "function_error": FunctionErrorRow,
    "alarm": Alarm,
    "end": EndRow,
    "member": MemberRow,
    "trainer_ranks": TrainerRanksRow,
    "roles": RolesRow,
}


@functools.cache
def _readers(row: type[Any]) -> tuple[tuple[str, Callable[[Any], Any]], ...]:
    return tuple((field.name, _BY_TYPE[str(field.type)]) for field in dataclasses.fields(row))
