"""Digests of a policy that no rank holds whole: each piece's own, added up over pieces and ranks.

A piece's digest is xxh3-128 of its bytes, seeded with its name and box, so that equal bytes at two places differ. A tensor's is the sum of
its pieces', modulo 2**128: each rank adds up what it holds, the ranks' sums are added, and the result is the same whoever holds what. Both
ends cut tensors into the same pieces (`plan`), so the trainer's sums and an engine's agree only where every byte lies in its place.
"""

from __future__ import annotations

import collections
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import xxhash

from pipelinerl.messages import Tensor
from pipelinerl.weights.manifest import DigestKind, Manifest, Proof
from pipelinerl.weights.sharded.plan import Piece

NUM_BYTES = 16
"""Of one digest."""
_MODULUS = 1 << 128

Sums = Mapping[str, int]
"""By tensor: the sum of the digests of pieces."""


def seed_of(piece: Piece) -> int:
    """What makes a piece's digest that of its place, too; the same for every policy."""
    return xxhash.xxh3_64_intdigest(f"{piece.name} {piece.box}".encode())


def digest_of(data: np.ndarray[Any, Any], *, seed: int) -> bytes:
    """The digest of a piece's bytes, contiguous in the host's memory: [NUM_BYTES]. Other threads run on meanwhile."""
    return xxhash.xxh3_128_digest(data.data, seed=seed)


def add_up(digests: Iterable[tuple[Piece, bytes]]) -> dict[str, int]:
    """Add up the digests of the pieces that count, by tensor."""
    sums: collections.defaultdict[str, int] = collections.defaultdict(int)
    for piece, digest in digests:
        if piece.is_counted:
            sums[piece.name] += int.from_bytes(digest)
    return {name: digest % _MODULUS for name, digest in sums.items()}


def add_ranks(ranks: Iterable[Sums]) -> dict[str, int]:
    """Add up what every rank found."""
    sums: collections.defaultdict[str, int] = collections.defaultdict(int)
    for found in ranks:
        for name, digest in found.items():
            sums[name] = (sums[name] + digest) % _MODULUS
    return dict(sums)


def texts(sums: Sums, layout: Iterable[Tensor]) -> list[str]:
    """The digest of each tensor of a layout, 32 hexadecimal digits; that of a tensor without elements is zero."""
    return [f"{sums.get(tensor.name, 0):032x}" for tensor in layout]


def manifest_of(version: int, sums: Sums, layout: tuple[Tensor, ...]) -> Manifest:
    """Describe a whole policy by the sums of all the trainer's ranks."""
    proofs = tuple(Proof(tensor=tensor, digest=digest) for tensor, digest in zip(layout, texts(sums, layout), strict=True))
    return Manifest(version=version, proofs=proofs, num_bytes=sum(tensor.num_bytes for tensor in layout), digest_kind=DigestKind.PIECES)
