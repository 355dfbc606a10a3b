"""Agents that speak with several policies in one episode: every token is in one rollout, of the policy that sampled it."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from pathlib import Path
from typing import Any

import pytest

from orchestrator.policies import PoliciesRun
from orchestrator.scripted_run import ScriptedRun
from pipelinerl.config import Config
from pipelinerl.errors import Stalled
from tests.sim.chaos import Faults
from tests.sim.policies import run_policies
from tests.sim.run import config
from tests.sim.test_agents import BAD, WORLD


def played(steps: int = 4) -> Config:
    return config(gateway={"deadline_s": 20.0}, trainer={"steps": steps}, pipeline={"max_staleness": 2})


async def _step(player: ScriptedRun, rollouts: Any) -> None:
    await player.train(player.advantages(await player.score(rollouts)))
    await player.publish()


async def play(run: PoliciesRun) -> None:
    alice, bob = run.policies["alice"], run.policies["bob"]
    while alice.step < alice.num_steps and bob.step < bob.num_steps:
        prompts = alice.prompts(3)
        hers, his = await asyncio.gather(alice.sample(prompts), bob.sample(prompts))
        of_hers = {one.lent.episode: one for one in hers if one.lent is not None}
        of_his = {one.lent.episode: one for one in his if one.lent is not None}
        assert of_hers.keys() == of_his.keys()
        for name, one in of_hers.items():
            assert (one.prompt.prompt_id, one.sibling) == (of_his[name].prompt.prompt_id, of_his[name].sibling)
        await asyncio.gather(_step(alice, hers), _step(bob, his))


def test_an_episode_is_a_rollout_of_each_policy_with_its_own_tokens_and_reward(tmp_path: Path) -> None:
    found = run_policies(
        {"alice": played(), "bob": played()},
        play,
        frozen={"judge": played()},
        folder=tmp_path,
        worlds=dict.fromkeys(("alice", "bob", "judge"), WORLD),
    )
    for policy in found.values():
        assert policy.problems() == []
        assert policy.counts["trained"] == policy.counts["admitted"] == 4 * 12
        assert max(policy.chaos.disk.record.turns.values()) > 1


@pytest.mark.slow
@pytest.mark.parametrize("who", ["gateway", "script", "everything"])
def test_episodes_of_several_policies_survive_whoever_is_killed(tmp_path: Path, who: str) -> None:
    rates: dict[str, dict[str, Any]] = {
        "gateway": {"gateway_s": 1.0},
        "script": {},
        "everything": {"engine_s": 4.0, "gateway_s": 4.0, "trainer_s": 5.0, "scorer_s": 5.0},
    }
    names = ("alice", "bob", "judge")
    found = run_policies(
        {"alice": played(10), "bob": played(10)},
        play,
        frozen={"judge": played()},
        folder=tmp_path,
        faults={name: Faults(seed=number, until_s=30.0, **rates[who]) for number, name in enumerate(names)},
        worlds=dict.fromkeys(names, dataclasses.replace(BAD, sub_agent_fraction=0.0)),
        script_s={"gateway": 0.0, "script": 2.0, "everything": 5.0}[who],
    )
    for policy in found.values():
        assert policy.problems() == []
        assert policy.chaos.disk.version == policy.checker.num_done
        assert collections.Counter(row[3] for row in policy.rows)["trained"] > 50
    assert 10 in [policy.checker.num_done for policy in found.values()]
    assert found["alice"].chaos.kills[{"everything": "gateway"}.get(who, who)] >= 1


def test_policies_that_sample_other_prompts_are_told_who_waits_for_whom(tmp_path: Path) -> None:
    async def script(run: PoliciesRun) -> None:
        alice, bob = run.policies["alice"], run.policies["bob"]
        prompts = alice.prompts(2)
        await asyncio.gather(alice.sample(prompts), bob.sample(prompts[:1]))

    with pytest.raises(Stalled, match=r"sibling 0 of alice about prompt 0:1 waits for bob to sample the same prompt as often"):
        run_policies({"alice": played(), "bob": played()}, script, folder=tmp_path)
