"""Lays a packed row out for the model: no token computed twice, none computed in vain, and pieces of equal shape side by side.

Samples of a row never see each other, so they may stand in any order; and a causal model computes the same for the same beginning. So:

- What samples begin with alike is computed once, see `trainer.rows.trie`: it becomes a *prefix* of what follows it. With 8 siblings of as
  many prompt as completion tokens that is 9/16 of the tokens, at exactly the same gradients.
- A sample may be an episode that branches (`Nodes`): its tokens, each once, are then the rows of its branches, which share theirs.
- A row ends before its last trained token: nothing is predicted from that one.
- Pieces of equal length (and equal prefix length) stand together as one `Block`, so that attention runs once per block and not once per
  sample: a row may hold hundreds of short samples.

Under context parallelism several ranks share a row: each takes as many tokens, cut from both ends towards the middle, because the later a
token stands in its sample the more it sees. A piece that is cut is two pieces; the second sees the first as it would a prefix.

Legend: `R` tokens of the packed row, `E` of its samples' rows end to end, `I` tokens the model computes on this rank, `K` tokens with a
loss, `J` of them on this rank.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np
import torch

from pipelinerl.data.expert_routes import Table, unknown
from pipelinerl.errors import DataError
from pipelinerl.messages import Int32, Mask, MicroBatch, Nodes
from trainer.rows.branches import branches, whole_samples
from trainer.rows.images import RowImages
from trainer.rows.packed_row import WHOLE_ROW, Block, ContextShard, PackedRow, Vision
from trainer.rows.parts import parts_of
from trainer.rows.trie import Piece, cut


def arrange(
    token_ids: Int32,
    *,
    loss_mask: Mask,
    lengths: Int32,
    names: Sequence[str],
    device: torch.device | str = "cpu",
    context_shard: ContextShard = WHOLE_ROW,
    routes: Table | None = None,
    nodes: Nodes | None = None,
    images: RowImages | None = None,
) -> PackedRow | None:
    """Lay out a packed row of samples of these `lengths`, or a part of it; None where no token of the whole row has a loss.

    `nodes` are those of all samples, in order, where some of these branch. What was given and is shared is computed by the `routes`
    ([R, layers, k]) of the first sample that has it; sampled tokens are shared only where their routes are equal, too, and placeholders
    only of the same feature of one of the `images`.

    Raises `DataError` naming the sample whose first token has a loss: nothing stands before it that could predict it.
    """
    trained = np.flatnonzero(loss_mask)
    if not len(trained):
        return None
    rows = whole_samples(lengths, loss_mask=loss_mask) if nodes is None else branches(nodes, loss_mask=loss_mask)
    if (first := rows.first_with_loss) is not None:
        sample = int(np.searchsorted(np.cumsum(lengths), first, side="right"))
        raise DataError(f"{names[sample]}: its first token has a loss, but no token stands before it to predict it from")
    codes = _codes(token_ids, loss_mask=loss_mask, routes=routes)
    if images is not None:
        codes += (images.feature_of + 1) << 32
    pieces, computed_at = cut(codes[rows.columns], starts=rows.starts, ends=rows.ends, prompts=rows.prompts)
    sources = computed_at[rows.losses - 1]
    shares = _shares(pieces, num=context_shard.num)
    size = max(sum(piece.length for piece in share) for share in shares)
    place = _places(shares, size=size, num_tokens=len(rows.columns))
    columns, positions, blocks = _lay_out(shares[context_shard.index], place=place, size=size)
    columns = np.where(columns < 0, -1, rows.columns[columns])
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
        vision=None if images is None else _laid_out_images(images, columns, device=device),
    )


def arrange_parts(batch: MicroBatch, *, max_tokens: int, device: torch.device | str = "cpu") -> PackedRow | None:
    """Lay out a row that is one episode of more than `max_tokens` tokens, part by part; None where no token has a loss.

    Raises `DataError` as `arrange` does.
    """
    assert batch.nodes is not None, "an episode in one line fits a row"
    assert batch.routes is None, "agents' tokens have no routes to replay"
    parts = parts_of(batch.nodes, loss_mask=batch.loss_mask, max_tokens=max_tokens)
    if not parts:
        return None
    rows = [
        arrange(
            batch.token_ids[part.columns],
            loss_mask=part.loss_mask,
            lengths=np.array([len(part.columns)], np.int32),
            names=batch.rollout_ids,
            device=device,
            nodes=part.nodes,
        )
        for part in parts
    ]
    places = np.concatenate([part.columns[part.loss_mask] for part in parts])
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    return PackedRow(
        token_ids=nothing,
        positions=nothing,
        blocks=(),
        targets=nothing,
        sources=nothing,
        trained=torch.from_numpy(np.flatnonzero(batch.loss_mask)).to(device, non_blocking=True),
        order=torch.from_numpy(np.argsort(places)).to(device, non_blocking=True),
        parts=tuple(row for row in rows if row is not None),
    )


def _laid_out_images(images: RowImages, columns: np.ndarray, *, device: torch.device | str) -> Vision:
    features = np.where(columns < 0, -1, images.feature_of[columns])
    places = np.flatnonzero(features >= 0)
    found = (images.pixels, images.mask, torch.from_numpy(places), torch.from_numpy(features[places]))
    pixels, mask, at, which = (tensor.to(device, non_blocking=True) for tensor in found)
    return Vision(pixels=pixels, mask=mask, places=at, features=which)


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


def _codes(token_ids: Int32, *, loss_mask: Mask, routes: Table | None) -> np.ndarray:
    """[R] int64, equal where two tokens may share their computation."""
    codes = token_ids.astype(np.int64)
    if routes is not None:
        table = np.ascontiguousarray(routes[loss_mask]).reshape(int(loss_mask.sum()), -1)
        rows = table.view(np.dtype((np.void, table[0].nbytes))).ravel().tolist()
        numbers: dict[bytes, int] = {}
        codes[loss_mask] += np.array([numbers.setdefault(row, len(numbers) + 1) for row in rows], np.int64) << 32  # above every token id
    return codes


def _shares(pieces: list[Piece], *, num: int) -> list[list[Piece]]:
    """Share pieces out among `num` ranks, about as many tokens to each: of 2 * `num` stretches, the i-th and the i-th last to rank i."""
    if num == 1:
        return [pieces]
    stretch = -(-sum(piece.length for piece in pieces) // (2 * num))
    stretches: list[list[Piece]] = [[] for _ in range(2 * num)]
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


def _places(shares: list[list[Piece]], *, size: int, num_tokens: int) -> np.ndarray:
    """[E] where each token of the rows is in the layouts of all ranks, joined, each padded to `size`; -1 for tokens left out."""
    place = np.full(num_tokens, -1)
    for rank, share in enumerate(shares):
        columns = np.concatenate([np.arange(piece.start, piece.end) for piece in share] or [np.zeros(0, np.int64)])
        place[columns] = rank * size + np.arange(len(columns))
    return place


def _lay_out(pieces: list[Piece], *, place: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray, list[Block]]:
    """One rank's layout: ([I] position among the tokens of the rows, -1 for padding; [I] position in its sample; blocks)."""
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
