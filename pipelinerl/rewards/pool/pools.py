"""The worker pools of a scorer. Functions without limits share one pool. A function with limits, a function that compares siblings, and an
environment have a pool each.

Every pool has its own slots, queue and deadline, so a slow judge holds up neither a fast rule nor another judge. A request goes to every
pool of its kind at once, and `aggregator` makes one result of their answers.
"""

from __future__ import annotations

import collections
import dataclasses
import selectors
import time
from collections.abc import Iterator, Sequence

from pipelinerl.config import EnvironmentSection, RewardSection, ScorerSection
from pipelinerl.errors import ConfigError
from pipelinerl.messages import FunctionFailed, FunctionKind, FunctionLoad, Outcome, Request, RequestKind, Result
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.aggregator import Aggregator
from pipelinerl.rewards.calls import Component, Setup, component_names
from pipelinerl.rewards.failures import Failures
from pipelinerl.rewards.pool.limits import RateLimiter
from pipelinerl.rewards.pool.pool import LOAD_DEADLINE_S, Pool
from pipelinerl.rewards.pool.queue import Queue
from pipelinerl.rewards.pool.sandbox import Sandbox
from pipelinerl.rewards.pool.stats import FunctionStats


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolSpec:
    """The plan of one pool: functions that share slots, and their limits."""

    components: tuple[Component, ...]
    takes: RequestKind
    num_slots: int
    deadline_s: float
    per_s: float | None = None
    retries: int = 0


def plan_pools(
    rewards: Sequence[RewardSection], scorer: ScorerSection, environment: EnvironmentSection | None = None
) -> tuple[PoolSpec, ...]:
    """Decide which functions share slots, and which have slots of their own. Raises `ConfigError` where a function is named twice."""
    for reference, count in collections.Counter(reward.function for reward in rewards).items():
        if count > 1:
            raise ConfigError(f"reward function {reference} is named {count} times: name it once, with the sum of the weights")
    names = component_names([reward.function for reward in rewards])
    shared: list[Component] = []
    own: list[PoolSpec] = []
    for reward, name in zip(rewards, names, strict=True):
        component = Component(function=reward.function, name=name, options=reward.options)
        if reward.per == "sample" and not _has_limits(reward):
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
    if environment is not None and environment.function is not None:
        own.append(_environment_pool(environment, environment.function, scorer, taken=names))
    first = PoolSpec(components=tuple(shared), takes=RequestKind.REWARD, num_slots=scorer.slots, deadline_s=scorer.deadline_s)
    return (first, *own) if shared else tuple(own)


def _environment_pool(environment: EnvironmentSection, function: str, scorer: ScorerSection, *, taken: Sequence[str]) -> PoolSpec:
    name = function.rpartition(":")[2]
    component = Component(function=function, name=function if name in taken else name, options=environment.options, is_environment=True)
    return PoolSpec(
        components=(component,),
        takes=RequestKind.ENVIRONMENT,
        num_slots=environment.concurrency or scorer.slots,
        deadline_s=environment.deadline_s or scorer.deadline_s,
    )


def _has_limits(reward: RewardSection) -> bool:
    return any((reward.concurrency, reward.per_s, reward.retries, reward.deadline_s))


class RewardPools:
    """Takes requests and gives answers, in one thread, driven by `wait` and `advance`."""

    def __init__(
        self,
        rewards: Sequence[RewardSection],
        scorer: ScorerSection,
        *,
        environment: EnvironmentSection | None = None,
        model_path: str,
        max_tokens: int,
        journal: Journal,
        name: str,
        stats: FunctionStats | None = None,
        failures: Failures | None = None,
    ) -> None:
        specs = plan_pools(rewards, scorer, environment)
        self.num_slots = max(spec.num_slots for spec in specs)
        """Number of requests that can run at once."""
        names = component_names([reward.function for reward in rewards])
        weights = {each: reward.weight for each, reward in zip(names, rewards, strict=True)}
        per_sample = {each: weights[each] for each, reward in zip(names, rewards, strict=True) if reward.per == "sample"}
        per_group = {each: weight for each, weight in weights.items() if each not in per_sample}
        self._aggregators = {
            RequestKind.REWARD: Aggregator(per_sample, must_apply=not per_group),
            RequestKind.GROUP_REWARD: Aggregator(per_group, must_apply=False),
            RequestKind.ENVIRONMENT: Aggregator({}, must_apply=False),
        }
        self._pools_of = {kind: [i for i, spec in enumerate(specs) if spec.takes is kind] for kind in RequestKind}
        self._requests: dict[int, Request] = {}
        self._ready: list[Result] = []
        self._stats = stats or FunctionStats()
        self._failures = failures or Failures()
        self._name = name
        self._selector = selectors.DefaultSelector()
        setup = Setup(model_path=model_path, pools=tuple(spec.components for spec in specs), max_tokens=max_tokens)
        self._sandbox = Sandbox(setup, variables=scorer.variables)
        self._has_ended = False
        """True where the fork server has sent something."""
        self._specs = specs
        self._pools = [self._pool(number, spec, journal) for number, spec in enumerate(specs)]

    @property
    def num_running(self) -> int:
        """Number of calls under way."""
        return sum(pool.num_running for pool in self._pools)

    def total_busy_s(self) -> float:
        """Return the seconds of calls since the start, summed over slots, including calls under way."""
        return sum(pool.total_busy_s() for pool in self._pools)

    def functions(self) -> dict[str, FunctionLoad]:
        """Return the statistics of each function, by name."""
        breakers = {spec.components[0].name: pool.breaker for spec, pool in zip(self._specs, self._pools, strict=True)}
        return self._stats.report(breakers)

    def news(self) -> list[FunctionFailed]:
        """Return the reports of failed functions that are due."""
        return self._failures.news(num_calls=self._stats.num_calls())

    def start(self) -> None:
        """Start every worker and wait until all have loaded the reward functions. Raises `ConfigError` where that fails."""
        self._sandbox.wait_until_prepared()
        self._selector.register(self._sandbox, selectors.EVENT_READ)
        for pool in self._pools:
            pool.start()
        while not all(pool.is_ready for pool in self._pools):
            self.wait(LOAD_DEADLINE_S)
            self.advance()

    def wake_on(self, descriptor: int) -> None:
        """Have `wait` return when this descriptor becomes readable, too."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def submit(self, request: Request) -> None:
        """Queue a request in every pool of its kind."""
        numbers = self._pools_of[request.task.kind]
        if not numbers:  # only group rewards are configured, so a single completion has no reward
            self._ready.append(Result(request_id=request.request_id, outcome=Outcome.OK, rewards=(0.0,), components=({},)))
            return
        self._requests[request.request_id] = request
        self._aggregators[request.task.kind].expect(request.request_id, numbers)
        for number in numbers:
            self._pools[number].submit(request)

    def cancel(self, request_id: int) -> None:
        """Withdraw a request, so that no answer follows. A call under way runs on, and its answer is dropped."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            self._aggregators[request.task.kind].drop(request_id)
            for number in self._pools_of[request.task.kind]:
                self._pools[number].cancel(request_id)

    def cancel_all(self) -> None:
        """Withdraw every request, with the answers that `advance` has not given yet. A new orchestrator asks from now on, and failures are
        reported to it again.
        """
        for request_id in list(self._requests):
            self.cancel(request_id)
        self._ready.clear()
        self._failures.tell_anew()

    def wait(self, timeout_s: float) -> None:
        """Wait until a worker, the fork server or a descriptor of `wake_on` is readable, a deadline passes, or `timeout_s` is over."""
        left_s = min(pool.wake_at() for pool in self._pools) - time.monotonic()
        for key, events in self._selector.select(max(0.0, min(timeout_s, left_s))):
            if key.fileobj is self._sandbox:
                self._has_ended = True
            elif key.data is not None:
                pool, slot = key.data
                pool.hear(slot, events)

    def advance(self) -> list[Result]:
        """Replace lost workers, kill those past a deadline, and hand out the calls that fit. Return the results since the last call of this
        method.
        """
        if self._has_ended:
            self._has_ended = False
            ended = self._sandbox.receive()
            for pool in self._pools:
                pool.bury(ended)
        answers, self._ready = self._ready, []
        return [*answers, *self._join()]

    def close(self) -> None:
        """Kill every worker and end the fork server; requests without an answer are dropped."""
        self._selector.close()
        for pool in self._pools:
            pool.close()
        self._sandbox.close()

    def _pool(self, number: int, spec: PoolSpec, journal: Journal) -> Pool:
        limiter = RateLimiter(per_s=spec.per_s, has_breaker=spec.retries > 0)
        is_shared = spec.takes is RequestKind.REWARD and number == 0
        return Pool(
            Queue(num_slots=spec.num_slots, deadline_s=spec.deadline_s, limiter=limiter, retries=spec.retries),
            number=number,
            num_slots=spec.num_slots,
            sandbox=self._sandbox,
            selector=self._selector,
            stats=self._stats,
            failures=self._failures,
            kind=FunctionKind.ENVIRONMENT if spec.takes is RequestKind.ENVIRONMENT else FunctionKind.REWARD,
            journal=journal,
            name=self._name if is_shared else f"{self._name}/{spec.components[0].name}",
        )

    def _join(self) -> Iterator[Result]:
        for number, pool in enumerate(self._pools):
            aggregator = self._aggregators[self._specs[number].takes]
            for request_id, part in pool.advance():
                result = aggregator.add(request_id, number, part)
                if result is not None:
                    self.cancel(request_id)  # other pools may still work on a request that failed
                    yield result
