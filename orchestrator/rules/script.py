"""A script's accounts: which rollouts it has asked for, read, had scored and trained. Misuse is found here, by the call that commits it.

A group ends once, and whole: with the step that trains some of its siblings, or dropped. The siblings that a script leaves out of its rows
end with that step, as filtered; so the credit of a group returns once, and no sibling is left behind of which nobody would know that it is
over. A group that is too old for the step that comes next ends as stale, whether the script offers it or has forgotten it: so what is kept
here is of K + 1 steps, and what the script itself holds back.

The staleness bound is the batch cut's (`rules.batch.is_stale`), for those siblings that are to be trained.
"""

from __future__ import annotations

import collections
import dataclasses
import operator
from collections.abc import Callable, Collection, Iterable, Sequence

from orchestrator.rules.batch import STOPPED_EARLY, Filtered, SampledUnder, Siblings, is_stale, sampled_under
from orchestrator.rules.script_decisions import Decision, check_finite, check_row, check_samples, check_scored, decision, left_out, score_of
from pipelinerl.errors import NobodySends, NothingTrained, RolloutsUnread, ScriptError, TrainedTwice
from pipelinerl.messages import Group, Sample, ScoredTrajectory, TerminalStatus, Trajectory

ALL_STOPPED = (TerminalStatus.FILTERED, STOPPED_EARLY)
"""Why a group has no rows all of whose siblings were stopped early: it takes its place in the step all the same (`rules.batch`)."""
TOO_OLD = "oldest token over {} versions old"
MAX_REMEMBERED = 1 << 16
"""Groups that are over whose end is remembered for error messages. More only costs memory."""


Made = tuple[Sample, ...] | Filtered
"""The rows of siblings, or why the method filters them out."""


@dataclasses.dataclass(slots=True, kw_only=True)
class _OpenGroup:
    """A group that a script has asked for and that is not over."""

    num_siblings: int
    members: dict[str, Trajectory] = dataclasses.field(default_factory=dict)
    """Those that the script has read, by name."""
    stopped: set[str] = dataclasses.field(default_factory=set)
    """Those of them that a coin has stopped early."""
    in_scoring: set[str] = dataclasses.field(default_factory=set)
    scores: dict[str, ScoredTrajectory] = dataclasses.field(default_factory=dict)
    sampled: dict[str, SampledUnder] = dataclasses.field(default_factory=dict)
    """The versions of those whose age was asked for: they are what they are, however often it is."""
    made: tuple[Siblings, Made] | None = None
    """What the method has made of these siblings, when it was asked last."""
    refused: tuple[TerminalStatus, str] | None = None
    """Why its advantages were refused: it ends so unless it is trained nevertheless."""

    @property
    def is_read(self) -> bool:
        return len(self.members) == self.num_siblings

    @property
    def is_settled(self) -> bool:
        return self.is_read and not self.in_scoring


class ScriptBook:
    """The accounts of one script."""

    def __init__(
        self, *, num_steps: int, max_staleness: int, withhold: int | None = None, stops_early: bool = False, first_step: int = 0
    ) -> None:
        """`withhold`: see `rules.batch.StepRules`. `stops_early`: coins stop rollouts, and those that go on weigh more."""
        self.step = first_step
        """The step that comes next."""
        self.published = first_step
        """The newest version that the script has published."""
        self.trained = first_step
        """Steps that the script has seen trained."""
        self._num_steps = num_steps
        self._max_staleness = max_staleness
        self._withhold = withhold
        self._stops_early = stops_early
        self._open: dict[int, _OpenGroup] = {}
        self._ended: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._expired: set[int] = set()
        """Those of them that were too old, of which a script learns by getting no rows of them."""
        self.whose: Callable[[Trajectory], str] = lambda trajectory: ""
        """Says whose a rollout is that is none of this script's own, where anybody knows."""

    # --- rollouts ---

    def holds(self, trajectory: Trajectory) -> bool:
        """Return whether the script has read this very rollout, and it is not over."""
        group = self._open.get(trajectory.group_id)
        return group is not None and group.members.get(trajectory.rollout_id) is trajectory

    def check_sample(self, step: int) -> None:
        """Raise `NobodySends` where no engine may sample for a step, however long a script waits."""
        if self.step >= self._num_steps:
            raise NobodySends(
                f"sample: all {self._num_steps} steps are trained (trainer.steps), so nothing could train what is sampled now. Leave the"
                " block, or raise trainer.steps"
            )
        if step < self.step:
            raise ScriptError(f"sample: step {step} is over, and step {self.step} comes next: name that one, or a later one")
        if self.is_out_of_reach(step):
            comes = "comes next" if step == self.step else "is what they are for"
            raise NobodySends(
                f"sample: step {step} {comes}, and engines hold policy {self.published}, the last that was published: what it"
                f" samples would be more than pipeline.max_staleness = {self._max_staleness} versions old. Publish first"
            )

    def is_out_of_reach(self, step: int) -> bool:
        """Return whether all that engines sample is too old for a step, or for the next one, until the script publishes."""
        return max(step, self.step) - self.published > self._max_staleness

    def admitted(self, group_id: int, *, num_siblings: int) -> None:
        """Note that a group is sampled."""
        self._open[group_id] = _OpenGroup(num_siblings=num_siblings)

    def num_siblings(self, group_id: int) -> int:
        """Return how many rollouts a group has that is not over."""
        return self._open[group_id].num_siblings

    def read(self, trajectory: Trajectory, *, is_stopped: bool = False) -> None:
        """Note that the script has a rollout."""
        if (group := self._open.get(trajectory.group_id)) is not None:
            group.members[trajectory.rollout_id] = trajectory
            if is_stopped:
                group.stopped.add(trajectory.rollout_id)

    def begin_scoring(self, trajectory: Trajectory) -> None:
        """Note that a rollout is to be scored. Raises `TrainedTwice` where it was before, `ScriptError` for one of another run."""
        group = self._group_of(trajectory, call="score")
        if trajectory.rollout_id in group.in_scoring or trajectory.rollout_id in group.scores:
            raise TrainedTwice(f"score: rollout {trajectory.rollout_id} was scored before: each is scored once. Keep its score")
        group.in_scoring.add(trajectory.rollout_id)

    def scored(self, scored: ScoredTrajectory) -> None:
        """Note a rollout's score."""
        name = scored.trajectory.rollout_id
        if (group := self._open.get(scored.trajectory.group_id)) is not None:
            group.in_scoring.discard(name)
            group.scores[name] = scored

    def siblings(self, scored: Iterable[ScoredTrajectory]) -> list[Siblings]:
        """Return scored rollouts by group, in the order in which the groups first appear, without groups that have ended as too old.

        Raises `TrainedTwice` for one that is over otherwise.
        """
        scored = list(scored)
        check_scored("advantages", scored)
        found: dict[int, dict[int, ScoredTrajectory]] = {}
        for member in scored:
            if member.trajectory.group_id in self._expired:
                continue
            self._group_of(member.trajectory, call="advantages")
            found.setdefault(member.trajectory.group_id, {})[member.trajectory.sibling] = member
        return [tuple(members[number] for number in sorted(members)) for members in found.values()]

    @property
    def too_old(self) -> tuple[TerminalStatus, str]:
        """How a group ends that is too old."""
        return TerminalStatus.STALE, TOO_OLD.format(self._max_staleness)

    def is_too_old(self, members: Siblings) -> bool:
        """Return whether siblings cannot train together in the step that comes next."""
        sampled = [self._sampled_under(member.trajectory) for member in members]
        return is_stale(sampled, step=self.step, max_staleness=self._max_staleness, withhold=self._withhold)

    def made_of(self, siblings: Siblings, make: Callable[[Siblings], Made]) -> Made:
        """Return what the method makes of siblings that have a reward; it is not asked again about the very same ones."""
        group = self._open[siblings[0].trajectory.group_id]
        if group.made is None or len(group.made[0]) != len(siblings) or not all(map(operator.is_, group.made[0], siblings)):
            group.made = (siblings, make(siblings))
        return group.made[1]

    def refuse(self, group_id: int, status: TerminalStatus, reason: str) -> None:
        """Note that a group gets no advantages, and how it ends unless the script trains it nevertheless."""
        self._open[group_id].refused = (status, reason)

    # --- steps ---

    def train(self, rows: Sequence[Sample]) -> tuple[list[Decision], list[ScoredTrajectory]]:
        """Decide about the step that comes next: return what becomes of each group that ends with it, and the scores that the script itself
        gives.

        Raises, and changes nothing, `NobodySends` after the last step; `TrainedTwice` for a rollout that is over; `RolloutsUnread` for a
        group with a sibling that the script has not read; `ScriptError` for rows that are none, or of which none is young enough.
        """
        all_stopped = self._all_stopped()
        offered = self._check_rows(rows, may_be_none=bool(all_stopped))
        all_stopped -= offered.keys()
        trained, stale = [], []
        for group_id, samples in offered.items():
            members = tuple(self._member(group_id, sample.trajectory, reward=sample.reward) for sample in samples)
            (stale if self.is_too_old(members) else trained).append(group_id)
        if not trained and not all_stopped:
            raise ScriptError(
                f"train: the rows are of {len({row.trajectory.group_id for row in rows})} groups, each with a token more than"
                f" pipeline.max_staleness = {self._max_staleness} versions older than step {self.step}. Sample anew, or train sooner what"
                " was sampled"
            )
        given = [
            self._member(group_id, sample.trajectory, reward=sample.reward)
            for group_id in trained
            for sample in offered[group_id]
            if sample.trajectory.rollout_id not in self._open[group_id].scores
        ]
        for member in given:
            self.scored(member)
        decisions = [*self.drops(besides=offered.keys() | all_stopped), *(self._drop(group_id, *self.too_old) for group_id in stale)]
        decisions += [self._drop(group_id, *self.too_old) for group_id in self._forgotten(besides=offered.keys() | all_stopped)]
        decisions += [self._assign(group_id, offered.get(group_id, ())) for group_id in (*trained, *sorted(all_stopped))]
        self.step += 1
        return decisions, given

    def sft(self, num_rows: int) -> list[Decision]:
        """Decide that the step that comes next is of so many demonstrations; return what becomes of groups that end with it.

        Raises, and changes nothing, `NobodySends` after the last step, and `ScriptError` for no demonstration.
        """
        self._check_step_is_left(call="sft")
        if not num_rows:
            raise ScriptError("sft: no rows")
        decisions = [*self.drops(), *(self._drop(group_id, *self.too_old) for group_id in self._forgotten(besides=()))]
        self.step += 1
        return decisions

    def drops(self, *, besides: Collection[int] = ()) -> list[Decision]:
        """End the groups whose advantages were refused."""
        refused = {group_id: group.refused for group_id, group in self._open.items() if group.is_settled and group_id not in besides}
        return [self._drop(group_id, *how) for group_id, how in refused.items() if how is not None]

    def publishes(self, *, in_place: bool = False) -> int:
        """Return the version to publish: that of the last step that the script has seen trained, or else of the last on its way.

        Where steps are trained `in_place` it is always the last on its way: no policy before it will be there.
        Raises `NothingTrained` where it is published.
        """
        if self.step == self.published:
            after = "no step was trained yet" if not self.step else f"policy {self.step} is published, and no step was trained since"
            raise NothingTrained(f"publish: {after}. Train first")
        return self.trained if self.trained > self.published and not in_place else self.step

    def check_save(self) -> None:
        """Raise `NothingTrained` before the first step."""
        if not self.step:
            raise NothingTrained("save: no step was trained yet: the model is as it lies in model.path. Train first")

    # --- inside ---

    def _sampled_under(self, trajectory: Trajectory) -> SampledUnder:
        known = self._open[trajectory.group_id].sampled
        try:
            return known[trajectory.rollout_id]
        except KeyError:
            found = known[trajectory.rollout_id] = sampled_under(trajectory, step=self.step)
            return found

    def _check_step_is_left(self, *, call: str) -> None:
        if self.step >= self._num_steps:
            raise NobodySends(
                f"{call}: all {self._num_steps} steps are trained (trainer.steps): nobody would train another. Raise trainer.steps"
            )

    def _check_rows(self, rows: Sequence[Sample], *, may_be_none: bool) -> dict[int, list[Sample]]:
        """Return the rows by group, in order of appearance."""
        self._check_step_is_left(call="train")
        if not rows and not may_be_none:
            raise ScriptError("train: no rows. Where a filter has dropped every group, sample more before training")
        check_samples(rows)
        offered: dict[int, list[Sample]] = {}
        names: set[str] = set()
        for sample in rows:
            trajectory = sample.trajectory
            if trajectory.group_id in self._expired:
                continue
            group = self._group_of(trajectory, call="train")
            if trajectory.rollout_id in names:
                raise TrainedTwice(f"train: rollout {trajectory.rollout_id} is twice among the rows")
            names.add(trajectory.rollout_id)
            check_row(sample, group.scores.get(trajectory.rollout_id), stops_early=self._stops_early)
            offered.setdefault(trajectory.group_id, []).append(sample)
        check_finite(rows)
        for group_id in offered:
            self._check_is_settled(group_id)
        return offered

    def _check_is_settled(self, group_id: int) -> None:
        group = self._open[group_id]
        if not group.is_read:
            missing = group.num_siblings - len(group.members)
            raise RolloutsUnread(
                f"train: {missing} of the {group.num_siblings} rollouts of group {group_id} were not read yet, and a group ends whole: read"
                " all siblings of a group, then train those you choose"
            )
        if group.in_scoring:
            raise ScriptError(f"train: {', '.join(sorted(group.in_scoring))} are being scored: await their scores first")

    def _group_of(self, trajectory: Trajectory, *, call: str) -> _OpenGroup:
        """Return the group of a rollout that the script has read."""
        if (group := self._open.get(trajectory.group_id)) is not None and group.members.get(trajectory.rollout_id) is trajectory:
            return group
        if words := self.whose(trajectory):
            raise ScriptError(f"{call}: rollout {trajectory.rollout_id}: {words}")
        if trajectory.group_id not in self._open and trajectory.group_id in self._ended:
            raise TrainedTwice(f"{call}: rollout {trajectory.rollout_id} is over: its group {self._ended[trajectory.group_id]}")
        raise ScriptError(
            f"{call}: rollout {trajectory.rollout_id} is none that this script has read in this run and that is not over; a rollout is"
            " passed on as it was read, not changed"
        )

    def _member(self, group_id: int, trajectory: Trajectory, *, reward: float | None = None) -> ScoredTrajectory:
        """Return a sibling with its score; with the script's own where there is no other."""
        group, name = self._open[group_id], trajectory.rollout_id
        if (known := group.scores.get(name)) is not None:
            return known
        return ScoredTrajectory(trajectory=trajectory, score=score_of(trajectory, reward, is_stopped=name in group.stopped))

    def _forgotten(self, *, besides: Collection[int]) -> list[int]:
        """Return the groups of which no sibling could be trained any more."""
        return [
            group_id
            for group_id, group in self._open.items()
            if group_id not in besides
            and group.is_settled
            and all(self.is_too_old((self._member(group_id, one),)) for one in group.members.values())
        ]

    def _assign(self, group_id: int, samples: Sequence[Sample]) -> Decision:
        return decision(group_id, self._end(group_id, f"ended with step {self.step}"), samples, step=self.step)

    def _all_stopped(self) -> set[int]:
        """Return the groups that take a place in the step that comes next with nothing to train: `advantages` was given all of them."""
        return {number for number, group in self._open.items() if group.is_settled and group.refused == ALL_STOPPED}

    def _drop(self, group_id: int, status: TerminalStatus, reason: str) -> Decision:
        members = self._end(group_id, f"was dropped as {status} ({reason})")
        if status is TerminalStatus.STALE:
            self._expired.add(group_id)
        ended = tuple(left_out(member, status, reason) for member in members)
        is_filtered = status is TerminalStatus.FILTERED
        return Decision(group=Group(group_id=group_id, members=members), ended=ended, is_filtered=is_filtered)

    def _end(self, group_id: int, words: str) -> Siblings:
        members = tuple(self._member(group_id, one) for one in self._open[group_id].members.values())
        self._ended[group_id] = words
        while len(self._ended) > MAX_REMEMBERED:
            self._expired.discard(self._ended.popitem(last=False)[0])
        del self._open[group_id]
        return tuple(sorted(members, key=lambda member: member.trajectory.sibling))
