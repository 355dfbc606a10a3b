"""Journal lines -> points: what each number is called in a tracker, and on which axis it stands.

The names are those people know from prime-rl, verl and TRL. A first part belongs to one axis (`AXES`): numbers of a step stand over
the step, gauges over the seconds since the run began, evaluations over the version asked. An axis never goes back: a run that is
resumed does some steps again, and of those the first account stays here; journal and report show the last.

The same lines always give the same points, however often and in how many pieces they are read: gauges are thinned by the journal's
clock, not by ours.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Iterator

from pipelinerl.observe.renamed import Line
from pipelinerl.observe.report import rows
from pipelinerl.observe.report.rows import StatusRow, StepRow
from pipelinerl.observe.report.state import RunState

GAUGES_EVERY_S = 10.0
"""Gauges are written twice a second; trackers get one in so many seconds. More is 17,000 rows a day and no plot shows them."""

STEP, SECONDS, VERSION = "progress/step", "progress/seconds", "eval/version"
AXES = {
    STEP: ("reward", "seq_len", "batch", "off_policy", "optim", "loss", "mismatch_kl", "entropy", "time", "perf", "trainer", "alarm"),
    SECONDS: ("inference", "idle_ratio", "queue", "rollouts", "weights", "memory", "errors"),
    VERSION: ("eval",),
}
"""Axis -> first parts of the names that stand over it."""

_TRAINER_NAMES = {
    "grad_norm": "optim/grad_norm",
    "learning_rate": "optim/lr",
    "loss": "loss/mean",
    "sft_loss": "loss/sft",
    "entropy": "entropy/all/mean",
    "mismatch_kl_k3": "mismatch_kl/all/mean",
    "mismatch_kl_on_policy": "mismatch_kl/on_policy/mean",
    "mismatch_kl_stale_kv": "mismatch_kl/stale_kv/mean",
    "logprob_gap_mean": "mismatch_kl/logprob_gap/mean",
    "logprob_gap_p99": "mismatch_kl/logprob_gap/p99",
    "logprob_gap_max": "mismatch_kl/logprob_gap/max",
    "ess_fraction": "off_policy/ess",
    "ratio_mean": "off_policy/ratio/mean",
    "ratio_min": "off_policy/ratio/min",
    "ratio_max": "off_policy/ratio/max",
    "clip_fraction": "off_policy/clip_fraction",
    "weight_zero_fraction": "off_policy/weight_zero_fraction",
    "wait_s": "time/wait_for_batch",
    "forward_backward_s": "time/forward_backward",
    "optimizer_s": "time/optimizer",
    "publish_s": "time/broadcast_weights",
    "publish_async_s": "time/broadcast_weights_async",
    "tokens_per_s": "perf/throughput_computed",
}
"""The trainer's own metrics under the names people look for; the others are `trainer/<name>`."""
_RAISED = re.compile(r"(\w+)\(")
"""An exception's type, at the head of a cause."""
_DROPPED = "_dropped_fraction"
"""End of the trainer's name for the part of the tokens that one mask dropped; here `off_policy/dropped/<mask>`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """Numbers of one moment."""

    line: int
    """Number of the journal line it comes from, from 0."""
    t: float
    """Unix seconds."""
    axis: str
    at: float
    """Where on the axis."""
    values: dict[str, float]


class Namer:
    """Folds the orchestrator's journal, line by line, into points."""

    def __init__(self) -> None:
        self._state = RunState()
        self._reached: dict[str, float] = {}
        self._next_gauges_t = 0.0
        self._began = 0.0
        self._num_samples = self._num_tokens = 0.0
        self._swaps: list[rows.SwapRow] = []
        self._alarms: dict[str, float] = {}
        """Every alarm of learning that was ever raised: 1 while it holds, else 0."""
        self._errors: dict[str, float] = {}
        """Failures of users' functions, by name of their cause."""

    def points(self, number: int, line: Line) -> Iterator[Point]:
        """The points of the journal's line `number`."""
        self._state.fold(line)
        match line["kind"]:
            case "run":
                self._began = self._began or line["t"]
            case "step" if rows.number(line.get("step")) is not None:
                row = rows.step_row(line)
                yield from self._point(number, row.t, STEP, row.step, self._of_step(row))
            case "alarm":
                self._alarms[f"alarm/{line.get('name')}"] = 0.0 if line.get("is_over") else 1.0
            case "swap":
                self._swaps.append(rows.swap_row({"engine_id": -1, **line}))
            case "function_error" if (count := rows.number(line.get("count"))) is not None:
                name = _error_name(line)
                self._errors[name] = max(count, self._errors.get(name, 0.0))
                yield from self._point(number, line["t"], SECONDS, line["t"] - self._began, {name: self._errors[name]})
            case "status" if line["t"] >= self._next_gauges_t:
                self._next_gauges_t = line["t"] + GAUGES_EVERY_S
                yield from self._point(number, line["t"], SECONDS, line["t"] - self._began, self._gauges(rows.status_row(line)))
            case "evaluation":
                row = rows.evaluation_row(line)
                values = {f"eval/all/avg@{row.num_samples or 1:.0f}": row.reward_mean, "eval/num_prompts": row.num_prompts}
                values |= {f"eval/all/pass@{k}": value for k, value in row.pass_at.items()} | {"eval/oldest_version": row.oldest_version}
                values |= {f"eval/{name}/mean": value for name, value in row.components.items()}
                if row.version is not None:
                    yield from self._point(number, row.t, VERSION, row.version, values)

    def _point(self, line: int, t: float, axis: str, at: float, values: dict[str, float | None]) -> Iterator[Point]:
        if at <= self._reached.get(axis, -1.0):
            return
        self._reached[axis] = at
        yield Point(line=line, t=t, axis=axis, at=at, values={name: value for name, value in values.items() if value is not None})

    def _of_step(self, row: StepRow) -> dict[str, float | None]:
        self._num_samples += row.num_samples or 0
        self._num_tokens += row.num_trained_tokens or 0
        return {
            "progress/samples": self._num_samples,
            "progress/tokens": self._num_tokens,
            "reward/all/mean": row.reward_mean,
            "reward/all/std": row.reward_std,
            "reward/greedy/mean": row.greedy_reward_mean,
            **{f"reward/{name}/mean": value for name, value in row.components.items()},
            "seq_len/all/mean": row.length_mean,
            "num_turns/all/mean": row.turns_mean,
            "seq_len/is_truncated": row.truncated_fraction,
            "batch/groups": row.num_groups,
            "batch/samples": row.num_samples,
            "batch/tokens": row.num_tokens,
            "batch/trained_tokens": row.num_trained_tokens,
            "batch/zero_variance_fraction": row.zero_variance_fraction,
            "off_policy/mean": row.staleness_mean,
            "off_policy/min": row.staleness_min,
            "off_policy/max": row.staleness_max,
            "off_policy/in_flight/mean": row.staleness_in_flight_mean,
            "off_policy/in_flight/max": row.staleness_in_flight_max,
            "off_policy/in_queue/mean": row.staleness_in_queue_mean,
            "off_policy/in_queue/max": row.staleness_in_queue_max,
            "time/in_flight": row.in_flight_s_mean,
            "time/in_queue": row.in_queue_s_mean,
            "seq_len/repeated_fraction": row.repeated_fraction,
            "perf/throughput": self._state.trained_tokens_per_s,
            **self._alarms,
            **{_trainer_name(name): value for name, value in row.trainer.items()},
        }

    def _gauges(self, row: StatusRow) -> dict[str, float | None]:
        state, swaps, self._swaps = self._state, self._swaps, []
        return {
            "inference/throughput": state.generated_tokens_per_s,
            **_spread("inference/agg/num_running", (engine.num_running for engine in row.engines)),
            **_spread("inference/agg/num_waiting", (engine.num_waiting for engine in row.engines)),
            **_spread("inference/agg/kv_cache_used", (engine.kv_used for engine in row.engines)),
            **_spread("inference/agg/version", (engine.version for engine in row.engines)),
            "idle_ratio/trainer": state.trainer_wait_fraction,
            "idle_ratio/engines": state.engine_idle_fraction,
            "idle_ratio/slots_empty_admission_closed": state.engine_empty_fraction,
            **{f"queue/{name}/items": queue.items for name, queue in row.queues.items()},
            **{f"queue/{name}/fill": queue.fill_fraction for name, queue in row.queues.items()},
            **{f"rollouts/{name}": value for name, value in row.identity.items()},
            **_spread("weights/pause_s", (swap.pause_s for swap in swaps)),
            **_spread("weights/stage_s", (swap.stage_s for swap in swaps)),
            "weights/policy_version": row.version,
            "memory/orchestrator_bytes": row.memory_bytes,
            **self._errors,
        }


def _error_name(line: Line) -> str:
    """`errors/<function>/<exception or outcome> <file:line>`: by cause, in few enough words for a name."""
    cause, where = str(line.get("cause", "")), str(line.get("where", ""))
    raised = _RAISED.match(cause)
    what = raised[1] if raised else str(line.get("outcome", "error"))
    return f"errors/{_tame(line.get('function', ''))}/{what} {_tame(where.rpartition('/')[2])}".rstrip()


def _tame(text: object) -> str:
    return str(text).replace("/", ".")[:100]


def _trainer_name(name: str) -> str:
    if name.endswith(_DROPPED):
        return f"off_policy/dropped/{name.removesuffix(_DROPPED)}"
    return _TRAINER_NAMES.get(name, f"trainer/{name}")


def _spread(name: str, values: Iterable[float | None]) -> dict[str, float | None]:
    """Mean, least and most over a fleet: a mean alone hides the one engine that is ill."""
    known = [value for value in values if value is not None]
    if not known:
        return {}
    return {f"{name}/mean": sum(known) / len(known), f"{name}/min": min(known), f"{name}/max": max(known)}
