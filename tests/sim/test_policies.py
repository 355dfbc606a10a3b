"""Several policies in one script: what every run promises holds for each of them, whoever is killed, and nothing gets across."""

from __future__ import annotations

import asyncio
import collections
import runpy
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from orchestrator.frozen_policy import FrozenPolicy
from orchestrator.policies import PoliciesRun
from orchestrator.scripted_run import ScriptedRun
from pipelinerl.errors import NobodySends, PeerSilent, RolloutsUnread, ScriptError
from pipelinerl.messages import Sample, Trajectory
from pipelinerl.observe.lines import read_journals
from tests.sim.chaos import Faults
from tests.sim.peers import World
from tests.sim.policies import SimulatedPolicy, run_policies
from tests.sim.run import config

EXAMPLE = Path(__file__).parents[2] / "examples" / "scripts" / "self_play.py"


def settings(steps: int = 6, **sections: Any) -> Any:
    return config(trainer={"steps": steps}, pipeline={"max_staleness": 1}, **sections)


def rows_of(rollouts: list[Trajectory], *, reward: float = 1.0) -> list[Sample]:
    rollouts = [one for one in rollouts if one.num_trained_tokens]  # others failed: their prompt was there when two engines died
    columns = [np.where(one.loss_mask, np.float32(reward), np.float32(0)) for one in rollouts]
    return [Sample(trajectory=one, reward=reward, advantages=column) for one, column in zip(rollouts, columns, strict=True)]


async def step_of(player: ScriptedRun, prompts: int = 3) -> None:
    await player.train(rows_of(await player.sample(player.prompts(prompts))))
    await player.publish()


async def both(run: PoliciesRun, *, steps: int) -> None:
    for _ in range(steps):
        await asyncio.gather(*map(step_of, run.policies.values()))


def stopped_at(folder: Path, name: str) -> list[float]:
    """When the trainer of a policy was asked to save."""
    return [line["t"] for line in read_journals(folder / "policies" / name) if line["kind"] == "stopping"]


def ends(policy: SimulatedPolicy) -> dict[str, int]:
    return {name: count for name, count in policy.counts.items() if count}


# --- what holds ------------------------------------------------------------------------------------------------------------------


def test_two_policies_train_each_its_own_with_versions_and_a_staleness_bound_of_its_own(tmp_path: Path) -> None:
    seen: dict[str, tuple[int, int]] = {}

    async def script(run: PoliciesRun) -> None:
        alice, bob = run.policies["alice"], run.policies["bob"]
        for _ in range(3):
            await step_of(alice)
        await step_of(bob, prompts=5)
        await bob.train(rows_of(await bob.sample(bob.prompts(1))))
        with pytest.raises(NobodySends, match="max_staleness = 0"):
            bob.sample(bob.prompts(1))
        seen.update(alice=(alice.step, alice.version), bob=(bob.step, bob.version))
        await bob.publish()

    found = run_policies(
        {"alice": settings(3), "bob": config(trainer={"steps": 6}, pipeline={"max_staleness": 0})}, script, folder=tmp_path
    )
    assert {name: policy.problems() for name, policy in found.items()} == {"alice": [], "bob": []}
    assert seen == {"alice": (3, 3), "bob": (2, 1)}
    assert {name: ends(policy) for name, policy in found.items()} == {
        "alice": {"admitted": 36, "trained": 36},
        "bob": {"admitted": 24, "trained": 24},
    }


def test_the_example_is_short_and_trains_both_players_on_the_same_prompts(tmp_path: Path) -> None:
    assert len(EXAMPLE.read_text().splitlines()) < 50
    script = runpy.run_path(str(EXAMPLE))["train"]
    found = run_policies({"alice": settings(), "bob": settings()}, script, folder=tmp_path)
    for policy in found.values():
        assert policy.problems() == []
        assert ends(policy) == {"admitted": 6 * 64, "trained": 6 * 64}
    prompts = [sorted(one.chaos.disk.seen) for one in found.values()]
    assert prompts[0] == prompts[1] == list(range(6))


def test_a_frozen_policy_answers_and_judges_under_the_version_it_began_with(tmp_path: Path) -> None:
    columns: list[np.ndarray] = []

    async def script(run: PoliciesRun) -> None:
        alice, judge = run.policies["alice"], run.frozen["judge"]
        while alice.step < alice.num_steps:
            prompts = alice.prompts(2)
            said, opposed = await asyncio.gather(alice.sample(prompts), judge.sample(prompts, group=3))
            assert len(opposed) == 6
            assert all(set(one.versions[one.loss_mask].tolist()) == {0} for one in opposed)
            assert [one.finish for one in opposed if one.error] == []
            found = await judge.logprobs(said)
            assert all((column[~one.loss_mask] == 0).all() for one, column in zip(said, found, strict=True))
            assert all((column[one.loss_mask] < 0).all() for one, column in zip(said, found, strict=True))
            columns.extend(found)
            await alice.train(rows_of(said))
            await alice.publish()
        assert (judge.version, alice.version) == (0, 4)

    found = run_policies({"alice": settings(4)}, script, frozen={"judge": settings(engine={"count": 3})}, folder=tmp_path)
    assert found["alice"].problems() == []
    assert len(columns) == 4 * 8


async def _plays_with_a_judge(run: PoliciesRun) -> None:
    judge = run.frozen["judge"]

    async def step(player: ScriptedRun) -> None:
        prompts = player.prompts(6)
        said, opposed = await asyncio.gather(player.sample(prompts), judge.sample(prompts, group=1))
        assert len(opposed) == 6
        assert not [one.error for one in opposed if one.error]
        await judge.logprobs(said[:4])
        await player.train(rows_of(said))
        await player.publish()

    while left := [one for one in run.policies.values() if one.step < one.num_steps]:
        await asyncio.gather(*map(step, left))


KILLS: dict[str, dict[str, Any]] = {
    "engine": {"engine_s": 1.5},
    "scorer": {"scorer_s": 1.0},
    "trainer": {"trainer_s": 1.5},
}


@pytest.mark.slow
@pytest.mark.parametrize("who", ["engine", "scorer", "trainer", "script", "everything"])
def test_whoever_is_killed_of_whichever_policy_each_trains_everything_once(tmp_path: Path, who: str) -> None:
    names, roles = ("alice", "bob", "judge"), (KILLS if who == "everything" else {who: KILLS.get(who, {})}).values()
    rates = {name: seconds * (2.0 if who == "everything" else 1.0) for role in roles for name, seconds in role.items()}
    faults = {name: Faults(seed=number, until_s=30.0, **rates) for number, name in enumerate(names)}
    found = run_policies(
        {"alice": settings(14), "bob": settings(10)},
        _plays_with_a_judge,
        frozen={"judge": settings(engine={"count": 2})},
        folder=tmp_path,
        faults=faults,
        script_s={"script": 2.0, "everything": 4.0}.get(who, 0.0),
        seed=1,
    )
    for (name, policy), steps in zip(found.items(), (14, 10), strict=True):
        assert policy.problems() == [], name
        assert policy.chaos.disk.version == policy.checker.num_done == steps
        kills = policy.chaos.kills
        assert kills[who] >= 1 if who != "everything" else set(kills) == {"engine", "scorer", "trainer", "script"}, (name, kills)
        ended = collections.Counter(row[3] for row in policy.rows)
        assert steps * 24 * 0.9 < ended["trained"] <= steps * 24
        assert ended.keys() <= {"trained", "cancelled", "failed", "filtered"}


# --- what is refused -------------------------------------------------------------------------------------------------------------


def test_an_error_that_ends_one_policy_ends_all_by_name_and_the_others_are_saved(tmp_path: Path) -> None:
    async def script(run: PoliciesRun) -> None:
        waiting = asyncio.create_task(step_of(run.policies["bob"]))  # whose engines are never done
        try:
            while True:
                await step_of(run.policies["alice"])
        finally:
            await asyncio.gather(waiting, return_exceptions=True)

    with pytest.raises(PeerSilent, match="engine-0") as raised:
        run_policies({"alice": settings(400), "bob": settings()}, script, folder=tmp_path, worlds={"bob": World(step_s=1e4)})
    assert raised.value.__notes__ == ["It has ended policy bob, and with it the run."]
    assert stopped_at(tmp_path, "alice"), "its trainer was asked to save"


def test_rollouts_left_unread_of_one_policy_are_an_error_and_all_are_saved(tmp_path: Path) -> None:
    async def leaves(run: PoliciesRun) -> None:
        await step_of(run.policies["alice"])
        kept.append(run.policies["bob"].sample(run.policies["bob"].prompts(1)))

    kept: list[Any] = []
    with pytest.raises(RolloutsUnread):
        run_policies({"alice": settings(), "bob": settings()}, leaves, folder=tmp_path)
    assert stopped_at(tmp_path, "alice"), "its trainer was asked to save"


def test_what_a_script_raises_has_all_policies_save_at_once(tmp_path: Path) -> None:
    async def script(run: PoliciesRun) -> None:
        await both(run, steps=2)
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run_policies({"alice": settings(), "bob": settings()}, script, folder=tmp_path)
    times = [stopped_at(tmp_path, name) for name in ("alice", "bob")]
    assert times[0] == times[1] != []


def test_a_rollout_of_one_policy_is_refused_by_the_others_by_name(tmp_path: Path) -> None:
    async def script(run: PoliciesRun) -> None:
        alice, bob, judge = run.policies["alice"], run.policies["bob"], run.frozen["judge"]
        mine, his, neutral = await asyncio.gather(*(one.sample(alice.prompts(1)) for one in (alice, bob, judge)))
        assert {one.rollout_id for one in mine} == {one.rollout_id for one in his}, "only whose they are tells them apart"
        with pytest.raises(ScriptError, match=r"train: rollout 0/\d: policy bob has sampled it, and this is policy alice"):
            await alice.train(rows_of(his))
        with pytest.raises(ScriptError, match=r"policy alice has sampled it, and this is policy bob"):
            bob.score(mine)
        with pytest.raises(ScriptError, match=r"the frozen policy judge has sampled it, and what a frozen policy samples never trains"):
            await alice.train(rows_of(neutral))
        await asyncio.gather(alice.train(rows_of(mine)), bob.train(rows_of(his)))

    found = run_policies({"alice": settings(), "bob": settings()}, script, frozen={"judge": settings()}, folder=tmp_path)
    assert [policy.problems() for policy in found.values()] == [[], []]


def test_a_policy_that_is_none_is_frozen_or_is_trained_is_said_by_name(tmp_path: Path) -> None:
    async def script(run: PoliciesRun) -> None:
        with pytest.raises(ScriptError, match=r"no policy is called 'alcie'; did you mean alice\? There are: alice, judge"):
            run.policies["alcie"]
        with pytest.raises(ScriptError, match=r"policy judge is frozen: nothing trains it\. It answers in run\.frozen"):
            run.policies["judge"]
        with pytest.raises(ScriptError, match=r"policy alice is trained: it answers in run\.policies"):
            run.frozen["alice"]
        assert (set(run.policies), set(run.frozen), "judge" in run.policies) == ({"alice"}, {"judge"}, False)

    run_policies({"alice": settings()}, script, frozen={"judge": settings()}, folder=tmp_path)


def test_a_frozen_policy_says_what_it_cannot_judge(tmp_path: Path) -> None:
    async def script(run: PoliciesRun) -> None:
        alice, warm, small = run.policies["alice"], run.frozen["warm"], run.frozen["small"]
        (one, *_) = said = await alice.sample(alice.prompts(1))
        with pytest.raises(ScriptError, match=r"policy warm has rollout\.temperature = 0\.7, and engines give .* at 1 alone"):
            await warm.logprobs(said)
        other = msgspec.structs.replace(one, token_ids=one.token_ids + 1000)
        with pytest.raises(ScriptError, match="knows 1000: it has to have the vocabulary"):
            await small.logprobs([other])
        with pytest.raises(ScriptError, match="group is 0, expected 1 or more"):
            small.sample(alice.prompts(1), group=0)

    run_policies(
        {"alice": settings()}, script, frozen={"warm": settings(rollout={"temperature": 0.7}), "small": settings()}, folder=tmp_path
    )


def test_what_a_frozen_policy_sampled_and_nobody_reads_is_bounded_and_an_error_by_name(tmp_path: Path) -> None:
    kept: list[Any] = []

    async def script(run: PoliciesRun) -> None:
        alice, judge = run.policies["alice"], run.frozen["judge"]
        said = await alice.sample(alice.prompts(1))
        stream = judge.sample(alice.prompts(50), group=4)
        await asyncio.sleep(30.0)
        assert 1024 <= judge._room.num_bytes < 1024 + 16 * 1024, "and one more of each that was under way"
        full = r"fill their room \(1024 bytes, .* call 1, sample of policy judge \(50 prompts, 200 answers\): 200 results not read"
        with pytest.raises(RolloutsUnread, match=full):
            await judge.logprobs(said)
        other = judge.sample(alice.prompts(1), group=1)
        with pytest.raises(RolloutsUnread, match=full):
            await other
        del stream
        with pytest.raises(RolloutsUnread, match=r"call 1, sample of policy judge .*: the stream was let go of before its end"):
            await other
        assert len(await other) == 1
        assert len(await judge.sample(alice.prompts(50), group=4)) == 200, "what nobody can read any more takes no room"
        await alice.train(rows_of(said))
        kept.append(judge.sample(alice.prompts(1)))

    small = settings(engine={"count": 1, "max_running": 4}, rollout={"max_tokens": 16})
    small = small.model_copy(update={"pipeline": small.pipeline.model_copy(update={"queue_bytes": 1024})})
    with pytest.raises(
        RolloutsUnread, match=r"call 4, sample of policy judge \(1 prompts, 4 answers\): 4 results not read: the script ends"
    ):
        run_policies({"alice": settings()}, script, frozen={"judge": small}, folder=tmp_path)
    assert stopped_at(tmp_path, "alice"), "its trainer was asked to save"


def test_an_answer_that_no_engine_gives_is_a_rollout_with_an_error(tmp_path: Path) -> None:
    async def script(run: PoliciesRun) -> None:
        judge: FrozenPolicy = run.frozen["judge"]
        (one,) = await judge.sample([{"prompt": "ab"}], group=1)
        assert one.finish == "error"
        assert not one.num_trained_tokens
        assert one.error

    world = World(engine_error_fraction=1.0)
    run_policies({"alice": settings()}, script, frozen={"judge": settings()}, folder=tmp_path, worlds={"judge": world})
