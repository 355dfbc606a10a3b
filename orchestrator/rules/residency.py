"""This rule decides which weights engines hold side by side, when others may be brought to them, and which of them go then.

Engines hold so many adapters, or one set of whole weights. A sequence ends under the weights it began with, with one exception: what is
sampled from a model *as it goes* (in flight) goes on under whole weights that the same model has published since. So nothing may take a
place while sequences need it, and nobody waits for ever for a place: while somebody waits for one, no further sequence begins.
"""

from __future__ import annotations

import collections
import dataclasses
from typing import Generic, TypeVar

W = TypeVar("W")
"""What names weights, and is equal for equal ones."""


@dataclasses.dataclass(slots=True, eq=False)
class Use(Generic[W]):
    """Sequences that are sampled under a version."""

    version: int
    weights: W


class Residency(Generic[W]):
    """The versions that all engines hold, oldest first."""

    def __init__(self, first: W, *, num_places: int, is_in_place: bool) -> None:
        """Engines begin with `first`, as version 0. `is_in_place`: there is one place, and sequences go on under what is put there."""
        self._num_places = num_places
        self._is_in_place = is_in_place
        self._held: collections.OrderedDict[int, W] = collections.OrderedDict({0: first})
        self._uses: set[Use[W]] = set()

    def find(self, weights: W) -> int | None:
        """Return the newest version that these weights are held as; None where they are not."""
        return next((version for version in reversed(self._held) if self._held[version] == weights), None)

    def begin(self, version: int) -> Use[W]:
        """Note that sequences begin under a version that is held; `end` ends it."""
        use = Use(version, self._held[version])
        self._uses.add(use)
        return use

    def end(self, use: Use[W]) -> None:
        """Note that these sequences have ended."""
        self._uses.discard(use)

    def has_room_for(self, weights: W) -> bool:
        """Return whether these weights may be brought to the engines now: no sequence that needs others would lose them."""
        if self._is_in_place:
            return all(use.weights == weights for use in self._uses)
        return len({use.version for use in self._uses}) < self._num_places

    def reserve(self, weights: W) -> None:
        """Give these weights, which there is room for, the place that they are about to take: no sequence begins under what is there now.

        It is the oldest that no sequence needs, as engines choose it. What a model publishes as it goes takes its own place.
        """
        if self._is_in_place:
            self._held = collections.OrderedDict({version: held for version, held in self._held.items() if held == weights})
        elif len(self._held) >= self._num_places:
            needed = {use.version for use in self._uses}
            del self._held[next(old for old in self._held if old not in needed)]

    def published(self, version: int, weights: W) -> None:
        """Note that all engines hold these weights as this version, in the place that was reserved."""
        if self._is_in_place:
            for use in self._uses:
                use.version = version
            self._held.clear()
        self._held[version] = weights

    def lost(self, version: int | None = None) -> None:
        """Note that an engine does not hold a version, or, of None, any but what it began with, which is of no use to others."""
        if version is None:
            self._held.clear()
        else:
            self._held.pop(version, None)
