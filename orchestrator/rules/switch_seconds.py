"""SwitchSeconds says what a change of roles costs in this run: a guess until one has happened, then the mean of those that have."""

from __future__ import annotations

FIRST_S = 60.0
"""Seconds of a change that are assumed where nothing of this run was measured, as where an orchestrator finds everybody at work already.
The simulator's examples assume as much."""


class SwitchSeconds:
    """The changes of one run that were carried out."""

    def __init__(self) -> None:
        self._first_s = FIRST_S
        self._switches: list[tuple[float, float]] = []
        self._began_s = self._away_s = 0.0
        self._away_since_s: float | None = None

    def started(self, start_s: float) -> None:
        """Note that engines and trainer have taken so long to load at the run's start, as they will again in a change."""
        self._first_s = start_s

    def began(self, now_s: float) -> None:
        """Note that a change begins."""
        self._began_s, self._away_s, self._away_since_s = now_s, 0.0, None

    def trainer_is(self, *, is_away: bool, now_s: float) -> None:
        """Note whether a trainer is there meanwhile."""
        if is_away and self._away_since_s is None:
            self._away_since_s = now_s
        elif not is_away and self._away_since_s is not None:
            self._away_s, self._away_since_s = self._away_s + now_s - self._away_since_s, None

    def ended(self, now_s: float) -> None:
        """Note that everybody has taken up their role."""
        self._switches.append((now_s - self._began_s, self._away_s))

    @property
    def switch_s(self) -> float:
        """Seconds from the decision until everybody has taken up their role."""
        return self._mean(0)

    @property
    def away_s(self) -> float:
        """Of these, seconds without a trainer."""
        return self._mean(1)

    def _mean(self, place: int) -> float:
        measured = [one[place] for one in self._switches]
        return sum(measured) / len(measured) if measured else self._first_s
