"""Advantages that only the trainer can make, because what its models say of each token enters them.

The rules are those of `pipelinerl.algorithms.advantage`, which the orchestrator calls for all other methods. The trainer calls them once a
step is whole, over all groups of all replicas: every replica gathers those (a few numbers per token), so that baselines and whitening are
those of one process.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from pipelinerl.algorithms.advantage import group_advantages, prime, step_advantages, token_columns, value_returns
from pipelinerl.algorithms.advantage.optimal_baseline import energy
from pipelinerl.algorithms.advantage.outcome import Float64, ScoredGroup
from pipelinerl.algorithms.loss import TokenColumns
from pipelinerl.algorithms.loss.correction import importance_weights, terms_of
from pipelinerl.algorithms.method import Method, Need
from pipelinerl.errors import DataError
from pipelinerl.messages import MicroBatch
from trainer.parallel.replicas import Replicas
from trainer.rows.packed_row import PackedRow


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HeldRow:
    """A row that waits for its step to be whole, with what was computed of it meanwhile, without gradient.

    A zero-loss row has none of it. Legend: `K` trained tokens.
    """

    batch: MicroBatch
    row: PackedRow | None
    columns: TokenColumns | None
    values: torch.Tensor | None = None
    """[K] float32, what the critic says of each token, where there is one, or the policy's sum of squared probabilities."""
    returns: torch.Tensor | None = None
    """[K] float32, what the critic is trained towards."""
    has_gradient: bool = True
    """False where no row of its round has one."""


def with_advantages(held: Sequence[HeldRow], *, method: Method, replicas: Replicas, correct_reward: float) -> list[HeldRow]:
    """The rows of this replica with their advantages, and returns where there is a critic. Every rank calls this."""
    samples = np.concatenate([np.zeros((0, 3)), *(_sample_facts(one) for one in held)])
    tokens = np.concatenate([np.zeros((0, 3)), *(_token_facts(one, method=method) for one in held)])
    all_samples, _ = _gathered(samples, replicas=replicas)
    all_tokens, first_token = _gathered(tokens, replicas=replicas)
    advantages, returns = _step_credit(all_samples, all_tokens, method=method, correct_reward=correct_reward)
    mine = slice(first_token, first_token + len(tokens))
    counts = np.cumsum([0 if one.columns is None else len(one.columns.loss_mask) for one in held])[:-1]
    parts = zip(held, np.split(advantages[mine], counts), np.split(returns[mine], counts), strict=True)
    return [_with_credit(one, advantages=a, returns=g) for one, a, g in parts]


def _sample_facts(held: HeldRow) -> np.ndarray:
    """[N, 3] group, reward and trained tokens of each sample."""
    batch = held.batch
    if not len(batch.lengths):
        return np.zeros((0, 3))
    if batch.group_ids is None or batch.rewards is None:
        raise DataError(f"row {batch.index} of step {batch.step} says neither group nor reward of its samples, and advantages need them")
    sample_of = np.repeat(np.arange(len(batch.lengths)), batch.lengths)
    counts = np.bincount(sample_of[batch.loss_mask], minlength=len(batch.lengths))
    return np.stack((batch.group_ids, batch.rewards, counts), 1).astype(np.float64)


def _token_facts(held: HeldRow, *, method: Method) -> np.ndarray:
    """[K, 3] log mu - log ref, what the rule reads (`_READS`) and whether a turn ends there; zeros where the run has no such thing."""
    columns = held.columns
    if columns is None:
        return np.zeros((0, 3))
    nothing = torch.zeros_like(columns.behaviour_logprobs)
    kl = nothing if columns.reference_logprobs is None else columns.behaviour_logprobs - columns.reference_logprobs
    places, sequences = columns.required("positions"), columns.sequence_ids
    ends = torch.ones_like(places, dtype=torch.bool)
    ends[:-1] = (places[1:] != places[:-1] + 1) | (sequences[1:] != sequences[:-1])
    facts = (kl, nothing if held.values is None else _read(held.values, columns, method=method), ends)
    return torch.stack([fact.double() for fact in facts], 1).cpu().numpy()


_READS = {Need.CRITIC: "values", Need.IMPLICIT_PRM: "process_rewards", Need.SQUARE_SUM: "energies"}
"""The column of a `ScoredGroup` that is made of `HeldRow.values`; no rule reads two of them."""


def _read(values: torch.Tensor, columns: TokenColumns, *, method: Method) -> torch.Tensor:
    """[K] the value itself, log phi - log ref of an implicit process reward model, or the energy of the token."""
    if Need.IMPLICIT_PRM in method.needs:
        return values - columns.required("reference_logprobs")
    if Need.SQUARE_SUM in method.needs:
        weights = importance_weights(terms_of(columns, proximal=method.proximal), rule=method.weight)
        exact = [column.double().cpu().numpy() for column in (columns.logprobs.exp(), values, weights)]
        return torch.from_numpy(energy(exact[0], square_sums=exact[1], importance=exact[2])).to(values.device)
    return values


def _gathered(table: np.ndarray, *, replicas: Replicas) -> tuple[np.ndarray, int]:
    """The tables of all replicas one below the other, and where this one's begins; made of sums, the one thing replicas do."""
    counts = torch.zeros(replicas.layout.replicas, dtype=torch.float64, device=replicas.device)
    counts[replicas.number] = len(table)
    replicas.sum(counts, what="to count the samples and tokens of the step")
    ends = counts.cpu().numpy().cumsum().astype(int)
    first = int(ends[replicas.number]) - len(table)
    whole = torch.zeros(int(ends[-1]), table.shape[1], dtype=torch.float64, device=replicas.device)
    whole[first : first + len(table)] = torch.from_numpy(table)
    replicas.sum(whole, what="to gather what advantages are made of")
    return whole.cpu().numpy(), first


def _step_credit(samples: np.ndarray, tokens: np.ndarray, *, method: Method, correct_reward: float) -> tuple[Float64, Float64]:
    """([tokens] advantages, [tokens] returns) of the whole step; returns are zeros without a critic."""
    lengths = samples[:, 2].astype(np.int64)
    starts = np.cumsum(lengths) - lengths
    if Need.IMPLICIT_PRM in method.needs:
        beta = float(method.critic.options["beta"] or 0.0)
        tokens[:, 1] = np.concatenate([np.zeros(0), *prime.process_rewards(np.split(tokens[:, 1], starts[1:]), beta=beta)])
    members = [np.flatnonzero(samples[:, 0] == group) for group in np.unique(samples[:, 0])]
    column = next((name for need, name in _READS.items() if need in method.needs), "values")
    groups = [_group(samples[chosen], tokens, starts=starts[chosen], read_as=column, correct_reward=correct_reward) for chosen in members]
    credits = step_advantages([group_advantages(group, method=method) for group in groups], groups, method=method)
    advantages, returns = np.zeros(len(tokens)), np.zeros(len(tokens))
    for chosen, group, credit in zip(members, groups, credits, strict=True):
        targets = value_returns(group, method=method) if Need.CRITIC in method.needs else [None] * len(chosen)
        for sample, column, target in zip(chosen, token_columns(credit, group=group), targets, strict=True):
            place = slice(starts[sample], starts[sample] + lengths[sample])
            advantages[place] = column
            returns[place] = 0.0 if target is None else target
    return advantages, returns


def _group(samples: np.ndarray, tokens: np.ndarray, *, starts: np.ndarray, read_as: str, correct_reward: float) -> ScoredGroup:
    """Siblings as the rules take them; positions are trained tokens only, which is what values are carried between."""
    lengths = samples[:, 2].astype(np.int64)
    rows = [tokens[start : start + length] for start, length in zip(starts, lengths, strict=True)]
    read: dict[str, Any] = {read_as: tuple(row[:, 1] for row in rows)}
    return ScoredGroup(
        rewards=samples[:, 1],
        lengths=lengths,
        correct=samples[:, 1] >= correct_reward,
        token_kl=tuple(row[:, 0] for row in rows),
        turns=tuple(np.flatnonzero(row[:, 2]) for row in rows),
        **read,
    )


def _with_credit(held: HeldRow, *, advantages: Float64, returns: Float64) -> HeldRow:
    if held.columns is None:
        return held
    like = held.columns.advantages
    columns = dataclasses.replace(held.columns, advantages=torch.from_numpy(advantages).to(like))
    return dataclasses.replace(held, columns=columns, returns=torch.from_numpy(returns).to(like) if held.values is not None else None)
