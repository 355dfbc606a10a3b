"""Routing: the least loaded engine, ties to the lowest id."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.rules.routing import Loads, route


@pytest.mark.parametrize(
    ("outstanding", "engine_id"),
    [({0: 3, 1: 2, 2: 4}, 1), ({0: 2, 1: 2}, 0), ({7: 1, 3: 1}, 3), ({5: 9}, 5), ({}, None)],
)
def test_the_next_group_goes_to_the_engine_with_the_fewest_rollouts(outstanding: dict[int, int], engine_id: int | None):
    assert route(outstanding) == engine_id


def test_equal_engines_share_evenly():
    """Twelve groups of four over three engines that answer nothing: sixteen rollouts each."""
    outstanding = collections.Counter({0: 0, 1: 0, 2: 0})
    for _ in range(12):
        chosen = route(outstanding)
        assert chosen is not None
        outstanding[chosen] += 4
    assert outstanding == {0: 16, 1: 16, 2: 16}


def test_loads_choose_as_route_does_among_engines_of_the_allowed_versions():
    loads = Loads()
    for engine_id, (version, outstanding) in enumerate([(3, 5), (2, 1), (3, 4), (3, 4), (1, 0)]):
        loads.note(engine_id, version=version, outstanding=outstanding)
    assert sorted(loads.versions()) == [1, 2, 3]
    assert loads.least_busy([3]) == 2, "the fewest, then the lowest id"
    assert loads.least_busy([2, 3]) == 1
    assert loads.least_busy([7]) is None
    loads.note(2, version=3, outstanding=6)
    assert loads.least_busy([3]) == 3
    loads.note(4, version=3, outstanding=0)
    assert loads.least_busy([3]) == 4
    assert sorted(loads.versions()) == [2, 3], "nobody holds version 1 any more"
    loads.forget(4)
    loads.forget(4)
    assert loads.least_busy([1, 2, 3]) == 1


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 3), st.integers(0, 9)), max_size=400), st.sets(st.integers(0, 3)))
def test_loads_agree_with_route_after_any_history_and_do_not_grow(history: list[tuple[int, int, int]], versions: set[int]):
    loads, now = Loads(), {}
    for engine_id, version, outstanding in history:
        loads.note(engine_id, version=version, outstanding=outstanding)
        now[engine_id] = (version, outstanding)
        admissible = {engine_id: count for engine_id, (held, count) in now.items() if held in versions}
        assert loads.least_busy(versions) == route(admissible)
    assert set(loads.versions()) == {held for held, _ in now.values()}
    assert all(len(heap) <= 64 + 4 * 6 for heap in loads._heaps.values())
