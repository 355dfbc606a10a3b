"""Which scored groups become part of a step, with which samples, and when the step is whole.

The staleness bound is checked here a second time, per oldest token: a group that others overtook can be older than admission foresaw.
A step trains the version of its own number, so a group placed in step s has staleness s - oldest version.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from pipelinerl.messages import Fate, Float32, Group, Outcome, Sample, ScoredTrajectory

Credit = Callable[[tuple[ScoredTrajectory, ...]], list[Float32] | str]
"""The method's advantage rule: for the scored siblings of a group one [L] column each, or the reason why the group is set aside."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A rollout that will not be trained."""

    scored: ScoredTrajectory
    fate: Fate
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """What becomes of one group. Every member stands in exactly one of `samples` and `ended`."""

    group: Group
    step: int
    """Step the group was placed in, or would have been."""
    samples: tuple[Sample, ...]
    ended: tuple[Ended, ...]
    closes_step: bool
    """True where this group completes the step: then it is sealed with `num_tokens` and `num_samples`."""
    num_tokens: int = 0
    """Tokens with a loss in the whole step; meaningful where `closes_step`."""
    num_samples: int = 0
    """Samples in the whole step; meaningful where `closes_step`."""

    @property
    def is_placed(self) -> bool:
        return bool(self.samples)


class BatchCut:
    """Places groups in steps of `groups_per_step`, in order of arrival."""

    def __init__(self, *, groups_per_step: int, max_staleness: int, min_survivors: int, credit: Credit, first_step: int = 0) -> None:
        self.step = first_step
        """Step being filled."""
        self.num_groups = 0
        """Groups in it so far."""
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._min_survivors = min_survivors
        self._credit = credit
        self._num_tokens = 0
        self._num_samples = 0

    def restore(self, samples: Sequence[Sample], *, num_groups: int) -> None:
        """Take over what an earlier life of the run has placed in the step being filled."""
        self.num_groups = num_groups
        self._num_samples = len(samples)
        self._num_tokens = sum(sample.trajectory.num_trained_tokens for sample in samples)

    def take(self, group: Group) -> Verdict:
        """Place a group in the step being filled, or give it up."""
        ended = [_failed(member) for member in group.members if member.score.outcome is not Outcome.OK]
        survivors = tuple(member for member in group.members if member.score.outcome is Outcome.OK)
        if len(survivors) < min(self._min_survivors, len(group.members)):
            return self._give_up(group, ended, survivors, Fate.FAILED, f"fewer than {self._min_survivors} siblings scored")
        if max(self._staleness(member) for member in survivors) > self._max_staleness:
            return self._give_up(group, ended, survivors, Fate.STALE, f"oldest token over {self._max_staleness} versions old")
        credit = self._credit(survivors)
        if isinstance(credit, str):
            return self._give_up(group, ended, survivors, Fate.FILTERED, credit)
        samples = tuple(_sample(member, advantages) for member, advantages in zip(survivors, credit, strict=True))
        return self._place(group, ended, samples)

    def _place(self, group: Group, ended: list[Ended], samples: tuple[Sample, ...]) -> Verdict:
        step = self.step
        self.num_groups += 1
        self._num_samples += len(samples)
        self._num_tokens += sum(sample.trajectory.num_trained_tokens for sample in samples)
        closes = self.is_full
        num_tokens, num_samples = self.close() if closes else (0, 0)
        return Verdict(
            group=group,
            step=step,
            samples=samples,
            ended=tuple(ended),
            closes_step=closes,
            num_tokens=num_tokens,
            num_samples=num_samples,
        )

    @property
    def is_full(self) -> bool:
        """True where the step being filled has all its groups."""
        return self.num_groups == self._groups_per_step

    def close(self) -> tuple[int, int]:
        """Begin the next step; return (tokens with a loss, samples) of the one that is full."""
        counts = (self._num_tokens, self._num_samples)
        self.step, self.num_groups, self._num_tokens, self._num_samples = self.step + 1, 0, 0, 0
        return counts

    def _give_up(self, group: Group, ended: list[Ended], survivors: tuple[ScoredTrajectory, ...], fate: Fate, reason: str) -> Verdict:
        lost = tuple(ended) + tuple(Ended(scored=member, fate=fate, reason=reason) for member in survivors)
        return Verdict(group=group, step=self.step, samples=(), ended=lost, closes_step=False)

    def _staleness(self, member: ScoredTrajectory) -> int:
        oldest = member.trajectory.oldest_version
        return 0 if oldest is None else self.step - oldest


def _sample(member: ScoredTrajectory, advantages: Float32) -> Sample:
    assert member.score.reward is not None, "a score that is ok has a reward"
    return Sample(trajectory=member.trajectory, reward=member.score.reward, advantages=advantages)


def _failed(member: ScoredTrajectory) -> Ended:
    return Ended(scored=member, fate=Fate.FAILED, reason=str(member.score.outcome))
