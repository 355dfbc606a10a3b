"""What the page shows, folded from the journals as they grow: small whatever the run's length, because curves are thinned."""

from __future__ import annotations

import collections
from pathlib import Path
from typing import Any

from pipelinerl.report import rows
from pipelinerl.report.counters import growth, growth_of_all
from pipelinerl.report.reading import JournalTail, Thinned, read_failures
from pipelinerl.report.rows import Line, StatusRow, StepRow, SwapRow
from pipelinerl.report.samples import Decoder, ShownSample, shown_sample
from pipelinerl.report.state import RunState

POINTS = 400
"""Of a curve; a plot is about as many pixels wide."""
SAMPLES = 12
"""Newest samples shown."""
HARDLY = 0.005
"""Part of the run's time below which a wait is not worth a line."""
MOST_WAITS = 10
SERVICE = frozenset({"starts", "policies", "completions", "turns", "scores", "comparisons", "steps", "packed"})
"""What helper loops of the stages wait for nearly all the time: it says nothing about who is slow."""

Json = dict[str, Any]


class Snapshot:
    """A run's folder, followed."""

    def __init__(self, run_folder: Path) -> None:
        self._run_folder = run_folder
        self._tail = JournalTail(run_folder)
        self._state = RunState()
        self._steps: Thinned[StepRow] = Thinned(POINTS)
        self._rates: Thinned[tuple[float, float | None, float]] = Thinned(POINTS)
        self._swaps: Thinned[SwapRow] = Thinned(POINTS)
        self._evaluations: list[tuple[float | None, float | None]] = []
        self._samples: collections.deque[ShownSample] = collections.deque(maxlen=SAMPLES)
        self._decoder: Decoder | None = None
        self._began: float | None = None

    def look(self) -> None:
        """Fold what the journals have gained since the last look."""
        for line in sorted(self._tail.new_lines(), key=lambda line: line["t"]):
            self._fold(line)
        for failure in read_failures(self._run_folder):
            self._state.fail(failure)

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
            "waited": self._waited(status),
            "waits": [[name, seconds] for name, seconds in status.waits if _tells(name)],
            "engines": self._engines(status),
            "scorers": [{"id": gauge.scorer_id, "running": gauge.num_running, "scored": gauge.num_scored} for gauge in status.scorers],
            "prm": status.prm,
            "environment": status.environment,
            "curves": self._curves(),
            "samples": [_sample(sample) for sample in reversed(self._samples)],
        }

    def _fold(self, line: Line) -> None:
        self._state.fold(line)
        self._began = line["t"] if self._began is None else self._began
        match line["kind"]:
            case "run":
                self._decoder = Decoder(self._run_folder, (line.get("config") or {}).get("model", {}).get("path"))
            case "step" if rows.number(line.get("step")) is not None:
                self._steps.add(rows.step_row(line))
            case "status":
                status = rows.status_row(line)
                running = sum(engine.num_running or 0.0 for engine in status.engines)
                self._rates.add((line["t"] - self._began, self._state.generated_tokens_per_s, running))
            case "swap":
                self._swaps.add(rows.swap_row({"engine_id": -1, **line}))
            case "evaluation":
                row = rows.evaluation_row(line)
                self._evaluations.append((row.version, row.reward_mean))
            case "sample" if self._decoder is not None:
                self._samples.append(shown_sample(line, self._decoder))

    def _rate(self, status: StatusRow, name: str) -> float | None:
        """Items that pass a queue per second: of the last seconds, or, once the run has ended, of all of it."""
        if self._state.end_reason is not None:
            ever = status.queues[name].ever
            return ever / status.elapsed_s if ever is not None and status.elapsed_s else None
        recent = list(self._state.recent)
        grown = growth(row.queues[name].ever for row in recent if name in row.queues)
        return None if grown is None or recent[-1].t <= recent[0].t else grown / (recent[-1].t - recent[0].t)

    def _waited(self, status: StatusRow) -> list[list[Any]]:
        """[`stage: what`, part of the run's time] of everything that was waited for, longest first."""
        if not status.elapsed_s:
            return []
        longest = sorted(status.waited_s.items(), key=lambda item: -item[1])
        return [[name, seconds / status.elapsed_s] for name, seconds in longest if _tells(name) and seconds >= HARDLY * status.elapsed_s][
            :MOST_WAITS
        ]

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
        began = self._began or 0.0
        curves = {
            "reward": [(step.step, step.reward_mean) for step in steps],
            "held_out": self._evaluations,
            "length": [(step.step, step.length_mean) for step in steps],
            "truncated": [(step.step, step.truncated_fraction) for step in steps],
            "staleness_mean": [(step.step, step.staleness_mean) for step in steps],
            "staleness_max": [(step.step, step.staleness_max) for step in steps],
            "entropy": [(step.step, step.trainer.get("entropy")) for step in steps],
            "mismatch": [(step.step, step.trainer.get("logprob_gap_mean")) for step in steps],
            "generated": [(t, rate) for t, rate, _ in rates],
            "running": [(t, running) for t, _, running in rates],
            "pause_ms": [(swap.t - began, None if swap.pause_s is None else 1000 * swap.pause_s) for swap in swaps],
        }
        return {name: [[x, y] for x, y in points if x is not None and y is not None] for name, points in curves.items()}


def _tells(wait: str) -> bool:
    return wait.partition(": ")[2] not in SERVICE


def _sample(sample: ShownSample) -> Json:
    return {
        "step": sample.step,
        "id": sample.rollout_id,
        "prompt": sample.prompt,
        "pieces": [[version, list(texts)] for version, texts in sample.pieces],
        "num_tokens": sample.num_tokens,
        "reward": sample.reward,
        "advantage": sample.advantage,
        "finish": sample.finish,
        "steps": [list(step) for step in sample.steps],
    }
