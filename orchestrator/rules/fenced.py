"""Late answers: requests that nobody waits for any more, and that a peer may still answer."""

from __future__ import annotations

MAX_REMEMBERED = 1 << 13
"""Requests remembered that a peer may still answer, or answer once more, and nobody waits for. More than are on their way at once; one that
is forgotten makes a violation of a late answer, and three of those have an honest peer replaced."""


class FencedRequests:
    """What a peer was asked and nobody waits for any more: it was given up, or answered already. The newest of them."""

    def __init__(self) -> None:
        self._keys: dict[tuple[object, ...], None] = {}

    def add(self, *keys: tuple[object, ...]) -> None:
        """Remember what names a request, in place of what is oldest."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > MAX_REMEMBERED:
            del self._keys[next(iter(self._keys))]

    def __contains__(self, key: tuple[object, ...]) -> bool:
        return key in self._keys
