"""An evaluation answers held-out prompts with the same engines and scorers, beside the run and outside its accounts.

An evaluation is about one version. The engines that answer are pinned to it: they finish the swap under way, take no other until the last
answer is there, and go on sampling for training meanwhile, so nothing is drained; the other engines follow the newest policy. An evaluation
is never fatal: where it fails, stalls or takes too long it is given up, and the journal says why. The ledger remembers which versions are
done, so a run that goes on repeats none, and evaluates anew what was interrupted.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Collection, Coroutine, Sequence
from typing import Any, Protocol, TypeVar

import msgspec

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.engines import Engine, Engines
from orchestrator.peers.scorers import Scorers
from orchestrator.rollouts.multi_turn import Episode
from orchestrator.rollouts.rollout import unanswered
from orchestrator.rollouts.scorer_tasks import environment_task, failed_score, reward_task, score_of
from orchestrator.rules.pass_at_k import mean_pass_at
from orchestrator.rules.routing import route
from orchestrator.stages.environment import EnvironmentStage
from pipelinerl.config import EvaluationSection
from pipelinerl.messages import Completion, Generate, Outcome, Prompt, Result, Sampling, Score, ScorerTask, Trajectory
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.watch import LOOKS, Watch

MAX_ATTEMPTS = 3
"""Peers that may end before they answer a prompt. 1 would blame it for its neighbours; a larger value would let one prompt kill as many."""
PINNED_FRACTION = 0.25
"""The part of the engines, one at least, that answers an evaluation beside training. A larger part answers sooner, and keeps more engines
from new policies.
"""


_T = TypeVar("_T")


class Pins(Protocol):
    """The pins keep an engine at its policy: the weight sync stage, which brings policies to engines, provides them."""

    def pin(self, engine: Engine, *, is_pinned: bool) -> None: ...

    def is_settled(self, engine: Engine) -> bool: ...


@dataclasses.dataclass(slots=True, kw_only=True)
class Evaluation:
    """The evaluation answers every held-out prompt `samples` times and writes avg@n and pass@k to the journal.

    An answer that failed, or whose score did, counts as reward 0 in an evaluation (never in training), and is reported apart.

    takes     a version that is due, from `pipeline` or from engines that hold it
    gives     the result, to the journal and the ledger
    waits for engines pinned to one version; completions; scorers' results; `deadline_s` at most
    woken by  engines, scorers
    fails     never: an evaluation that fails is given up
    ends      cancelled, when the run ends
    """

    name = "evaluation"
    prompts: Sequence[Prompt]
    section: EvaluationSection
    correct_reward: float
    """Reward from which an answer counts as correct."""
    engines: Engines
    scorers: Scorers
    pins: Pins
    sampling: Sampling
    journal: Journal
    ledger: Ledger
    watch: Watch
    takes_turns: Callable[[int], bool] = lambda engine_id: False
    """The callback says whether the trainer waits for an engine that keeps its version."""
    environment: EnvironmentStage | None = None
    results: list[tuple[int, float]] = dataclasses.field(default_factory=list)
    """The pairs (version, mean reward) of every evaluation, also of earlier processes of the run."""
    on_evaluated: Callable[[dict[str, Any]], None] = lambda _: None
    """The callback is told the journal's fields of each evaluation."""
    _num_begun: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    """Evaluations of each version that were begun. Each has attempts of its own: an engine that still has a turn of one that was cancelled
    takes no earlier turn of the same attempt.
    """

    async def evaluate(self, version: int) -> float | None:
        """Evaluate a version that every engine holds and that no other follows; return None where it was evaluated before, or was given
        up.
        """
        return await self._evaluate(version, [engine.engine_id for engine in self.engines])

    async def evaluate_pinned(self, version: int) -> float | None:
        """Evaluate a version that every engine holds, and have them keep it until that is done."""
        engines = list(self.engines)
        try:
            for engine in engines:
                self.pins.pin(engine, is_pinned=True)
            return await self.evaluate(version)
        finally:
            for engine in engines:
                self.pins.pin(engine, is_pinned=False)

    async def follow(self, latest_version: Callable[[], int]) -> None:
        """Evaluate every `every`-th version, one at a time; `latest_version()` returns the newest that every engine holds."""
        every = self.section.every
        last = max((version for version, _ in self.results), default=0)
        next_version = (last // every + 1) * every if every else 0
        while every and self.prompts:
            while latest_version() < next_version:
                await self.engines.changed.wait()
            async with self._pinned() as (version, engine_ids):
                await self._evaluate(version, engine_ids)
            next_version = (version // every + 1) * every

    @contextlib.asynccontextmanager
    async def _pinned(self) -> AsyncIterator[tuple[int, list[int]]]:
        """Keep some engines at one version; yield the version and the ids of these engines."""
        outstanding = self.engines.outstanding()
        apart = {engine_id: held for engine_id, held in outstanding.items() if not self.takes_turns(engine_id)}
        free = apart or outstanding  # the trainer waits for one that takes turns with it
        chosen = sorted(free, key=lambda engine_id: free[engine_id])[: max(1, int(PINNED_FRACTION * len(outstanding)))]
        engines = [self.engines[engine_id] for engine_id in chosen]
        try:
            for engine in engines:
                self.pins.pin(engine, is_pinned=True)
            while any(self.engines.serves(engine) and not self.pins.is_settled(engine) for engine in engines):
                await self.engines.changed.wait()
            version = max((engine.version for engine in engines), default=0)
            yield version, [engine.engine_id for engine in engines if engine.version == version]
        finally:
            for engine in engines:
                self.pins.pin(engine, is_pinned=False)

    async def _evaluate(self, version: int, engine_ids: Collection[int]) -> float | None:
        if not self.prompts or version in {done for done, _ in self.results}:
            return None
        work = asyncio.create_task(self._work(version, engine_ids))
        stuck = asyncio.create_task(self._until_nothing_moves())
        try:
            await asyncio.wait((work, stuck), timeout=self.section.deadline_s, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                return work.result()
            why = "nothing moved any more" if stuck.done() else f"it took longer than evaluation.deadline_s = {self.section.deadline_s:g}"
        except Exception as error:  # whatever goes wrong here is this evaluation's own failure, and costs the run nothing else
            first = error
            while isinstance(first, ExceptionGroup):
                first = first.exceptions[0]
            why = f"{type(first).__name__}: {first}"
        finally:
            work.cancel()
            stuck.cancel()
        self.journal.write("evaluation_dropped", version=version, error=why)
        return None

    async def _until_nothing_moves(self) -> None:
        """Return once nothing has moved for half of the watchdog's limit: at the whole of it the watchdog would end the run."""
        last_moves, quiet = -1, 0
        while quiet < LOOKS // 2:
            quiet = quiet + 1 if self.watch.num_moves == last_moves else 0
            last_moves = self.watch.num_moves
            await asyncio.sleep(self.watch.stall_limit_s / LOOKS)

    async def _work(self, version: int, engine_ids: Collection[int]) -> float:
        first_attempt = self._num_begun[version] * MAX_ATTEMPTS
        self._num_begun[version] += 1
        asked = enumerate(prompt for prompt in self.prompts for _ in range(self.section.samples))
        plays = [
            self._play(number, prompt, version=version, engine_ids=engine_ids, first_attempt=first_attempt) for number, prompt in asked
        ]
        trajectories = await self._all(plays, awaited="completions")
        scored = await self._all([self._score(trajectory) for trajectory in trajectories], awaited="scores")
        rewards = [score.reward if score.outcome is Outcome.OK and score.reward is not None else 0.0 for score in scored]
        sampled = [trajectory.versions[trajectory.loss_mask] for trajectory in trajectories]
        versions = [int(version) for column in sampled if len(column) for version in column[[0, -1]]]
        mean, num_samples = sum(rewards) / len(rewards), self.section.samples
        correct = [reward >= self.correct_reward for reward in rewards]
        of_prompt = [sum(correct[first : first + num_samples]) for first in range(0, len(correct), num_samples)]
        self.results.append((version, mean))
        self.ledger.record("evaluated", now_s=asyncio.get_running_loop().time(), version=version, reward=mean)
        fields: dict[str, Any] = {
            "version": version,
            "reward_mean": mean,
            "components": _component_means(scored),
            "num_prompts": len(of_prompt),
            "num_samples": num_samples,
            "pass_at": {str(k): value for k, value in mean_pass_at(of_prompt, num_samples=num_samples).items()},
            "num_failed": sum(score.outcome is not Outcome.OK for score in scored),
            "oldest_version": min(versions, default=version),
            "newest_version": max(versions, default=version),
        }
        self.journal.write("evaluation", **fields)
        self.on_evaluated(fields)
        return mean

    async def _all(self, work: Sequence[Coroutine[Any, Any, _T]], *, awaited: str) -> list[_T]:
        with self.watch.waiting(self.name, awaited):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(one) for one in work]
            return [task.result() for task in tasks]

    async def _play(self, number: int, prompt: Prompt, *, version: int, engine_ids: Collection[int], first_attempt: int) -> Trajectory:
        """Return one answer to a prompt: one turn, or an episode."""
        name, engine_id = f"evaluation-{version}/{number}", -1
        stage = self.environment
        if stage is None:
            episode = Episode(prompt=prompt, max_tokens=self.sampling.max_tokens, max_turns=1)
        else:
            episode = dataclasses.replace(stage.begin(prompt), max_tokens=self.sampling.max_tokens)
        async with stage.held(name) if stage is not None else contextlib.nullcontext():
            if episode.is_stateful:
                episode = episode.observe(await self._request(environment_task(name, attempt=first_attempt, episode=episode)))
            while not episode.is_over:
                completion, engine_id = await self._answer(
                    episode, name, version=version, engine_ids=engine_ids, first_attempt=first_attempt
                )
                episode = episode.said(completion)
                if not episode.is_over:
                    episode = episode.observe(await self._request(environment_task(name, attempt=first_attempt, episode=episode)))
        times = {"admitted_at": 0.0, "finished_at": 0.0}
        return episode.trajectory(rollout_id=name, attempt=first_attempt, group_id=-1, sibling=number, engine_id=engine_id, **times)

    async def _answer(
        self, episode: Episode, rollout_id: str, *, version: int, engine_ids: Collection[int], first_attempt: int
    ) -> tuple[Completion, int]:
        """Ask until an engine that holds the version answers. An engine that ends before is replaced by another, up to `MAX_ATTEMPTS`."""
        for attempt in range(first_attempt, first_attempt + MAX_ATTEMPTS):
            while (engine_id := self._engine_of(version, engine_ids)) is None:
                await self.engines.changed.wait()
            answer: asyncio.Future[tuple[Completion, int] | None] = asyncio.get_running_loop().create_future()
            request = Generate(
                rollout_id=rollout_id,
                attempt=attempt,
                turn=episode.num_turns,
                token_ids=episode.context,
                sampling=msgspec.structs.replace(self.sampling, max_tokens=episode.num_left),
                images=episode.prompt.images,
            )
            self.engines.requests.ask(
                request,
                engine_id,
                sink=lambda completion, engine_id, answer=answer: _give(answer, (completion, engine_id)),
                lost=lambda engine_id, answer=answer: _give(answer, None),
            )
            if (answered := await answer) is not None:
                return answered
        error = f"{MAX_ATTEMPTS} engines ended before they answered"
        return unanswered(rollout_id, attempt=first_attempt + MAX_ATTEMPTS - 1, error=error), -1

    def _engine_of(self, version: int, engine_ids: Collection[int]) -> int | None:
        """Return the least busy of these engines that holds the version; None where none does."""
        held = self.engines.outstanding()
        return route({number: held[number] for number in engine_ids if number in held and self.engines[number].version == version})

    async def _score(self, trajectory: Trajectory) -> Score:
        return failed_score(trajectory) or score_of(trajectory, await self._request(reward_task(trajectory)))

    async def _request(self, task: ScorerTask) -> Result:
        return await self.scorers.request(task, by=self.name, max_lost=MAX_ATTEMPTS)


def _component_means(scored: list[Score]) -> dict[str, float]:
    """Return the mean of each reward function, before weighting, over the answers it was applied to; a failed answer has none."""
    told: dict[str, list[float]] = {}
    for score in scored:
        for name, value in score.components.items():
            told.setdefault(name, []).append(value)
    return {name: sum(values) / len(values) for name, values in told.items()}


def _give(answer: asyncio.Future[Any], value: Any) -> None:
    """Set the answer, unless the evaluation was cancelled: then nobody waits for it."""
    if not answer.done():
        answer.set_result(value)
