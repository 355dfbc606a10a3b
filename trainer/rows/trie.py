"""Cuts rows of tokens into pieces, none of which is computed twice: a trie of the stretches that several rows begin with.

A causal model computes the same for the same beginning, whoever it belongs to: siblings of one prompt, turns of one episode that came as
rows of their own, sub-agents under one system prompt, branches. So a beginning is computed once, at any depth, and whatever follows it sees
it as a prefix. Gradients of all that follows add up in it, exactly as they would have over its copies.

A beginning is shared where that pays: a whole prompt always, as do rows that are equal to their end; elsewhere from `LEAST` tokens on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

LEAST = 32
"""Tokens that a branching inside of rows must save. Smaller cuts rows that agree by chance into pieces of many shapes, each of which costs
attention a call of its own in every layer; larger computes more tokens twice."""


@dataclasses.dataclass(frozen=True, slots=True)
class Piece:
    """Tokens `start` .. `end` - 1 of the rows, seen after those of the spans `before`, which start their row."""

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

    def cut(self, length: int) -> tuple[Piece, Piece]:
        """The first `length` tokens, and the others after them."""
        middle = self.start + length
        return Piece(self.start, middle, self.before), Piece(middle, self.end, (*self.before, (self.start, middle)))


@dataclasses.dataclass(frozen=True, slots=True)
class _Branch:
    """Rows that agree in their first `agreed` tokens, of which those before `start` are in pieces already."""

    rows: list[int]
    start: int
    agreed: int
    before: tuple[tuple[int, int], ...]


def cut(codes: np.ndarray, *, starts: Sequence[int], ends: Sequence[int], prompts: Sequence[int]) -> tuple[list[Piece], np.ndarray]:
    """Return (pieces in the order of their shapes, [E] where each token is computed, -1 for tokens that are not).

    `codes` [E] are rows end to end, equal where two tokens may share their computation. Row i is `starts[i]` .. `ends[i]` - 1, without what
    predicts nothing, and the first `prompts[i]` tokens of it stand before its first loss.
    """
    computed_at = np.full(len(codes), -1)
    pieces: list[Piece] = []
    lengths = [end - start for start, end in zip(starts, ends, strict=True)]

    def compute(rows: list[int], start: int, end: int, before: tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
        """Make a piece of what `rows` agree in; return the spans before what follows."""
        if start == end:
            return before
        first, last = starts[rows[0]] + start, starts[rows[0]] + end
        pieces.append(Piece(first, last, before))
        for row in rows:
            computed_at[starts[row] + start : starts[row] + end] = np.arange(first, last)
        return (*before, (first, last))

    def parted(rows: list[int], at: int) -> list[list[int]]:
        """Group rows by their token at `at`, in order of the first of each group."""
        groups: dict[int, list[int]] = {}
        for row, code in zip(rows, codes[np.array([starts[row] for row in rows]) + at].tolist(), strict=True):
            groups.setdefault(code, []).append(row)
        return list(groups.values())

    waiting = [_Branch(rows, 0, 1, ()) for rows in reversed(parted([row for row, length in enumerate(lengths) if length > 0], 0))]
    while waiting:  # a stack and no recursion: episodes may be thousands of branches deep
        branch = waiting.pop()
        shortest, longest = (limit(lengths[row] for row in branch.rows) for limit in (min, max))
        agreed = branch.agreed + _agreement(codes, [starts[row] + branch.agreed for row in branch.rows], shortest - branch.agreed)
        if agreed == longest:  # one row, or rows that are equal to their end
            compute(branch.rows, branch.start, longest, branch.before)
            continue
        prompt = min(prompts[row] for row in branch.rows)
        end = _shared_end(branch.start, agreed, prompt=prompt)
        before = compute(branch.rows, branch.start, end, branch.before)
        if ended := [row for row in branch.rows if lengths[row] == agreed]:
            compute(ended, end, agreed, before)
        groups = parted([row for row in branch.rows if lengths[row] > agreed], agreed)
        waiting += [_Branch(rows, end, agreed + 1, before) for rows in reversed(groups)]
    return sorted(pieces, key=lambda piece: piece.shape), computed_at


def _agreement(codes: np.ndarray, places: list[int], most: int) -> int:
    """Return how many tokens from these places on are equal in all, `most` at most."""
    for place in places[1:]:
        differs = codes[places[0] : places[0] + most] != codes[place : place + most]
        if differs.any():
            most = int(differs.argmax())
    return most


def _shared_end(start: int, agreed: int, *, prompt: int) -> int:
    """Return where to branch rows that agree up to `agreed`: there if that pays, else at the end of their prompt, else where they start."""
    if start < prompt <= agreed:
        start = prompt
    return agreed if agreed - start >= LEAST else start
