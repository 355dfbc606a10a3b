"""Held-out prompts, answered by the same engines and scored by the same scorers, beside the run and outside its accounts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np

from orchestrator.rollouts.single_turn import trajectory_of
from orchestrator.rules.routing import route
from orchestrator.stages.scoring import score_request
from orchestrator.state.engines import Engines
from orchestrator.state.scorers import Scorers
from pipelinerl.messages import Completion, Finish, Generate, Outcome, Prompt, Sampling, Scored
from pipelinerl.metrics import Journal
from pipelinerl.watch import Watch

MAX_ATTEMPTS = 3
"""Peers that may end before they answer a prompt. 1 would blame it for its neighbours; many would let one kill as many."""


class Evaluation:
    """Answers every held-out prompt once and writes the mean reward to the journal.

    A prompt whose answer or score failed counts as reward 0 in the mean of an evaluation (never in training), and is reported apart.
    """

    def __init__(
        self, prompts: list[Prompt], *, engines: Engines, scorers: Scorers, sampling: Sampling, journal: Journal, watch: Watch, every: int
    ) -> None:
        self.results: list[tuple[int, float]] = []
        """(version asked for, mean reward) of every evaluation."""
        self.every = every
        self._prompts = prompts
        self._engines = engines
        self._scorers = scorers
        self._sampling = sampling
        self._journal = journal
        self._watch = watch

    async def evaluate(self, version: int) -> float | None:
        """Evaluate `version`, the newest one published; None where there are no held-out prompts, or it was evaluated before."""
        if not self._prompts or (self.results and self.results[-1][0] == version):
            return None
        completions = await self._generate(version)
        scored = await self._score(completions, version)
        rewards = [score.reward if score.outcome is Outcome.OK and score.reward is not None else 0.0 for score in scored]
        versions = [int(version) for completion, _ in completions if len(completion.versions) for version in completion.versions[[0, -1]]]
        mean = sum(rewards) / len(rewards)
        self.results.append((version, mean))
        self._journal.write(
            "evaluation",
            version=version,
            reward_mean=mean,
            num_prompts=len(rewards),
            num_failed=sum(score.outcome is not Outcome.OK for score in scored),
            oldest_version=min(versions, default=version),
            newest_version=max(versions, default=version),
        )
        return mean

    async def follow(self, latest_version: Callable[[], int]) -> None:
        """Evaluate at every `every`-th version, one evaluation at a time; `latest_version()` tells the newest one that
        every engine holds: of a later one, some completions would still be sampled under an older.
        """
        next_version = self.every
        while self.every:
            while latest_version() < next_version:
                await self._engines.changed.wait()
            version = latest_version()
            await self.evaluate(version)
            next_version = (version // self.every + 1) * self.every

    async def _generate(self, version: int) -> list[tuple[Completion, int]]:
        with self._watch.waiting("evaluation", "completions"):
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(prompt, f"evaluation-{version}/{i}")) for i, prompt in enumerate(self._prompts)]
            return [task.result() for task in tasks]

    async def _answer(self, prompt: Prompt, rollout_id: str) -> tuple[Completion, int]:
        """Ask until an engine answers; one that ends before is followed by another, up to `MAX_ATTEMPTS`."""
        for attempt in range(MAX_ATTEMPTS):
            while (engine_id := route(self._engines.outstanding())) is None:
                await self._engines.changed.wait()
            answer: asyncio.Future[tuple[Completion, int] | None] = asyncio.get_running_loop().create_future()
            request = Generate(rollout_id=rollout_id, attempt=attempt, token_ids=prompt.token_ids, sampling=self._sampling)
            self._engines.ask(
                request,
                engine_id,
                sink=lambda completion, engine_id, answer=answer: _give(answer, (completion, engine_id)),
                lost=lambda engine_id, answer=answer: _give(answer, None),
            )
            if (answered := await answer) is not None:
                return answered
        return _unanswered(rollout_id), -1

    async def _score(self, completions: list[tuple[Completion, int]], version: int) -> list[Scored]:
        with self._watch.waiting("evaluation", "scores"):
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._judge(index, prompt, completion, engine_id))
                    for index, (prompt, (completion, engine_id)) in enumerate(zip(self._prompts, completions, strict=True))
                ]
            return [task.result() for task in tasks]

    async def _judge(self, index: int, prompt: Prompt, completion: Completion, engine_id: int) -> Scored:
        """Ask until a scorer answers, as `_answer` does."""
        trajectory = trajectory_of(
            completion, prompt=prompt, group_id=-1, sibling=index, engine_id=engine_id, admitted_at=0.0, finished_at=0.0
        )
        error = completion.error
        for _ in range(MAX_ATTEMPTS if completion.finish is not Finish.ERROR else 0):
            while not self._scorers.has_room:
                await self._scorers.changed.wait()
            answer: asyncio.Future[Scored | None] = asyncio.get_running_loop().create_future()
            self._scorers.ask(
                score_request(trajectory),
                sink=lambda scored, answer=answer: _give(answer, scored),
                lost=lambda scorer_id, answer=answer: _give(answer, None),
            )
            if (scored := await answer) is not None:
                return scored
            error = f"{MAX_ATTEMPTS} scorers ended before they answered"
        return Scored(rollout_id=completion.rollout_id, attempt=0, outcome=Outcome.ERROR, reward=None, error=error)


def _unanswered(rollout_id: str) -> Completion:
    nothing = np.zeros(0, np.int32)
    return Completion(
        rollout_id=rollout_id,
        attempt=MAX_ATTEMPTS - 1,
        token_ids=nothing,
        logprobs=np.zeros(0, np.float32),
        versions=nothing,
        finish=Finish.ERROR,
        error=f"{MAX_ATTEMPTS} engines ended before they answered",
    )


def _give(answer: asyncio.Future[Any], value: Any) -> None:
    """Nobody waits any more once the evaluation was cancelled."""
    if not answer.done():
        answer.set_result(value)
