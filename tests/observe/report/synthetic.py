"""Journals of a run that never was: each part's speed is given, so that what a report must say of it is known beforehand.

One period per step. Streaming overlaps the parts, so a period is as long as the slowest of them and the others wait for the rest of it;
with `takes_turns` the halves follow each other and a period is their sum.
"""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

BEGAN = 1_760_000_000.0
"""Unix seconds of the run line."""
START_UP_S = 4.0
"""From the run line to the first request."""
STATUS_EVERY_S = 0.5

Line = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Plan:
    """Seconds that each part works per step, and the sizes of the run."""

    generate_s: float = 1.2
    score_s: float = 0.4
    """Of every scoring slot."""
    train_s: float = 0.7
    publish_s: float = 0.03
    pause_s: float = 0.0004
    takes_turns: bool = False
    is_held: bool = False
    """Whether generation waits for admission all the time."""
    num_steps: int = 40
    num_engines: int = 2
    num_slots: int = 4
    num_running: int = 60
    """Sequences decoded at once per engine, of 64 slots."""
    core_wait_s: float | None = None
    """Of a step's passes, seconds in which the trainer was ready and others had its core."""
    kv_used: float | None = None
    """Of the first engine; the second one's is half as full."""
    drafted: float = 0.0
    """Tokens drafted for each engine in a period; a quarter is accepted."""
    migrated: tuple[int, int] | None = None
    """Times that a sequence waited for room, and sequences of these that moved, each after three seconds; None: none may."""
    groups_per_step: int = 8
    group_size: int = 8
    name: str = "synthetic"
    mode: str = "streaming"
    seed: int = 7

    @property
    def period_s(self) -> float:
        engines_s = self.generate_s + self.pause_s
        trainer_s = self.train_s + self.publish_s
        return engines_s + trainer_s if self.takes_turns else max(engines_s, self.score_s, trainer_s)


def write_run(folder: Path, plan: Plan | None = None, *, without: frozenset[str] = frozenset()) -> list[Line]:
    """Write the journals of a run into `folder`, leaving out the kinds named in `without`; return all lines written, in order of time."""
    plan = plan or Plan()
    lines = sorted(
        (line for line in [*_run(plan), *_steps(plan), *_statuses(plan), *_swaps(plan), *_spans(plan)] if line["kind"] not in without),
        key=lambda line: line["t"],
    )
    (folder / "journal").mkdir(parents=True)
    for process in {line["process"] for line in lines}:
        text = "".join(json.dumps(line) + "\n" for line in lines if line["process"] == process)
        (folder / "journal" / f"{process}.jsonl").write_text(text)
    return lines


def _line(t: float, kind: str, process: str = "orchestrator", **fields: Any) -> Line:
    return {"t": t, "kind": kind, "process": process, **fields}


def _step_end(plan: Plan, step: int) -> float:
    return BEGAN + START_UP_S + (step + 1) * plan.period_s


def _run(plan: Plan) -> list[Line]:
    config = {
        "run": {"name": plan.name, "seed": plan.seed},
        "model": {"path": "models/tiny"},
        "engine": {"count": plan.num_engines, "max_running": 64},
        "scorer": {"slots": plan.num_slots},
        "trainer": {"steps": plan.num_steps, "ranks": 1},
        "pipeline": {"mode": plan.mode, "max_staleness": 4},
        "reward": [{"function": "rewards.py:exact", "weight": 1.0}],
    }
    end = _step_end(plan, plan.num_steps - 1) + 1.0
    return [
        _line(BEGAN, "run", config=config, derived={"samples per step": plan.groups_per_step * plan.group_size}),
        _line(BEGAN + 3.5, "evaluation", version=0, reward_mean=0.125, num_prompts=64, oldest_version=0),
        _line(_step_end(plan, plan.num_steps // 2), "evaluation", version=plan.num_steps // 2, reward_mean=0.5, num_prompts=64),
        _line(end - 0.2, "evaluation", version=plan.num_steps, reward_mean=0.8125, num_prompts=64, oldest_version=plan.num_steps),
        _line(end, "end", rollouts=_identity(plan, plan.num_steps, in_flight=0), reason="all steps done", elapsed_s=end - BEGAN),
    ]


def _identity(plan: Plan, num_steps: int, *, in_flight: int) -> dict[str, int]:
    trained = num_steps * plan.groups_per_step * plan.group_size
    parts = {"in_flight": in_flight, "trained": trained, "filtered": 3 * num_steps, "stale": num_steps // 4, "failed": 5, "cancelled": 11}
    return {"admitted": sum(parts.values()), **parts}


def _steps(plan: Plan) -> list[Line]:
    chance = random.Random(plan.seed)
    num_samples = plan.groups_per_step * plan.group_size
    lines = []
    for step in range(plan.num_steps):
        progress = step / max(1, plan.num_steps - 1)
        length = 180 + 60 * progress + chance.gauss(0, 6)
        num_trained = int(num_samples * length)
        young = int(num_trained * 0.6)
        lines.append(
            _line(
                _step_end(plan, step),
                "step",
                step=step,
                version=step + 1,
                reward_mean=min(1.0, max(0.0, 0.12 + 0.7 * progress + chance.gauss(0, 0.04))),
                reward_std=0.4,
                num_groups=plan.groups_per_step,
                num_samples=num_samples,
                num_tokens=num_trained + 40 * num_samples,
                num_trained_tokens=num_trained,
                num_useful_tokens=int(num_trained * (0.9 - 0.2 * progress)),
                length_mean=length,
                truncated_fraction=max(0.0, 0.2 * (1 - progress) + chance.gauss(0, 0.01)),
                zero_variance_fraction=0.1 + 0.2 * progress,
                staleness={"0": young, "1": int(num_trained * 0.3), "2": num_trained - young - int(num_trained * 0.3)},
                staleness_mean=0.5,
                staleness_max=3 if step % 9 == 5 else 2,
                components={"exact": 0.5 + 0.3 * progress, "format": 0.9},
                trainer=_trainer(plan, chance, progress),
                elapsed_s=_step_end(plan, step) - BEGAN,
            )
        )
    return lines


def _trainer(plan: Plan, chance: random.Random, progress: float) -> dict[str, float]:
    return {
        "loss": chance.gauss(0, 0.02),
        "grad_norm": 0.8 + abs(chance.gauss(0, 0.2)),
        "learning_rate": 1e-5 * min(1.0, progress * 10),
        "entropy": 1.4 - 0.6 * progress,
        "clip_fraction": 0.01 + abs(chance.gauss(0, 0.004)),
        "ess_fraction": 0.97 - abs(chance.gauss(0, 0.01)),
        "mismatch_kl_k3": 0.002 + abs(chance.gauss(0, 0.001)),
        "logprob_gap_mean": 2.1e-5 + abs(chance.gauss(0, 4e-6)),
        "ratio_mean": 1.0 + chance.gauss(0, 0.002),
        "wait_s": max(0.0, plan.period_s - plan.train_s - plan.publish_s),
        "forward_backward_s": 0.9 * plan.train_s,
        "optimizer_s": 0.1 * plan.train_s,
        "publish_s": plan.publish_s,
        "publish_async_s": 0.1,
    } | ({} if plan.core_wait_s is None else {"core_wait_s": plan.core_wait_s})


def _statuses(plan: Plan) -> list[Line]:
    period_s, first = plan.period_s, BEGAN + START_UP_S
    length_s = plan.num_steps * period_s
    idle_s = max(0.0, period_s - plan.generate_s - plan.pause_s)
    lines = []
    for number in range(int((length_s + START_UP_S) / STATUS_EVERY_S) + 1):
        t = BEGAN + number * STATUS_EVERY_S
        periods = max(0.0, t - first) / period_s
        step = int(periods)
        wait_s = max(0.0, period_s - plan.train_s - plan.publish_s) * periods
        lines.append(
            _line(
                t,
                "status",
                version=step,
                step=step,
                num_steps=plan.num_steps,
                groups_running=12,
                groups_accepted=step * plan.groups_per_step,
                rollouts=_identity(plan, step, in_flight=96),
                reasons={"failed: timeout": 3, "failed: error": 2, "filtered: rewards all equal": 3 * step},
                generated_tokens=int(periods * 15_000),
                trained_tokens=int(step * 13_000),
                engines=[_engine(plan, engine_id, periods, idle_s) for engine_id in range(plan.num_engines)],
                scorers=[{"scorer_id": 0, "num_running": 1, "num_scored": 64 * step, "busy_s": plan.score_s * plan.num_slots * periods}],
                queues={
                    "trajectories": {
                        "items": step % 5,
                        "bytes": 4096 * (step % 5),
                        "bound_bytes": 1 << 20,
                        "num_items_total": int(64 * periods),
                    },
                    "micro-batches": {"items": step % 3, "bytes": 65536 * (step % 3), "bound_bytes": 1 << 20},
                },
                waits=[
                    {"stage": "generation", "what": "an admission credit" if plan.is_held else "prompts", "seconds": 0.9},
                    {"stage": "trainer", "what": "a micro-batch", "seconds": 0.4},
                ],
                waited_s={
                    "trainer: a micro-batch": wait_s,
                    "generation: an admission credit": idle_s * periods,
                    "scoring: trajectories": 0.3 * periods,
                    "scoring: scores": period_s * periods,
                },
                dispatch=_dispatch(plan),
                reward_mean=0.5,
                staleness_mean=0.5,
                staleness_max=2,
                last_pause_s=plan.pause_s,
                elapsed_s=t - BEGAN,
            )
        )
    return lines


def _engine(plan: Plan, engine_id: int, periods: float, idle_s: float) -> Line:
    return {
        "engine_id": engine_id,
        "version": int(periods),
        "num_running": plan.num_running,
        "num_waiting": 4,
        "num_tokens": int(7_500 * periods),
        "num_steps": int(100 * periods),
        "busy_s": plan.generate_s * periods,
        "idle_s": idle_s * periods,
        "kv_used": None if plan.kv_used is None else plan.kv_used / (1 + engine_id),
        "num_drafted": int(plan.drafted * periods),
        "num_accepted": int(plan.drafted * periods / 4),
    }


def _dispatch(plan: Plan) -> dict[str, float] | None:
    if plan.migrated is None:
        return None
    waits, moved = plan.migrated
    return {"num_waits": waits, "num_moved": moved, "moved_after_s": 3.0 * moved, "num_recomputed_tokens": 200 * moved}


def _swaps(plan: Plan) -> list[Line]:
    chance = random.Random(plan.seed + 1)
    return [
        _line(
            _step_end(plan, step) + 0.05 + 0.02 * engine_id,
            "swap",
            engine_id=engine_id,
            version=step + 1,
            pause_s=plan.pause_s * chance.uniform(0.8, 1.2),
            stage_s=0.04 * chance.uniform(0.8, 1.5),
            num_running=plan.num_running,
        )
        for step in range(plan.num_steps - 1)
        for engine_id in range(plan.num_engines)
    ]


def _spans(plan: Plan) -> list[Line]:
    lines = []
    for step in range(plan.num_steps):
        end = _step_end(plan, step)
        start = end - plan.period_s
        for engine_id in range(plan.num_engines):
            lines += _work(f"engine-{engine_id}", f"engine-{engine_id}", "forward", start, start + plan.generate_s)
        for slot in range(plan.num_slots):
            lines += _work("scorer-0", f"scorer-0/slot-{slot}", "score", end - plan.score_s, end)
        at = end - plan.train_s - plan.publish_s
        lines += _work("trainer-0", "trainer-0", "wait", start, at)
        lines += _work("trainer-0", "trainer-0", "forward_backward", at, at + 0.9 * plan.train_s)
        lines += _work("trainer-0", "trainer-0", "optimizer", at + 0.9 * plan.train_s, at + plan.train_s)
        lines += _work("trainer-0", "trainer-0", "publish", at + plan.train_s, end)
    return lines


def _work(process: str, lane: str, name: str, start: float, end: float) -> list[Line]:
    return [_line(end, "span", process, lane=lane, name=name, start=start, end=end, count=1)] if end > start else []
