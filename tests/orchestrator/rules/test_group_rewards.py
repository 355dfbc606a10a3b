"""Groups whose rewards compare siblings: who is compared, and what each gets, by hand."""

from __future__ import annotations

import pytest

from orchestrator.rules.group_rewards import join_comparison, plan_comparison
from pipelinerl.messages import Group, Outcome, Result, Score, ScoredTrajectory
from tests.orchestrator import handmade


def member(
    sibling: int, *, outcome: Outcome = Outcome.OK, reward: float = 1.0, components: dict[str, float] | None = None
) -> ScoredTrajectory:
    trajectory = handmade.trajectory(group_id=3, sibling=sibling)
    is_ok = outcome is Outcome.OK
    score = Score(
        rollout_id=trajectory.rollout_id,
        attempt=0,
        outcome=outcome,
        reward=reward if is_ok else None,
        components=({"rule": reward} if components is None else components) if is_ok else {},
        error="" if is_ok else "why",
    )
    return ScoredTrajectory(trajectory=trajectory, score=score)


def group(*members: ScoredTrajectory) -> Group:
    return Group(group_id=3, members=members)


def test_survivors_are_compared_and_the_others_keep_their_outcome() -> None:
    plan = plan_comparison(group(member(0), member(1, outcome=Outcome.TIMEOUT), member(2)), min_group_size=2)
    assert [one.trajectory.sibling for one in plan.compared] == [0, 2]
    assert [(one.trajectory.sibling, one.score.outcome) for one in plan.done] == [(1, Outcome.TIMEOUT)]


@pytest.mark.parametrize(("num_ok", "min_group_size"), [(1, 1), (1, 2), (2, 3), (0, 2)])
def test_too_few_survivors_are_dropped_as_invalid_and_not_asked_for(num_ok: int, min_group_size: int) -> None:
    members = [member(index, outcome=Outcome.OK if index < num_ok else Outcome.ERROR) for index in range(4)]
    plan = plan_comparison(group(*members), min_group_size=min_group_size)
    assert plan.compared == ()
    assert sorted(one.score.outcome for one in plan.done) == [Outcome.ERROR] * (4 - num_ok) + [Outcome.INVALID] * num_ok
    assert all(one.score.reward is None for one in plan.done)


def test_reward_is_the_member_s_own_plus_the_comparison_s() -> None:
    answer = Result(request_id=3, outcome=Outcome.OK, rewards=(0.5, -0.5), components=({"rank": 1.0}, {"rank": -1.0}))
    first, second = join_comparison((member(0, reward=2.0), member(2, reward=3.0)), answer)
    assert (first.score.reward, first.score.components) == (2.5, {"rule": 2.0, "rank": 1.0})
    assert (second.score.reward, second.score.components) == (2.5, {"rule": 3.0, "rank": -1.0})


def test_comparison_that_failed_fails_all_and_is_never_a_reward() -> None:
    answer = Result(request_id=3, outcome=Outcome.TIMEOUT, error="rank did not return")
    for one in join_comparison((member(0), member(1)), answer):
        assert (one.score.outcome, one.score.reward, one.score.components, one.score.error) == (
            Outcome.TIMEOUT,
            None,
            {},
            "rank did not return",
        )


def test_member_to_which_no_function_of_either_kind_applies_is_invalid() -> None:
    answer = Result(request_id=3, outcome=Outcome.OK, rewards=(0.0, 1.0), components=({}, {"rank": 1.0}))
    first, second = join_comparison((member(0, reward=0.0, components={}), member(1, reward=0.0, components={})), answer)
    assert (first.score.outcome, first.score.reward) == (Outcome.INVALID, None)
    assert (second.score.outcome, second.score.reward) == (Outcome.OK, 1.0)


def test_answer_for_another_number_of_siblings_is_invalid() -> None:
    answer = Result(request_id=3, outcome=Outcome.OK, rewards=(0.0,), components=({},))
    assert {one.score.outcome for one in join_comparison((member(0), member(1)), answer)} == {Outcome.INVALID}
