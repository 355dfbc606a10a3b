"""A process reward model of several engines, which join, leave and are killed: every sample trains with the scores of its own steps."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.peers.prm import PrmEngine
from orchestrator.rules.membership import membership_of, prm_membership_of
from pipelinerl.config import Config
from pipelinerl.messages import StepsScored, ToScorer
from pipelinerl.runtime.membership import Kind, Member, Members, ScaleFolder, ScaleRequest, StartedBy, State
from tests.sim import peers, trainer_group
from tests.sim import test_elastic as elastic
from tests.sim.chaos import Faults, survive
from tests.sim.memory import MemoryLink
from tests.sim.run import Beside, Cast, Simulated, run
from tests.sim.test_prm_scoring import credit, followed
from tests.sim.test_scaling import Machine

SLOW = peers.World(step_s=0.2, prm_s=0.3)
"""Engines and a model so slow that much can happen to a run of a few steps."""


def settings(*, steps: int = 8, **sections: dict[str, Any]) -> Config:
    fast = {"engine": {"silent_after_s": 4.0}, "scorer": {"silent_after_s": 4.0}, "trainer": {"steps": steps}}
    return followed(**fast | sections)


class Launcher(Machine):
    """A launcher of engines of both kinds: while one leaves, none is started, as its device may be meant for it."""

    def __init__(self, beside: Beside) -> None:
        super().__init__(beside)
        self.prms: dict[int, asyncio.Task[None]] = {}

    def order(self, *, engines: int | None = None, prm: int | None = None, drain_s: float = 30.0) -> None:
        self._requests += 1
        self._beside.folder.ask(ScaleRequest(request_id=self._requests, engines=engines, prm=prm, drain_s=drain_s))

    async def settled(self) -> Members:
        """The run's engines once those that the last order has leave have left, and those that it has join were started and serve."""
        while self._beside.folder.with_state(State.DRAINING) or not self._is_answered():  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        await self.answered()
        for one in self.members(Kind.PRM):
            begun = (100 + one.engine_id, one.request_id)
            if one.started_by is StartedBy.LAUNCHER and one.state is State.JOINING and begun not in self._begun:
                self._begun.add(begun)
                self.start_prm(one.engine_id)
        while self._beside.folder.with_state(State.JOINING):  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        found = self._beside.folder.members()
        assert found is not None
        return found

    def _is_answered(self) -> bool:
        found = self._beside.folder.members()
        return found is not None and found.request_id >= self._requests

    def members(self, kind: Kind) -> tuple[Member, ...]:
        found = self._beside.folder.members()
        record = found and found.of(kind)
        return record.members if record is not None else ()

    def start_prm(self, number: int) -> None:
        link = self._beside.scorer_hub.connect(f"scorer-{number}", accepts=ToScorer)

        async def process() -> None:
            try:
                await peers.prm(link, world=self._beside.world, prm_id=number, request_id=self._beside.request_of(number, Kind.PRM))
            finally:
                link.close()

        self.prms[number] = asyncio.create_task(process())

    async def kill_prm(self, number: int) -> None:
        self.prms[number].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.prms[number]


async def begun(given: Beside) -> Launcher:
    launcher = Launcher(given)
    await launcher.until(1, State.LIVE)
    while {one.state for one in launcher.members(Kind.PRM)} != {State.LIVE}:  # noqa: ASYNC110
        await asyncio.sleep(0.1)
    return launcher


def changes(ended: Simulated) -> list[str]:
    lines = (line for line in ended.lines if line["kind"] == "member")
    return [f"{line['of']} {line['engine_id']} {line['state']}" for line in lines]


def test_each_trace_stays_with_one_engine_and_new_ones_go_where_fewest_are(tmp_path: Path) -> None:
    most: collections.Counter[int] = collections.Counter()

    async def beside(given: Beside) -> None:
        prm = given.run.parts.prm
        assert prm is not None
        while True:
            held = {engine.engine_id: engine.num_outstanding for engine in prm}
            assert max(held.values(), default=0) - min(held.values(), default=0) <= 8, held
            most.update({number: count for number, count in held.items() if count > most[number]})
            await asyncio.sleep(0.05)

    two = {"path": "unused", "chunk_tokens": 3, "count": 2}
    ended = run(settings(prm=two), folder=tmp_path, beside=beside, world=SLOW, group_advantages=credit)
    assert ended.problems() == []
    assert ended.ending.rollouts.failed == 0
    assert min(most[1], most[2]) > 5
    gauges = [line["prm"] for line in ended.lines if line["kind"] == "status" and line["prm"]]
    assert max(one["num_traces"] for one in gauges) > max(most.values()) / 2


def test_one_order_hands_a_device_to_the_model_and_another_hands_it_back(tmp_path: Path) -> None:
    told: list[tuple[int, int]] = []

    async def beside(given: Beside) -> None:
        launcher = await begun(given)
        for order in ({"engines": 1, "prm": 2}, {"engines": 2, "prm": 1}):
            launcher.order(**order)
            found = await launcher.settled()
            assert found.prm is not None
            told.append((found.num_wanted, found.prm.num_wanted))
            await asyncio.sleep(3.0)
        assert launcher.prms[2].done(), "who has left was told to end"

    ended = run(settings(), folder=tmp_path, beside=beside, world=SLOW, group_advantages=credit)
    assert ended.problems() == []
    assert ended.ending.rollouts.failed == 0
    assert told == [(1, 2), (2, 1)]
    there = changes(ended)
    assert sorted(there[:3]) == ["engines 0 live", "engines 1 live", "prm 1 live"]
    first, second = there[3:7], there[7:]
    assert sorted(first[:2]) == ["engines 1 draining", "prm 2 joining"]
    assert first[2:] == ["engines 1 left", "prm 2 live"], "the engine had left before the model's was there"
    assert sorted(second[:2]) == ["engines 1 joining", "prm 2 draining"]
    assert second[2:] == ["prm 2 left", "engines 1 live"]
    left = [line["reason"] for line in ended.lines if line["kind"] == "member" and line["state"] == "left"]
    assert left == ["it has ended all that it had"] * 2
    assert not [line for line in ended.lines if line["kind"] == "violation"]


def test_what_a_leaving_engine_has_not_ended_in_time_begins_anew_in_others(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        launcher = await begun(given)
        prm = given.run.parts.prm
        assert prm is not None
        launcher.order(prm=3)
        await launcher.settled()
        while min(engine.num_outstanding for engine in prm) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        launcher.order(prm=1, drain_s=0.0)
        await launcher.settled()

    ended = run(settings(), folder=tmp_path, beside=beside, world=SLOW, group_advantages=credit)
    assert ended.problems() == []
    assert ended.ending.rollouts.failed == 0, "leaving is no death: no trace counts it"
    left = [line["reason"] for line in ended.lines if line["kind"] == "member" and line["state"] == "left"]
    assert len(left) == 2
    assert all("of which are asked of others anew" in reason for reason in left), left


def test_an_engine_that_has_joined_and_falls_silent_is_lost_and_its_traces_begin_anew(tmp_path: Path) -> None:
    lost: list[PrmEngine] = []

    async def beside(given: Beside) -> None:
        launcher = await begun(given)
        launcher.order(prm=2)
        await launcher.settled()
        prm = given.run.parts.prm
        assert prm is not None
        while not (engine := prm.find(2)) or engine.num_outstanding < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        lost.append(engine)
        await launcher.kill_prm(2)
        while launcher.members(Kind.PRM)[1].state is not State.LOST:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        assert engine.num_outstanding == 0
        launcher.start_prm(2)  # it is welcome when it comes again
        while launcher.members(Kind.PRM)[1].state is not State.LIVE:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    ended = run(settings(steps=12), folder=tmp_path, beside=beside, world=SLOW, group_advantages=credit)
    assert ended.problems() == []
    assert ended.ending.rollouts.failed == 0
    assert lost
    assert [one for one in changes(ended) if one.startswith("prm 2")] == ["prm 2 joining", "prm 2 live", "prm 2 lost", "prm 2 live"]


def test_an_engine_that_is_killed_while_it_drains_has_left_once_its_name_is_taken_again(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        launcher = await begun(given)
        launcher.order(prm=2)
        await launcher.settled()
        while not (engine := given.run.parts.prm and given.run.parts.prm.find(2)) or engine.num_outstanding < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        launcher.order(prm=1, drain_s=600.0)
        while launcher.members(Kind.PRM)[1].state is not State.DRAINING:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await launcher.kill_prm(2)
        launcher.start_prm(2)
        await launcher.settled()
        await launcher.prms[2]  # it was told to end

    ended = run(settings(), folder=tmp_path, beside=beside, world=SLOW, group_advantages=credit)
    assert ended.problems() == []
    assert ended.ending.rollouts.failed == 0
    (left,) = [line["reason"] for line in ended.lines if line["kind"] == "member" and line["state"] == "left"]
    assert left == "it ended before it had answered all that it had"


def test_word_that_an_engine_is_gone_is_believed_at_once_and_named(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        launcher = await begun(given)
        launcher.order(prm=2)
        await launcher.settled()
        await launcher.kill_prm(2)
        given.tell_gone(2, "there is no GPU for it", Kind.PRM)

    ended = run(settings(), folder=tmp_path, beside=beside, world=SLOW, group_advantages=credit)
    assert ended.problems() == []
    (lost,) = [line for line in ended.lines if line["kind"] == "member" and line["state"] == "lost"]
    assert (lost["of"], lost["engine_id"], lost["reason"]) == ("prm", 2, "there is no GPU for it")


def test_an_engine_that_has_joined_and_lies_is_given_up_and_the_run_goes_on(tmp_path: Path) -> None:
    class Lies:
        def __init__(self, link: MemoryLink) -> None:
            self._link = link

        def __getattr__(self, name: str) -> Any:
            return getattr(self._link, name)

        def send(self, message: Any) -> None:
            if isinstance(message, StepsScored):
                message = msgspec.structs.replace(message, num_taken=message.num_taken + 1000)
            self._link.send(message)

    async def beside(given: Beside) -> None:
        launcher = await begun(given)
        launcher.order(prm=2)
        while len(launcher.members(Kind.PRM)) < 2:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        link: Any = Lies(given.scorer_hub.connect("scorer-2", accepts=ToScorer))
        await peers.prm(link, world=given.world, prm_id=2, request_id=given.request_of(2, Kind.PRM))

    ended = run(settings(steps=12), folder=tmp_path, beside=beside, world=SLOW, group_advantages=credit)
    assert ended.problems() == []
    assert ended.ending.reason == "finished"
    assert changes(ended)[-1] == "prm 2 lost"
    (lost,) = [line["reason"] for line in ended.lines if line["kind"] == "member" and line["state"] == "lost"]
    assert lost == "it kept saying what cannot be"


def test_an_orchestrator_that_takes_anothers_place_knows_the_engines_that_have_joined(tmp_path: Path) -> None:
    prm = prm_membership_of(settings(), earlier=None)
    prm.scale(ScaleRequest(request_id=1, prm=2))
    engines = membership_of(settings(), earlier=None)
    ScaleFolder(tmp_path).publish(msgspec.structs.replace(engines.record(), prm=prm.record()))

    async def beside(given: Beside) -> None:
        launcher = Launcher(given)
        launcher.start_prm(2)
        await launcher.settled()

    ended = run(settings(steps=4), folder=tmp_path, beside=beside, world=SLOW, group_advantages=credit)
    assert ended.problems() == []
    assert "prm 2 live" in changes(ended)


def test_the_trainer_changes_once_the_models_engines_have_left_and_they_come_back_where_it_cannot(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        launcher, trainer = Launcher(given), trainer_group.Launcher(given, fails=(2,))
        async with asyncio.TaskGroup() as group:
            task = group.create_task(trainer.run())
            await launcher.settled()
            given.scorer_hub.connect("scorer-2", accepts=ToScorer)  # it hangs: what it is sent is never answered
            await asyncio.sleep(1.0)
            given.folder.ask(ScaleRequest(request_id=1, prm=1, trainer=2, drain_s=20.0))
            for state in (State.LEFT, State.JOINING):
                while launcher.members(Kind.PRM)[1].state is not state:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
            await launcher.settled()
            await asyncio.sleep(3.0)
            while not given.run.pipeline.training.finished.is_set():  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            task.cancel()

    where = elastic.settings(steps=60, prm={"path": "unused", "chunk_tokens": 3, "count": 2}, pipeline={"elastic": False})
    cast, world = Cast(trainer=trainer_group.nobody), peers.World(step_s=0.05)
    ended = run(where, folder=tmp_path, beside=beside, world=world, cast=cast, group_advantages=credit, limit_s=6000.0)
    assert ended.problems() == []
    lines = [line for line in ended.lines if line["kind"] in ("member", "trainer_ranks")]
    there = [f"{line['of']} {line['engine_id']} {line['state']}" if line["kind"] == "member" else line["phase"] for line in lines]
    assert there.index("prm 2 left") < there.index("starting"), "its device may be the trainer's"
    assert there.index("starting") < there.index("prm 2 joining") < there.index("prm 2 live", there.index("prm 2 joining"))
    (scale,) = [line for line in ended.lines if line["kind"] == "scale" and line["prm"] == 2]
    assert scale["engines"] is None, "nobody asked for another number of these"


@pytest.mark.parametrize("seed", range(3))
def test_seeded_orders_and_losses_keep_every_promise(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    happened: collections.Counter[str] = collections.Counter()

    async def beside(given: Beside) -> None:
        launcher = await begun(given)
        while True:
            await asyncio.sleep(chance.expovariate(1.0))
            killable = [one.engine_id for one in launcher.members(Kind.PRM) if one.engine_id > 1 and one.state is State.LIVE]
            if killable and chance.random() < 0.3:
                number = chance.choice(killable)
                await launcher.kill_prm(number)
                happened["killed"] += 1
                given.tell_gone(number, "its machine was taken", Kind.PRM)
                await asyncio.sleep(1.0)
            else:
                orders = {"engines": chance.randint(1, 3), "prm": chance.randint(1, 3)}
                launcher.order(**dict(chance.sample(sorted(orders.items()), chance.randint(1, 2))), drain_s=chance.choice([0.0, 0.2, 10.0]))
                happened["asked"] += 1
                await launcher.settled()

    world = peers.World(seed=seed, step_s=0.2, prm_s=0.2, start_s=0.3)
    ended = run(settings(steps=10), folder=tmp_path, beside=beside, world=world, group_advantages=credit, limit_s=2000.0)
    assert ended.problems() == []
    assert ended.ending.rollouts.failed == 0, "who leaves or is lost costs no rollout"
    waiting = [line["prm"]["num_waiting_tokens"] for line in ended.lines if line["kind"] == "status" and line["prm"]]
    assert waiting[-1] == 0
    assert happened["killed"] >= 1
    assert happened["asked"] >= 3


def test_two_engines_are_killed_again_and_again_and_scores_count_once(tmp_path: Path) -> None:
    sections = {"prm": {"path": "unused", "chunk_tokens": 3, "count": 2}, "trainer": {"steps": 12}}
    faults = Faults(seed=5, prm_s=3.0, orchestrator_s=8.0)
    survived = survive(followed(**sections), folder=tmp_path, faults=faults, world=peers.World(token_s=1e-3), group_advantages=credit)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert survived.kills["prm"] >= 3


def test_the_rule_of_elastic_roles_gives_the_model_an_engines_device_where_it_is_the_slowest(tmp_path: Path) -> None:
    """Three engines write 780 tokens per second, a rank trains 2,800, and an engine of the model scores 260: two and two are worth 520."""

    async def beside(given: Beside) -> None:
        launcher, trainer = Launcher(given), trainer_group.Launcher(given)
        async with asyncio.TaskGroup() as group:
            group.create_task(trainer.run())
            while True:
                await launcher.settled()
                await asyncio.sleep(0.1)

    where = elastic.settings(steps=90, prm={"path": "unused", "chunk_tokens": 3})
    world = peers.World(step_s=0.012, token_s=2e-4, mean_tokens=10, prm_token_s=1 / 300, start_s=3.0)
    cast = Cast(trainer=trainer_group.nobody)
    ended = run(where, folder=tmp_path, beside=beside, world=world, cast=cast, group_advantages=credit, limit_s=6000.0)
    assert ended.problems() == []
    lines = [line for line in ended.lines if line["kind"] == "roles"]
    decided = [line for line in lines if line["word"] != "stays"]
    assert [(line["word"], line["engines_then"], line["trainer_then"], line["scorers_then"]) for line in decided] == [
        ("begins", 2, 1, 2),
        ("taken", 2, 1, 2),
    ]
    (second,) = [
        line for line in ended.lines if line["kind"] == "member" and (line["of"], line["engine_id"], line["state"]) == ("prm", 2, "live")
    ]
    assert second["t"] - 1 < decided[1]["t"] < second["t"] + 1, "it is taken once everybody is there"
    assert decided[0]["speed_then"] > 1.5 * decided[0]["speed_now"]
    assert lines[-1]["speed_now"] > 1.5 * decided[0]["speed_now"], "it has become what was foretold"
    assert not [line for line in ended.lines if line["kind"] == "trainer_ranks" and line["epoch"]], "the trainer stays as it is"


@pytest.mark.parametrize(
    ("sections", "order", "said"),
    [
        ({}, {"engines": 1, "prm": 0}, "prm=0: expected 1 to 8 (prm.count)"),
        ({"prm": {}}, {"engines": 1, "prm": 2}, "prm=2: this run has no process reward model"),
        ({}, {"engines": 0, "prm": 2}, "engines=0: expected 1 to 8 (engine.max_count)"),
    ],
)
def test_an_order_that_cannot_be_is_refused_as_a_whole(tmp_path: Path, sections: dict[str, Any], order: dict[str, int], said: str) -> None:
    async def beside(given: Beside) -> None:
        launcher = Launcher(given)
        await launcher.until(1, State.LIVE)
        launcher.order(**order)

    ended = run(settings(steps=4, **sections), folder=tmp_path, beside=beside, world=SLOW)
    assert ended.problems() == []
    assert [line["refused"].startswith(said) for line in ended.lines if line["kind"] == "scale"] == [True]
    assert not [one for one in changes(ended) if not one.endswith(" live")]
