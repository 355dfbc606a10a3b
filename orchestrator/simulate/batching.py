"""Siblings become groups, groups become samples, samples become rows: the live `Grouping`, `BatchCut` and `Packing`, as `stages.batching`
drives them."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from orchestrator.rules.admission import Admission
from orchestrator.rules.batch import BatchCut, Filtered, Siblings, StepRules, Verdict, sampled_of
from orchestrator.rules.grouping import Grouping
from orchestrator.simulate.books import Books
from orchestrator.simulate.rollouts import column
from orchestrator.simulate.trainer import Trainer
from pipelinerl.algorithms.advantage import group_advantages, keeps_group, step_advantages
from pipelinerl.algorithms.advantage.outcome import ScoredGroup
from pipelinerl.algorithms.methods import method_of
from pipelinerl.algorithms.rules import spec_of
from pipelinerl.algorithms.signal import gradient_needs_advantage
from pipelinerl.config import Config
from pipelinerl.data.packing import Packing
from pipelinerl.errors import Stalled
from pipelinerl.messages import Float32, Mask, Sample, ScoredTrajectory, TerminalStatus


class SimulatedAdvantages:
    """In place of the live `MethodAdvantages`: the method's filter decides which groups train, and an advantage is 1 for all tokens of a
    sample that the trainer computes a backward pass for, 0 for one without any gradient. Nothing else is done with them.
    """

    def __init__(self, config: Config, *, forward_part: float) -> None:
        """`forward_part` is the trainer's; at 1 nobody asks what has a gradient."""
        self._method, self._correct_reward = method_of(config), config.algorithm.correct_reward
        is_split = gradient_needs_advantage(self._method) and config.trainer.layout.pipeline == 1
        is_own = spec_of("advantage", self._method.advantage.name).is_own  # what a user's function says is not computed here
        self._tells_gradients = forward_part < 1 and is_split and not is_own and self._keeps_zeros()

    def __call__(self, siblings: Siblings) -> list[Float32] | Filtered:
        """`rules.batch.GroupAdvantages`."""
        group, columns = self._group(siblings), self._columns(siblings)
        return columns if keeps_group(group, method=self._method) else Filtered(reason=self._method.group_filter.name, advantages=columns)

    def step_rules(self, rules: StepRules) -> StepRules:
        """Return a method's rules with these advantages in place of those of a whole step."""
        return rules if rules.step_advantages is None else dataclasses.replace(rules, step_advantages=self._over_step)

    def _over_step(self, groups: Sequence[Siblings]) -> list[list[Float32]]:
        return [self._columns(siblings) for siblings in groups]

    def _columns(self, siblings: Siblings) -> list[Float32]:
        has_gradient = self._has_gradient(self._group(siblings)).tolist()
        return [column(float(one), member.trajectory.num_tokens) for member, one in zip(sampled_of(siblings), has_gradient, strict=True)]

    def _group(self, siblings: Siblings) -> ScoredGroup:
        rewards = np.array([member.score.reward or 0.0 for member in sampled_of(siblings)], np.float64)
        lengths = np.array([member.trajectory.num_trained_tokens for member in sampled_of(siblings)], np.int64)
        return ScoredGroup(rewards=rewards, lengths=lengths, correct=rewards >= self._correct_reward)

    def _has_gradient(self, group: ScoredGroup) -> Mask:
        if self._tells_gradients:
            try:
                return np.array([np.any(one) for one in group_advantages(group, method=self._method)], np.bool_)
            except ValueError:  # the rule reads what a simulated group does not have
                self._tells_gradients = False
        return np.ones(len(group.rewards), np.bool_)

    def _keeps_zeros(self) -> bool:
        """Return whether the method's rule over a step leaves a group's zeros as they are: one that scales does, one that centres not."""
        groups = [ScoredGroup(rewards=np.array([0.0, right]), lengths=np.array([1, 1], np.int64)) for right in (0.0, 1.0)]
        flat, _ = step_advantages([np.zeros(2), np.array([0.0, 1.0])], groups, method=self._method)
        return not np.any(flat)


class Batching:
    """Cuts batches, and hands rows to the trainer."""

    def __init__(
        self,
        *,
        grouping: Grouping,
        cut: BatchCut,
        packing: Packing[Sample],
        admission: Admission,
        trainer: Trainer,
        books: Books,
        queue_bytes: int,
        max_dropped: int,
    ) -> None:
        self.on_verdict: Callable[[Verdict], None] = lambda verdict: None
        self.on_taken: Callable[[ScoredTrajectory], None] = lambda scored: None
        """Called with what needs no room any more in front of batching."""
        self.num_tokens: dict[int, tuple[int, int]] = {}
        """(tokens with a loss, samples) of the steps that are closed and not trained."""
        self._grouping, self._cut, self.packing, self._admission = grouping, cut, packing, admission
        self._trainer, self._books, self._queue_bytes, self._max_dropped = trainer, books, queue_bytes, max_dropped
        self._scored: collections.deque[ScoredTrajectory] = collections.deque()
        self._samples: dict[int, list[str]] = collections.defaultdict(list)
        """Rollouts assigned to each step that is not trained."""
        self._num_dropped = 0

    def take(self, scored: ScoredTrajectory) -> None:
        """Take what is scored, as soon as the trainer is not too far behind."""
        self._scored.append(scored)
        self.go_on()

    def go_on(self) -> None:
        """Batch what waits, while rows of later steps do not fill their room."""
        while self._scored and self._trainer.num_bytes_ahead < self._queue_bytes:
            scored = self._scored.popleft()
            self._take(scored)
            self.on_taken(scored)

    @property
    def num_waiting(self) -> int:
        """Scored rollouts that wait for the trainer."""
        return len(self._scored)

    def trained(self, step: int) -> None:
        """Note that a step is in the policy."""
        for name in self._samples.pop(step, ()):
            self._books.end(name, TerminalStatus.TRAINED)
        self.go_on()

    def _take(self, scored: ScoredTrajectory) -> None:
        if (group := self._grouping.add(scored)) is None:
            return
        verdict = self._cut.take(group)
        for ended in verdict.ended:
            self._books.end(ended.scored.trajectory.rollout_id, ended.status, ended.reason)
        if verdict.is_assigned:
            self._admission.assigned()
            self._samples[verdict.step] += [sample.trajectory.rollout_id for sample in verdict.samples]
            self._num_dropped = 0
        else:
            self._admission.dropped()
            self._num_dropped += not verdict.is_filtered
        self.on_verdict(verdict)
        if self._num_dropped >= self._max_dropped:
            reasons = ", ".join(f"{count} {reason}" for reason, count in self._books.reasons.most_common(5))
            raise Stalled(f"the last {self._num_dropped} groups were all dropped, so no step fills; rollouts so far by reason: {reasons}")
        for sample in verdict.delivered:
            self._pack(verdict.step, self.packing.add(sample))
        if verdict.closes_step:
            self._pack(verdict.step, self.packing.flush())
            self.num_tokens[verdict.step] = (verdict.num_tokens, verdict.num_samples)
            self._trainer.close(verdict.step)

    def _pack(self, step: int, rows: list[list[Sample]]) -> None:
        for samples in rows:
            self._trainer.add(step, samples)
