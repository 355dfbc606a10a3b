"""The score of a trajectory that no scorer is asked about."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.rollouts.scorer_tasks import failed_score, reward_task
from pipelinerl.messages import Finish, Outcome
from tests.orchestrator import handmade


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome.OK, (Outcome.ERROR, "engine 3: out of memory")),
        (Outcome.TIMEOUT, (Outcome.TIMEOUT, "out of memory")),
        (Outcome.INVALID, (Outcome.INVALID, "out of memory")),
    ],
)
def test_a_failure_keeps_its_outcome_and_an_engine_s_names_the_engine(outcome: Outcome, expected: tuple[Outcome, str]) -> None:
    trajectory = handmade.trajectory(finish=Finish.ERROR)
    score = failed_score(msgspec.structs.replace(trajectory, engine_id=3, outcome=outcome, error="out of memory"))
    assert score is not None
    assert (score.outcome, score.error) == expected
    assert (score.rollout_id, score.attempt, score.reward) == (trajectory.rollout_id, trajectory.attempt, None)


def test_a_scorer_is_sent_no_images() -> None:
    trajectory = handmade.trajectory()
    seen = msgspec.structs.replace(trajectory, prompt=msgspec.structs.replace(trajectory.prompt, images=(b"one",)))
    assert reward_task(seen).prompt == trajectory.prompt
    assert seen.num_bytes == trajectory.num_bytes + 3, "queues are bounded in bytes, images included"


def test_a_trajectory_that_did_not_fail_is_for_a_scorer() -> None:
    assert failed_score(handmade.trajectory(finish=Finish.LENGTH)) is None
