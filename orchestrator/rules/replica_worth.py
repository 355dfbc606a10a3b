"""ReplicaWorth remembers what a replica of the trainer did where there were more of them, or fewer: their sums of gradients, and what each
does once a step, do not become less with their number.

A window right after a change of the replicas is held against the one right before it, by the tokens of rows that a replica trains per
second while it works. Where more replicas leave each less than `LEAST` of what it did, that part is remembered; where they leave it more,
all of it is taken to be left. Nothing is said of another load: windows whose contexts are further apart than a jump (`rules.drift`).
"""

from __future__ import annotations

from orchestrator.rules.drift import SHIFT

LEAST = 0.8
"""Part of its speed that a replica keeps beside more of them, from which on they are taken for proportional. A larger value takes noise of
a window for their hindering each other; a smaller one lets a change stay that made a run slower."""


class ReplicaWorth:
    """Of one run, by the units that train beside the core."""

    def __init__(self) -> None:
        self.worth: dict[int, float] = {}
        """Speed of a replica beside so many units, over that beside the first number that was seen."""
        self.context = 0.0
        """Mean tokens of a sequence when that was seen."""
        self._last: tuple[int, float, float] | None = None
        """Units, tokens of rows per second and context of the window before."""

    def note(self, units: int, row_rate: float, *, context: float) -> None:
        """Take a window that has ended: the tokens of rows per second of a replica beside so many units; 0 where nobody says."""
        last, self._last = self._last, (units, row_rate, context)
        if last is None or last[0] == units or not (row_rate and last[1]) or not _is_alike(context, last[2]):
            return
        if not _is_alike(context, self.context):
            self.worth, self.context = {}, context
        before, rate_before, _ = last
        part = row_rate / rate_before if units > before else rate_before / row_rate
        part = part if part < LEAST else 1.0
        known = self.worth.setdefault(before, 1.0)
        self.worth[units] = known * part if units > before else known / part

    def over(self, units: int, now: int, *, context: float) -> float:
        """Return the speed of a replica beside so many units over that beside `now`; 1 where nothing is known of this load."""
        if not self.worth or not _is_alike(context, self.context):
            return 1.0
        return self._nearest(units) / self._nearest(now)

    def _nearest(self, units: int) -> float:
        """Of a number that was never seen, the next smaller one's worth, else the smallest one's."""
        return self.worth[max((seen for seen in self.worth if seen <= units), default=min(self.worth))]


def _is_alike(context: float, other: float) -> bool:
    return other > 0 and 1 / SHIFT < context / other < SHIFT
