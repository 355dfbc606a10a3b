"""Lays a packed row out for the model: no token computed twice, none computed in vain, and pieces of equal shape side by side.

Samples of a row never see each other, so they may stand in any order; and a causal model computes the same for the same beginning. So:

- Samples of a row that share their prompt share its computation: the prompt becomes one *prefix*, what follows it one *branch* per sample.
  With 8 siblings of as many prompt as completion tokens that is 9/16 of the tokens, at exactly the same gradients.
- A sample ends before its last trained token: nothing is predicted from that one.
- Pieces of equal length (and equal prefix length) stand together as one `Block`, so that attention runs once per block and not once per
  sample: a row may hold hundreds of short samples.

Under context parallelism several ranks share a row: each takes as many tokens, cut from both ends towards the middle, because the later a
token stands in its sample the more it sees. A piece that is cut is two pieces; the second sees the first as it would a prefix.

Legend: `R` tokens of the packed row, `I` tokens the model computes on this rank, `K` tokens with a loss, `J` of them on this rank.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from pipelinerl.data.expert_routes import Table, unknown
from pipelinerl.errors import DataError
from pipelinerl.messages import Int32, Mask
from trainer.rows.packed_row import WHOLE_ROW, Block, ContextShard, PackedRow


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """Tokens `start` .. `end` - 1 of the packed row, seen after those of the spans `before`, which start their sample."""

    start: int
    end: int
    before: tuple[tuple[int, int], ...] = ()

    @property
    def length(self) -> int:
        return self.end - self.start

    @property
    def shape(self) -> tuple[int, int]:
        """(tokens before, tokens): prefixes sort before the branches that need their place."""
        return (sum(end - start for start, end in self.before), self.length)

    def cut(self, length: int) -> tuple[_Piece, _Piece]:
        """The first `length` tokens, and the others after them."""
        middle = self.start + length
        return _Piece(self.start, middle, self.before), _Piece(middle, self.end, (*self.before, (self.start, middle)))


def arrange(
    token_ids: Int32,
    *,
    loss_mask: Mask,
    lengths: Int32,
    names: Sequence[str],
    device: torch.device | str = "cpu",
    context_shard: ContextShard = WHOLE_ROW,
    routes: Table | None = None,
) -> PackedRow | None:
    """Lay out a packed row of samples of these `lengths`, or a part of it; None where no token of the whole row has a loss.

    A shared prompt is computed by the `routes` ([R, layers, k]) of the first sample that has it.

    Raises `DataError` naming the sample whose first token has a loss: nothing stands before it that could predict it.
    """
    trained = np.flatnonzero(loss_mask)
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
    shares = _shares(pieces, num=context_shard.num)
    size = max(sum(piece.length for piece in share) for share in shares)
    place = _places(shares, size=size, num_tokens=len(token_ids))
    columns, positions, blocks = _lay_out(shares[context_shard.index], place=place, size=size)
    owner, where = np.divmod(place[sources], size)
    targets, order = _targets(token_ids[trained], where=where, owner=owner, context_shard=context_shard)

    def on_device(values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(values.astype(np.int64)).to(device, non_blocking=True)

    return PackedRow(
        token_ids=on_device(np.where(columns < 0, 0, token_ids[columns])),
        positions=on_device(positions),
        blocks=tuple(dataclasses.replace(block, prefix=None if block.prefix is None else block.prefix.to(device)) for block in blocks),
        targets=on_device(targets[0]),
        sources=on_device(targets[1]),
        trained=on_device(trained),
        order=None if order is None else on_device(order),
        routes=None if routes is None else torch.from_numpy(_laid_out_routes(routes, columns)).to(device, non_blocking=True),
    )


def empty_row(device: torch.device | str = "cpu", *, context_shard: ContextShard = WHOLE_ROW) -> PackedRow:
    """One token and nothing to learn from it: the pass of a rank that has no row while others, who meet it in the middle, have one."""
    zero, nothing = torch.zeros(1, dtype=torch.int64, device=device), torch.zeros(0, dtype=torch.int64, device=device)
    block = Block(start=0, num=1, length=1, prefix_length=0, prefix=None)
    targets, order = (nothing, None) if context_shard.num == 1 else (zero, nothing)
    return PackedRow(token_ids=zero, positions=zero, blocks=(block,), targets=targets, sources=targets, trained=nothing, order=order)


def _laid_out_routes(routes: Table, columns: np.ndarray) -> np.ndarray:
    """[I, layers, k] int16 of the tokens at `columns` of the row, -1 for padding and where a token's experts are not known."""
    chosen = routes[columns].astype(np.int16)
    chosen[unknown(routes)[columns] | (columns < 0)] = -1
    return chosen


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
        prefix = _Piece(start, int(trained[first]))
        pieces.append(prefix)
        for _, first, end in members:
            sources[first] = prefix.end - 1
            if end > trained[first]:
                pieces.append(_Piece(int(trained[first]), end, ((prefix.start, prefix.end),)))
    return sorted(pieces, key=lambda piece: piece.shape), sources


def _shares(pieces: list[_Piece], *, num: int) -> list[list[_Piece]]:
    """Share pieces out among `num` ranks, about as many tokens to each: of 2 * `num` stretches, the i-th and the i-th last to rank i."""
    if num == 1:
        return [pieces]
    stretch = -(-sum(piece.length for piece in pieces) // (2 * num))
    stretches: list[list[_Piece]] = [[] for _ in range(2 * num)]
    index, room = 0, stretch
    for piece in pieces:
        rest = piece
        while rest.length > room:
            if room:
                head, rest = rest.cut(room)
                stretches[index].append(head)
            index, room = index + 1, stretch
        stretches[index].append(rest)
        room -= rest.length
    return [sorted(stretches[rank] + stretches[-1 - rank], key=lambda piece: piece.shape) for rank in range(num)]


def _places(shares: list[list[_Piece]], *, size: int, num_tokens: int) -> np.ndarray:
    """[R] where each token of the packed row is in the layouts of all ranks, joined, each padded to `size`; -1 for tokens left out."""
    place = np.full(num_tokens, -1)
    for rank, share in enumerate(shares):
        columns = np.concatenate([np.arange(piece.start, piece.end) for piece in share] or [np.zeros(0, np.int64)])
        place[columns] = rank * size + np.arange(len(columns))
    return place


def _lay_out(pieces: list[_Piece], *, place: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, list[Block]]:
    """One rank's layout: ([I] position in the packed row of each token, -1 for padding; [I] position in its sample; blocks)."""
    blocks: list[Block] = []
    start = 0
    for (prefix_length, length), group in itertools.groupby(pieces, key=lambda piece: piece.shape):
        members = list(group)
        prefixes = [place[begin:end] for piece in members for begin, end in piece.before]
        prefix = torch.from_numpy(np.concatenate(prefixes)) if prefixes else None
        blocks.append(Block(start=start, num=len(members), length=length, prefix_length=prefix_length, prefix=prefix))
        start += length * len(members)
    if start < size:
        blocks.append(Block(start=start, num=size - start, length=1, prefix_length=0, prefix=None))
    padding = size - start
    columns = [np.arange(piece.start, piece.end) for piece in pieces] + [np.full(padding, -1)]
    positions = [piece.shape[0] + np.arange(piece.length) for piece in pieces] + [np.zeros(padding, np.int64)]
    return np.concatenate(columns), np.concatenate(positions), blocks


def _targets(
    ids: np.ndarray, *, where: np.ndarray, owner: np.ndarray, context_shard: ContextShard
) -> tuple[tuple[np.ndarray, np.ndarray], np.ndarray | None]:
    """(([J] ids, [J] sources) of this part, padded with zeros to as many on every rank; `PackedRow.order`)."""
    if context_shard.num == 1:
        return (ids, where), None
    counts = np.bincount(owner, minlength=context_shard.num)
    mine, size = owner == context_shard.index, int(counts.max())
    padding = np.zeros(size - counts[context_shard.index], np.int64)
    within = np.zeros(len(ids), np.int64)
    for rank in range(context_shard.num):
        within[owner == rank] = np.arange(counts[rank])
    return (np.concatenate((ids[mine], padding)), np.concatenate((where[mine], padding))), owner * size + within
