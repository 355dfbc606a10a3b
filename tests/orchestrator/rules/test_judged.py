"""What a scorer cannot have found is refused: other functions than the config's, sums that do not add up, figures that are none."""

from __future__ import annotations

import math

import numpy as np
import pytest

from orchestrator.rules.validation.completions import CompletionCheck
from orchestrator.rules.validation.scores import ScoreCheck, steps_scored
from orchestrator.rules.validation.violations import Kind
from orchestrator.stages.scoring import score_request
from pipelinerl.messages import Finish, GroupScored, Observation, Outcome, Replied, Reply, Scored, ScoreGroup, StepsScored, Turns
from tests.orchestrator import handmade

RULE = ScoreCheck(weights={"right": 1.0, "short": 0.5}, completion_check=CompletionCheck(vocabulary=100))
SCORE = score_request(handmade.trajectory())
GROUP = ScoreGroup(group_id=3, members=(SCORE, SCORE))
TURNS = Turns(starts=np.array([0], np.int32), ends=np.array([0], np.int32), states=("prompt",))
REPLY = Reply(episode_id="3/1", attempt=0, prompt=SCORE.prompt, token_ids=np.array([1], np.int32), turns=TURNS, finish=Finish.STOP)


def scored(reward: float | None, components: dict[str, float], *, outcome: Outcome = Outcome.OK, duration_s: float = 0.1) -> Scored:
    return Scored(rollout_id="3/1", attempt=0, outcome=outcome, reward=reward, components=components, duration_s=duration_s)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (None, scored(1.25, {"right": 1.0, "short": 0.5})),
        (None, scored(0.0, {})),
        (None, scored(None, {"right": math.nan}, outcome=Outcome.TIMEOUT)),
        (Kind.SCORES, scored(1.0, {"right": 0.0, "short": 0.5})),
        (Kind.SCORES, scored(1.0, {"right": 1.0, "long": 0.0})),
        (Kind.SCORES, scored(1.0, {"right": math.inf})),
        (Kind.SCORES, scored(None, {}, outcome=Outcome.STOPPED)),
        (Kind.BOUNDS, scored(1.0, {"right": 1.0}, duration_s=math.nan)),
        (Kind.BOUNDS, scored(1.0, {"right": 1.0}, duration_s=-1.0)),
        (Kind.UNASKED, GroupScored(group_id=3, outcome=Outcome.ERROR)),
    ],
)
def test_a_score_is_of_known_functions_and_their_weighted_sum(kind: Kind | None, said: Scored | GroupScored):
    violation = RULE.answer(said, SCORE)
    assert (None if violation is None else violation.kind) == kind


def test_a_comparison_has_a_reward_for_each_sibling():
    parts = ({"right": 1.0}, {"right": 0.0})
    assert RULE.answer(GroupScored(group_id=3, outcome=Outcome.OK, rewards=(1.0, 0.0), components=parts), GROUP) is None
    for rewards, components in (((1.0,), parts[:1]), ((1.0, 1.0), parts)):
        violation = RULE.answer(GroupScored(group_id=3, outcome=Outcome.OK, rewards=rewards, components=components), GROUP)
        assert violation is not None
        assert violation.kind == Kind.SCORES


def test_an_environment_says_tokens_of_the_vocabulary():
    for token_id, kind in ((99, None), (100, Kind.TOKENS)):
        heard = Observation(token_ids=np.array([token_id], np.int32), state="x")
        violation = RULE.answer(Replied(episode_id="3/1", attempt=0, turn=0, outcome=Outcome.OK, observation=heard), REPLY)
        assert (None if violation is None else violation.kind) == kind


@pytest.mark.parametrize(
    ("kind", "num_taken", "ends", "scores"),
    [
        (None, 10, [4, 9], [0.5, 0.25]),
        (None, 10, [], []),
        (Kind.LENGTH, 11, [], []),
        (Kind.LENGTH, -1, [], []),
        (Kind.SCORES, 10, [9, 4], [0.5, 0.25]),
        (Kind.SCORES, 10, [1], [0.5]),
        (Kind.SCORES, 8, [8], [0.5]),
        (Kind.SCORES, 10, [4], [math.nan]),
    ],
)
def test_steps_end_where_tokens_were_sent_and_have_finite_scores(kind: Kind | None, num_taken: int, ends: list[int], scores: list[float]):
    said = StepsScored(
        rollout_id="3/1",
        attempt=0,
        num_taken=num_taken,
        first=0,
        ends=np.array(ends, np.int32),
        scores=np.array(scores, np.float32),
        is_last=False,
        version="v",
    )
    violation = steps_scored(said, num_sent=10, last_end=2)
    assert (None if violation is None else violation.kind) == kind
