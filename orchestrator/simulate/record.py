"""Writes the journal of a simulated run: the lines of a live one, so that report, view, compare and trackers read it as any other.

Which fields a live run has that a simulated one cannot, such as the text of samples, docs/simulator.md says.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from typing import Any

import numpy as np

from orchestrator.rules.batch import Verdict, sampled_of
from orchestrator.simulate.events import Events
from orchestrator.simulate.rollouts import SimulatedTrajectory
from pipelinerl.messages import Finish, Sample, TerminalStatus
from pipelinerl.observe.journal import Journal

EVERY_S = 0.5
"""Seconds between two lines of gauges at first, as in a live run."""
MANY_LINES = 600
"""Lines of gauges after which they come half as often: a report of days needs no more of them than one of minutes."""
MAX_LANES = 16
"""Engines whose passes are drawn; the lanes of more could not be read."""


@dataclasses.dataclass(slots=True)
class _Step:
    """What was assigned to one step."""

    ages: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    oldest: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    in_flight: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    in_queue: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    rewards: list[float] = dataclasses.field(default_factory=list)
    lengths: list[int] = dataclasses.field(default_factory=list)
    num_tokens: int = 0
    num_truncated: int = 0
    num_groups: int = 0
    num_flat: int = 0
    num_useful_tokens: int = 0
    """Of groups whose rewards differ: advantages are not computed here."""
    num_filtered: int = 0
    num_unfiltered: int = 0
    num_stale: int = 0
    in_flight_s: float = 0.0
    in_queue_s: float = 0.0

    def add(self, sample: Sample, *, step: int, now_s: float) -> None:
        """Count a sample; ages are split as `pipelinerl.algorithms.staleness.split` does."""
        trajectory = sample.trajectory
        assert isinstance(trajectory, SimulatedTrajectory)
        versions = trajectory.versions.tolist()
        newest = max(versions, default=step)
        self.oldest[step - min(versions, default=step)] += 1
        for version, tokens in zip(versions, trajectory.run_tokens, strict=True):
            self.ages[step - version] += tokens
            self.in_flight[newest - version] += tokens
        num = trajectory.num_trained_tokens
        self.in_queue[step - newest] += num
        self.rewards.append(sample.reward)
        self.lengths.append(num)
        self.num_tokens += trajectory.num_tokens
        self.num_truncated += trajectory.finish is Finish.LENGTH
        self.in_flight_s += trajectory.finished_at - trajectory.admitted_at
        self.in_queue_s += now_s - trajectory.finished_at


@dataclasses.dataclass(slots=True, kw_only=True)
class Totals:
    """Sums over a whole run, for its summary."""

    ages: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    oldest: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Samples by the age of their oldest token."""
    step_ends_s: list[float] = dataclasses.field(default_factory=list)
    step_oldest: list[int] = dataclasses.field(default_factory=list)
    """Age of the oldest token of each step."""
    step_in_flight: list[int] = dataclasses.field(default_factory=list)
    """Versions published while a rollout of each step was written, at most."""
    step_tokens: list[int] = dataclasses.field(default_factory=list)
    step_samples: list[int] = dataclasses.field(default_factory=list)
    waits_s: list[float] = dataclasses.field(default_factory=list)
    """The trainer's, by step."""
    gauges: list[tuple[float, float]] = dataclasses.field(default_factory=list)
    """(busy, idle) seconds of all engines at the end of each step."""
    num_trained_tokens: int = 0
    pauses_s: list[float] = dataclasses.field(default_factory=list)


class Record:
    """The figures of a run so far, and its journal; without one they are kept all the same."""

    def __init__(self, events: Events, journal: Journal | None) -> None:
        self.totals = Totals()
        self.last_step: dict[str, Any] = {}
        self.every_s = EVERY_S
        self._events, self._journal = events, journal
        self._steps: dict[int, _Step] = collections.defaultdict(_Step)
        self._num_recomputed = 0
        self._num_statuses = 0

    @property
    def has_journal(self) -> bool:
        return self._journal is not None

    def line(self, kind: str, **fields: Any) -> None:
        """Write a line, if there is a journal."""
        if kind == "swap":
            self.totals.pauses_s.append(fields["pause_s"])
            self._num_recomputed += fields["num_recomputed_tokens"]
        if self._journal is not None:
            self._journal.write(kind, **fields)

    def span(self, lane: str, name: str, start: float, end: float) -> None:
        """Draw work on a lane."""
        if self._journal is not None:
            self._journal.span(lane, name, start=start, end=end)

    def verdict(self, verdict: Verdict) -> None:
        """Note that a group was assigned to a step, or dropped."""
        step = self._steps[verdict.step]
        step.num_filtered += verdict.is_filtered
        step.num_unfiltered += verdict.is_let_through
        step.num_stale += any(ended.status is TerminalStatus.STALE for ended in verdict.ended)
        if not verdict.is_assigned:
            return
        step.num_groups += 1
        rewards = [sample.reward for sample in verdict.samples]
        is_flat = not rewards or max(rewards) - min(rewards) < 1e-9
        step.num_flat += is_flat
        step.num_useful_tokens += 0 if is_flat else sum(sample.trajectory.num_trained_tokens for sample in verdict.samples)
        assert len(verdict.samples) <= len(sampled_of(verdict.group.members))
        for sample in verdict.samples:
            step.add(sample, step=verdict.step, now_s=self._events.now_s)

    def trained(self, number: int, metrics: dict[str, float], *, engine_s: tuple[float, float]) -> None:
        """Write the line of a step that is in the policy; `engine_s` is the engines' (busy, idle) time so far."""
        step, totals = self._steps.pop(number, _Step()), self.totals
        num, num_samples = sum(step.lengths), len(step.lengths)
        totals.ages += step.ages
        totals.oldest += step.oldest
        totals.step_oldest.append(max(step.ages, default=0))
        totals.step_in_flight.append(max(step.in_flight, default=0))
        totals.step_ends_s.append(self._events.now_s)
        totals.step_tokens.append(num)
        totals.step_samples.append(num_samples)
        totals.waits_s.append(metrics.get("wait_s", 0.0))
        totals.gauges.append(engine_s)
        totals.num_trained_tokens += num
        rewards = np.array(step.rewards or [0.0])
        self.last_step = {
            "step": number,
            "version": number,
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "components": {},
            "num_groups": step.num_groups,
            "num_samples": num_samples,
            "num_tokens": step.num_tokens,
            "num_trained_tokens": num,
            "num_useful_tokens": step.num_useful_tokens,
            "length_mean": num / max(1, num_samples),
            "truncated_fraction": step.num_truncated / max(1, num_samples),
            "zero_variance_fraction": step.num_flat / max(1, step.num_groups),
            "staleness": {str(age): count for age, count in sorted(step.ages.items())},
            **_mean_and_most("staleness", step.ages),
            "staleness_min": min(step.ages, default=0),
            **_mean_and_most("staleness_in_flight", step.in_flight),
            **_mean_and_most("staleness_in_queue", step.in_queue),
            "kv_recomputed_tokens": self._num_recomputed,
            "filtered_groups": step.num_filtered,
            "unfiltered_groups": step.num_unfiltered,
            "stale_groups": step.num_stale,
            "in_flight_s_mean": step.in_flight_s / max(1, num_samples),
            "in_queue_s_mean": step.in_queue_s / max(1, num_samples),
            "trainer": metrics,
            "elapsed_s": self._events.now_s,
        }
        self._num_recomputed = 0
        self.line("step", **self.last_step)

    def status(self, gauges: dict[str, Any]) -> None:
        """Write the gauges of the moment."""
        self._num_statuses += 1
        if self._num_statuses % MANY_LINES == 0:
            self.every_s *= 2
        last = self.last_step
        gauges["trained_tokens"] = self.totals.num_trained_tokens
        gauges |= {name: last.get(name) for name in ("reward_mean", "staleness_mean", "staleness_max")}
        gauges["last_pause_s"] = self.totals.pauses_s[-1] if self.totals.pauses_s else None
        gauges["elapsed_s"] = self._events.now_s
        self.line("status", **gauges)


def _mean_and_most(name: str, ages: collections.Counter[int]) -> dict[str, float]:
    total = ages.total()
    mean = math.fsum(age * count for age, count in ages.items()) / total if total else 0.0
    return {f"{name}_mean": mean, f"{name}_max": max(ages, default=0)}
