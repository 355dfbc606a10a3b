"""Circuits decides which leaves of a network an optical switch joins, and when it is worth switching.

A circuit switch joins ports in pairs and needs some milliseconds to join others, in which the ports that change carry nothing. Its ports
cost less than a packet switch's and are as fast as cards, but a leaf has few of them: they pay where traffic is between few pairs of leaves
for long, as in collectives, weight sync and the layouts of engines.

Switch where the phase to come is over sooner for it, the part of the switching that does not fit into the pause before it included:

    seconds with the new circuits + max(0, switch_s - slack_s) < seconds with those there are

With slack of at least `switch_s` any gain is worth it, as in OrchestrRL (arXiv 2601.01209); with none, a gain above the cost.
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Mapping

Pair = tuple[int, int]
"""Two leaves, the lower one first."""


def allot(demand: Mapping[Pair, float], *, ports: int) -> dict[Pair, int]:
    """Give each pair of leaves circuits by its bytes; no leaf has more than `ports`.

    The pair whose bytes take longest over the circuits that it has gets the next one, as long as both leaves have a port left. A pair
    without one goes over the spine.
    """
    left = {leaf: ports for pair in demand for leaf in pair}
    given: dict[Pair, int] = {}
    heap = [(-num_bytes, pair) for pair, num_bytes in demand.items() if num_bytes > 0]
    heapq.heapify(heap)
    while heap:
        _, pair = heapq.heappop(heap)
        one, other = pair
        if not left[one] or not left[other]:
            continue
        left[one] -= 1
        left[other] -= 1
        given[pair] = given.get(pair, 0) + 1
        heapq.heappush(heap, (-demand[pair] / (given[pair] + 1), pair))
    return given


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What is done before a phase."""

    switches: bool
    seconds: float
    """Of the phase, with what of the switching does not fit into the pause before it."""


def choose(*, stay_s: float, changed_s: float, switch_s: float, slack_s: float) -> Choice:
    """Choose between the circuits there are and others, for a phase that takes `stay_s` or `changed_s` seconds, after a pause."""
    seconds = changed_s + max(0.0, switch_s - slack_s)
    return Choice(switches=True, seconds=seconds) if seconds < stay_s else Choice(switches=False, seconds=stay_s)
