"""Room for what is under way: given out from one stretch of memory, and given back in the same order."""

from __future__ import annotations

import collections

import torch

ALIGNMENT_BYTES = 64


class Ring:
    """`num_bytes` of memory, in parts of any size that each lie in one run."""

    def __init__(self, num_bytes: int) -> None:
        self.memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._given: collections.deque[tuple[int, int]] = collections.deque()
        """First byte of each part, and one past its last, the oldest first."""

    def take(self, num_bytes: int) -> torch.Tensor | None:
        """A part of so many bytes ([bytes] uint8); None: there is no room until others are given back."""
        oldest, newest = (self._given[0][0], self._given[-1][1]) if self._given else (len(self.memory), 0)
        first = -(-newest // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        if newest > oldest and first + num_bytes > len(self.memory):
            first, newest = 0, 0  # past the end: on from the beginning
        if first + num_bytes > (oldest if newest <= oldest else len(self.memory)):
            return None
        self._given.append((first, first + num_bytes))
        return self.memory[first : first + num_bytes]

    def give_back(self) -> None:
        """Give back the oldest part."""
        self._given.popleft()

    def clear(self) -> None:
        """Give back everything."""
        self._given.clear()
