"""One simulated run: the whole orchestrator, its stages and rules unchanged, among simulated peers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.controller import driven
from orchestrator.ledger.ledger import Ledger
from orchestrator.parts import Dependencies
from orchestrator.rules.batch import GroupAdvantages, StepRules
from orchestrator.rules.curriculum import Rest
from orchestrator.rules.validation.completions import Experts
from orchestrator.run import Run, RunResult
from orchestrator.scripted_run import ScriptedRun
from pipelinerl.config import Config, Mode
from pipelinerl.config.file import parse, write_run
from pipelinerl.messages import (
    Demonstration,
    FromEngine,
    FromGateway,
    FromScorer,
    FromTrainer,
    Prompt,
    ScoredTrajectory,
    ToEngine,
    ToGateway,
    ToScorer,
    ToTrainer,
)
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.membership import Gone, Kind, ScaleFolder
from tests.sim import agents, checker, peers
from tests.sim.clock import simulate
from tests.sim.memory import NO_FAULTS, MemoryHub, NetworkFaults


def config(**sections: dict[str, Any]) -> Config:
    """A small config; each keyword overrides keys of one section."""
    tree: dict[str, Any] = {
        "model": {"path": "unused"},
        "data": {"source": "unused"},
        "reward": [{"function": "unused:reward"}],
        "rollout": {"group_size": 4, "max_tokens": 64},
        "engine": {"kind": "fake", "count": 2, "max_running": 16},
        "batch": {"groups_per_step": 8, "max_tokens": 256},
        "pipeline": {"max_staleness": 4},
        "trainer": {"steps": 10},
    }
    for name, values in sections.items():
        tree[name] = {**tree.get(name, {}), **values}
    return parse(tree, origin="simulation")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """What came of a run."""

    ending: RunResult
    record: peers.TrainerRecord
    rows: list[tuple[Any, ...]]
    """The ledger's."""
    lines: list[dict[str, Any]]
    """The journal's."""
    seconds: float
    """Simulated."""
    settings: Config
    is_scripted: bool

    def problems(self) -> list[str]:
        """What the checker finds wrong with it."""
        pipeline, batch = self.settings.pipeline, self.settings.batch
        bound = {Mode.STREAMING: pipeline.max_staleness, Mode.ONE_STEP_OFF: 1, Mode.SYNC: 0}[pipeline.mode]
        return [
            *checker.check(
                self.rows,
                self.record,
                groups_per_step=None if self.is_scripted else batch.groups_per_step,
                num_steps=len(self.record.sealed) if self.is_scripted else self.settings.trainer.steps,
                max_staleness=bound,
                max_tokens=max(batch.max_tokens, (self.settings.gateway and self.settings.gateway.max_episode_tokens) or 0),
            ),
            *checker.check_counts(self.rows, dataclasses.asdict(self.ending.rollouts)),
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cast:
    """Who plays whom; exchange one to see what the pipeline makes of a peer that misbehaves."""

    engine: Callable[..., Coroutine[Any, Any, None]] = peers.engine
    scorer: Callable[..., Coroutine[Any, Any, None]] = peers.scorer
    trainer: Callable[..., Coroutine[Any, Any, None]] = peers.trainer
    prm: Callable[..., Coroutine[Any, Any, None]] = peers.prm
    gateway: Callable[..., Coroutine[Any, Any, None]] = agents.gateway


class Prompts:
    """Endless seeded prompts of 4 to 12 tokens."""

    def __init__(self, seed: int) -> None:
        self.position: tuple[int, int] = (0, 0)
        self.resting: dict[int, Rest] = {}
        self.heard: list[tuple[str, float]] = []
        """Measured success rates."""
        self._seed = seed

    def measured(self, prompt_id: str, *, success: float) -> None:
        self.heard.append((prompt_id, success))

    def next(self) -> Prompt:
        epoch, row = self.position
        self.position = (epoch, row + 1)
        chance = np.random.default_rng((self._seed, row))
        token_ids = chance.integers(3, 1000, size=chance.integers(4, 13), dtype=np.int32)
        return Prompt(prompt_id=f"{epoch}:{row}", text="", token_ids=token_ids)


def mean_baseline(siblings: tuple[ScoredTrajectory, ...]):
    """R - mean over the group."""
    rewards = np.array([member.score.reward for member in siblings])
    centred = (rewards - rewards.mean()).astype(np.float32)
    return [np.where(member.trajectory.loss_mask, value, 0).astype(np.float32) for member, value in zip(siblings, centred, strict=True)]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Beside:
    """What one who has engines join and leave works with."""

    folder: ScaleFolder
    settings: Config
    hub: MemoryHub
    """Of the engines."""
    world: peers.World
    run: Run
    scorer_hub: MemoryHub
    trainer_hub: MemoryHub
    record: peers.TrainerRecord
    """What trainers have seen."""

    def request_of(self, number: int, kind: str = Kind.ENGINES) -> int:
        """Return the request that brought the engine of this number."""
        found = self.folder.members()
        record = found and found.of(kind)
        return next((one.request_id for one in record.members if one.engine_id == number), 0) if record is not None else 0

    def tell_gone(self, number: int, reason: str, kind: str = Kind.ENGINES) -> None:
        """Say, as whoever has started the engine of this number, that it will not serve any more."""
        self.folder.tell_gone(Gone(kind=kind, engine_id=number, request_id=self.request_of(number, kind), reason=reason))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Circumstances:
    """All of a run but its settings."""

    world: peers.World = peers.World()  # noqa: RUF009 frozen
    network: NetworkFaults = NO_FAULTS
    cast: Cast = Cast()
    group_advantages: GroupAdvantages = mean_baseline
    step_rules: StepRules | None = None
    experts: Experts | None = None
    held_out: tuple[Prompt, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    source: Prompts | None = None
    """None: one of the world's seed."""
    stop_at_s: float | None = None
    """When somebody stops the run."""
    stop_evaluates: bool = True
    script: Callable[[ScriptedRun], Coroutine[Any, Any, None]] | None = None
    """What drives the run; None: its config."""
    beside: Callable[[Beside], Coroutine[Any, Any, None]] | None = None
    """What has engines join and leave; None: a run that keeps those that it began with."""
    is_recorded: bool = False
    """Leave a run folder, as a real run does, in place of a ledger in memory."""
    limit_s: float = 1e6
    """Simulated seconds after which a run that has neither finished nor failed counts as one that hangs."""


def run(settings: Config, *, folder: Path, **circumstances: Any) -> Simulated:
    """Run to the end on simulated time; `circumstances` are those of `Circumstances`."""
    return simulate(_run(settings, folder=folder, given=Circumstances(**circumstances)))


async def _run(settings: Config, *, folder: Path, given: Circumstances) -> Simulated:
    hubs = [MemoryHub(accepts=accepts, network=given.network) for accepts in (FromEngine, FromScorer, FromTrainer, FromGateway)]
    record = peers.TrainerRecord()
    loop = asyncio.get_running_loop()
    path = folder / "ledger.sqlite" if given.is_recorded else None
    ledger, journal = Ledger(path, keep_groups=settings.run.record_groups), Journal(folder, "orchestrator", clock=loop.time)
    write_run(folder, settings)
    with contextlib.closing(ledger), contextlib.closing(journal):
        whole = Run(
            settings,
            Dependencies(
                engine_hub=hubs[0],
                scorer_hub=hubs[1],
                trainer_hub=hubs[2],
                gateway_hub=hubs[3],
                source=given.source or Prompts(given.world.seed),
                held_out=list(given.held_out),
                stop_token_ids=given.stop_token_ids,
                group_advantages=given.group_advantages,
                step_rules=given.step_rules,
                journal=journal,
                ledger=ledger,
                vocabulary=1000,
                experts=given.experts,
                in_script=given.script is not None,
                scale=ScaleFolder(folder) if given.beside is not None else None,
            ),
        )
        if given.stop_at_s is not None:
            loop.call_at(given.stop_at_s, functools.partial(whole.stop, "stopped by hand", evaluates=given.stop_evaluates))
        async with asyncio.timeout(given.limit_s), asyncio.TaskGroup() as group:
            tasks = [group.create_task(peer) for peer in _peers(settings, given=given, hubs=hubs, record=record)]
            if given.beside is not None:
                beside = Beside(
                    folder=ScaleFolder(folder),
                    settings=settings,
                    hub=hubs[0],
                    world=given.world,
                    run=whole,
                    scorer_hub=hubs[1],
                    trainer_hub=hubs[2],
                    record=record,
                )
                tasks.append(group.create_task(given.beside(beside)))
            ending = await whole.run() if given.script is None else await _scripted(whole, settings, folder=folder, script=given.script)
            await asyncio.sleep(10.0)
            for task in tasks:
                task.cancel()
        rows = ledger.terminal_statuses()
    return Simulated(
        ending=ending,
        record=record,
        rows=rows,
        lines=list(read_journals(folder)),
        seconds=loop.time() - 10.0,
        settings=settings,
        is_scripted=given.script is not None,
    )


async def _scripted(run: Run, settings: Config, *, folder: Path, script: Callable[[ScriptedRun], Coroutine[Any, Any, None]]) -> RunResult:
    """Run as the script says; what it raises is raised once the run has ended."""
    scripted = ScriptedRun(run, config=settings, folder=folder, prompt_of=prompt_of, decode=str, demonstration=demonstration)
    async with driven(run, scripted, launcher=None):
        await script(scripted)
    assert run.result is not None
    return run.result


def prompt_of(number: int, row: Mapping[str, Any]) -> Prompt:
    """A prompt of a script's own, of the tokens that its row names."""
    return Prompt(prompt_id=f"0:{number}", text="", token_ids=np.array(_tokens(row["prompt"]), np.int32))


def _tokens(text: str | Sequence[int]) -> list[int]:
    """A text is bytes here; what a row names as tokens is left."""
    return list(text.encode()) if isinstance(text, str) else list(text)


def demonstration(row: Mapping[str, Any], *, where: str) -> Demonstration:
    """A demonstration of the tokens that a row names."""
    prompt, completion = _tokens(row["prompt"]), _tokens(row["completion"])
    return Demonstration(token_ids=np.array([*prompt, *completion], np.int32), num_prompt=len(prompt))


def _peers(
    settings: Config, *, given: Circumstances, hubs: list[MemoryHub], record: peers.TrainerRecord
) -> Iterator[Coroutine[Any, Any, None]]:
    cast, world = given.cast, peers.world_of(settings, given.world)
    for engine_id in range(settings.engine.count):
        link = hubs[0].connect(f"engine-{engine_id}", accepts=ToEngine)
        yield cast.engine(link, engine_id=engine_id, max_running=settings.engine.max_running, world=world)
    yield cast.scorer(hubs[1].connect("scorer-0", accepts=ToScorer), num_slots=4, world=world)
    for prm_id in range(1, 1 + settings.prm.count * settings.prm.is_used):
        yield cast.prm(hubs[1].connect(f"scorer-{prm_id}", accepts=ToScorer), world=world, prm_id=prm_id)
    if settings.gateway is not None:
        yield cast.gateway(hubs[3].connect("gateway-0", accepts=ToGateway), world=world)
    link = hubs[2].connect("trainer-0", accepts=ToTrainer)
    yield cast.trainer(link, num_steps=settings.trainer.steps, world=world, record=record)
