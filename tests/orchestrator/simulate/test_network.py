"""Links, routes and flows that share them, on numbers worked by hand; and fabrics, static and not."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from orchestrator.simulate.fabric import Fabric, Phase, Prices, Traffic, cost_of, phases_of
from orchestrator.simulate.network import Cluster, Flow, Network, all_reduce, all_to_all, chain, demand_of, max_min, rings

SMALL = Cluster(num_gpus=16, gpus_per_node=2, nvlink=100.0, nic=10.0, has_rails=False, leaf_cards=4, oversubscription=2.0)
"""Eight nodes of two; four cards a leaf, and two cards' worth of ports to the spine."""


def flow(source: int, target: int, num_bytes: float = 100.0) -> Flow:
    return Flow(source=source, target=target, num_bytes=num_bytes)


def test_max_min_by_hand():
    """Links of 10 and 4. The second flow takes both: it and the third have 2 of the 4, the first the other 8 of the 10."""
    assert max_min(np.array([10.0, 4.0]), [(0,), (0, 1), (1,)]).tolist() == [8.0, 2.0, 2.0]


def test_no_rate_of_max_min_can_rise_without_another_lower_one_falling():
    chance = np.random.default_rng(0)
    for _ in range(50):
        rates = chance.uniform(1, 10, 6)
        routes = [tuple(chance.choice(6, chance.integers(1, 4), replace=False).tolist()) for _ in range(9)]
        found = max_min(rates, routes)
        used = np.array([sum(found[number] for number, route in enumerate(routes) if link in route) for link in range(6)])
        assert (used <= rates * (1 + 1e-9)).all()
        for number, route in enumerate(routes):
            full = [link for link in route if used[link] >= rates[link] * (1 - 1e-9)]
            assert any(found[number] >= max(found[n] for n, r in enumerate(routes) if link in r) - 1e-9 for link in full)


def test_within_a_node_nvlink_carries_it_and_between_nodes_a_card():
    network = Network(SMALL)
    assert network.transfer_s([flow(0, 1)]) == 1.0
    assert network.transfer_s([flow(0, 2)]) == 10.0
    assert network.transfer_s([flow(3, 3)]) == 0.0


def test_two_flows_into_one_card_have_half_each_and_the_longer_one_then_all():
    """100 and 300 bytes at 5 each: the first ends after 20 s, then the other has 200 left at 10: 40 s."""
    assert Network(SMALL).ends_s([flow(0, 2), flow(4, 2, 300.0)]).tolist() == [20.0, 40.0]


def test_an_oversubscribed_leaf_is_the_bottleneck_for_what_leaves_it_and_for_nothing_else():
    """Four cards of leaf 0 send to leaf 1 over 4 * 10 / 2 = 20: 5 each. Within the leaf all would have 10."""
    across = [flow(source, source + 4) for source in range(4)]
    assert Network(SMALL).transfer_s(across) == 20.0
    assert Network(SMALL).transfer_s([flow(0, 2), flow(1, 3)]) == 10.0


def test_a_circuit_takes_the_place_of_the_way_over_the_spine():
    across = [flow(source, source + 4) for source in range(4)]
    assert Network(SMALL, {(0, 1): 3}).transfer_s(across) == pytest.approx(100 / (30 / 4))
    assert Network(SMALL, {(0, 2): 3}).transfer_s(across) == 20.0, "it leads elsewhere"


def test_with_rails_what_is_for_another_place_goes_to_its_rail_within_the_node():
    cluster = Cluster(num_gpus=8, gpus_per_node=2, nvlink=100.0, nic=10.0, leaf_cards=4, oversubscription=4.0)
    assert [cluster.leaf_of(gpu) for gpu in range(8)] == [0, 1] * 4
    network = Network(cluster)
    assert len(network.route(0, 3)) == 4, "NVLink out and in, card out and in: no spine"
    assert network.transfer_s([flow(0, 3)]) == 10.0
    assert demand_of(cluster, [flow(0, 3)]) == {}


def test_a_ring_of_n_takes_two_times_n_less_one_over_n():
    flows = all_reduce([0, 2, 4, 6], 100.0)
    assert sum(one.num_bytes for one in flows) == pytest.approx(2 * 3 * 100)
    cluster = Cluster(num_gpus=8, gpus_per_node=2, nic=10.0, leaf_cards=8, has_rails=False)
    assert Network(cluster).transfer_s(flows) == pytest.approx(2 * 3 / 4 * 100 / 10)
    assert all_reduce([0], 100.0) == []


def test_an_all_to_all_sends_each_its_part_and_a_chain_passes_the_whole_on():
    assert all_to_all([0, 2], 100.0) == [flow(0, 2, 50.0), flow(2, 0, 50.0)]
    assert chain([0, 2, 4], 100.0) == [flow(0, 2), flow(2, 4)]
    assert Network(SMALL).transfer_s(chain([0, 2], 100.0)) == 10.0


def test_demand_is_of_pairs_of_leaves_in_the_direction_that_has_more():
    assert demand_of(SMALL, [flow(0, 4), flow(5, 1, 30.0), flow(0, 2)]) == {(0, 1): 100.0}


def test_a_fabric_switches_where_the_pause_hides_it_and_stays_where_it_costs_more_than_it_gains():
    """Over the spine 20 s; with three circuits 400 bytes at 30: 13.3 s. Another phase of the same kind finds them there."""
    across = tuple(flow(source, source + 4) for source in range(4))
    phases = [Phase(name="one", flows=across, slack_s=1.0), Phase(name="two", flows=across)]
    quick = Fabric(cluster=cluster_with(3), switch_s=1.0)
    assert quick.run(phases) == {"one": pytest.approx(40 / 3), "two": pytest.approx(40 / 3)}
    assert quick.num_switches == 1
    slow = Fabric(cluster=cluster_with(3), switch_s=60.0)
    assert slow.run(phases) == {"one": 20.0, "two": 20.0}
    assert slow.num_switches == 0


def cluster_with(optical_ports: int) -> Cluster:
    return Cluster(
        num_gpus=16,
        gpus_per_node=2,
        nvlink=100.0,
        nic=10.0,
        has_rails=False,
        leaf_cards=4,
        oversubscription=2.0,
        optical_ports=optical_ports,
    )


def test_leaves_that_have_nothing_to_tell_each_other_have_no_ports_to_a_spine():
    assert Cluster(num_gpus=256).spine_ports == 0, "eight rails of one pod of 32 nodes"
    assert Cluster(num_gpus=512).spine_ports == 32
    assert Cluster(num_gpus=32, has_rails=False).spine_ports == 0
    assert Cluster(num_gpus=48, has_rails=False, oversubscription=4.0).spine_ports == 6, "24 cards on each of two leaves"


def test_weights_reach_every_engine_once_and_gradients_stay_with_the_trainer():
    cluster = Cluster(num_gpus=48)
    traffic = Traffic(policy_bytes=800.0, gradient_bytes=80.0)
    gradients, weights = phases_of(cluster, traffic, slack_s=0.0)
    assert {one.source // 8 for one in gradients.flows} == {0, 1, 2}
    assert sorted(one.target for one in weights.flows) == list(range(24, 48))
    assert {one.num_bytes for one in weights.flows} == {100.0}


def test_experts_talk_within_their_group_of_nodes():
    cluster = Cluster(num_gpus=128)
    traffic = Traffic(policy_bytes=1.0, gradient_bytes=1.0, expert_bytes=8.0, expert_nodes=4)
    experts = phases_of(cluster, traffic, slack_s=0.0)[1]
    assert {one.source // 32 == one.target // 32 for one in experts.flows} == {True}


def test_costs_by_hand():
    """16 cards; four leaves with two ports to the spine each, at both ends with a transceiver; three optical ports on each leaf."""
    prices = Prices(gpu=0.0, packet_port=10.0, transceiver=3.0, optical_port=2.0)
    assert cost_of(SMALL, prices) == 16 * 10 + 4 * 2 * 2 * 13
    assert cost_of(cluster_with(3), prices) - cost_of(SMALL, prices) == 4 * 3 * 15


@pytest.mark.parametrize("num_gpus", [48, 256])
def test_no_oversubscription_is_never_slower_and_all_bytes_arrive(num_gpus: int):
    traffic = Traffic(policy_bytes=64e9, gradient_bytes=64e9, expert_bytes=1e9, trajectory_bytes=1e8)
    times = []
    for oversubscription in (1.0, 4.0):
        cluster = Cluster(num_gpus=num_gpus, has_rails=False, oversubscription=oversubscription)
        times.append(Fabric(cluster=cluster).run(phases_of(cluster, traffic, slack_s=0.0)))
    assert all(times[0][name] <= times[1][name] * (1 + 1e-9) for name in times[0])


def test_rings_are_of_one_place():
    found = rings(3, first_node=2, gpus_per_node=2)
    assert found == ((4, 6, 8), (5, 7, 9))
    assert len({gpu for ring in found for gpu in ring}) == len(list(itertools.chain(*found)))
