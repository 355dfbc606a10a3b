"""What differs from rollout to rollout: lengths, latencies and rewards, drawn by seed and by the number of the group.

A group's draws depend on the seed and its number alone, not on when it is admitted. So two simulations with other engines, other bounds or
other faults compare the same rollouts, and their difference is not chance.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

BLOCK = 256
"""Groups drawn together; more would draw for groups that are never admitted."""
Numbers = npt.NDArray[np.float64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Distribution:
    """A distribution, as a function of a standard normal number: so siblings can be drawn alike (a Gaussian copula)."""

    kind: Literal["fixed", "uniform", "exponential", "lognormal", "recorded"]
    mean: float = 0.0
    cv: float = 0.0
    """Standard deviation over mean, of a lognormal one."""
    low: float = 0.0
    high: float = 0.0
    """Ends of a uniform one."""
    recorded: tuple[float, ...] = ()
    """Values that were measured, in rising order: every number between two of them is as likely."""

    def at(self, normal: Numbers) -> Numbers:
        """Return the values that belong to standard normal numbers."""
        match self.kind:
            case "fixed":
                return np.full(normal.shape, self.mean)
            case "lognormal":
                sigma = math.sqrt(math.log1p(self.cv**2))
                return self.mean * np.exp(sigma * normal - sigma**2 / 2)
            case "uniform":
                return self.low + (self.high - self.low) * _uniform_of(normal)
            case "exponential":
                return -self.mean * np.log1p(-np.minimum(_uniform_of(normal), 1 - 1e-12))
            case "recorded":
                places = (np.arange(len(self.recorded)) + 0.5) / len(self.recorded)
                return np.interp(_uniform_of(normal), places, np.array(self.recorded))

    @property
    def average(self) -> float:
        """The mean of its values."""
        if self.kind == "uniform":
            return (self.low + self.high) / 2
        return float(np.mean(self.recorded)) if self.kind == "recorded" else self.mean


def fixed(value: float) -> Distribution:
    """The same value each time."""
    return Distribution(kind="fixed", mean=value)


def recorded(values: Sequence[float]) -> Distribution:
    """What was measured; at most 512 values are kept, evenly chosen by rank. Raises `ValueError` for none."""
    if not values:
        raise ValueError("a distribution of no values")
    ranked = np.sort(np.asarray(values, np.float64))
    if len(ranked) > 512:
        ranked = ranked[((np.arange(512) + 0.5) / 512 * len(ranked)).astype(int)]
    return Distribution(kind="recorded", recorded=tuple(ranked.tolist()))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GroupDraws:
    """What was drawn for one group, [S] for its siblings."""

    prompt_tokens: int
    lengths: Numbers
    """Tokens that each would write, before limits."""
    chances: Numbers
    """Uniform numbers, which decide about rewards."""
    success: float
    """Chance that a sibling is right that ends by itself."""
    truncated_success: float
    """Chance of one that ends at its limit."""
    turns: Numbers
    score_s: Numbers
    """Seconds of each one's reward call."""
    reply_s: Numbers
    """Seconds of an environment's replies to each."""
    luck: Numbers
    """[S, 2] uniform numbers, which decide whether its reward call fails, and whether and when it shows itself hopeless."""


class Workload:
    """Draws groups by number."""

    def __init__(
        self,
        *,
        seed: int,
        num_siblings: int,
        prompt_tokens: Distribution,
        lengths: Distribution,
        likeness: float = 0.0,
        length_factors: Sequence[float] = (1.0,),
        prompt_factors: Sequence[float] = (1.0,),
        num_groups: int = 1,
        turns: Distribution,
        score_s: Distribution,
        reply_s: Distribution,
        reward_mean: float,
        truncated_reward_mean: float | None = None,
        reward_spread: float,
    ) -> None:
        """`likeness`, 0 to 1, is the correlation of siblings' lengths; `reward_spread`, 0 to 1, how far prompts differ in difficulty;
        `length_factors` and `prompt_factors`: how many times as long completions and prompts are, at evenly spaced places of the first
        `num_groups` groups.
        """
        self._seed, self._num_siblings = seed, num_siblings
        self._prompt_tokens, self._lengths, self._likeness = prompt_tokens, lengths, likeness
        self._turns, self._score_s, self._reply_s = turns, score_s, reply_s
        self._length_factors, self._prompt_factors, self._num_groups = tuple(length_factors), tuple(prompt_factors), num_groups
        self._reward_mean, self._reward_spread = reward_mean, reward_spread
        self._truncated_mean = reward_mean if truncated_reward_mean is None else truncated_reward_mean
        self._block = functools.lru_cache(4)(self._draw)

    def group(self, group_id: int) -> GroupDraws:
        """Return the draws of a group."""
        row, block = group_id % BLOCK, self._block(group_id // BLOCK)
        return GroupDraws(
            prompt_tokens=int(block["prompts"][row]),
            lengths=block["lengths"][row],
            chances=block["chances"][row],
            success=(success := float(block["successes"][row])),
            truncated_success=self._truncated(success),
            turns=block["turns"][row],
            score_s=block["score_s"][row],
            reply_s=block["reply_s"][row],
            luck=block["luck"][row],
        )

    def _draw(self, block: int) -> dict[str, Numbers]:
        chance = np.random.default_rng((self._seed, block))
        shape = (BLOCK, self._num_siblings)
        shared, own = chance.standard_normal((BLOCK, 1)), chance.standard_normal(shape)
        lengths = self._lengths.at(math.sqrt(self._likeness) * shared + math.sqrt(1 - self._likeness) * own)
        groups = BLOCK * block + np.arange(BLOCK)
        lengths = lengths * self._factors_at(groups, self._length_factors)[:, None]
        prompts = self._prompt_tokens.at(chance.standard_normal(BLOCK)) * self._factors_at(groups, self._prompt_factors)
        return {
            "prompts": np.maximum(1, np.rint(prompts)),
            "lengths": np.maximum(1, np.rint(lengths)),
            "chances": chance.random(shape),
            "successes": self._successes(chance),
            "turns": np.maximum(1, np.rint(self._turns.at(chance.standard_normal(shape)))),
            "score_s": self._score_s.at(chance.standard_normal(shape)),
            "reply_s": self._reply_s.at(chance.standard_normal(shape)),
            "luck": chance.random((*shape, 2)),
        }

    def _factors_at(self, groups: npt.NDArray[np.int_], factors: tuple[float, ...]) -> Numbers:
        """Return the factor of each group: from one place to the next it changes by as much with each group."""
        places = np.linspace(0.0, self._num_groups, len(factors)) if len(factors) > 1 else np.zeros(1)
        return np.exp(np.interp(groups, places, np.log(factors)))

    def _successes(self, chance: np.random.Generator) -> Numbers:
        mean, spread = self._reward_mean, self._reward_spread
        if spread <= 0 or mean in (0.0, 1.0):
            return np.full(BLOCK, mean)
        weight = 1 / min(spread, 0.999) - 1  # of a Beta distribution: its variance is spread * mean * (1 - mean)
        return chance.beta(mean * weight, (1 - mean) * weight, BLOCK)

    def _truncated(self, success: float) -> float:
        """Return a prompt's chance where completions end at their limit: the same part of what there is below the mean, or above it."""
        mean, other = self._reward_mean, self._truncated_mean
        return success * other / mean if other < mean else 1 - (1 - success) * (1 - other) / (1 - mean) if other > mean else success


def _uniform_of(normal: Numbers) -> Numbers:
    """Return the part of a standard normal distribution below each number."""
    return 0.5 * (1 + np.asarray(_erf(normal / math.sqrt(2)), np.float64))


_erf = np.frompyfunc(math.erf, 1, 1)
