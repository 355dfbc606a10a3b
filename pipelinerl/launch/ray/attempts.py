"""Runs a run's attempts until one of them is its end, and decides what follows where a node is lost.

Engines and scorers that are lost with their node begin on another, within the attempt. Where orchestrator or trainer were on it, nothing
can go on without them: the others are ended, and the next attempt goes on from the last checkpoint, as `--resume` does. `run.restarts`
bounds both for each node. Where the cluster has no room for a node that is lost, the run saves and ends with that reason.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from pipelinerl.config import RunSection
from pipelinerl.errors import PeerGone, PipelineError
from pipelinerl.launch.attempts import SAVE, attempt_folder, begin_attempt, code_file
from pipelinerl.launch.placement import Nodes
from pipelinerl.launch.supervisor import DONE, FAILED, UNFINISHED
from pipelinerl.runtime.process import how_it_ended, note
from pipelinerl.runtime.restarts import Restarts


class Place(Protocol):
    """Where nodes are: `pipelinerl.launch.ray.cluster.Cluster`."""

    async def run(self, node: int, command: tuple[str, ...], *, log: Path) -> int:
        """See `pipelinerl.launch.ray.cluster.Cluster.run`."""
        ...


class _Over(Exception):
    """Nothing of the attempt can go on."""


class Attempts:
    """The attempts of one run, in a process that stays until it ends."""

    def __init__(
        self,
        run: RunSection,
        run_folder: Path,
        nodes: Nodes,
        place: Place,
        *,
        save_s: float,
        command: Callable[[int, int], tuple[str, ...]],
        say: Callable[[str], None],
    ) -> None:
        """`command(attempt, node)` is the command line of a node's supervisor; `save_s`: how long the others may outlive the first."""
        self._run_folder = run_folder
        self._nodes = nodes
        self._place = place
        self._save_s = save_s
        self._command = command
        self._say = say
        self._restarts = Restarts(budget=run.restarts, first_wait_s=run.restart_wait_s)
        self._attempt = 0
        self._code: int | None = None
        """How the first node ended in this attempt, once it has."""
        self._is_saving = False
        self._ends_at_once = asyncio.Event()
        self._why: PipelineError | None = None
        """The reason for which the run ends."""

    async def run(self) -> int:
        """Run to the end: `DONE`, or `UNFINISHED` where it has saved as it was asked to. Raises the reason of any other."""
        code = UNFINISHED
        while code == UNFINISHED and not self._is_saving and self._why is None:
            code = await self._run_attempt()
        if self._why is not None and code != DONE:
            raise self._why
        if code not in (DONE, UNFINISHED):
            raise PeerGone(self._failure())
        return code

    def save(self) -> None:
        """Have the run save and end; where it was asked to before, end at once."""
        if self._is_saving:
            self._ends_at_once.set()
        self._is_saving = True
        self._ask_to_save()

    async def _run_attempt(self) -> int:
        self._attempt, self._code = begin_attempt(self._run_folder), None
        try:
            async with asyncio.TaskGroup() as group:
                ender = group.create_task(self._end_at_once(), name="end at once")
                first, *others = [group.create_task(self._stay(node), name=f"node {node}") for node in range(self._nodes.count)]
                self._code = await first
                if others:
                    await asyncio.wait(others, timeout=self._save_s)
                for task in (ender, *others):
                    task.cancel()
        except* _Over:
            self._code = DONE if self._code == DONE else UNFINISHED
        assert self._code is not None
        return self._code

    async def _end_at_once(self) -> None:
        """End the attempt with its processes as soon as that is asked for."""
        await self._ends_at_once.wait()
        raise _Over

    async def _stay(self, node: int) -> int:
        """Run a node's supervisor to its end, anew where its node is lost; its exit code."""
        code = code_file(self._run_folder, self._attempt, node=node)
        log = attempt_folder(self._run_folder, self._attempt) / f"supervisor-{node}.log"
        while True:
            code.unlink(missing_ok=True)
            began = time.time()
            try:
                return _ended_by_itself(node, await self._place.run(node, self._command(self._attempt, node), log=log))
            except PeerGone as error:
                wait_s = self._after_loss(node, error, began=began)
            except PipelineError as error:
                self._why, wait_s = error, None
                if node in self._nodes.trainers:
                    raise _Over from None
            if wait_s is None:
                code.write_text(f"{UNFINISHED}\n")  # nobody is to wait for it
                if self._code is None and self._why is not None:
                    self._ask_to_save()
                return UNFINISHED
            await asyncio.sleep(wait_s)

    def _after_loss(self, node: int, error: PeerGone, *, began: float) -> float | None:
        """Seconds after which a lost node's processes begin on another; None where nobody needs them any more. Raises `_Over`."""
        holds_all = node in self._nodes.trainers
        if self._code is not None and not (holds_all and self._code == FAILED):  # it failed as its peer was lost
            return None
        wait_s = self._restarts.next_wait(f"node {node}", now_s=time.time(), started_s=began)
        if wait_s is None:
            self._why = PeerGone(f"{error}; it was begun again {self._restarts.count(f'node {node}')} times before (run.restarts)")
        elif holds_all:
            self._tell(f"{error}; the run goes on from its last checkpoint, in a new attempt")
        else:
            self._tell(f"{error}; its processes begin again on another node in {wait_s:g} s")
        if holds_all:
            raise _Over
        return wait_s

    def _failure(self) -> str:
        """What a supervisor wrote down first."""
        records = [json.loads(path.read_text()) for path in (self._run_folder / "failures").glob("node-*.json")]
        if not records:
            return f"a node's supervisor failed; its log is in {attempt_folder(self._run_folder, self._attempt)}"
        return str(min(records, key=lambda record: record["t"])["error"])

    def _ask_to_save(self) -> None:
        (attempt_folder(self._run_folder, self._attempt) / SAVE).touch()

    def _tell(self, line: str) -> None:
        note(self._run_folder, line)
        self._say(line)


def _ended_by_itself(node: int, code: int) -> int:
    """The exit code of a supervisor. Raises `PeerGone` for one that was killed, which is as lost as with its node."""
    if code < 0:
        raise PeerGone(f"node {node} is lost: its supervisor {how_it_ended(code)}")
    return code
