"""Episodes worked by hand: what stands where in the row, when one ends, and what GiGPO makes of its turns."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.advantages import MethodAdvantages, _turns
from orchestrator.rollouts.multi_turn import Episode
from orchestrator.rollouts.scorer_tasks import environment_task, score_of
from orchestrator.rules.batch import Filtered
from orchestrator.rules.kv import squared_lags_of
from pipelinerl.algorithms.method import Need
from pipelinerl.algorithms.methods import resolve
from pipelinerl.config import RewardSection
from pipelinerl.messages import Completion, Finish, Observation, Outcome, Result, Score, ScoredTrajectory, Trajectory
from tests.orchestrator import handmade


def said(*versions: int, first: int, turn: int, finish: Finish = Finish.STOP) -> Completion:
    """The tokens `first`, `first` + 1, ... of these versions."""
    num = len(versions)
    return Completion(
        rollout_id="0/0",
        attempt=0,
        turn=turn,
        token_ids=np.arange(first, first + num, dtype=np.int32),
        logprobs=np.full(num, -0.5, np.float32),
        versions=np.array(versions, np.int32),
        finish=finish,
    )


def observed(*token_ids: int, state: str, turn: int) -> Result:
    said = Observation(token_ids=np.array(token_ids, np.int32), state=state)
    return Result(request_id=turn, outcome=Outcome.OK, observation=said)


def over(turn: int) -> Result:
    return Result(request_id=turn, outcome=Outcome.OK)


def begun(*, max_tokens: int = 20, max_turns: int = 5) -> Episode:
    return Episode(prompt=handmade.prompt(2), max_tokens=max_tokens, max_turns=max_turns)


def trajectory(episode: Episode, *, sibling: int = 0) -> Trajectory:
    assert episode.is_over
    return episode.trajectory(rollout_id=f"0/{sibling}", group_id=0, sibling=sibling, attempt=0)


def three_turns() -> Episode:
    """The policy is swapped during the second turn, and between it and the third."""
    episode = begun().said(said(3, 3, first=10, turn=0)).observe(observed(50, state="X", turn=0))
    episode = episode.said(said(3, 4, 4, first=20, turn=1)).observe(observed(51, 52, state="Y", turn=1))
    return episode.said(said(6, first=30, turn=2)).observe(over(2))


def two_turns() -> Episode:
    return (
        begun().said(said(3, first=10, turn=0)).observe(observed(50, state="X", turn=0)).said(said(3, 3, first=20, turn=1)).observe(over(1))
    )


def test_an_episode_of_three_turns_is_one_row_in_which_only_the_model_trains():
    row = trajectory(three_turns())
    assert row.token_ids.tolist() == [100, 101, 10, 11, 50, 20, 21, 22, 51, 52, 30]
    assert row.loss_mask.tolist() == [False, False, True, True, False, True, True, True, False, False, True]
    assert row.versions.tolist() == [-1, -1, 3, 3, -1, 3, 4, 4, -1, -1, 6]
    assert row.logprobs.tolist() == [0, 0, -0.5, -0.5, 0, -0.5, -0.5, -0.5, 0, 0, -0.5]
    assert row.turns is not None
    assert (row.turns.starts.tolist(), row.turns.ends.tolist(), row.turns.states) == ([0, 3, 8], [1, 5, 8], ("prompt", "X", "Y"))
    assert (int(row.versions[row.loss_mask].min()), row.num_trained_tokens, row.finish) == (3, 6, Finish.STOP)


def test_each_turn_is_asked_for_with_all_before_it_and_what_is_left():
    episode = begun().said(said(3, 3, first=10, turn=0))
    task = environment_task("0/0", attempt=1, episode=episode)
    assert (task.rollout_id, task.attempt, task.completions[0].tolist()) == ("0/0", 1, [10, 11])
    episode = episode.observe(observed(50, state="X", turn=0))
    assert episode.context.tolist() == [100, 101, 10, 11, 50]
    assert (episode.num_turns, episode.num_left, episode.newest_version, episode.is_over) == (1, 17, 3, False)


def test_what_leaves_no_room_for_a_token_more_is_not_heard_and_the_episode_is_cut_off():
    episode = begun(max_tokens=5).said(said(0, 0, first=10, turn=0))
    assert not episode.observe(observed(50, 51, state="X", turn=0)).is_over
    row = trajectory(episode.observe(observed(50, 51, 52, state="X", turn=0)))
    assert (row.token_ids.tolist(), row.finish) == ([100, 101, 10, 11], Finish.LENGTH)


@pytest.mark.parametrize("finish", [Finish.LENGTH, Finish.CANCELLED, Finish.ERROR])
def test_a_turn_that_did_not_end_by_itself_is_the_last(finish: Finish):
    episode = begun().said(said(0, 0, first=10, turn=0, finish=finish))
    assert (episode.is_over, episode.finish) == (True, finish)


def test_the_environment_is_not_asked_after_the_last_turn():
    episode = begun(max_turns=2).said(said(0, first=10, turn=0))
    assert not episode.is_over
    assert episode.observe(observed(50, state="X", turn=0)).said(said(0, first=20, turn=1)).is_over


def test_an_environment_that_fails_fails_the_rollout_as_it_failed():
    replied = Result(request_id=0, outcome=Outcome.TIMEOUT, error="reply did not return within 1 s")
    row = trajectory(begun().said(said(0, first=10, turn=0)).observe(replied))
    assert (row.finish, row.outcome, row.error) == (Finish.ERROR, Outcome.TIMEOUT, "environment: reply did not return within 1 s")


def stateful(*, max_tokens: int = 20, max_turns: int = 2) -> Episode:
    return Episode(prompt=handmade.prompt(2), max_tokens=max_tokens, max_turns=max_turns, is_stateful=True)


def rewarded(reward: float, *token_ids: int, turn: int) -> Result:
    said = Observation(token_ids=np.array(token_ids, np.int32), state="X") if token_ids else None
    return Result(request_id=turn, outcome=Outcome.OK, observation=said, reward=reward)


def test_an_environment_with_state_speaks_first_and_rewards_every_turn_the_last_too():
    task = environment_task("0/0", attempt=0, episode=stateful())
    assert (task.turns, task.completions[0].tolist()) == ((None,), [])
    episode = stateful().observe(observed(40, 41, state="start", turn=0))
    assert (episode.context.tolist(), episode.num_turns, episode.is_over) == ([100, 101, 40, 41], 0, False)
    episode = episode.said(said(3, first=10, turn=0)).observe(rewarded(0.25, 50, turn=0))
    episode = episode.said(said(3, 3, first=20, turn=1))
    assert not episode.is_over, "the environment hears the last turn too"
    row = trajectory(episode.observe(rewarded(2.0, 51, turn=1)))
    assert row.token_ids.tolist() == [100, 101, 40, 41, 10, 50, 20, 21], "and what it says to it is not heard"
    assert row.loss_mask.tolist() == [False, False, False, False, True, False, True, True]
    assert row.turns is not None
    assert row.turns.rewards is not None
    assert (row.turns.starts.tolist(), row.turns.states, row.turns.rewards.tolist()) == ([2, 4], ("start", "X"), [0.25, 2.0])
    score = score_of(row, Result(request_id=9, outcome=Outcome.OK, rewards=(0.5,), components=({"rule": 0.5},)))
    assert (score.reward, score.components) == (2.75, {"rule": 0.5, "environment": 2.25})


def test_a_reset_that_says_nothing_leaves_the_prompt_and_one_that_leaves_no_room_fails():
    episode = stateful().observe(over(0))
    assert (episode.context.tolist(), episode.is_over) == ([100, 101], False)
    row = trajectory(stateful(max_tokens=2).observe(observed(40, 41, state="start", turn=0)))
    assert (row.finish, row.outcome, row.error) == (
        Finish.ERROR,
        Outcome.INVALID,
        "environment: its reset says 2 tokens, and rollout.max_tokens is 2",
    )


def test_a_turn_that_was_cut_off_is_not_heard_and_has_no_reward():
    episode = stateful().observe(over(0)).said(said(3, first=10, turn=0)).observe(rewarded(0.25, 50, turn=0))
    row = trajectory(episode.said(said(3, first=20, turn=1, finish=Finish.LENGTH)))
    assert row.turns is not None
    assert row.turns.rewards is not None
    assert row.turns.rewards.tolist() == [0.25, 0.0]


def test_an_episode_that_begins_again_has_nothing_of_its_past():
    episode = stateful().observe(observed(40, state="start", turn=0)).said(said(3, first=10, turn=0)).restarted()
    assert (episode.context.tolist(), episode.num_turns, episode.turns) == ([100, 101], 0, None)
    assert (episode.is_over, episode.num_restarts, episode.newest_version, episode.state) == (False, 1, -1, "prompt")


def test_turns_score_what_their_environment_gave_them_and_sum_up_to_the_reward():
    episode = stateful(max_turns=3).observe(over(0))
    for turn, reward in enumerate((1.0, -0.5, 0.0)):
        episode = episode.said(said(3, first=10 * turn, turn=turn)).observe(rewarded(reward, 50, turn=turn))
    row = trajectory(episode)
    score = score_of(row, Result(request_id=9, outcome=Outcome.OK, rewards=(0.25,), components=({"rule": 0.25},)))
    (steps,) = _turns((ScoredTrajectory(trajectory=row, score=score),))
    assert steps.scores.tolist() == [1.0, -0.5, 0.25]


def test_gigpo_compares_turns_that_answer_equal_states():
    """Rewards 1 and 0, gamma 0.5. Returns by turn: 1/4, 1/2, 1 and 0, 0. Siblings: +-1/2. Both answered the prompt: +-1/8 by (1/4, 0);
    both X: +-1/4 by (1/2, 0); Y was answered once, and has no baseline.
    """
    method = resolve("gigpo", {"advantage": {"gamma": 0.5, "divide_by_std": False}}, group_size=2, offers={Need.ANCHORS})
    credit = MethodAdvantages(method, (RewardSection.model_validate({"function": "rewards.py:right", "weight": 1.0}),))
    rows = [trajectory(three_turns()), trajectory(two_turns(), sibling=1)]
    scores = [Score(rollout_id=f"0/{n}", attempt=0, outcome=Outcome.OK, reward=reward) for n, reward in enumerate((1.0, 0.0))]
    columns = credit(tuple(ScoredTrajectory(trajectory=row, score=score) for row, score in zip(rows, scores, strict=True)))
    assert not isinstance(columns, Filtered)
    first, second = 0.5 + 0.125, 0.5 + 0.25
    assert columns[0].tolist() == [0, 0, first, first, 0, second, second, second, 0, 0, 0.5]
    assert columns[1].tolist() == [0, 0, -first, 0, -second, -second]


def test_a_turn_lags_by_swaps_within_it_alone():
    """What was before a turn is computed anew under its first version: 5 tokens of context, one of version 3, then two of version 4."""
    row = trajectory(three_turns())
    square, count = squared_lags_of(row, trained=4)
    assert count == 2
    assert square == pytest.approx((6 / 6) ** 2 + (6 / 7) ** 2)
    assert squared_lags_of(row, trained=6) == (0.0, 0)
