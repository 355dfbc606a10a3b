"""The curriculum, worked by hand: what teaches nothing rests for longer and longer, and comes back."""

from __future__ import annotations

import itertools

import pytest

from orchestrator.rules.curriculum import MAX_REST, Curriculum


def drawn(curriculum: Curriculum, number: int, *, epochs: int, success: float) -> list[int]:
    """The epochs in which a prompt is drawn that is measured alike each time."""
    found = []
    for epoch in range(epochs):
        if curriculum.draws(number, epoch=epoch):
            found.append(epoch)
            curriculum.measured(number, epoch=epoch, success=success)
    return found


@pytest.mark.parametrize("success", [0.0, 1.0])
def test_what_is_always_wrong_or_always_right_rests_1_2_4_and_then_8_epochs(success: float) -> None:
    assert drawn(Curriculum(low=0.0, high=1.0), 7, epochs=40, success=success) == [0, 2, 5, 10, 19, 28, 37]


def test_what_is_in_the_band_comes_in_every_epoch() -> None:
    assert drawn(Curriculum(low=0.0, high=1.0), 7, epochs=4, success=0.125) == [0, 1, 2, 3]
    assert drawn(Curriculum(low=0.2, high=0.8), 7, epochs=6, success=0.125) == [0, 2, 5]


def test_one_measurement_in_the_band_ends_the_rest_and_forgets_how_long_it_was() -> None:
    curriculum = Curriculum(low=0.0, high=1.0)
    for epoch, success in ((0, 0.0), (2, 0.0), (5, 0.5), (6, 0.0)):
        assert curriculum.draws(3, epoch=epoch)
        curriculum.measured(3, epoch=epoch, success=success)
    assert [curriculum.draws(3, epoch=epoch) for epoch in (7, 8)] == [False, True], "one epoch again, not four"


def test_prompts_do_not_answer_for_each_other() -> None:
    curriculum = Curriculum(low=0.0, high=1.0)
    curriculum.measured(1, epoch=0, success=1.0)
    assert (curriculum.draws(1, epoch=1), curriculum.draws(2, epoch=1), len(curriculum.resting)) == (False, True, 1)


def test_news_of_an_epoch_that_is_overtaken_changes_nothing() -> None:
    curriculum = Curriculum(low=0.0, high=1.0)
    curriculum.measured(1, epoch=2, success=0.0)
    curriculum.measured(1, epoch=1, success=0.5)
    curriculum.measured(1, epoch=2, success=1.0)
    assert [curriculum.draws(1, epoch=epoch) for epoch in (2, 3, 4)] == [True, False, True]


def test_no_prompt_is_passed_over_for_longer_than_the_longest_rest() -> None:
    epochs = drawn(Curriculum(low=0.0, high=1.0), 7, epochs=100, success=0.0)
    assert max(after - before for before, after in itertools.pairwise(epochs)) == MAX_REST + 1
