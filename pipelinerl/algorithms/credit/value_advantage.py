"""Advantages per token from a critic's values, and the returns the critic itself is trained towards.

Each rule is a pair of functions of one group: `gae` gives N arrays [P] of advantages, `gae_returns` as many of returns, G = A + V. Rewards
are those of `token_advantage.token_rewards`: the outcome at the last trained token, a KL penalty on each where `kl_coef` is not 0.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pipelinerl.algorithms.credit import token_advantage
from pipelinerl.algorithms.credit.advantage import Float64, Int64, Mask, ScoredGroup
from pipelinerl.algorithms.credit.token_advantage import spread, token_rewards

_Row = tuple[Float64, Float64, Mask]
"""Rewards, values and mask of one sibling, each [P]."""


def gae(group: ScoredGroup, *, gamma: float, lam: float, kl_coef: float) -> list[Float64]:
    """Generalised advantage estimates (arXiv:1506.02438)."""
    return [token_advantage.gae(r, values=v, trains=trains, gamma=gamma, lam=lam) for r, v, trains in _rows(group, kl_coef=kl_coef)]


def gae_returns(group: ScoredGroup, *, gamma: float, lam: float, kl_coef: float) -> list[Float64]:
    """A + V of the same lambda."""
    pairs = zip(gae(group, gamma=gamma, lam=lam, kl_coef=kl_coef), group.required("values"), strict=True)
    return [advantages + values for advantages, values in pairs]


def vapo_gae(group: ScoredGroup, *, gamma: float, alpha: float, kl_coef: float) -> list[Float64]:
    """GAE with a lambda that grows with the length of the sequence (VAPO, arXiv:2504.05118)."""
    return [
        token_advantage.vapo_gae(r, values=v, trains=trains, gamma=gamma, alpha=alpha)[0] for r, v, trains in _rows(group, kl_coef=kl_coef)
    ]


def vapo_returns(group: ScoredGroup, *, gamma: float, alpha: float, kl_coef: float) -> list[Float64]:
    """Returns with lambda 1: the critic learns from the outcome itself."""
    return [
        token_advantage.vapo_gae(r, values=v, trains=trains, gamma=gamma, alpha=alpha)[1] for r, v, trains in _rows(group, kl_coef=kl_coef)
    ]


def turn_gae(group: ScoredGroup, *, gamma: float, lam: float, kl_coef: float) -> list[Float64]:
    """GAE from turn to turn; a turn's reward is the sum over its tokens, its value that of its first trained one (AReaL)."""
    credits = []
    for row, ends in zip(_rows(group, kl_coef=kl_coef), group.required("turns"), strict=True):
        rewards, values = _per_turn(row, ends=ends)
        credits.append(token_advantage.turn_gae(rewards, values=values, ends=ends, trains=row[2], gamma=gamma, lam=lam))
    return credits


def turn_returns(group: ScoredGroup, *, gamma: float, lam: float, kl_coef: float) -> list[Float64]:
    """The return of a token's turn."""
    advantages = turn_gae(group, gamma=gamma, lam=lam, kl_coef=kl_coef)
    turns = zip(advantages, _rows(group, kl_coef=kl_coef), group.required("turns"), strict=True)
    return [a + spread(_per_turn(row, ends=ends)[1], ends=ends, num_positions=len(a)) for a, row, ends in turns]


RETURNS: dict[str, Callable[..., list[Float64]]] = {"gae": gae_returns, "vapo_gae": vapo_returns, "turn_gae": turn_returns}
"""By the name of the advantage rule."""


def _rows(group: ScoredGroup, *, kl_coef: float) -> list[_Row]:
    return list(zip(token_rewards(group, kl_coef=kl_coef), group.required("values"), group.masks(), strict=True))


def _per_turn(row: _Row, *, ends: Int64) -> tuple[Float64, Float64]:
    """([turns] rewards, [turns] values). A turn without a trained token has neither."""
    rewards, values, trains = row
    turn_of = np.searchsorted(ends, np.arange(len(trains)), side="left")
    sums, firsts = np.zeros(len(ends)), np.zeros(len(ends))
    np.add.at(sums, turn_of[trains], rewards[trains])
    places = np.flatnonzero(trains)[::-1]  # backwards, so that the first of a turn is written last
    firsts[turn_of[places]] = values[places]
    return sums, firsts
