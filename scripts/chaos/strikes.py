"""Harms one run: faults in a random order, seeded, until all were injected or the time is over; then the run is asked to end.

A fault strikes a process of a role, or a connection (`detours`). A run that does nothing for `PATIENCE_S` fails.
"""

from __future__ import annotations

import asyncio
import collections
import contextlib
import os
import random
import resource
import signal
import sqlite3
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.errors import PeerGone
from pipelinerl.launch.launcher import Launcher
from pipelinerl.launch.roles import Role, roles_of
from pipelinerl.launch.run_folder import forget_endpoints
from pipelinerl.runtime.restarts import Restarts
from scripts.chaos import rot, victims
from scripts.chaos.account import is_forger_named
from scripts.chaos.detours import ROLES, Detours

KILLED = ("engine", "scorer", "orchestrator", "trainer")
WIRE = ("cut", "corrupt", "hold")
"""Faults of a connection."""
STRUCK = {role: (role,) for role in (*KILLED, "worker", "gateway")} | {"freeze": KILLED, "slow": KILLED}
STRUCK |= {"full": ("orchestrator", "trainer"), "goodbye": ("orchestrator",), "rot": ("trainer",), "ledger": ("orchestrator",)}
"""Faults of a process, and the roles that they may strike."""
STOPPED_FRACTION = 0.1
"""Of all kills: SIGSTOP for up to two seconds before."""
BREATHER_FRACTION = 0.2
"""Of all faults: the next comes only after a step. Less, and nothing is trained that could be lost."""
GOODBYE_S = 0.1
"""About what an orchestrator takes to end."""
NUM_LAST_STEPS = 8
"""After the last fault, with liars: some hundred messages of engines and scorers, so that each has lied, however slow the machine."""
PATIENCE_S = 120.0
"""After the last fault, and between two steps: a run that does nothing for so long hangs."""


class Chaos:
    """One run and its faults."""

    def __init__(
        self,
        config: Config,
        run_folder: Path,
        *,
        faults: dict[str, int],
        seed: int,
        pause_s: float,
        within_s: float,
        is_real: bool,
        has_forger: bool,
    ) -> None:
        self.done: collections.Counter[str] = collections.Counter()
        """Faults by kind."""
        self.memory: list[int] = [0]
        """Bytes of the orchestrator: when it was first looked at, then before every fault."""
        self._run_folder = run_folder
        self._chance = random.Random(seed)
        self._pause_s = pause_s
        self._within_s = within_s
        self._plan = [fault for fault, number in faults.items() for _ in range(number)]
        self._chance.shuffle(self._plan)
        self._is_real = is_real
        self._has_forger = has_forger
        self._roles = _roles(config, run_folder, is_real=is_real)
        self._running: asyncio.Task[None]

    async def run(self) -> str:
        """Run until every fault was injected and the run ended well; else say how it ended."""
        async with Detours(self._run_folder, chance=self._chance) as detours:
            return await self._run(detours)

    async def _run(self, detours: Detours) -> str:
        self._launch()
        until = time.monotonic() + self._within_s
        try:
            for fault in self._plan:
                await asyncio.wait({self._running}, timeout=self._chance.expovariate(1 / self._pause_s))
                if self._running.done() or time.monotonic() > until:
                    break
                await self._strike(fault, detours)
            await self._end()
        except (TimeoutError, PeerGone) as error:
            return f"{type(error).__name__}: {error}"
        finally:
            self._running.cancel()
            await asyncio.wait({self._running})
        return ""

    def _launch(self) -> None:
        launcher = Launcher(self._roles, self._run_folder, restarts=Restarts(budget=10**6, first_wait_s=0.0), stopped_limit_s=5.0)
        self._running = asyncio.create_task(launcher.run())

    def _resume(self) -> None:
        for path in (self._run_folder / "failures").glob("*.json"):
            path.unlink()
        forget_endpoints(self._run_folder)
        self._launch()

    async def _end(self) -> None:
        """Have the orchestrator end the run; one that is only starting may be ended by this itself, and the next one is asked again."""
        await self._wait_for_progress(NUM_LAST_STEPS if self._has_forger else 2)
        if self._has_forger:  # a step that has too few of its tokens names nobody
            await self._until(lambda: is_forger_named(self._run_folder), every_s=0.2, late="no step named the engine that forges")
        for _ in range(4):
            for process_id in await self._wait_for("orchestrator"):
                os.kill(process_id, signal.SIGTERM)
            await asyncio.wait({self._running}, timeout=PATIENCE_S / 4)
            if self._running.done():
                return self._running.result()
        raise TimeoutError(f"the run did not end within {PATIENCE_S:g} s of being asked to")

    async def _strike(self, fault: str, detours: Detours) -> None:
        self._look_at_memory()
        if fault in WIRE:
            role = self._chance.choice(ROLES)
            if detours.strike(role, fault):
                self.done[f"{fault}, {role}"] += 1
            return
        role = self._chance.choice(STRUCK[fault])
        found = await self._wait_for(role)
        if not found:
            return
        process_id = self._chance.choice(found)
        strikes = {"freeze": self._freeze, "full": self._fill, "slow": self._slow_down, "goodbye": self._kill_at_goodbye}
        strike = (strikes | {"rot": self._rot, "ledger": self._rot_ledger}).get(fault, self._kill)
        with contextlib.suppress(ProcessLookupError):
            await strike(role, process_id)
        if self._chance.random() < BREATHER_FRACTION:
            await self._wait_for_progress(1)

    async def _kill(self, role: str, process_id: int) -> None:
        if self._chance.random() < STOPPED_FRACTION:
            os.kill(process_id, signal.SIGSTOP)
            await asyncio.sleep(2 * self._chance.random())
            os.kill(process_id, signal.SIGCONT)
            self.done[f"stopped for a while, {role}"] += 1
            await asyncio.sleep(0.1)
        os.kill(process_id, signal.SIGKILL)
        self.done[f"kill, {role}"] += 1
        if role == "trainer" and self._is_real:  # it takes long to start: killed again at once, it would never train
            await self._wait_for_progress(1)

    async def _freeze(self, role: str, process_id: int) -> None:
        os.kill(process_id, signal.SIGSTOP)
        late = f"process {process_id} stood still, and nobody replaced it"
        await self._until(lambda: not victims.is_alive(process_id), every_s=0.1, late=late)
        self.done[f"freeze, {role}"] += 1

    async def _slow_down(self, role: str, process_id: int) -> None:
        for _ in range(30):
            os.kill(process_id, signal.SIGSTOP)
            await asyncio.sleep(0.09)
            os.kill(process_id, signal.SIGCONT)
            await asyncio.sleep(0.01)
        self.done[f"slow, {role}"] += 1

    async def _kill_at_goodbye(self, role: str, process_id: int) -> None:
        """Kill the orchestrator between being asked to end and having ended; where it was quicker, resume the run."""
        os.kill(process_id, signal.SIGTERM)
        await asyncio.sleep(GOODBYE_S * self._chance.random())
        if victims.is_alive(process_id):
            os.kill(process_id, signal.SIGKILL)
            self.done[f"kill at its goodbye, {role}"] += 1
        else:
            await self._wait_for(role)  # one that was only starting was ended by this, and is started again
            if self._running.done():
                self._resume()
        await self._wait_for_progress(1)

    async def _wait_for_progress(self, num_steps: int) -> None:
        """Wait until so many more steps were done, or done again."""
        before = self._num_done()
        await self._until(lambda: self._num_done() >= before + num_steps, every_s=0.2, late=f"no {num_steps} steps were done")

    def _num_done(self) -> int:
        if not (self._run_folder / "ledger.sqlite").exists():
            return 0
        with contextlib.closing(sqlite3.connect(f"file:{self._run_folder / 'ledger.sqlite'}?mode=ro", uri=True)) as database:
            query = "SELECT count(*) FROM events WHERE kind IN ('done', 'retrained') AND rollout_id IS NULL"
            return database.execute(query).fetchone()[0]

    async def _fill(self, role: str, process_id: int) -> None:
        """A trainer goes on without a checkpoint. An orchestrator ends the run and says why; with room again, the run is resumed."""
        before = resource.prlimit(process_id, resource.RLIMIT_FSIZE)
        resource.prlimit(process_id, resource.RLIMIT_FSIZE, (1, before[1]))
        await asyncio.wait({self._running}, timeout=3.0 if role == "trainer" else PATIENCE_S)
        if role == "trainer":
            resource.prlimit(process_id, resource.RLIMIT_FSIZE, before)
        else:
            error = self._running.exception() if self._running.done() else None
            if error is None or "make room on the disk" not in str(error):
                raise TimeoutError(f"a full disk did not end the run in words, but: {error}")
            self._resume()
        self.done[f"full disk, {role}"] += 1

    async def _rot(self, role: str, process_id: int) -> None:
        """The next trainer finds the newest checkpoint damaged. It may be too early for that, or the damage may be a blank's."""
        if rot.rot_checkpoint(self._run_folder, chance=self._chance):
            os.kill(process_id, signal.SIGKILL)
            self.done["a bit of a checkpoint"] += 1
            await self._wait_for_progress(1)

    async def _rot_ledger(self, role: str, process_id: int) -> None:
        """Stop the run, flip a bit, see who tells; then go on with the ledger as it was."""
        os.kill(process_id, signal.SIGTERM)
        await asyncio.wait({self._running}, timeout=PATIENCE_S)
        if not self._running.done():  # one that was only starting was ended by this, and was started again
            return
        self._running.result()
        teller = await asyncio.to_thread(rot.rot_ledger, self._run_folder, chance=self._chance)
        self.done[f"a bit of the ledger, told by {teller}"] += 1
        self._resume()
        await self._wait_for_progress(1)

    async def _wait_for(self, role: str) -> Sequence[int]:
        """The process ids of a role, once there are some; none where the run has ended."""
        found: list[int] = []

        def look() -> bool:
            found[:] = victims.find(role, self._run_folder)  # a process table tells nobody of a new process
            return bool(found)

        await self._until(look, every_s=0.05, late=f"there was no {role}")
        return found

    async def _until(self, is_so: Callable[[], bool], *, every_s: float, late: str) -> None:
        """Wait until something is so, or the run has ended. Raises `TimeoutError` after `PATIENCE_S`."""
        end = time.monotonic() + PATIENCE_S
        while not is_so() and not self._running.done():
            if time.monotonic() > end:
                raise TimeoutError(f"{late} within {PATIENCE_S:g} s")
            await asyncio.sleep(every_s)

    def _look_at_memory(self) -> None:
        for process_id in victims.find("orchestrator", self._run_folder):
            with contextlib.suppress(OSError):
                pages = int(Path(f"/proc/{process_id}/statm").read_text().split()[1])
                self.memory = [self.memory[0] or pages * 4096, *self.memory[1:], pages * 4096]


def _roles(config: Config, run_folder: Path, *, is_real: bool) -> tuple[Role, ...]:
    """The run's processes, each in the storm."""
    roles = []
    for role in roles_of(config, run_folder):
        words = list(role.command)
        at = len(words) - 1 - words[::-1].index("-m") + 1
        if role.name == "trainer" and not is_real:
            words = [sys.executable, "-m", "scripts.chaos.trainer", "--run-folder", str(run_folder)]
            at = 2
        words.insert(at, "scripts.chaos.storm")
        roles.append(Role(name=role.name, command=tuple(words), has_nothing_to_save=role.has_nothing_to_save))
    return tuple(roles)
