"""What changed of a policy that no rank holds whole: each trainer rank finds it in its own buckets, and engine ranks lay it over theirs.

A bucket travels as changes where these are less, and to an engine rank that holds the version since which they are, or a later one
(`delta_base`). Laid over what the rank has, they are the whole bucket, of which every piece must have its digest: the proof of changes is
that of whole policies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from pipelinerl.messages import Tensor
from pipelinerl.weights.codec import decode, encode
from pipelinerl.weights.delta import Space
from pipelinerl.weights.delta_base import DeltaBase
from pipelinerl.weights.sharded.plan import Piece, SourcePlan, num_bytes_of
from pipelinerl.weights.sharded.spots import Spot, packed


class Changes:
    """A trainer rank's memory of what it sent: a copy of its buckets, and the positions that each version changed."""

    def __init__(self, plan: SourcePlan, tensors: Mapping[str, Tensor]) -> None:
        self._buckets = {bucket.first_byte: bucket for buckets in plan.buckets for bucket in buckets}
        self._tensors = tensors
        self.forget()

    def forget(self) -> None:
        """Begin anew: the next policy goes whole to everybody."""
        self._bases = {first: DeltaBase(_placed(bucket.pieces, self._tensors.__getitem__)) for first, bucket in self._buckets.items()}

    def since(self, held: int | None, *, version: int, memory: torch.Tensor) -> dict[int, bytes]:
        """Note policy `version` in the weight buffer ([bytes] uint8); what changed since `held`, encoded, by a bucket's first byte.

        Buckets that take as many bytes whole are left out. `held` is the oldest version that any engine holds; None where one needs all.
        """
        found = {}
        for first, bucket in self._buckets.items():
            base = self._bases[first]
            base.move(held)
            changes = base.delta_of(version, memory[first : first + bucket.num_bytes])
            if changes is not None and len(encoded := encode(changes)) < bucket.num_bytes:
                found[first] = encoded
        return found


class Bases:
    """What an engine rank lays changes over: what its shard holds of each bucket."""

    def __init__(self, tensor_of: Callable[[str], Tensor]) -> None:
        """`tensor_of` a name says the dtype."""
        self._tensor_of = tensor_of
        self._spaces: dict[tuple[Spot, ...], Space] = {}

    def with_changes(self, encoded: torch.Tensor, spots: tuple[Spot, ...], shard: torch.Tensor) -> torch.Tensor:
        """A bucket of these pieces, whole ([bytes] uint8), by changes ([bytes] uint8, encoded) of what the shard holds.

        Raises `WeightsError` where they are not its own.
        """
        if (space := self._spaces.get(spots)) is None:
            space = self._spaces[spots] = Space(_placed([spot.piece for spot in spots], self._tensor_of))
        changes = decode(encoded.numpy().data, most=space.num_elements)
        space.check(changes)
        bucket = packed(spots, shard)
        space.lay_over(bucket, changes)
        return bucket


def _placed(pieces: Sequence[Piece], tensor_of: Callable[[str], Tensor]) -> tuple[Tensor, ...]:
    """Pieces as tensors of their own, where they lie in their bucket."""
    return tuple(
        Tensor(
            name=piece.name,
            shape=tuple(end - first for first, end in piece.box),
            dtype=(tensor := tensor_of(piece.name)).dtype,
            offset_bytes=piece.first_byte,
            num_bytes=num_bytes_of(piece, tensor),
        )
        for piece in pieces
    )
