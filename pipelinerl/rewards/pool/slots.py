"""The lanes of a scorer. Functions without limits share one; a function with limits, one that compares siblings, or an environment has
its own.

A lane has slots, a queue and a deadline of its own, so a slow judge holds up neither a fast rule nor the judge of something else. A request
goes to every lane of its kind at once, and `joining` makes one answer of theirs.
"""

from __future__ import annotations

import collections
import dataclasses
import selectors
import time
from collections.abc import Iterator, Sequence

from pipelinerl.config import EnvironmentSection, RewardSection, ScorerSection
from pipelinerl.errors import ConfigError
from pipelinerl.messages import FunctionFailed, FunctionKind, FunctionLoad, GroupScored, Outcome, Replied, Reply, Score, Scored, ScoreGroup
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.aggregator import Joining, Key, Part, Whole
from pipelinerl.rewards.failures import Failures
from pipelinerl.rewards.pool.calls import Component, Setup, component_names
from pipelinerl.rewards.pool.limits import Gate
from pipelinerl.rewards.pool.pool import LOAD_DEADLINE_S, Pool
from pipelinerl.rewards.pool.queue import Queue
from pipelinerl.rewards.pool.sandbox import Sandbox
from pipelinerl.rewards.pool.stats import Tally

Request = Score | ScoreGroup | Reply
Answer = Scored | GroupScored | Replied


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """Functions that share slots."""

    components: tuple[Component, ...]
    takes: type[Request]
    num_slots: int
    deadline_s: float
    per_s: float | None = None
    retries: int = 0


def plan_lanes(rewards: Sequence[RewardSection], scorer: ScorerSection, environment: EnvironmentSection | None = None) -> tuple[Lane, ...]:
    """Which functions share slots, and which have slots of their own. Raises `ConfigError` where a function is named twice."""
    for reference, count in collections.Counter(reward.function for reward in rewards).items():
        if count > 1:
            raise ConfigError(f"reward function {reference} is named {count} times: name it once, with the sum of the weights")
    names = component_names([reward.function for reward in rewards])
    shared: list[Component] = []
    own: list[Lane] = []
    for reward, name in zip(rewards, names, strict=True):
        component = Component(function=reward.function, name=name, options=reward.options)
        if reward.per == "sample" and not _has_limits(reward):
            shared.append(component)
            continue
        own.append(
            Lane(
                components=(component,),
                takes=ScoreGroup if reward.per == "group" else Score,
                num_slots=reward.concurrency or scorer.slots,
                deadline_s=reward.deadline_s or scorer.deadline_s,
                per_s=reward.per_s,
                retries=reward.retries,
            )
        )
    if environment is not None and environment.function is not None:
        own.append(_environment_lane(environment, environment.function, scorer, taken=names))
    first = Lane(components=tuple(shared), takes=Score, num_slots=scorer.slots, deadline_s=scorer.deadline_s)
    return (first, *own) if shared else tuple(own)


def _environment_lane(environment: EnvironmentSection, function: str, scorer: ScorerSection, *, taken: Sequence[str]) -> Lane:
    name = function.rpartition(":")[2]
    component = Component(function=function, name=function if name in taken else name, options=environment.options, is_environment=True)
    return Lane(
        components=(component,),
        takes=Reply,
        num_slots=environment.concurrency or scorer.slots,
        deadline_s=environment.deadline_s or scorer.deadline_s,
    )


def _has_limits(reward: RewardSection) -> bool:
    return any((reward.concurrency, reward.per_s, reward.retries, reward.deadline_s))


class Lanes:
    """Takes requests, gives answers; one thread, driven by `wait` and `advance`."""

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
        tally: Tally | None = None,
        failures: Failures | None = None,
    ) -> None:
        lanes = plan_lanes(rewards, scorer, environment)
        self.num_slots = max(lane.num_slots for lane in lanes)
        """Requests that can run at once."""
        names = component_names([reward.function for reward in rewards])
        weights = {each: reward.weight for each, reward in zip(names, rewards, strict=True)}
        per_sample = {each: weights[each] for each, reward in zip(names, rewards, strict=True) if reward.per == "sample"}
        per_group = {each: weight for each, weight in weights.items() if each not in per_sample}
        self._joinings = {Score: Joining(per_sample, must_apply=not per_group), ScoreGroup: Joining(per_group, must_apply=False)}
        """By what is asked; an environment is one function, so there is nothing to join."""
        self._lane_ids = {kind: [i for i, lane in enumerate(lanes) if lane.takes is kind] for kind in (Score, ScoreGroup, Reply)}
        self._requests: dict[Key, Request] = {}
        self._ready: list[Answer] = []
        self._tally = tally or Tally()
        self._failures = failures or Failures()
        self._name = name
        self._selector = selectors.DefaultSelector()
        setup = Setup(model_path=model_path, lanes=tuple(lane.components for lane in lanes), max_tokens=max_tokens)
        self._sandbox = Sandbox(setup, variables=scorer.variables)
        self._has_ended = False
        """The fork server has something to tell."""
        self._lanes = lanes
        self._pools = [self._pool(index, lane, journal) for index, lane in enumerate(lanes)]

    @property
    def num_running(self) -> int:
        """Calls under way."""
        return sum(pool.num_running for pool in self._pools)

    def total_busy_s(self) -> float:
        """Seconds of calls since the start, summed over slots, calls under way included."""
        return sum(pool.total_busy_s() for pool in self._pools)

    def functions(self) -> dict[str, FunctionLoad]:
        """How each function does."""
        breakers = {lane.components[0].name: pool.breaker for lane, pool in zip(self._lanes, self._pools, strict=True)}
        return self._tally.report(breakers)

    def news(self) -> list[FunctionFailed]:
        """Failures of functions that are due to be told."""
        return self._failures.news(num_calls=self._tally.num_calls())

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
        """Queue a request in every lane of its kind; one that repeats a request under way is the same request."""
        key = (request.rollout_id, request.attempt)
        lanes = self._lane_ids[type(request)]
        if not lanes:
            self._ready.append(_answer(request, Whole(outcome=Outcome.OK, rewards=(0.0,), components=({},))))
            return
        self._requests[key] = request
        if not isinstance(request, Reply):
            self._joinings[type(request)].expect(key, lanes)
        for lane in lanes:
            self._pools[lane].submit(request)

    def cancel(self, rollout_id: str, attempt: int) -> None:
        """Withdraw a request: no answer follows. A call under way runs on, its answer is dropped."""
        score = self._requests.pop((rollout_id, attempt), None)
        for joining in self._joinings.values() if score is not None else ():
            joining.drop((rollout_id, attempt))
        for pool in self._pools:
            pool.cancel(rollout_id, attempt)

    def cancel_all(self) -> None:
        """Withdraw every request, and the answers that `advance` has not given yet: another asks from now on, and is told of failures."""
        for rollout_id, attempt in list(self._requests):
            self.cancel(rollout_id, attempt)
        self._ready.clear()
        self._failures.tell_anew()

    def wait(self, timeout_s: float) -> None:
        """Sleep until a worker, the fork server or a descriptor of `wake_on` has something, a deadline passes, or `timeout_s` is over."""
        left_s = min(pool.wake_at() for pool in self._pools) - time.monotonic()
        for key, events in self._selector.select(max(0.0, min(timeout_s, left_s))):
            if key.fileobj is self._sandbox:
                self._has_ended = True
            elif key.data is not None:
                pool, slot = key.data
                pool.hear(slot, events)

    def advance(self) -> list[Answer]:
        """Replace lost workers, kill those past a deadline, hand out what fits; return the answers since the last call."""
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

    def _pool(self, index: int, lane: Lane, journal: Journal) -> Pool:
        gate = Gate(per_s=lane.per_s, has_breaker=lane.retries > 0)
        is_shared = lane.takes is Score and index == 0
        return Pool(
            Queue(num_slots=lane.num_slots, deadline_s=lane.deadline_s, gate=gate, retries=lane.retries),
            lane=index,
            num_slots=lane.num_slots,
            sandbox=self._sandbox,
            selector=self._selector,
            tally=self._tally,
            failures=self._failures,
            kind=FunctionKind.ENVIRONMENT if lane.takes is Reply else FunctionKind.REWARD,
            journal=journal,
            name=self._name if is_shared else f"{self._name}/{lane.components[0].name}",
        )

    def _join(self) -> Iterator[Answer]:
        for lane, pool in enumerate(self._pools):
            kind = self._lanes[lane].takes
            for key, part in pool.advance():
                if kind is Reply:
                    if (request := self._requests.pop(key, None)) is not None:
                        yield _reply(request, part)
                    continue
                whole = self._joinings[kind].add(key, lane, part)
                if whole is None:
                    continue
                for other in whole.unheard:
                    self._pools[other].cancel(*key)
                yield _answer(self._requests.pop(key), whole)


def _reply(request: Request, part: Part) -> Replied:
    assert isinstance(request, Reply)
    return Replied(
        episode_id=request.episode_id,
        attempt=request.attempt,
        turn=request.turn,
        outcome=part.outcome,
        heard=part.heard,
        error=part.error,
        duration_s=part.duration_s,
    )


def _answer(score: Request, whole: Whole) -> Scored | GroupScored:
    if isinstance(score, ScoreGroup):
        return GroupScored(
            group_id=score.group_id,
            outcome=whole.outcome,
            rewards=whole.rewards,
            components=whole.components,
            error=whole.error,
            duration_s=whole.duration_s,
        )
    return Scored(
        rollout_id=score.rollout_id,
        attempt=score.attempt,
        outcome=whole.outcome,
        reward=whole.rewards[0] if whole.rewards else None,
        components=whole.components[0] if whole.components else {},
        error=whole.error,
        duration_s=whole.duration_s,
    )
