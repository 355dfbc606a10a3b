"""The losses that a training loop outside of this program asks for by name: raw sums over the data it sends, divided by nothing.

The formulas are those of the objectives, wherever they are the same (`objective`); the names and options are Tinker's. The ratio r is of
the policy as it is now over `logprobs`, what the client says the tokens were sampled with; its logarithm is clamped to +-`LOG_LIMIT`. A
client that computes its own loss asks twice: for log-probabilities, and for `cross_entropy` with minus its gradient as the weights.

Legend: `K` positions with a wanted log-probability, `N` data.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pipelinerl.algorithms.loss.columns import Segments, Terms, TokenColumns, log_difference
from pipelinerl.algorithms.loss.objective import Loss, cispo, clip, dro, gspo
from pipelinerl.errors import DataError

CLIP_LOW, CLIP_HIGH = "clip_low_threshold", "clip_high_threshold"
MASK = "sequence_ratio_mask"


@dataclass(frozen=True, slots=True, kw_only=True)
class ClientLoss:
    """One loss: its formula and what it reads."""

    compute: Callable[[Terms, Mapping[str, float | Tensor]], Tensor]
    """Returns [K], to be added up."""
    columns: tuple[str, ...]
    """Columns that every datum must have."""
    options: Mapping[str, float]
    """Options with their defaults."""
    formula: str


def client_loss(
    name: str, *, logprobs: Tensor, columns: Mapping[str, Tensor], sequence_ids: Tensor, num_sequences: int, options: Mapping[str, float]
) -> Tensor:
    """Return the raw loss sum, a scalar with gradient.

    `logprobs` [K] float, with gradient; `columns` [K] float32 each; `sequence_ids` [K] int64, the datum of each. Raises `DataError` as
    `check` does.
    """
    loss = check(name, columns=columns, options=options)
    terms = _terms(logprobs, columns=columns, sequence_ids=sequence_ids, num_sequences=num_sequences)
    own = {name: columns[name] for name in (CLIP_LOW, CLIP_HIGH) if name in columns}  # thresholds of each token
    return loss.compute(terms, {**loss.options, **options, **own}).sum()


def check(name: str, *, columns: Mapping[str, object], options: Mapping[str, float]) -> ClientLoss:
    """Return the loss of a name. Raises `DataError` for one that is not known, or lacks a column, or gets an option it does not read."""
    loss = LOSSES.get(name)
    if loss is None:
        why = "its formula is not published" if name == "stable_reinforce" else "it is not known here"
        raise DataError(f"loss {name!r}: {why}. Use one of {', '.join(LOSSES)}, or compute it in the client (forward_backward_custom)")
    if missing := [column for column in loss.columns if column not in columns]:
        raise DataError(f"loss {name} reads {', '.join(loss.columns)} of every datum, and got none of {', '.join(missing)}")
    if unknown := options.keys() - loss.options.keys():
        known = ", ".join(loss.options) or "none"
        raise DataError(f"loss {name} has no option {', '.join(sorted(unknown))}; it has {known}")
    return loss


def _terms(logprobs: Tensor, *, columns: Mapping[str, Tensor], sequence_ids: Tensor, num_sequences: int) -> Terms:
    nothing = torch.zeros_like(logprobs.detach())
    sampled_with = columns.get("logprobs", nothing)
    advantages = columns.get("advantages", columns.get("weights", nothing))
    everywhere = torch.ones_like(nothing, dtype=torch.bool)
    inside = everywhere if MASK not in columns else columns[MASK] > 0
    return Terms(
        columns=TokenColumns(
            logprobs=logprobs,
            behaviour_logprobs=sampled_with,
            advantages=advantages,
            loss_mask=everywhere,
            versions=torch.zeros_like(sequence_ids),
            sequence_ids=sequence_ids,
            trained_version=0,
        ),
        logprobs=logprobs,
        behaviour=sampled_with,
        proximal=sampled_with,
        advantages=advantages,
        loss_mask=everywhere,
        log_ratio=log_difference(logprobs, sampled_with),
        log_rho=log_difference(logprobs.detach(), sampled_with),
        sequences=Segments(sequence_ids, inside, max(num_sequences, 1)),
        statistics=None,
    )


def _bounds(options: Mapping[str, float | Tensor]) -> dict[str, Any]:
    """Thresholds of the ratio itself, as the widths around 1 that the objectives have; of each token, or one for all."""
    low, high = torch.broadcast_tensors(*(torch.as_tensor(options[name]) for name in (CLIP_LOW, CLIP_HIGH)))
    return {"clip_low": 1 - low, "clip_high": high - 1}


def _values(loss: Loss) -> Tensor:
    return loss.values


_NEAR = {CLIP_LOW: 0.8, CLIP_HIGH: 1.2}
LOSSES: Mapping[str, ClientLoss] = {
    "cross_entropy": ClientLoss(
        compute=lambda terms, options: -terms.advantages * terms.logprobs,
        columns=("weights",),
        options={},
        formula="-w log pi",
    ),
    "importance_sampling": ClientLoss(
        compute=lambda terms, options: -terms.ratio * terms.advantages,
        columns=("logprobs", "advantages"),
        options={},
        formula="-r A",
    ),
    "ppo": ClientLoss(
        compute=lambda terms, options: _values(clip(terms, **_bounds(options))),
        columns=("logprobs", "advantages"),
        options=_NEAR,
        formula="-min(r A, clip(r, low, high) A)",
    ),
    "cispo": ClientLoss(
        compute=lambda terms, options: _values(cispo(terms, **_bounds(options))),
        columns=("logprobs", "advantages"),
        options=_NEAR,
        formula="-sg[clip(r, low, high)] A log pi",
    ),
    "dro": ClientLoss(
        compute=lambda terms, options: _values(dro(terms, beta=float(options["beta"]))),
        columns=("logprobs", "advantages"),
        options={"beta": 0.05},
        formula="-(A log pi - beta/2 (log r)^2)",
    ),
    "gspo": ClientLoss(
        compute=lambda terms, options: _values(gspo(terms, **_bounds(options))),
        columns=("logprobs", "advantages", MASK),
        options={CLIP_LOW: 1 - 3e-4, CLIP_HIGH: 1 + 4e-4},
        formula="-min(s A, clip(s, low, high) A), s = exp of the mean of log r where sequence_ratio_mask is set, per datum",
    ),
}
"""By Tinker's names."""
