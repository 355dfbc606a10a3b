"""Grouping: whole groups whatever the order of arrival, and every sibling once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rules.grouping import Grouping
from tests.orchestrator import handmade


def arrival(group_id: int, sibling: int, reward: float = 1.0):
    return handmade.scored(handmade.trajectory(group_id=group_id, sibling=sibling), reward)


@given(order=st.permutations([(group_id, sibling) for group_id in range(3) for sibling in range(4)]))
def test_any_order_of_arrival_gives_every_group_whole_with_its_last_sibling(order: list[tuple[int, int]]):
    grouping = Grouping(group_size=4)
    seen: dict[int, set[int]] = {}
    for group_id, sibling in order:
        group = grouping.add(arrival(group_id, sibling))
        seen.setdefault(group_id, set()).add(sibling)
        if len(seen[group_id]) < 4:
            assert group is None
        else:
            assert group is not None
            assert group.group_id == group_id
            assert [member.trajectory.rollout_id for member in group.members] == [f"{group_id}/{number}" for number in range(4)]
    assert grouping.num_open == 0
    assert grouping.num_fenced == 0


def test_open_groups_are_counted():
    grouping = Grouping(group_size=2)
    grouping.add(arrival(0, 0))
    grouping.add(arrival(1, 1))
    assert grouping.num_open == 2
    grouping.add(arrival(0, 1))
    assert grouping.num_open == 1


def test_a_group_of_one_is_whole_at_once():
    group = Grouping(group_size=1).add(arrival(5, 0))
    assert group is not None
    assert group.group_id == 5


def test_the_first_result_of_a_sibling_counts_and_a_second_is_fenced():
    grouping = Grouping(group_size=2)
    assert grouping.add(arrival(0, 0, reward=1.0)) is None
    assert grouping.add(arrival(0, 0, reward=9.0)) is None
    assert grouping.num_fenced == 1
    group = grouping.add(arrival(0, 1, reward=2.0))
    assert group is not None
    assert [member.score.reward for member in group.members] == [1.0, 2.0]


def test_a_second_result_after_its_group_has_left_is_fenced_too():
    """Otherwise a ghost group stays open for ever, or is settled a second time."""
    grouping = Grouping(group_size=2)
    grouping.add(arrival(0, 0))
    grouping.add(arrival(0, 1))
    assert grouping.add(arrival(0, 1)) is None
    assert grouping.add(arrival(0, 0)) is None
    assert grouping.num_open == 0
    assert grouping.num_fenced == 2
