"""Fenced requests are those that nobody waits for any more, and that a peer may still answer late."""

from __future__ import annotations

MAX_REMEMBERED = 1 << 13
"""The number of requests remembered that a peer may still answer, or answer once more, and nobody waits for. It exceeds what is on the way
at once. A late answer to a forgotten request counts as a violation, and three violations have an honest peer replaced.
"""


class FencedRequests:
    """The newest requests to a peer that nobody waits for any more: each was given up, or answered already."""

    def __init__(self) -> None:
        self._keys: dict[tuple[object, ...], None] = {}

    def add(self, *keys: tuple[object, ...]) -> None:
        """Remember the keys of a request, in place of the oldest ones."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > MAX_REMEMBERED:
            del self._keys[next(iter(self._keys))]

    def __contains__(self, key: tuple[object, ...]) -> bool:
        return key in self._keys
