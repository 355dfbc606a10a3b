"""The harness of every replay: the parts of a run (`orchestrator.parts`) with recorded peers, and a ledger and journal of its own.

The stages are the live ones. A replay is a script: it says what peers and neighbours said, while the stages that it names run. On
simulated time a run of hours is over in seconds.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from orchestrator.advantages import MethodAdvantages
from orchestrator.ledger.ledger import Ledger
from orchestrator.parts import Dependencies, Parts
from orchestrator.pipeline import Pipeline
from orchestrator.rules.curriculum import Rest
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.messages import Completion, Finish, Generate, Message, Prompt
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.stage import Signal, Stage
from pipelinerl.transport.base import Hub

UNLIMITED_S = 1e9
_T = TypeVar("_T")
_S = TypeVar("_S", bound=Stage)


class RecordedHub:
    """A hub (`transport.base.Hub`) that no peer is connected to."""

    def __init__(self) -> None:
        self.refused: collections.Counter[str] = collections.Counter()
        self.told: Callable[[str, Message], None] = lambda peer, message: None
        """The callback for every message to a peer."""
        self._said: list[tuple[str, Message]] = []
        self._something = Signal()

    def say(self, peer: str, message: Message) -> None:
        """Have a peer send a message now."""
        self._said.append((peer, message))
        self._something.set()

    async def receive(self) -> list[tuple[str, Message]]:
        while not self._said:
            await self._something.wait()
        said, self._said = self._said, []
        return said

    def send(self, peer: str, message: Message) -> None:
        self.told(peer, message)

    def dismiss(self, message: Message) -> None:
        """Do nothing: no peer is there."""

    def close(self) -> None:
        """Do nothing: no message is on its way."""


class Harness:
    """The parts of a replayed run; make it where an event loop runs."""

    def __init__(
        self, config: Config, *, ledger: Ledger, journal: Journal, num_siblings: int | None = None, scorer_hub: Hub | None = None
    ) -> None:
        """Let peers be silent for as long as they were; a `scorer_hub` has a real scorer, whose deadlines are the run's.

        Groups have `num_siblings`, a greedy one included; without it, as many as the settings say.
        """
        self.engine_hub, self.trainer_hub, recorded = RecordedHub(), RecordedHub(), RecordedHub()
        self.scorer_hub = recorded
        advantages = MethodAdvantages(method_of(config), config.reward, correct_reward=config.algorithm.correct_reward)
        rules = advantages.step_rules()
        if num_siblings is not None:
            config = changed(config, rollout={"group_size": num_siblings - rules.adds_greedy})
        endless = {"ready_deadline_s": UNLIMITED_S, "silent_after_s": UNLIMITED_S}
        if scorer_hub is None:
            config = changed(config, engine=endless, trainer=endless, scorer={"silent_after_s": UNLIMITED_S})
        self.ledger = ledger
        self.parts = Parts(
            config,
            Dependencies(
                engine_hub=self.engine_hub,
                scorer_hub=scorer_hub or recorded,
                trainer_hub=self.trainer_hub,
                source=_NoPrompts(),
                held_out=[],
                group_advantages=advantages,
                step_rules=rules,
                journal=journal,
                ledger=ledger,
                is_replay=True,
            ),
        )
        self.pipeline = Pipeline(self.parts)

    def stage(self, kind: type[_S]) -> _S:
        """Return the live stage of this class. Its own channels are those to feed and to take from: another stage may stand beside it."""
        return next(stage for stage in self.pipeline.stages if isinstance(stage, kind))

    async def run(self, *stages: Stage, script: Coroutine[Any, Any, _T]) -> _T:
        """Run these stages until the script has ended; return what it returns. Raises what a stage raises."""
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(task.run()) for task in (*self.parts.peers, *stages)]
            result = await script
            for task in tasks:
                task.cancel()
        return result


@contextlib.contextmanager
def records(folder: Path, *, ledger: Path | None = None, keep_groups: int = 0) -> Iterator[tuple[Ledger, Journal]]:
    """Open the ledger, in memory without a path, and the journal of a replay."""
    with (
        contextlib.closing(Ledger(ledger, keep_groups=keep_groups)) as opened,
        contextlib.closing(Journal(folder, "orchestrator")) as journal,
    ):
        yield opened, journal


def changed(config: Config, **sections: dict[str, Any]) -> Config:
    """Return the settings with some keys of sections changed."""
    return config.model_copy(update={name: getattr(config, name).model_copy(update=values) for name, values in sections.items()})


def without_prm(config: Config) -> Config:
    """Return the settings without a process reward model: what it said is part of what is recorded."""
    return changed(config, prm={"path": None, "judge": config.prm.judge.model_copy(update={"url": None})})


def as_scored(config: Config) -> Config:
    """Return the settings without parts between generation and batching: each trajectory is recorded with all that it was given there."""
    config = config.model_copy(update={"reward": tuple(reward.model_copy(update={"per": "sample"}) for reward in config.reward)})
    return without_prm(config)


def empty_completion(request: Generate, *, finish: Finish) -> Completion:
    """Return an answer of no tokens: what was sampled is in the ledger, and matters to nobody here."""
    nothing = np.zeros(0, np.int32)
    logprobs = np.zeros(0, np.float32)
    return Completion(
        rollout_id=request.rollout_id, attempt=request.attempt, token_ids=nothing, logprobs=logprobs, versions=nothing, finish=finish
    )


class _NoPrompts:
    """A source of prompts (`stages.prompts.Source`) that nobody draws from: the recorded ones are given to generation."""

    def __init__(self) -> None:
        self.position: tuple[int, int] = (0, 0)
        self.resting: dict[int, Rest] = {}

    def measured(self, prompt_id: str, *, success: float) -> None:
        """Do nothing: no draw depends on it."""

    def next(self) -> Prompt:
        raise AssertionError("the stage of prompts is replayed without a harness")
