"""Which rows are asked for, and in which order the training loop gets what arrives."""

import pytest

from pipelinerl.errors import PeerRefused
from pipelinerl.messages import MicroBatch, StepClosed
from tests.trainer.tiny import make_batch
from trainer.orchestrator_client import Pulls


def _row(step: int, index: int) -> MicroBatch:
    return make_batch([], step=step, index=index)


def _seal(step: int, num_micro_batches: int) -> StepClosed:
    return StepClosed(step=step, num_micro_batches=num_micro_batches, num_tokens=1, num_samples=1)


def _ask(pulls: Pulls, num_more: int) -> list[tuple[int, int]]:
    return [(pull.step, pull.index) for pull in pulls.wanted(num_more)]


@pytest.fixture
def pulls() -> Pulls:
    return Pulls(replica=0, first_step=0, num_steps=2)


def test_a_seal_that_overtakes_a_row_waits_for_it(pulls: Pulls) -> None:
    assert _ask(pulls, 3) == [(0, 0), (0, 1), (0, 2)]
    seal, first, second = _seal(0, 2), _row(0, 0), _row(0, 1)
    assert pulls.take(second) == [second]
    assert pulls.take(seal) == []
    assert pulls.take(first) == [first, seal]


def test_after_a_seal_the_next_step_is_asked_for_and_answers_to_the_old_one_are_dropped(pulls: Pulls) -> None:
    _ask(pulls, 2)
    pulls.take(_row(0, 0))
    assert len(pulls.take(_seal(0, 1))) == 1
    assert pulls.num_asked == 0
    assert _ask(pulls, 2) == [(1, 0), (1, 1)]
    assert pulls.take(_seal(0, 1)) == []
    assert pulls.take(_row(0, 0)) == []


def test_a_repeated_row_is_given_once(pulls: Pulls) -> None:
    _ask(pulls, 2)
    assert len(pulls.take(_row(0, 0))) == 1
    assert pulls.take(_row(0, 0)) == []
    assert len(pulls.take(_seal(0, 1))) == 1


def test_nothing_is_asked_for_after_the_last_step(pulls: Pulls) -> None:
    for step in range(2):
        _ask(pulls, 1)
        pulls.take(_seal(step, 0))
    assert _ask(pulls, 2) == []


def test_a_row_of_a_step_that_was_not_asked_for_is_refused(pulls: Pulls) -> None:
    _ask(pulls, 2)
    with pytest.raises(PeerRefused, match="MicroBatch of step 1, asked for was row 0 of step 0"):
        pulls.take(_row(1, 0))
