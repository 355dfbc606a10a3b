"""Figures of the run so far: one journal line per optimizer step, and the gauges of the moment.

Means over groups and samples are over what was placed in the step; `zero_variance_fraction` tells how many of its groups taught nothing.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from orchestrator.observe.sample_log import SampleLog
from orchestrator.rules.batch import Verdict, greedy_of, sampled_of
from orchestrator.rules.repetition import repeated_fraction
from pipelinerl.algorithms.staleness import split
from pipelinerl.messages import Finish, Sample, ScoredTrajectory, StepDone, TerminalStatus, WeightsCommitted
from pipelinerl.observe.alarms.rules import Alarms
from pipelinerl.observe.fold.rows import Alarm, EvaluationRow, StepRow, read
from pipelinerl.observe.journal import Journal


@dataclasses.dataclass(slots=True, kw_only=True)
class _Step:
    """The samples that were assigned to a step, with their times."""

    samples: list[tuple[Sample, float]] = dataclasses.field(default_factory=list)
    """The samples, each with the second on the run's clock at which it was assigned."""
    components: dict[str, list[float]] = dataclasses.field(default_factory=lambda: collections.defaultdict(list))
    members: dict[str, ScoredTrajectory] = dataclasses.field(default_factory=dict)
    """Trajectories and scores of the samples, by rollout."""
    greedy_rewards: list[float] = dataclasses.field(default_factory=list)
    """Rewards of the greedy siblings, which are no samples."""
    num_groups: int = 0
    num_flat_groups: int = 0
    """Groups whose rewards are all equal."""
    num_filtered: int = 0
    """Groups that the method filtered while the step was being filled."""
    num_unfiltered: int = 0
    """Groups that it would have filtered, had the step's budget not been spent."""
    num_stale_groups: int = 0
    """Groups dropped for their age while the step was being filled."""


class Progress:
    """Gathers figures step by step, and raises the alarms of learning. `started_s`: the second on the run's clock at which it began."""

    def __init__(
        self,
        *,
        journal: Journal,
        started_s: float,
        alarms: Alarms | None = None,
        on_alarm: Callable[[Alarm], None] = lambda _: None,
        has_advantages: bool = True,
    ) -> None:
        """Take `on_alarm`, which is called with each alarm that is raised.

        Without `has_advantages` the trainer makes them, and which tokens are useful is not known here.
        """
        self.journal = journal
        self.started_s = started_s
        self.last_step: dict[str, object] = {}
        """The last step's journal fields; empty before the first."""
        self.last_pause_s: float | None = None
        self.pauses_s: list[float] = []
        self.num_trained_tokens = 0
        """Sampled tokens that were trained, without those of prompts and environments."""
        self.on_alarm = on_alarm
        self.on_trained: Callable[[StepDone], None] = lambda done: None
        """Called with each step that is in the policy for the first time."""
        self._alarms = alarms or Alarms()
        self._has_advantages = has_advantages
        self._num_recomputed = 0
        """Tokens of KV caches that swaps since the last step had computed anew."""
        self.rewards: list[float] = []
        """Mean reward of every step trained."""
        self._steps: dict[int, _Step] = collections.defaultdict(_Step)
        self._sample_log = SampleLog(journal)

    def group_completed(self, verdict: Verdict, *, now_s: float) -> None:
        """Note that a group was assigned to a step, or dropped."""
        self._sample_log.ended(verdict.ended, step=verdict.step, now_s=now_s)
        step = self._steps[verdict.step]
        step.num_filtered += verdict.is_filtered
        step.num_unfiltered += verdict.is_let_through
        step.num_stale_groups += any(ended.status is TerminalStatus.STALE for ended in verdict.ended)
        if not verdict.is_assigned:
            return
        greedy = greedy_of(verdict.group.members)
        if greedy is not None and greedy.score.reward is not None:
            step.greedy_rewards.append(greedy.score.reward)
        rewards = [sample.reward for sample in verdict.samples]
        step.num_groups += 1
        step.num_flat_groups += not rewards or max(rewards) - min(rewards) < 1e-9
        step.samples += [(sample, now_s) for sample in verdict.samples]
        for member in sampled_of(verdict.group.members):
            step.members[member.trajectory.rollout_id] = member
            for name, value in member.score.components.items():
                step.components[name].append(value)

    def swapped(self, committed: WeightsCommitted) -> None:
        """Note that an engine changed its version."""
        self.last_pause_s = committed.pause_s
        self.pauses_s.append(committed.pause_s)
        self._num_recomputed += committed.num_recomputed_tokens

    def mismatched(self, step: int, engines: Sequence[str]) -> None:
        """Tell which engines' log-probabilities differ in a step, a sentence each."""
        for words in engines:
            self.journal.write("mismatch", step=step, words=words)
            print(f"step {step}: {words}", flush=True)

    def trained(self, done: StepDone, *, now_s: float, engines: Sequence[str] = ()) -> None:
        """Write the line of a step that is in the policy; `engines` describes those whose log-probabilities differ."""
        step = self._steps.pop(done.step, _Step())
        fields = self._fields(done, step, now_s=now_s) | ({"engine_mismatch": list(engines)} if engines else {})
        self.last_step = fields
        self._num_recomputed = 0
        self.num_trained_tokens += sum(sample.trajectory.num_trained_tokens for sample, _ in step.samples)
        if step.samples:
            self.rewards.append(float(fields["reward_mean"]))  # pyright: ignore[reportArgumentType]
        self.journal.write("step", **fields)
        self._sample_log.trained(done.step, [sample for sample, _ in step.samples], now_s=now_s, members=step.members)
        self._tell(self._alarms.take_step(read(StepRow, fields)))
        self.on_trained(done)

    def evaluated(self, fields: dict[str, Any]) -> None:
        """Note the journal fields of an evaluation that is done."""
        self._tell(self._alarms.take_evaluation(read(EvaluationRow, fields)))

    def _tell(self, alarms: list[Alarm]) -> None:
        for alarm in alarms:
            self.journal.write("alarm", **dataclasses.asdict(alarm))
            if not alarm.is_over:
                self.on_alarm(alarm)

    def proven(self, number: int, samples: list[Sample], *, now_s: float) -> None:
        """Write the line of a step from the ledger: a checkpoint holds it, but its trainer ended before it could say that it is done."""
        step = self._steps[number] = _Step(num_groups=len({sample.trajectory.group_id for sample in samples}))
        step.samples = [(sample, sample.trajectory.finished_at) for sample in samples]
        self.trained(StepDone(step=number, metrics={}), now_s=now_s)

    def _fields(self, done: StepDone, step: _Step, *, now_s: float) -> dict[str, object]:
        trajectories = [sample.trajectory for sample, _ in step.samples]
        rewards = np.array([sample.reward for sample, _ in step.samples] or [0.0])
        weights = np.array([sample.weight for sample, _ in step.samples] or [1.0])  # flagged ones that went on stand for the stopped
        turns = [float(len(trajectory.turns.starts)) for trajectory in trajectories if trajectory.turns is not None]
        lengths = np.array([trajectory.num_trained_tokens for trajectory in trajectories] or [0])
        parts = split([trajectory.versions for trajectory in trajectories], trained_version=done.step)
        ages = parts.in_flight + parts.in_queue
        counts = np.bincount(ages)  # a step trains no token younger than itself
        repeated = repeated_fraction([trajectory.token_ids[trajectory.loss_mask] for trajectory in trajectories])
        return {
            "step": done.step,
            "version": done.step,
            **({"reward_mean": float(np.average(rewards, weights=weights)), "reward_std": float(rewards.std())} if trajectories else {}),
            **({"greedy_reward_mean": _mean(step.greedy_rewards)} if step.greedy_rewards else {}),
            "components": {name: float(np.mean(values)) for name, values in step.components.items()},
            "num_groups": step.num_groups,
            "num_samples": len(step.samples),
            "num_tokens": sum(trajectory.num_tokens for trajectory in trajectories),
            "num_trained_tokens": int(lengths.sum()),
            **({"num_useful_tokens": sum(sample.num_useful_tokens for sample, _ in step.samples)} if self._has_advantages else {}),
            **({"length_mean": float(lengths.mean())} if trajectories else {}),
            **({"turns_mean": _mean(turns)} if turns else {}),
            **({"truncated_fraction": _mean([one.finish is Finish.LENGTH for one in trajectories])} if trajectories else {}),
            **({"repeated_fraction": repeated} if repeated is not None else {}),
            "zero_variance_fraction": step.num_flat_groups / max(1, step.num_groups),
            "staleness": {str(age): int(count) for age, count in enumerate(counts) if count},
            **_mean_and_most("staleness", ages),
            "staleness_min": int(ages.min()) if len(ages) else 0,
            **_mean_and_most("staleness_in_flight", parts.in_flight),
            **_mean_and_most("staleness_in_queue", parts.in_queue),
            "kv_recomputed_tokens": self._num_recomputed,
            "filtered_groups": step.num_filtered,
            "unfiltered_groups": step.num_unfiltered,
            "stale_groups": step.num_stale_groups,
            "in_flight_s_mean": _mean([trajectory.finished_at - trajectory.admitted_at for trajectory in trajectories]),
            "in_queue_s_mean": _mean([placed_s - sample.trajectory.finished_at for sample, placed_s in step.samples]),
            "trainer": done.metrics,
            "elapsed_s": now_s - self.started_s,
        }


def _mean_and_most(name: str, ages: np.ndarray) -> dict[str, float]:
    """Return two figures of the ages of tokens, 0 where there is no token."""
    return {f"{name}_mean": float(ages.mean()) if len(ages) else 0.0, f"{name}_max": int(ages.max(initial=0))}


def _mean(values: list[float] | list[bool]) -> float:
    return float(np.mean(values)) if values else 0.0
