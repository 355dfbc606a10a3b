"""Journal lines as typed rows: one dataclass per kind of line that a view shows, and `row_of`, which alone reads a line's fields.

A run that ended early, or an older journal, lacks fields: a number that is missing or not finite is None, and a missing table is empty,
so every view has to say what it shows in its place. Nothing here raises on a line that has `t` and `kind`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

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
    identity: dict[str, float] = dataclasses.field(default_factory=dict)
    reasons: dict[str, float] = dataclasses.field(default_factory=dict)
    waited_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Seconds waited since the run began, by `stage: what`."""
    waits: tuple[tuple[str, float], ...] = ()
    """Waits under way, longest first: `stage: what` and seconds."""
    engines: tuple[EngineGauge, ...] = ()
    scorers: tuple[ScorerGauge, ...] = ()
    prm: dict[str, float] = dataclasses.field(default_factory=dict)
    """Gauges of the process reward model; empty in a run without one."""
    environment: dict[str, float] = dataclasses.field(default_factory=dict)
    """Gauges of an environment; empty in a run without one."""
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
    engine_id: int
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

    name: str
    """A `config.alarm_names.AlarmName`; of an older run it may be one that is gone."""
    began: int
    """Step from which on it holds; of an evaluation, the version."""
    step: int
    """At which it was noticed."""
    figure: str
    """The observation, in one sentence."""
    change: str
    """The change to make."""
    is_over: bool = False

    def __str__(self) -> str:
        return f"{self.name} since step {self.began}: {self.figure}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FunctionErrorRow:
    """Failures of a user's function by one cause, within one start of the run."""

    t: float
    """Unix seconds of the first failure."""
    function: str
    kind: str
    cause: str
    where: str
    outcome: str = ""
    count: float
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
    identity: dict[str, float] = dataclasses.field(default_factory=dict)
    elapsed_s: float | None = None


Row = RunRow | StatusRow | StepRow | SwapRow | EvaluationRow | FunctionErrorRow | Alarm | EndRow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """The error that ended a process."""

    t: float
    process: str
    error: str


def row_of(line: Line) -> Row | None:
    """The typed row of a journal line; None for a kind that no view shows, and for a line without what its row stands for."""
    read = _READ.get(line["kind"])
    return None if read is None else read(line)


def number(value: Any) -> float | None:
    """A finite number as it is, anything else None."""
    kind = type(value)
    return value if kind is int or (kind is float and math.isfinite(value)) else None


def numbers(value: Any) -> dict[str, float]:
    """The finite numbers of a JSON object; empty where there is no object."""
    items = value.items() if isinstance(value, dict) else ()
    return {str(name): finite for name, entry in items if (finite := number(entry)) is not None}


def status_row(line: Line) -> StatusRow:
    """A line of kind `status`."""
    queues = _objects(line, "queues")
    return StatusRow(
        **_scalars(StatusRow, line),
        identity=numbers(line.get("rollouts")),
        reasons=numbers(line.get("reasons")),
        waited_s=numbers(line.get("waited_s")),
        waits=tuple((f"{wait.get('stage')}: {wait.get('what')}", number(wait.get("seconds")) or 0.0) for wait in _list(line, "waits")),
        engines=tuple(EngineGauge(**_scalars(EngineGauge, entry)) for entry in _list(line, "engines") if "engine_id" in entry),
        scorers=tuple(ScorerGauge(**_scalars(ScorerGauge, entry)) for entry in _list(line, "scorers") if "scorer_id" in entry),
        prm=numbers(line.get("prm")),
        environment=numbers(line.get("environment")),
        queues={name: QueueGauge(**_scalars(QueueGauge, entry)) for name, entry in queues.items()},
    )


def step_row(line: Line) -> StepRow:
    """A line of kind `step`."""
    ages, differ = numbers(line.get("staleness")), line.get("engine_mismatch")
    return StepRow(
        **_scalars(StepRow, line),
        engine_mismatch=tuple(map(str, differ)) if isinstance(differ, list) else (),
        staleness={int(age): tokens for age, tokens in ages.items() if age.lstrip("-").isdigit()},
        components=numbers(line.get("components")),
        trainer=numbers(line.get("trainer")),
    )


def swap_row(line: Line) -> SwapRow:
    """A line of kind `swap`; engine -1 where it does not say which."""
    return SwapRow(**_scalars(SwapRow, {"engine_id": -1, **line}))


def evaluation_row(line: Line) -> EvaluationRow:
    """A line of kind `evaluation`."""
    return EvaluationRow(**_scalars(EvaluationRow, line), pass_at=numbers(line.get("pass_at")), components=numbers(line.get("components")))


def alarm_row(line: Line) -> Alarm:
    """A line of kind `alarm`."""
    name, figure, change = (str(line.get(key) or "") for key in ("name", "figure", "change"))
    began, step = (int(number(line.get(key)) or 0) for key in ("began", "step"))
    return Alarm(name=name, began=began, step=step, figure=figure, change=change, is_over=bool(line.get("is_over")))


def function_error_row(line: Line) -> FunctionErrorRow:
    """A line of kind `function_error`."""
    texts: dict[str, Any] = {name: str(line.get(key, "")) for name, key in _ERROR_TEXTS.items()}
    return FunctionErrorRow(**_scalars(FunctionErrorRow, {"count": 1, **line}), **texts)


def run_row(line: Line) -> RunRow:
    """A line of kind `run`."""
    machine = {name: value for name, value in numbers(line.get("machine")).items() if isinstance(value, int)}
    return RunRow(t=line["t"], config=_object(line.get("config")), derived=_object(line.get("derived")), machine=machine)


_ERROR_TEXTS = {"function": "function", "kind": "function_kind", "cause": "cause", "where": "where", "outcome": "outcome"}


def is_idle(wait: str) -> bool:
    """Return true where a wait, `stage: what`, is a wait for work: it is long where the stage is quick, and says nothing of who is slow."""
    return wait.partition(": ")[2] in _IDLE


_FOR_INPUT = ("trajectories", "generated", "scored", "group_scored", "prm_scored", "rows", "policies", "completions", "scores", "turns")
_IDLE = frozenset((*_FOR_INPUT, "starts", "comparisons", "step scores", "packed", "room in prompts"))


def end_row(line: Line) -> EndRow:
    """A line of kind `end`."""
    return EndRow(
        t=line["t"], reason=str(line.get("reason", "")), identity=numbers(line.get("rollouts")), elapsed_s=number(line.get("elapsed_s"))
    )


def imbalance(identity: dict[str, float]) -> int | None:
    """Admitted less everything it must have become: 0 when it balances, None where no identity was recorded."""
    if "admitted" not in identity:
        return None
    return int(identity["admitted"] - sum(identity.get(name, 0) for name in ("in_flight", *EXITS)))


def _scalars(row: type[Any], line: Line) -> dict[str, Any]:
    """The line's finite numbers that are fields of `row`."""
    return {name: value for name in _number_fields(row) if (value := number(line.get(name))) is not None}


@functools.cache
def _number_fields(row: type[Any]) -> tuple[str, ...]:
    return tuple(field.name for field in dataclasses.fields(row) if field.type in ("int", "float", "float | None"))


def _object(value: Any) -> Line:
    return value if isinstance(value, dict) else {}


def _objects(line: Line, name: str) -> dict[str, Line]:
    value = line.get(name)
    return {str(key): entry for key, entry in value.items() if isinstance(entry, dict)} if isinstance(value, dict) else {}


def _list(line: Line, name: str) -> list[Line]:
    value = line.get(name)
    return [entry for entry in value if isinstance(entry, dict)] if isinstance(value, list) else []


_READ: dict[str, Callable[[Line], Row | None]] = {
    "run": run_row,
    "status": status_row,
    "step": lambda line: step_row(line) if number(line.get("step")) is not None else None,
    "swap": swap_row,
    "evaluation": evaluation_row,
    "function_error": function_error_row,
    "alarm": alarm_row,
    "end": end_row,
}
