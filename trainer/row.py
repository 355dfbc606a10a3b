"""How a packed row is laid out for the model: no token computed twice, none computed in vain, and pieces of equal shape side by side.

Samples of a row never see each other, so they may stand in any order; and a causal model computes the same for the same beginning. So:

- Samples of a row that share their prompt share its computation: the prompt becomes one *trunk*, what follows it one *branch* per sample.
  With 8 siblings of as many prompt as completion tokens that is 9/16 of the tokens, at exactly the same gradients.
- A sample ends before its last trained token: nothing is predicted from that one.
- Pieces of equal length (and equal trunk length) stand together as one `Block`, so that attention runs once per block and not once per
  sample: a row may hold hundreds of short samples.

Legend: `R` tokens of the packed row, `I` tokens the model computes, `K` tokens with a loss.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from pipelinerl.errors import DataError
from pipelinerl.messages import Int32, Mask


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Pieces of one shape, side by side: `num` of them, each of `length` tokens, from position `start` of the layout."""

    start: int
    num: int
    length: int
    trunk_length: int
    """Tokens each piece sees before its own; 0 for a piece that starts a sample."""
    trunk: torch.Tensor | None
    """[num * trunk_length] int64, where those tokens are in the layout; None without a trunk."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A packed row as the model takes it."""

    token_ids: torch.Tensor
    """[I] int64."""
    positions: torch.Tensor
    """[I] int64, position of each token within its own sample."""
    blocks: tuple[Block, ...]
    targets: torch.Tensor
    """[K] int64, ids of the tokens with a loss, in the order of the packed row."""
    sources: torch.Tensor
    """[K] int64, position in the layout of the token before each target: the target's log-probability is computed from its output."""
    trained: torch.Tensor
    """[K] int64, position of each target in the packed row, to pick its other columns."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens `start` .. `end` - 1 of the packed row, seen after those of `trunk`."""

    start: int
    end: int
    trunk: _Piece | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """(length of the trunk, length): trunks sort before the branches that need their place."""
        return (0 if self.trunk is None else self.trunk.end - self.trunk.start, self.end - self.start)


def arrange(token_ids: Int32, *, trains: Mask, lengths: Int32, names: Sequence[str], device: torch.device | str = "cpu") -> Row | None:
    """Lay out a packed row of samples of these `lengths`; None where no token has a loss.

    Raises `DataError` naming the sample whose first token has a loss: nothing stands before it that could predict it.
    """
    trained = np.flatnonzero(trains)
    if not len(trained):
        return None
    ends = np.cumsum(lengths, dtype=np.int64)
    starts = ends - lengths
    sample_of = np.searchsorted(ends, trained, side="right")
    first = trained == starts[sample_of]
    if first.any():
        raise DataError(
            f"{names[int(sample_of[first.argmax()])]}: its first token has a loss, but no token stands before it to predict it from"
        )
    pieces, sources = _cut(token_ids, starts=starts[sample_of], trained=trained)
    columns, place, blocks = _lay_out(pieces, num_tokens=len(token_ids))

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device, non_blocking=True)

    return Row(
        token_ids=on_device(token_ids[columns]),
        positions=on_device(np.concatenate([piece.shape[0] + np.arange(piece.shape[1]) for piece in pieces])),
        blocks=tuple(dataclasses.replace(block, trunk=None if block.trunk is None else block.trunk.to(device)) for block in blocks),
        targets=on_device(token_ids[trained]),
        sources=on_device(place[sources]),
        trained=on_device(trained),
    )


def empty_row(device: torch.device | str = "cpu") -> Row:
    """One token and nothing to learn from it: the pass of a rank that has no row while others, who meet it in the middle, have one."""
    zero, nothing = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    block = Block(start=0, num=1, length=1, trunk_length=0, trunk=None)
    return Row(token_ids=zero, positions=zero, blocks=(block,), targets=nothing, sources=nothing, trained=nothing)


def _cut(token_ids: Int32, *, starts: np.ndarray, trained: np.ndarray) -> tuple[list[_Piece], np.ndarray]:
    """Cut what has to be computed into pieces, in the order of their shapes, and say which token of the row predicts each trained one.

    `starts` ([K]) is where the sample of each trained token starts.
    """
    sources = trained - 1
    firsts = np.flatnonzero(np.diff(starts, prepend=-1))
    lasts = np.append(firsts[1:], len(starts)) - 1
    alike: dict[bytes, list[tuple[int, int, int]]] = {}
    for first, last in zip(firsts.tolist(), lasts.tolist(), strict=True):
        start = int(starts[first])
        alike.setdefault(token_ids[start : trained[first]].tobytes(), []).append((start, first, int(trained[last])))
    pieces: list[_Piece] = []
    for members in alike.values():
        start, first, end = members[0]
        if len(members) == 1:
            pieces.append(_Piece(start, end))
            continue
        trunk = _Piece(start, int(trained[first]))
        pieces.append(trunk)
        for _, first, end in members:
            sources[first] = trunk.end - 1
            if end > trained[first]:
                pieces.append(_Piece(int(trained[first]), end, trunk))
    return sorted(pieces, key=lambda piece: piece.shape), sources


def _lay_out(pieces: list[_Piece], *, num_tokens: int) -> tuple[np.ndarray, np.ndarray, list[Block]]:
    """Return ([I] position in the row of each token laid out, [R] the inverse with -1 for tokens left out, blocks)."""
    columns = np.concatenate([np.arange(piece.start, piece.end) for piece in pieces])
    place = np.full(num_tokens, -1)
    place[columns] = np.arange(len(columns))
    blocks: list[Block] = []
    start = 0
    for (trunk_length, length), group in itertools.groupby(pieces, key=lambda piece: piece.shape):
        members = list(group)
        trunks = [place[piece.trunk.start : piece.trunk.end] for piece in members if piece.trunk is not None]
        trunk = torch.from_numpy(np.concatenate(trunks)) if trunks else None
        blocks.append(Block(start=start, num=len(members), length=length, trunk_length=trunk_length, trunk=trunk))
        start += length * len(members)
    return columns, place, blocks
