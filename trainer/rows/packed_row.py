"""A packed row as the model takes it. `trainer.rows.arrange` lays rows out, and explains blocks and prefixes; this module knows no other.

Legend: `I` tokens the model computes on this rank, `K` tokens with a loss, `J` of them on this rank, `G` a teacher's hidden size, `V` words
of the vocabulary on this rank.
"""

from __future__ import annotations

import dataclasses

import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TeacherStates:
    """The states that a frozen teacher's distributions over a row are made of."""

    hidden: torch.Tensor
    """[M, G], of the tokens that predict those it judges."""
    head: torch.Tensor
    """[V, G], its output embedding."""
    places: torch.Tensor | None = None
    """[M] int64, which of the row's `sources` these are; None: all of them, in order."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Vision:
    """The images of a row, and where their features stand; `trainer.rows.images` has the legend."""

    pixels: torch.Tensor
    """[n, 3, S, S] float32."""
    mask: torch.Tensor
    """[n, S, S] int64."""
    places: torch.Tensor
    """[P] int64, positions in the layout of placeholders."""
    features: torch.Tensor
    """[P] int64, the feature of each, of the F of all patches end to end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """Pieces of one shape, side by side: `num` of them, each of `length` tokens, from position `start` of the layout."""

    start: int
    num: int
    length: int
    prefix_length: int
    """Tokens each piece sees before its own; 0 for a piece that starts a sample."""
    prefix: torch.Tensor | None
    """[num * prefix_length] int64, where those tokens are in the layouts of all ranks that share the row, joined; None without a prefix."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedRow:
    """A packed row as the model takes it, or one rank's part of it."""

    token_ids: torch.Tensor
    """[I] int64."""
    positions: torch.Tensor
    """[I] int64, position of each token within its own sample."""
    blocks: tuple[Block, ...]
    targets: torch.Tensor
    """[J] int64, ids of the tokens with a loss, in the order of the packed row."""
    sources: torch.Tensor
    """[J] int64, position in the layout of the token before each target: the target's log-probability is computed from its output."""
    trained: torch.Tensor
    """[K] int64, position of each token with a loss in the packed row, to pick its other columns."""
    routes: torch.Tensor | None = None
    """[I, layers, k] int16, the experts each token was sent to in the engine, -1 where that is not known; None where nothing is."""
    teacher_ids: torch.Tensor | None = None
    """[K] int64, which of several teachers judges each token; None where there are not several."""
    teachers: tuple[TeacherStates, ...] = ()
    """States of the teachers that the model's distributions are compared with; none where they are not."""
    vision: Vision | None = None
    """None for a row without images."""
    order: torch.Tensor | None = None
    """[K] int64, where each is among the targets of all ranks that share the row, or of all `parts`, joined; None for a whole row, where J
    is K."""
    parts: tuple[PackedRow, ...] = ()
    """Of an episode that is larger than a row: it is computed part by part, and has no tokens or blocks of its own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ContextShard:
    """The part of every row that is this rank's, under context parallelism."""

    index: int = 0
    num: int = 1


WHOLE_ROW = ContextShard()
"""Every row, all of it."""
