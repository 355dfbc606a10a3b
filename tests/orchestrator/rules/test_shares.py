"""Weighted turns, by hand and for any weights."""

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rules.shares import Shares


def test_turns_are_spread_not_bunched():
    shares = Shares([3, 1])
    assert [shares.give() for _ in range(8)] == [0, 0, 1, 0, 0, 0, 1, 0]


@given(st.lists(st.floats(0.01, 100), min_size=1, max_size=6), st.integers(1, 300))
def test_after_any_number_of_turns_each_has_its_share_give_or_take_one(weights: list[float], num_turns: int):
    shares = Shares(weights)
    given_to = [shares.give() for _ in range(num_turns)]
    for index, weight in enumerate(weights):
        assert abs(given_to.count(index) - num_turns * weight / sum(weights)) <= len(weights) - 1 + 1e-6
