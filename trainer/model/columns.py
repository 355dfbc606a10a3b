"""What a language model says of a row's trained tokens, from its last hidden states and its output embedding, whoever computed those."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from transformers import PreTrainedModel

from trainer.model.divergence import divergences
from trainer.model.head import linear_logprobs
from trainer.model.logits import LogitRule
from trainer.parallel.replicas import Replicas
from trainer.rows.packed_row import PackedRow, TeacherStates


@dataclasses.dataclass(slots=True, kw_only=True)
class WordColumns:
    """The last step of a language model. Where tensor parallelism splits the vocabulary, each rank of `group` has a part of it."""

    rule: LogitRule
    temperature: float
    num_words: int
    """Rows of the output embedding, on all ranks."""
    first_id: int = 0
    """The first of this rank's."""
    group: dist.ProcessGroup | None = None
    has_float32_head: bool = False
    gives_square_sums: bool = False
    divergence_mix: float | None = None
    is_sharded: bool = False
    """The embedding is there for the forward pass only."""
    keeps_states: bool = False
    """The next row's states are kept in `states`."""
    states: TeacherStates | None = None
    _head_copy: torch.Tensor | None = None
    """The output embedding of a sharded teacher, which a forward pass has whole and gives back at its end."""

    def __call__(self, hidden: torch.Tensor, weight: torch.Tensor, row: PackedRow) -> tuple[torch.Tensor, ...]:
        """Return the columns of `trainer.model.Model.outputs`; `hidden` [J, H] at `row.sources`, `weight` [V, H] this rank's words."""
        if self.has_float32_head:
            hidden, weight = hidden.float(), weight.float()
        if self.rule.factor != 1.0:
            hidden = hidden * self.rule.factor
        if self.keeps_states:
            self.states = TeacherStates(hidden=hidden.detach(), head=self._kept_head(weight))
        shared: dict[str, Any] = {"temperature": self.temperature, "group": self.group}
        columns = linear_logprobs(
            hidden,
            weight,
            row.targets,
            first_id=self.first_id,
            gives_square_sums=self.gives_square_sums,
            softcap=self.rule.softcap,
            **shared,
        )
        if self.divergence_mix is None or not row.teachers:
            return columns
        return (*columns, divergences(hidden, weight, row.teachers, mix=self.divergence_mix, **shared))

    def _kept_head(self, weight: torch.Tensor) -> torch.Tensor:
        if not self.is_sharded:
            return weight.detach()
        if self._head_copy is None:
            self._head_copy = weight.detach().clone()
        return self._head_copy


def words_of(module: PreTrainedModel, *, rule: LogitRule, temperature: float, replicas: Replicas, **options: Any) -> WordColumns:
    """The last step of `module`, on the ranks of `replicas`; `options` are further ones of `WordColumns`."""
    head: Any = module.get_output_embeddings()  # `logit_rule_of` has seen it
    num_words, tensor = len(head.weight), replicas.layout.tensor
    return WordColumns(
        rule=rule,
        temperature=temperature,
        num_words=num_words,
        first_id=-(-num_words // tensor) * replicas.place("tensor"),
        group=replicas.mesh("tensor").get_group() if tensor > 1 else None,
        is_sharded=replicas.layout.shard > 1,
        **options,
    )
