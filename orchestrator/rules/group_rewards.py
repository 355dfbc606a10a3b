"""This rule treats a group whose rewards compare siblings, before the comparison is asked for and after. It has no loop and no clock.

The policy is to wait until every sibling has an outcome of its own, and to ask with those that are ok, if these are at least two and at
least `min_group_size`. Otherwise nobody is left to compare with, so the ok ones become invalid and are counted by that reason. A comparison
that fails fails all compared siblings.
"""

from __future__ import annotations

import dataclasses

import msgspec

from pipelinerl.messages import Group, Outcome, Result, Score, ScoredTrajectory


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The division of a group into members to compare and members that are final."""

    done: tuple[ScoredTrajectory, ...]
    """Members whose score is final without a comparison."""
    compared: tuple[ScoredTrajectory, ...]
    """Members that a scorer is to compare; empty, or at least two."""


def plan_comparison(group: Group, *, min_group_size: int) -> Plan:
    """Split a group, all of whose members have an outcome, into those to compare and the others."""
    siblings = tuple(member for member in group.members if member.score.outcome is Outcome.OK)
    failed = tuple(member for member in group.members if member.score.outcome is not Outcome.OK)
    if len(siblings) >= max(2, min_group_size):
        return Plan(done=failed, compared=siblings)
    error = f"{len(siblings)} of {len(group.members)} siblings have a score; a comparison needs {max(2, min_group_size)}"
    return Plan(done=(*failed, *(_fail(member, Outcome.INVALID, error) for member in siblings)), compared=())


def join_comparison(compared: tuple[ScoredTrajectory, ...], result: Result) -> tuple[ScoredTrajectory, ...]:
    """Add the comparison's reward to each member's own; a member is invalid where no function of either kind applied to it."""
    if result.outcome is not Outcome.OK:
        return tuple(_fail(member, result.outcome, result.error) for member in compared)
    if len(result.rewards) != len(compared):
        error = f"the scorer gave {len(result.rewards)} rewards for {len(compared)} siblings"
        return tuple(_fail(member, Outcome.INVALID, error) for member in compared)
    return tuple(
        _add(member, reward, components) for member, reward, components in zip(compared, result.rewards, result.components, strict=True)
    )


def _add(member: ScoredTrajectory, reward: float, components: dict[str, float]) -> ScoredTrajectory:
    both = member.score.components | components
    if not both:
        return _fail(member, Outcome.INVALID, "no reward function applies")
    assert member.score.reward is not None, "a score that is ok has a reward"
    return _with_score(member, msgspec.structs.replace(member.score, reward=member.score.reward + reward, components=both))


def _fail(member: ScoredTrajectory, outcome: Outcome, error: str) -> ScoredTrajectory:
    return _with_score(member, msgspec.structs.replace(member.score, outcome=outcome, reward=None, components={}, error=error))


def _with_score(member: ScoredTrajectory, score: Score) -> ScoredTrajectory:
    return msgspec.structs.replace(member, score=score)
