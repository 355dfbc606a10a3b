"""One node's part of a run over several (dealt out by Slurm, Kubernetes or Ray): its processes, the wish to save, the verdict.

Starts the processes that `placement` gives to this node and passes the wish to save on to the orchestrator. Each node writes down how it
ended, in the folder of the attempt; the first one waits for all of them, as long as its time and `save_s` allow, and gives the verdict.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pipelinerl.config import Config, NodesSection, RunSection
from pipelinerl.errors import LeaseError, PipelineError
from pipelinerl.launch.attempts import SAVE, attempt_folder, code_file
from pipelinerl.launch.gpus import place
from pipelinerl.launch.placement import nodes_of, roles_on
from pipelinerl.launch.roles import Role, sidecars_of
from pipelinerl.launch.run_folder import is_finished
from pipelinerl.launch.run_launcher import launcher_of
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.runtime.lease import LEASE_S, RENEW_EVERY_S, Lease, held
from pipelinerl.runtime.process import record_failure
from pipelinerl.runtime.sidecars import Sidecar, sidecars

LEAVE_S = 15.0
"""Left of the allocation for the script to requeue the job. Slurm's own kill beats a later exit, and a job it killed is not requeued."""
SIDECARS_S = 30.0
"""For the sidecars of an attempt that another is to follow: their next start goes on, and the nodes may be taken by then."""
LOOK_EVERY_S = 0.5
"""Seconds between two looks at what other nodes wrote. A shared file system tells nobody of a new file."""
DONE, FAILED, UNFINISHED = 0, 1, 75
"""Exit codes: the run is finished; a process failed; it has saved and is to go on (EX_TEMPFAIL of sysexits.h)."""


class Supervisor:
    """One node's part of one attempt."""

    def __init__(
        self, run_folder: Path, config: Config, section: NodesSection, *, attempt: int, node: int, title: str, address: Callable[[], str]
    ) -> None:
        """`section` says which nodes there are. `address()` is where the others reach this one; `title` names the job in every line."""
        self._run_folder = run_folder
        self._config = config
        self._save_s = section.save_s
        self._address = address
        nodes = nodes_of(section)
        self._node, self._num_nodes = node, nodes.count
        self._attempt_folder = attempt_folder(run_folder, attempt)
        self._code_file = code_file(run_folder, attempt, node=node)
        self._is_saving = False
        self._is_launched = False
        """The launcher hears signals; before that one would end this process without a word."""
        self._title = f"attempt {attempt}, {title}"
        recorded = json.loads((run_folder / "roles.json").read_text())
        names = roles_on(node, [role["name"] for role in recorded], nodes)
        self._roles = tuple(Role(**role | {"command": self._command(role)}) for role in recorded if role["name"] in names)

    def _command(self, role: dict[str, Any]) -> tuple[str, ...]:
        """The orchestrator of a run with processes elsewhere listens where they reach it, unless the settings say where."""
        is_alone = self._num_nodes == 1 and not self._config.engine.elsewhere and self._config.engine.max_count is None
        is_reached = is_alone or self._config.run.interface != RunSection().interface  # pyright: ignore[reportCallIssue]
        if role["name"] != "orchestrator" or is_reached:
            return tuple(role["command"])
        return (*role["command"], "--interface", self._address())

    async def run(self, *, until: float) -> int:
        """Run this node's processes to their end and return the exit code."""
        if self.is_finished():
            self._say("the run is finished; nothing to do")
            return DONE
        loop = asyncio.get_running_loop()
        self._say(", ".join(role.name for role in self._roles) or "nothing to run here")
        self._open_logs()
        timer = loop.call_later(max(0.0, until - self._save_s - time.time()), self._save, "the allocation is about to end")
        watcher = asyncio.create_task(self._watch())
        try:
            with sidecars(self._run_folder, self._sidecars(), left_s=lambda: self._left_s(until)):
                code = await self._launch()
        finally:
            timer.cancel()
            watcher.cancel()
        return await self._leave(code, until=until)

    async def _launch(self) -> int:
        try:
            with contextlib.ExitStack() as at_end:
                lease = await self._hold(at_end) if self._node == 0 else None  # the first node's supervisor holds the folder for all
                if self._is_saving:  # asked for while the folder was waited for: nothing has begun, and the next attempt goes on
                    return UNFINISHED
                roles, placement = place(self._config, self._roles, usable_gpus(), is_alone=self._num_nodes == 1)
                for line in placement.table():
                    self._say(line)
                self._is_launched = True
                await launcher_of(self._config, roles, self._run_folder, lease=lease).run()
        except PipelineError as error:
            self._say(f"failed: {error}")
            record_failure(self._run_folder, f"node-{self._node}", error=str(error))
            return FAILED
        return UNFINISHED if self._is_saving and not self.is_finished() else DONE

    async def _hold(self, at_end: contextlib.ExitStack) -> Lease:
        """Hold the run's folder. An attempt whose machine died left a lease that lapses; raises `LeaseError` where one is alive."""
        end = time.monotonic() + LEASE_S + RENEW_EVERY_S
        while True:
            try:
                return at_end.enter_context(held(self._run_folder))
            except LeaseError as error:
                if time.monotonic() > end:
                    raise
                self._say(f"waiting: {error}")
                await asyncio.sleep(RENEW_EVERY_S)

    def _save(self, why: str) -> None:
        """Have the orchestrator end the run, which saves; once, as a second wish would end everything at once."""
        if self._is_saving:
            return
        self._is_saving = True
        self._say(f"saving: {why}")
        if self._is_launched and any(role.name == "orchestrator" for role in self._roles):
            os.kill(os.getpid(), signal.SIGTERM)  # saves as Ctrl-C does, and leaves the last evaluation to the life that is to come

    async def _watch(self) -> None:
        """Save when the script asks for it, or when a process fails elsewhere."""
        while not self._is_saving:
            if (self._attempt_folder / SAVE).exists():
                self._save("the script asks for it")
            elif FAILED in self._codes().values():
                self._save("another node failed")
            await asyncio.sleep(LOOK_EVERY_S)

    async def _leave(self, code: int, *, until: float) -> int:
        """Tell how this node ended; on the first node, the worst of all: failed, then to be continued, then done."""
        if self._node != 0:
            # The first node may exit as soon as it has read this, and the others are ended then: their own code is what counts.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self._code_file.write_text(f"{code}\n")
        if self._node != 0:
            return code
        end = min(time.time() + self._save_s, until - LEAVE_S)
        while True:
            if len(self._codes()) == self._num_nodes or time.time() > end:
                break
            await asyncio.sleep(LOOK_EVERY_S)
        if late := self._num_nodes - len(self._codes()):
            self._say(f"{late} of {self._num_nodes} nodes have not ended; what they still do is lost")
        codes = set(self._codes().values())
        return FAILED if FAILED in codes else UNFINISHED if UNFINISHED in codes else DONE

    def _codes(self) -> dict[str, int]:
        """Return the exit codes of the nodes that have ended."""
        found = {}
        for path in self._attempt_folder.glob("node-*.code"):
            with contextlib.suppress(ValueError):  # written this moment
                found[path.name] = int(path.read_text())
        return found

    def _open_logs(self) -> None:
        """Give every process a log of this attempt; `<run>/logs/<process>.log` leads to the newest."""
        self._attempt_folder.mkdir(parents=True, exist_ok=True)
        title = f"{self._title}, node {self._node} ({os.uname().nodename})\n"
        with open(self._run_folder / "logs" / "launcher.log", "a") as launcher:  # one for all nodes and attempts
            launcher.write(title)
        names = [one.name for one in (*self._roles, *self._sidecars())]
        for name in names:
            log, latest = self._attempt_folder / f"{name}.log", self._run_folder / "logs" / f"{name}.log"
            with open(log, "a") as file:  # a node that was lost had written there, and another has taken its place in this attempt
                file.write(title)
            latest.unlink(missing_ok=True)
            latest.symlink_to(log.relative_to(latest.parent))

    def _left_s(self, until: float) -> float:
        """Seconds that sidecars may take once the processes have ended: what is left of the allocation, less what it takes to leave it."""
        return min(math.inf if self.is_finished() else SIDECARS_S, until - LEAVE_S - time.time())

    def _sidecars(self) -> tuple[Sidecar, ...]:
        return sidecars_of(self._config, self._run_folder) if self._node == 0 else ()

    def is_finished(self) -> bool:
        """See `run_folder.is_finished`."""
        return is_finished(self._run_folder)

    def _say(self, text: str) -> None:
        print(f"{self._title}, node {self._node}: {text}", flush=True)
