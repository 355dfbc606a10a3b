"""Circuits between leaves, on numbers worked by hand."""

from __future__ import annotations

import numpy as np

from orchestrator.rules.circuits import allot, choose


def test_ports_go_to_the_pair_that_is_longest_at_it():
    """8 bytes between 0 and 1, 3 between 1 and 2, three ports each. 0-1 gets one (8 over one port, then 4 over two), one more (4, then
    8/3), then 1-2 with its 3 gets the last port of leaf 1.
    """
    assert allot({(0, 1): 8.0, (1, 2): 3.0}, ports=3) == {(0, 1): 2, (1, 2): 1}


def test_a_ring_of_leaves_shares_every_port_between_two_neighbours():
    demand = {(leaf, (leaf + 1)): 5.0 for leaf in range(5)} | {(0, 5): 5.0}
    assert set(allot(demand, ports=4).values()) == {2}


def test_no_leaf_has_more_circuits_than_ports():
    chance = np.random.default_rng(0)
    for _ in range(20):
        demand = {(one, other): float(chance.random()) for one in range(6) for other in range(one + 1, 6)}
        given = allot(demand, ports=4)
        used = [sum(num for pair, num in given.items() if leaf in pair) for leaf in range(6)]
        assert max(used) <= 4
        assert sum(num < 4 for num in used) <= 1, "no two leaves with traffic between them have a port left"


def test_what_sends_nothing_gets_nothing():
    assert allot({(0, 1): 0.0}, ports=2) == {}


def test_switching_pays_where_it_ends_sooner_with_its_cost():
    assert choose(stay_s=2.0, changed_s=1.0, switch_s=0.5, slack_s=0.0).seconds == 1.5
    assert not choose(stay_s=2.0, changed_s=1.0, switch_s=1.2, slack_s=0.0).switches


def test_what_fits_into_the_pause_costs_nothing():
    found = choose(stay_s=2.0, changed_s=1.0, switch_s=1.2, slack_s=0.9)
    assert found.switches
    assert abs(found.seconds - 1.3) < 1e-12
    assert choose(stay_s=2.0, changed_s=1.0, switch_s=1.2, slack_s=5.0).seconds == 1.0


def test_no_gain_is_no_reason():
    assert not choose(stay_s=1.0, changed_s=1.0, switch_s=0.0, slack_s=1.0).switches
