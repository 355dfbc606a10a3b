"""This rule cuts the tail of over-sampled groups without bias: once so many siblings have ended, each of the others goes on by a coin.

Cutting by arrival, which trains on the first `cut_after` of a group and drops the rest, prefers short answers: P(trained | length) falls
with length, and the estimate of every mean over rollouts is that of a policy that answers shorter. Here each sibling that still runs goes
on with probability p (`cut_keep_probability`) and then weighs 1/p, or stops and weighs 0 (`rules.early_stop`). The estimator is
Horvitz and Thompson's (1952): the sum over a group of weight times contribution, divided by all siblings that were begun. For rollouts
as they would be if none were stopped, E[weight | all of them] = 1 for each of them, whatever decides the moment of the cut, since

1. the coins are hashes of seed, rollout and attempt: nothing that was sampled is known to them;
2. all coins of a group are tossed at one moment, so none of them decides who else is asked.

Given the rollouts, weights of siblings are independent, so leave-one-out baselines stay unbiased, too (`rloo_early_stop`), whatever is
predicted of those that stop; here it is the mean reward so far. The price is variance: the tail's share of it grows by 1/p.
"""

from __future__ import annotations

from collections.abc import Mapping

from orchestrator.rules.early_stop import coin
from pipelinerl.config import Config
from pipelinerl.messages import EarlyStopDecision


class GroupCut:
    """The siblings that have ended, by group, and the coins."""

    def __init__(
        self, *, cut_after: int, keep_probability: float, group_size: int, seed: int, sizes: Mapping[int, int] | None = None
    ) -> None:
        """`sizes` has the groups of another size than `group_size`; it may change meanwhile."""
        self._cut_after = cut_after
        self._keep_probability = keep_probability
        self._group_size = group_size
        self._sizes = {} if sizes is None else sizes
        self._seed = seed
        self._ended: dict[int, set[int]] = {}
        """Siblings that have ended, of groups that are not whole."""
        self._reward = 0.0
        self._num_rewards = 0
        self.decisions: dict[tuple[str, int], EarlyStopDecision] = {}
        """Of rollouts that are not scored, by rollout and attempt."""
        self.num_decided = 0
        self.num_stopped = 0

    def ended(self, group_id: int, sibling: int) -> tuple[int, ...]:
        """Note that a sibling has ended; return those about whom to decide now: all others, at one moment, once for each group."""
        ended, size = self._ended.setdefault(group_id, set()), self._sizes.get(group_id, self._group_size)
        ended.add(sibling)
        if len(ended) == size:
            del self._ended[group_id]
        is_now = len(ended) == self._cut_after
        return tuple(other for other in range(size) if other not in ended) if is_now else ()

    def decide(self, rollout_id: str, attempt: int) -> EarlyStopDecision:
        """Toss the coin of a rollout that is still being written."""
        stops = coin(self._seed, rollout_id, attempt) >= self._keep_probability
        self.num_decided += 1
        self.num_stopped += stops
        predicted = self._reward / max(1, self._num_rewards)
        decision = EarlyStopDecision(step=0, predicted=predicted, probability=self._keep_probability, stops=stops)
        self.decisions[rollout_id, attempt] = decision
        return decision

    def decided(self, rollout_id: str, attempt: int) -> EarlyStopDecision | None:
        """Take the decision about an attempt that is being scored; None where there was none."""
        return self.decisions.pop((rollout_id, attempt), None)

    def scored(self, reward: float) -> None:
        """Note a reward: their mean is what is predicted of a rollout that stops."""
        self._reward += reward
        self._num_rewards += 1

    def gauges(self) -> dict[str, float]:
        """Return what the rule has done so far."""
        return {"num_cut_decided": self.num_decided, "num_cut_stopped": self.num_stopped, "cut_keep_probability": self._keep_probability}


def group_cut_of(config: Config, *, num_siblings: int, sizes: Mapping[int, int] | None = None) -> GroupCut | None:
    """Return the cut that a config asks for; None where every rollout is written to its end."""
    rollout = config.rollout
    if rollout.cut_after is None:
        return None
    return GroupCut(
        cut_after=rollout.cut_after,
        keep_probability=rollout.cut_keep_probability,
        group_size=num_siblings,
        sizes=sizes,
        seed=config.run.seed,
    )
