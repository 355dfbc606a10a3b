"""What policies of the trained games are worth, against published numbers and games played one by one."""

from __future__ import annotations

import random
import statistics

import pytest

from scripts.bench.played import worth
from scripts.bench.played.demonstrations import digit, secretary


def test_the_secretary_problem_has_its_published_values() -> None:
    """Gilbert and Mosteller, Recognizing the Maximum of a Sequence (1966), tables 2 and 8."""
    assert [round(worth.ranks_alone(num), 3) for num in (2, 3, 4, 5)] == [0.5, 0.5, 0.458, 0.433]
    assert [round(worth.best_secretary(num), 3) for num in (2, 3, 4, 5)] == [0.75, 0.684, 0.655, 0.639]


def test_one_threshold_is_worth_what_it_wins() -> None:
    draw, wins = random.Random(0), 0
    for _ in range(20_000):
        values = [draw.random() for _ in range(worth.NUM_VALUES)]
        wins += next((value for value in values if value > 0.7), values[-1]) == max(values)
    assert wins / 20_000 == pytest.approx(worth.one_threshold(0.7), abs=0.01)


def test_a_value_is_taken_as_often_as_it_is_large() -> None:
    draw = random.Random(0)
    for value in (0.9, 0.5, 0.1):
        heard = [("", "The current value is 0.7000."), ("[continue]", f"The current value is {value:.4f}.")]
        taken = sum(secretary(draw, heard) == "[accept]" for _ in range(4_000)) / 4_000
        assert taken == pytest.approx(value, abs=0.03)


def test_what_is_shown_of_the_secretary_problem_is_worth_what_it_wins() -> None:
    draw, wins = random.Random(0), 0
    for _ in range(20_000):
        values = [draw.random() for _ in range(worth.NUM_VALUES)]
        wins += next((value for value in values if value > draw.random()), values[-1]) == max(values)
    assert wins / 20_000 == pytest.approx(worth.any_threshold(), abs=0.01)
    assert worth.blind_secretary() < worth.any_threshold() < worth.ranks_alone() < worth.one_threshold(0.7) < worth.best_secretary()


def test_what_is_shown_of_the_digit_is_worth_what_it_returns() -> None:
    draw = random.Random(0)
    mean = statistics.mean(played(draw, number=draw.randrange(10)) for _ in range(10_000))
    assert mean == pytest.approx(worth.shown_digit(), abs=0.02)
    assert worth.blind_digit() < worth.shown_digit() < worth.heeding_digit() < worth.best_digit()
    assert worth.best_digit() == pytest.approx(1.0 - 0.1 * 1.9), "halving ten digits takes 2.9 guesses: 1, 2, 4 and 3 of them in 1 to 4"


def played(draw: random.Random, *, number: int) -> float:
    """The return of one game of the digit."""
    heard, total = [("", "Which digit?")], 0.0
    for _ in range(worth.NUM_GUESSES):
        move = digit(draw, heard)
        if int(move.strip("[]")) == number:
            return total + 1.0
        total -= 0.1
        heard.append((move, "Higher." if int(move.strip("[]")) < number else "Lower."))
    return total
