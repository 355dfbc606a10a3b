"""The columns that the loss reads of one packed row, and the quantities every rule computes from it first.

Invariants: tokens that do not train enter no sum, mean, product, maximum or count, whatever number stands there (NaN and -1e4 included:
they are replaced before any arithmetic). Log-differences are float32 or wider and clamped to +-20 before `exp`. Everything but
`TokenColumns.logprobs`, `entropy` and `divergence` is detached.

Legend: `T` tokens of the row, either all of them or only those that train; `N` sequences in it. A sequence lies whole and in order in
one row.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

import torch
from torch import Tensor

from pipelinerl.errors import ConfigError

LOG_LIMIT = 20.0
"""Clamp of log-ratios before `exp`: e^20 is 4.9e8, still exact enough in float32. Tighter would cut ratios that clips and caps judge."""


_PER_SEQUENCE = ("weights", "correct", "truncated")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TokenColumns:
    """One packed row: per-token columns laid end to end. `None` means that the method at hand does not need the column."""

    logprobs: Tensor
    """[T] log pi of the token at that position, float, with gradient."""
    behaviour_logprobs: Tensor
    """[T] log mu, float, natural log under the engine."""
    advantages: Tensor
    """[T] float."""
    loss_mask: Tensor
    """[T] bool, true where the token enters the loss, before any rejection."""
    versions: Tensor
    """[T] int32, version that sampled the token, -1 where none did."""
    sequence_ids: Tensor
    """[T] int64 in 0..N-1; any value where `loss_mask` is false."""
    trained_version: int
    """Version of the policy at the start of this step."""
    positions: Tensor | None = None
    """[T] int64 place of each token in the whole row, where the columns hold trained tokens only. None: the columns hold every token."""
    entropy: Tensor | None = None
    """[T] float, exact entropy, with gradient."""
    reference_logprobs: Tensor | None = None
    """[T] float, reference policy or teacher."""
    divergence: Tensor | None = None
    """[T] float, from the reference's or teacher's whole distribution, by the method's `mix`; with gradient."""
    old_logprobs: Tensor | None = None
    """[T] float, the policy at the start of the step."""
    weights: Tensor | None = None
    """[N] sample weights (1/eps of an unbiased stop); multiply numerators only. None: all 1."""
    correct: Tensor | None = None
    """[N] bool, correctness."""
    truncated: Tensor | None = None
    """[N] bool, true where the sequence was cut off at its longest allowed length."""

    def __post_init__(self) -> None:
        for name in (field.name for field in dataclasses.fields(self) if field.name not in _PER_SEQUENCE):
            column = getattr(self, name)
            if isinstance(column, Tensor) and column.shape != self.logprobs.shape:
                raise ValueError(f"TokenColumns: {name} has shape {tuple(column.shape)}, expected {tuple(self.logprobs.shape)} as logprobs")
        if self.loss_mask.dtype != torch.bool:
            raise ValueError(f"TokenColumns: loss_mask is {self.loss_mask.dtype}, expected torch.bool")

    def required(self, name: str) -> Tensor:
        """The optional column `name`; raises `ConfigError` where the trainer supplied none."""
        column = getattr(self, name)
        if column is None:
            raise ConfigError(f"the method reads {name}, and the trainer supplied none: got None, expected a tensor. See Method.needs.")
        return column

    def count_sequences(self) -> int:
        """N; at least 1, so that a row without a sequence is a row of zero loss."""
        for column in (getattr(self, name) for name in _PER_SEQUENCE):
            if column is not None:
                return max(len(column), 1)
        inside = self.sequence_ids[self.loss_mask]
        return int(inside.max()) + 1 if len(inside) else 1


@dataclass(frozen=True, slots=True, kw_only=True)
class StepStatistics:
    """Numbers of a whole step, equal on every rank; made by `step_statistics.measure_step` before the first backward pass."""

    m2po_threshold: float = 0.0
    """Largest (log rho)^2 that is kept."""
    mean_advantage: float = 0.0
    """Over trained tokens."""
    mean_logprob: float = 0.0
    """The mean of `old_logprobs` over trained tokens."""
    entropy_threshold: float = 0.0
    """Smallest entropy among the tokens that train."""
    covariance_threshold: float = 0.0
    """Smallest covariance among the chosen tokens."""
    pick_probability: float = 0.0
    """Chance of a candidate token to be zeroed."""
    mean_weight: float = 1.0
    """The divisor of importance weights; 1 where they are not, or where all of them are 0."""
    positive_scale: float = 0.0
    """Trained tokens / trained tokens of correct sequences; 0 where none is correct."""


@dataclass(frozen=True, slots=True, eq=False)
class Segments:
    """A partition of the trained tokens, by sequence or by unbroken run, with sums and means over its parts."""

    ids: Tensor
    """[T] int64 part of each token; 0 where it does not train."""
    loss_mask: Tensor
    """[T] bool."""
    count: int

    def sum(self, values: Tensor) -> Tensor:
        """[count] sums of `values` [T] over the trained tokens of each part."""
        kept = torch.where(self.loss_mask, values, torch.zeros_like(values))
        return torch.zeros(self.count, dtype=values.dtype, device=values.device).index_add(0, self.ids, kept)

    def sizes(self, dtype: torch.dtype) -> Tensor:
        """[count] trained tokens of each part, at least 1."""
        return self.sum(torch.ones(self.ids.shape, dtype=dtype, device=self.ids.device)).clamp(min=1)

    def mean(self, values: Tensor) -> Tensor:
        """[count] means over the trained tokens of each part; 0 for an empty part."""
        return self.sum(values) / self.sizes(values.dtype)

    def maximum(self, values: Tensor) -> Tensor:
        """[count] largest value among the trained tokens of each part; -inf for an empty part."""
        kept = torch.where(self.loss_mask, values, torch.full_like(values, -torch.inf))
        return torch.full((self.count,), -torch.inf, dtype=values.dtype, device=values.device).scatter_reduce(0, self.ids, kept, "amax")

    def spread(self, values: Tensor) -> Tensor:
        """[T] each token takes the value of its part; meaningless where it does not train."""
        return values[self.ids]

    def restricted(self, keep: Tensor) -> Segments:
        """The same parts without the tokens outside `keep`, which still know their part when a value is spread."""
        return Segments(self.ids, self.loss_mask & keep, self.count)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Terms:
    """The row after masking and upcasting; all [T], 0 where the token does not train."""

    columns: TokenColumns
    logprobs: Tensor
    """log pi, with gradient."""
    behaviour: Tensor
    """log mu."""
    proximal: Tensor
    """log prox, detached."""
    advantages: Tensor
    loss_mask: Tensor
    log_ratio: Tensor
    """log pi - log prox, clamped, with gradient."""
    log_rho: Tensor
    """log prox - log mu, clamped, detached. With proximal "engine" sg[log pi] - log mu, so that masks still see the mismatch."""
    sequences: Segments
    statistics: StepStatistics | None

    @property
    def known(self) -> StepStatistics:
        """The statistics of the step; raises `ConfigError` where the trainer gave none."""
        if self.statistics is None:
            raise ConfigError(
                "the method compares all tokens of a step: got no statistics, expected those of `measure_step` over every row of the step."
            )
        return self.statistics

    @property
    def ratio(self) -> Tensor:
        return self.log_ratio.exp()

    @property
    def rho(self) -> Tensor:
        return self.log_rho.exp()

    def restricted(self, keep: Tensor) -> Terms:
        """The same terms where tokens outside `keep` belong to no sequence, so that means and products leave them out."""
        return dataclasses.replace(self, sequences=self.sequences.restricted(keep))

    def column(self, name: str) -> Tensor:
        """A further column of the row, masked, upcast and, unless it is the model's to change, detached."""
        values = masked(self.columns.required(name), self.loss_mask, like=self.logprobs)
        return values if name in ("entropy", "divergence") else values.detach()


def masked(values: Tensor, loss_mask: Tensor, *, like: Tensor | None = None) -> Tensor:
    """Values with 0 where the token does not train, upcast to float32 where narrower, or to the dtype of `like`."""
    dtype = like.dtype if like is not None else torch.promote_types(values.dtype, torch.float32)
    return torch.where(loss_mask, values.to(dtype), torch.zeros((), dtype=dtype, device=values.device))


def log_difference(upper: Tensor, lower: Tensor) -> Tensor:
    """upper - lower, clamped to +-LOG_LIMIT."""
    return (upper - lower).clamp(-LOG_LIMIT, LOG_LIMIT)


def sequences_of(columns: TokenColumns) -> Segments:
    """The trained tokens of a row, by sequence."""
    ids = torch.where(columns.loss_mask, columns.sequence_ids, 0)
    return Segments(ids, columns.loss_mask, columns.count_sequences())


def places_of(columns: TokenColumns) -> Tensor:
    """[T] int64 distance of each trained token from the first trained one of its sequence: the same however the row is packed."""
    places = torch.arange(len(columns.loss_mask), device=columns.loss_mask.device) if columns.positions is None else columns.positions
    sequences = sequences_of(columns)
    never = torch.iinfo(places.dtype).max
    firsts = torch.full((sequences.count,), never, dtype=places.dtype, device=places.device)
    firsts = firsts.scatter_reduce(0, sequences.ids, places.masked_fill(~columns.loss_mask, never), "amin")
    return torch.where(columns.loss_mask, places - sequences.spread(firsts), 0)


def runs_of(columns: TokenColumns) -> Segments:
    """The trained tokens of a row, by unbroken run inside a sequence: one run per turn, since tool tokens stand between turns."""
    loss_mask, ids = columns.loss_mask, columns.sequence_ids
    places = torch.arange(len(loss_mask), device=loss_mask.device) if columns.positions is None else columns.positions
    goes_on = torch.zeros_like(loss_mask)
    goes_on[1:] = loss_mask[:-1] & (ids[1:] == ids[:-1]) & (places[1:] == places[:-1] + 1)
    numbers = (loss_mask & ~goes_on).cumsum(0)
    return Segments(torch.where(loss_mask, numbers - 1, 0), loss_mask, max(int(numbers.max()) if len(numbers) else 1, 1))
