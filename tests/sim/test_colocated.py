"""Engines and trainer take turns on one device: nobody reads weights while they change, whoever is killed; on simulated time."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

import pytest

from orchestrator.scripted_run import Coming, ScriptedRun
from pipelinerl.errors import NobodySends
from pipelinerl.messages import Sample, StepDone
from tests.sim.chaos import Faults, survive
from tests.sim.memory import NetworkFaults
from tests.sim.peers import Device, World
from tests.sim.run import Prompts, Simulated, config, run
from tests.sim.test_recovery import check
from tests.sim.test_script import KILLS as SCRIPT_KILLS
from tests.sim.test_script import grpo, one_step_off, scripted

Script = Callable[[ScriptedRun], Coroutine[Any, Any, None]]

WORLD = World(token_s=1e-3, bad_score_fraction=0.05)


def colocated(**sections: dict[str, Any]):
    return config(**{**sections, "pipeline": {"placement": "colocated", **sections.get("pipeline", {})}})


def test_rollouts_are_carried_over_training_phases_and_none_is_aborted(tmp_path: Path):
    device = Device()
    ended = run(colocated(), folder=tmp_path, world=World(mean_tokens=48, device=device))
    assert ended.problems() == []
    assert device.problems == []
    assert device.num_passes > 50
    phases = [line for line in ended.lines if line["kind"] == "phase"]
    assert [line["phase"] for line in phases] == ["training", "generation"] * (len(phases) // 2)
    assert len(phases) // 2 == 11, "one before the trainer has published what it loaded, and one for each step"
    naps = [line for line in ended.lines if line["kind"] == "asleep"]
    assert sum(line["num_running"] for line in naps) > 20
    trained = [row for row in ended.rows if row[3] == "trained"]
    assert any(row[7] < row[8] for row in trained), "tokens of two policies in one rollout"
    assert not [row for row in ended.rows if row[3] in ("cancelled", "failed") and row[4] != "the run ended"]


def test_taking_turns_in_rounds_trains_what_the_newest_policy_sampled(tmp_path: Path):
    ended = run(colocated(pipeline={"mode": "sync"}), folder=tmp_path, world=World(device=(device := Device())))
    assert ended.problems() == []
    assert device.problems == []
    assert all(row[5] == row[7] for row in ended.rows if row[3] == "trained")


def test_an_evaluation_keeps_its_policy_through_phases(tmp_path: Path):
    held_out = tuple(Prompts(9).next() for _ in range(4))
    settings = colocated(evaluation={"source": "unused", "every": 2})
    ended = run(settings, folder=tmp_path, world=World(device=(device := Device())), held_out=held_out)
    assert ended.problems() == []
    assert device.problems == []
    told = [line for line in ended.lines if line["kind"] == "evaluation"]
    assert {line["version"] for line in told} >= {0, 10}
    assert len(told) >= 4
    assert all(line["oldest_version"] == line["newest_version"] == line["version"] for line in told)


def test_a_run_that_is_stopped_while_it_trains_ends_with_its_last_policy_in_force(tmp_path: Path):
    """Half of the time is the trainer's here."""
    for stop_at_s in (6.0, 6.5, 7.0):
        folder = tmp_path / str(stop_at_s)
        folder.mkdir()
        held_out = (Prompts(9).next(),)
        settings = colocated(evaluation={"source": "unused"}, trainer={"steps": 100})
        ended = run(settings, folder=folder, world=World(token_s=1e-3, device=Device()), held_out=held_out, stop_at_s=stop_at_s)
        assert ended.record.last_version
        assert ended.ending.evaluations[-1][0] == ended.record.last_version


KILLS: dict[str, dict[str, Any]] = {
    "engine": {"engine_s": 3.0},
    "trainer": {"trainer_s": 3.0},
    "orchestrator": {"orchestrator_s": 4.0},
    "everything": {"engine_s": 5.0, "scorer_s": 5.0, "trainer_s": 6.0, "orchestrator_s": 10.0},
}


@pytest.mark.parametrize("who", KILLS)
def test_nothing_is_lost_or_read_while_it_changes_whoever_is_killed_in_whichever_phase(tmp_path: Path, who: str):
    faults = Faults(seed=1, until_s=60.0, **KILLS[who])
    survived = survive(colocated(trainer={"steps": 20}), folder=tmp_path, faults=faults, world=WORLD)
    check(survived, num_steps=20)
    assert survived.kills


@pytest.mark.slow
def test_engines_that_are_told_of_a_policy_as_their_phase_ends_are_awaited_by_the_trainer(tmp_path: Path):
    """Messages take a while, so that a step that was scored before the orchestrator died is closed while engines are being woken."""
    faults = Faults(seed=2, until_s=60.0, orchestrator_s=4.0)
    settings = colocated(engine={"count": 3}, pipeline={"max_staleness": 1}, trainer={"steps": 20})
    network = NetworkFaults(delay_s=0.02, jitter_s=0.1, seed=2)
    survived = survive(settings, folder=tmp_path, faults=faults, world=dataclasses.replace(WORLD, seed=2), network=network)
    check(survived, num_steps=20)
    assert survived.kills["orchestrator"] > 8


# --- some engines in turns, others apart -------------------------------------------------------------------------------------------


def mixed(**sections: dict[str, Any]):
    """Engine 0 takes turns with the trainer, engine 1 has devices of its own."""
    return colocated(**{**sections, "engine": {"apart": 1, **sections.get("engine", {})}})


MIXED = World(mean_tokens=48, token_s=1e-3)


def test_engines_apart_go_on_while_the_trainer_has_the_devices_of_the_others(tmp_path: Path):
    ended = run(mixed(trainer={"steps": 20}), folder=tmp_path, world=dataclasses.replace(MIXED, device=(device := Device())))
    assert ended.problems() == device.problems == []
    assert device.num_beside > 150
    assert {line["engine_id"] for line in ended.lines if line["kind"] == "asleep"} == {0}
    assert {line["engine_id"] for line in ended.lines if line["kind"] == "swap"} == {0, 1}
    assert not [row for row in ended.rows if row[3] in ("cancelled", "failed") and row[4] != "the run ended"]


@pytest.mark.parametrize("bound", [2, 3])
def test_no_sequence_sleeps_until_it_is_too_old_though_engines_apart_alone_would_keep_the_trainer_busy(tmp_path: Path, bound: int):
    settings = mixed(engine={"count": 4, "apart": 3}, pipeline={"max_staleness": bound}, trainer={"steps": 20})
    ended = run(settings, folder=tmp_path, world=dataclasses.replace(MIXED, device=(device := Device())))
    assert ended.problems() == device.problems == []
    assert sum(line["num_running"] for line in ended.lines if line["kind"] == "asleep") > 50
    assert not [row for row in ended.rows if row[3] == "stale"]
    phases = [line for line in ended.lines if line["kind"] == "phase"][2:-2]
    waits = [after["num_closed"] - before["num_closed"] for before, after in itertools.pairwise(phases) if before["phase"] == "generation"]
    assert min(waits) >= 1, "those that woke have helped to close one"


def test_rounds_of_engines_in_turns_and_apart_train_what_the_newest_policy_sampled(tmp_path: Path):
    ended = run(mixed(pipeline={"mode": "sync"}), folder=tmp_path, world=World(device=(device := Device())))
    assert ended.problems() == device.problems == []
    assert all(row[5] == row[7] for row in ended.rows if row[3] == "trained")


def test_evaluations_keep_an_engine_apart_and_hold_up_no_training_phase(tmp_path: Path):
    held_out = tuple(Prompts(9).next() for _ in range(4))
    settings = mixed(evaluation={"source": "unused", "every": 2})
    ended = run(settings, folder=tmp_path, world=dataclasses.replace(MIXED, device=(device := Device())), held_out=held_out)
    assert ended.problems() == device.problems == []
    assert len([line for line in ended.lines if line["kind"] == "evaluation"]) >= 4
    pinned = [line["engine_id"] for line in ended.lines if line["kind"] == "pin" and line["is_pinned"]]
    assert set(pinned) == {1}


def test_a_mixed_run_that_is_stopped_ends_with_its_last_policy_in_force(tmp_path: Path):
    settings = mixed(evaluation={"source": "unused"}, trainer={"steps": 100})
    ended = run(settings, folder=tmp_path, world=dataclasses.replace(MIXED, device=Device()), held_out=(Prompts(9).next(),), stop_at_s=9.0)
    assert ended.record.last_version
    assert ended.ending.evaluations[-1][0] == ended.record.last_version


@pytest.mark.parametrize(("who", "bound"), [(who, bound) for who in KILLS for bound in (1, 4)])
def test_engines_in_turns_and_apart_lose_nothing_whoever_is_killed(tmp_path: Path, who: str, bound: int):
    faults = Faults(seed=1, until_s=60.0, **KILLS[who])
    settings = mixed(engine={"count": 3, "apart": 2}, pipeline={"max_staleness": bound}, trainer={"steps": 20})
    survived = survive(settings, folder=tmp_path, faults=faults, world=WORLD)
    check(survived, num_steps=20)
    assert survived.kills


# --- agents ----------------------------------------------------------------------------------------------------------------------


def turns_with_agents(folder: Path, *, deadline_s: float, token_s: float, **options: Any) -> Simulated:
    settings = colocated(gateway={"deadline_s": deadline_s}, rollout={"group_size": 4, "max_tokens": 64}, trainer={"steps": 6})
    ended = run(settings, folder=folder, world=World(token_s=token_s, mean_tokens=8, device=(device := Device()), **options))
    assert device.problems == ended.problems() == []
    assert ended.ending.reason == "finished"
    return ended


def gauges_of(ended: Simulated) -> dict[str, Any]:
    return [line["gateway"] for line in ended.lines if line["kind"] == "status"][-1]


def test_no_agent_loses_its_episode_because_engines_sleep_for_longer_than_its_deadline(tmp_path: Path):
    ended = turns_with_agents(tmp_path, deadline_s=3.0, token_s=4e-3)
    phases = [line for line in ended.lines if line["kind"] == "phase"]
    slept = [after["t"] - before["t"] for before, after in itertools.pairwise(phases) if before["phase"] == "training"]
    assert max(slept) > 3.0
    assert gauges_of(ended)["num_expired"] == 0


def test_an_agent_that_vanishes_is_given_up_after_its_deadline_of_awake_engines(tmp_path: Path):
    ended = turns_with_agents(tmp_path, deadline_s=3.0, token_s=1e-3, vanish_fraction=0.03)
    assert gauges_of(ended)["num_expired"] > 0


@pytest.mark.slow
def test_episodes_of_agents_survive_whoever_is_killed_in_whichever_phase(tmp_path: Path):
    settings = colocated(gateway={"deadline_s": 20.0}, rollout={"group_size": 4, "max_tokens": 64}, trainer={"steps": 12})
    faults = Faults(seed=4, engine_s=4.0, gateway_s=4.0, trainer_s=6.0, orchestrator_s=6.0)
    survived = survive(settings, folder=tmp_path, faults=faults, world=World(token_s=1e-3, mean_tokens=8, vanish_fraction=0.03))
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert len(survived.kills) == 4, survived.kills


# --- scripts ---------------------------------------------------------------------------------------------------------------------

HELD_OUT = tuple(Prompts(9).next() for _ in range(2))


def play(script: Script, folder: Path, **circumstances: Any) -> Simulated:
    """Run a script whose engines and trainer take turns; nobody reads weights while they change."""
    device, sections = Device(), {"pipeline": {"placement": "colocated", "max_staleness": 1, **circumstances.pop("pipeline", {})}}
    ended = scripted(script, folder, settings=sections, world=World(token_s=1e-3, device=device), **circumstances)
    assert device.problems == ended.problems() == []
    return ended


async def rows_of(asked: ScriptedRun, num_prompts: int = 2) -> list[Sample]:
    return asked.advantages(await asked.score(asked.sample(asked.prompts(num_prompts))))


def turns_of(ended: Simulated) -> list[str]:
    """Who had the devices, one after the other."""
    return [line["phase"] for line in ended.lines if line["kind"] == "phase"]


def test_a_script_decides_the_turns_and_begins_as_it_does_apart(tmp_path: Path):
    colocated_one = play(grpo, tmp_path / "colocated", pipeline={"mode": "sync"})
    apart = scripted(grpo, tmp_path / "apart", settings={"pipeline": {"mode": "sync"}})
    assert colocated_one.record.trained == apart.record.trained
    assert turns_of(colocated_one) == ["training", "generation"] * 5, "one before the first policy is published, and one for each step"


def test_what_is_asked_for_while_the_trainer_has_the_devices_is_sampled_after_the_publication(tmp_path: Path):
    async def script(asked: ScriptedRun) -> None:
        rows = await rows_of(asked)
        ahead = asked.sample(asked.prompts(4))
        done = asked.train(rows)
        await asyncio.sleep(0.1)  # less than the trainer needs
        later = asked.sample(asked.prompts(4))
        await done
        await asked.publish()
        assert {int(one.versions.max()) for one in await later} == {1}
        assert {int(one.versions.max()) for one in await ahead} <= {0, 1}

    play(script, tmp_path)


def test_steps_that_are_not_published_keep_engines_asleep_until_the_last_of_them_is(tmp_path: Path):
    async def script(asked: ScriptedRun) -> None:
        first, second = await rows_of(asked), await rows_of(asked)
        await asked.train(first)
        last = asked.train(second)
        assert await asked.publish() == 2, "no policy before it will be there"
        await last
        assert {int(one.versions.max()) for one in await asked.sample(asked.prompts(1))} == {2}

    ended = play(script, tmp_path)
    assert turns_of(ended)[:4] == ["training", "generation", "training", "generation"]
    assert {line["version"] for line in ended.lines if line["kind"] == "swap"} == {0, 2}


@pytest.mark.parametrize("is_scored", [False, True])
def test_who_waits_for_rollouts_that_only_its_own_publication_could_bring_is_told(tmp_path: Path, is_scored: bool):
    async def script(asked: ScriptedRun) -> None:
        asked.train(await rows_of(asked))
        ahead = asked.sample(asked.prompts(1))
        await (asked.score(ahead) if is_scored else ahead)

    with pytest.raises(NobodySends, match=r"engines sleep since step 0 was handed to the trainer.* policy 1\. Publish first"):
        play(script, tmp_path, limit_s=200.0)


def test_another_task_may_publish_what_the_one_that_waits_has_trained(tmp_path: Path):
    async def publish(asked: ScriptedRun, step: Coming[StepDone]) -> None:
        await step
        await asyncio.sleep(5.0)
        await asked.publish()

    async def script(asked: ScriptedRun) -> None:
        async with asyncio.TaskGroup() as tasks:
            while asked.step < asked.num_steps:
                tasks.create_task(publish(asked, asked.train(await rows_of(asked))))

    assert len(play(script, tmp_path).record.sealed) == 4


def test_engines_sleep_while_a_script_has_log_probabilities_computed_and_go_on_under_the_same_policy(tmp_path: Path):
    async def script(asked: ScriptedRun) -> None:
        await asked.train(await rows_of(asked))
        await asked.publish()
        ahead = asked.sample(asked.prompts(4))
        rows = await rows_of(asked, num_prompts=8)
        assert len(await asked.logprobs([one.trajectory for one in rows], model="policy")) == len(rows)
        assert {int(one.versions.max()) for one in await ahead} == {1}
        await asked.train(rows)
        await asked.logprobs([one.trajectory for one in rows], model="policy")  # before the policy is published
        await asked.publish()

    ended = play(script, tmp_path, network=NetworkFaults(delay_s=0.05, jitter_s=0.2, seed=3))
    assert turns_of(ended) == ["training", "generation"] * 4, "the first policy, a step, log-probabilities, and a step with others"


def test_a_script_evaluates_a_policy_that_is_there_and_no_step_is_trained_in_its_place_meanwhile(tmp_path: Path):
    async def script(asked: ScriptedRun) -> None:
        rows = await rows_of(asked)
        evaluation = asyncio.create_task(asked.evaluate())
        await asyncio.sleep(0.05)  # an answer takes longer
        asked.train(rows)
        assert await evaluation is not None
        with pytest.raises(NobodySends, match="policy 0 is gone: step 0 was handed to the trainer"):
            await asked.evaluate()
        await asked.publish()
        await asked.evaluate()

    ended = play(script, tmp_path, held_out=HELD_OUT)
    told = [line for line in ended.lines if line["kind"] == "evaluation"]
    assert [line["version"] for line in told] == [0, 1]
    assert all(line["oldest_version"] == line["newest_version"] == line["version"] for line in told)


def test_an_evaluation_that_engines_sleep_through_is_of_the_policy_that_wakes_them(tmp_path: Path):
    async def script(asked: ScriptedRun) -> None:
        rows = await rows_of(asked)
        computing = asyncio.create_task(asked.logprobs([one.trajectory for one in rows], model="policy"))
        await asyncio.sleep(0.05)
        evaluation = asyncio.create_task(asked.evaluate())
        await asyncio.sleep(0.0)
        asked.train(rows)
        await computing
        await asked.publish()
        assert await evaluation is not None

    ended = play(script, tmp_path, held_out=HELD_OUT)
    (told,) = [line for line in ended.lines if line["kind"] == "evaluation"]
    assert told["oldest_version"] == told["newest_version"] == told["version"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("who", SCRIPT_KILLS)
def test_a_script_loses_nothing_and_engines_read_nothing_that_changes_whoever_is_killed(tmp_path: Path, who: str):
    settings = colocated(trainer={"steps": 20}, pipeline={"max_staleness": 1})
    faults = Faults(seed=1, until_s=30.0, **SCRIPT_KILLS[who])
    survived = survive(settings, folder=tmp_path, faults=faults, world=World(token_s=2e-3), script=one_step_off)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert survived.disk.version == survived.checker.num_done == 20
    assert survived.kills
