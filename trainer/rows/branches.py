"""The rows of a packed row's samples: a sample by itself is one, an episode that branches has one for each turn that no other follows.

Legend: `R` tokens of the packed row, `N` nodes, `M` rows, `E` tokens of all rows end to end, `K` tokens with a loss.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from pipelinerl.messages import Int32, Mask, Nodes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rows:
    """Rows end to end, with the one place in them of each token with a loss."""

    columns: np.ndarray
    """[E] position of each token in the packed row; what rows share stands there once, and here in each of them."""
    starts: list[int]
    """[M] first token of each row."""
    ends: list[int]
    """[M] its last token with a loss, from which nothing is predicted: the one after the last that has to be computed."""
    prompts: list[int]
    """[M] tokens before its first loss."""
    losses: np.ndarray
    """[K] where each token with a loss is, in the order of the packed row."""

    @property
    def first_with_loss(self) -> int | None:
        """Position in the packed row of a token with a loss that nothing stands before; None where there is none, as there should be."""
        return next((int(self.columns[start]) for start, prompt in zip(self.starts, self.prompts, strict=True) if prompt == 0), None)


def whole_samples(lengths: Int32, *, loss_mask: Mask) -> Rows:
    """Return a row for each sample of these lengths that has a loss."""
    losses = np.flatnonzero(loss_mask)
    last = np.cumsum(lengths, dtype=np.int64)
    sample_of = np.searchsorted(last, losses, side="right")
    firsts = np.flatnonzero(np.diff(sample_of, prepend=-1))
    starts = (last - lengths)[sample_of[firsts]]
    ends = losses[np.append(firsts[1:], len(losses)) - 1]
    prompts = losses[firsts] - starts
    columns = np.arange(len(loss_mask))
    return Rows(columns=columns, starts=starts.tolist(), ends=ends.tolist(), prompts=prompts.tolist(), losses=losses)


def branches(nodes: Nodes, *, loss_mask: Mask) -> Rows:
    """Return a row for each node with a loss that no other with one follows. The loss of a shared node counts once: in the last of its
    rows, which all compute the same of it.
    """
    parents, ends = nodes.parents.tolist(), np.cumsum(nodes.lengths, dtype=np.int64).tolist()
    starts = [0, *ends[:-1]]
    has_loss = [bool(loss_mask[start:end].any()) for start, end in zip(starts, ends, strict=True)]
    followed: set[int] = set()
    for node in reversed(range(len(parents))):  # children before parents
        if has_loss[node] or node in followed:
            followed.add(parents[node])
    losses = np.zeros(len(loss_mask), np.int64)
    columns: list[np.ndarray] = []
    found: list[tuple[int, int, int]] = []
    size = 0
    for last in (node for node in range(len(parents)) if has_loss[node] and node not in followed):
        path = [last]
        while parents[path[-1]] >= 0:
            path.append(parents[path[-1]])
        row = np.concatenate([np.arange(starts[node], ends[node]) for node in reversed(path)])
        own = np.flatnonzero(loss_mask[row])
        losses[row[own]] = size + own
        columns.append(row)
        found.append((size, size + int(own[-1]), int(own[0])))
        size += len(row)
    first, end, prompt = (list(part) for part in zip(*found, strict=True))
    return Rows(columns=np.concatenate(columns), starts=first, ends=end, prompts=prompt, losses=losses[np.flatnonzero(loss_mask)])
