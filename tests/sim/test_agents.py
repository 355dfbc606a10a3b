"""Agents outside of the run in whole simulated runs: they vanish, give up, and lose their gateway; every rollout ends once all the same."""

from __future__ import annotations

import collections
import dataclasses
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import Config
from pipelinerl.errors import PeerSilent
from pipelinerl.messages import Stop
from tests.sim import peers
from tests.sim.chaos import Faults, survive
from tests.sim.memory import MemoryLink
from tests.sim.peers import World
from tests.sim.run import Cast, config, run

WORLD = World(token_s=1e-3, mean_tokens=8)
BAD = World(token_s=1e-3, mean_tokens=8, vanish_fraction=0.03, give_up_fraction=0.05, sub_agent_fraction=0.1)


def agents(**sections: dict[str, Any]) -> Config:
    return config(**{"gateway": {"deadline_s": 20.0}, "rollout": {"group_size": 4, "max_tokens": 64}, "trainer": {"steps": 6}} | sections)


def test_agents_play_every_rollout_and_the_rewards_that_they_post_train(tmp_path: Path) -> None:
    simulated = run(agents(), folder=tmp_path, world=WORLD)
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"
    assert set(simulated.record.turns.values()) == {1, 2, 3, 4}
    gauges = [line["gateway"] for line in simulated.lines if line["kind"] == "status"]
    assert gauges[-1]["num_lent"] >= simulated.ending.rollouts.trained
    assert gauges[-1]["num_expired"] == gauges[-1]["num_given_up"] == 0


def test_contexts_of_their_own_train_beside_the_line_of_turns(tmp_path: Path) -> None:
    """Every token that was sampled for an attempt that was finished trains: none is left out for where it stands."""
    simulated = run(agents(), folder=tmp_path, world=dataclasses.replace(WORLD, sub_agent_fraction=0.5))
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"
    assert max(simulated.record.turns.values()) > 4, "sub-agents' turns among them"


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["streaming", "one_step_off", "sync"])
def test_agents_that_vanish_or_give_up_cost_an_attempt_and_in_the_end_the_rollout(tmp_path: Path, mode: str) -> None:
    simulated = run(agents(pipeline={"mode": mode}), folder=tmp_path, world=BAD)
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"
    last = [line["gateway"] for line in simulated.lines if line["kind"] == "status"][-1]
    assert min(last["num_expired"], last["num_given_up"]) > 0
    reasons = {row[4] for row in simulated.rows if row[3] == "failed"}
    assert reasons <= {"error", "siblings failed"} or reasons


KILLS = {
    "gateway": Faults(seed=2, gateway_s=1.0),
    "orchestrator": Faults(seed=5, orchestrator_s=2.0, until_s=12.0),
    "everything": Faults(seed=4, engine_s=4.0, gateway_s=4.0, trainer_s=6.0, orchestrator_s=6.0),
}


@pytest.mark.slow
@pytest.mark.parametrize("who", KILLS)
def test_episodes_of_agents_survive_whoever_is_killed(tmp_path: Path, who: str) -> None:
    survived = survive(agents(trainer={"steps": 12}), folder=tmp_path, faults=KILLS[who], world=BAD)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert survived.kills[who] >= 2 if who != "everything" else len(survived.kills) == 4, survived.kills
    statuses = collections.Counter(row[3] for row in survived.rows)
    assert statuses["trained"] > 0
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:
        lost = {reason for (reason,) in ledger.execute("SELECT reason FROM events WHERE kind = 'lost'")}
    assert "lost: the gateway was started again" in lost or who == "orchestrator"


def test_a_turn_is_asked_for_of_an_engine_that_is_no_older_than_what_it_continues(tmp_path: Path) -> None:
    """Engine 1 is slow to take policies, so it is often the older."""

    async def engine(link: MemoryLink, *, engine_id: int, world: World, **options: Any) -> None:
        await peers.engine(link, engine_id=engine_id, world=dataclasses.replace(world, stage_s=1.0 if engine_id else 0.01), **options)

    world = World(token_s=1e-4, mean_tokens=8)
    simulated = run(agents(pipeline={"max_staleness": 8}), folder=tmp_path, world=world, cast=Cast(engine=engine))
    assert simulated.problems() == []
    last = [line["gateway"] for line in simulated.lines if line["kind"] == "status"][-1]
    assert last["num_given_up"] == 0, "no turn came back with older tokens than it continues"


def test_a_run_without_agents_says_what_it_waits_for(tmp_path: Path) -> None:
    async def nobody(link: MemoryLink, **_: Any) -> None:
        import asyncio

        from pipelinerl.messages import GatewayLoad, GatewayReady

        link.introduce(lambda kept: [GatewayReady(process_id=1, address="http://here")])
        while True:
            link.send(GatewayLoad())
            await asyncio.sleep(1.0)
            if isinstance(link.receive(0), Stop):
                return

    settings = agents(gateway={"agents_deadline_s": 500.0}, pipeline={"stall_limit_s": 60.0})
    with pytest.raises(BaseExceptionGroup) as raised:
        run(settings, folder=tmp_path, world=WORLD, cast=Cast(gateway=nobody))
    (error,) = _leaves(raised.value)
    assert isinstance(error, PeerSilent)
    assert str(error).startswith("waited 500 s for an agent to ask for an episode at http://here/episodes/next: none came")


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


@pytest.mark.parametrize("who", ["nobody", pytest.param("everything", marks=pytest.mark.slow)])
def test_an_episode_larger_than_a_row_is_a_row_by_itself_and_trains_once(tmp_path: Path, who: str) -> None:
    gateway = {"deadline_s": 20.0, "max_episode_tokens": 600}
    settings = agents(gateway=gateway, batch={"groups_per_step": 8, "max_tokens": 200})
    world = dataclasses.replace(WORLD, mean_tokens=30, sub_agent_fraction=0.6)
    kills: dict[str, Any] = (
        {"engine_s": 6.0, "scorer_s": 5.0, "gateway_s": 5.0, "trainer_s": 6.0, "orchestrator_s": 8.0} if who == "everything" else {}
    )
    survived = survive(settings, folder=tmp_path, faults=Faults(seed=4, until_s=40.0, **kills), world=world)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    record = survived.disk.record
    assert 200 < record.longest_row <= 600
    assert not record.repeated or kills, "each rollout comes once"
