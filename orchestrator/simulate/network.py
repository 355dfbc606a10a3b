"""The network between GPUs: links, routes over them, and flows that share them.

    node     GPUs joined by NVLink, each with a network card of its own
    leaf     a switch to which cards are joined: with rails one for each card's place in the node and for each pod of nodes, without
             rails one for the cards of a few nodes
    spine    joins leaves: `oversubscription` times slower than all cards of a leaf together
    circuit  an optical path between two leaves, in place of their way over the spine (`rules.circuits`)

Flows share links max-min fairly: all rates rise together until a link is full, its flows keep what they have, the others go on rising
(Bertsekas and Gallager, Data Networks, 6.5.2). Congestion control comes near that for transfers that are much longer than a round trip,
as those of weights and gradients are. Every switch spreads its flows evenly over its links, so leaf and spine are one pipe each.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[np.float64]
Pair = tuple[int, int]
"""Two leaves, the lower one first."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Flow:
    """Bytes from one GPU to another, by their numbers in the cluster."""

    source: int
    target: int
    num_bytes: float


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cluster:
    """Nodes, leaves and a spine. Rates are in bytes per second and of one direction."""

    num_gpus: int
    gpus_per_node: int = 8
    nvlink: float = 450e9
    nic: float = 50e9
    has_rails: bool = True
    leaf_cards: int = 32
    """Cards joined to one leaf."""
    oversubscription: float = 1.0
    """Cards of a leaf over its ports to the spine."""
    optical_ports: int = 0
    """Of one leaf, for circuits, each as fast as a card; they come beside those to the spine."""

    @property
    def num_leaves(self) -> int:
        nodes = -(-self.num_gpus // self.gpus_per_node)
        if self.has_rails:
            return -(-nodes // self.leaf_cards) * self.gpus_per_node
        return -(-self.num_gpus // self.leaf_cards)

    def leaf_of(self, gpu: int) -> int:
        """Return the leaf to which a GPU's card is joined."""
        if not self.has_rails:
            return gpu // self.leaf_cards
        node, rail = divmod(gpu, self.gpus_per_node)
        return node // self.leaf_cards * self.gpus_per_node + rail

    @property
    def spine_ports(self) -> float:
        """Ports of one leaf to the spine; none where leaves have nothing to tell each other: one alone, or the rails of one pod."""
        pods = self.num_leaves // self.gpus_per_node if self.has_rails else self.num_leaves
        return 0.0 if pods == 1 else self.num_gpus / self.num_leaves / self.oversubscription

    @property
    def spine_rate(self) -> float:
        """Bytes per second between one leaf and the spine."""
        return self.spine_ports * self.nic

    def gpu_at(self, node: int, place: int) -> int:
        """Return the number of a GPU by its node and its place there."""
        return node * self.gpus_per_node + place


class Network:
    """A cluster with the circuits of one moment."""

    def __init__(self, cluster: Cluster, circuits: Mapping[Pair, int] | None = None) -> None:
        """`circuits` are optical ports given to pairs of leaves."""
        self.cluster = cluster
        self._numbers: dict[tuple[object, ...], int] = {}
        self._rates: list[float] = []
        self._circuits = dict(circuits or {})

    def transfer_s(self, flows: Sequence[Flow]) -> float:
        """Return the seconds until all flows that begin at the same moment have ended."""
        return float(self.ends_s(flows).max(initial=0.0))

    def ends_s(self, flows: Sequence[Flow]) -> Numbers:
        """Return when each flow ends, [F] seconds."""
        routes = [self.route(flow.source, flow.target) for flow in flows]
        left = np.array([flow.num_bytes for flow in flows], np.float64)
        ends, now_s = np.zeros(len(flows)), 0.0
        going = (left > 0) & np.array([bool(route) for route in routes], bool)
        rates_of_links = np.array(self._rates)
        while going.any():
            chosen = np.flatnonzero(going)
            rates = max_min(rates_of_links, [routes[flow] for flow in chosen])
            step_s = float((left[chosen] / rates).min())
            now_s += step_s
            left[chosen] -= step_s * rates
            over = chosen[left[chosen] <= 1e-9 * np.array([flows[flow].num_bytes for flow in chosen])]
            ends[over], going[over] = now_s, False
        return ends

    def route(self, source: int, target: int) -> tuple[int, ...]:
        """Return the links from one GPU to another; none where they are the same.

        With rails, what is for another place goes by NVLink to the GPU of that place first (NCCL's PXN), so that it stays on one rail.
        """
        cluster = self.cluster
        node, place = divmod(source, cluster.gpus_per_node)
        other_node, other_place = divmod(target, cluster.gpus_per_node)
        if source == target:
            return ()
        if node == other_node:
            return self._nvlink(source, target)
        first: tuple[int, ...] = ()
        if cluster.has_rails and place != other_place:
            relay = cluster.gpu_at(node, other_place)
            first, source = self._nvlink(source, relay), relay
        card = (self._link("out", source, rate=cluster.nic), *self._between(cluster.leaf_of(source), cluster.leaf_of(target)))
        return (*first, *card, self._link("in", target, rate=cluster.nic))

    def _nvlink(self, source: int, target: int) -> tuple[int, ...]:
        rate = self.cluster.nvlink
        return self._link("nvlink out", source, rate=rate), self._link("nvlink in", target, rate=rate)

    def _between(self, leaf: int, other: int) -> tuple[int, ...]:
        if leaf == other:
            return ()
        if ports := self._circuits.get((min(leaf, other), max(leaf, other)), 0):
            return (self._link("circuit", leaf, other, rate=ports * self.cluster.nic),)
        rate = self.cluster.spine_rate
        return self._link("up", leaf, rate=rate), self._link("down", other, rate=rate)

    def _link(self, *name: object, rate: float) -> int:
        number = self._numbers.get(name)
        if number is None:
            number = self._numbers[name] = len(self._rates)
            self._rates.append(rate)
        return number


def max_min(rates: Numbers, routes: Sequence[Sequence[int]]) -> Numbers:
    """Return the max-min fair rate of each flow, [F], from the rates of links, [L], and the links of each flow, at least one."""
    flow_of = np.repeat(np.arange(len(routes)), [len(route) for route in routes])
    link_of = np.concatenate([np.asarray(route, np.int64) for route in routes])
    left, found, rises = rates.astype(np.float64), np.zeros(len(routes)), np.ones(len(routes), bool)
    while rises.any():
        is_open = rises[flow_of]
        num = np.bincount(link_of[is_open], minlength=len(rates))
        share = np.where(num > 0, left / np.maximum(num, 1), np.inf)
        least = float(share.min())
        full = share <= least * (1 + 1e-12)
        ends = np.zeros(len(routes), bool)
        ends[flow_of[is_open & full[link_of]]] = True
        found[ends], rises[ends] = least, False
        taken = np.bincount(link_of[ends[flow_of]], minlength=len(rates))
        left = np.maximum(0.0, left - least * taken)
    return found


# --- flows of collectives ---


def all_reduce(ranks: Sequence[int], num_bytes: float) -> list[Flow]:
    """Return the flows of a ring: each rank sends 2 (n - 1) / n of the bytes to the next one."""
    num = len(ranks)
    if num < 2:
        return []
    share = 2 * (num - 1) / num * num_bytes
    return [Flow(source=rank, target=ranks[(place + 1) % num], num_bytes=share) for place, rank in enumerate(ranks)]


def all_to_all(ranks: Sequence[int], num_bytes: float) -> list[Flow]:
    """Return the flows by which each rank sends `num_bytes`, in equal parts to all and itself."""
    return [Flow(source=one, target=other, num_bytes=num_bytes / len(ranks)) for one in ranks for other in ranks if one != other]


def chain(ranks: Sequence[int], num_bytes: float) -> list[Flow]:
    """Return the flows of a broadcast that each rank passes on while it receives it, in parts much smaller than the whole."""
    return [Flow(source=one, target=other, num_bytes=num_bytes) for one, other in itertools.pairwise(ranks)]


def demand_of(cluster: Cluster, flows: Sequence[Flow]) -> dict[Pair, float]:
    """Return the bytes between each pair of leaves, the larger of both directions."""
    directed: dict[Pair, float] = {}
    for flow in flows:
        node, place = divmod(flow.source, cluster.gpus_per_node)
        target_node, target_place = divmod(flow.target, cluster.gpus_per_node)
        source = cluster.gpu_at(node, target_place) if cluster.has_rails and place != target_place else flow.source
        leaves = cluster.leaf_of(source), cluster.leaf_of(flow.target)
        if node != target_node and leaves[0] != leaves[1]:
            directed[leaves] = directed.get(leaves, 0.0) + flow.num_bytes
    both: dict[Pair, float] = {}
    for (one, other), num_bytes in directed.items():
        pair = (min(one, other), max(one, other))
        both[pair] = max(both.get(pair, 0.0), num_bytes)
    return both


@functools.cache
def rings(num_nodes: int, *, first_node: int, gpus_per_node: int) -> tuple[tuple[int, ...], ...]:
    """Return one ring for each place in a node: the GPUs of that place, node by node."""
    nodes = range(first_node, first_node + num_nodes)
    return tuple(tuple(node * gpus_per_node + place for node in nodes) for place in range(gpus_per_node))
