"""The trainer of a simulated run gets ranks and gives them back while it goes on: nothing is trained twice, and nothing is lost."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.checker.history import open_history
from pipelinerl.checker.invariants import check_history
from pipelinerl.config import Config
from pipelinerl.errors import PeerSilent
from pipelinerl.runtime.membership import Members, State
from pipelinerl.runtime.trainer_ranks import Phase, TrainerRanks
from tests.sim import peers
from tests.sim.run import Beside, Cast, Simulated, config, run
from tests.sim.test_scaling import Machine
from tests.sim.trainer_group import Disk, Launcher, nobody

pytestmark = pytest.mark.slow

WORLD = peers.World(step_s=0.05)


def settings(*, steps: int = 12, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "engine": {"silent_after_s": 30.0, "count": 3},
        "trainer": {"steps": steps, "ready_deadline_s": 20.0, "silent_after_s": 6.0},
        "checkpoint": {"every": 5},
    }
    return config(**tree | sections)


def simulated(where: Config, folder: Path, beside: Any) -> Simulated:
    return run(where, folder=folder, beside=beside, world=WORLD, cast=Cast(trainer=nobody), limit_s=3000.0)


def told(ended: Simulated) -> list[tuple[str, int, int]]:
    return [(line["phase"], line["ranks"], line["epoch"]) for line in ended.lines if line["kind"] == "trainer_ranks"]


async def after_step(given: Beside, step: int) -> None:
    while given.run.pipeline.training.steps.num_done <= step:  # noqa: ASYNC110
        await asyncio.sleep(0.05)


def test_an_engines_device_becomes_a_trainer_replica_and_back_and_nothing_is_trained_twice(tmp_path: Path) -> None:
    started: list[int] = []
    loads: list[int] = []

    async def beside(given: Beside) -> None:
        machine, launcher = Machine(given), Launcher(given)
        task = asyncio.create_task(launcher.run())
        try:
            await after_step(given, 2)
            launcher.ask(engines=2, trainer=2)
            assert (await launcher.settled(after=1)).ranks == 2
            left = given.folder.members()
            assert left is not None
            assert [one.state for one in left.members] == [State.LIVE, State.LIVE, State.LEFT], "its device is free before another takes it"
            first, *_ = launcher.groups
            assert first.stops == ["start again: the trainer goes on with 2 ranks"]
            loads.append(given.run.parts.packing.num_replicas)
            await after_step(given, 6)
            launcher.ask(engines=3, trainer=1)
            machine._requests = launcher._requests
            assert (await launcher.settled(after=2)).ranks == 1
            await machine.answered()
            await machine.until(2, State.LIVE)
            started.extend(launcher.started)
            await asyncio.Event().wait()
        finally:
            task.cancel()

    ended = simulated(settings(steps=24), tmp_path, beside)
    assert ended.problems() == []
    assert started == [1, 2, 1]
    assert loads == [2]
    assert told(ended) == [
        ("settled", 1, 0),
        ("saving", 1, 1),
        ("starting", 2, 1),
        ("settled", 2, 1),
        ("saving", 2, 2),
        ("starting", 1, 2),
        ("settled", 1, 2),
    ]
    assert not [line for line in ended.lines if line["kind"] == "violation"]
    assert len([line for line in ended.lines if line["kind"] == "step"]) == 24, "no step is trained again"


@pytest.mark.parametrize(
    ("fault", "why"),
    [("fails", "2 ranks have no room"), ("hangs", "waited 20 s for a trainer of 2 ranks to announce itself")],
)
def test_a_layout_that_does_not_start_falls_back_to_the_one_before_with_its_engines(tmp_path: Path, fault: str, why: str) -> None:
    found: list[TrainerRanks] = []
    came_back: list[int] = []

    async def beside(given: Beside) -> None:
        machine, launcher = Machine(given), Launcher(given, fails=(2,) if fault == "fails" else (), hangs=(2,) if fault == "hangs" else ())
        task = asyncio.create_task(launcher.run())
        try:
            await after_step(given, 2)
            launcher.ask(engines=2, trainer=2)
            found.append(await launcher.settled(after=2))
            machine._requests = launcher._requests + 1
            await machine.answered()
            await machine.until(2, State.LIVE)
            came_back.append(2)
            await asyncio.Event().wait()
        finally:
            task.cancel()

    ended = simulated(settings(steps=40), tmp_path, beside)
    assert ended.problems() == []
    assert (found[0].ranks, found[0].reason, found[0].is_back) == (1, why, True)
    assert came_back == [2], "the engine that had made room is there again"
    assert [phase for phase, _, _ in told(ended)] == ["settled", "saving", "starting", "starting", "settled"]
    assert len([line for line in ended.lines if line["kind"] == "step"]) == 40


async def answered(given: Beside, launcher: Launcher) -> Members:
    while (found := given.folder.members()) is None or found.request_id < launcher._requests:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return found


def test_a_change_that_waits_for_engines_to_leave_is_told_at_once_and_another_one_is_refused(tmp_path: Path) -> None:
    refused: list[str] = []

    async def beside(given: Beside) -> None:
        launcher = Launcher(given)
        task = asyncio.create_task(launcher.run())
        try:
            await after_step(given, 0)
            launcher.ask(engines=2, trainer=2, drain_s=60.0)
            found = await answered(given, launcher)
            assert State.DRAINING in {one.state for one in found.members}
            record = given.folder.trainer()
            assert record is not None
            assert (record.ranks, record.wanted) == (1, 2)
            launcher.ask(engines=1, trainer=3)
            found = await answered(given, launcher)
            assert State.DRAINING in {one.state for one in found.members}
            assert found.num_wanted == 2, "nothing of it is carried out"
            refused.append(found.refused)
            assert (await launcher.settled(after=1)).ranks == 2
            await asyncio.Event().wait()
        finally:
            task.cancel()

    slow = peers.World(step_s=1.0)
    ended = run(settings(), folder=tmp_path, beside=beside, world=slow, cast=Cast(trainer=nobody), limit_s=3000.0)
    assert ended.problems() == []
    assert refused == ["trainer=3: the trainer changes to 2 ranks; ask again once it has"]


def test_engines_that_were_asked_for_since_stay_where_a_change_is_taken_back(tmp_path: Path) -> None:
    wanted: list[int] = []

    async def beside(given: Beside) -> None:
        launcher = Launcher(given, hangs=(2,))
        task = asyncio.create_task(launcher.run())
        try:
            await after_step(given, 2)
            launcher.ask(engines=2, trainer=2)
            while (record := given.folder.trainer()) is None or record.phase is not Phase.STARTING:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            launcher.ask(engines=1)
            await launcher.settled(after=2)
            await asyncio.sleep(1.0)
            wanted.append((await answered(given, launcher)).num_wanted)
            await asyncio.Event().wait()
        finally:
            task.cancel()

    ended = simulated(settings(steps=40), tmp_path, beside)
    assert ended.problems() == []
    assert wanted == [1]


def test_a_run_whose_trainer_starts_in_neither_layout_ends_and_says_so(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        launcher = Launcher(given, hangs=(1, 2))
        await asyncio.gather(launcher.run(), asks(launcher, given))

    async def asks(launcher: Launcher, given: Beside) -> None:
        await after_step(given, 2)
        launcher.ask(trainer=2)

    with pytest.RaisesGroup(
        pytest.RaisesExc(PeerSilent, match="no trainer starts, with the 1 ranks that it had before neither"), flatten_subgroups=True
    ):
        simulated(settings(), tmp_path, beside)


class _Killed(Exception):
    """The whole run is gone."""


@pytest.mark.parametrize(("phase", "ranks"), [(Phase.SAVING, 1), (Phase.STARTING, 2)])
def test_a_run_that_is_killed_whole_in_a_change_goes_on_with_what_was_saved(tmp_path: Path, phase: Phase, ranks: int) -> None:
    disk, started, ends = Disk(), list[int](), list[TrainerRanks]()

    async def dies(given: Beside) -> None:
        launcher = Launcher(given, disk=disk)
        task = asyncio.create_task(launcher.run())
        try:
            await after_step(given, 4)
            launcher.ask(trainer=2)
            while (found := given.folder.trainer()) is None or found.phase is not phase:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            raise _Killed
        finally:
            task.cancel()

    async def goes_on(given: Beside) -> None:
        launcher = Launcher(given, disk=disk)
        task = asyncio.create_task(launcher.run())
        try:
            await after_step(given, 7)
            ends.append(await launcher.settled(after=1))
            started.extend(launcher.started)
            await asyncio.Event().wait()
        finally:
            task.cancel()

    how: dict[str, Any] = {"world": WORLD, "cast": Cast(trainer=nobody), "limit_s": 3000.0, "is_recorded": True}
    with pytest.RaisesGroup(_Killed, flatten_subgroups=True):
        run(settings(), folder=tmp_path, beside=dies, **how)
    ended = run(settings(), folder=tmp_path, beside=goes_on, **how)
    assert started == [ranks], "an order is not carried out twice"
    assert (ends[0].ranks, ends[0].epoch) == (ranks, 1)
    assert ends[0].reason.startswith("another orchestrator took the place") == (phase is Phase.SAVING)
    assert ended.ending.reason == "finished"
    with open_history(tmp_path) as history:
        assert check_history(history, with_checkpoints=False).problems == []


@pytest.mark.parametrize("seed", range(4))
def test_seeded_changes_and_kills_keep_every_promise(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    happened: list[str] = []

    async def beside(given: Beside) -> None:
        launcher = Launcher(given, fails=(3,))
        task = asyncio.create_task(launcher.run())
        try:
            while True:
                await asyncio.sleep(chance.expovariate(1 / 3.0))
                if chance.random() < 0.25:
                    await launcher.kill()
                    happened.append("killed")
                else:
                    launcher.ask(trainer=chance.randint(1, 4))
                    happened.append("asked")
        finally:
            task.cancel()

    ended = simulated(settings(trainer={"steps": 30, "ready_deadline_s": 20.0, "max_ranks": 4}), tmp_path, beside)
    assert ended.problems() == []
    assert {"killed", "asked"} <= set(happened)
    assert len({ranks for phase, ranks, _ in told(ended) if phase == "settled"}) > 1, "the trainer has changed"
    assert ended.ending.rollouts.failed == 0


@pytest.mark.parametrize(
    ("sections", "trainer", "said"),
    [
        ({}, 9, "trainer=9: expected 1 to 8 (trainer.max_ranks)"),
        ({"trainer": {"ranks": 2, "parallel": {"shard": 2}}}, 3, "parallel.shard = 2 does not divide the 3 replicas"),
        ({"trainer": {"ranks": 1, "cores": [0]}}, 2, "trainer.cores"),
        ({"lora": {"rank": 4}}, 2, "a trainer of adapters keeps its ranks"),
    ],
)
def test_what_makes_no_trainer_is_refused_with_the_reason(tmp_path: Path, sections: dict[str, Any], trainer: int, said: str) -> None:
    answers: list[str] = []

    async def beside(given: Beside) -> None:
        launcher = Launcher(given)
        task = asyncio.create_task(launcher.run())
        try:
            await after_step(given, 0)
            launcher.ask(engines=2, trainer=trainer)
            while (found := given.folder.members()) is None or not found.request_id:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            answers.append(found.refused)
            assert found.num_wanted == 3, "nothing of it is carried out"
            await asyncio.Event().wait()
        finally:
            task.cancel()

    where = settings(**sections | {"trainer": {"steps": 3} | sections.get("trainer", {})})
    ended = simulated(where, tmp_path, beside)
    assert ended.problems() == []
    assert said in answers[0]
