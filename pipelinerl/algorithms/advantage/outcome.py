"""Advantages of one prompt group: from the rewards of scored siblings to one number per sequence.

A `ScoredGroup` holds only siblings whose score is ok. A sibling that failed is absent, never 0.0; one whose tokens are withheld or
rejected later is present, because its reward still belongs to the baseline. Estimators that compare siblings give zeros for a group of
one: without a sibling there is no baseline, and the raw reward is not an advantage.

Legend: `R` reward, mean_g and std_g over the scored siblings of one prompt, L trained tokens, `N` scored siblings, `P` response positions
of one sibling (tool tokens included), `K` reward components or steps.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from pipelinerl.algorithms.declare import advantage
from pipelinerl.algorithms.method import Need

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StepScores:
    """Scores of one sibling's steps, from a process reward model or from an environment turn by turn."""

    ends: Int64
    """[K] position of the last token of each step, rising, in 0..P-1."""
    scores: Float64
    """[K] score after each step."""
    anchors: Int64 | None = None
    """[K] identity of the state the step started from; equal for equal states. None where the environment names no states."""
    parents: Int64 | None = None
    """[K] step that each continues, an earlier one, -1 for a first one; None where each continues the one before it."""

    def __post_init__(self) -> None:
        if {len(self.ends)} != {len(column) for column in (self.scores, self.anchors, self.parents) if column is not None}:
            raise ValueError(f"StepScores: got {len(self.ends)} ends and {len(self.scores)} scores; expected one length for every column")
        if self.parents is not None and ((self.parents < -1) | (self.parents >= np.arange(len(self.parents)))).any():
            raise ValueError(f"StepScores: parents {self.parents.tolist()} must be earlier steps, or -1")
        if len(self.ends) and (self.ends[0] < 0 or (np.diff(self.ends) <= 0).any()):
            raise ValueError(f"StepScores: ends {self.ends.tolist()} must rise from 0")
        if not np.isfinite(self.scores).all():
            raise ValueError(f"StepScores: scores {self.scores.tolist()} must be finite; leave a step without a score out")


_OF_THE_GROUP = ("component_weights", "greedy_reward")
"""All other columns have one entry for each sibling."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ScoredGroup:
    """The scored siblings of one prompt. `None` means that the run has no such thing."""

    rewards: Float64
    """[N]."""
    lengths: Int64
    """[N] trained tokens; 0 for an empty completion."""
    components: Float64 | None = None
    """[N, K] reward of each component apart."""
    component_weights: Float64 | None = None
    """[K]; None weighs all components 1."""
    greedy_reward: float | None = None
    """Reward of a greedy rollout of the same prompt."""
    correct: Mask | None = None
    """[N] verified correctness."""
    roles: tuple[str, ...] | None = None
    """[N] agent role that wrote each sibling."""
    predictions: Float64 | None = None
    """[N] predicted reward of each started row under an unbiased early stop."""
    sample_weights: Float64 | None = None
    """[N] 1 for a row never flagged, 1/eps for a flagged survivor, 0 for a stopped row, whose reward is then not read."""
    loss_mask: tuple[Mask, ...] | None = None
    """N arrays [P], true where the policy sampled; None where all of `lengths` positions did."""
    token_kl: tuple[Float64, ...] | None = None
    """N arrays [P], log mu - log ref per token."""
    steps: tuple[StepScores, ...] | None = None
    """N."""
    values: tuple[Float64, ...] | None = None
    """N arrays [P], a critic's value of the state before each token; in the trainer only."""
    process_rewards: tuple[Float64, ...] | None = None
    """N arrays [P], of an implicit process reward model, over their largest return of the step; in the trainer only."""
    energies: tuple[Float64, ...] | None = None
    """N arrays [P], squared norm of the score of each token, see `optimal_baseline`; in the trainer only."""
    turns: tuple[Int64, ...] | None = None
    """N arrays, the last position of each turn; in the trainer only."""

    def __post_init__(self) -> None:
        if not np.isfinite(self.rewards).all():
            raise ValueError(f"ScoredGroup: rewards {self.rewards.tolist()} must be finite; a sibling without a score is left out")
        for name in (field.name for field in dataclasses.fields(self) if field.name not in _OF_THE_GROUP):
            column = getattr(self, name)
            if column is not None and len(column) != len(self.rewards):
                raise ValueError(f"ScoredGroup: {name} has {len(column)} entries, expected {len(self.rewards)}, one per reward")

    def required(self, name: str) -> Any:
        """The optional column `name`; raises `ValueError` where the run has none, which `resolve` rules out for a checked method."""
        value = getattr(self, name)
        if value is None:
            raise ValueError(f"ScoredGroup: this advantage rule reads {name}, and the group has none; fill it in where groups are closed")
        return value

    def masks(self) -> tuple[Mask, ...]:
        """N arrays [P], true where the policy sampled the token."""
        return self.loss_mask if self.loss_mask is not None else tuple(np.ones(int(length), dtype=bool) for length in self.lengths)


def centred(rewards: Float64) -> Float64:
    """R - mean over the group; exactly zero where all are equal."""
    return np.zeros_like(rewards) if len(rewards) < 2 or np.ptp(rewards) == 0 else rewards - rewards.mean()


def normalised(rewards: Float64, *, eps: float, ddof: int) -> Float64:
    """(R - mean) / (std + eps) over the group. `ddof` 1 is torch's default; 0 makes advantages sqrt(n/(n-1)) larger."""
    return centred(rewards) if len(rewards) < 2 else centred(rewards) / (rewards.std(ddof=ddof) + eps)


@advantage(name="none")
def zero(group: ScoredGroup) -> Float64:
    """A = 0: the objective brings its own signal"""
    return np.zeros_like(group.rewards)


@advantage(source="DeepSeekMath arXiv:2402.03300", min_group=2)
def grpo(group: ScoredGroup, *, eps: float = 1e-6, ddof: int = 1) -> Float64:
    """(R - mean_g) / (std_g + eps)"""
    return normalised(group.rewards, eps=eps, ddof=ddof)


@advantage(source="Dr.GRPO arXiv:2503.20783", min_group=2)
def dr_grpo(group: ScoredGroup) -> Float64:
    """R - mean_g

    Nothing is divided, so easy and hard prompts are not amplified.
    """
    return centred(group.rewards)


@advantage(source="arXiv:2402.14740; PipelineRL divide_advantage_by_std", min_group=2)
def rloo(group: ScoredGroup, *, divide_by_std: bool = False, eps: float = 1e-6, ddof: int = 1) -> Float64:
    """R - mean of the other siblings [/ (std_g + eps)]"""
    n = len(group.rewards)
    advantages = centred(group.rewards) * (n / max(n - 1, 1))
    return advantages / (group.rewards.std(ddof=ddof) + eps) if divide_by_std and n > 1 else advantages


@advantage(source="ReMax arXiv:2310.10505", needs={Need.GREEDY_REWARD})
def remax(group: ScoredGroup) -> Float64:
    """R - R(greedy)"""
    return group.rewards - float(group.required("greedy_reward"))


@advantage(source="OPO arXiv:2505.23585", min_group=2)
def opo(group: ScoredGroup) -> Float64:
    """R - sum(L R) / sum(L)

    Zeros where no sibling has a token.
    """
    total = int(group.lengths.sum())
    if total == 0 or len(group.rewards) < 2:
        return np.zeros_like(group.rewards)
    return group.rewards - float(group.lengths @ group.rewards) / total


@advantage(source="GDPO, NeMo-RL", needs={Need.COMPONENTS}, min_group=2)
def gdpo(group: ScoredGroup, *, eps: float = 1e-6, ddof: int = 1) -> Float64:
    """sum_k weight_k (R_k - mean_g) / (std_g + eps)

    The whitening over the step is a batch rule.
    """
    components: Float64 = group.required("components")
    weights = np.ones(components.shape[1]) if group.component_weights is None else group.component_weights
    columns = [weights[k] * normalised(components[:, k], eps=eps, ddof=ddof) for k in range(components.shape[1])]
    return sum(columns, start=np.zeros_like(group.rewards))


@advantage(source="verl grpo_passk, which also divides by the group's std unless norm_adv_by_std_in_grpo is false", min_group=2)
def passk(group: ScoredGroup) -> Float64:
    """best sibling: R_max - R_second; the others 0

    A tie gives zeros.
    """
    advantages = np.zeros_like(group.rewards)
    if len(group.rewards) > 1:
        order = np.argsort(group.rewards, kind="stable")
        advantages[order[-1]] = group.rewards[order[-1]] - group.rewards[order[-2]]
    return advantages


@advantage(source="prime-rl max_rl; eps as for grpo", min_group=2, divides_by_mean=True)
def maxrl(group: ScoredGroup, *, eps: float = 1e-6) -> Float64:
    """(R - mean_g) / (mean_g + eps), R >= 0

    All-zero rewards give zeros. Raises `ValueError` for a negative reward: where the mean is below 0, every sign would turn.
    """
    if len(group.rewards) and group.rewards.min() < 0:
        raise ValueError(
            f"advantage maxrl: got a reward of {group.rewards.min():g}, expected none below 0; choose dr_grpo, or score from 0 up"
        )
    return centred(group.rewards) / (group.rewards.mean() + eps)
