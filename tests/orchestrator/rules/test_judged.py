"""What a scorer cannot have found is refused: other functions than the config's, sums that do not add up, figures that are none."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest

from orchestrator.rollouts.scorer_tasks import group_reward_task, reward_task
from orchestrator.rules.validation.completions import CompletionCheck
from orchestrator.rules.validation.scores import ScoreCheck, steps_scored
from orchestrator.rules.validation.violations import Kind
from pipelinerl.messages import Observation, Outcome, RequestKind, Result, StepsScored
from tests.orchestrator import handmade

RULE = ScoreCheck(weights={"right": 1.0, "short": 0.5}, completion_check=CompletionCheck(vocabulary=100))
REWARD = reward_task(handmade.trajectory())
GROUP = group_reward_task([handmade.trajectory(), handmade.trajectory(sibling=1)])
ENVIRONMENT = msgspec.structs.replace(REWARD, kind=RequestKind.ENVIRONMENT)
OBSERVATION = Observation(token_ids=np.array([99], np.int32), state="x")


def scored(reward: float, components: dict[str, float], *, duration_s: float = 0.1) -> Result:
    return Result(request_id=1, outcome=Outcome.OK, rewards=(reward,), components=(components,), duration_s=duration_s)


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (None, scored(1.25, {"right": 1.0, "short": 0.5})),
        (None, scored(0.0, {})),
        (None, Result(request_id=1, outcome=Outcome.TIMEOUT)),
        (Kind.SCORES, scored(1.0, {"right": 0.0, "short": 0.5})),
        (Kind.SCORES, scored(1.0, {"right": 1.0, "long": 0.0})),
        (Kind.SCORES, scored(1.0, {"right": math.inf})),
        (Kind.SCORES, Result(request_id=1, outcome=Outcome.STOPPED)),
        (Kind.SCORES, Result(request_id=1, outcome=Outcome.OK)),
        (Kind.SCORES, Result(request_id=1, outcome=Outcome.OK, observation=OBSERVATION)),
        (Kind.BOUNDS, scored(1.0, {"right": 1.0}, duration_s=math.nan)),
        (Kind.BOUNDS, scored(1.0, {"right": 1.0}, duration_s=-1.0)),
    ],
)
def test_a_score_is_of_known_functions_and_their_weighted_sum(kind: Kind | None, said: Result):
    violation = RULE.answer(said, REWARD)
    assert (None if violation is None else violation.kind) == kind


def test_a_comparison_has_a_reward_for_each_sibling():
    parts = ({"right": 1.0}, {"right": 0.0})
    assert RULE.answer(Result(request_id=1, outcome=Outcome.OK, rewards=(1.0, 0.0), components=parts), GROUP) is None
    for rewards, components in (((1.0,), parts[:1]), ((1.0, 1.0), parts)):
        violation = RULE.answer(Result(request_id=1, outcome=Outcome.OK, rewards=rewards, components=components), GROUP)
        assert violation is not None
        assert violation.kind == Kind.SCORES


def test_an_environment_says_tokens_of_the_vocabulary_and_gives_no_rewards():
    unknown = Observation(token_ids=np.array([100], np.int32), state="x")
    over = Result(request_id=1, outcome=Outcome.OK)
    for said, kind in (
        (over, None),
        (msgspec.structs.replace(over, observation=OBSERVATION), None),
        (msgspec.structs.replace(over, observation=unknown), Kind.TOKENS),
        (scored(1.0, {"right": 1.0}), Kind.SCORES),
    ):
        violation = RULE.answer(said, ENVIRONMENT)
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


@pytest.mark.parametrize(
    ("ends", "first", "is_last", "is_refused"),
    [
        ([3, 7], 0, True, False),
        ([3], 0, False, False),
        ([7], 1, True, False),
        ([3], 0, True, True),
        ([4, 7], 0, True, True),
        ([3, 5, 7], 0, True, True),
        ([3, 7, 9], 0, True, True),
    ],
)
def test_the_steps_of_an_episode_end_where_its_turns_do(ends: list[int], first: int, is_last: bool, is_refused: bool):
    said = StepsScored(
        rollout_id="3/1",
        attempt=0,
        num_taken=10,
        first=first,
        ends=np.array(ends, np.int32),
        scores=np.full(len(ends), 0.5, np.float32),
        is_last=is_last,
        version="v",
    )
    violation = steps_scored(said, num_sent=10, last_end=-1, turn_ends=np.array([3, 7], np.int32))
    assert (violation is not None) == is_refused
    assert violation is None or "turns end at" in violation.words
