"""A simulated run in which every process may be killed at any instant, seeded: the orchestrator too, which then goes on from its ledger.

A killed process is a cancelled coroutine whose link is closed; what it had not written, or not yet sent, is gone. What survives is the
ledger's file, as far as it was flushed, and the trainer's disk. A trainer that starts again trains what it is given, and notes whether it
is what it was given before.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import functools
import hashlib
import random
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from orchestrator.controller import driven, open_record
from orchestrator.ledger.ledger import Ledger
from orchestrator.parts import Dependencies
from orchestrator.rules.batch import GroupAdvantages, StepRules
from orchestrator.run import Run, RunResult
from orchestrator.scripted_run import ScriptedRun
from orchestrator.stages.leasing import Table
from orchestrator.stages.script_replay import ScriptRecord
from pipelinerl.checker.history import open_history
from pipelinerl.checker.invariants import check_history
from pipelinerl.checker.state import RunState
from pipelinerl.config import Config
from pipelinerl.messages import (
    CheckpointSaved,
    ComputeLogprobs,
    Demonstration,
    FromEngine,
    FromGateway,
    FromScorer,
    FromTrainer,
    LayoutFixed,
    Message,
    MicroBatch,
    PolicyPublished,
    Starting,
    StepClosed,
    StepDone,
    Stop,
    TakeMicroBatch,
    ToEngine,
    ToGateway,
    ToScorer,
    ToTrainer,
    TrainerReady,
    WeightBufferReleased,
)
from pipelinerl.observe.journal import Journal
from pipelinerl.storage.checkpoint_folder import Manifest, name_of, set_aside, set_aside_before, write_manifest
from pipelinerl.transport.base import Introduction
from tests.sim import agents, peers
from tests.sim.clock import simulate
from tests.sim.memory import NO_FAULTS, MemoryHub, MemoryLink, NetworkFaults
from tests.sim.run import Prompts, demonstration, mean_baseline, prompt_of
from trainer.session import TrainerSession

KEPT = 2
"""Checkpoints that a trainer keeps."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Faults:
    """Mean seconds between two kills of each role (exponential); 0: never. Kills stop after `until_s`, so that the run can end."""

    seed: int = 0
    engine_s: float = 0.0
    scorer_s: float = 0.0
    prm_s: float = 0.0
    gateway_s: float = 0.0
    trainer_s: float = 0.0
    orchestrator_s: float = 0.0
    until_s: float = 60.0
    restart_s: float = 0.5
    """From a death to the process that follows."""
    load_s: float = 0.5
    """What an engine or scorer then needs to load."""
    spoils: bool = False
    """Every trainer that starts finds the newest checkpoint damaged, where it has an older one."""
    killer_rollouts: frozenset[str] = frozenset()
    """Rollouts that kill the trainer that computes a row with one of them."""
    killer_tokens: frozenset[int] = frozenset()
    """First tokens of prompts that kill the engine that runs them."""


@dataclasses.dataclass(slots=True)
class Disk:
    """What a trainer leaves to the one after it."""

    folder: Path
    whole: list[tuple[int, str, dict[int, list[tuple[str, ...]]]]] = dataclasses.field(default_factory=list)
    """Version, commit and rows of the steps of each checkpoint that is kept, oldest first."""
    seen: dict[int, list[tuple[str, ...]]] = dataclasses.field(default_factory=dict)
    """Rows of every step that any trainer was ever given: what a replay must repeat."""
    supervised: dict[int, tuple[Demonstration, ...]] = dataclasses.field(default_factory=dict)
    """Demonstrations of every step that was closed, likewise."""
    changed: list[str] = dataclasses.field(default_factory=list)
    """Replays that did not repeat."""
    in_progress: str = ""
    """Row that a trainer is computing, as `step/row`; what is left of one that died."""
    deaths: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    """How many trainers died with a row in hand."""
    record: peers.TrainerRecord = dataclasses.field(default_factory=peers.TrainerRecord)

    def save(self, version: int, commit: str, trained: dict[int, list[tuple[str, ...]]]) -> None:
        samples = [f"{step}/{name}" for step, rows in trained.items() for row in rows for name in row]
        total = sum(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") for name in samples)
        folder = self.folder / "checkpoints" / name_of(version)
        folder.mkdir(parents=True)
        about = {"version": version, "commit": commit, "num_samples": len(samples), "samples": f"{total % 2**64:016x}", "files": {}}
        write_manifest(folder, Manifest(**about))
        before = [one for one in self.whole if one[0] < version][1 - KEPT :]
        self.whole = [*before, (version, commit, trained)]

    @property
    def version(self) -> int:
        return self.whole[-1][0] if self.whole else 0

    @property
    def oldest(self) -> int:
        return self.whole[0][0] if len(self.whole) == KEPT else 0

    def spoil(self) -> bool:
        """Have the newest checkpoint be damaged and set aside, where there is an older one; return whether there was."""
        if len(self.whole) < KEPT:
            return False
        version, _, _ = self.whole.pop()
        set_aside(self.folder / "checkpoints" / name_of(version), "a bit flipped")
        return True


@dataclasses.dataclass(slots=True, kw_only=True)
class Survived:
    """What came of a run under kills."""

    ending: RunResult
    checker: RunState
    disk: Disk
    kills: collections.Counter[str]
    seconds: float
    rows: list[tuple[Any, ...]]
    device_problems: list[str]
    """Of a colocated run."""

    def problems(self) -> list[str]:
        return [
            *self.checker.problems,
            *self.disk.changed,
            *self.device_problems,
            *[f"{name} mislabelled" for name in self.disk.record.mislabelled],
        ]


def survive(
    settings: Config,
    *,
    folder: Path,
    faults: Faults,
    world: peers.World | None = None,
    network: NetworkFaults = NO_FAULTS,
    checkpoint_every: int = 3,
    limit_s: float = 1e5,
    group_advantages: GroupAdvantages = mean_baseline,
    step_rules: StepRules | None = None,
    script: Callable[[ScriptedRun], Coroutine[Any, Any, None]] | None = None,
    replays: bool = False,
    prompts: Callable[[int], Prompts] = Prompts,
) -> Survived:
    """Run to the end, whoever is killed on the way. Raises `TimeoutError` for a run that hangs. A `script` dies with the orchestrator, and
    begins again with the one that follows; with `replays` it is led through its calls.
    """
    chaos = Chaos(settings, folder, faults, world or peers.World(), network, checkpoint_every)
    chaos.group_advantages, chaos.step_rules, chaos.script, chaos.replays = group_advantages, step_rules, script, replays
    chaos.prompts = prompts

    async def program() -> Survived:
        async with asyncio.timeout(limit_s):
            return await chaos.run()

    return simulate(program())


async def killed(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """End tasks as the end of their process would: a run that a script drives does not even save."""
    while not all(task.done() for task in tasks):
        for task in (*tasks, *(one for one in asyncio.all_tasks() if one.get_name() == "run")):
            task.cancel()
        await asyncio.sleep(0)
    await asyncio.gather(*tasks, return_exceptions=True)


class Chaos:
    def __init__(
        self, settings: Config, folder: Path, faults: Faults, world: peers.World, network: NetworkFaults, checkpoint_every: int
    ) -> None:
        self.settings = settings
        self.folder = folder
        self.faults = faults
        self.world = peers.world_of(settings, world)
        self.network = network
        self.checkpoint_every = checkpoint_every
        self.group_advantages: GroupAdvantages = mean_baseline
        self.step_rules: StepRules | None = None
        self.script: Callable[[ScriptedRun], Coroutine[Any, Any, None]] | None = None
        self.replays = False
        self.lends = True
        """False where another policy speaks with the gateway."""
        self.prompts: Callable[[int], Prompts] = Prompts
        self.disk = Disk(folder)
        self.kills: collections.Counter[str] = collections.Counter()
        self.chance = random.Random(faults.seed)
        self.hubs = self.make_hubs()

    async def run(self) -> Survived:
        loop = asyncio.get_running_loop()
        with contextlib.closing(Journal(self.folder, "orchestrator")) as journal:
            roles = [asyncio.create_task(role) for role in self.roles()]
            try:
                while (ended := await self._life(journal, roles)) is None:
                    self.kills["orchestrator"] += 1
                    for hub in self.hubs:
                        hub.kill()
                    await asyncio.sleep(self.faults.restart_s)
                    dead, self.hubs = self.hubs, self.make_hubs()
                    for hub, before in zip(self.hubs, dead, strict=True):
                        hub.succeed(before)
            finally:
                for role in roles:
                    role.cancel()
                await asyncio.gather(*roles, return_exceptions=True)
        ending, rows = ended
        with open_history(self.folder) as history:
            checker = check_history(history)
        return Survived(
            ending=ending,
            checker=checker,
            disk=self.disk,
            kills=self.kills,
            seconds=loop.time(),
            rows=rows,
            device_problems=[] if self.world.device is None else self.world.device.problems,
        )

    def make_hubs(self) -> list[MemoryHub]:
        return [MemoryHub(accepts=accepts, network=self.network) for accepts in (FromEngine, FromScorer, FromTrainer, FromGateway)]

    def open_run(
        self, journal: Journal, *, in_script: bool, record: ScriptRecord | None = None, policy: str = "", table: Table | None = None
    ) -> tuple[Run, Ledger]:
        """What a life of the orchestrator begins with."""
        ledger = Ledger(self.folder / "ledger.sqlite")
        run = Run(
            self.settings,
            Dependencies(
                engine_hub=self.hubs[0],
                scorer_hub=self.hubs[1],
                trainer_hub=self.hubs[2],
                gateway_hub=self.hubs[3] if self.lends else None,
                policy=policy,
                table=table,
                source=self.prompts(self.world.seed),
                held_out=[],
                group_advantages=self.group_advantages,
                step_rules=self.step_rules,
                journal=journal,
                ledger=ledger,
                in_script=in_script,
                record=record,
            ),
        )
        return run, ledger

    async def _life(self, journal: Journal, roles: list[asyncio.Task[None]]) -> tuple[RunResult, list[tuple[Any, ...]]] | None:
        """One life of the orchestrator, which its peers outlive; None where it was killed."""
        record_open = contextlib.AsyncExitStack()
        record = open_record(self.folder, {"": self.folder}, stack=record_open) if self.replays else None
        run, ledger = self.open_run(journal, in_script=self.script is not None, record=record)
        main = asyncio.create_task(run.run() if self.script is None else self._scripted(run, self.script))
        try:
            await asyncio.wait({main, *roles}, timeout=self.until_kill(self.faults.orchestrator_s), return_when=asyncio.FIRST_COMPLETED)
            if not main.done() and not any(role.done() for role in roles):
                ledger.store.abandon()
                return None
            ending = await main
            rows = ledger.terminal_statuses()
            ledger.close()
            return ending, rows
        finally:
            for hub in self.hubs if not main.done() else ():
                hub.kill()  # a script that is cancelled ends its run well, one that is killed cannot
            await killed([main])
            await record_open.aclose()

    def asked(self, run: Run) -> ScriptedRun:
        """What a script has of a run."""
        return ScriptedRun(run, config=self.settings, folder=self.folder, prompt_of=prompt_of, decode=str, demonstration=demonstration)

    async def _scripted(self, run: Run, script: Callable[[ScriptedRun], Coroutine[Any, Any, None]]) -> RunResult:
        async with driven(run, self.asked(run), launcher=None) as scripted:
            await script(scripted)
        assert run.result is not None
        return run.result

    def engines(self) -> list[Coroutine[Any, Any, None]]:
        def engine(link: MemoryLink, engine_id: int) -> Coroutine[Any, Any, None]:
            return peers.engine(link, engine_id=engine_id, max_running=self.settings.engine.max_running, world=self.world)

        return [
            self._kept_alive(
                f"engine-{engine_id}",
                every_s=self.faults.engine_s,
                connect=lambda name: self.hubs[0].connect(name, accepts=ToEngine),
                serve=lambda link, engine_id=engine_id: engine(link, engine_id),
            )
            for engine_id in range(self.settings.engine.count)
        ]

    def roles(self) -> list[Coroutine[Any, Any, None]]:
        engines = self.engines()
        scorer = self._kept_alive(
            "scorer-0",
            every_s=self.faults.scorer_s,
            connect=lambda name: self.hubs[1].connect(name, accepts=ToScorer),
            serve=lambda link: peers.scorer(link, num_slots=4, world=self.world),
        )
        trainer = self._kept_alive(
            "trainer-0",
            every_s=self.faults.trainer_s,
            connect=lambda name: self.hubs[2].connect(name, accepts=ToTrainer),
            serve=self._trainer,
        )
        if self.settings.gateway is not None and not self.lends:
            return [*engines, scorer, trainer]
        if self.settings.gateway is not None:
            gateway = self._kept_alive(
                "gateway-0",
                every_s=self.faults.gateway_s,
                connect=lambda name: self.hubs[3].connect(name, accepts=ToGateway),
                serve=lambda link: agents.gateway(link, world=self.world),
            )
            return [*engines, scorer, gateway, trainer]
        if self.settings.prm.path is None:
            return [*engines, scorer, trainer]
        prms = [
            self._kept_alive(
                f"prm-{prm_id}",
                every_s=self.faults.prm_s,
                connect=lambda name: self.hubs[1].connect(name.replace("prm", "scorer"), accepts=ToScorer),
                serve=functools.partial(peers.prm, world=self.world, prm_id=prm_id),
            )
            for prm_id in range(1, 1 + self.settings.prm.count)
        ]
        return [*engines, scorer, *prms, trainer]

    async def _kept_alive(
        self,
        name: str,
        *,
        every_s: float,
        connect: Callable[[str], MemoryLink],
        serve: Callable[[MemoryLink], Coroutine[Any, Any, None]],
    ) -> None:
        """A process and its launcher."""
        role, is_first = name.partition("-")[0], True
        while True:
            link = connect(name)
            if not is_first:
                if role == "engine":
                    link.send(Starting(process_id=0))
                await asyncio.sleep(self.faults.load_s)
            task = asyncio.create_task(self._serve(role, link, serve))
            try:
                await asyncio.wait({task}, timeout=self.until_kill(every_s))
                if task.done() and not isinstance(task.exception(), _KilledByPrompt):
                    await task
                    return
            finally:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
                link.close()
            self.kills[role] += 1
            is_first = False
            await asyncio.sleep(self.faults.restart_s)

    async def _serve(self, role: str, link: MemoryLink, serve: Callable[[MemoryLink], Coroutine[Any, Any, None]]) -> None:
        killers = self.faults.killer_tokens
        await serve(_Deadly(link, killers) if role == "engine" and killers else link)  # pyright: ignore[reportArgumentType]

    def until_kill(self, every_s: float) -> float | None:
        if not every_s or asyncio.get_running_loop().time() >= self.faults.until_s:
            return None
        return self.chance.expovariate(1 / every_s)

    # --- the trainer ---

    async def _trainer(self, link: MemoryLink) -> None:
        heartbeat = asyncio.create_task(peers.live_on(link, every_s=5.0))
        try:
            await self._train(link)
        finally:
            heartbeat.cancel()

    async def _train(self, bare: MemoryLink) -> None:
        disk, num_steps = self.disk, self.settings.trainer.steps
        if self.faults.spoils and disk.spoil():
            self.kills["checkpoint"] += 1
        first, commit, before = disk.whole[-1] if disk.whole else (0, "", {})
        trained = dict(before)
        damaged = tuple(one for one in set_aside_before(self.folder / "checkpoints") if one.version > first)
        ready = TrainerReady(replica=0, num_replicas=1, process_id=next(peers.process_ids), version=first, commit=commit)
        suspects, disk.in_progress = (disk.in_progress,) if disk.in_progress else (), ""
        disk.deaths.update(suspects)
        link = _Outliving(bare, msgspec.structs.replace(ready, oldest=disk.oldest, damaged=damaged, suspects=suspects))
        while not isinstance(layout := await link.wait(), LayoutFixed):
            pass  # what was meant for the one before
        # In place, every policy of a trainer's lies in one buffer of its own, the first included; engines apart have copies.
        own, device = f"in-place-{ready.process_id}", self.world.device
        free = [f"buffer-{ready.process_id}-{number}" for number in range(3)] if device is None or layout.num_apart else []

        def publish(version: int) -> None:
            if device is not None:
                link.send(peers.in_place(device, own, version=version, free=free))
            else:
                link.send(PolicyPublished(version=version, buffer=free.pop(0), digest="", num_bytes=0, publish_s=0.0))

        if first or device is not None:
            publish(first)
        saving: asyncio.Task[None] | None = None
        try:
            for step in range(first, num_steps):
                rows, seal = await self._train_step(link, step, free, own=own)
                if seal is None:
                    return
                trained[step] = rows
                while not free and (device is None or layout.num_apart):
                    await peers._next(link, free, wanted=WeightBufferReleased)
                link.send(StepDone(step=step, metrics={"loss": 0.0}))
                publish(step + 1)
                if (step + 1) % self.checkpoint_every == 0 or step + 1 == num_steps:
                    if saving is not None:
                        await saving
                    saving = asyncio.create_task(self._save(link, step + 1, seal.commit, dict(trained)))
            await peers._next(link, free, wanted=Stop)
        finally:
            if saving is not None and not saving.done():
                saving.cancel()

    async def _train_step(
        self, link: _Outliving, step: int, free: list[str], *, own: str
    ) -> tuple[list[tuple[str, ...]], StepClosed | None]:
        rows: list[tuple[str, ...]] = []
        seen = self.disk.seen.setdefault(step, [])
        while True:
            link.send(TakeMicroBatch(replica=0, step=step, index=len(rows)))
            answer = await peers._next(link, free)
            if isinstance(answer, Stop):
                return rows, None
            if isinstance(answer, ComputeLogprobs):
                link.send(peers.logprobs_of(answer, version=step))
                continue
            if isinstance(answer, StepClosed):
                before = self.disk.supervised.setdefault(step, answer.demonstrations)
                if [one.token_ids.tolist() for one in before] != [one.token_ids.tolist() for one in answer.demonstrations]:
                    self.disk.changed.append(f"step {step} had other demonstrations before")
                self.disk.record.losses[step].add(answer.loss)
                return rows, answer
            assert isinstance(answer, MicroBatch)
            self.disk.in_progress = f"{step}/{len(rows)}" if answer.rollout_ids else ""
            if not self.faults.killer_rollouts.isdisjoint(answer.rollout_ids):
                seen += [answer.rollout_ids] * (len(rows) == len(seen))
                raise _KilledByPrompt
            if len(rows) < len(seen):
                is_refused = not answer.rollout_ids and self.disk.deaths[f"{step}/{len(rows)}"] >= 2  # by chance, maybe
                if seen[len(rows)] != answer.rollout_ids and not is_refused:
                    self.disk.changed.append(f"row {len(rows)} of step {step} was {seen[len(rows)]}, and is {answer.rollout_ids}")
            else:
                seen.append(answer.rollout_ids)
                peers.note(answer, self.disk.record)
            rows.append(answer.rollout_ids)
            with peers.changed(self.world.device, own):
                await asyncio.sleep(self.world.token_s * len(answer.token_ids))
            self.disk.in_progress = ""

    async def _save(self, link: _Outliving, version: int, commit: str, trained: dict[int, list[tuple[str, ...]]]) -> None:
        await asyncio.sleep(0.2)
        self.disk.save(version, commit, trained)
        await asyncio.sleep(0.01)
        link.send(CheckpointSaved(version=version, commit=commit, num_bytes=0, save_s=0.2, oldest=self.disk.oldest))


class _Outliving:
    """A trainer's link, whose owner need not know that the orchestrator died."""

    def __init__(self, link: MemoryLink, ready: TrainerReady) -> None:
        self._link = link
        self._session = TrainerSession(ready)
        self._asked: TakeMicroBatch | None = None
        link.introduce(self._introduce)

    def send(self, message: Message) -> None:
        if isinstance(message, TakeMicroBatch):
            self._asked = message
        self._session.record_sent(message)
        self._link.send(message)

    async def wait(self) -> Message:
        message = await self._link.wait()
        self._session.record_received(message)
        if isinstance(message, LayoutFixed):
            for published in self._session.published():
                self._link.send(published)
        elif isinstance(message, MicroBatch | StepClosed):
            self._asked = None
        return message

    def _introduce(self, kept: Sequence[bytes]) -> list[Message]:
        return [*self._session.introduction(), *([self._asked] if self._asked else [])]


class _KilledByPrompt(Exception):
    """A prompt ended the engine that was asked for it."""


class _Deadly:
    """A link through which some prompts kill."""

    def __init__(self, link: MemoryLink, killers: frozenset[int]) -> None:
        self._link = link
        self._killers = killers

    def introduce(self, make: Introduction) -> None:
        self._link.introduce(make)

    def send(self, message: Any) -> None:
        self._link.send(message)

    def receive(self, timeout_s: float) -> Any:
        return self._look(self._link.receive(timeout_s))

    async def wait(self) -> Any:
        return self._look(await self._link.wait())

    def _look(self, message: Any) -> Any:
        token_ids = getattr(message, "token_ids", None)
        if token_ids is not None and int(token_ids[0]) in self._killers:
            raise _KilledByPrompt
        return message
