"""The live page's view of the fold, as JSON: small whatever the run's length, because curves are thinned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pipelinerl.observe.fold import rows
from pipelinerl.observe.fold.counters import growth, growth_of_all
from pipelinerl.observe.fold.followed import FollowedRun
from pipelinerl.observe.fold.rows import EvaluationRow, RunRow, StatusRow, StepRow, SwapRow
from pipelinerl.observe.fold.thinned import Thinned
from pipelinerl.observe.view.samples import Samples

POINTS = 400
"""Points of a curve; a plot is about as many pixels wide."""
COMPONENTS = 8
"""Reward functions whose curves are drawn; more would be told apart by nobody."""
TROUBLES = 20
"""Alarms, and causes of failures, that are told."""
TEXT = 500
"""Characters of a cause that are told."""
HARDLY = 0.005
"""Part of the run's time below which a wait is not worth a line."""
MOST_WAITS = 10

Json = dict[str, Any]


class Snapshot:
    """A run's folder, followed."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._run = FollowedRun(run_folder)
        self._state = self._run.state
        self._steps: Thinned[StepRow] = Thinned(POINTS)
        self._rates: Thinned[tuple[float, float | None, float]] = Thinned(POINTS)
        self._swaps: Thinned[SwapRow] = Thinned(POINTS)
        self._evaluations: Thinned[EvaluationRow] = Thinned(POINTS)
        self.samples = Samples(run_folder)

    def look(self) -> None:
        """Take what the journals have gained since the last look."""
        for line, row in self._run.fold_new():
            match row:
                case RunRow():
                    self.samples.begin(row)
                case StepRow():
                    self._steps.add(row)
                case StatusRow():
                    running = sum(engine.num_running or 0.0 for engine in row.engines)
                    self._rates.add((row.t, self._state.generated_tokens_per_s, running))
                case SwapRow():
                    self._swaps.add(row)
                case EvaluationRow():
                    self._evaluations.add(row)
                case _ if line["kind"] == "sample":
                    self.samples.add(line)
                case _:
                    pass

    def as_json(self) -> Json:
        """Everything the page draws."""
        state = self._state
        status = state.status or StatusRow(t=0.0)
        return {
            "name": state.name or self._run_folder.name,
            "ended": state.end_reason,
            "steps_done": state.num_steps_done,
            "steps": state.num_steps,
            "elapsed_s": status.elapsed_s,
            "left_s": state.seconds_left if state.end_reason is None else None,
            "version": status.version,
            "generated_per_s": state.generated_tokens_per_s,
            "trained_per_s": state.trained_tokens_per_s,
            "useful_per_s": state.useful_tokens_per_s,
            "trainer_waits": state.trainer_wait_fraction,
            "engines_idle": state.engine_idle_fraction,
            "slots_empty": state.engine_empty_fraction,
            "last_pause_s": state.last_pause_s,
            "identity": state.identity,
            "imbalance": rows.imbalance(state.identity),
            "queues": {
                name: {"items": queue.items, "fill": queue.fill_fraction, "per_s": self._rate(status, name)}
                for name, queue in status.queues.items()
            },
            "waited": self._waited(status, is_idle=False),
            "idled": self._waited(status, is_idle=True),
            "idle": [name for name, _ in status.waits if rows.is_idle(name)],
            "waits": [[name, seconds] for name, seconds in status.waits if not rows.is_idle(name)],
            "alarms": self._alarms(),
            "function_errors": self._function_errors(),
            "reasons": sorted(status.reasons.items(), key=lambda item: -item[1])[:TROUBLES],
            "engines": self._engines(status),
            "members": [{"name": one.name, "state": one.state, "reason": one.reason} for one in status.members],
            "trainer": trainer.words if (trainer := self._state.trainer_ranks) is not None and trainer.epoch else None,
            "roles": roles.words if (roles := self._state.roles) is not None else None,
            "scorers": [{"id": gauge.scorer_id, "running": gauge.num_running, "scored": gauge.num_scored} for gauge in status.scorers],
            "prm": status.prm,
            "environment": status.environment,
            "gateway": status.gateway,
            "curves": self._curves(),
            "components": self._components(),
            "samples": self.samples.as_json(),
        }

    def _alarms(self) -> list[Json]:
        """Alarms of learning that hold, and those that ended, since this start, the newest last."""
        return [
            {"name": alarm.name, "began": alarm.began, "over": over, "figure": alarm.figure[:TEXT], "change": alarm.change[:TEXT]}
            for alarm, over in list(self._state.alarms.values())[-TROUBLES:]
        ]

    def _function_errors(self) -> list[Json]:
        """Failures of users' functions in this life of the run by cause, the commonest first."""
        return [
            {
                "function": row.function,
                "kind": row.kind,
                "cause": row.cause[:TEXT],
                "where": row.where[:TEXT],
                "count": row.count,
                "num_calls": row.num_calls,
                "began": self._state.errors.first_step.get(row.key),
            }
            for row in self._state.errors.commonest()[:TROUBLES]
        ]

    def _rate(self, status: StatusRow, name: str) -> float | None:
        """Items that pass a queue per second: of the last seconds, or, once the run has ended, of all of it."""
        if self._state.end_reason is not None:
            total = status.queues[name].num_items_total
            return total / status.elapsed_s if total is not None and status.elapsed_s else None
        recent = list(self._state.recent)
        grown = growth(row.queues[name].num_items_total for row in recent if name in row.queues)
        return None if grown is None or recent[-1].t <= recent[0].t else grown / (recent[-1].t - recent[0].t)

    def _waited(self, status: StatusRow, *, is_idle: bool) -> list[list[Any]]:
        """[`stage: what`, part of the run's time] of everything that was waited for, longest first.

        `is_idle`: by stages that had nothing to do, in place of those that were held up.
        """
        if not status.elapsed_s:
            return []
        longest = sorted(status.waited_s.items(), key=lambda item: -item[1])
        return [
            [name, seconds / status.elapsed_s]
            for name, seconds in longest
            if rows.is_idle(name) == is_idle and seconds >= HARDLY * status.elapsed_s
        ][:MOST_WAITS]

    def _engines(self, status: StatusRow) -> list[Json]:
        recent = list(self._state.recent)
        window_s = recent[-1].t - recent[0].t if recent else 0.0
        told = []
        for engine in status.engines:
            busy_s = growth_of_all(
                recent, lambda row, engine_id=engine.engine_id: {e.engine_id: e.busy_s for e in row.engines if e.engine_id == engine_id}
            )
            told.append(
                {
                    "id": engine.engine_id,
                    "version": engine.version,
                    "running": engine.num_running,
                    "waiting": engine.num_waiting,
                    "slots": self._state.sequence_slots,
                    "kv": engine.kv_used,
                    "busy": None if busy_s is None or window_s <= 0 else min(1.0, busy_s / window_s),
                }
            )
        return told

    def _curves(self) -> dict[str, list[list[float]]]:
        steps, swaps, rates = self._steps.rows(), self._swaps.rows(), self._rates.rows()
        began = self._state.began or 0.0
        curves = {
            "reward": [(step.step, step.reward_mean) for step in steps],
            "held_out": [(row.version, row.reward_mean) for row in self._evaluations.rows()],
            "length": [(step.step, step.length_mean) for step in steps],
            "truncated": [(step.step, step.truncated_fraction) for step in steps],
            "staleness_mean": [(step.step, step.staleness_mean) for step in steps],
            "staleness_max": [(step.step, step.staleness_max) for step in steps],
            "entropy": [(step.step, step.trainer.get("entropy")) for step in steps],
            "mismatch": [(step.step, step.trainer.get("logprob_gap_mean")) for step in steps],
            "generated": [(t - began, rate) for t, rate, _ in rates],
            "running": [(t - began, running) for t, _, running in rates],
            "pause_ms": [(swap.t - began, None if swap.pause_s is None else 1000 * swap.pause_s) for swap in swaps],
        }
        return {name: [[x, y] for x, y in points if x is not None and y is not None] for name, points in curves.items()}

    def _components(self) -> dict[str, dict[str, list[list[float]]]]:
        """The mean of each reward function before weighting: of training by step, of held-out prompts by version."""
        return {
            "training": _by_name([(row.step, row.components) for row in self._steps.rows()]),
            "held_out": _by_name([(row.version, row.components) for row in self._evaluations.rows() if row.version is not None]),
        }


def _by_name(points: list[tuple[float, dict[str, float]]]) -> dict[str, list[list[float]]]:
    names = list(dict.fromkeys(name for _, values in points for name in values))[:COMPONENTS]
    return {name: [[x, values[name]] for x, values in points if name in values] for name in names}
