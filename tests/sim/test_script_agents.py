"""Agents outside of the run play the episodes that a script asks for; whoever is killed, every rollout ends once."""

from __future__ import annotations

import asyncio
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.scripted_run import ScriptedRun
from pipelinerl.config import Config
from pipelinerl.errors import PeerSilent
from pipelinerl.messages import GatewayLoad, GatewayReady, Sample, Stop
from tests.sim.chaos import Faults, survive
from tests.sim.memory import MemoryLink
from tests.sim.run import Cast
from tests.sim.test_agents import BAD, WORLD, agents
from tests.sim.test_script import grpo, one_step_off, scripted


def played(steps: int = 12) -> Config:
    return agents(trainer={"steps": steps}, pipeline={"max_staleness": 2})


def test_episodes_are_rollouts_of_the_script_with_the_rewards_that_agents_posted(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        while asked.step < asked.num_steps:
            scored = await asked.score(asked.sample(asked.prompts(4), group=3))
            for one in scored:
                assert one.trajectory.lent is not None
                assert one.score.components == {"agent": one.trajectory.lent.reward}
            await asked.train(asked.advantages(scored))
            await asked.publish()
        assert asked.rollouts.trained == asked.rollouts.admitted == 4 * 12

    found = survive(played(4), folder=tmp_path, faults=Faults(), world=WORLD, script=script)
    assert found.problems() == []
    assert set(found.disk.record.turns.values()) == {1, 2, 3, 4}


def test_a_script_may_give_episodes_rewards_of_its_own_and_leave_some_out(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        rollouts = await asked.sample(asked.prompts(3))
        some = [one for one in rollouts if one.sibling < 2]
        await asked.train([Sample(trajectory=one, reward=0.5, advantages=one.loss_mask.astype(np.float32)) for one in some])

    found = survive(played(1), folder=tmp_path, faults=Faults(), world=WORLD, script=script)
    assert found.problems() == []
    assert found.ending.rollouts.trained == found.ending.rollouts.filtered == 6


KILLS: dict[str, dict[str, Any]] = {
    "gateway": {"gateway_s": 1.0},
    "script": {"orchestrator_s": 2.0},
    "everything": {"engine_s": 4.0, "gateway_s": 4.0, "trainer_s": 6.0, "orchestrator_s": 6.0},
}


@pytest.mark.slow
@pytest.mark.parametrize(("who", "replays"), [("gateway", False), ("script", True), ("everything", False), ("everything", True)])
def test_episodes_of_a_script_survive_whoever_is_killed(tmp_path: Path, who: str, replays: bool) -> None:
    faults = Faults(seed=2, until_s=30.0, **KILLS[who])
    found = survive(played(), folder=tmp_path, faults=faults, world=BAD, script=one_step_off, replays=replays)
    assert found.problems() == []
    assert found.disk.version == 12
    assert found.kills["orchestrator" if who == "script" else "gateway"] >= 2
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:
        lost = {reason for (reason,) in ledger.execute("SELECT reason FROM events WHERE kind = 'lost'")}
    assert "lost: the gateway was started again" in lost or who == "script"


async def nobody(link: MemoryLink, **_: Any) -> None:
    """A gateway that no agent comes to."""
    link.introduce(lambda kept: [GatewayReady(process_id=1, address="http://here")])
    while not isinstance(link.receive(0), Stop):
        link.send(GatewayLoad())
        await asyncio.sleep(1.0)


def test_a_script_whose_episodes_nobody_plays_is_told_so(tmp_path: Path) -> None:
    settings = {"gateway": {"agents_deadline_s": 500.0}, "pipeline": {"stall_limit_s": 60.0}}
    with pytest.raises(PeerSilent, match=r"waited 500 s for an agent to ask for an episode at http://here/episodes/next: none came"):
        scripted(grpo, tmp_path, settings=settings, cast=Cast(gateway=nobody))
