"""A script of several policies that goes on is led through its calls on all of them, trained and frozen; on simulated time."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from orchestrator.policies import PoliciesRun
from pipelinerl.errors import ScriptDiverged
from pipelinerl.messages import Trajectory
from tests.sim.chaos import Faults
from tests.sim.policies import run_policies
from tests.sim.test_policies import rows_of, settings, step_of

STEPS = 10
Trace = list[tuple[int, int, float, tuple[str, ...]]]


class Players:
    """Two players on the same prompts, one of whom is trained every other time, on what it has said since, and a judge of both."""

    def __init__(self) -> None:
        self.traces: list[Trace] = []
        """Of each life: what the variables held after each step of alice."""

    async def __call__(self, run: PoliciesRun) -> None:
        trace: Trace = []
        self.traces.append(trace)
        alice, bob, judge = run.policies["alice"], run.policies["bob"], run.frozen["judge"]
        mean, buffer = 0.0, list[Trajectory]()
        ahead = judge.sample(alice.prompts(2), group=2)
        while alice.step < alice.num_steps:
            prompts = alice.prompts(3)
            hers, his = await asyncio.gather(alice.sample(prompts), bob.sample(prompts))
            opposed = [await anext(ahead), *await ahead]
            ahead = judge.sample(prompts[:2], group=2)
            begun = await anext(ahead)  # read before the step, the others after it
            likely = await judge.logprobs([*hers[:4], *his[:4]])
            mean = 0.9 * mean + float(sum(column.sum() for column in likely)) + len(opposed[-1].token_ids) + len(begun.token_ids)
            buffer += his
            await alice.train(rows_of(hers))
            if alice.step % 2 == 0:
                rows, buffer = rows_of(buffer), []
                await bob.train(rows)
                await bob.publish()
            await alice.publish()
            trace.append((alice.step, bob.step, mean, tuple(one.rollout_id for one in buffer)))
        await ahead


KILLS: dict[str, dict[str, Any]] = {"script": {}, "everything": {"engine_s": 3.0, "scorer_s": 3.0, "trainer_s": 3.0}}


@pytest.mark.slow
@pytest.mark.parametrize("who", KILLS)
@pytest.mark.parametrize("seed", [0, 1])
def test_variables_of_a_killed_script_of_several_policies_are_there_again(tmp_path: Path, who: str, seed: int) -> None:
    script = Players()
    names = ("alice", "bob", "judge")
    faults = {name: Faults(seed=10 * seed + number, until_s=30.0, **KILLS[who]) for number, name in enumerate(names)}
    found = run_policies(
        {"alice": settings(STEPS), "bob": settings(STEPS // 2)},
        script,
        frozen={"judge": settings(engine={"count": 2})},
        folder=tmp_path,
        faults=faults,
        script_s=3.0,
        seed=seed,
        replays=True,
    )
    last = script.traces[-1]
    assert [steps[:2] for steps in last] == [(step, step // 2) for step in range(1, STEPS + 1)]
    assert len(script.traces) >= 3
    assert max(map(len, script.traces[:-1])) >= 3, "a life before came some way"
    for trace in script.traces:
        assert trace == last[: len(trace)]
    for (name, policy), steps in zip(found.items(), (STEPS, STEPS // 2), strict=True):
        assert policy.problems() == [], name
        assert policy.chaos.disk.version == policy.checker.num_done == steps
        assert policy.chaos.kills["script"] >= 2


class Changed:
    """A loop that has the other policy draw in a later life, at its second step."""

    def __init__(self) -> None:
        self.furthest = 0

    async def __call__(self, run: PoliciesRun) -> None:
        alice, bob, furthest = run.policies["alice"], run.policies["bob"], self.furthest
        while alice.step < alice.num_steps:
            if furthest >= 3 and alice.step == 1:
                bob.prompts(1)
            await step_of(alice)
            await step_of(bob)
            self.furthest = max(self.furthest, alice.step)


def test_a_call_that_differs_is_named_with_its_policy(tmp_path: Path) -> None:
    words = (
        r"call 9 of the script is bob\.prompts, where it called alice\.prompts when it was recorded\. A script that goes on is led through"
        r" its calls up to step \d+ of policy alice, step \d+ of policy bob"
    )
    policies = {"alice": settings(40), "bob": settings(40)}
    with pytest.raises(ScriptDiverged, match=words):
        run_policies(policies, Changed(), folder=tmp_path, script_s=6.0, seed=3, replays=True)
