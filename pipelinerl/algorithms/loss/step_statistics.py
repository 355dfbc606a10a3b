"""Statistics of a whole step that some rules need before its first backward pass: a threshold, a mean, a share.

`measure_step` runs on every rank over its own rows and adds up through `reduce`, which sums a tensor over ranks. Every rank calls it
equally often, and all of them get the numbers that one process over all rows would. Thresholds are found by bisection over the bit
patterns of float32, so they are exact values of the data, and no rank sorts anything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pipelinerl.algorithms.loss.columns import StepStatistics, TokenColumns, log_difference, masked, places_of
from pipelinerl.algorithms.loss.correction import importance_weights, is_normalized, terms_of
from pipelinerl.algorithms.method import Method, Need
from pipelinerl.algorithms.rules import spec_of, specs_of

Reduce = Callable[[Tensor], Tensor]
"""Sum of a float64 tensor [2] on the host over all ranks, given to all of them."""

LEAST_MEAN_WEIGHT = 1e-8
"""Smallest mean that weights are divided by, as verl: below it masking weights have rejected all tokens but by rounding."""

_MIX = (0x1B873593CC9E2D51, 0x2545F4914F6CDD1D, 0x52DCE729D14A5B75)
"""Odd 63-bit multipliers of the hash behind `uniform_draws`; any such would do."""


def measure_step(rows: Sequence[TokenColumns], *, method: Method, reduce: Reduce) -> StepStatistics | None:
    """Statistics over all rows of a step on all ranks; None where the method needs none. `reduce` is the identity in one process.

    The rows' `old_logprobs` must be filled in where a rule reads them; `logprobs` are those of the policy that the step begins with.
    """
    if Need.WHOLE_STEP not in method.needs:
        return None
    values: dict[str, float] = {}
    for _, rule, spec in specs_of(method):
        if spec.step_statistic:
            options = {name: float(value) for name, value in rule.options.items() if isinstance(value, int | float)}
            values |= _MEASURES[spec.step_statistic](rows, options=options, reduce=reduce)
    if is_normalized(method.weight):
        values["mean_weight"] = _mean_weight(rows, method=method, reduce=reduce)
    return StepStatistics(**values)


def second_moments(columns: TokenColumns) -> Tensor:
    """[T] float32 (log prox - log mu)^2 with the policy at the start of the step as prox; 0 where the token does not train."""
    old = masked(columns.required("old_logprobs").detach(), columns.loss_mask)
    return log_difference(old, masked(columns.behaviour_logprobs.detach(), columns.loss_mask, like=old)).square().float()


def covariance(columns: TokenColumns, *, statistics: StepStatistics) -> Tensor:
    """[T] float32 (A - mean A)(log pi - mean log pi) with the policy at the start of the step (arXiv:2505.22617)."""
    advantages = masked(columns.advantages.detach(), columns.loss_mask) - statistics.mean_advantage
    logprobs = masked(columns.required("old_logprobs").detach(), columns.loss_mask) - statistics.mean_logprob
    return (advantages * logprobs).float()


def uniform_draws(columns: TokenColumns) -> Tensor:
    """[T] numbers in [0, 1) that depend on nothing but the version being trained and what came with the token: its place in its sequence,
    the engine's log-probability and its advantage. The trainer's own log-probabilities would change in their last bits with the packing."""
    mixed = torch.full_like(columns.sequence_ids, columns.trained_version)
    parts = [column.detach().float().view(torch.int32).long() for column in (columns.behaviour_logprobs, columns.advantages)]
    for part, factor in zip((places_of(columns), *parts), _MIX, strict=True):
        mixed = (mixed ^ part) * factor
        mixed = mixed ^ ((mixed >> 29) & 0x7FFFFFFFF)
    return (mixed & 0xFFFFFF).double() / 0x1000000


def m2po_threshold(rows: Sequence[TokenColumns], *, options: Mapping[str, float], reduce: Reduce) -> dict[str, float]:
    """The largest second moment up to which the mean of the step's second moments stays below `tau`."""
    squares = _joined([second_moments(row)[row.loss_mask] for row in rows])

    def mean_is_small(threshold: float) -> bool:
        total, count = _total(squares[squares <= threshold], reduce=reduce)
        return total < options["tau"] * count or count == 0

    return {"m2po_threshold": _largest(mean_is_small)}


def entropy_threshold(rows: Sequence[TokenColumns], *, options: Mapping[str, float], reduce: Reduce) -> dict[str, float]:
    """The largest entropy that `fraction` of the step's tokens reaches, one at least: what a sort of all ranks' tokens would give."""
    entropies = _joined([row.required("entropy")[row.loss_mask] for row in rows])
    _, num_tokens = _total(entropies, reduce=reduce)
    return {"entropy_threshold": _reached_by(entropies, wanted=max(1, int(options["fraction"] * num_tokens)), reduce=reduce)}


def covariance_threshold(rows: Sequence[TokenColumns], *, options: Mapping[str, float], reduce: Reduce) -> dict[str, float]:
    """The largest covariance that `fraction` of the step's tokens reaches, one at least, and the means that covariances are made with."""
    means, covariances, wanted = _covariances(rows, options=options, reduce=reduce)
    return means | {"covariance_threshold": _reached_by(covariances, wanted=wanted, reduce=reduce)}


def pick_probability(rows: Sequence[TokenColumns], *, options: Mapping[str, float], reduce: Reduce) -> dict[str, float]:
    """The chance at which picking from the covariances between `low` and `high` picks `fraction` of the step's tokens, and the means."""
    means, covariances, wanted = _covariances(rows, options=options, reduce=reduce)
    _, candidates = _total(covariances[(covariances > options["low"]) & (covariances < options["high"])], reduce=reduce)
    return means | {"pick_probability": min(1.0, wanted / candidates) if candidates else 0.0}


def positive_scale(rows: Sequence[TokenColumns], *, options: Mapping[str, float], reduce: Reduce) -> dict[str, float]:
    """Trained tokens over trained tokens of correct sequences; 0 where none is correct."""
    of_correct = [row.required("correct")[row.sequence_ids[row.loss_mask]] for row in rows]
    correct, num_tokens = _total(_joined(of_correct), reduce=reduce)
    return {"positive_scale": num_tokens / correct if correct else 0.0}


_MEASURES = {
    measure.__name__: measure for measure in (m2po_threshold, entropy_threshold, covariance_threshold, pick_probability, positive_scale)
}


def _covariances(rows: Sequence[TokenColumns], *, options: Mapping[str, float], reduce: Reduce) -> tuple[dict[str, float], Tensor, int]:
    """The step's mean advantage and log-probability, this rank's covariances, and how many tokens `fraction` of the step is."""
    advantage_sum, num_tokens = _total(_joined([row.advantages[row.loss_mask] for row in rows]), reduce=reduce)
    logprob_sum, _ = _total(_joined([row.required("old_logprobs")[row.loss_mask] for row in rows]), reduce=reduce)
    means = {"mean_advantage": advantage_sum / max(num_tokens, 1), "mean_logprob": logprob_sum / max(num_tokens, 1)}
    covariances = _joined([covariance(row, statistics=StepStatistics(**means))[row.loss_mask] for row in rows])
    return means, covariances, max(1, int(options["fraction"] * num_tokens))


def _reached_by(values: Tensor, *, wanted: int, reduce: Reduce) -> float:
    """The largest threshold that at least `wanted` values of all ranks reach."""
    return _largest(lambda threshold: _total(values[values >= threshold], reduce=reduce)[1] >= wanted)


def _mean_weight(rows: Sequence[TokenColumns], *, method: Method, reduce: Reduce) -> float:
    """Mean weight of the step's tokens, or of its sequences where one weight is a whole sequence's; 1 where it is as good as 0."""
    by_sequence = spec_of("weight", method.weight.name).level == "sequence"
    found: list[Tensor] = []
    for row in rows:
        terms = terms_of(row, proximal=method.proximal)
        weights = importance_weights(terms, rule=method.weight).detach()
        is_there = terms.sequences.sum(torch.ones_like(weights)) > 0
        found.append(terms.sequences.mean(weights)[is_there] if by_sequence else weights[row.loss_mask])
    total, count = _total(torch.cat(found) if found else torch.zeros(0), reduce=reduce)
    mean = total / count if count else 0.0
    return mean if mean > LEAST_MEAN_WEIGHT else 1.0


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat([part.detach().float() for part in parts]) if parts else torch.zeros(0)


def _total(values: Tensor, *, reduce: Reduce) -> tuple[float, float]:
    """Sum and count over all ranks."""
    here = torch.tensor([float(values.double().sum()), float(len(values))], dtype=torch.float64)
    total, count = reduce(here).tolist()
    return total, count


def _largest(holds: Callable[[float], bool]) -> float:
    """Largest finite float32 for which `holds`, which is true up to some value and false above; -inf where it never holds.

    31 bisections of [0, 2^31) or of the negative patterns: every rank asks equally often.
    """
    negative = not holds(0.0)
    low, high = 0, 0x7F7FFFFF + 1
    while high - low > 1:
        middle = (low + high) // 2
        value = _from_bits(middle, negative=negative)
        if holds(value) != negative:
            low = middle
        else:
            high = middle
    if not negative:
        return _from_bits(low, negative=False)
    return _from_bits(high, negative=True) if high <= 0x7F7FFFFF else -torch.inf


def _from_bits(bits: int, *, negative: bool) -> float:
    value = float(torch.tensor(bits, dtype=torch.int32).view(torch.float32))
    return -value if negative else value
