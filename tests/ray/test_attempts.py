"""What follows where a node is lost, and how a run on nodes that come and go ends."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import RunSection
from pipelinerl.errors import PeerGone, PeerSilent, PipelineError
from pipelinerl.launch.attempts import SAVE
from pipelinerl.launch.placement import Nodes
from pipelinerl.launch.ray.attempts import Attempts
from pipelinerl.launch.supervisor import DONE, FAILED, UNFINISHED
from pipelinerl.runtime.process import record_failure

NODES = Nodes(trainers=(0, 1), engines=(2,), scorers=(0,))
Begun = tuple[int, int]
"""Attempt and node."""


class Scripted:
    """Nodes that end as a test says: by attempt and node, and then by how often that has begun."""

    def __init__(self, run: Path, ends: dict[Begun, list[int | PipelineError | str]]) -> None:
        self.run_folder = run
        self.begun: list[Begun] = []
        self.ended: list[Begun] = []
        """Those that were ended before they had ended by themselves."""
        self.by_themselves: list[Begun] = []
        self._ends = ends

    async def run(self, node: int, command: tuple[str, ...], *, log: Path) -> int:
        began = (int(command[0]), node)
        self.begun.append(began)
        ends = self._ends.get(began, [])
        try:
            code = await self._end(ends.pop(0) if ends else "waits", log.parent)
            self.by_themselves.append(began)
            return code
        except asyncio.CancelledError:
            self.ended.append(began)
            raise

    async def _end(self, how: int | PipelineError | str, attempt: Path) -> int:
        if isinstance(how, PipelineError):
            raise how
        if isinstance(how, int):
            if how == FAILED:
                record_failure(self.run_folder, "node-0", error="trainer-0 failed: the loss is not a number")
            return how
        if how == "is lost once node 0 has failed":
            while not self.by_themselves:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            await asyncio.sleep(0.01)
            raise LOST
        if how == "waits for a save":
            is_so = (attempt / SAVE).exists
        else:
            is_so = {"waits for node 2": lambda: self.num_begun(2) == 2, "waits": lambda: False}[how]
        while not is_so():  # noqa: ASYNC110
            await asyncio.sleep(0.001)
        return UNFINISHED if how == "waits for a save" else DONE

    def num_begun(self, node: int) -> int:
        return sum(one == node for _, one in self.begun)


@pytest.fixture
def make(tmp_path: Path) -> Callable[..., tuple[Attempts, Scripted]]:
    (tmp_path / "logs").mkdir()

    def made(ends: dict[Begun, list[Any]], save_s: float = 0.05, **run: Any) -> tuple[Attempts, Scripted]:
        place = Scripted(tmp_path, ends)
        section = RunSection(**({"restart_wait_s": 0.0, "restarts": 2} | run))
        attempts = Attempts(
            section, tmp_path, NODES, place, save_s=save_s, command=lambda attempt, node: (str(attempt), str(node)), say=lambda line: None
        )
        return attempts, place

    return made


Make = Callable[..., tuple[Attempts, Scripted]]
LOST = PeerGone("node 2 is lost: its machine is off")


def test_engines_begin_on_another_node_within_the_attempt(make: Make, tmp_path: Path) -> None:
    attempts, place = make({(0, 0): ["waits for node 2"], (0, 1): [DONE], (0, 2): [LOST, DONE]})
    assert asyncio.run(attempts.run()) == DONE
    assert sorted(place.begun) == [(0, 0), (0, 1), (0, 2), (0, 2)]
    assert "its machine is off; its processes begin again on another node" in (tmp_path / "logs" / "launcher.log").read_text()


@pytest.mark.parametrize("node", [0, 1])
def test_an_attempt_ends_with_the_node_of_orchestrator_or_trainer_and_the_next_goes_on(make: Make, tmp_path: Path, node: int) -> None:
    attempts, place = make({(0, node): [LOST], (1, 0): [DONE], (1, 1): [DONE], (1, 2): [DONE]})
    assert asyncio.run(attempts.run()) == DONE
    assert sorted(place.ended) == [(0, other) for other in range(3) if other != node]
    assert (tmp_path / "logs" / "attempt-1").is_dir()


def test_a_failure_is_the_runs_unless_a_trainers_node_was_lost(make: Make, tmp_path: Path) -> None:
    attempts, _ = make(
        {(0, 0): [FAILED], (0, 1): ["is lost once node 0 has failed"], (1, 0): [DONE], (1, 1): [DONE], (1, 2): [DONE]}, save_s=30
    )
    assert asyncio.run(attempts.run()) == DONE
    attempts, _ = make({(2, 0): [FAILED], (2, 1): [FAILED], (2, 2): [LOST]})
    with pytest.raises(PeerGone, match="trainer-0 failed: the loss is not a number"):
        asyncio.run(attempts.run())


def test_a_node_that_is_lost_too_often_ends_the_run_by_name(make: Make) -> None:
    attempts, _ = make({(attempt, 0): [LOST] for attempt in range(3)})
    with pytest.raises(PeerGone, match=r"its machine is off; it was begun again 2 times before \(run\.restarts\)"):
        asyncio.run(attempts.run())


def test_a_run_saves_and_ends_with_the_reason_where_the_cluster_has_no_room_for_a_lost_node(make: Make) -> None:
    attempts, _ = make({(0, 0): ["waits for a save"], (0, 1): [UNFINISHED], (0, 2): [LOST, PeerSilent("waited 600 s for room")]})
    with pytest.raises(PeerSilent, match="waited 600 s for room"):
        asyncio.run(attempts.run())


def test_a_run_without_room_for_its_first_node_ends_at_once(make: Make) -> None:
    attempts, place = make({(0, 0): [PeerSilent("waited 600 s for room")]}, save_s=30)
    began = time.monotonic()
    with pytest.raises(PeerSilent):
        asyncio.run(attempts.run())
    assert time.monotonic() - began < 15
    assert sorted(place.ended) == [(0, 1), (0, 2)]


def test_a_supervisor_that_is_killed_is_as_lost_as_with_its_node(make: Make) -> None:
    attempts, place = make({(0, 0): [-9], (1, 0): [DONE]})
    assert asyncio.run(attempts.run()) == DONE
    assert (1, 0) in place.begun


def test_a_wish_to_save_ends_the_run_and_another_one_ends_it_at_once(make: Make) -> None:
    attempts, place = make({(0, 0): ["waits for a save"]})

    async def saved() -> int:
        asyncio.get_running_loop().call_soon(attempts.save)
        return await attempts.run()

    assert asyncio.run(saved()) == UNFINISHED
    attempts, place = make({})

    async def ended() -> int:
        loop = asyncio.get_running_loop()
        loop.call_later(0.02, attempts.save)
        loop.call_later(0.04, attempts.save)
        return await attempts.run()

    assert asyncio.run(ended()) == UNFINISHED
    assert len(place.ended) == 3


def test_nobody_waits_for_what_a_lost_node_would_have_said(make: Make, tmp_path: Path) -> None:
    attempts, _ = make({(0, 0): ["waits for a save"], (0, 2): [LOST]}, restarts=0)
    with pytest.raises(PeerGone):
        asyncio.run(attempts.run())
    assert (tmp_path / "logs" / "attempt-0" / "node-2.code").read_text() == f"{UNFINISHED}\n"
