"""Engines of another width take the place of those of a simulated run, and back: no rollout is lost, none is trained twice."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.checker.history import open_history
from pipelinerl.checker.invariants import check_history
from pipelinerl.config import Config
from pipelinerl.messages import ToEngine
from pipelinerl.runtime.membership import Member, Members, ScaleFolder, ScaleRequest, StartedBy, State
from tests.sim import peers
from tests.sim.run import Beside, Cast, Simulated, config, run
from tests.sim.trainer_group import Disk, nobody
from tests.sim.trainer_group import Launcher as TrainerLauncher

pytestmark = pytest.mark.slow

SLOW = peers.World(step_s=0.2, start_s=1.0)
"""Engines so slow that much can happen to a run of a few steps."""
THERE = (State.JOINING, State.LIVE, State.DRAINING)


def settings(*, steps: int = 10, **sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "engine": {"silent_after_s": 4.0, "ready_deadline_s": 20.0},
        "trainer": {"steps": steps},
        "checkpoint": {"every": 2},
    }
    return config(**{name: {**tree.get(name, {}), **sections.get(name, {})} for name in tree | sections})


class Launcher:
    """The launcher of engines that join, on a machine of so many GPUs, as `launch.launcher` is: one GPU for each rank."""

    def __init__(self, beside: Beside, *, gpus: int, fails: frozenset[int] = frozenset(), hangs: frozenset[int] = frozenset()) -> None:
        """No engine starts whose `tensor_parallel_size` is in `fails`, and one of `hangs` never says a word."""
        self.beside, self._gpus, self._fails, self._hangs = beside, gpus, fails, hangs
        self.engines: dict[int, tuple[int, asyncio.Task[None]]] = {}
        self._begun: set[tuple[int, int]] = set()
        self.busiest = 0
        """GPUs that were used at once."""

    def members(self) -> Members:
        found = self.beside.folder.members()
        assert found is not None
        return found

    def ask(self, **wanted: Any) -> None:
        self.beside.folder.ask(ScaleRequest(request_id=self.members().request_id + 1, **wanted))

    async def run(self) -> None:
        try:
            while True:
                await asyncio.sleep(0.3)
                self._look()
        finally:
            for _, task in self.engines.values():
                task.cancel()

    async def settled(self, engines: int, size: int) -> None:
        """Wait until the run has so many engines of this `tensor_parallel_size`, and no others."""
        while self.there() != {(State.LIVE, size): engines}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    def there(self) -> collections.Counter[tuple[State, int | None]]:
        return collections.Counter((one.state, one.tensor_parallel_size) for one in self.members().members if one.state in THERE)

    async def kill(self, engine_id: int) -> None:
        _, task = self.engines.pop(engine_id)
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task

    def start(self, member: Member) -> None:
        size = member.tensor_parallel_size or 1
        link = self.beside.hub.connect(f"engine-{member.engine_id}", accepts=ToEngine)
        max_running = self.beside.settings.engine.max_running
        given = {"engine_id": member.engine_id, "max_running": max_running, "world": self.beside.world, "tensor_parallel_size": size}
        given["request_id"] = member.request_id

        async def process() -> None:
            try:
                await (asyncio.Event().wait() if size in self._hangs else peers.engine(link, **given))
            finally:
                link.close()

        self.engines[member.engine_id] = (size, asyncio.create_task(process()))

    def _look(self) -> None:
        found = self.beside.folder.members()
        if found is None:
            return
        for member in found.members:
            number, begun = member.engine_id, (member.engine_id, member.request_id)
            is_ours = member.started_by is StartedBy.LAUNCHER and member.state is State.JOINING and begun not in self._begun
            if not is_ours or (number in self.engines and not self.engines[number][1].done()):
                continue
            used = sum(one.tensor_parallel_size or 1 for one in found.members if one.state in THERE and (self._has_begun(one)))
            size = member.tensor_parallel_size or 1
            if used + size > self._gpus and found.has_of_another_width(member):
                if not self.beside.folder.with_state(State.DRAINING):
                    self.beside.folder.tell_no_room(number, f"{self._gpus - used} GPUs are free")
                continue
            self._begun.add(begun)
            if used + size > self._gpus or size in self._fails:
                self.beside.tell_gone(number, f"{size} ranks do not start")
                continue
            self.busiest = max(self.busiest, used + size)
            self.start(member)

    def _has_begun(self, one: Member) -> bool:
        return one.request_id == 0 or (one.engine_id, one.request_id) in self._begun


Story = Callable[[Launcher], Coroutine[Any, Any, None]]


def simulated(folder: Path, story: Story, *, gpus: int, where: Config | None = None, world: peers.World = SLOW, **how: Any) -> Simulated:
    """A run in which the story happens once its engines are there; `how` are faults of the launcher."""

    async def beside(given: Beside) -> None:
        launcher = Launcher(given, gpus=gpus, **how)
        while (found := given.folder.members()) is None or {one.state for one in found.members} != {State.LIVE}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        async with asyncio.TaskGroup() as group:
            group.create_task(launcher.run())
            group.create_task(story(launcher))

    return run(where or settings(), folder=folder, beside=beside, world=world, limit_s=3000.0)


def changes(ended: Simulated) -> list[str]:
    return [f"{line['engine_id']} {line['state']}" for line in ended.lines if line["kind"] == "member"]


def reasons(ended: Simulated, state: str) -> list[str]:
    return [line["reason"] for line in ended.lines if line["kind"] == "member" and line["state"] == state]


def check_whole(ended: Simulated) -> None:
    assert ended.problems() == []
    assert ended.ending.reason == "finished"
    assert ended.ending.rollouts.failed == 0, "who leaves costs no rollout"
    assert not [line for line in ended.lines if line["kind"] == "violation"]


async def there_and_back(launcher: Launcher) -> None:
    launcher.ask(engines=1, tensor_parallel_size=2)
    await launcher.settled(1, 2)
    await asyncio.sleep(4.0)
    launcher.ask(engines=2, tensor_parallel_size=1)
    await launcher.settled(2, 1)


def test_two_of_one_rank_become_one_of_two_where_gpus_are_free_and_back(tmp_path: Path) -> None:
    ended = simulated(tmp_path, there_and_back, gpus=4)
    check_whole(ended)
    there = changes(ended)
    assert there[2:8] == ["2 joining", "2 live", "0 draining", "1 draining", *sorted(there[6:8])]
    assert sorted(there[6:8]) == ["0 left", "1 left"]
    assert sorted(there[8:10]) == ["0 joining", "1 joining"]
    assert there[-2:] == ["2 draining", "2 left"]
    assert set(reasons(ended, "left")) == {"it has ended all that it had"}
    assert "member" in {line["kind"] for line in ended.lines if line.get("tensor_parallel_size") == 2}
    tokens = [line["num_tokens"] for line in ended.lines if line["kind"] == "load" and line["engine_id"] == 2]
    swaps = [line["version"] for line in ended.lines if line["kind"] == "swap" and line["engine_id"] == 2]
    assert swaps, "it takes policies"
    assert tokens == [] or max(tokens) > 0


def test_where_the_others_have_the_gpus_they_leave_first_and_what_they_had_waits_with_its_tokens(tmp_path: Path) -> None:
    held: list[int] = []

    async def story(launcher: Launcher) -> None:
        launcher.ask(engines=1, tensor_parallel_size=2, drain_s=0.0)
        while not launcher.there()[State.JOINING, 2] or launcher.there()[State.DRAINING, 1] or launcher.there()[State.LIVE, 1]:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        held.append(len(launcher.beside.run.parts.engines.requests))
        await launcher.settled(1, 2)
        launcher.ask(engines=2, tensor_parallel_size=1, drain_s=0.0)
        await launcher.settled(2, 1)
        assert launcher.busiest == 2

    ended = simulated(tmp_path, story, gpus=2)
    check_whole(ended)
    assert held == [0], "no engine is there for a while"
    there = changes(ended)
    assert there.index("2 live") > max(there.index("0 left"), there.index("1 left"))
    assert there.index("0 live", there.index("2 left")) > there.index("2 left")
    assert all("go on in others with their tokens" in reason for reason in reasons(ended, "left"))


def test_four_of_one_rank_become_two_of_two_pair_by_pair_so_that_somebody_always_writes(tmp_path: Path) -> None:
    least: list[int] = []

    async def story(launcher: Launcher) -> None:
        launcher.ask(engines=2, tensor_parallel_size=2, drain_s=0.0)
        while launcher.there() != {(State.LIVE, 2): 2}:
            least.append(sum(count for (state, _), count in launcher.there().items() if state is State.LIVE))
            await asyncio.sleep(0.1)

    ended = simulated(tmp_path, story, gpus=4, where=settings(engine={"count": 4}))
    check_whole(ended)
    assert min(least) >= 1
    assert [one for one in changes(ended) if one.endswith(" left")] == ["3 left", "2 left", "1 left", "0 left"]


@pytest.mark.parametrize(
    ("gpus", "fault", "why"),
    [
        (2, {"fails": frozenset([2])}, "2 ranks do not start"),
        (4, {"fails": frozenset([2])}, "2 ranks do not start"),
        (2, {"hangs": frozenset([2])}, "it has not come within 20 s"),
        (4, {"hangs": frozenset([2])}, "it has not come within 20 s"),
    ],
)
def test_where_none_of_the_other_width_comes_to_serve_the_run_has_the_engines_of_before_again(
    tmp_path: Path, gpus: int, fault: dict[str, Any], why: str
) -> None:
    async def story(launcher: Launcher) -> None:
        launcher.ask(engines=1, tensor_parallel_size=2, drain_s=0.5)
        while State.LOST not in {one.state for one in launcher.members().members}:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await launcher.settled(2, 1)
        assert (launcher.members().num_wanted, launcher.members().before) == (2, None)

    ended = simulated(tmp_path, story, gpus=gpus, where=settings(steps=24), **fault)
    check_whole(ended)
    assert reasons(ended, "lost") == [why]
    left = [one for one in changes(ended) if one.endswith("left")]
    assert len(left) == (2 if gpus == 2 else 0), "nothing is given up for it where it has GPUs of its own"
    asked = [(line["engines"], line["tensor_parallel_size"]) for line in ended.lines if line["kind"] == "scale"]
    assert asked == [(1, 2), (2, 1)]


def test_a_wide_engine_that_is_killed_is_awaited_and_one_that_does_not_start_any_more_ends_the_run_with_its_words(tmp_path: Path) -> None:
    async def story(launcher: Launcher) -> None:
        launcher.ask(engines=1, tensor_parallel_size=2)
        await launcher.settled(1, 2)
        (wide,) = [one for one in launcher.members().members if one.state is State.LIVE]
        await launcher.kill(wide.engine_id)
        launcher.start(wide)
        await asyncio.sleep(2.0)
        await launcher.settled(1, 2)
        launcher.beside.tell_gone(wide.engine_id, "it ended with exit code 1")

    with pytest.RaisesGroup(
        pytest.RaisesExc(Exception, match="the last of the run, will not serve any more: it ended"), flatten_subgroups=True
    ):
        simulated(tmp_path, story, gpus=2, where=settings(steps=60))


def test_neither_the_trainer_nor_the_other_model_changes_beside_a_width(tmp_path: Path) -> None:
    async def story(launcher: Launcher) -> None:
        async def asked(**wanted: Any) -> str:
            launcher.ask(**wanted)
            number = launcher.members().request_id
            while launcher.members().request_id == number:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            return launcher.members().refused

        refused = "tensor_parallel_size=2: ask for prm=, reward= and trainer= before or after it"
        assert await asked(trainer=2, tensor_parallel_size=2) == refused
        assert "3 beside 2, and there are 4 (engine.max_count)" in await asked(engines=3, tensor_parallel_size=2)
        assert await asked(engines=1, tensor_parallel_size=2) == ""
        assert await asked(trainer=2) == "engines get tensor_parallel_size=2; ask for prm=, reward= and trainer= again once they have"
        await launcher.settled(1, 2)

    check_whole(simulated(tmp_path, story, gpus=4, where=settings(engine={"max_count": 4})))


@pytest.mark.parametrize("kills", [False, True])
@pytest.mark.parametrize("gpus", [3, 8])
@pytest.mark.parametrize("seed", range(2))
def test_seeded_widths_numbers_and_losses_keep_every_promise(tmp_path: Path, seed: int, gpus: int, kills: bool) -> None:
    chance = random.Random(seed)
    happened: collections.Counter[str] = collections.Counter()

    async def story(launcher: Launcher) -> None:
        while True:
            await asyncio.sleep(chance.expovariate(0.5))
            live = [one for one in launcher.members().members if one.state is State.LIVE and one.engine_id in launcher.engines]
            if live and kills and chance.random() < 0.3:
                one = chance.choice(live)
                await launcher.kill(one.engine_id)
                happened["killed"] += 1
                await asyncio.sleep(0.3)
                if one.engine_id not in launcher.engines:
                    launcher.start(one)
            else:
                size = chance.choice([1, 1, 2, None])
                wanted = {"engines": chance.randint(1, gpus // (size or 2)), "tensor_parallel_size": size}
                launcher.ask(**wanted, drain_s=chance.choice([0.0, 0.2, 5.0]))
                happened[f"{size} ranks"] += 1

    world = peers.World(seed=seed, step_s=0.2, refused_fraction=0.05, start_s=0.3)
    ended = simulated(tmp_path, story, gpus=gpus, where=settings(steps=16, engine={"max_count": 12}), world=world)
    assert ended.problems() == []
    assert kills or ended.ending.rollouts.failed == 0, "who leaves costs no rollout; a prompt that was there at two deaths is given up"
    assert (happened["killed"] > 0) is kills
    assert happened["2 ranks"] >= 2
    assert "2" in {str(line.get("tensor_parallel_size")) for line in ended.lines if line["kind"] == "member" and line["state"] == "live"}


class _Killed(Exception):
    """The whole run is gone."""


@pytest.mark.parametrize("gpus", [2, 4])
@pytest.mark.parametrize("number", [1, 2, 3, 4, 6])
def test_whenever_the_orchestrator_is_killed_number_and_width_hold(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, gpus: int
) -> None:
    """It dies right after it has written the engines of the run for the so-manieth time since the width was asked for."""
    disk, written = Disk(), list[str]()
    write = ScaleFolder._write

    def and_die(self: ScaleFolder, name: str, value: Any) -> None:
        write(self, name, value)
        if isinstance(value, Members) and value.tensor_parallel_size == 2:
            written.append(name)
            if len(written) == number:
                monkeypatch.setattr(ScaleFolder, "_write", write)
                raise _Killed

    async def begins(given: Beside) -> None:
        launcher, trainer = Launcher(given, gpus=gpus), TrainerLauncher(given, disk=disk)
        async with asyncio.TaskGroup() as group:
            group.create_task(trainer.run())
            while (found := given.folder.members()) is None or {one.state for one in found.members} != {State.LIVE}:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            group.create_task(launcher.run())
            await asyncio.sleep(3.0)
            launcher.ask(engines=1, tensor_parallel_size=2, drain_s=0.5)

    async def goes_on(given: Beside) -> None:
        launcher, trainer = Launcher(given, gpus=gpus), TrainerLauncher(given, disk=disk)
        async with asyncio.TaskGroup() as group:
            group.create_task(trainer.run())
            group.create_task(launcher.run())
            await asyncio.sleep(1.0)
            await launcher.settled(1, 2)

    where, how = settings(steps=30), {"world": SLOW, "cast": Cast(trainer=nobody), "is_recorded": True, "limit_s": 3000.0}
    monkeypatch.setattr(ScaleFolder, "_write", and_die)
    with pytest.RaisesGroup(_Killed, flatten_subgroups=True):
        run(where, folder=tmp_path, beside=begins, **how)
    ended = run(where, folder=tmp_path, beside=goes_on, **how)
    assert ended.ending.reason == "finished"
    with open_history(tmp_path) as history:
        assert check_history(history, with_checkpoints=False).problems == []
    last = ScaleFolder(tmp_path).members()
    assert last is not None
    assert (last.num_wanted, last.tensor_parallel_size, last.before) == (1, 2, None)
    live = [one.tensor_parallel_size for one in last.members if one.state in THERE]
    assert live == [2]
