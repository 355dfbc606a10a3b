"""The pools of a scorer: a request goes to every pool of its kind at once, and `aggregator` makes one result of their answers.

Every pool has its own slots, queue and deadline (`plan`), so a slow judge holds up neither a fast rule nor another judge.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import selectors
import time
from collections.abc import Iterator, Sequence

from pipelinerl.config import Config
from pipelinerl.data.tokenizer import ChatOptions
from pipelinerl.messages import FunctionFailed, FunctionLoad, Outcome, Request, RequestKind, Result, RewardModelLoad
from pipelinerl.observe.journal import Journal
from pipelinerl.rewards.aggregator import Aggregator
from pipelinerl.rewards.calls import Setup, reward_weights
from pipelinerl.rewards.failures import Failures
from pipelinerl.rewards.pool.episodes import EpisodeQueue
from pipelinerl.rewards.pool.plan import plan_pools
from pipelinerl.rewards.pool.pool import LOAD_DEADLINE_S, Pool
from pipelinerl.rewards.pool.processes import ModelProcesses, RunProcesses
from pipelinerl.rewards.pool.queue import Queue
from pipelinerl.rewards.pool.sandbox import Sandbox
from pipelinerl.rewards.pool.stats import FunctionStats
from pipelinerl.runtime.membership import ScaleFolder


class RewardPools:
    """Takes requests and gives answers, in one thread, driven by `wait` and `advance`."""

    def __init__(
        self,
        config: Config,
        *,
        journal: Journal,
        name: str,
        stats: FunctionStats | None = None,
        failures: Failures | None = None,
        gpus: Sequence[str] = (),
        scale: ScaleFolder | None = None,
    ) -> None:
        """Take the `name` of the scorer, where its calls are counted, the `gpus` that its reward models were dealt, in order, and where a
        run says how many processes these have; None where they keep those that they begin with.
        """
        specs = plan_pools(config.reward, config.scorer, config.environment)
        self.num_slots = max((spec.num_slots for spec in specs), default=config.scorer.slots)
        """Number of requests that can run at once."""
        weights = reward_weights(config.reward)
        per_group = {name for spec in specs if spec.takes is RequestKind.GROUP_REWARD for name in spec.names}
        self._weights: dict[RequestKind, dict[str, float]] = {
            RequestKind.REWARD: {name: weight for name, weight in weights.items() if name not in per_group},
            RequestKind.GROUP_REWARD: {name: weight for name, weight in weights.items() if name in per_group},
            RequestKind.ENVIRONMENT: {},
        }
        self._open: dict[int, Aggregator] = {}
        """The requests without a result, by id."""
        self._ready: list[Result] = []
        self._stats = stats or FunctionStats()
        self._failures = failures or Failures()
        self._selector = selectors.DefaultSelector()
        components = tuple(spec.components for spec in specs)
        chat = dataclasses.asdict(ChatOptions.of(config.data)) if config.environment.cls is not None else {}
        setup = Setup(model_path=str(config.model.path), pools=components, max_tokens=config.rollout.max_tokens, chat=chat)
        self._sandbox = Sandbox(setup, variables=config.scorer.variables)
        self._has_ended = False
        """True where the fork server has sent something."""
        dealt = iter(gpus)
        self._pools = [
            Pool(
                spec=spec,
                number=number,
                name=name if spec.is_shared else f"{name}/{spec.names[0]}",
                sandbox=self._sandbox,
                selector=self._selector,
                stats=self._stats,
                failures=self._failures,
                journal=journal,
            )
            for number, spec in enumerate(specs)
        ]
        self._models: list[tuple[Pool, ModelProcesses]] = []
        for pool in self._pools:
            if pool.spec.model and isinstance(pool.queue, Queue):
                count = pool.spec.num_slots
                own = tuple(itertools.islice(dealt, count))
                self._models.append((pool, ModelProcesses(pool, pool.queue, model=pool.spec.model, count=count, gpus=own)))
        self._processes = RunProcesses([model for _, model in self._models], folder=scale, journal=journal)
        self._told = self._state()

    @property
    def num_running(self) -> int:
        """Number of calls under way."""
        return sum(pool.queue.num_running for pool in self._pools)

    def total_busy_s(self) -> float:
        """Return the seconds of calls since the start, summed over slots, including calls under way."""
        return sum(pool.total_busy_s() for pool in self._pools)

    def functions(self) -> dict[str, FunctionLoad]:
        """Return the statistics of each function, by name."""
        return self._stats.report({pool.spec.names[0]: pool.queue.breaker for pool in self._pools})

    def models(self) -> dict[str, RewardModelLoad]:
        """Return what there is of each reward model, by the key of its section."""
        self._told = self._state()
        return {model.model: model.load(busy_s=pool.total_busy_s()) for pool, model in self._models}

    @property
    def has_process_news(self) -> bool:
        """True where a process of a reward model has loaded, has ended what it had, or was given up, since `models` was told."""
        return bool(self._models) and self._state() != self._told

    def follow(self) -> None:
        """Make the processes of reward models those that the run is to have (`pool.processes`)."""
        self._processes.follow()

    def news(self) -> list[FunctionFailed]:
        """Return the reports of failed functions that are due."""
        return self._failures.news(num_calls=self._stats.num_calls())

    def start(self) -> None:
        """Start every worker and wait until all have loaded the reward functions. Raises `ConfigError` where that fails."""
        self._sandbox.wait_until_prepared()
        self._selector.register(self._sandbox, selectors.EVENT_READ)
        for pool in self._pools:
            if not pool.spec.model:
                pool.start()
        self._processes.follow()
        while not all(pool.is_ready for pool in self._pools):
            self.wait(LOAD_DEADLINE_S)
            self.advance()

    def wake_on(self, descriptor: int) -> None:
        """Have `wait` return when this descriptor becomes readable, too."""
        self._selector.register(descriptor, selectors.EVENT_READ)

    def submit(self, request: Request) -> None:
        """Queue a request in every pool of its kind."""
        kind = request.task.kind
        numbers = {number for number, pool in enumerate(self._pools) if pool.spec.takes is kind}
        if not numbers:  # only group rewards are configured, so a single completion has no reward
            self._ready.append(Result(request_id=request.request_id, outcome=Outcome.OK, rewards=(0.0,), components=({},)))
            return
        must_apply = kind is RequestKind.REWARD and not self._weights[RequestKind.GROUP_REWARD]
        self._open[request.request_id] = Aggregator(
            request_id=request.request_id, weights=self._weights[kind], must_apply=must_apply, missing=numbers
        )
        for number in numbers:
            self._pools[number].queue.add(request)

    def cancel(self, request_id: int) -> None:
        """Withdraw a request, so that no answer follows. A call under way runs on, and its answer is dropped."""
        if (request := self._open.pop(request_id, None)) is not None:
            for number in request.missing:
                self._pools[number].cancel(request_id)

    def cancel_all(self) -> None:
        """Withdraw every request, with the answers that `advance` has not given yet. A new orchestrator asks from now on, and failures are
        reported to it again.
        """
        for request_id in list(self._open):
            self.cancel(request_id)
        self._ready.clear()
        for pool in self._pools:
            if isinstance(pool.queue, EpisodeQueue):
                pool.queue.end_all()
        self._failures.report_again()

    def end_episode(self, rollout_id: str) -> None:
        """Have the environment of an episode closed."""
        for pool in self._pools:
            if isinstance(pool.queue, EpisodeQueue):
                pool.queue.end(rollout_id)

    def wait(self, timeout_s: float) -> None:
        """Wait until a worker, the fork server or a descriptor of `wake_on` is readable, a deadline passes, or `timeout_s` is over."""
        left_s = min((pool.wake_at() for pool in self._pools), default=math.inf) - time.monotonic()
        for key, events in self._selector.select(max(0.0, min(timeout_s, left_s))):
            if key.fileobj is self._sandbox:
                self._has_ended = True
            elif key.data is not None:
                pool, slot = key.data
                pool.on_event(slot, events)

    def advance(self) -> list[Result]:
        """Replace lost workers, kill those past a deadline, and hand out the calls that fit. Return the results since the last call of this
        method.
        """
        if self._has_ended:
            self._has_ended = False
            ended = self._sandbox.receive()
            for pool in self._pools:
                pool.replace_ended(ended)
        answers, self._ready = self._ready, []
        return [*answers, *self._join()]

    def close(self) -> None:
        """Kill every worker and end the fork server; requests without an answer are dropped."""
        self._selector.close()
        for pool in self._pools:
            pool.close()
        self._sandbox.close()

    def _state(self) -> list[object]:
        return [model.state() for _, model in self._models]

    def _join(self) -> Iterator[Result]:
        for number, pool in enumerate(self._pools):
            for request_id, answer in pool.advance():
                request = self._open.get(request_id)
                if request is not None and (result := request.add(number, answer)) is not None:
                    self.cancel(request_id)  # other pools may still work on a request that failed
                    yield result
