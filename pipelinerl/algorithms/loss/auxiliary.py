"""Further terms of the loss: `(terms, **options) -> [T]` with gradient, over all trained tokens, whatever masks reject."""

from __future__ import annotations

from torch import Tensor

from pipelinerl.algorithms.declare import auxiliary
from pipelinerl.algorithms.loss.columns import Terms, log_difference
from pipelinerl.algorithms.method import Need


@auxiliary(source="PipelineRL; target as Skywork-OR1 arXiv:2505.22312, TRL use_adaptive_entropy", needs={Need.ENTROPY})
def entropy_bonus(
    terms: Terms,
    *,
    coef: float,
    final: float = 0.0,
    fade_steps: int = 0,
    target: float = 0.0,
    delta: float = 0.005,
    min_coef: float = 0.0,
    max_coef: float = 1.0,
) -> Tensor:
    """- coef H; with a target, coef follows the entropy, and acts while it is at most the target

    The target is in nats per token; `controllers` follow it, by TRL's constants. Without it, `delta` and the bounds do nothing.
    """
    return -faded(coef, final=final, fade_steps=fade_steps, step=terms.columns.trained_version) * terms.column("entropy")


@auxiliary(source="prime-rl", reads_mu=True)
def squared_log_ratio(terms: Terms, *, tau: float = 1e-3) -> Tensor:
    """+ tau (log pi - log mu)^2, over all tokens"""
    return tau * log_difference(terms.logprobs, terms.behaviour).square()


@auxiliary(
    source="VAPO arXiv:2504.05118, coef its mu",
    needs={Need.CORRECT, Need.WHOLE_STEP},
    aggregations={"token-mean"},
    step_statistic="positive_scale",
)
def positive_nll(terms: Terms, *, coef: float = 0.1) -> Tensor:
    """+ coef mean NLL of the tokens of correct sequences"""
    correct = terms.sequences.spread(terms.columns.required("correct").to(terms.logprobs.dtype))
    return -coef * terms.known.positive_scale * correct * terms.logprobs


def faded(start: float, *, final: float, fade_steps: float, step: int) -> float:
    """A coefficient at a step: on a straight line from `start` to `final`, which it has from step `fade_steps` on; 0 steps: constant."""
    return start + min(1.0, step / fade_steps) * (final - start) if fade_steps else start
