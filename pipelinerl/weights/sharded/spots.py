"""Where the pieces of a policy lie in an engine rank's shard."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.weights.base import itemsize_of
from pipelinerl.weights.reshard import Part
from pipelinerl.weights.sharded.digests import seed_of
from pipelinerl.weights.sharded.plan import Piece

Bytes = np.ndarray[Any, np.dtype[np.uint8]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Spot:
    """The place of a piece in an engine rank's shard."""

    piece: Piece
    seed: int
    """Of its digest."""
    first_byte: int
    """Of its first element, within the shard."""
    end_byte: int
    """One past its last element."""
    num_bytes: int
    shape: tuple[int, ...]
    """Of its bytes, in as few dimensions as they have there: runs of the last one, which lie together."""
    strides: tuple[int, ...]
    """Bytes from one to the next in every dimension."""

    @property
    def is_contiguous(self) -> bool:
        return len(self.shape) == 1

    def within(self, shard: Bytes) -> Bytes:
        """Its bytes, in a shard; nothing is copied."""
        return np.ndarray(self.shape, np.uint8, shard, self.first_byte, self.strides)


def spot_of(piece: Piece, parts: Mapping[str, Sequence[Part]]) -> Spot:
    """Find a piece's place. Raises `WeightsError` where it lies in none of this rank's parts."""
    for part in parts.get(piece.name, ()):
        if len(part.box) == len(piece.box) and all(
            first <= start < end <= last for (start, end), (first, last) in zip(piece.box, part.box, strict=True)
        ):
            within = [(start - first, end - first) for (start, end), (first, _) in zip(piece.box, part.box, strict=True)]
            runs = [(size := itemsize_of(part.tensor), 1)]
            for number in reversed(range(len(within))):
                count, stride = within[number][1] - within[number][0], size * math.prod(part.tensor.shape[number + 1 :])
                if stride == runs[0][0] * runs[0][1]:
                    runs[0] = count * runs[0][0], runs[0][1]
                else:
                    runs.insert(0, (count, stride))
            offset = sum(start * size * math.prod(part.tensor.shape[number + 1 :]) for number, (start, _) in enumerate(within))
            first_byte = part.tensor.offset_bytes + offset
            return Spot(
                piece=piece,
                seed=seed_of(piece),
                first_byte=first_byte,
                end_byte=first_byte + sum((count - 1) * stride for count, stride in runs) + 1,
                num_bytes=math.prod(count for count, _ in runs),
                shape=tuple(count for count, _ in runs),
                strides=tuple(stride for _, stride in runs),
            )
    raise WeightsError(f"the piece {piece.box} of {piece.name} lies in no part that this engine rank holds")


def packed(spots: Sequence[Spot], shard: torch.Tensor) -> torch.Tensor:
    """The bucket ([bytes] uint8) of these pieces as the trainer sends it, from a shard ([bytes] uint8) that has them."""
    bucket = torch.zeros(max(spot.piece.first_byte + spot.num_bytes for spot in spots), dtype=torch.uint8)
    held, written = shard.numpy(), bucket.numpy()
    for spot in spots:
        first = spot.piece.first_byte
        written[first : first + spot.num_bytes].reshape(spot.shape)[...] = spot.within(held)
    return bucket
