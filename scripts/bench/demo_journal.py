"""Journals as the demo writes them, of any length: the same kinds of lines, as often, as long, with figures as full of digits.

Taken from a run of 150 steps: 10.5 kB a step at `STEPS_PER_S`. Values move as a run's do, but nothing here was ever trained.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelinerl.observe.journal import SEGMENT_BYTES, Journal

STEPS_PER_S = 1.8
"""The demo's pace on two cores: 150 steps in 82 s."""
BEGAN = 1_760_000_000.0
STATUS_EVERY_S, LOAD_EVERY_S, SAMPLES_EVERY_S = 0.5, 1.0, 10.0
SCORER_SPANS, TRAINER_SPANS = 12, 7
"""A step; the trainer's of several names."""
EVALUATE_EVERY = 30
_TRAINER = {
    "num_tokens": 3585.0, "advantage_abs_mean": 0.508, "advantage_mean": 0.000185, "clip_fraction": 0.00558, "entropy": 0.124,
    "importance_mean": 0.9995, "mismatch_kl_k1": 0.00119, "mismatch_kl_k3": 0.00067, "ppo_kl": 0.00119, "ratio_mean": 0.9995,
    "weight_mean": 1.0, "weight_zero_fraction": 0.0, "loss_objective": -0.00186, "loss": -0.00186, "tokens": 1793.0, "sequences": 256.0,
    "ratio_max": 1.52, "weight_max": 1.0, "importance_max": 1.52, "ratio_min": 0.45, "ess_fraction": 0.9988, "staleness_mean": 1.102,
    "staleness_max": 2.0, "mismatch_kl_stale_kv": 0.000139, "tokens_stale_kv": 113.0, "grad_norm": 1.99, "learning_rate": 0.000141,
    "num_trained_tokens": 1793.0, "num_micro_batches": 4.0, "publish_s": 5.4e-05, "wait_s": 0.0389,
    "forward_backward_s": 0.348, "optimizer_s": 0.0026, "tokens_per_s": 10215.6, "publish_async_s": 0.0064,
}  # fmt: skip
_WAITS = (
    "evaluation: completions", "evaluation: scores", "prompts: room in prompts", "generation: a free engine slot",
    "generation: completions",
    "scoring: trajectories", "scoring: scores", "batching: scored", "scoring: room in a scorer", "ledger: packed", "training: rows",
    "weight_sync: policies", "training: starts", "trainer: a micro-batch",
)  # fmt: skip


class DemoJournals:
    """Writes the four journals of a run, step by step."""

    def __init__(self, run_folder: Path, *, num_steps: int, segment_bytes: int = SEGMENT_BYTES, seed: int = 0) -> None:
        self._t = BEGAN
        self._num_steps = num_steps
        self._chance = random.Random(seed)
        options: dict[str, Any] = {"clock": lambda: self._t, "segment_bytes": segment_bytes}
        self._orchestrator, self._engine, self._scorer, self._trainer = (
            Journal(run_folder, name, **options) for name in ("orchestrator", "engine-0", "scorer-0", "trainer-0")
        )
        self._next = {"status": BEGAN, "load": BEGAN, "sample": BEGAN}

    def write(self) -> None:
        """Write all of them, from the run line to the end."""
        config = {"run": {"name": "demo"}, "trainer": {"steps": self._num_steps, "ranks": 1}, "engine": {"count": 1, "max_running": 128}}
        self._orchestrator.write("run", config={**config, "scorer": {"slots": 2}, "pipeline": {"max_staleness": 2}}, derived={})
        self._t += 4.0
        for step in range(self._num_steps):
            self._gauges(step)
            self._work(step)
            self._step(step)
            if step % EVALUATE_EVERY == 0:
                self._orchestrator.write("evaluation", version=step, reward_mean=self._near(0.9), num_prompts=256, num_samples=1)
        self._orchestrator.write("end", reason="finished", rollouts=self._rollouts(self._num_steps), elapsed_s=self._t - BEGAN)
        for journal in (self._orchestrator, self._engine, self._scorer, self._trainer):
            journal.close()

    def _near(self, value: float) -> float:
        return value * self._chance.uniform(0.9, 1.1)

    def _every(self, name: str, every_s: float, write: Callable[[], None]) -> None:
        while self._next[name] <= self._t:
            self._next[name] += every_s
            write()

    def _gauges(self, step: int) -> None:
        def load() -> None:
            self._engine.write("load", **self._engine_load(step))
            self._scorer.write("load", **self._scorer_load(step))

        self._every("status", STATUS_EVERY_S, lambda: self._orchestrator.write("status", **self._status(step)))
        self._every("load", LOAD_EVERY_S, load)

    def _work(self, step: int) -> None:
        """The spans of one step, which takes from now until the next one's beginning."""
        start, period_s = self._t, 1 / STEPS_PER_S
        self._t += period_s
        for number in range(SCORER_SPANS):
            at = start + period_s * (number + 0.5 * self._chance.random()) / SCORER_SPANS
            slot = f"scorer-0/reward/slot-{number % 2}"
            self._scorer.span(slot, "score", start=at, end=at + self._near(0.0004), count=self._chance.randrange(1, 40))
        for half in range(2):
            at = start + period_s * half / 2
            self._engine.span("engine-0", "forward", start=at, end=at + self._near(0.48 * period_s), count=7)
        at = start
        for name in ("wait", *(("forward_backward", "wait_row") * 2), "optimizer", "publish")[:TRAINER_SPANS]:
            self._trainer.span("trainer-0", name, start=at, end=(end := at + self._near(0.13 * period_s)))
            at = end + 0.0001
        self._every("sample", SAMPLES_EVERY_S, lambda: self._samples(step))

    def _step(self, step: int) -> None:
        ages = {"0": self._chance.randrange(300), "1": self._chance.randrange(1000, 1400), "2": self._chance.randrange(300)}
        reward = min(1.0, 0.2 + 0.75 * step / max(1, 0.3 * self._num_steps)) * self._chance.uniform(0.97, 1.0)
        self._orchestrator.write(
            "step", step=step, version=step, reward_mean=reward, reward_std=self._near(0.36), components={"reward": reward}, num_groups=32,
            num_samples=256, num_tokens=3585, num_trained_tokens=sum(ages.values()), length_mean=self._near(7.0),
            truncated_fraction=self._chance.randrange(4) / 256, zero_variance_fraction=self._chance.randrange(6, 12) / 32, staleness=ages,
            staleness_mean=self._near(1.1), staleness_max=2, staleness_min=0, staleness_in_flight_mean=self._near(0.31),
            staleness_in_flight_max=1, staleness_in_queue_mean=self._near(0.79), staleness_in_queue_max=1, kv_recomputed_tokens=0,
            filtered_groups=0, unfiltered_groups=0, stale_groups=0, in_flight_s_mean=self._near(0.246), in_queue_s_mean=self._near(0.024),
            trainer={name: self._near(value) if value % 1 else value for name, value in _TRAINER.items()}, elapsed_s=self._t - BEGAN,
        )  # fmt: skip
        digest = f"{self._chance.getrandbits(128):032x}"
        self._orchestrator.write(
            "policy", version=step + 1, source="trainer-0", digest=digest, num_bytes=2_134_016, base=None, buffer=step % 3
        )
        self._orchestrator.write("staged", engine_id=0, version=step + 1, stage_s=self._near(0.02), source="trainer-0")
        pause_s = self._near(1e-5)
        self._orchestrator.write(
            "swap", engine_id=0, version=step + 1, pause_s=pause_s, stage_s=self._near(0.02), num_running=128, num_recomputed_tokens=0
        )

    def _samples(self, step: int) -> None:
        for number in range(3):
            tokens = [self._chance.randrange(40) for _ in range(7)]
            fields = {"rollout_id": f"{32 * step}/{number}", "prompt": "sort 5 1 3 2 4 9", "token_ids": tokens, "versions": [[step, 7]]}
            self._orchestrator.write("sample", step=step, **fields, reward=1.0, advantage=self._near(0.4), finish="stop", num_tokens=7)

    def _engine_load(self, step: int) -> dict[str, Any]:
        busy_s = self._near(0.97) * (self._t - BEGAN)
        return {
            "engine_id": 0, "version": step, "num_running": 128, "num_waiting": self._chance.randrange(20), "num_tokens": 1850 * step,
            "num_steps": 15 * step, "busy_s": busy_s, "idle_s": 0.0772 + self._t - BEGAN - busy_s, "kv_used": self._near(0.245),
        }  # fmt: skip

    def _scorer_load(self, step: int) -> dict[str, Any]:
        figures = {
            "num_calls": 256 * step, "num_failed": {}, "num_retries": 0, "p50_s": self._near(4.8e-6), "p95_s": self._near(4e-5),
            "max_s": self._near(5e-5), "slowest": f"{32 * step}/0", "breaker": "closed",
        }  # fmt: skip
        busy_s = 0.005 * self._near(step)
        return {"scorer_id": 0, "num_running": 1, "num_scored": 256 * step, "busy_s": busy_s, "functions": {"reward": figures}}

    def _rollouts(self, step: int) -> dict[str, int]:
        return {"admitted": 256 * step, "in_flight": 0, "trained": 256 * step, "filtered": 0, "stale": 0, "failed": 0, "cancelled": 0}

    def _status(self, step: int) -> dict[str, Any]:
        elapsed_s = self._t - BEGAN
        queues = {
            name: {"items": self._chance.randrange(5), "bytes": 0, "bound_bytes": 268435456, "num_items_total": 256 * step}
            for name in ("prompts", "trajectories", "scored", "rows")
        }
        waits = [dict(zip(("stage", "what"), name.split(": "), strict=True)) | {"seconds": self._near(0.01)} for name in _WAITS[2:12]]
        return {
            "version": step, "step": step, "num_steps": self._num_steps, "groups_running": 21, "groups_accepted": 32 * step,
            "max_running": 160, "rollouts": self._rollouts(step), "reasons": {}, "generated_tokens": 1850 * step,
            "trained_tokens": 1793 * step, "engines": [self._engine_load(step)], "scorers": [self._scorer_load(step)], "prm": None,
            "environment": None, "queues": queues, "refused": {}, "waits": waits,
            "waited_s": {name: self._near(0.3) * elapsed_s for name in _WAITS}, "reward_mean": 0.75, "staleness_mean": self._near(1.1),
            "staleness_max": 2, "last_pause_s": self._near(1e-5), "elapsed_s": elapsed_s, "memory_bytes": 95772672,
        }  # fmt: skip
