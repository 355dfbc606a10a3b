"""The orchestrator's peers as a bench has them, which answer at once, and a run of the real stages among them.

The peers know no transport: a bench carries what they say over real sockets, or in memory (`LoopHub`).
"""

from __future__ import annotations

import asyncio
import collections
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.advantages import MethodAdvantages
from orchestrator.ledger.ledger import Ledger
from orchestrator.parts import Dependencies
from orchestrator.rules.curriculum import Rest
from orchestrator.rules.validation.announcements import MAX_SLOTS
from orchestrator.run import Run
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.messages import (
    CheckpointSaved,
    Completion,
    EndTraining,
    EngineLoad,
    EngineReady,
    Finish,
    Generate,
    LayoutFixed,
    Message,
    MicroBatch,
    Outcome,
    PolicyPublished,
    Prompt,
    Request,
    Result,
    ScorerLoad,
    ScorerReady,
    StageWeights,
    StepClosed,
    StepDone,
    TakeMicroBatch,
    TrainerReady,
    TrainingEnded,
    WeightsCommitted,
)
from pipelinerl.observe.journal import Journal

TOKENS = 1000
GROUP_SIZE = 8


def completion(rollout_id: str, *, attempt: int = 0, num_tokens: int = TOKENS, version: int = 0) -> Completion:
    return Completion(
        rollout_id=rollout_id,
        attempt=attempt,
        token_ids=np.arange(num_tokens, dtype=np.int32),
        logprobs=np.full(num_tokens, -0.5, np.float32),
        versions=np.full(num_tokens, version, np.int32),
        finish=Finish.STOP,
    )


class Prompts:
    """The same prompt of 32 tokens, for ever."""

    def __init__(self) -> None:
        self._token_ids = np.arange(32, dtype=np.int32)
        self._count = 0
        self.position = (0, 0)
        self.resting: dict[int, Rest] = {}

    def measured(self, prompt_id: str, *, success: float) -> None:
        """Every prompt is as hard as the next."""

    def next(self) -> Prompt:
        self._count += 1
        return Prompt(prompt_id=f"0:{self._count}", text="", token_ids=self._token_ids)


class Meter(Journal):
    """A journal that also notes wall and processor time at every step, and says when there are enough."""

    def __init__(self, run_folder: Path, *, enough: int = 1 << 30) -> None:
        super().__init__(run_folder, "orchestrator")
        self.steps: list[tuple[float, float]] = []
        self.when_enough: Callable[[str], None] = lambda reason: None
        self._enough = enough

    def write(self, kind: str, **fields: Any) -> None:
        super().write(kind, **fields)
        if kind == "step":
            self.steps.append((time.perf_counter(), time.process_time()))
            if len(self.steps) == self._enough:
                self.when_enough("measured")

    def spent(self, since: int) -> tuple[float, float]:
        """Seconds of wall and of processor from a step to the last."""
        (wall, cpu), (last_wall, last_cpu) = self.steps[since], self.steps[-1]
        return last_wall - wall, last_cpu - cpu


class Peers:
    """Engines, a scorer and a trainer that answer at once; what each would do, without a transport.

    Engines answer the oldest request once they hold more than `in_flight` among them, and hold none after the last of `num_rollouts`.
    """

    def __init__(self, *, num_engines: int, num_tokens: int, in_flight: int, steps: int, num_rollouts: int | None = None) -> None:
        self._num_engines = num_engines
        self._in_flight = in_flight
        self._steps = steps
        self._num_left = num_rollouts
        self._held: collections.deque[tuple[str, Generate]] = collections.deque()
        self._templates = {0: completion("", num_tokens=num_tokens)}
        """By version."""
        self._versions: dict[str, int] = collections.defaultdict(int)
        """Of each engine."""
        self._num_scored = 0
        self._step = 0
        self._row = 0

    def announce(self) -> Iterator[tuple[str, Message]]:
        for engine_id in range(self._num_engines):
            yield (
                f"engine-{engine_id}",
                EngineReady(engine_id=engine_id, process_id=0, max_model_tokens=1 << 20, max_running=MAX_SLOTS, tensors=()),
            )
        yield "scorer-0", ScorerReady(scorer_id=0, process_id=0, num_slots=256)
        yield "trainer-0", TrainerReady(replica=0, num_replicas=1, process_id=0, version=0)

    def signs_of_life(self) -> Iterator[tuple[str, Message]]:
        for engine_id in range(self._num_engines):
            yield (
                f"engine-{engine_id}",
                EngineLoad(
                    engine_id=engine_id,
                    version=self._step,
                    num_running=0,
                    num_waiting=0,
                    num_tokens=self._step,
                    num_steps=0,
                    busy_s=0.0,
                    idle_s=0.0,
                ),
            )
        yield "scorer-0", ScorerLoad(scorer_id=0, num_running=0, num_scored=0, busy_s=0.0)

    def answer(self, peer: str, message: Message) -> Iterator[tuple[str, Message]]:
        match message:
            case Generate():
                self._held.append((peer, message))
                if self._num_left is not None:
                    self._num_left -= 1
                while len(self._held) > (0 if self._num_left == 0 else self._in_flight):
                    yield self._completion(*self._held.popleft())
            case Request():
                reward = float(self._num_scored % 2)
                scored = {"rewards": (reward,), "components": ({"reward": reward},)}
                yield peer, Result(request_id=message.request_id, outcome=Outcome.OK, **scored)
                self._num_scored += 1
            case StageWeights():
                engine_id = int(peer.rpartition("-")[2])
                self._versions[peer] = message.version
                yield (
                    peer,
                    WeightsCommitted(engine_id=engine_id, version=message.version, pause_s=0.0, stage_s=0.0, num_running=0),
                )
            case LayoutFixed():
                yield from self._pulls(2)
            case MicroBatch():
                yield from self._pulls(1)
            case StepClosed() if message.step == self._step:  # a pull ahead may bring it twice
                self._step, self._row = message.step + 1, 0
                yield peer, StepDone(step=message.step, metrics={})
                yield (
                    peer,
                    PolicyPublished(version=message.step + 1, buffer=f"buffer-{message.step}", digest="", num_bytes=0, publish_s=0.0),
                )
                if message.step + 1 == self._steps:
                    yield peer, CheckpointSaved(version=self._steps, commit=message.commit, num_bytes=0, save_s=0.0)
                yield from self._pulls(2)
            case EndTraining():
                yield peer, TrainingEnded(version=self._step)
            case _:
                return

    def _pulls(self, count: int) -> Iterator[tuple[str, Message]]:
        for _ in range(count):
            if self._step < self._steps:
                yield "trainer-0", TakeMicroBatch(replica=0, step=self._step, index=self._row)
                self._row += 1

    def _completion(self, peer: str, request: Generate) -> tuple[str, Message]:
        version = self._versions[peer]
        if version not in self._templates:
            self._templates[version] = completion("", num_tokens=len(self._templates[0].token_ids), version=version)
        template = self._templates[version]
        return peer, Completion(
            rollout_id=request.rollout_id,
            attempt=request.attempt,
            token_ids=template.token_ids,
            logprobs=template.logprobs,
            versions=template.versions,
            finish=Finish.STOP,
        )


def config_of(*, num_engines: int, max_running: int, groups_per_step: int, steps: int, max_staleness: int, num_tokens: int) -> Config:
    return parse(
        {
            "model": {"path": "unused"},
            "data": {"source": "unused"},
            "reward": [{"function": "unused:reward"}],
            "rollout": {"group_size": GROUP_SIZE, "max_tokens": num_tokens},
            "engine": {"kind": "fake", "count": num_engines, "max_running": 64},
            "batch": {"groups_per_step": groups_per_step, "max_tokens": 8 * (num_tokens + 32)},
            "pipeline": {"max_staleness": max_staleness, "max_running": max_running, "queue_bytes": 1 << 30},
            "trainer": {"steps": steps},
        },
        origin="bench",
    )


def run_of(config: Config, hubs: Sequence[Any], journal: Journal, ledger: Ledger, *, in_script: bool = False) -> Run:
    return Run(
        config,
        Dependencies(
            engine_hub=hubs[0],
            scorer_hub=hubs[1],
            trainer_hub=hubs[2],
            source=Prompts(),
            held_out=[],
            group_advantages=MethodAdvantages(method_of(config), config.reward),
            journal=journal,
            ledger=ledger,
            in_script=in_script,
        ),
    )


class LoopHub:
    """A hub whose peers stand behind it: what is sent is answered at once, in memory and without bytes, by `answer`."""

    def __init__(self) -> None:
        self.refused: collections.Counter[str] = collections.Counter()
        self.inbox: list[tuple[str, Message]] = []
        self.something = asyncio.Event()
        self.answer: Callable[[str, Message], None] = lambda peer, message: None

    def put(self, peer: str, message: Message) -> None:
        self.inbox.append((peer, message))
        self.something.set()

    async def receive(self) -> list[tuple[str, Message]]:
        await asyncio.sleep(0)
        while not self.inbox:
            self.something.clear()
            await self.something.wait()
        arrived, self.inbox = self.inbox[:256], self.inbox[256:]
        return arrived

    def send(self, peer: str, message: Message) -> None:
        self.answer(peer, message)

    def dismiss(self, message: Message) -> None:
        pass

    def close(self) -> None:
        pass


def hubs_of(peers: Peers) -> tuple[LoopHub, LoopHub, LoopHub]:
    """Return hubs of engines, scorer and trainer behind which these peers stand, who have announced themselves."""
    hubs = {role: LoopHub() for role in ("engine", "scorer", "trainer")}

    def answer(peer: str, message: Message) -> None:
        for name, reply in peers.answer(peer, message):
            hubs[name.partition("-")[0]].put(name, reply)

    for hub in hubs.values():
        hub.answer = answer
    for name, message in peers.announce():
        hubs[name.partition("-")[0]].put(name, message)
    return hubs["engine"], hubs["scorer"], hubs["trainer"]
