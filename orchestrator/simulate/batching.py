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
from orchestrator.simulate.rollouts import zeros
from orchestrator.simulate.trainer import Trainer
from pipelinerl.algorithms.advantage import keeps_group
from pipelinerl.algorithms.advantage.outcome import ScoredGroup
from pipelinerl.algorithms.method import Method
from pipelinerl.data.packing import Packing
from pipelinerl.errors import Stalled
from pipelinerl.messages import Float32, Sample, ScoredTrajectory, TerminalStatus


@dataclasses.dataclass(slots=True, kw_only=True)
class MethodFilter:
    """The method's filter decides which groups train; advantages are zeros, since nothing is computed with them."""

    method: Method
    correct_reward: float

    def __call__(self, siblings: Siblings) -> list[Float32] | Filtered:
        """`rules.batch.GroupAdvantages`."""
        columns = [zeros(member.trajectory.num_tokens) for member in sampled_of(siblings)]
        if self.method.group_filter.name == "none":
            return columns
        rewards = np.array([member.score.reward or 0.0 for member in sampled_of(siblings)], np.float64)
        lengths = np.array([member.trajectory.num_trained_tokens for member in sampled_of(siblings)], np.int64)
        group = ScoredGroup(rewards=rewards, lengths=lengths, correct=rewards >= self.correct_reward)
        if keeps_group(group, method=self.method):
            return columns
        return Filtered(reason=self.method.group_filter.name, advantages=columns)


def step_rules_of(rules: StepRules) -> StepRules:
    """Return a method's rules with zeros in place of the advantages of a whole step."""
    return rules if rules.step_advantages is None else dataclasses.replace(rules, step_advantages=_no_advantages)


def _no_advantages(groups: Sequence[Siblings]) -> list[list[Float32]]:
    return [[zeros(member.trajectory.num_tokens) for member in sampled_of(siblings)] for siblings in groups]


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
