"""Elastic roles in what a long run meets: orchestrators that are killed in the middle of a change, engines that are lost for good or stand
still, disks that are full, people who ask for something else. Simulated, with the live stages."""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.rules.role_window import LATE_S, SILENT_S
from pipelinerl.checker.history import open_history
from pipelinerl.checker.invariants import check_history
from pipelinerl.messages import Alive, CheckpointFailed, StepDone
from pipelinerl.runtime.elastic_roles import RolesRecord
from pipelinerl.runtime.membership import ScaleFolder, State
from pipelinerl.runtime.trainer_ranks import Phase
from tests.sim import peers
from tests.sim.memory import MemoryLink
from tests.sim.run import Beside, Cast, Simulated, run
from tests.sim.test_elastic import BALANCED, GROWING, begun, decided, layouts, settings, starts
from tests.sim.trainer_group import Disk, Group, nobody

pytestmark = pytest.mark.slow

SHORT = dataclasses.replace(GROWING, length_factors=(1.0,))
"""Two engines and two ranks are 1.8 times as fast as three and one."""
SLOW_RANK = dataclasses.replace(SHORT, token_s=4e-3)
"""A rank trains 140 tokens per second: three engines go with one rank as well as two do, and one with two."""


def simulated(where: Any, folder: Path, *, world: peers.World = SHORT, **how: Any) -> Simulated:
    return run(where, folder=folder, world=world, limit_s=6000.0, **{"cast": Cast(trainer=nobody), **how})


def has(folder: ScaleFolder) -> tuple[int, int]:
    """Engines and trainer ranks that the run was asked for."""
    members, trainer = folder.members(), folder.trainer()
    assert members is not None
    assert trainer is not None
    return members.num_wanted, trainer.wanted


async def until(claim: Callable[[], bool]) -> None:
    while not claim():  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def phase_is(given: Beside, phase: Phase) -> bool:
    record = given.folder.trainer()
    return record is not None and record.phase is phase


# --- who follows ---


class Killed(Exception):
    """The whole run is gone."""


def killed_after(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have the orchestrator die right after it has written so many files, the first of them the one that remembers a change."""
    write, written = ScaleFolder._write, list[str]()

    def and_die(self: ScaleFolder, name: str, value: Any) -> None:
        write(self, name, value)
        if written or (isinstance(value, RolesRecord) and value.change is not None):
            written.append(name)
            if len(written) == number:
                monkeypatch.setattr(ScaleFolder, "_write", write)
                raise Killed

    monkeypatch.setattr(ScaleFolder, "_write", and_die)


def goes_on(folder: Path, disk: Disk, *, count: int = 3, start_s: float = 2.0, **faults: Any) -> Simulated:
    """The same run, resumed, with processes that take longer to start: all devices are somebody's in the end, every promise was kept."""
    where, world = settings(steps=40, engine={"count": count}), dataclasses.replace(SHORT, start_s=start_s)
    ended = simulated(where, folder, world=world, beside=with_disk(disk, **faults), is_recorded=True)
    assert ended.ending.reason == "finished"
    with open_history(folder) as history:
        assert check_history(history, with_checkpoints=False).problems == []
    assert sum(has(ScaleFolder(folder))) == count + 1, "a device was given away for good"
    assert count != 3 or "by hand" not in {line["word"] for line in decided(ended)}, "nobody has asked for anything"
    return ended


def with_disk(disk: Disk, **faults: Any) -> Callable[[Beside], Coroutine[Any, Any, None]]:
    async def beside(given: Beside) -> None:
        async with begun(given, disk=disk, **faults) as (machine, _):
            await starts(machine)

    return beside


def killed_in(folder: Path, phase: Phase) -> Disk:
    """Have a run be killed whole while the rule's change is so far."""
    disk = Disk()

    async def dies(given: Beside) -> None:
        async with begun(given, disk=disk) as (machine, _), asyncio.TaskGroup() as group:
            group.create_task(starts(machine))
            await until(lambda: phase_is(given, phase))
            raise Killed

    with pytest.RaisesGroup(Killed, flatten_subgroups=True):
        simulated(settings(steps=40), folder, beside=dies, is_recorded=True)
    return disk


@pytest.mark.parametrize("number", range(1, 9))
def test_whenever_the_orchestrator_is_killed_a_change_is_carried_out_once_or_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    disk = Disk()
    killed_after(monkeypatch, number)
    with pytest.RaisesGroup(Killed, flatten_subgroups=True):
        simulated(settings(steps=40), tmp_path, beside=with_disk(disk), is_recorded=True)
    before, ranks = ScaleFolder(tmp_path).roles(), ScaleFolder(tmp_path).trainer()
    assert before is not None
    assert ranks is not None
    words = {line["word"] for line in decided(goes_on(tmp_path, disk))}
    assert ("taken back" in words) is (ranks.ranks == 1), "what the trainer has saved for is carried out"
    last = ScaleFolder(tmp_path).roles()
    assert last is not None
    assert last.first_s == before.first_s
    assert has(ScaleFolder(tmp_path)) == (2, 2)


@pytest.mark.parametrize("faults", [{"fails": (2,)}, {"hangs": (2,)}], ids=["fails", "hangs"])
def test_engines_come_back_where_the_orchestrator_that_follows_finds_that_the_trainer_does_not_start(
    tmp_path: Path, faults: dict[str, Any]
) -> None:
    disk = killed_in(tmp_path, Phase.STARTING)
    ended = goes_on(tmp_path, disk, start_s=0.0, **faults)
    assert ("taken back", 3, 1) in layouts(decided(ended))
    assert "taken" not in {line["word"] for line in decided(ended)}
    assert has(ScaleFolder(tmp_path)) == (3, 1)


def test_a_run_that_goes_on_with_another_number_of_engines_has_that_one(tmp_path: Path) -> None:
    disk = killed_in(tmp_path, Phase.SAVING)
    ended = goes_on(tmp_path, disk, count=4)
    assert ("by hand", 4, 1) in layouts(decided(ended))


@pytest.mark.parametrize("phase", [Phase.SAVING, Phase.STARTING])
def test_a_run_that_is_told_to_end_in_a_change_is_saved_and_goes_on(tmp_path: Path, phase: Phase) -> None:
    disk = Disk()

    async def told(given: Beside) -> None:
        async with begun(given, disk=disk) as (machine, _), asyncio.TaskGroup() as group:
            group.create_task(starts(machine))
            await until(lambda: phase_is(given, phase))
            given.run.stop("terminated", evaluates=False)

    stopped = simulated(settings(steps=40), tmp_path, beside=told, is_recorded=True)
    assert stopped.ending.reason == "terminated"
    goes_on(tmp_path, disk)


# --- who is missing ---


def test_what_there_is_is_shared_without_an_engine_that_is_lost_for_good_and_with_it_when_it_comes_again(tmp_path: Path) -> None:
    where = settings(steps=90, engine={"count": 2, "max_count": 4})
    times: list[float] = []
    found: list[tuple[int, State]] = []

    async def beside(given: Beside) -> None:
        async with begun(given) as (machine, launcher), asyncio.TaskGroup() as group:
            await machine.until(1, State.LIVE)
            launcher.ask(engines=3)
            machine._requests = launcher._requests
            await machine.answered()
            await machine.until(2, State.LIVE)
            await machine.kill(2)
            given.tell_gone(2, "its machine was taken")
            times.append(asyncio.get_running_loop().time())
            group.create_task(starts(machine))
            await until(lambda: has(given.folder) == (2, 2) and phase_is(given, Phase.SETTLED))
            await asyncio.sleep(10.0)
            machine.start(2)
            await machine.until(2, State.LIVE)
            await asyncio.sleep(5.0)
            members = given.folder.members()
            assert members is not None
            found.extend((one.engine_id, one.state) for one in members.members)

    ended = simulated(where, tmp_path, world=SLOW_RANK, beside=beside)
    assert ended.problems() == []
    lines = decided(ended)
    assert layouts(lines)[:5] == [("by hand", 3, 1), ("lost", 3, 1), ("begins", 2, 2), ("taken", 2, 2), ("again", 2, 2)]
    lost = lines[1]
    assert lost["reason"] == "waited 30 s for engine-2 to come (engine-2: its machine was taken)"
    assert 30.0 < lost["t"] - times[0] < 33.0
    assert found == [(0, State.LIVE), (1, State.LEFT), (2, State.LIVE)]


def test_an_engine_that_never_comes_has_the_change_ordered_back(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        async with begun(given):  # nobody starts an engine
            await asyncio.Event().wait()

    where = settings(steps=75, engine={"ready_deadline_s": 10.0}, trainer={"ready_deadline_s": 5.0})
    ended = simulated(where, tmp_path, world=GROWING, beside=beside)
    assert ended.problems() == []
    lines = decided(ended)
    assert layouts(lines)[:5] == [("begins", 2, 2), ("taken", 2, 2), ("begins", 3, 1), ("late", 2, 2), ("taken", 2, 2)]
    assert lines[3]["t"] - lines[2]["t"] > 2 * 5.0 + 10.0
    assert {line["engines_then"] + line["trainer_then"] for line in lines} == {4}


# --- figures that stop ---


class Stopping:
    """A world in which one process stands still from one second to another: it is in a pass, or with a row, and says nothing."""

    def __init__(self, world: peers.World, *, began_s: float, ended_s: float) -> None:
        self._world, self.began_s, self.ended_s = world, began_s, ended_s

    def __getattr__(self, name: str) -> Any:
        value, now_s = getattr(self._world, name), asyncio.get_running_loop().time()
        left_s = self.ended_s - now_s if self.began_s <= now_s < self.ended_s else 0.0
        return value + left_s if name == "step_s" else PerToken(value, left_s) if name == "token_s" else value


@dataclasses.dataclass
class PerToken:
    """Seconds of so many tokens, and once the seconds that are left."""

    value_s: float
    left_s: float

    def __mul__(self, num_tokens: int) -> float:
        return self.value_s * num_tokens + self.left_s


def measured_in(ended: Simulated, began_s: float, ended_s: float) -> list[dict[str, Any]]:
    """Windows that were weighed while a process had been standing still for a while, or right after it."""
    return [line for line in decided(ended, "stays", "begins") if began_s + LATE_S < line["t"] < ended_s + 1.0]


STILL = (36.5, 36.5 + 2 * SILENT_S)
SLOW_START = dataclasses.replace(BALANCED, start_s=5.0)
"""Windows of ten seconds."""


def test_nothing_is_decided_on_a_window_in_which_an_engine_has_stood_still(tmp_path: Path) -> None:
    """Without it, two engines of which one writes nothing for half of a window look as if a third were worth a rank."""

    async def engine(link: MemoryLink, *, engine_id: int, max_running: int, world: peers.World) -> None:
        stops: Any = Stopping(world, began_s=STILL[0], ended_s=STILL[1]) if engine_id == 1 else world
        await peers.engine(link, engine_id=engine_id, max_running=max_running, world=stops)

    where = settings(steps=110, engine={"count": 2}, trainer={"ranks": 2})
    ended = simulated(where, tmp_path, world=SLOW_START, beside=with_disk(Disk()), cast=Cast(trainer=nobody, engine=engine))
    assert ended.problems() == []
    assert len(decided(ended, "stays")) >= 4
    assert measured_in(ended, *STILL) == []
    assert decided(ended) == []


def test_nothing_is_decided_on_a_window_in_which_the_trainer_has_stood_still(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def live_on(link: MemoryLink) -> None:
        while True:
            now_s = asyncio.get_running_loop().time()
            await asyncio.sleep(max(1.0, STILL[1] - now_s) if now_s >= STILL[0] else 1.0)
            link.send(Alive(busy_with="nothing"))

    async def beside(given: Beside) -> None:
        world: Any = Stopping(given.world, began_s=STILL[0], ended_s=STILL[1])
        async with begun(dataclasses.replace(given, world=world)) as (machine, _):
            await starts(machine)

    monkeypatch.setattr(peers, "live_on", live_on)
    ended = simulated(settings(steps=110, trainer={"silent_after_s": 60.0}), tmp_path, world=SLOW_START, beside=beside)
    assert ended.problems() == []
    assert len(decided(ended, "stays")) >= 4
    assert measured_in(ended, *STILL) == []
    assert decided(ended) == []


def test_nothing_is_decided_while_the_trainer_does_not_say_how_fast_it_is(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        progress = given.run.parts.progress
        hear = progress.on_trained

        def without_figures(done: StepDone) -> None:
            missing = {"tokens_per_s": 0.0} if done.step % 2 else {}
            hear(msgspec.structs.replace(done, metrics={**done.metrics, **missing}))

        progress.on_trained = without_figures
        async with begun(given) as (machine, _):
            await starts(machine)

    ended = simulated(settings(steps=30), tmp_path, beside=beside)
    assert ended.problems() == []
    assert not [line for line in ended.lines if line["kind"] == "roles"]


# --- what cannot be, and who asks for something else ---


def test_a_full_disk_takes_a_change_back_and_each_further_try_waits_twice_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = Group._write

    def is_full(self: Group, link: MemoryLink) -> None:
        if self._version < 30:
            link.send(CheckpointFailed(version=self._version, error="no space left on device"))
        else:
            write(self, link)

    monkeypatch.setattr(Group, "_write", is_full)
    ended = simulated(settings(steps=110, checkpoint={"every": 1000}), tmp_path, beside=with_disk(Disk()))
    assert ended.problems() == []
    lines = decided(ended)
    assert layouts(lines)[:4] == [("begins", 2, 2), ("taken back", 3, 1)] * 2
    assert layouts(lines)[-1] == ("taken", 2, 2)
    assert "could not be written" in lines[1]["reason"]
    backs, begins = ([line["step"] for line in decided(ended, word)] for word in ("taken back", "begins"))
    rests = [begin - back for back, begin in zip(backs, begins[1:], strict=False)]
    assert rests[1] >= 2 * rests[0] - 2


def test_no_change_begins_that_the_last_steps_cannot_pay_for(tmp_path: Path) -> None:
    ended = simulated(settings(steps=8), tmp_path, beside=with_disk(Disk()))
    assert ended.problems() == []
    assert decided(ended) == []
    assert decided(ended, "stays")[0]["speed_then"] > 1.5 * decided(ended, "stays")[0]["speed_now"]


def test_whatever_is_asked_for_by_hand_meanwhile_wins_and_breaks_no_promise(tmp_path: Path) -> None:
    chance = random.Random(0)
    ends: list[tuple[int, int]] = []

    async def beside(given: Beside) -> None:
        async with begun(given, fails=(3,)) as (machine, launcher), asyncio.TaskGroup() as group:
            group.create_task(starts(machine))
            for _ in range(8):
                await asyncio.sleep(chance.expovariate(1 / 3.0))
                engines, ranks = chance.choice(((1, 3), (2, 2), (3, 1), (2, None), (None, 1), (1, 1)))
                launcher.ask(engines=engines, trainer=ranks, drain_s=1.0)
            await until(lambda: has(given.folder) == (3, 1) or bool(launcher.ask(engines=3, trainer=1)))
            await asyncio.sleep(30.0)
            ends.append(has(given.folder))

    ended = simulated(settings(steps=160), tmp_path, beside=beside)
    assert ended.problems() == []
    assert ended.ending.rollouts.failed == 0
    assert decided(ended, "by hand")
    assert sum(ends[0]) == 4, "the rule shares what was asked for last"
    assert decided(ended)[-1]["word"] in ("taken", "taken back", "by hand")
