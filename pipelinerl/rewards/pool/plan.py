"""Decides which pools of workers a scorer has. Functions without limits share one pool; a function with limits, a function that compares
siblings, and an environment have a pool each.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from pipelinerl.config import EnvironmentSection, RewardSection, ScorerSection
from pipelinerl.errors import ConfigError
from pipelinerl.messages import RequestKind
from pipelinerl.rewards.calls import Component, component_names


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """The plan of one pool: functions that share slots, and their limits."""

    components: tuple[Component, ...]
    takes: RequestKind
    num_slots: int
    deadline_s: float
    per_s: float | None = None
    retries: int = 0
    is_shared: bool = False
    """True for the pool of all functions without limits."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its functions, in order."""
        return tuple(component.name for component in self.components)


def plan_pools(rewards: Sequence[RewardSection], scorer: ScorerSection, environment: EnvironmentSection) -> tuple[PoolSpec, ...]:
    """Return the pools, the shared one first. Raises `ConfigError` where a function is named twice."""
    references = [reward.function for reward in rewards]
    for reference, count in collections.Counter(references).items():
        if count > 1:
            raise ConfigError(f"reward function {reference} is named {count} times: name it once, with the sum of the weights")
    names = component_names(references)
    shared: list[Component] = []
    own: list[PoolSpec] = []
    for reward, name in zip(rewards, names, strict=True):
        component = Component(function=reward.function, name=name, options=reward.options)
        if reward.per == "sample" and not any((reward.concurrency, reward.per_s, reward.retries, reward.deadline_s)):
            shared.append(component)
            continue
        own.append(
            PoolSpec(
                components=(component,),
                takes=RequestKind.GROUP_REWARD if reward.per == "group" else RequestKind.REWARD,
                num_slots=reward.concurrency or scorer.slots,
                deadline_s=reward.deadline_s or scorer.deadline_s,
                per_s=reward.per_s,
                retries=reward.retries,
            )
        )
    if (function := environment.function) is not None:
        short = function.rpartition(":")[2]
        name = function if short in names else short
        own.append(
            PoolSpec(
                components=(Component(function=function, name=name, options=environment.options, is_environment=True),),
                takes=RequestKind.ENVIRONMENT,
                num_slots=environment.concurrency or scorer.slots,
                deadline_s=environment.deadline_s or scorer.deadline_s,
            )
        )
    first = PoolSpec(
        components=tuple(shared), takes=RequestKind.REWARD, num_slots=scorer.slots, deadline_s=scorer.deadline_s, is_shared=True
    )
    return (first, *own) if shared else tuple(own)
