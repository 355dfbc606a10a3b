"""A peer that keeps breaking the rules is replaced, and banned in the end.

`MAX_VIOLATIONS` violations of one process and it is replaced; `MAX_REPLACED` replacements in an hour and its name is banned, whatever the
next process says. Whether a peer means harm or is broken makes no difference.
"""

from __future__ import annotations

import collections
import enum

MAX_VIOLATIONS = 3
"""Of one process. 1 would replace an engine for one bad kernel; many let a broken one cost as many attempts each time."""
MAX_REPLACED = 3
"""Replacements for violations within `WINDOW_S`. More repeats the same errors; fewer bans an engine for a bad hour of its device."""
WINDOW_S = 3600.0
"""Replacements older than this are forgotten."""


class Penalty(enum.Enum):
    """What to do with a peer that has committed one more violation."""

    REFUSE = enum.auto()
    """Refuse what it said, and nothing else."""
    REPLACE = enum.auto()
    """Have another process take its place; until then it gets no work."""
    BAN = enum.auto()
    """Listen to none of that name any more."""


class Penalties:
    """Counts the violations of every peer."""

    def __init__(self, *, can_replace: bool, max_processes: int | None = None) -> None:
        """Where nobody can replace a process, a peer is banned at once in its place. More than `max_processes` processes of one name within
        `WINDOW_S` nobody has started: whoever says so commits a violation; None: any number."""
        self._can_replace = can_replace
        self._max_processes = max_processes
        self._began_at: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)
        """When processes of each name began."""
        self._num_violations: collections.Counter[str] = collections.Counter()
        """Of the present process of each."""
        self._replaced_at: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)
        self._condemned: set[str] = set()
        """Peers that are being replaced, or are banned: what they say meanwhile changes nothing."""

    def violated(self, peer: str, *, now_s: float, is_hopeless: bool = False) -> Penalty:
        """A peer has said what cannot be; `is_hopeless`: nothing else its process may say is of any use."""
        if peer in self._condemned:
            return Penalty.REFUSE
        self._num_violations[peer] += MAX_VIOLATIONS if is_hopeless else 1
        if self._num_violations[peer] < MAX_VIOLATIONS:
            return Penalty.REFUSE
        self._condemned.add(peer)
        replaced_at = _recent(self._replaced_at[peer], now_s=now_s)
        if len(replaced_at) >= MAX_REPLACED or not self._can_replace:
            return Penalty.BAN
        replaced_at.append(now_s)
        return Penalty.REPLACE

    def failed(self, peer: str, *, now_s: float) -> bool:
        """Whether a peer is to be replaced because it says that it has failed: as often as for violations, whoever says so with its key."""
        replaced_at = _recent(self._replaced_at[peer], now_s=now_s)
        if len(replaced_at) >= MAX_REPLACED or not self._can_replace:
            return False
        replaced_at.append(now_s)
        return True

    def began_anew(self, peer: str, *, now_s: float) -> Penalty:
        """Another process has taken a peer's name: what the one before said is not held against it, unless there are too many of them."""
        began_at = _recent(self._began_at[peer], now_s=now_s)
        began_at.append(now_s)
        if self._max_processes is not None and len(began_at) > self._max_processes:
            return Penalty.BAN
        self._condemned.discard(peer)
        del self._num_violations[peer]
        return Penalty.REFUSE


def _recent(instants: collections.deque[float], *, now_s: float) -> collections.deque[float]:
    while instants and now_s - instants[0] > WINDOW_S:
        instants.popleft()
    return instants
