"""Routing: the least loaded engine, ties to the lowest id."""

from __future__ import annotations

import collections

import pytest

from orchestrator.rules.routing import route


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
