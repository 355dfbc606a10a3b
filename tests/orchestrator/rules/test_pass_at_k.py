"""pass@k by hand, and against drawing k of n in every possible way."""

import itertools

import pytest

from orchestrator.rules.pass_at_k import mean_pass_at, pass_at_k


@pytest.mark.parametrize(("num_correct", "k"), list(itertools.product(range(6), range(1, 6))))
def test_it_is_the_part_of_all_draws_of_k_that_hold_a_correct_one(num_correct: int, k: int):
    answers = [True] * num_correct + [False] * (5 - num_correct)
    draws = list(itertools.combinations(answers, k))
    assert pass_at_k(num_samples=5, num_correct=num_correct, k=k) == pytest.approx(sum(map(any, draws)) / len(draws))


def test_the_mean_is_over_prompts_and_k_goes_in_powers_of_two_to_n():
    assert mean_pass_at([1, 3], num_samples=4) == {1: 0.5, 2: 0.75, 4: 1.0}
    assert sorted(mean_pass_at([0], num_samples=6)) == [1, 2, 4, 6]


def test_more_draws_than_samples_are_refused():
    with pytest.raises(ValueError, match="pass@3 of 2 samples"):
        pass_at_k(num_samples=2, num_correct=1, k=3)
