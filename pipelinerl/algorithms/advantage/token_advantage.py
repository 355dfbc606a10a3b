"""Advantages per token from values and token rewards: GAE and its forms, discounted returns.

Pure numpy over one sequence of `P` response positions. Values and running sums are CARRIED through positions that do not train (tool
output), not reset there: the agent's next decision is the next trained token, whatever lies between.
"""

from __future__ import annotations

import numpy as np

from pipelinerl.algorithms.advantage.outcome import Float64, Int64, Mask, ScoredGroup
from pipelinerl.algorithms.declare import advantage
from pipelinerl.algorithms.method import Need


def gae(rewards: Float64, *, values: Float64, loss_mask: Mask, gamma: float, lam: float) -> Float64:
    """[P] generalised advantage estimates (arXiv:1506.02438); 0 where the position does not train. The value after the end is 0.

    Rewards at positions that do not train are not read. Returns for the critic are advantages + values.
    """
    advantages = np.zeros_like(values)
    places = np.flatnonzero(loss_mask)
    steps = zip(rewards[places].tolist()[::-1], values[places].tolist()[::-1], strict=True)  # plain numbers: several times as fast
    next_value = running = 0.0
    backwards = []
    for reward, value in steps:
        running = reward + gamma * next_value - value + gamma * lam * running
        next_value = value
        backwards.append(running)
    advantages[places] = backwards[::-1]
    return advantages


def vapo_gae(rewards: Float64, *, values: Float64, loss_mask: Mask, gamma: float, alpha: float) -> tuple[Float64, Float64]:
    """Advantages and returns, each [P], by VAPO (arXiv:2504.05118): lam = 1 - 1/(alpha L) for the policy, 1 for the critic.

    Longer answers get a lam nearer 1, so that a reward at the end still reaches the first tokens; lam is at least 0.
    """
    lam = max(0.0, 1.0 - 1.0 / (alpha * max(int(loss_mask.sum()), 1)))
    returns = np.where(loss_mask, gae(rewards, values=values, loss_mask=loss_mask, gamma=gamma, lam=1.0) + values, 0.0)
    return gae(rewards, values=values, loss_mask=loss_mask, gamma=gamma, lam=lam), returns


def turn_gae(rewards: Float64, *, values: Float64, ends: Int64, loss_mask: Mask, gamma: float, lam: float) -> Float64:
    """[P] GAE over turns (AReaL): turn k has rewards[k] and values[k], both [K]; its trained tokens all get the turn's advantage."""
    per_turn = gae(rewards, values=values, loss_mask=np.ones(len(values), dtype=bool), gamma=gamma, lam=lam)
    return np.where(loss_mask, spread(per_turn, ends=ends, num_positions=len(loss_mask)), 0.0)


def discounted_returns(rewards: Float64, *, loss_mask: Mask, gamma: float) -> Float64:
    """[P] sum_{k>=t} gamma^(k-t) r_k over trained positions; the discount counts trained tokens only."""
    returns = np.zeros_like(rewards)
    running = 0.0
    for t in range(len(rewards) - 1, -1, -1):
        if loss_mask[t]:
            running = float(rewards[t]) + gamma * running
            returns[t] = running
    return returns


def spread(per_step: Float64, *, ends: Int64, num_positions: int) -> Float64:
    """[P] every position takes the number of the step it lies in; positions after the last end belong to no step and get 0."""
    steps = np.searchsorted(ends, np.arange(num_positions), side="left")
    return np.append(per_step, 0.0)[steps]


def token_rewards(group: ScoredGroup, *, kl_coef: float) -> list[Float64]:
    """N arrays [P]: -kl_coef (log mu - log ref) at every position, and the outcome at the last trained one."""
    rows = []
    for sibling, loss_mask in enumerate(group.masks()):
        rewards = -kl_coef * group.required("token_kl")[sibling] if kl_coef else np.zeros(len(loss_mask))
        sampled = np.flatnonzero(loss_mask)
        if len(sampled):
            rewards[sampled[-1]] += group.rewards[sibling]
        rows.append(rewards)
    return rows


@advantage(source="REINFORCE++ arXiv:2501.03262", needs_if={"kl_coef": Need.TOKEN_KL})
def reinforce_pp(group: ScoredGroup, *, gamma: float = 1.0, kl_coef: float = 0.001) -> list[Float64]:
    """A_t = sum_{k>=t} gamma^(k-t) r_k; r = -kl_coef (log mu - log ref), + R at the last token"""
    rewards = token_rewards(group, kl_coef=kl_coef)
    return [discounted_returns(row, loss_mask=loss_mask, gamma=gamma) for row, loss_mask in zip(rewards, group.masks(), strict=True)]
