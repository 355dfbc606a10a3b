"""A simulated run of several policies: each with peers of its own, any of which may be killed at any instant, and one script.

A script that is killed takes every policy's orchestrator with it; engines, scorers and trainers outlive it, but for those of frozen
policies, which start anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

from orchestrator.controller import open_record
from orchestrator.frozen_policy import FrozenPolicy
from orchestrator.ledger.ledger import Ledger
from orchestrator.policies import Lane, PoliciesRun, all_driven
from orchestrator.run import Run
from orchestrator.stages.leasing import Table
from pipelinerl.checker.history import open_history
from pipelinerl.checker.invariants import check_history
from pipelinerl.checker.state import RunState
from pipelinerl.config import Config
from pipelinerl.observe.journal import Journal
from tests.sim.chaos import Chaos, Faults, killed
from tests.sim.clock import simulate
from tests.sim.memory import NO_FAULTS
from tests.sim.peers import World
from tests.sim.run import prompt_of

NO_KILLS = Faults(until_s=0.0)
Script = Callable[[PoliciesRun], Coroutine[Any, Any, None]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedPolicy:
    """What came of one trained policy."""

    checker: RunState
    """The independent checker's, of its ledger and checkpoints."""
    chaos: Chaos
    rows: list[tuple[Any, ...]]
    counts: dict[str, int]

    def problems(self) -> list[str]:
        mislabelled = [f"{name} mislabelled" for name in self.chaos.disk.record.mislabelled]
        counts = dict(self.counts)
        is_conserved = counts.pop("admitted") == sum(counts.values())
        return [
            *self.checker.problems,
            *self.chaos.disk.changed,
            *mislabelled,
            *([] if is_conserved else [f"not conserved: {self.counts}"]),
        ]


def run_policies(
    trained: Mapping[str, Config],
    script: Script,
    *,
    folder: Path,
    frozen: Mapping[str, Config] | None = None,
    faults: Mapping[str, Faults] | None = None,
    script_s: float = 0.0,
    seed: int = 0,
    worlds: Mapping[str, World] | None = None,
    until_s: float = 30.0,
    replays: bool = False,
) -> dict[str, SimulatedPolicy]:
    """Run to the end, whoever is killed on the way; `faults` by policy, `script_s` the mean seconds between two kills of the script, which
    with `replays` is led through its calls.
    """
    run = _Policies(trained, frozen or {}, script, folder=folder, faults=faults or {}, worlds=worlds or {}, replays=replays)
    return simulate(run.run(script_s, seed, until_s))


class _Policies:
    def __init__(
        self,
        trained: Mapping[str, Config],
        frozen: Mapping[str, Config],
        script: Script,
        *,
        folder: Path,
        faults: Mapping[str, Faults],
        worlds: Mapping[str, World],
        replays: bool,
    ) -> None:
        self.folder = folder
        self.replays = replays
        self.script = script
        self.trained = {name: self._chaos(name, config, faults, worlds) for name, config in trained.items()}
        for number, chaos in enumerate(self.trained.values()):
            chaos.lends = not number
        self.frozen = {name: self._chaos(name, config, faults, worlds) for name, config in frozen.items()}

    def _chaos(self, name: str, config: Config, faults: Mapping[str, Faults], worlds: Mapping[str, World]) -> Chaos:
        folder = self.folder / "policies" / name
        folder.mkdir(parents=True)
        return Chaos(config, folder, faults.get(name, NO_KILLS), worlds.get(name, World(token_s=2e-3)), NO_FAULTS, 3)

    async def run(self, script_s: float, seed: int, until_s: float) -> dict[str, SimulatedPolicy]:
        script_kills = Chaos(
            next(iter(self.trained.values())).settings, self.folder, Faults(seed=seed, until_s=until_s), World(), NO_FAULTS, 3
        )
        roles = [asyncio.create_task(role) for chaos in self.trained.values() for role in chaos.roles()]
        async with asyncio.timeout(1e5):
            try:
                while not await self._life(roles, script_kills.until_kill(script_s)):
                    for chaos in self.trained.values():
                        chaos.kills["script"] += 1
                        for hub in chaos.hubs:
                            hub.kill()
                    await asyncio.sleep(0.5)
                    for chaos in self.trained.values():
                        dead, chaos.hubs = chaos.hubs, chaos.make_hubs()
                        for hub, before in zip(chaos.hubs, dead, strict=True):
                            hub.succeed(before)
            finally:
                await killed(roles)
        return {name: self._outcome(chaos) for name, chaos in self.trained.items()}

    def _outcome(self, chaos: Chaos) -> SimulatedPolicy:
        with open_history(chaos.folder) as history:
            checker = check_history(history)
        with contextlib.closing(Ledger(chaos.folder / "ledger.sqlite")) as ledger:
            rows, counts = ledger.terminal_statuses(), dataclasses.asdict(ledger.counts())
        return SimulatedPolicy(checker=checker, chaos=chaos, rows=rows, counts=counts)

    async def _life(self, roles: list[asyncio.Task[None]], kill_after_s: float | None) -> bool:
        """One life of the script; return whether it came to its end."""
        async with contextlib.AsyncExitStack() as stack:
            folders = {name: chaos.folder for name, chaos in self.trained.items()}
            record = open_record(self.folder, folders, stack=stack) if self.replays else None
            opened: dict[str, tuple[Run, Ledger]] = {}
            clock = asyncio.get_running_loop().time
            table = Table()
            for name, chaos in self.trained.items():
                journal = stack.enter_context(contextlib.closing(Journal(chaos.folder, "orchestrator", clock=clock)))
                run, ledger = chaos.open_run(journal, in_script=True, record=record, policy=name, table=table)
                opened[name] = (run, ledger)
            lanes = [Lane(name=name, run=run, asked=self.trained[name].asked(run), launcher=None) for name, (run, _) in opened.items()]
            engines: list[asyncio.Task[None]] = []
            for name, chaos in self.frozen.items():
                chaos.hubs = chaos.make_hubs()
                journal = stack.enter_context(contextlib.closing(Journal(chaos.folder, "orchestrator", clock=clock)))
                policy = FrozenPolicy(
                    name,
                    chaos.settings,
                    folder=chaos.folder,
                    hub=chaos.hubs[0],
                    journal=journal,
                    prompt_of=prompt_of,
                    decode=str,
                    vocabulary=1000,
                    record=record,
                )
                if table.leasing is not None:
                    table.leasing.seats[name] = policy.seat(table.leasing)
                lanes.append(Lane(name=name, run=policy, asked=policy, launcher=None))
                engines += [asyncio.create_task(role) for role in chaos.engines()]
            main = asyncio.create_task(self._main(lanes))
            try:
                done, _ = await asyncio.wait({main, *roles}, timeout=kill_after_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    for _, ledger in opened.values():
                        ledger.store.abandon()
                    return False
                await main
                for _, ledger in opened.values():
                    ledger.close()
                return True
            finally:
                for chaos in (*self.trained.values(), *self.frozen.values()) if not main.done() else ():
                    for hub in chaos.hubs:
                        hub.kill()  # a script that is cancelled ends its run well, one that is killed cannot
                await killed([main])
                await killed(engines)

    async def _main(self, lanes: list[Lane]) -> None:
        async with all_driven(lanes, folder=self.folder) as policies:
            await self.script(policies)
