"""Several frozen teachers; each sample has the one that its prompt's row names.

Each teacher computes the rows that hold a sample of its own, whole, and says nothing of the others' tokens. So a row of samples of two
teachers costs two forward passes; rows of one source cost one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from trainer.model.reference import Reference
from trainer.parallel.replicas import Replicas
from trainer.rows.packed_row import PackedRow


class Teachers:
    """The `Reference` of a run with several teachers, chosen by `PackedRow.teacher_ids`. Every rank calls it for the same rows."""

    def __init__(self, references: Sequence[Reference], *, replicas: Replicas) -> None:
        self._references = references
        self._shares_passes = replicas.shares_passes
        self._context_shard = replicas.context_shard

    def judge(self, row: PackedRow | None) -> tuple[torch.Tensor | None, PackedRow | None]:
        """Judge every trained token by its own teacher, as `Reference.judge` does."""
        found = [
            one.judge(self._of(row, number)) if self._computes(row, number) else (None, None) for number, one in enumerate(self._references)
        ]
        if row is None:
            return None, None
        teacher_ids = self._teacher_ids_of_sources(row)
        states = []
        for number, (_, judged) in enumerate(found):
            for one in judged.teachers if judged is not None else ():
                places = (teacher_ids == number).nonzero()[:, 0]
                states.append(dataclasses.replace(one, hidden=one.hidden[places], places=places))
        return self._chosen(row, [logprobs for logprobs, _ in found]), dataclasses.replace(row, teachers=tuple(states))

    def _of(self, row: PackedRow | None, number: int) -> PackedRow | None:
        """The row where it holds a token of this teacher's."""
        return row if row is not None and bool((_teacher_ids(row) == number).any()) else None

    def _computes(self, row: PackedRow | None, number: int) -> bool:
        """Ranks of other replicas may have tokens for a teacher that this one has none for, and meet it in the middle."""
        return self._shares_passes or self._of(row, number) is not None

    def _chosen(self, row: PackedRow, found: Sequence[torch.Tensor | None]) -> torch.Tensor:
        teacher_ids = _teacher_ids(row)
        chosen = torch.zeros(len(teacher_ids), device=teacher_ids.device)
        for number, logprobs in enumerate(found):
            if logprobs is not None:
                chosen = torch.where(teacher_ids == number, logprobs, chosen)
        return chosen

    def _teacher_ids_of_sources(self, row: PackedRow) -> torch.Tensor:
        """[J] teacher of each of this rank's sources, -1 for padding."""
        teacher_ids = _teacher_ids(row)
        if row.order is None:
            return teacher_ids
        size = len(row.sources)
        is_here = row.order // size == self._context_shard.index
        found = torch.full((size,), -1, dtype=torch.int64, device=teacher_ids.device)
        found[row.order[is_here] - self._context_shard.index * size] = teacher_ids[is_here]
        return found


def _teacher_ids(row: PackedRow) -> torch.Tensor:
    assert row.teacher_ids is not None, "a run with several teachers is told of each sample which one judges it"
    return row.teacher_ids
