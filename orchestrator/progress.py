"""What the run has achieved so far: one journal line per optimizer step, and the gauges of the moment.

Means over groups and samples are over what was placed in the step; `zero_variance_fraction` tells how many of its groups taught nothing.
"""

from __future__ import annotations

import collections
import dataclasses

import numpy as np

from orchestrator.rules.batch import Verdict
from orchestrator.shown import Shown
from pipelinerl.messages import Finish, Sample, StepDone, WeightsCommitted
from pipelinerl.metrics import Journal


@dataclasses.dataclass(slots=True, kw_only=True)
class _Step:
    """What was placed in a step, and when."""

    samples: list[tuple[Sample, float]] = dataclasses.field(default_factory=list)
    """Each with the second on the run's clock at which it was placed."""
    components: dict[str, list[float]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    num_groups: int = 0
    num_flat_groups: int = 0
    """Groups whose rewards are all equal."""


class Progress:
    """Gathers figures step by step. `started_s` is the second on the run's clock at which the run began."""

    def __init__(self, *, journal: Journal, started_s: float) -> None:
        self.journal = journal
        self.started_s = started_s
        self.last_step: dict[str, object] = {}
        """The last step's journal fields; empty before the first."""
        self.last_pause_s: float | None = None
        self.pauses_s: list[float] = []
        self.num_trained_tokens = 0
        self.rewards: list[float] = []
        """Mean reward of every step trained."""
        self._steps: dict[int, _Step] = collections.defaultdict(_Step)
        self._shown = Shown(journal)

    def settled(self, verdict: Verdict, *, now_s: float) -> None:
        """A group was placed or given up."""
        if not verdict.is_placed:
            return
        step = self._steps[verdict.step]
        rewards = [sample.reward for sample in verdict.samples]
        step.num_groups += 1
        step.num_flat_groups += max(rewards) - min(rewards) < 1e-9
        step.samples += [(sample, now_s) for sample in verdict.samples]
        for member in verdict.group.members:
            for name, value in member.score.components.items():
                step.components[name].append(value)

    def swapped(self, committed: WeightsCommitted) -> None:
        """An engine changed its version."""
        self.last_pause_s = committed.pause_s
        self.pauses_s.append(committed.pause_s)

    def trained(self, done: StepDone, *, now_s: float) -> None:
        """A step is in the policy: write its line."""
        step = self._steps.pop(done.step, _Step())
        fields = self._fields(done, step, now_s=now_s)
        self.last_step = fields
        self.num_trained_tokens += sum(sample.trajectory.num_tokens for sample, _ in step.samples)
        self.rewards.append(float(fields["reward_mean"]))  # pyright: ignore[reportArgumentType]
        self.journal.write("step", **fields)
        self._shown.trained(done.step, [sample for sample, _ in step.samples], now_s=now_s)

    def _fields(self, done: StepDone, step: _Step, *, now_s: float) -> dict[str, object]:
        trajectories = [sample.trajectory for sample, _ in step.samples]
        rewards = np.array([sample.reward for sample, _ in step.samples] or [0.0])
        lengths = np.array([trajectory.num_trained_tokens for trajectory in trajectories] or [0])
        ages = done.step - np.concatenate(
            [trajectory.versions[trajectory.trains] for trajectory in trajectories] or [np.zeros(0, np.int32)]
        )
        counts = collections.Counter(ages.tolist())
        return {
            "step": done.step,
            "version": done.step,
            "reward_mean": float(rewards.mean()),
            "reward_std": float(rewards.std()),
            "components": {name: float(np.mean(values)) for name, values in step.components.items()},
            "num_groups": step.num_groups,
            "num_samples": len(step.samples),
            "num_tokens": sum(trajectory.num_tokens for trajectory in trajectories),
            "num_trained_tokens": int(lengths.sum()),
            "length_mean": float(lengths.mean()),
            "truncated_fraction": _mean([trajectory.finish is Finish.LENGTH for trajectory in trajectories]),
            "zero_variance_fraction": step.num_flat_groups / max(1, step.num_groups),
            "staleness": {str(age): count for age, count in sorted(counts.items())},
            "staleness_mean": float(ages.mean()) if len(ages) else 0.0,
            "staleness_max": int(ages.max()) if len(ages) else 0,
            "in_flight_s_mean": _mean([trajectory.finished_at - trajectory.admitted_at for trajectory in trajectories]),
            "in_queue_s_mean": _mean([placed_s - sample.trajectory.finished_at for sample, placed_s in step.samples]),
            "trainer": done.metrics,
            "elapsed_s": now_s - self.started_s,
        }


def _mean(values: list[float] | list[bool]) -> float:
    return float(np.mean(values)) if values else 0.0
