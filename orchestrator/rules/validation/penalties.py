"""A peer that keeps breaking the rules is replaced, and banned in the end.

After `MAX_VIOLATIONS` violations a process is replaced; after `MAX_REPLACED` replacements in an hour its name is banned, whatever the next
process says. Whether a peer means harm or is broken makes no difference.
"""

from __future__ import annotations

import collections
import enum

MAX_VIOLATIONS = 3
"""Violations of one process until it is replaced. 1 would replace an engine for one bad kernel; a larger value lets a broken one cost as
many attempts each time.
"""
MAX_REPLACED = 3
"""Replacements for violations within `WINDOW_S`. A larger value repeats the same errors; a smaller one bans an engine for a bad hour of its
device.
"""
WINDOW_S = 3600.0
"""Replacements older than this are forgotten."""


class Penalty(enum.Enum):
    """The consequence for a peer that has committed one more violation."""

    REFUSE = enum.auto()
    """Refuse the message, and nothing else."""
    REPLACE = enum.auto()
    """Have another process take its place; until then it gets no work."""
    BAN = enum.auto()
    """Listen to no process of that name any more."""


class Penalties:
    """The violations and replacements of every peer, counted."""

    def __init__(self, *, can_replace: bool, max_processes: int | None = None) -> None:
        """Ban a peer at once where `can_replace` is false and it would be replaced.

        Nobody starts more than `max_processes` processes of one name within `WINDOW_S`, so one more is a violation; None allows any number.
        """
        self._can_replace = can_replace
        self._max_processes = max_processes
        self._began_at: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)
        """The instants at which processes of each name began, in seconds."""
        self._num_violations: collections.Counter[str] = collections.Counter()
        """Violations of the present process of each name."""
        self._replaced_at: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)
        self._rejected: set[str] = set()
        """Peers that are being replaced, or are banned: their messages meanwhile change nothing."""

    def violated(self, peer: str, *, now_s: float, is_hopeless: bool = False) -> Penalty:
        """Count a violation of a peer; `is_hopeless` says that nothing else its process may say is of any use."""
        if peer in self._rejected:
            return Penalty.REFUSE
        self._num_violations[peer] += MAX_VIOLATIONS if is_hopeless else 1
        if self._num_violations[peer] < MAX_VIOLATIONS:
            return Penalty.REFUSE
        self._rejected.add(peer)
        replaced_at = _recent(self._replaced_at[peer], now_s=now_s)
        if len(replaced_at) >= MAX_REPLACED or not self._can_replace:
            return Penalty.BAN
        replaced_at.append(now_s)
        return Penalty.REPLACE

    def failed(self, peer: str, *, now_s: float) -> bool:
        """Return whether to replace a peer that says that it has failed: as often as for violations, since anybody with its key could say
        so.
        """
        replaced_at = _recent(self._replaced_at[peer], now_s=now_s)
        if len(replaced_at) >= MAX_REPLACED or not self._can_replace:
            return False
        replaced_at.append(now_s)
        return True

    def began_anew(self, peer: str, *, now_s: float) -> Penalty:
        """Note that another process has taken a peer's name. Earlier violations do not count against it, unless there are too many
        processes.
        """
        began_at = _recent(self._began_at[peer], now_s=now_s)
        began_at.append(now_s)
        if self._max_processes is not None and len(began_at) > self._max_processes:
            return Penalty.BAN
        self._rejected.discard(peer)
        del self._num_violations[peer]
        return Penalty.REFUSE


def _recent(instants: collections.deque[float], *, now_s: float) -> collections.deque[float]:
    while instants and now_s - instants[0] > WINDOW_S:
        instants.popleft()
    return instants
