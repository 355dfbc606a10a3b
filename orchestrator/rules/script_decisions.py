"""What becomes of a group as a script has decided: which siblings train, and how the others end."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

import numpy as np

from orchestrator.rules.batch import STOPPED_EARLY, Ended, Siblings, ended_of
from pipelinerl.errors import ScriptError
from pipelinerl.messages import MAX_REWARD, Group, Outcome, Sample, Score, ScoredTrajectory, TerminalStatus, Trajectory, is_reward

LEFT_OUT = "the script left it out"
"""The reason given for a sibling that is not among the rows of the step that its group ended with."""
UNSCORED = "the script did not score it"
SCRIPT = "script"
"""The component of a score that the script itself gave."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What becomes of a group, as a script has decided."""

    group: Group
    """All its siblings; those that were never scored have an invalid score."""
    samples: tuple[Sample, ...] = ()
    """Those that train; none where the group is dropped."""
    ended: tuple[Ended, ...]
    """The others."""
    is_filtered: bool = False
    """True where the method's filter has dropped it."""


def decision(group_id: int, members: Siblings, samples: Sequence[Sample], *, step: int) -> Decision:
    """Decide that samples of a group train in a step, and that its other members end with that."""
    names = {sample.trajectory.rollout_id for sample in samples}
    others = [member for member in members if member.trajectory.rollout_id not in names]
    ended = tuple(left_out(member, TerminalStatus.FILTERED, LEFT_OUT, step=step) for member in others)
    return Decision(group=Group(group_id=group_id, members=members), samples=tuple(samples), ended=ended)


def left_out(member: ScoredTrajectory, status: TerminalStatus, reason: str, *, step: int | None = None) -> Ended:
    """End a sibling that does not train; nobody has found one to fail that was never scored. One stopped early counts in `step`."""
    if member.score.error == UNSCORED:
        return Ended(scored=member, status=status, reason=reason)
    ended = ended_of(member, status=status, reason=reason)
    return dataclasses.replace(ended, step=step) if ended.reason == STOPPED_EARLY else ended


def check_rollouts(call: str, given: Iterable[object]) -> None:
    """Raise `ScriptError` for what is no rollout."""
    _check_kind(call, given, Trajectory, "as `run.sample(prompts)` gives; of a scored one it is `.trajectory`")


def check_scored(call: str, given: Iterable[object]) -> None:
    """Raise `ScriptError` for what is no scored rollout."""
    _check_kind(call, given, ScoredTrajectory, "as `run.score(rollouts)` gives")


def check_samples(rows: Iterable[object]) -> None:
    """Raise `ScriptError` for what is no row, or one whose advantages are not of the type that travels."""
    _check_kind("train", rows, Sample, "as `run.advantages(scored)` gives, or `Sample(trajectory=..., reward=..., advantages=...)`")
    for row in rows:
        assert isinstance(row, Sample)
        found = getattr(row.advantages, "dtype", type(row.advantages).__name__)
        if found != np.float32:
            do = 'make them by .astype("float32")'
            raise ScriptError(f"train: rollout {row.trajectory.rollout_id} has advantages of {found}, expected float32: {do}")


def _check_kind(call: str, given: Iterable[object], kind: type, do: str) -> None:
    for number, one in enumerate(given):
        if not isinstance(one, kind):
            raise ScriptError(f"{call}: number {number} of what it is given is of {type(one).__name__}, expected {kind.__name__}, {do}")


def check_row(sample: Sample, scored: ScoredTrajectory | None, *, stops_early: bool) -> None:
    """Raise `ScriptError` for a row that cannot train, or that is not of the score that the ledger has."""
    trajectory = sample.trajectory
    if not trajectory.num_trained_tokens or trajectory.is_greedy:
        why = "is greedy, and serves for its reward alone" if trajectory.is_greedy else f"has no sampled token ({trajectory.error})"
        raise ScriptError(f"train: rollout {trajectory.rollout_id} {why}. Leave it out of the rows")
    if stops_early and scored is None:
        raise ScriptError(
            f"train: rollout {trajectory.rollout_id} was not scored, and its score says what it weighs, since rollouts are stopped early"
            " (prm.early_stop or rollout.cut_after). Have it scored first, and give it advantages of your own"
        )
    if scored is not None and scored.score.outcome is Outcome.STOPPED:
        raise ScriptError(
            f"train: rollout {trajectory.rollout_id} was stopped early, and the others weigh for it. Leave it out of the rows"
        )
    if scored is not None and (sample.reward != scored.score.reward or sample.weight != scored.weight):
        raise ScriptError(
            f"train: rollout {trajectory.rollout_id} comes with the reward {sample.reward} and was scored {scored.score.reward}"
            f" ({scored.score.outcome}): what changes a reward belongs into the advantages, the reward stays what was scored"
        )


def check_finite(rows: Sequence[Sample]) -> None:
    """Raise `ScriptError` where a number is none, or beyond `MAX_REWARD`; all rows are looked at together."""
    every = np.abs(np.concatenate([row.advantages for row in rows] or [()]))
    if all(is_reward(row.reward) for row in rows) and (every <= MAX_REWARD).all():
        return
    for row in rows:
        if not is_reward(row.reward) or not (np.abs(row.advantages) <= MAX_REWARD).all():
            words = f"not finite, or above {MAX_REWARD:g} in size"
            raise ScriptError(f"train: rollout {row.trajectory.rollout_id} has a reward or an advantage that is {words}")


def score_of(trajectory: Trajectory, reward: float | None, *, is_stopped: bool) -> Score:
    """Return the score that a script gives a rollout; without a reward, the one of a rollout that nobody has scored."""
    if is_stopped:
        return Score(rollout_id=trajectory.rollout_id, attempt=trajectory.attempt, outcome=Outcome.STOPPED, reward=None)
    outcome = Outcome.INVALID if reward is None else Outcome.OK
    return Score(
        rollout_id=trajectory.rollout_id,
        attempt=trajectory.attempt,
        outcome=outcome,
        reward=reward,
        components={} if reward is None else {SCRIPT: reward},
        error=UNSCORED if reward is None else "",
    )
