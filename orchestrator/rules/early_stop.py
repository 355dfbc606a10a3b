"""This rule stops a rollout that a process reward model finds hopeless, without bias: Russian roulette. It has no loop and no clock.

When the scores of a prefix flag a rollout, a random draw decides: with probability p (`keep_probability`) the rollout goes on and weighs
1/p, else it stops and weighs 0. Where three things hold, E[weight * g] = E[g] for any g of the finished rollout, so every estimate that
weighs by it is unbiased:

1. the flag depends on the prefix alone, never on what follows (`decide` is given nothing else);
2. the draw is independent of the sampling: it is a hash of seed, rollout and attempt, so asking again gives the same answer;
3. baselines leave the rollout itself out, and sums are divided by all rollouts that were started (`algorithms.advantage.early_stop`).

A flag that arrives once the rollout is complete does not count: nothing would be saved. Whether it arrives in time depends on neither the
draw nor the weight.

The price is variance: (1/p - 1) * P(flag) * E[g^2 | flag]. The flagged rollouts that go on show what stopping costs: `Audit` estimates
from them how many flagged rollouts would have been right, and tells when that is too many to go on stopping.
"""

from __future__ import annotations

import dataclasses
import hashlib
import math
from collections.abc import Sequence

from pipelinerl.messages import EarlyStopDecision

MIN_CONTINUED = 20
"""The audit gives no verdict about fewer flagged rollouts that went on than this. A smaller value would end the stopping by chance."""
_Z = 1.96
"""The normal quantile of the 95 % interval that the audit uses."""


class EarlyStop:
    """The rule decides about rollouts, one step score at a time."""

    def __init__(self, *, threshold: float, keep_probability: float, min_steps: int, seed: int) -> None:
        if not 0.0 < keep_probability <= 1.0:
            raise ValueError(f"keep_probability is {keep_probability}, expected above 0 (never unbiased there) and at most 1 (never stops)")
        self._threshold = threshold
        self._keep_probability = keep_probability
        self._min_steps = min_steps
        self._seed = seed

    def decide(self, rollout_id: str, attempt: int, scores: Sequence[float]) -> EarlyStopDecision | None:
        """Draw once, at the first step whose score is under the threshold; return None while no step of `scores` is."""
        flagged_at = next((k for k, score in enumerate(scores) if k + 1 >= self._min_steps and score < self._threshold), None)
        if flagged_at is None:
            return None
        stops = coin(self._seed, rollout_id, attempt) >= self._keep_probability
        return EarlyStopDecision(step=flagged_at, predicted=float(scores[flagged_at]), probability=self._keep_probability, stops=stops)


def coin(seed: int, rollout_id: str, attempt: int) -> float:
    """Return a number in [0, 1), equal for equal arguments."""
    digest = hashlib.blake2b(f"{seed}/{rollout_id}/{attempt}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "big") >> 11) / 2**53


@dataclasses.dataclass(slots=True, kw_only=True)
class Audit:
    """The record of flagged rollouts that went on, and of how many were right. The draw chose them, so they are a fair sample of all
    flagged.

    A run that goes on after its orchestrator ended counts anew.
    """

    max_false_stop_fraction: float
    """Stopping ends where more than this part of flagged rollouts would surely have been right."""
    correct_reward: float
    """A rollout with at least this reward was right."""
    num_continued: int = 0
    num_right: int = 0

    def saw(self, *, reward: float) -> None:
        """Note the reward of a flagged rollout that went on."""
        self.num_continued += 1
        self.num_right += reward >= self.correct_reward

    @property
    def right_fraction(self) -> float | None:
        """The estimate of P(right | flagged); None before the first flagged rollout that went on."""
        return self.num_right / self.num_continued if self.num_continued else None

    @property
    def allows_stopping(self) -> bool:
        """True unless the lower end of the 95 % interval (Wilson) of `right_fraction` is above the limit."""
        n = self.num_continued
        if n < MIN_CONTINUED:
            return True
        p, z2 = self.num_right / n, _Z * _Z
        lower = (p + z2 / (2 * n) - _Z * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
        return lower <= self.max_false_stop_fraction
