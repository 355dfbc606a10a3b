"""Shares gives weighted turns without chance: after any n turns each member has had n times its share, give or take one."""

from __future__ import annotations

from collections.abc import Sequence


class Shares:
    """The turns given so far; the next goes to the member furthest behind its share (smooth weighted round robin), ties to the first."""

    def __init__(self, weights: Sequence[float]) -> None:
        self._weights = [weight / sum(weights) for weight in weights]
        self.restart()

    def restart(self) -> None:
        """Begin with the first turn again."""
        self.num_given = 0
        """Turns given so far."""
        self._given = [0] * len(self._weights)

    def give(self) -> int:
        """Give the next turn, and return the index of the member that has it."""
        self.num_given += 1
        owed = [self.num_given * weight - given for weight, given in zip(self._weights, self._given, strict=True)]
        turn = max(range(len(owed)), key=lambda index: (owed[index], -index))
        self._given[turn] += 1
        return turn
