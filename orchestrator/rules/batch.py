"""The batch cut decides which scored groups become part of a step, with which samples, and when the step is complete.

The staleness bound is checked here a second time, per oldest token: a group that others overtook can be older than admission foresaw. A
step trains the version of its own number, so a group assigned to step s has staleness s - oldest version.

A group is assigned or dropped whole: removing a single row would change its siblings' baseline. Groups that the method filters out are
replaced by others, up to a budget per step. After that, the step is filled with whatever arrives, so that no reward can starve the trainer.

Siblings that were stopped early (`rules.early_stop`) are no failures: they were started. They count where a group needs so many siblings,
in its age, in its baseline (with their predicted reward) and among the step's samples, which sums are divided by. They train nothing and
end as filtered. A group whose siblings were all stopped takes its place in the step with nothing to train. If another group replaced it, or
if others were required besides the stopped ones, the draws would choose which prompts train, and weights of 1/epsilon could not correct for
that.

A greedy sibling exists for its reward, which is the baseline of the others. It is never a sample, whatever becomes of the group, and ends
as filtered. Its age does not matter, since any number that does not depend on what its siblings sampled is a baseline without bias. Where
it has no reward, the group has no baseline and fails whole: training it without one, or with another one, would be another method.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pipelinerl.algorithms.staleness import measure
from pipelinerl.messages import Float32, Group, Outcome, Sample, ScoredTrajectory, TerminalStatus, Trajectory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Filtered:
    """The verdict of a method that filters a group out."""

    reason: str
    advantages: list[Float32]
    """The advantages that the group trains with where the step's budget for filtered groups is spent."""


STOPPED_EARLY = "stopped early"
"""The reason given for a rollout that a random draw stopped."""
GREEDY_BASELINE = "greedy baseline"
"""The reason given for a greedy rollout that has a reward."""

NO_FAILURE = (Outcome.OK, Outcome.STOPPED)

Siblings = tuple[ScoredTrajectory, ...]
"""The siblings of a group that did not fail: each has a reward, or was stopped early. A greedy sibling is among them, as the last."""
GroupAdvantages = Callable[[Siblings], list[Float32] | Filtered]
"""The method's advantage rule for one group: one [L] column for each sibling but the greedy one. Columns of stopped siblings are not
read.
"""
StepAdvantages = Callable[[Sequence[Siblings]], list[list[Float32]]]
"""The method's advantage rule for all groups of a step at once, in the order in which they were assigned."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepRules:
    """The rules that a method adds to the batch cut, beyond the advantages of one group."""

    step_advantages: StepAdvantages | None = None
    """The rule for the final advantages of a whole step. Samples are then held until the step is complete; None lets each group go at
    once.
    """
    refill_batches: int = 10
    """Groups that may be filtered out for one step, in batches. A larger value generates more for nothing; a smaller one trains groups
    without signal.
    """
    withhold: int | None = None
    """Tokens older than this do not train, by the trainer's mask, while their sequence's reward still counts in the baseline. A group is
    then too old only where none of its tokens would train. With None, the oldest token decides about the group.
    """
    adds_greedy: bool = False
    """Each group has one more sibling, sampled at temperature 0, whose reward is the baseline of the others."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """A rollout that will not be trained."""

    scored: ScoredTrajectory
    status: TerminalStatus
    reason: str
    step: int | None = None
    """The step whose samples it counts among, where it was stopped early and its group was assigned to that step."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The decision about one group. Every member stands in exactly one of `samples` and `ended`."""

    group: Group
    step: int
    """Step the group was assigned to, or would have been."""
    samples: tuple[Sample, ...]
    """The samples of this group that train; under a rule over the whole step, they have the advantages of the group alone."""
    ended: tuple[Ended, ...]
    is_assigned: bool
    """True where the group takes a place in the step; without samples where all its siblings were stopped early."""
    delivered: tuple[Sample, ...] = ()
    """The samples that go to the trainer now: `samples`, or, under a rule over the whole step, all samples of the step when it closes."""
    is_filtered: bool = False
    """True where the group is dropped because the method filters it out."""
    is_let_through: bool = False
    """True where it trains although the method filters it out, because the step's budget is spent."""
    closes_step: bool = False
    """True where this group completes the step: the step is then closed with `num_tokens` and `num_samples`."""
    num_tokens: int = 0
    """Tokens with a loss in the whole step; meaningful where `closes_step`."""
    num_samples: int = 0
    """Samples in the whole step; meaningful where `closes_step`."""


class Cut(Protocol):
    """A rule that decides about complete groups, one after the other. `BatchCut` counts groups; `rules.script_cut.ScriptCut` does what a
    script says."""

    step: int
    """The step being filled."""

    def take(self, group: Group) -> Verdict:
        """Assign a group to the step being filled, or drop it."""
        ...

    def restore(self, samples: Sequence[Sample], *, num_groups: int, groups: Sequence[Siblings], num_stopped: int = 0) -> None:
        """Take over what an earlier process of the run has assigned to the step being filled."""
        ...

    @property
    def is_full(self) -> bool: ...

    @property
    def is_holding(self) -> bool: ...

    def close(self) -> tuple[int, int]:
        """Begin the next step; return (tokens with a loss, samples) of the one that is full."""
        ...


class BatchCut:
    """The cut assigns groups to steps of `groups_per_step`, in order of arrival."""

    def __init__(
        self,
        *,
        groups_per_step: int,
        max_staleness: int,
        min_group_size: int,
        group_advantages: GroupAdvantages,
        rules: StepRules | None = None,
        first_step: int = 0,
    ) -> None:
        self.step = first_step
        """Step being filled."""
        self.num_groups = 0
        """Groups in it so far."""
        self.num_filtered = 0
        """Groups filtered out for it so far."""
        self._groups_per_step = groups_per_step
        self._max_staleness = max_staleness
        self._min_group_size = min_group_size
        self._group_advantages = group_advantages
        self._rules = rules or StepRules()
        self._held: list[Siblings] = []
        """Assigned groups that wait for the rule over the whole step."""
        self._num_tokens = 0
        self._num_samples = 0

    def restore(self, samples: Sequence[Sample], *, num_groups: int, groups: Sequence[Siblings], num_stopped: int = 0) -> None:
        """Take over what an earlier process of the run has assigned to the step being filled; `groups` have not been delivered.

        `num_stopped` rollouts of its groups were stopped early.
        """
        self.num_groups = num_groups
        if self._rules.step_advantages is not None and not self.is_full:
            self._held = list(groups)
        self._num_samples = len(samples) + num_stopped
        self._num_tokens = sum(sample.trajectory.num_trained_tokens for sample in samples)

    def take(self, group: Group) -> Verdict:
        """Assign a group to the step being filled, or drop it."""
        siblings = tuple(member for member in group.members if member.score.outcome in NO_FAILURE)
        ended = [_failed(member) for member in group.members if member.score.outcome not in NO_FAILURE]
        if len(sampled_of(siblings)) < min(self._min_group_size, len(sampled_of(group.members))):
            return self._drop(group, ended, siblings, TerminalStatus.FAILED, f"fewer than {self._min_group_size} siblings scored")
        if self._rules.adds_greedy and greedy_of(siblings) is None:
            return self._drop(group, ended, siblings, TerminalStatus.FAILED, "its greedy sibling has no reward")
        if self._is_stale(siblings):
            return self._drop(group, ended, siblings, TerminalStatus.STALE, f"oldest token over {self._max_staleness} versions old")
        advantages = self._group_advantages(siblings)
        if not isinstance(advantages, Filtered):
            return self._assign(group, ended, siblings, advantages)
        if self.num_filtered < self._rules.refill_batches * self._groups_per_step:
            self.num_filtered += 1
            verdict = self._drop(group, ended, siblings, TerminalStatus.FILTERED, advantages.reason)
            return dataclasses.replace(verdict, is_filtered=True)
        return dataclasses.replace(self._assign(group, ended, siblings, advantages.advantages), is_let_through=True)

    def _assign(self, group: Group, ended: list[Ended], siblings: Siblings, advantages: list[Float32]) -> Verdict:
        step = self.step
        samples = samples_of(siblings, advantages)
        untrained = [_untrained(member, step=step) for member in siblings if _never_trains(member)]
        self.num_groups += 1
        self._num_samples += len(sampled_of(siblings))
        self._num_tokens += sum(sample.trajectory.num_trained_tokens for sample in samples)
        closes = self.is_full
        delivered = self._to_deliver(siblings, samples, closes=closes)
        num_tokens, num_samples = self.close() if closes else (0, 0)
        return Verdict(
            group=group,
            step=step,
            samples=samples,
            is_assigned=True,
            delivered=delivered,
            ended=(*ended, *untrained),
            closes_step=closes,
            num_tokens=num_tokens,
            num_samples=num_samples,
        )

    @property
    def is_full(self) -> bool:
        """True where the step being filled has all its groups."""
        return self.num_groups == self._groups_per_step

    @property
    def is_holding(self) -> bool:
        """True while samples of the step being filled wait for the rule over the whole step."""
        return bool(self._held)

    def close(self) -> tuple[int, int]:
        """Begin the next step; return (tokens with a loss, samples) of the one that is full."""
        counts = (self._num_tokens, self._num_samples)
        self.step, self.num_groups, self.num_filtered, self._num_tokens, self._num_samples = self.step + 1, 0, 0, 0, 0
        return counts

    def _to_deliver(self, siblings: Siblings, samples: tuple[Sample, ...], *, closes: bool) -> tuple[Sample, ...]:
        if self._rules.step_advantages is None:
            return samples
        self._held.append(siblings)
        if not closes:
            return ()
        held, self._held = self._held, []
        columns = self._rules.step_advantages(held)
        return tuple(sample for pair in zip(held, columns, strict=True) for sample in samples_of(*pair))

    def _drop(self, group: Group, ended: list[Ended], siblings: Siblings, status: TerminalStatus, reason: str) -> Verdict:
        lost = [ended_of(member, status=status, reason=reason) for member in siblings]
        return Verdict(group=group, step=self.step, samples=(), ended=(*ended, *lost), is_assigned=False)

    def _is_stale(self, siblings: Siblings) -> bool:
        sampled = [sampled_under(member.trajectory, step=self.step) for member in sampled_of(siblings)]
        return is_stale(sampled, step=self.step, max_staleness=self._max_staleness, withhold=self._rules.withhold)


SampledUnder = tuple[int, int] | None
"""The oldest and the newest version that sampled a token of a rollout; None where no token was sampled."""


def sampled_under(trajectory: Trajectory, *, step: int) -> SampledUnder:
    """Return the versions of a rollout's tokens. Raises `ValueError` where one is newer than the policy that `step` trains."""
    age = measure(trajectory.versions, trained_version=step)
    return None if age is None else (step - age.oldest, step - age.newest)


def is_stale(sampled: Iterable[SampledUnder], *, step: int, max_staleness: int, withhold: int | None) -> bool:
    """Return whether rollouts of these versions are too old to be trained together in a step, see `StepRules.withhold`."""
    known = [versions for versions in sampled if versions is not None]
    if not known:
        return False
    if withhold is None:
        return step - min(oldest for oldest, _ in known) > max_staleness
    return step - max(newest for _, newest in known) > min(withhold, max_staleness)


def sampled_of(members: Siblings) -> Siblings:
    """Return all members but the greedy sibling."""
    return tuple(member for member in members if not member.trajectory.is_greedy)


def greedy_of(members: Siblings) -> ScoredTrajectory | None:
    """Return the greedy sibling; None where there is none."""
    return next((member for member in members if member.trajectory.is_greedy), None)


def ended_of(member: ScoredTrajectory, *, status: TerminalStatus, reason: str) -> Ended:
    """Return the end of a member that does not train: by its own failure or role in the group, else with this status and reason."""
    if member.score.outcome not in NO_FAILURE:
        return _failed(member)
    return _untrained(member) if _never_trains(member) else Ended(scored=member, status=status, reason=reason)


def samples_of(siblings: Siblings, advantages: list[Float32]) -> tuple[Sample, ...]:
    """Return the siblings that train, each with its column of advantages; the greedy one has none."""
    pairs = zip(sampled_of(siblings), advantages, strict=True)
    return tuple(sample_of(member, column) for member, column in pairs if member.score.outcome is not Outcome.STOPPED)


def sample_of(member: ScoredTrajectory, advantages: Float32) -> Sample:
    """Return a sibling whose score is ok with its column of advantages."""
    assert member.score.reward is not None, "a score that is ok has a reward"
    return Sample(trajectory=member.trajectory, reward=member.score.reward, advantages=advantages, weight=member.weight)


def _never_trains(member: ScoredTrajectory) -> bool:
    return member.trajectory.is_greedy or member.score.outcome is Outcome.STOPPED


def _untrained(member: ScoredTrajectory, *, step: int | None = None) -> Ended:
    """End a member that never trains. `step` is the one whose samples a stopped rollout counts among; a greedy one counts among none."""
    if member.trajectory.is_greedy:
        return Ended(scored=member, status=TerminalStatus.FILTERED, reason=GREEDY_BASELINE)
    return Ended(scored=member, status=TerminalStatus.FILTERED, reason=STOPPED_EARLY, step=step)


def _failed(member: ScoredTrajectory) -> Ended:
    return Ended(scored=member, status=TerminalStatus.FAILED, reason=str(member.score.outcome))
