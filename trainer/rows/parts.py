"""Cuts an episode that has more tokens than a packed row into parts that each fit one: branches with what they share before them.

A part is some branches, whole: what several parts share is computed in each of them, and a token with a loss counts in the first part that
has it. Branches are taken in order, as long as what they have together fits.

Legend: `R` tokens of the packed row, `K` tokens with a loss.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pipelinerl.messages import Mask, Nodes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """Some branches of an episode."""

    columns: np.ndarray
    """Positions of its tokens in the packed row, rising."""
    loss_mask: Mask
    """Which of them have their loss here."""
    nodes: Nodes


def parts_of(nodes: Nodes, *, loss_mask: Mask, max_tokens: int) -> list[Part]:
    """Return the parts of an episode, at least one where a token has a loss. A branch longer than `max_tokens` is a part by itself."""
    parents, ends = nodes.parents.tolist(), np.cumsum(nodes.lengths, dtype=np.int64).tolist()
    starts = [0, *ends[:-1]]
    taken: set[int] = set()
    """Nodes whose loss is in a part."""
    found: list[Part] = []
    open_nodes: set[int] = set()

    def size(some: set[int]) -> int:
        return sum(ends[node] - starts[node] for node in some)

    def close() -> None:
        kept = sorted(open_nodes)
        new_index = {-1: -1} | {node: number for number, node in enumerate(kept)}
        columns = np.concatenate([np.arange(starts[node], ends[node]) for node in kept])
        own = np.repeat([node not in taken for node in kept], [ends[node] - starts[node] for node in kept])
        parts_nodes = Nodes(
            parents=np.array([new_index[parents[node]] for node in kept], np.int32),
            lengths=np.array([ends[node] - starts[node] for node in kept], np.int32),
        )
        found.append(Part(columns=columns, loss_mask=loss_mask[columns] & own, nodes=parts_nodes))
        taken.update(kept)
        open_nodes.clear()

    for last in _lasts(parents, [bool(loss_mask[start:end].any()) for start, end in zip(starts, ends, strict=True)]):
        path = {last}
        while (parent := parents[last]) >= 0:
            path.add(parent)
            last = parent
        if open_nodes and size(open_nodes | path) > max_tokens:
            close()
        open_nodes |= path
    if open_nodes:
        close()
    return found


def _lasts(parents: list[int], has_loss: list[bool]) -> list[int]:
    """Return the nodes with a loss that no other with one follows."""
    followed: set[int] = set()
    for node in reversed(range(len(parents))):  # children before parents
        if has_loss[node] or node in followed:
            followed.add(parents[node])
    return [node for node in range(len(parents)) if has_loss[node] and node not in followed]
