"""Advantages per token from a critic's values, and the returns the critic itself is trained towards.

Each rule is a pair of functions of one group: `gae` gives N arrays [P] of advantages, `gae_returns` as many of returns, G = A + V. Rewards
are those of `token_advantage.token_rewards`: the outcome at the last trained token, a KL penalty on each where `kl_coef` is not 0.
"""

from __future__ import annotations

import numpy as np

from pipelinerl.algorithms.advantage import token_advantage
from pipelinerl.algorithms.advantage.outcome import Float64, Int64, Mask, ScoredGroup
from pipelinerl.algorithms.advantage.token_advantage import spread, token_rewards
from pipelinerl.algorithms.declare import advantage
from pipelinerl.algorithms.method import Need

_Row = tuple[Float64, Float64, Mask]
"""Rewards, values and mask of one sibling, each [P]."""


@advantage(source="arXiv:1506.02438", needs={Need.CRITIC}, needs_if={"kl_coef": Need.TOKEN_KL}, returns="gae_returns")
def gae(group: ScoredGroup, *, gamma: float = 1.0, lam: float = 0.95, kl_coef: float = 0.0) -> list[Float64]:
    """A_t = delta_t + gamma lam A_{t+1}, carried through masked tokens"""
    return [
        token_advantage.gae(r, values=v, loss_mask=loss_mask, gamma=gamma, lam=lam) for r, v, loss_mask in _rows(group, kl_coef=kl_coef)
    ]


def gae_returns(group: ScoredGroup, *, gamma: float, lam: float, kl_coef: float) -> list[Float64]:
    """A + V of the same lambda."""
    pairs = zip(gae(group, gamma=gamma, lam=lam, kl_coef=kl_coef), group.required("values"), strict=True)
    return [advantages + values for advantages, values in pairs]


@advantage(source="VAPO arXiv:2504.05118", needs={Need.CRITIC}, needs_if={"kl_coef": Need.TOKEN_KL}, returns="vapo_returns")
def vapo_gae(group: ScoredGroup, *, gamma: float = 1.0, alpha: float = 0.05, kl_coef: float = 0.0) -> list[Float64]:
    """GAE with lam = 1 - 1/(alpha L); returns with lam 1"""
    return [
        token_advantage.vapo_gae(r, values=v, loss_mask=loss_mask, gamma=gamma, alpha=alpha)[0]
        for r, v, loss_mask in _rows(group, kl_coef=kl_coef)
    ]


def vapo_returns(group: ScoredGroup, *, gamma: float, alpha: float, kl_coef: float) -> list[Float64]:
    """Returns with lambda 1: the critic learns from the outcome itself."""
    return [
        token_advantage.vapo_gae(r, values=v, loss_mask=loss_mask, gamma=gamma, alpha=alpha)[1]
        for r, v, loss_mask in _rows(group, kl_coef=kl_coef)
    ]


@advantage(source="AReaL", needs={Need.CRITIC}, needs_if={"kl_coef": Need.TOKEN_KL}, returns="turn_returns")
def turn_gae(group: ScoredGroup, *, gamma: float = 1.0, lam: float = 0.95, kl_coef: float = 0.0) -> list[Float64]:
    """GAE over turn boundaries, constant inside a turn, whose value is that of its first token

    A turn's reward is the sum over its tokens; its first token is its first trained one.
    """
    credits = []
    for row, ends in zip(_rows(group, kl_coef=kl_coef), group.required("turns"), strict=True):
        rewards, values = _per_turn(row, ends=ends)
        credits.append(token_advantage.turn_gae(rewards, values=values, ends=ends, loss_mask=row[2], gamma=gamma, lam=lam))
    return credits


def turn_returns(group: ScoredGroup, *, gamma: float, lam: float, kl_coef: float) -> list[Float64]:
    """The return of a token's turn."""
    advantages = turn_gae(group, gamma=gamma, lam=lam, kl_coef=kl_coef)
    turns = zip(advantages, _rows(group, kl_coef=kl_coef), group.required("turns"), strict=True)
    return [a + spread(_per_turn(row, ends=ends)[1], ends=ends, num_positions=len(a)) for a, row, ends in turns]


def _rows(group: ScoredGroup, *, kl_coef: float) -> list[_Row]:
    return list(zip(token_rewards(group, kl_coef=kl_coef), group.required("values"), group.masks(), strict=True))


def _per_turn(row: _Row, *, ends: Int64) -> tuple[Float64, Float64]:
    """([turns] rewards, [turns] values). A turn without a trained token has neither."""
    rewards, values, loss_mask = row
    turn_of = np.searchsorted(ends, np.arange(len(loss_mask)), side="left")
    sums, firsts = np.zeros(len(ends)), np.zeros(len(ends))
    np.add.at(sums, turn_of[loss_mask], rewards[loss_mask])
    places = np.flatnonzero(loss_mask)[::-1]  # backwards, so that the first of a turn is written last
    firsts[turn_of[places]] = values[places]
    return sums, firsts
