"""PRIME (arXiv:2502.01456): dense rewards from an implicit process reward model phi, trained online from outcome labels.

Per token q = log phi - log ref. The reward of a token is beta q; the last token has none of it, and carries the outcome instead, once.
The loss of phi itself is `loss.critic.implicit_prm_loss`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipelinerl.algorithms.advantage.outcome import Float64, ScoredGroup
from pipelinerl.algorithms.advantage.step_scores import following_sum
from pipelinerl.algorithms.declare import advantage
from pipelinerl.algorithms.method import Need


def process_rewards(log_ratios: Sequence[Float64], *, beta: float) -> list[Float64]:
    """Process rewards of every sequence of a step [P]: beta q, 0 at the last token, over the largest |reverse cumulative sum| of the step.

    `log_ratios` are q over the trained tokens of each.
    """
    rewards = [beta * row * (np.arange(len(row)) < len(row) - 1) for row in log_ratios]
    scale = max((float(np.abs(following_sum(row)).max()) for row in rewards if len(row)), default=0.0)
    return [row / (scale + 1e-6) for row in rewards]


@advantage(source="PRIME arXiv:2502.01456", needs={Need.IMPLICIT_PRM, Need.CORRECT, Need.WHOLE_STEP}, min_group=2)
def prime(group: ScoredGroup, *, process_coef: float = 5.0, outcome_coef: float = 5.0) -> list[Float64]:
    """returns(process_coef RLOO(p) + outcome_coef RLOO(correct)), p = beta (log phi - log ref) / its largest |return|

    The outcome enters at the last token. The process baseline of a sequence is the mean over its siblings of their mean token reward, times
    n/(n-1) as for RLOO. Whitening over the step comes after. A group of one gives zeros.
    """
    rewards: tuple[Float64, ...] = group.required("process_rewards")
    correct = np.asarray(group.required("correct"), np.float64)
    n = len(rewards)
    if n < 2:
        return [np.zeros_like(row) for row in rewards]
    means = np.array([row.mean() if len(row) else 0.0 for row in rewards])
    outcome = (correct - correct.mean()) * n / (n - 1)
    result = []
    for sibling, row in enumerate(rewards):
        credit = process_coef * (row * n / (n - 1) - means.sum() / (n - 1))
        if len(credit):
            credit[-1] += outcome_coef * outcome[sibling]
        result.append(following_sum(credit))
    return result
