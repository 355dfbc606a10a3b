"""What a network makes of a run: seconds of each phase's traffic on a static fabric and on one that reconfigures, and what either costs.

A step of an asynchronous run has, on trainer and engines that have half of the nodes each:

    gradients   an all-reduce over the trainer's replicas, one ring for each place in a node (tensor parallel within nodes)
    experts     an all-to-all within groups of nodes, each layer forward and backward; none for a dense model
    weights     the policy, from the trainer's nodes to the engines', each passing on what it receives

Trajectories are thousands of times smaller (13 bytes a token) and travel beside these; they are counted with the weights.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from orchestrator.rules.circuits import Pair, allot, choose
from orchestrator.simulate.network import Cluster, Flow, Network, all_reduce, all_to_all, chain, demand_of, rings


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """What a step sends."""

    policy_bytes: float
    gradient_bytes: float
    expert_bytes: float = 0.0
    """Sent by each GPU of the trainer in one step, to all GPUs of its group of `expert_nodes`."""
    expert_nodes: int = 4
    trajectory_bytes: float = 0.0
    """Of a step, from engines to the trainer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """Flows that begin together, and the pause before them in which circuits may change unseen."""

    name: str
    flows: tuple[Flow, ...]
    slack_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Of a port with its share of a switch, in any unit: only ratios matter. A guess is named as one where figures are shown."""

    gpu: float
    """With its share of the node, the card included."""
    packet_port: float
    transceiver: float
    optical_port: float


@dataclasses.dataclass(slots=True, kw_only=True)
class Fabric:
    """A cluster's network over time."""

    cluster: Cluster
    switch_s: float = 0.025
    """Seconds in which an optical switch changes circuits."""
    circuits: dict[Pair, int] = dataclasses.field(default_factory=dict)
    num_switches: int = 0

    def run(self, phases: Sequence[Phase]) -> dict[str, float]:
        """Return the seconds of each phase, one after another; circuits are changed where `rules.circuits` says so."""
        return {phase.name: self._phase(phase) for phase in phases}

    def _phase(self, phase: Phase) -> float:
        stay_s = Network(self.cluster, self.circuits).transfer_s(phase.flows)
        if not self.cluster.optical_ports or not phase.flows:
            return stay_s
        others = allot(demand_of(self.cluster, phase.flows), ports=self.cluster.optical_ports)
        if others == self.circuits:
            return stay_s
        changed_s = Network(self.cluster, others).transfer_s(phase.flows)
        choice = choose(stay_s=stay_s, changed_s=changed_s, switch_s=self.switch_s, slack_s=phase.slack_s)
        if choice.switches:
            self.circuits, self.num_switches = others, self.num_switches + 1
        return choice.seconds


def phases_of(cluster: Cluster, traffic: Traffic, *, slack_s: float) -> list[Phase]:
    """Return the phases of a step; `slack_s` passes before each of them, in which a part computes."""
    nodes = cluster.num_gpus // cluster.gpus_per_node
    trains, places = nodes // 2, cluster.gpus_per_node
    gradients = [
        flow for ring in rings(trains, first_node=0, gpus_per_node=places) for flow in all_reduce(ring, traffic.gradient_bytes / places)
    ]
    found = [Phase(name="gradients", flows=tuple(gradients), slack_s=slack_s)]
    if traffic.expert_bytes:
        found.append(Phase(name="experts", flows=_experts(cluster, traffic, trains), slack_s=slack_s))
    return [*found, Phase(name="weights", flows=_weights(cluster, traffic, trains), slack_s=slack_s)]


def _experts(cluster: Cluster, traffic: Traffic, trains: int) -> tuple[Flow, ...]:
    """Each rail has an all-to-all of its own: what is for another place goes there within the node."""
    flows: list[Flow] = []
    for first in range(0, trains, traffic.expert_nodes):
        num = min(traffic.expert_nodes, trains - first)
        for ring in rings(num, first_node=first, gpus_per_node=cluster.gpus_per_node):
            flows += all_to_all(ring, traffic.expert_bytes)
    return tuple(flows)


def _weights(cluster: Cluster, traffic: Traffic, trains: int) -> tuple[Flow, ...]:
    """Engines' nodes are dealt to the trainer's; each GPU sends its part of the policy to the first, which passes it on."""
    nodes = cluster.num_gpus // cluster.gpus_per_node
    part = traffic.policy_bytes / cluster.gpus_per_node
    back = traffic.trajectory_bytes / max(1, nodes - trains) / cluster.gpus_per_node
    flows: list[Flow] = []
    for source in range(trains):
        engines = range(trains + source, nodes, trains)
        for place in range(cluster.gpus_per_node):
            at = functools.partial(cluster.gpu_at, place=place)
            flows += chain([at(source), *map(at, engines)], part)
            flows += [Flow(source=at(node), target=at(source), num_bytes=back) for node in engines if back]
    return tuple(flows)


def cost_of(cluster: Cluster, prices: Prices) -> float:
    """Return what the network costs, without GPUs: a card's port on its leaf, and for each port to the spine one there, with two
    transceivers; an optical port needs one transceiver, the leaf's own, and a port of the leaf.
    """
    leaves = cluster.num_leaves
    cards = cluster.num_gpus * prices.packet_port
    spine = leaves * cluster.spine_ports * 2 * (prices.packet_port + prices.transceiver)
    optical = leaves * cluster.optical_ports * (prices.packet_port + prices.transceiver + prices.optical_port)
    return cards + spine + optical
