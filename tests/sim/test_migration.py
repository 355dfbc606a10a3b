"""What waits for room in an engine goes on in another, in whole simulated runs, also while everybody is killed."""

from __future__ import annotations

import asyncio
import dataclasses
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.config import Config
from pipelinerl.messages import Cancel, Completion, Finish, Float32, Generate, Message, ScoredTrajectory, Trajectory
from pipelinerl.observe.lines import read_journals
from tests.sim import peers
from tests.sim.chaos import Chaos, Faults, survive
from tests.sim.clock import simulate
from tests.sim.memory import MemoryLink, NetworkFaults
from tests.sim.run import Beside, Cast, Simulated, config, mean_baseline, run
from tests.sim.test_scaling import written_by_a_fake

WORLD = peers.World(step_s=0.1, mean_tokens=48, kv_tokens=1000)
ROOM = (150, 1000)
"""Tokens that the caches hold of engine 0 and of those after it: two or three sequences, and all that come."""


serve = peers.engine


async def uneven(link: MemoryLink, *, engine_id: int, max_running: int, world: peers.World) -> None:
    world = dataclasses.replace(world, kv_tokens=ROOM[min(engine_id, 1)])
    await serve(link, engine_id=engine_id, max_running=max_running, world=world)


def settings(migration: str = "waiting", **sections: dict[str, Any]) -> Config:
    pipeline = {"migration": migration, "mode": "sync"} | sections.pop("pipeline", {})
    return config(**{"trainer": {"steps": 6}, "pipeline": pipeline} | sections)


def told(ended: Simulated) -> dict[str, float]:
    return [line["dispatch"] for line in ended.lines if line["kind"] == "status"][-1]


def moves(ended: Simulated) -> list[dict[str, Any]]:
    return [move for line in ended.lines if line["kind"] == "migration" for move in line["moves"]]


def test_what_waits_in_a_full_engine_goes_on_in_one_with_room_and_no_token_changes(tmp_path: Path) -> None:
    trained: list[Trajectory] = []

    def advantages(siblings: tuple[ScoredTrajectory, ...]) -> list[Float32]:
        trained.extend(member.trajectory for member in siblings)
        return mean_baseline(siblings)

    ended = run(settings(), folder=tmp_path, world=WORLD, cast=Cast(engine=uneven), group_advantages=advantages)
    assert ended.problems() == []
    assert (ended.ending.reason, ended.ending.rollouts.failed) == ("finished", 0)
    moved = [one for one in trained if one.attempt]
    assert len(moved) > 20
    assert any(one.recomputed and one.recomputed[0] > 0 for one in moved), "some had tokens"
    assert {one.engine_id for one in moved} == {1}, "each in its target"
    for one in trained:
        np.testing.assert_array_equal(one.token_ids[one.loss_mask], written_by_a_fake(one))
        assert (np.diff(one.versions[one.loss_mask]) >= 0).all()
    assert {(move["source"], move["target"]) for move in moves(ended)} == {(0, 1)}
    gauges = told(ended)
    assert gauges["num_moved"] == len(moves(ended)) == len(moved)
    assert gauges["num_waits"] >= gauges["num_moved"]
    assert gauges["num_recomputed_tokens"] > 0
    assert gauges["moved_after_s"] >= gauges["num_moved"], "a report apart, at least"
    assert not [line for line in ended.lines if line["kind"] == "violation"]


def test_a_run_is_quicker_for_it(tmp_path: Path) -> None:
    """In rounds: the step waits for the engine whose sequences take turns."""

    def seconds(migration: str) -> float:
        (folder := tmp_path / migration).mkdir()
        ended = run(settings(migration), folder=folder, world=WORLD, cast=Cast(engine=uneven))
        assert ended.problems() == []
        assert bool(moves(ended)) == (migration == "waiting")
        return ended.seconds

    assert seconds("waiting") < 0.8 * seconds("off")


def test_engines_of_a_run_without_the_key_say_nothing_of_their_sequences(tmp_path: Path) -> None:
    heard: list[Message] = []

    async def engine(link: MemoryLink, **options: Any) -> None:
        send = link.send
        vars(link).update(send=lambda *messages: (heard.extend(messages), send(*messages)))
        await peers.engine(link, **options)

    run(settings("off"), folder=tmp_path, world=WORLD, cast=Cast(engine=engine))
    assert heard
    assert not [one for one in heard if type(one).__name__ == "EngineSequences"]


def test_a_target_that_takes_no_work_any_more_is_passed_over(tmp_path: Path) -> None:
    """It leaves at the very moment at which engine 0 is asked to give back what is to go there."""
    left: list[int] = []
    asked: list[int] = []

    async def beside(given: Beside) -> None:
        engines = given.run.parts.engines
        move, ask = engines.requests.move, engines.requests.ask

        def leaves(rollout_id: str, attempt: int, *, target: int | None = None) -> bool:
            if target is not None and not left:
                left.append(target)
                engines.leave(target, "a test")
            return move(rollout_id, attempt, target=target)

        def note(request: Generate, engine_id: int, **options: Any) -> None:
            if left:
                asked.append(engine_id)
            ask(request, engine_id, **options)

        engines.requests.move, engines.requests.ask = leaves, note
        await asyncio.Event().wait()

    ended = run(settings(engine={"count": 3}), folder=tmp_path, world=WORLD, cast=Cast(engine=uneven), beside=beside)
    assert ended.problems() == []
    assert ended.ending.rollouts.failed == 0
    assert len(left) == 1
    assert set(asked) == {0, 1, 2} - set(left)


class KilledAt(Chaos):
    """The orchestrator is killed once, at a given time; engines note when they were asked to give back, and when they did."""

    at_s: float | None = None

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self.cancelled_s: list[float] = []
        self.given_back_s: list[float] = []

    def until_kill(self, every_s: float) -> float | None:
        now_s = asyncio.get_running_loop().time()
        return self.at_s - now_s if every_s and self.at_s is not None and now_s < self.at_s else None

    async def _serve(self, role: str, link: MemoryLink, serve: Any) -> None:
        if role == "engine":
            receive, send = link.receive, link.send

            def heard(timeout_s: float) -> Message | None:
                if isinstance(message := receive(timeout_s), Cancel):
                    self.cancelled_s.append(asyncio.get_running_loop().time())
                return message

            def say(*messages: Message) -> None:
                if any(isinstance(one, Completion) and one.finish is Finish.CANCELLED for one in messages):
                    self.given_back_s.append(asyncio.get_running_loop().time())
                send(*messages)

            vars(link).update(receive=heard, send=say)
        await serve(link)


DELAY = NetworkFaults(delay_s=0.02)


@pytest.mark.parametrize("moment", ["asked to give back", "given back, and on its way"])
def test_an_orchestrator_that_is_killed_while_a_sequence_moves_costs_no_violation_and_no_rollout(tmp_path: Path, moment: str) -> None:
    """The same run is made twice: once to see when its first sequence moves, and once with a kill at that time."""
    where = settings(engine={"count": 2})
    world = dataclasses.replace(WORLD, kv_tokens=200)
    times = {}
    for name in ("first", "killed"):
        (folder := tmp_path / name).mkdir()
        chaos = KilledAt(where, folder, Faults(orchestrator_s=1.0), world, DELAY, 3)
        chaos.at_s = times.get(moment)
        survived = simulate(chaos.run())
        assert survived.problems() == []
        assert survived.ending.rollouts.failed == 0
        assert num_moved(folder) > 0
        times = {"asked to give back": chaos.cancelled_s[0] + 0.001, "given back, and on its way": chaos.given_back_s[0] + 0.001}
    assert survived.kills["orchestrator"] == 1
    lines = list(read_journals(folder))
    assert [line for line in lines if line["kind"] == "violation"] == []
    if moment == "given back, and on its way":
        with sqlite3.connect(folder / "ledger.sqlite") as ledger:
            reasons = [reason for (reason,) in ledger.execute("SELECT reason FROM events WHERE kind = 'lost' ORDER BY seq")]
        assert any(reason.startswith("it moves from engine-") for reason in reasons)


KILLS: dict[str, dict[str, Any]] = {
    "engine": {"engine_s": 3.0},
    "orchestrator": {"orchestrator_s": 4.0},
    "everything": {"engine_s": 5.0, "scorer_s": 6.0, "trainer_s": 6.0, "orchestrator_s": 8.0},
}


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["streaming", "sync"])
@pytest.mark.parametrize(("who", "seed"), [(who, seed) for who in KILLS for seed in range(2)])
def test_whoever_is_killed_while_sequences_move_nothing_is_lost_or_trained_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, who: str, seed: int, mode: str
) -> None:
    monkeypatch.setattr(peers, "engine", uneven)
    where = settings(pipeline={"mode": mode, "max_staleness": 4, "max_running": 30}, trainer={"steps": 20}, engine={"count": 3})
    faults = Faults(seed=seed, until_s=60.0, **KILLS[who])
    world = dataclasses.replace(WORLD, step_s=0.05, seed=seed)
    survived = survive(where, folder=tmp_path, faults=faults, world=world)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert survived.checker.num_done == 20
    assert survived.kills["orchestrator" if who == "everything" else who] >= 2
    assert num_moved(tmp_path) > 10


def num_moved(folder: Path) -> int:
    return sum(len(line["moves"]) for line in read_journals(folder) if line["kind"] == "migration")
