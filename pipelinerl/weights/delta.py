"""A delta between two policies: positions and new values of the elements whose bits differ, compared and applied in place.

Elements are counted over a whole layout, tensor after tensor, apart by their size in bytes (`Space`): a position is one number, however
many tensors there are. Values are absolute, never differences: laying the same changes over a policy twice, or over one that holds part of
them already, leaves the same bits, and no addition is there to round.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.messages import Tensor
from pipelinerl.weights.base import itemsize_of

Positions = npt.NDArray[np.int64]
"""Ascending element numbers."""
BLOCK_ELEMENTS = 1 << 18
"""Elements compared at a time. What is compared should still be in the cache when its changes are looked for; fewer cost calls."""

_UNSIGNED: Mapping[int, type[np.unsignedinteger[Any]]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """Elements and their new bits, by element size in bytes."""

    positions: dict[int, Positions]
    values: dict[int, npt.NDArray[np.unsignedinteger[Any]]]
    """Unsigned integers of the element's size: its bits."""

    @property
    def count(self) -> int:
        return sum(len(positions) for positions in self.positions.values())


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """One tensor's elements."""

    tensor: Tensor
    itemsize: int
    first: int
    """Number of its first element among those of its size."""
    count: int

    def bits(self, buffer: torch.Tensor) -> npt.NDArray[np.unsignedinteger[Any]]:
        start = self.tensor.offset_bytes
        return buffer[start : start + self.tensor.num_bytes].numpy().view(_UNSIGNED[self.itemsize])


class Space:
    """The elements of a layout."""

    def __init__(self, layout: Iterable[Tensor]) -> None:
        self.num_elements: dict[int, int] = {}
        """By element size in bytes."""
        self._parts: list[_Part] = []
        for tensor in layout:
            size = itemsize_of(tensor)
            count = tensor.num_bytes // size
            first = self.num_elements.get(size, 0)
            self._parts.append(_Part(tensor, size, first, count))
            self.num_elements[size] = first + count

    def compare(self, old: torch.Tensor, new: torch.Tensor) -> dict[int, Positions]:
        """Find the positions at which two policies ([bytes] uint8) differ in their bits."""
        found: dict[int, list[Positions]] = {size: [] for size in self.num_elements}
        for part in self._parts:
            before, after = part.bits(old), part.bits(new)
            for start in range(0, part.count, BLOCK_ELEMENTS):
                block = slice(start, start + BLOCK_ELEMENTS)
                changed = np.flatnonzero(before[block] != after[block])
                if len(changed):
                    found[part.itemsize].append(changed + (part.first + start))
        return {size: np.concatenate(parts) if parts else np.zeros(0, np.int64) for size, parts in found.items()}

    def take(self, buffer: torch.Tensor, positions: dict[int, Positions]) -> Delta:
        """Take a policy's present bits at these positions."""
        values = {size: [np.zeros(0, _UNSIGNED[size])] for size in positions}
        for part, chosen in self._split(positions):
            values[part.itemsize].append(part.bits(buffer)[positions[part.itemsize][chosen] - part.first])
        return Delta(positions=positions, values={size: np.concatenate(parts) for size, parts in values.items()})

    def lay_over(self, buffer: torch.Tensor, changes: Delta) -> None:
        """Write changes into a policy."""
        for part, chosen in self._split(changes.positions):
            indices = changes.positions[part.itemsize][chosen] - part.first
            part.bits(buffer)[indices] = changes.values[part.itemsize][chosen]

    def by_tensor(self, changes: Delta) -> dict[str, tuple[Positions, npt.NDArray[np.unsignedinteger[Any]]]]:
        """Sort a delta by tensor name, with positions counted within each tensor; untouched tensors are left out."""
        return {
            part.tensor.name: (changes.positions[part.itemsize][chosen] - part.first, changes.values[part.itemsize][chosen])
            for part, chosen in self._split(changes.positions)
        }

    def words_of(self, positions: dict[int, Positions]) -> dict[str, torch.Tensor]:
        """The words of 8 bytes, counted within each tensor ([n] int64, ascending), in which these positions lie, by tensor name."""
        found = {}
        for part, chosen in self._split(positions):
            words = (positions[part.itemsize][chosen] - part.first) * part.itemsize // 8
            found[part.tensor.name] = torch.from_numpy(words[np.diff(words, prepend=-1) > 0])
        return found

    def check(self, changes: Delta) -> None:
        """Raise `WeightsError` for positions that are not this layout's, or not ascending: they came off the wire."""
        for size, positions in changes.positions.items():
            limit = self.num_elements.get(size, 0)
            if len(positions) and not (positions[0] >= 0 and positions[-1] < limit and (np.diff(positions) > 0).all()):
                raise WeightsError(
                    f"changes of {size}-byte elements reach from {positions[0]} to {positions[-1]} and must ascend below {limit}: they"
                    " belong to another layout; not taken"
                )

    def _split(self, positions: dict[int, Positions]) -> Iterator[tuple[_Part, slice]]:
        """Each tensor that has changes, and which of them are its own."""
        for size, all_of_size in positions.items():
            parts = [part for part in self._parts if part.itemsize == size]
            bounds = np.searchsorted(all_of_size, [part.first for part in parts] + [self.num_elements.get(size, 0)])
            for part, start, end in zip(parts, bounds[:-1].tolist(), bounds[1:].tolist(), strict=True):
                if end > start:
                    yield part, slice(start, end)


def union(sets: Iterable[dict[int, Positions]]) -> dict[int, Positions]:
    """Every position in any of them."""
    merged: dict[int, Positions] = {}
    for positions in sets:
        for size, found in positions.items():
            merged[size] = np.union1d(merged[size], found) if size in merged else found
    return merged
