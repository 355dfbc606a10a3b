"""Recorded peers stand in for engines and trainer: they send their recorded messages at the recorded times, and keep what they are sent.

The stages around them are the real ones, on simulated time, so a run of hours is over in seconds.
"""

from __future__ import annotations

import asyncio
import collections
from collections.abc import Callable, Iterable
from pathlib import Path

from orchestrator.channels import make_channels
from orchestrator.observe.progress import Progress
from orchestrator.peers.engines import Engines
from orchestrator.peers.peers import Peers
from orchestrator.replay.events import Event
from orchestrator.rules.admission import Admission, schedule_of
from orchestrator.stages.weight_sync import WeightSync
from pipelinerl.config import Config
from pipelinerl.errors import LedgerError
from pipelinerl.messages import (
    EngineReady,
    LayoutFixed,
    Message,
    PolicyPublished,
    Starting,
    TrainerReady,
    WeightsCommitted,
    WeightsRefused,
    WeightsStaged,
)
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.stage import Signal, Stage
from pipelinerl.runtime.watch import Watch

ENGINE_KINDS = frozenset({"joined", "left", "staged", "swap", "refused", "policy", "trainer", "pin"})
"""Journal lines that weight sync hears."""
UNLIMITED_S = 1e9
_SAID_BY_ENGINES = {"staged": WeightsStaged, "swap": WeightsCommitted, "refused": WeightsRefused}


class RecordedHub:
    """A hub (`transport.base.Hub`) that no peer is connected to."""

    def __init__(self, *, told: Callable[[str, Message], None] = lambda peer, message: None) -> None:
        """Take `told`, which is also called with every message to a peer."""
        self.refused: collections.Counter[str] = collections.Counter()
        self.sent: list[tuple[float, str, Message]] = []
        """The messages to peers, in order: seconds, peer, message."""
        self._told = told
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
        self.sent.append((asyncio.get_running_loop().time(), peer, message))
        self._told(peer, message)

    def dismiss(self, message: Message) -> None:
        """Do nothing: no peer is there."""

    def close(self) -> None:
        """Do nothing: no message is on its way."""

    def peers(self, role: str) -> Peers:
        """Return peers on this hub, whose silence means nothing."""
        return Peers(self, role=role, expected=0, ready_deadline_s=UNLIMITED_S, silent_after_s=UNLIMITED_S)


class RecordedEngines:
    """Weight sync, the engines as the orchestrator knows them, and the parts that both share with generation."""

    def __init__(self, config: Config, *, journal: Journal, told: Callable[[str, Message], None] = lambda peer, message: None) -> None:
        self.config = config
        self.engine_hub = RecordedHub(told=told)
        self.trainer_hub = RecordedHub()
        self.watch = Watch(stall_limit_s=UNLIMITED_S)
        self.credits = Signal()
        self.admission = Admission(
            schedule=schedule_of(config.pipeline.mode, max_staleness=config.pipeline.max_staleness),
            groups_per_step=config.batch.groups_per_step,
            num_steps=config.trainer.steps,
            max_running=config.max_running_rollouts,
        )
        self.channels = make_channels(watch=self.watch, queue_bytes=config.pipeline.queue_bytes, num_policies=config.trainer.steps)
        self.peers = (self.engine_hub.peers("engine"), self.trainer_hub.peers("trainer"))
        self.engines = Engines(self.peers[0], expected=config.engine.count, watch=self.watch, credits=self.credits)
        self._num_joined = 0
        self.weight_sync = WeightSync(
            published=self.channels.published,
            engines=self.engines,
            trainer=self.peers[1],
            admission=self.admission,
            credits=self.credits,
            progress=Progress(journal=journal, started_s=0.0),
            journal=journal,
            layout_for=lambda trainer: LayoutFixed(tensors=()),
            commit_deadline_s=config.pipeline.stall_limit_s,
        )

    def hear(self, event: Event) -> None:
        """Repeat one event of engines or policies."""
        fields = {name: value for name, value in event.fields.items() if name not in ("t", "kind", "process")}
        peer = f"engine-{fields.get('engine_id')}"
        if event.kind == "trainer":
            self.channels.published.put_now(TrainerReady(replica=0, num_replicas=1, process_id=0, **fields))
        elif event.kind == "policy":
            self.channels.published.put_now(PolicyPublished(**fields))
        elif event.kind == "pin":
            if (engine := self.engines.find(fields["engine_id"])) is not None:
                self.weight_sync.pin(engine, is_pinned=fields["is_pinned"])
        elif event.kind == "joined":
            self._num_joined += 1
            limits = {"max_model_tokens": 1 << 30, "max_running": 1 << 20, "tensors": ()}
            self.engine_hub.say(peer, EngineReady(process_id=self._num_joined, **fields, **limits))
        elif event.kind == "left":
            self._num_joined += 1
            self.engine_hub.say(peer, Starting(process_id=self._num_joined))
        else:
            self.engine_hub.say(peer, _SAID_BY_ENGINES[event.kind](**fields))


async def run_recorded(events: Iterable[Event], *, hear: Callable[[Event], None], stages: Iterable[Stage | Peers], rest_s: float) -> None:
    """Run stages while every event is repeated at its time, and `rest_s` seconds more. Raises what a stage raises."""
    loop = asyncio.get_running_loop()
    end_s = 0.0
    for event in events:
        loop.call_at(event.t, hear, event)
        end_s = event.t
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(stage.run()) for stage in stages]
        await asyncio.sleep(end_s + rest_s - loop.time())
        for task in tasks:
            task.cancel()


def needed(events: list[Event], *, run_folder: Path) -> list[Event]:
    """Return the events unchanged. Raises `LedgerError` where there are none to replay."""
    if not any(event.kind == "policy" for event in events):
        raise LedgerError(f"{run_folder} has no published policy, so there is nothing to synchronise or to generate with")
    return events
