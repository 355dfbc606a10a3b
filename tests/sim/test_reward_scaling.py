"""A reward model of several processes, which join, leave and are killed with their scorer: every completion has one score, its own."""

from __future__ import annotations

import asyncio
import collections
import random
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.rules.membership import membership_of, reward_memberships_of
from pipelinerl.config import Config
from pipelinerl.config.scoring import RewardSection
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.membership import DealtGpu, DealtGpus, Member, ScaleFolder, ScaleRequest, StartedBy, State
from tests.sim import peers, trainer_group
from tests.sim import test_elastic as elastic
from tests.sim.reward_processes import NAME, Scorer, Speed
from tests.sim.run import Beside, Cast, Simulated, config, run
from tests.sim.test_scaling import Machine

SLOW = peers.World(step_s=0.1)
"""Engines so slow that much can happen to a run of a few steps."""
MODEL = "reward.0"
FIRST = 10**18
"""Numbers of requests are nanoseconds, far above every gauge."""


def with_model(settings: Config, *, concurrency: int = 1) -> Config:
    model = RewardSection.model_validate({"model": NAME, "format": "text", "concurrency": concurrency})
    return settings.model_copy(update={"reward": (model,)})


def settings(*, steps: int = 8, concurrency: int = 1, **sections: dict[str, Any]) -> Config:
    fast = {"engine": {"silent_after_s": 4.0}, "scorer": {"silent_after_s": 4.0}, "trainer": {"steps": steps}}
    return with_model(config(**fast | sections), concurrency=concurrency)


class Launcher(Machine):
    """A launcher of engines and of a scorer, which it deals GPUs: while somebody leaves, nobody is started."""

    def __init__(self, beside: Beside, journal: Journal, *, speed: Speed | None = None, cannot_load: Collection[int] = ()) -> None:
        super().__init__(beside)
        self._requests = FIRST
        self._journal, self._cannot_load, self._speed = journal, cannot_load, speed or Speed()
        self.scorers: list[Scorer] = []
        self.dealt: list[DealtGpu] = []
        self.start_scorer()

    def start_scorer(self) -> None:
        count = self._beside.settings.reward[0].concurrency or 1
        how = {"journal": self._journal, "speed": self._speed, "cannot_load": self._cannot_load, "count": count}
        self.scorers.append(Scorer(self._beside, **how))

    async def kill_scorer(self) -> None:
        await self.scorers[-1].kill()
        self.start_scorer()

    def order(self, *, engines: int | None = None, reward: int | None = None, drain_s: float = 30.0, **more: Any) -> None:
        self._requests += 1
        rewards = {} if reward is None else {MODEL: reward}
        self._beside.folder.ask(ScaleRequest(request_id=self._requests, engines=engines, rewards=rewards, drain_s=drain_s, **more))

    async def look(self) -> None:
        """Start whom the orchestrator has join."""
        found = self._beside.folder.members()
        if found is None or not self._is_answered() or self._beside.folder.with_state(State.DRAINING):
            return
        self.start_joined(found)
        for one in found.rewards[MODEL].members:
            new = DealtGpu(kind=MODEL, number=one.engine_id, request_id=one.request_id, gpu=f"GPU-{len(self.dealt)}")
            is_known = any((one.number, one.request_id) == (new.number, new.request_id) for one in self.dealt)
            if one.started_by is StartedBy.LAUNCHER and one.state is State.JOINING and not is_known:
                self.dealt.append(new)
                self._beside.folder.deal(DealtGpus(dealt=tuple(self.dealt)))

    async def starts(self) -> None:
        while True:
            await self.look()
            await asyncio.sleep(0.1)

    async def settled(self) -> dict[str, int]:
        """The numbers that were asked for, once whoever leaves has left and whoever joins serves."""
        folder = self._beside.folder
        while not self._is_answered() or folder.with_state(State.DRAINING, State.JOINING):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        found = folder.members()
        assert found is not None
        return {"engines": found.num_wanted, "reward": found.rewards[MODEL].num_wanted}

    def _is_answered(self) -> bool:
        found = self._beside.folder.members()
        return found is not None and (self._requests == FIRST or found.request_id >= self._requests)

    def processes(self) -> tuple[Member, ...]:
        found = self._beside.folder.members()
        return () if found is None else found.rewards[MODEL].members

    async def until_process(self, number: int, state: State) -> None:
        while not any((one.engine_id, one.state) == (number, state) for one in self.processes()):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


@asynccontextmanager
async def begun(given: Beside, folder: Path, **how: Any) -> AsyncIterator[Launcher]:
    journal = Journal(folder, "scorer-0", clock=asyncio.get_running_loop().time)
    launcher = Launcher(given, journal, **how)
    task = asyncio.create_task(launcher.starts())
    try:
        await launcher.until(1, State.LIVE)
        await launcher.settled()
        yield launcher
    finally:
        task.cancel()
        journal.close()


async def with_one_that_drains(launcher: Launcher) -> Scorer:
    """Have a second process join, and drain while it has a batch; return its scorer."""
    launcher.order(reward=2)
    await launcher.settled()
    scorer = launcher.scorers[0]
    while not scorer.queue.num_held(1):  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    launcher.order(reward=1, drain_s=600.0)
    while 1 not in scorer._closed:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    return scorer


def simulated(where: Config, folder: Path, beside: Any, *, world: peers.World = SLOW, **how: Any) -> Simulated:
    return run(where, folder=folder, beside=beside, world=world, limit_s=6000.0, **{"cast": Cast(scorer=trainer_group.nobody), **how})


def changes(ended: Simulated, of: str = "") -> list[str]:
    lines = (line for line in ended.lines if line["kind"] == "member")
    return [f"{line['of']} {line['engine_id']} {line['state']}" for line in lines if line["of"].startswith(of)]


def left(ended: Simulated) -> list[str]:
    return [line["reason"] for line in ended.lines if line["kind"] == "member" and line["state"] == "left"]


async def until_finished(given: Beside) -> None:
    while not given.run.pipeline.training.finished.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.1)


def test_one_order_hands_a_device_to_the_model_and_another_hands_it_back(tmp_path: Path) -> None:
    told: list[dict[str, int]] = []
    scored: list[dict[int, int]] = []

    async def beside(given: Beside) -> None:
        async with begun(given, tmp_path) as launcher:
            for order in ({"engines": 1, "reward": 2}, {"engines": 2, "reward": 1}):
                launcher.order(**order)
                told.append(await launcher.settled())
                await asyncio.sleep(3.0)
                scored.append(dict(launcher.scorers[0].scored))
            assert launcher.scorers[0].slots == [0], "who has left was ended"
            assert launcher.scorers[0].asked_twice == 0, "it ended its batch first"
            await until_finished(given)

    ended = simulated(settings(), tmp_path, beside)
    assert ended.problems() == []
    assert ended.ending.rollouts.failed == 0
    assert told == [{"engines": 1, "reward": 2}, {"engines": 2, "reward": 1}]
    assert scored[0][1] > 0, "it took batches from then on"
    there = changes(ended)
    assert sorted(there[:3]) == ["engines 0 live", "engines 1 live", "reward.0 0 live"]
    first, second = there[3:7], there[7:]
    assert sorted(first[:2]) == ["engines 1 draining", "reward.0 1 joining"]
    assert first[2:] == ["engines 1 left", "reward.0 1 live"], "the engine had left before the model's process was there"
    assert sorted(second[:2]) == ["engines 1 joining", "reward.0 1 draining"]
    assert second[2:] == ["reward.0 1 left", "engines 1 live"]
    assert left(ended) == ["it has ended all that it had"] * 2
    assert not [line for line in ended.lines if line["kind"] == "violation"]


def test_the_batch_of_a_process_that_has_no_more_time_is_asked_of_others(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        async with begun(given, tmp_path, speed=Speed(batch_s=5.0)) as launcher:
            launcher.order(reward=3)
            await launcher.settled()
            scorer = launcher.scorers[0]
            while min(scorer.queue.num_held(slot) for slot in range(3)) < 1:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            launcher.order(reward=1, drain_s=0.0)
            await launcher.settled()
            await asyncio.sleep(2.0)
            assert scorer.slots == [0]
            assert scorer.asked_twice > 0
            await until_finished(given)

    ended = simulated(settings(), tmp_path, beside)
    assert ended.problems() == []
    assert ended.ending.rollouts.failed == 0
    assert len(left(ended)) == 2
    assert all("of which are asked of others anew" in reason for reason in left(ended)), left(ended)


def test_a_process_that_cannot_load_is_lost_by_name_and_the_run_goes_on(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        async with begun(given, tmp_path, cannot_load=(1,)) as launcher:
            launcher.order(reward=2)
            await launcher.until_process(1, State.LOST)
            await until_finished(given)

    ended = simulated(settings(), tmp_path, beside)
    assert ended.problems() == []
    (lost,) = [line for line in ended.lines if line["kind"] == "member" and line["state"] == "lost"]
    assert (lost["of"], lost["engine_id"], lost["reason"]) == (MODEL, 1, "its GPU has no room")


def test_a_process_without_a_gpu_is_lost_by_name(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        async with begun(given, tmp_path) as launcher:
            launcher.order(reward=2)
            launcher.dealt.append(DealtGpu(kind=MODEL, number=1, request_id=FIRST + 1))  # nobody deals it another
            await launcher.until_process(1, State.JOINING)
            given.tell_gone(1, "every GPU of this machine is taken", MODEL)
            await launcher.until_process(1, State.LOST)
            launcher.order(reward=2)  # ask again, and it comes
            await launcher.until_process(1, State.LIVE)
            await until_finished(given)

    ended = simulated(settings(steps=12), tmp_path, beside)
    assert ended.problems() == []
    (lost,) = [line["reason"] for line in ended.lines if line["kind"] == "member" and line["state"] == "lost"]
    assert lost == "every GPU of this machine is taken"


@pytest.mark.parametrize("drains", [False, True])
def test_a_scorer_that_is_killed_comes_again_with_the_processes_that_the_run_has(tmp_path: Path, drains: bool) -> None:
    there: list[list[int]] = []

    async def beside(given: Beside) -> None:
        async with begun(given, tmp_path, speed=Speed(batch_s=2.0)) as launcher:
            launcher.order(reward=3)
            await launcher.settled()
            if drains:
                while not launcher.scorers[-1].queue.num_held(2):  # noqa: ASYNC110
                    await asyncio.sleep(0.05)
                launcher.order(reward=2, drain_s=600.0)
                await launcher.until_process(2, State.DRAINING)
            await launcher.kill_scorer()
            await asyncio.sleep(5.0)
            await launcher.settled()
            there.append(launcher.scorers[-1].slots)
            assert launcher.scorers[-1].gpus[1] == launcher.scorers[0].gpus[1] == "GPU-0"
            await until_finished(given)

    ended = simulated(settings(), tmp_path, beside)
    assert ended.problems() == []
    assert ended.ending.rollouts.failed == 0
    assert there == [[0, 1] if drains else [0, 1, 2]]
    if drains:
        assert left(ended) == ["it ended before it had answered all that it had"]


def test_a_process_that_is_killed_while_it_drains_has_left(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        async with begun(given, tmp_path, speed=Speed(batch_s=2.0)) as launcher:
            scorer = await with_one_that_drains(launcher)
            await scorer.kill_process(1)
            await launcher.settled()
            await until_finished(given)

    ended = simulated(settings(), tmp_path, beside)
    assert ended.problems() == []
    assert ended.ending.rollouts.failed == 0
    assert left(ended) == ["it ended before it had answered all that it had"]


def test_a_process_that_was_to_leave_stays_where_that_is_asked_for_meanwhile(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        async with begun(given, tmp_path, speed=Speed(batch_s=4.0)) as launcher:
            scorer = await with_one_that_drains(launcher)
            launcher.order(reward=2)
            before = scorer.scored.get(1, 0)
            while scorer.scored.get(1, 0) < before + 40:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            assert len(launcher.dealt) == 1, "it was there all the time"
            await until_finished(given)

    ended = simulated(settings(steps=16), tmp_path, beside)
    assert ended.problems() == []
    assert left(ended) == []


def test_an_orchestrator_that_takes_anothers_place_knows_the_processes_that_have_joined(tmp_path: Path) -> None:
    (membership,) = reward_memberships_of(settings(), earlier=None)
    membership.scale(ScaleRequest(request_id=1, rewards={MODEL: 2}))
    engines = membership_of(settings(), earlier=None)
    ScaleFolder(tmp_path).publish(msgspec.structs.replace(engines.record(), rewards={MODEL: membership.record()}))

    async def beside(given: Beside) -> None:
        async with begun(given, tmp_path) as launcher:
            assert await launcher.settled() == {"engines": 2, "reward": 2}
            await until_finished(given)

    ended = simulated(settings(steps=4), tmp_path, beside)
    assert ended.problems() == []
    assert "reward.0 1 live" in changes(ended)


def test_a_run_that_goes_on_with_another_number_has_that_one(tmp_path: Path) -> None:
    (membership,) = reward_memberships_of(settings(), earlier=None)
    membership.scale(ScaleRequest(request_id=1, rewards={MODEL: 2}))
    engines = membership_of(settings(), earlier=None)
    ScaleFolder(tmp_path).publish(msgspec.structs.replace(engines.record(), rewards={MODEL: membership.record()}))

    async def beside(given: Beside) -> None:
        async with begun(given, tmp_path) as launcher:
            assert (await launcher.settled())["reward"] == 3
            assert launcher.scorers[0].slots == [0, 1, 2]
            assert launcher.dealt == []
            await until_finished(given)

    ended = simulated(settings(steps=4, concurrency=3), tmp_path, beside)
    assert ended.problems() == []


def test_the_trainer_changes_once_processes_have_left_and_they_come_back_where_it_cannot(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        trainer = trainer_group.Launcher(given, fails=(2,))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(trainer.run())
            async with begun(given, tmp_path) as launcher:
                launcher.order(reward=2)
                await launcher.settled()
                launcher.order(reward=1, trainer=2, drain_s=20.0)
                await launcher.until_process(1, State.LEFT)
                await launcher.until_process(1, State.LIVE)
                await until_finished(given)
            task.cancel()

    tree = {"checkpoint": {"every": 5}, "trainer": {"steps": 40, "ready_deadline_s": 20.0, "silent_after_s": 6.0}}
    where = with_model(config(**tree))
    cast = Cast(trainer=trainer_group.nobody, scorer=trainer_group.nobody)
    ended = simulated(where, tmp_path, beside, cast=cast, world=peers.World(step_s=0.05))
    assert ended.problems() == []
    lines = [line for line in ended.lines if line["kind"] in ("member", "trainer_ranks")]
    there = [f"{line['of']} {line['engine_id']} {line['state']}" if line["kind"] == "member" else line["phase"] for line in lines]
    assert there.index("reward.0 1 left") < there.index("starting"), "its device may be the trainer's"
    assert there.index("reward.0 1 joining", there.index("starting")) < there.index("reward.0 1 live", there.index("starting"))


@pytest.mark.parametrize("order", [{"rewards": {"reward.1": 2}}, {"rewards": {"reward.0": 0}}, {"rewards": {"reward.0": 9}}])
def test_what_cannot_be_is_refused_by_name_and_changes_nothing(tmp_path: Path, order: dict[str, Any]) -> None:
    async def beside(given: Beside) -> None:
        async with begun(given, tmp_path) as launcher:
            given.folder.ask(ScaleRequest(request_id=FIRST + 1, engines=1, **order))
            launcher._requests += 1
            assert await launcher.settled() == {"engines": 2, "reward": 1}
            await until_finished(given)

    ended = simulated(settings(steps=4), tmp_path, beside)
    assert ended.problems() == []
    ((key, number),) = order["rewards"].items()
    (refused,) = [line["refused"] for line in ended.lines if line["kind"] == "scale"]
    assert refused.startswith(f"{key}={number}: ")


@pytest.mark.parametrize("seed", range(4))
def test_seeded_orders_and_kills_keep_every_promise(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    happened: collections.Counter[str] = collections.Counter()

    async def beside(given: Beside) -> None:
        async with begun(given, tmp_path, speed=Speed(batch_s=0.8)) as launcher:
            while not given.run.pipeline.training.finished.is_set():
                await asyncio.sleep(chance.expovariate(0.7))
                what, scorer = chance.random(), launcher.scorers[-1]
                if happened["asked"] > 3 and not happened["scorer"]:  # twice would have prompts quarantined that were there both times
                    await launcher.kill_scorer()
                    happened["scorer"] += 1
                elif what < 0.3 and scorer._loaded:
                    await scorer.kill_process(chance.choice(sorted(scorer._loaded)))
                    happened["process"] += 1
                else:
                    orders = {"engines": chance.randint(1, 3), "reward": chance.randint(1, 4)}
                    some = dict(chance.sample(sorted(orders.items()), chance.randint(1, 2)))
                    launcher.order(**some, drain_s=chance.choice([0.0, 0.2, 10.0]))
                    happened["asked"] += 1
            happened["charged"] = sum(scorer.num_charged for scorer in launcher.scorers)

    where = settings(steps=25)
    ended = simulated(where, tmp_path, beside)
    assert ended.problems() == []
    assert ended.ending.reason == "finished"
    assert happened["asked"] > 3
    assert happened["scorer"]
    assert happened["process"]
    assert ended.ending.rollouts.failed == happened["charged"], "nobody fails because a process leaves, or a scorer is killed"
    assert not [line for line in ended.lines if line["kind"] == "violation"]


def test_the_rule_of_elastic_roles_gives_the_model_an_engines_device_where_it_is_the_slowest(tmp_path: Path) -> None:
    """Three engines write 780 tokens per second, a rank trains 2,800, and a process of the model scores 260: two and two are worth 520."""

    async def beside(given: Beside) -> None:
        trainer = trainer_group.Launcher(given)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(trainer.run())
            async with begun(given, tmp_path, speed=Speed(load_s=2.0, batch_s=0.0, token_s=1 / 260)) as launcher:
                await until_finished(given)
                assert launcher.scorers[0].slots == [0, 1]
            task.cancel()

    where = with_model(elastic.settings(steps=60))
    world = peers.World(step_s=0.012, token_s=2e-4, mean_tokens=10, start_s=3.0)
    cast = Cast(trainer=trainer_group.nobody, scorer=trainer_group.nobody)
    ended = simulated(where, tmp_path, beside, world=world, cast=cast)
    assert ended.problems() == []
    lines = [line for line in ended.lines if line["kind"] == "roles"]
    decided = [line for line in lines if line["word"] != "stays"]
    names = ("word", "engines_then", "trainer_then", "scorers_then", "scored_by")
    assert [tuple(line[name] for name in names) for line in decided] == [("begins", 2, 1, 2, MODEL), ("taken", 2, 1, 2, MODEL)]
    assert decided[0]["scorer_rate"] == pytest.approx(260, rel=0.15)
    assert decided[0]["speed_then"] > 1.5 * decided[0]["speed_now"]
    assert lines[-1]["speed_now"] > 1.5 * decided[0]["speed_now"], "it has become what was foretold"
    (scale,) = [line for line in ended.lines if line["kind"] == "scale"]
    assert (scale["prm"], scale["rewards"]) == (None, {MODEL: 2})
