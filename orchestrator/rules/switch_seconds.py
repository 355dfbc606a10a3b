"""SwitchSeconds says what a change of roles costs in this run: a guess until one has happened, then the mean of those that have."""

from __future__ import annotations

FIRST_S = 60.0
"""Seconds of a change that are assumed where nothing of this run was measured, as where the orchestrator that has seen it begin is gone.
The simulator's examples assume as much."""


class SwitchSeconds:
    """The changes of one run that were carried out."""

    def __init__(
        self, *, first_s: float | None = None, num: int = 0, switches_s: float = 0.0, num_of_trainer: int = 0, away_s: float = 0.0
    ) -> None:
        """`first_s` are the seconds of the run's start, None where nobody has seen it; the rest is of changes that are over."""
        self.first_s = first_s
        self.num, self.switches_s = num, switches_s
        """Changes that were carried out, and the seconds of all of them."""
        self.num_of_trainer, self.all_away_s = num_of_trainer, away_s
        """Those of them that gave the trainer other ranks, and the seconds of these without one."""
        self._began_s: float | None = None
        self._away_s = 0.0
        self._away_since_s: float | None = None

    def started(self, start_s: float) -> None:
        """Note that engines and trainer have taken so long to load at the run's start, as they will again in a change."""
        self.first_s = start_s

    def began(self, now_s: float) -> None:
        """Note that a change begins."""
        self._began_s, self._away_s, self._away_since_s = now_s, 0.0, None

    def trainer_is(self, *, is_away: bool, now_s: float) -> None:
        """Note whether a trainer is there meanwhile."""
        if is_away and self._away_since_s is None:
            self._away_since_s = now_s
        elif not is_away and self._away_since_s is not None:
            self._away_s, self._away_since_s = self._away_s + now_s - self._away_since_s, None

    def ended(self, now_s: float, *, of_trainer: bool) -> None:
        """Note that everybody has taken up their role, the trainer's replicas among them where it is `of_trainer`. A change whose beginning
        another orchestrator has seen says nothing.
        """
        if self._began_s is not None:
            self.num, self.switches_s = self.num + 1, self.switches_s + now_s - self._began_s
            self.num_of_trainer, self.all_away_s = self.num_of_trainer + of_trainer, self.all_away_s + self._away_s
        self._began_s = None

    @property
    def switch_s(self) -> float:
        """Seconds from the decision until everybody has taken up their role."""
        first_s = FIRST_S if self.first_s is None else self.first_s
        return self.switches_s / self.num if self.num else first_s

    @property
    def away_s(self) -> float:
        """Seconds without a trainer in a change that gives it other ranks; until one was seen, as many as any change takes."""
        return self.all_away_s / self.num_of_trainer if self.num_of_trainer else self.switch_s
