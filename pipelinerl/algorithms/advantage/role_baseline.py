"""Role-conditioned baselines: a moving mean of the reward of each agent role. The only estimator here with a memory."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from pipelinerl.algorithms.advantage.outcome import Float64, ScoredGroup
from pipelinerl.algorithms.declare import advantage
from pipelinerl.algorithms.method import Need


class RoleBaselines:
    """One exponential moving average per role; part of a run's state, so `state` goes into every snapshot.

    A baseline that is lost on resume restarts at 0 and gives every role the raw reward as advantage.
    """

    def __init__(self, *, decay: float, state: Mapping[str, float] | None = None) -> None:
        self._decay = decay
        self._means = dict(state or {})

    def advantages(self, group: ScoredGroup) -> Float64:
        """[N] reward minus the role's mean before this group, which keeps the baseline independent of the rewards it is taken from.

        Then each role's mean moves towards the mean reward it got in this group. A role seen for the first time starts at 0.
        """
        roles: tuple[str, ...] = group.required("roles")
        before = np.array([self._means.get(role, 0.0) for role in roles])
        for role in sorted(set(roles)):
            rewards = group.rewards[[written_by == role for written_by in roles]]
            self._means[role] = self._decay * self._means.get(role, 0.0) + (1 - self._decay) * float(rewards.mean())
        return group.rewards - before

    def state(self) -> dict[str, float]:
        """Mean by role, to be given to the next instance as `state`."""
        return dict(self._means)


@advantage(
    source="SPIRAL arXiv:2506.24119, prime-rl rae; the decay as SPIRAL's code, role_baseline_ema_gamma",
    needs={Need.ROLES},
    has_memory=True,
)
def rae(group: ScoredGroup, baselines: RoleBaselines | None, *, decay: float = 0.95) -> Float64:
    """R - b[role]; b <- decay b + (1 - decay) R

    Raises `ValueError` without `baselines`, which hold the decay.
    """
    if baselines is None:
        raise ValueError("advantage rae: got no baselines; keep one RoleBaselines per run, snapshot it, and pass it")
    return baselines.advantages(group)
