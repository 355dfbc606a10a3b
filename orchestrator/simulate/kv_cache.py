"""The KV cache of a simulated engine, in tokens.

Every sequence that writes grows by a token in each pass. What all hold at pass p is therefore `held + growing * p`, where a sequence that
begins to write at pass q takes q off `held`: nothing has to be counted from pass to pass.
"""

from __future__ import annotations

import collections
import math

from orchestrator.simulate.sequence import Sequence


class KvCache:
    """The tokens that sequences hold. Siblings hold their prompt once, where prefixes are cached."""

    def __init__(self, *, num_tokens: float, has_prefix_cache: bool, block_tokens: int) -> None:
        self._most, self._has_prefix_cache, self._block = num_tokens, has_prefix_cache, block_tokens
        self._held = 0
        self._growing = 0
        self._siblings: collections.Counter[int] = collections.Counter()
        """Sequences that hold room, by group."""
        self._prefixes: dict[int, int] = {}
        """Version under which a group's prompt was computed."""

    @property
    def is_bounded(self) -> bool:
        return math.isfinite(self._most)

    def whole(self, num_tokens: int) -> int:
        """Return those of the first so many tokens that are in whole blocks: the others are found in no cache."""
        return num_tokens // self._block * self._block

    def used(self, at: int) -> float:
        """Return the tokens held at a pass."""
        return self._held + self._growing * at

    def passes_left(self, at: int) -> int:
        """Return how many passes from `at` on find room."""
        return int((self._most - self.used(at)) // self._growing)

    def overflows(self, at: int) -> bool:
        """Return whether the pass `at` would not find room for the next token of all that write."""
        return self.used(at + 1) > self._most

    def fits(self, sequence: Sequence, at: int) -> bool:
        """Return whether a sequence finds room beside the next tokens of the others."""
        return self.used(at + 1) + self._size(sequence) + 1 <= self._most

    def take(self, sequence: Sequence, *, version: int) -> None:
        """Give a sequence room, and note what it need not compute because a sibling has."""
        self._held += self._size(sequence)
        self._siblings[sequence.group_id] += 1
        sequence.is_held, sequence.kv_version = True, version
        if self._has_prefix_cache and self._prefixes.get(sequence.group_id) == version:
            shared = self.whole(sequence.num_shared - 1)
            sequence.num_pending = max(1, min(sequence.num_pending, sequence.num_tokens - shared))
        self._prefixes[sequence.group_id] = version

    def give(self, sequence: Sequence) -> None:
        """Take back the room of a sequence that does not write."""
        self._siblings[sequence.group_id] -= 1
        self._held -= self._size(sequence)
        sequence.is_held = False
        if not self._siblings[sequence.group_id]:
            del self._siblings[sequence.group_id]
            del self._prefixes[sequence.group_id]

    def grows(self, at: int) -> None:
        """Note that a sequence begins to write at a pass."""
        self._held -= at
        self._growing += 1

    def stops(self, at: int) -> None:
        """Note that a sequence stops writing at a pass; what it has written stays."""
        self._held += at
        self._growing -= 1

    def _size(self, sequence: Sequence) -> int:
        is_shared = self._has_prefix_cache and self._siblings[sequence.group_id] > 0
        return sequence.num_tokens - (sequence.num_shared if is_shared else 0)
