"""Engines join, leave and are lost while a simulated run goes on: no rollout is lost, none is trained twice."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import random
import re
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.messages import Float32, Int32, ScoredTrajectory, ToEngine, Trajectory, WeightsRefused
from pipelinerl.runtime.membership import Gone, Kind, Members, ScaleRequest, StartedBy, State
from tests.sim import peers
from tests.sim.run import Beside, Simulated, config, mean_baseline, run


class Machine:
    """A launcher of engines that join, as the orchestrator lets them; it can kill them, too."""

    def __init__(self, beside: Beside) -> None:
        self.engines: dict[int, asyncio.Task[None]] = {}
        self._beside = beside
        self._begun: set[tuple[int, int]] = set()
        self._requests = 0

    def ask(self, engines: int, *, drain_s: float = 30.0) -> None:
        self._requests += 1
        request = ScaleRequest(request_id=self._requests, engines=engines, drain_s=drain_s, started_by=StartedBy.LAUNCHER)
        self._beside.folder.ask(request)

    async def answered(self) -> Members:
        """The run's engines once the last request was answered and those that joined could be started."""
        while (found := self._beside.folder.members()) is None or found.request_id < self._requests:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
        self.start_joined(found)
        return found

    def start_joined(self, found: Members) -> None:
        """Start the engines that have joined."""
        for one in found.members:
            is_new = one.started_by is StartedBy.LAUNCHER and one.state is State.JOINING
            if is_new and (one.engine_id, one.request_id) not in self._begun:
                self._begun.add((one.engine_id, one.request_id))
                self.start(one.engine_id)

    def start(self, engine_id: int) -> None:
        self.engines[engine_id] = self.process(engine_id, request_id=self._beside.request_of(engine_id))

    def process(self, engine_id: int, *, request_id: int) -> asyncio.Task[None]:
        """A process of an engine that a request brought, which may have left since."""
        beside = self._beside
        link = beside.hub.connect(f"engine-{engine_id}", accepts=ToEngine)
        given = {"max_running": beside.settings.engine.max_running, "world": beside.world, "request_id": request_id}
        serves = peers.engine(link, engine_id=engine_id, **given)

        async def process() -> None:
            try:
                await serves
            finally:
                link.close()

        return asyncio.create_task(process())

    async def until(self, engine_id: int, state: State) -> None:
        while self._state(engine_id) is not state:  # noqa: ASYNC110
            await asyncio.sleep(0.1)

    def _state(self, engine_id: int) -> State | None:
        found = self._beside.folder.members()
        return next((one.state for one in found.members if one.engine_id == engine_id), None) if found is not None else None

    async def kill(self, engine_id: int) -> None:
        self.engines[engine_id].cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await self.engines[engine_id]


SLOW = peers.World(step_s=0.2)
"""Engines so slow that much can happen to a run of a few steps."""


def settings(*, steps: int = 8, **sections: dict[str, Any]):
    return config(**{"engine": {"silent_after_s": 4.0}, "trainer": {"steps": steps}} | sections)


def changes(ended: Simulated) -> dict[int, list[str]]:
    found = collections.defaultdict(list)
    for line in ended.lines:
        if line["kind"] == "member":
            found[line["engine_id"]].append(line["state"])
    return dict(found)


async def with_three_engines(given: Beside) -> Machine:
    """Have a run that began with two engines get a third, which serves for a second."""
    machine = Machine(given)
    await machine.until(1, State.LIVE)
    machine.ask(3)
    await machine.answered()
    await machine.until(2, State.LIVE)
    await asyncio.sleep(1.0)
    return machine


def test_engines_join_and_leave_and_every_rollout_has_one_end(tmp_path: Path) -> None:
    limits: list[int] = []

    async def beside(given: Beside) -> None:
        machine = Machine(given)
        await machine.until(1, State.LIVE)
        machine.ask(4)
        await machine.answered()
        await machine.until(3, State.LIVE)
        limits.append(given.run.parts.admission.max_running)
        machine.ask(1)
        await machine.answered()
        for number in (3, 2, 1):
            await machine.until(number, State.LEFT)
        limits.append(given.run.parts.admission.max_running)
        assert machine.engines[3].done(), "who has left was told to end"

    ended = run(settings(), folder=tmp_path, beside=beside, world=SLOW)
    assert ended.problems() == []
    assert changes(ended) == {
        0: ["live"],
        1: ["live", "draining", "left"],
        2: ["joining", "live", "draining", "left"],
        3: ["joining", "live", "draining", "left"],
    }
    assert limits == [4 * 16 * 5 // 4, 16 * 5 // 4], "rollouts in engines follow the number of engines"
    left = [line["reason"] for line in ended.lines if line["kind"] == "member" and line["state"] == "left"]
    assert left == ["it has ended all that it had"] * 3, "with time enough, nothing is asked for twice"
    assert not [line for line in ended.lines if line["kind"] == "violation"]


async def leaves_at_once(given: Beside) -> None:
    machine = Machine(given)
    await machine.until(1, State.LIVE)
    await asyncio.sleep(1.0)
    machine.ask(1, drain_s=0.0)
    await machine.answered()


def written_by_a_fake(trajectory: Trajectory) -> Int32:
    """The tokens that `FakeEngine` writes: each follows from the prompt, its place and the policy, whichever engine writes it."""
    sampled, seed = trajectory.versions[trajectory.loss_mask], zlib.crc32(trajectory.prompt.token_ids.tobytes())
    return ((seed + 7919 * (1 + np.arange(len(sampled))) + 104729 * sampled.astype(np.int64)) % 1000).astype(np.int32)


def test_what_a_leaving_engine_has_not_ended_in_time_goes_on_in_others_with_its_tokens(tmp_path: Path) -> None:
    trained: list[Trajectory] = []

    def advantages(siblings: tuple[ScoredTrajectory, ...]) -> list[Float32]:
        trained.extend(member.trajectory for member in siblings)
        return mean_baseline(siblings)

    ended = run(settings(), folder=tmp_path, beside=leaves_at_once, world=SLOW, group_advantages=advantages)
    assert ended.problems() == []
    (reason,) = [line["reason"] for line in ended.lines if line["kind"] == "member" and line["state"] == "left"]
    assert re.fullmatch(r"it has ended all that it had after 0 s but (\d+) rollouts, \1 of which go on in others with their tokens", reason)
    moved = [trajectory for trajectory in trained if trajectory.attempt]
    assert len(moved) > 10
    assert any(trajectory.recomputed and trajectory.recomputed[0] > 0 for trajectory in moved), "tokens of the engine that left are in it"
    for trajectory in trained:
        np.testing.assert_array_equal(trajectory.token_ids[trajectory.loss_mask], written_by_a_fake(trajectory))
        assert (np.diff(trajectory.versions[trajectory.loss_mask]) >= 0).all()
    assert ended.ending.rollouts.failed == 0
    quarantined = [line for line in ended.lines if line["kind"] == "quarantine"]
    assert quarantined == [], "a prompt is not suspected because an engine left"


def test_what_an_engine_does_not_end_in_time_to_move_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("orchestrator.stages.scaling.MOVE_S", 0.0)
    ended = run(settings(), folder=tmp_path, beside=leaves_at_once, world=SLOW)
    assert ended.problems() == []
    (reason,) = [line["reason"] for line in ended.lines if line["kind"] == "member" and line["state"] == "left"]
    assert re.fullmatch(r"it has ended all that it had after 0 s but (\d+) rollouts, \1 of which are asked of others anew", reason)


def test_sequences_that_somebody_follows_begin_anew(tmp_path: Path) -> None:
    ended = run(settings(prm={"path": "unused", "chunk_tokens": 8}), folder=tmp_path, beside=leaves_at_once, world=SLOW)
    assert ended.problems() == []
    (reason,) = [line["reason"] for line in ended.lines if line["kind"] == "member" and line["state"] == "left"]
    assert re.fullmatch(r"it has ended all that it had after 0 s but (\d+) rollouts, \1 of which are asked of others anew", reason)


def test_a_spare_that_falls_silent_is_lost_by_name_and_welcome_when_it_comes_again(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        machine = await with_three_engines(given)
        await machine.kill(2)
        await machine.until(2, State.LOST)
        machine.start(2)
        await machine.until(2, State.LIVE)

    ended = run(settings(), folder=tmp_path, beside=beside, world=SLOW)
    assert ended.problems() == []
    assert changes(ended)[2] == ["joining", "live", "lost", "live"]
    (reason,) = [line["reason"] for line in ended.lines if line["kind"] == "member" and line["state"] == "lost"]
    assert reason.startswith("it was last heard ")
    assert reason.endswith("s ago; the limit is 4 s")


def test_the_last_word_of_an_engine_that_has_left_is_not_held_against_the_one_that_takes_its_place(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        machine = Machine(given)
        await machine.until(1, State.LIVE)
        machine.ask(1)
        await machine.until(1, State.LEFT)
        await asyncio.sleep(1.0)
        link = given.hub.connect("engine-1", accepts=ToEngine)
        link.send(WeightsRefused(engine_id=1, version=0, rollback_epoch=0, error="it was told to end"))
        link.close()
        machine.ask(2)
        await machine.until(1, State.JOINING)
        await asyncio.sleep(8.0)  # it loads for twice as long as an engine may be silent
        await machine.answered()
        await machine.until(1, State.LIVE)

    ended = run(settings(steps=12), folder=tmp_path, beside=beside, world=SLOW)
    assert ended.problems() == []
    assert changes(ended)[1] == ["live", "draining", "left", "joining", "live"]


@pytest.mark.parametrize("is_first", [True, False], ids=["before", "after"])
def test_a_process_that_missed_its_end_is_not_taken_for_the_engine_that_has_its_number_now(tmp_path: Path, *, is_first: bool) -> None:
    """It comes again before the one that takes its place is there, or after; then that one is fenced, and comes anew."""
    ended_by_itself: list[bool] = []

    async def beside(given: Beside) -> None:
        machine = await with_three_engines(given)
        machine.ask(2, drain_s=0.0)
        await machine.until(2, State.LEFT)
        machine.ask(3)
        await machine.until(2, State.JOINING)
        if not is_first:
            await machine.answered()
            await machine.until(2, State.LIVE)
        stale = machine.process(2, request_id=1)
        async with asyncio.timeout(5.0):
            await stale
        ended_by_itself.append(True)
        given.folder.tell_gone(Gone(kind=Kind.ENGINES, engine_id=2, request_id=1, reason="its machine was taken"))
        if is_first:
            await asyncio.sleep(2.0)
            assert machine._state(2) is State.JOINING, "neither its coming nor the word of it was about the one that is awaited"
            await machine.answered()
        else:
            await machine.until(2, State.LOST)
            machine.start(2)
        await machine.until(2, State.LIVE)

    ended = run(settings(), folder=tmp_path, beside=beside, world=SLOW)
    assert ended.problems() == []
    assert ended_by_itself == [True]
    assert changes(ended)[2][-1] == "live"
    assert not [line for line in ended.lines if line["kind"] == "violation"]


def test_an_engine_that_is_killed_while_it_drains_costs_nothing(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        machine = await with_three_engines(given)
        machine.ask(2, drain_s=60.0)
        await machine.answered()
        await machine.kill(2)
        given.tell_gone(2, "Slurm job 7 was told to end")
        await machine.until(2, State.LEFT)

    ended = run(settings(), folder=tmp_path, beside=beside, world=SLOW)
    assert ended.problems() == []
    (reason,) = [line["reason"] for line in ended.lines if line["kind"] == "member" and line["state"] == "left"]
    assert reason == "Slurm job 7 was told to end"


@pytest.mark.parametrize("mode", ["streaming", "sync"])
@pytest.mark.parametrize("seed", range(3))
def test_seeded_joins_leaves_and_losses_keep_every_promise(tmp_path: Path, mode: str, seed: int) -> None:
    chance = random.Random(seed)
    happened: collections.Counter[str] = collections.Counter()

    async def beside(given: Beside) -> None:
        machine = Machine(given)
        await machine.until(1, State.LIVE)
        while True:
            await asyncio.sleep(chance.expovariate(1.0))
            found = await machine.answered()
            killable = [one.engine_id for one in found.members if one.started_by is StartedBy.LAUNCHER and one.state is State.LIVE]
            if killable and chance.random() < 0.3:
                number = chance.choice(killable)
                await machine.kill(number)
                happened["killed"] += 1
                if chance.random() < 0.5:
                    given.tell_gone(number, "its machine was taken")
            else:
                machine.ask(chance.randint(1, 6), drain_s=chance.choice([0.0, 0.2, 10.0]))
                happened["asked"] += 1

    where = config(
        engine={"silent_after_s": 2.0, "ready_deadline_s": 30.0}, trainer={"steps": 10}, pipeline={"mode": mode, "max_staleness": 4}
    )
    world = peers.World(seed=seed, step_s=0.2, refused_fraction=0.05, start_s=0.3)
    ended = run(where, folder=tmp_path, beside=beside, world=world, limit_s=2000.0)
    assert ended.problems() == []
    assert happened["killed"] >= 1
    assert happened["asked"] >= 3
    assert ended.ending.rollouts.failed == 0, "who leaves or is lost costs no rollout, only what it had written"


@pytest.mark.parametrize(
    ("sections", "engines", "said"),
    [
        ({}, 0, "engines=0: expected 1 to 8 (engine.max_count)"),
        ({"engine": {"max_count": 3}}, 4, "engines=4: expected 1 to 3 (engine.max_count)"),
    ],
)
def test_nonsense_is_answered_with_the_reason_and_changes_nothing(
    tmp_path: Path, sections: dict[str, Any], engines: int, said: str
) -> None:
    answers: list[Members] = []

    async def beside(given: Beside) -> None:
        machine = Machine(given)
        await machine.until(1, State.LIVE)
        machine.ask(engines)
        answers.append(await machine.answered())

    ended = run(config(trainer={"steps": 4}, **sections), folder=tmp_path, beside=beside, world=SLOW)
    assert ended.problems() == []
    assert answers[0].refused.startswith(said)
    assert [one.state for one in answers[0].members] == ["live", "live"]
    assert [line["refused"] for line in ended.lines if line["kind"] == "scale"] == [answers[0].refused]


def test_damaged_files_are_named_once_each_and_hold_up_no_later_request(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        machine = Machine(given)
        await machine.until(1, State.LIVE)
        folder = given.folder._folder
        (folder / "gone-1.json").write_bytes(b"{")
        (folder / "request-1.json").write_bytes(b'{"engines": "many"}')
        await asyncio.sleep(10.0)
        machine.ask(3)
        await machine.answered()
        await machine.until(2, State.LIVE)

    ended = run(settings(), folder=tmp_path, beside=beside, world=SLOW)
    assert ended.problems() == []
    told = [line["refused"] for line in ended.lines if line["kind"] == "scale" and line["refused"]]
    assert [name for words in told for name in ("gone-1.json", "request-1.json") if name in words] == ["gone-1.json", "request-1.json"]
    assert changes(ended)[1] == ["live"], "a damaged word is no word"


def test_orders_given_at_the_same_moment_are_all_carried_out(tmp_path: Path) -> None:
    async def beside(given: Beside) -> None:
        machine = Machine(given)
        await machine.until(1, State.LIVE)
        machine.ask(3)
        machine.ask(9)
        machine.ask(1)
        await asyncio.sleep(5.0)

    ended = run(config(trainer={"steps": 4}), folder=tmp_path, beside=beside, world=SLOW)
    assert ended.problems() == []
    answers = [(line["engines"], bool(line["refused"])) for line in ended.lines if line["kind"] == "scale"]
    assert answers == [(3, False), (9, True), (1, False)]
