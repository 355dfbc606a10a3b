"""Decides which pools of workers a scorer has. Functions without limits share one pool; a function with limits, a function that compares
siblings, a reward model, and an environment have a pool each.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence

from pipelinerl.config import EnvironmentSection, RewardSection, ScorerSection
from pipelinerl.errors import ConfigError
from pipelinerl.messages import RequestKind
from pipelinerl.rewards.calls import Component, RewardModel, component_names
from pipelinerl.runtime.membership import reward_kind

MAX_BATCH = 32
"""Completions handed to a reward model at once. A smaller number leaves its batches half empty; a larger one makes more rollouts wait for
the longest of them, and repeats more when its process is lost."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """The plan of one pool: functions that share slots, and their limits."""

    components: tuple[Component, ...]
    takes: RequestKind
    num_slots: int
    """That it begins with."""
    deadline_s: float
    per_s: float | None = None
    retries: int = 0
    is_shared: bool = False
    """True for the pool of all functions without limits."""
    batch: int | None = None
    """Calls that a slot takes at once, and answers together; None where it runs one after the other."""
    model: str = ""
    """Of a reward model, the key of its section, for example `reward.1`: its slots may join and leave. Empty of others."""
    most_slots: int = 0
    """Slots that a reward model may come to have."""
    is_stateful: bool = False
    """True for a class of environments, each of whose slots holds one episode at a time."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of its functions, in order."""
        return tuple(component.name for component in self.components)


def plan_pools(rewards: Sequence[RewardSection], scorer: ScorerSection, environment: EnvironmentSection) -> tuple[PoolSpec, ...]:
    """Return the pools, the shared one first. Raises `ConfigError` where a function is named twice."""
    references = [reward.reference for reward in rewards]
    for reference, count in collections.Counter(references).items():
        if count > 1:
            raise ConfigError(f"reward {reference} is named {count} times: name it once, with the sum of the weights")
    names = component_names(references)
    shared: list[Component] = []
    own: list[PoolSpec] = []
    for index, (reward, name) in enumerate(zip(rewards, names, strict=True)):
        component = Component(function=reward.reference, name=name, options=reward.options, model=_model_of(reward))
        if (
            component.model is None
            and reward.per == "sample"
            and not any((reward.concurrency, reward.per_s, reward.retries, reward.deadline_s))
        ):
            shared.append(component)
            continue
        own.append(
            PoolSpec(
                components=(component,),
                takes=RequestKind.GROUP_REWARD if reward.per == "group" else RequestKind.REWARD,
                num_slots=reward.concurrency or (scorer.slots if component.model is None else 1),
                deadline_s=reward.deadline_s or scorer.deadline_s,
                per_s=reward.per_s,
                retries=reward.retries,
                batch=None if component.model is None else MAX_BATCH,
                model="" if component.model is None else reward_kind(index),
                most_slots=0 if component.model is None else reward.most,
            )
        )
    if (component := environment_component(environment, beside=names)) is not None:
        own.append(
            PoolSpec(
                components=(component,),
                takes=RequestKind.ENVIRONMENT,
                num_slots=environment.max_alive if component.is_stateful else environment.concurrency or scorer.slots,
                deadline_s=environment.deadline_s or scorer.deadline_s,
                is_stateful=component.is_stateful,
            )
        )
    first = PoolSpec(
        components=tuple(shared), takes=RequestKind.REWARD, num_slots=scorer.slots, deadline_s=scorer.deadline_s, is_shared=True
    )
    return (first, *own) if shared else tuple(own)


def environment_component(environment: EnvironmentSection, *, beside: Sequence[str] = ()) -> Component | None:
    """Return the environment, by a name that none `beside` it has; None in a run without one."""
    if (reference := environment.reference) is None:
        return None
    short = reference.rpartition(":")[2]
    return Component(
        function=reference,
        name=reference if short in beside else short,
        options=environment.options,
        is_environment=True,
        is_stateful=environment.cls is not None,
        python="" if environment.python is None else str(environment.python),
    )


def _model_of(reward: RewardSection) -> RewardModel | None:
    if reward.model is None:
        return None
    return RewardModel(path=str(reward.model), format=reward.format, dtype=reward.dtype, max_tokens=reward.max_tokens)
