"""A script drives the whole orchestrator on simulated time: the promises of every run hold, and what cannot be is an error of its call."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import dataclasses
import runpy
import sqlite3
from collections.abc import AsyncIterator, Callable, Coroutine
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from orchestrator.advantages import MethodAdvantages
from orchestrator.controller import not_in_scripts
from orchestrator.rules.batch import Filtered, Siblings
from orchestrator.scripted_run import Coming, ScriptedRun
from pipelinerl.algorithms.methods import method_of
from pipelinerl.errors import NobodySends, NothingTrained, PeerRefused, RolloutsUnread, ScriptError, Stalled, TrainedTwice
from pipelinerl.messages import Prompt, Sample, ScorerReady, Trajectory
from pipelinerl.runtime.findings import Level
from tests.sim import peers
from tests.sim.chaos import Faults, survive
from tests.sim.memory import MemoryLink, NetworkFaults
from tests.sim.peers import World
from tests.sim.run import Cast, Simulated, config, mean_baseline, run

SMALL: dict[str, Any] = {"trainer": {"steps": 4}, "pipeline": {"max_staleness": 1}}
HELD_OUT = tuple(Prompt(prompt_id=f"0:{number}", text="", token_ids=np.array([5, number + 3], np.int32)) for number in range(6))


def scripted(script: Callable[[ScriptedRun], Coroutine[Any, Any, None]], folder: Path, **circumstances: Any) -> Simulated:
    sections = SMALL | circumstances.pop("settings", {})
    try:
        return run(config(**sections), folder=folder, script=script, **circumstances)
    except ExceptionGroup as several:  # of the simulation, whose peers end with the run
        (error,) = several.exceptions
        raise error from None


async def grpo(asked: ScriptedRun, *, num_prompts: int = 3) -> None:
    while asked.step < asked.num_steps:
        scored = await asked.score(asked.sample(asked.prompts(num_prompts)))
        await asked.train(asked.advantages(scored))
        await asked.publish()


def ends(simulated: Simulated) -> dict[str, int]:
    return {name: count for name, count in dataclasses.asdict(simulated.ending.rollouts).items() if count}


def reasons(simulated: Simulated) -> set[tuple[str, str]]:
    return {(row[3], row[4]) for row in simulated.rows}


# --- what holds ------------------------------------------------------------------------------------------------------------------


def test_a_script_trains_its_rollouts_each_once_and_ends_as_every_run(tmp_path: Path) -> None:
    simulated = scripted(grpo, tmp_path)
    assert simulated.problems() == []
    assert ends(simulated) == {"admitted": 48, "trained": 48}
    assert simulated.ending.reason == simulated.record.stopped_for == "finished"
    assert [line["version"] for line in simulated.lines if line["kind"] == "swap"] == [1, 1, 2, 2, 3, 3, 4, 4]


def test_steps_may_have_any_number_of_groups_and_groups_fewer_siblings(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        for num_prompts, group in ((1, 4), (7, 2), (20, 3)):
            scored = await asked.score(asked.sample(asked.prompts(num_prompts), group=group))
            await asked.train(asked.advantages(scored))
            await asked.publish()

    simulated = scripted(script, tmp_path)
    assert simulated.problems() == []
    assert [simulated.record.sealed[step].num_samples for step in range(3)] == [4, 14, 60]
    assert simulated.ending.reason == "the script has ended"
    assert simulated.record.last_version == 3, "what was trained is saved although steps are left"


def test_rollouts_asked_for_before_a_step_are_sampled_while_it_is_trained(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        ahead = asked.sample(asked.prompts(8))
        while asked.step < asked.num_steps:
            scored = await asked.score(ahead)
            is_last = asked.step + 1 == asked.num_steps
            ahead = asked.sample([] if is_last else asked.prompts(8))
            await asked.train(asked.advantages(scored))
            await asked.publish()
        assert await ahead == []

    world = World(token_s=7e-4)  # training takes about as long as sampling
    overlapped = scripted(script, tmp_path / "ahead", world=world)
    apart = scripted(lambda asked: grpo(asked, num_prompts=8), tmp_path / "apart", world=world)
    assert overlapped.problems() == apart.problems() == []
    assert overlapped.seconds < 0.8 * apart.seconds
    ages = {simulated.record.trained[name] - oldest for simulated in (overlapped,) for name, oldest in simulated.record.oldest.items()}
    assert ages == {0, 1}


def test_an_on_policy_script_samples_under_the_policy_that_it_has_just_published(tmp_path: Path) -> None:
    simulated = scripted(grpo, tmp_path, settings={"pipeline": {"max_staleness": 0}})
    assert simulated.problems() == []
    assert all(simulated.record.oldest[name] == step for name, step in simulated.record.trained.items())


def test_engines_keep_their_policy_until_the_script_publishes_and_then_take_the_newest(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        for publishes in (False, False, True):
            scored = await asked.score(asked.sample(asked.prompts(2)))
            assert {int(one.trajectory.versions.max()) for one in scored} == {0}
            await asked.train(asked.advantages(scored))
            if publishes:
                assert await asked.publish() == asked.version == 3
        assert {int(one.versions.max()) for one in await asked.sample(asked.prompts(2))} <= {0, 3}

    simulated = scripted(script, tmp_path, settings={"pipeline": {"max_staleness": 3}})
    assert simulated.problems() == []
    assert {line["version"] for line in simulated.lines if line["kind"] == "swap"} == {3}


def test_siblings_that_the_script_leaves_out_end_as_filtered_and_groups_that_the_method_drops_with_its_reason(tmp_path: Path) -> None:
    def drops_every_other(siblings: Siblings) -> list[np.ndarray] | Filtered:
        columns = mean_baseline(siblings)
        return columns if siblings[0].trajectory.group_id % 2 else Filtered(reason="even", advantages=columns)

    async def script(asked: ScriptedRun) -> None:
        scored = await asked.score(asked.sample(asked.prompts(4)))
        rows = asked.advantages(scored)
        assert {row.trajectory.group_id for row in rows} == {1, 3}
        best = max(rows, key=lambda row: row.reward)
        await asked.train([best])
        asked.advantages(await asked.score(asked.sample(asked.prompts(1))))

    simulated = scripted(script, tmp_path, group_advantages=drops_every_other)
    assert simulated.problems() == []
    assert ends(simulated) == {"admitted": 20, "trained": 1, "filtered": 15, "cancelled": 4}
    assert reasons(simulated) == {
        ("trained", ""),
        ("filtered", "even"),
        ("filtered", "the script left it out"),
        ("cancelled", "the run ended"),
    }


def test_the_method_is_asked_once_about_the_same_siblings_and_again_about_others(tmp_path: Path) -> None:
    asked_about: list[int] = []

    def counts(siblings: Siblings) -> list[np.ndarray]:
        asked_about.append(len(siblings))
        return mean_baseline(siblings)

    async def script(asked: ScriptedRun) -> None:
        scored = await asked.score(asked.sample(asked.prompts(2)))
        rows = asked.advantages(one for one in scored if not one.trajectory.group_id)
        assert {id(row) for row in rows} < {id(row) for row in asked.advantages(scored)}
        assert asked_about == [4, 4]
        assert len(asked.advantages(scored[:-1])) == 7
        assert asked_about == [4, 4, 3]
        await asked.train(asked.advantages(scored))

    simulated = scripted(script, tmp_path, group_advantages=counts)
    assert simulated.problems() == []
    assert ends(simulated) == {"admitted": 8, "trained": 8}


def test_groups_too_old_for_the_step_end_as_stale_offered_or_forgotten(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        scored = await asked.score(asked.sample(asked.prompts(1)))
        old = asked.advantages(scored)
        await asked.sample(asked.prompts(1))  # never looked at again
        for _ in range(2):
            await asked.train(asked.advantages(await asked.score(asked.sample(asked.prompts(1)))))
            await asked.publish()
        fresh = asked.advantages(await asked.score(asked.sample(asked.prompts(1))))
        assert asked.advantages(scored) == [], "too old for the step that comes next"
        await asked.train([*old, *fresh])
        await asked.publish()
        await asked.train([*old, *asked.advantages([*scored, *await asked.score(asked.sample(asked.prompts(1)))])])
        with pytest.raises(ScriptError, match="the rows are of 1 groups, each with a token more than"):
            await asked.train(old)

    simulated = scripted(script, tmp_path, settings={"trainer": {"steps": 5}})
    assert simulated.problems() == []
    assert ends(simulated) == {"admitted": 24, "trained": 16, "stale": 8}


def test_a_step_is_under_way_before_it_is_awaited_and_its_policy_is_the_one_to_publish_once_it_was(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        first, second = asked.train(await rows_of(asked)), asked.train(await rows_of(asked))
        assert asked.step == 2
        assert (await first).step == (await first).step == 0
        assert await asked.publish() == asked.version == 1
        third = asked.train(await rows_of(asked))
        assert await asked.publish() == 3, "of the last that was asked for, where all that was awaited is published"
        assert [(await one).step for one in (second, third)] == [1, 2]
        asked.train(await rows_of(asked))  # nobody awaits it

    simulated = scripted(script, tmp_path, settings={"trainer": {"steps": 5}, "pipeline": {"max_staleness": 2}})
    assert simulated.problems() == []
    assert ends(simulated) == {"admitted": 16, "trained": 16}
    assert simulated.record.last_version == 4


def test_a_greedy_sibling_is_the_baseline_of_the_others_and_a_group_without_one_fails(tmp_path: Path) -> None:
    settings = {"algorithm": {"name": "remax"}}
    rule = MethodAdvantages(method_of(config(**settings)), ())

    async def script(asked: ScriptedRun) -> None:
        with pytest.raises(ScriptError, match=r"group is 2, expected rollout\.group_size, 4"):
            asked.sample(asked.prompts(1), group=2)
        while asked.step < asked.num_steps:
            scored = await asked.score(asked.sample(asked.prompts(8)))
            rows = asked.advantages(scored)
            greedy = {one.trajectory.group_id for one in scored if one.trajectory.is_greedy and one.score.reward is not None}
            assert {row.trajectory.group_id for row in rows} <= greedy
            await asked.train(rows)
            await asked.publish()

    world = World(bad_score_fraction=0.2)
    simulated = scripted(script, tmp_path, settings=settings, group_advantages=rule, step_rules=rule.step_rules(), world=world)
    assert simulated.problems() == []
    assert {("filtered", "greedy baseline"), ("failed", "its greedy sibling has no reward")} <= reasons(simulated)


def test_a_reward_that_the_script_gives_itself_is_in_the_ledger(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        rollouts = await asked.sample(asked.prompts(2))
        await asked.train([Sample(trajectory=one, reward=0.5, advantages=one.loss_mask.astype(np.float32)) for one in rollouts])

    simulated = scripted(script, tmp_path)
    assert simulated.problems() == []
    assert {row[6] for row in simulated.rows} == {0.5}


def test_a_script_evaluates_saves_and_reads_its_accounts_when_it_wants_to(tmp_path: Path) -> None:
    found: list[Any] = []

    async def script(asked: ScriptedRun) -> None:
        found.append(await asked.evaluate())
        await asked.train(asked.advantages(await asked.score(asked.sample([{"prompt": [4, 5, 6]}, {"prompt": [7]}]))))
        await asked.publish()
        (tmp_path / "checkpoints" / "step-000001").mkdir(parents=True)
        found.append(await asked.save())
        assert await asked.evaluate() == await asked.evaluate()
        assert asked.rollouts.trained == asked.rollouts.admitted == 8

    simulated = scripted(script, tmp_path, held_out=HELD_OUT)
    assert simulated.problems() == []
    assert found == [simulated.ending.evaluations[0][1], tmp_path / "checkpoints" / "step-000001"]
    assert [version for version, _ in simulated.ending.evaluations] == [0, 1], "a version is evaluated once"


@pytest.mark.parametrize(
    ("world", "network"),
    [
        (World(engine_error_fraction=0.01, bad_score_fraction=0.2, refused_fraction=0.1), NetworkFaults()),
        (World(), NetworkFaults(delay_s=0.05, jitter_s=0.2, seed=3)),
    ],
    ids=["failures", "storm"],
)
def test_promises_hold_among_failing_peers_and_over_a_bad_network(tmp_path: Path, world: World, network: NetworkFaults) -> None:
    simulated = scripted(grpo, tmp_path, world=world, network=network, settings={"trainer": {"steps": 8}})
    assert simulated.problems() == []
    assert ends(simulated)["admitted"] == 8 * 12
    assert not {"cancelled", "stale"} & ends(simulated).keys()


KILLS: dict[str, dict[str, Any]] = {
    "engine": {"engine_s": 1.5},
    "scorer": {"scorer_s": 1.0},
    "trainer": {"trainer_s": 1.5},
    "script": {"orchestrator_s": 2.0},
    "everything": {"engine_s": 3.0, "scorer_s": 3.0, "trainer_s": 4.0, "orchestrator_s": 4.0},
}


async def one_step_off(asked: ScriptedRun) -> None:
    ahead = asked.score(asked.sample(asked.prompts(6)))
    while asked.step < asked.num_steps:
        rows = asked.advantages(await ahead)
        ahead = asked.score(asked.sample([] if asked.step + 1 == asked.num_steps else asked.prompts(6)))
        await asked.train(rows)
        await asked.publish()
    assert not await ahead


@pytest.mark.slow
@pytest.mark.parametrize("who", KILLS)
def test_whoever_is_killed_a_script_loses_and_trains_nothing_twice_and_goes_on_from_its_last_step(tmp_path: Path, who: str) -> None:
    seed = 26 if who == "script" else 1  # its script dies just before a step is closed, so the next one hears of a new policy first
    faults = Faults(seed=seed, until_s=30.0, **KILLS[who])
    settings = config(trainer={"steps": 20}, pipeline={"max_staleness": 1})
    survived = survive(settings, folder=tmp_path, faults=faults, world=World(token_s=2e-3), script=one_step_off)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    assert survived.disk.version == survived.checker.num_done == 20
    killed = "orchestrator" if who == "script" else who
    assert survived.kills[killed] >= 2 if who != "everything" else len(survived.kills) == 4, survived.kills
    ends = collections.Counter((row[3], row[4]) for row in survived.rows if row[3] != "failed")  # what was there when two died, fails
    assert ends["trained", ""] > 20 * 6 * 4 * 0.9
    assert ends.keys() <= {("trained", ""), ("cancelled", "the script that asked for it is gone")}
    assert (len(ends) == 2) == (survived.kills["orchestrator"] > 0)
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as ledger:
        assert ledger.execute("SELECT count(*) FROM groups WHERE number IS NULL").fetchone() == (0,), "every group is over"


@pytest.mark.slow
def test_a_step_that_a_killed_script_had_decided_upon_is_trained_as_it_was_decided(tmp_path: Path) -> None:
    """A step is given while the one before is trained, so kills fall between its first row and its last; each trains two of a group."""

    def two_of_each(rows: list[Sample]) -> list[Sample]:
        return [row for row in rows if row.trajectory.sibling % 2]

    async def script(asked: ScriptedRun) -> None:
        training: collections.deque[Coming[Any]] = collections.deque()
        while asked.step < asked.num_steps:
            rows = two_of_each(asked.advantages(await asked.score(asked.sample(asked.prompts(24)))))
            training.append(asked.train(rows))
            if len(training) > 1:
                await training.popleft()
                if asked.step > asked.version:
                    await asked.publish()
        for last in training:
            await last

    num_finished = 0
    for seed in range(3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        settings = config(trainer={"steps": 5}, pipeline={"queue_bytes": 1024, "max_staleness": 4}, batch={"max_tokens": 128})
        faults = Faults(seed=seed, until_s=30.0, orchestrator_s=2.0)
        survived = survive(settings, folder=folder, faults=faults, world=World(token_s=2e-3), script=script)
        assert survived.problems() == []
        groups = collections.Counter(row[1] for row in survived.rows if row[3] == "trained")
        assert len(groups) == 5 * 24
        assert set(groups.values()) == {2}
        with contextlib.closing(sqlite3.connect(folder / "ledger.sqlite")) as ledger:
            rows = "SELECT step, min(seq), max(seq) FROM events WHERE kind = 'packed' GROUP BY step"
            begins = [seq for (seq,) in ledger.execute("SELECT seq FROM events WHERE kind = 'began'")]
            num_finished += sum(first < seq < last for _, first, last in ledger.execute(rows) for seq in begins)
            booked = "SELECT step, min(seq), max(seq) FROM events WHERE kind = 'assigned' GROUP BY step"
            assert not any(first < seq < last for _, first, last in ledger.execute(booked) for seq in begins), "all groups, or none"
    assert num_finished, "a script began between the first row of a step and its last"


def test_what_a_script_raises_is_raised_after_what_it_trained_is_saved(tmp_path: Path) -> None:
    kept: list[Any] = []

    async def script(asked: ScriptedRun) -> None:
        kept.append(asked._run)
        await asked.train(asked.advantages(await asked.score(asked.sample(asked.prompts(2)))))
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        scripted(script, tmp_path)
    assert kept[0].result.reason == "the script has failed"
    assert kept[0].pipeline.training.session.checkpoints.newest == 1


SEVERAL_POLICIES = {"self_play"}
"""Loops of several policies, which `test_policies` runs."""
EXAMPLES = [path for path in sorted((Path(__file__).parents[2] / "examples" / "scripts").glob("*.py")) if path.stem not in SEVERAL_POLICIES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_loop_of_an_example_is_short_and_trains_every_step(tmp_path: Path, path: Path) -> None:
    assert len(path.read_text().splitlines()) < 50
    script = runpy.run_path(str(path))["train"]
    settings = {"rollout": {"group_size": 4, "max_tokens": 16}, "reference": {"path": "unused"}}
    simulated = scripted(script, tmp_path, settings=settings, is_recorded=True)
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"
    samples = {seal.num_samples for seal in simulated.record.sealed.values()}
    if path.stem == "dpo":  # the best and the worst of each group that has both
        assert all(0 < num <= 32 and num % 2 == 0 for num in samples)
    else:
        assert samples == {"best_of_n": {16}, "curriculum": {3, 12}, "streaming": {32}}.get(path.stem, {64})


def test_the_built_in_loop_as_a_script_has_other_groups_take_the_places_of_those_that_are_too_old(tmp_path: Path) -> None:
    script = runpy.run_path(str(EXAMPLES[0].parent / "streaming.py"))["train"]
    settings = {"trainer": {"steps": 16}, "rollout": {"max_tokens": 64}, "engine": {"count": 1, "max_running": 32}}
    simulated = scripted(script, tmp_path, settings=settings, world=World(token_s=1.6e-4))
    assert simulated.problems() == []
    assert ends(simulated)["stale"] > 0
    assert ends(simulated)["trained"] == 16 * 32


@pytest.mark.parametrize("max_staleness", [0, 1, 4])
def test_the_built_in_loop_as_a_script_trains_the_same_rollouts_in_its_first_steps(tmp_path: Path, max_staleness: int) -> None:
    script = runpy.run_path(str(EXAMPLES[0].parent / "streaming.py"))["train"]
    settings = {"pipeline": {"max_staleness": max_staleness}}
    scripted_one = scripted(script, tmp_path / "script", settings=settings)
    built_in = run(config(**SMALL | settings), folder=tmp_path / "built-in")
    assert scripted_one.problems() == built_in.problems() == []
    first, own = (
        [{name for name, step in one.record.trained.items() if step == number} for number in range(4)] for one in (built_in, scripted_one)
    )
    num_first = 4 if not max_staleness else min(4, max_staleness + 1)
    assert own[:num_first] == first[:num_first]


# --- what is refused -------------------------------------------------------------------------------------------------------------


async def rows_of(asked: ScriptedRun, num_prompts: int = 1) -> list[Sample]:
    return asked.advantages(await asked.score(asked.sample(asked.prompts(num_prompts))))


async def publishes_first(asked: ScriptedRun) -> None:
    await asked.publish()


async def publishes_twice(asked: ScriptedRun) -> None:
    await asked.train(await rows_of(asked))
    await asked.publish()
    await asked.publish()


async def saves_first(asked: ScriptedRun) -> None:
    await asked.save()


async def trains_twice(asked: ScriptedRun) -> None:
    rows = await rows_of(asked)
    await asked.train(rows)
    await asked.train(rows)


async def trains_a_row_twice_at_once(asked: ScriptedRun) -> None:
    rows = await rows_of(asked)
    await asked.train([*rows, rows[0]])


async def scores_twice(asked: ScriptedRun) -> None:
    rollouts = await asked.sample(asked.prompts(1))
    await asked.score(rollouts)
    await asked.score(rollouts)


async def trains_nothing(asked: ScriptedRun) -> None:
    await asked.train([])


async def trains_a_step_too_many(asked: ScriptedRun) -> None:
    await grpo(asked)
    await asked.train(await rows_of(asked))


async def trains_half_a_group(asked: ScriptedRun) -> None:
    reading = asked.score(asked.sample(asked.prompts(1)))
    await asked.train(asked.advantages([await anext(reading)]))


async def changes_a_reward(asked: ScriptedRun) -> None:
    await asked.train([msgspec.structs.replace(row, reward=row.reward + 1) for row in await rows_of(asked)])


async def changes_a_rollout(asked: ScriptedRun) -> None:
    (first, *_) = await asked.sample(asked.prompts(1))
    await asked.score([msgspec.structs.replace(first, token_ids=first.token_ids + 1)])


async def trains_a_nan(asked: ScriptedRun) -> None:
    await asked.train([msgspec.structs.replace(row, advantages=row.advantages * np.nan) for row in await rows_of(asked)])


async def trains_what_no_gradient_can_hold(asked: ScriptedRun) -> None:
    await asked.train([msgspec.structs.replace(row, advantages=row.advantages + np.float32(1e13)) for row in await rows_of(asked)])


async def trains_float64(asked: ScriptedRun) -> None:
    await asked.train([msgspec.structs.replace(row, advantages=row.advantages.astype(np.float64)) for row in await rows_of(asked)])


async def scored_by(asked: ScriptedRun) -> list[Any]:
    return await asked.score(asked.sample(asked.prompts(2)))


async def trains_scored_rollouts(asked: ScriptedRun) -> None:
    await asked.train(await scored_by(asked))


async def asks_advantages_of_rollouts(asked: ScriptedRun) -> None:
    asked.advantages(await asked.sample(asked.prompts(2)))  # pyright: ignore[reportArgumentType]


async def scores_what_is_scored(asked: ScriptedRun) -> None:
    await asked.score(await scored_by(asked))


async def asks_log_probabilities_of_scored_rollouts(asked: ScriptedRun) -> None:
    await asked.logprobs(await scored_by(asked), model="policy")


async def samples_what_would_be_too_old(asked: ScriptedRun) -> None:
    for _ in range(3):
        await asked.train(await rows_of(asked))


async def samples_for_a_step_out_of_reach(asked: ScriptedRun) -> None:
    asked.sample(asked.prompts(1), step=2)


async def samples_for_a_step_that_is_over(asked: ScriptedRun) -> None:
    await asked.train(await rows_of(asked))
    asked.sample(asked.prompts(1), step=0)


async def waits_for_what_is_not_admitted(asked: ScriptedRun) -> None:
    rows = [await rows_of(asked) for _ in range(2)]
    ahead = asked.sample(asked.prompts(60))  # more than engines take at once
    for each in rows:
        await asked.train(each)
    await ahead


async def breaks_off(asked: ScriptedRun) -> None:
    async for _ in asked.sample(asked.prompts(2)):
        break
    await rows_of(asked)


async def forgets_a_stream(asked: ScriptedRun) -> None:
    asked.kept = asked.sample(asked.prompts(2))  # pyright: ignore[reportAttributeAccessIssue]
    await asked.train(await rows_of(asked))


async def asks_for_too_many_siblings(asked: ScriptedRun) -> None:
    asked.sample(asked.prompts(1), group=5)


async def names_another_loss(asked: ScriptedRun) -> None:
    await asked.train(await rows_of(asked), loss="gpso")


async def names_a_loss_that_needs_another_model(asked: ScriptedRun) -> None:
    await asked.train(await rows_of(asked), loss="ppo")


async def fine_tunes_on_nothing(asked: ScriptedRun) -> None:
    await asked.sft([])


async def fine_tunes_a_step_too_many(asked: ScriptedRun) -> None:
    for _ in range(asked.num_steps + 1):
        await asked.sft([{"prompt": [3], "completion": [4]}])


async def asks_a_reference_that_is_not_named(asked: ScriptedRun) -> None:
    await asked.logprobs(await asked.sample(asked.prompts(1)))


async def asks_a_model_that_does_not_exist(asked: ScriptedRun) -> None:
    await asked.logprobs(await asked.sample(asked.prompts(1)), model="teacher")  # pyright: ignore[reportArgumentType]


async def evaluates_nothing(asked: ScriptedRun) -> None:
    await asked.evaluate()


async def finds_no_checkpoint(asked: ScriptedRun) -> None:
    await asked.train(await rows_of(asked))
    await asked.save()  # the simulated trainer writes none


async def has_an_iterator_that_fails(asked: ScriptedRun) -> None:
    async def failing() -> AsyncIterator[Trajectory]:
        for rollout in await asked.sample(asked.prompts(1)):
            yield rollout
        raise ZeroDivisionError("mine")

    await asked.score(failing())


MISUSES = [
    (publishes_first, NothingTrained, "publish: no step was trained yet. Train first"),
    (publishes_twice, NothingTrained, "publish: policy 1 is published, and no step was trained since"),
    (saves_first, NothingTrained, "save: no step was trained yet"),
    (trains_twice, TrainedTwice, "rollout 0/0 is over: its group ended with step 0"),
    (trains_a_row_twice_at_once, TrainedTwice, "rollout 0/0 is twice among the rows"),
    (scores_twice, TrainedTwice, "was scored before"),
    (trains_nothing, ScriptError, "train: no rows"),
    (trains_a_step_too_many, NobodySends, "all 4 steps are trained (trainer.steps)"),
    (trains_half_a_group, RolloutsUnread, "of the 4 rollouts of group 0 were not read yet"),
    (changes_a_reward, ScriptError, "belongs into the advantages"),
    (changes_a_rollout, ScriptError, "a rollout is passed on as it was read"),
    (trains_a_nan, ScriptError, "not finite"),
    (trains_what_no_gradient_can_hold, ScriptError, "above 1e+12 in size"),
    (trains_float64, ScriptError, 'has advantages of float64, expected float32: make them by .astype("float32")'),
    (trains_scored_rollouts, ScriptError, "is of ScoredTrajectory, expected Sample, as `run.advantages(scored)` gives"),
    (asks_advantages_of_rollouts, ScriptError, "is of Trajectory, expected ScoredTrajectory, as `run.score(rollouts)` gives"),
    (scores_what_is_scored, ScriptError, "is of ScoredTrajectory, expected Trajectory, as `run.sample(prompts)` gives"),
    (asks_log_probabilities_of_scored_rollouts, ScriptError, "logprobs: number 0 of what it is given is of ScoredTrajectory"),
    (samples_what_would_be_too_old, NobodySends, "engines hold policy 0, the last that was published"),
    (samples_for_a_step_out_of_reach, NobodySends, "sample: step 2 is what they are for, and engines hold policy 0"),
    (samples_for_a_step_that_is_over, ScriptError, "sample: step 0 is over, and step 1 comes next"),
    (waits_for_what_is_not_admitted, NobodySends, "prompts wait for an engine that samples under a newer policy"),
    (breaks_off, RolloutsUnread, "call 1, sample (2 prompts, 8 rollouts): 7 results not read: the stream was let go of"),
    (forgets_a_stream, RolloutsUnread, "call 1, sample (2 prompts, 8 rollouts): 8 results not read: the script ends"),
    (asks_for_too_many_siblings, ScriptError, "group is 5, expected 1 to rollout.group_size, 4"),
    (names_another_loss, ScriptError, "no method named 'gpso'"),
    (names_a_loss_that_needs_another_model, ScriptError, "loss 'ppo' needs critic, and the trainer was started for algorithm.name"),
    (fine_tunes_on_nothing, ScriptError, "sft: no rows"),
    (fine_tunes_a_step_too_many, NobodySends, "sft: all 4 steps are trained (trainer.steps)"),
    (asks_a_reference_that_is_not_named, ScriptError, "logprobs: no reference. Set reference.path"),
    (asks_a_model_that_does_not_exist, ScriptError, "model is 'teacher', expected one of policy, reference"),
    (evaluates_nothing, ScriptError, "Set evaluation.source"),
    (finds_no_checkpoint, PeerRefused, "could not write"),
    (has_an_iterator_that_fails, ZeroDivisionError, "mine"),
]


@pytest.mark.parametrize(("script", "error", "words"), MISUSES, ids=[misuse[0].__name__ for misuse in MISUSES])
def test_misuse_is_an_error_of_the_call_at_once(
    tmp_path: Path, script: Callable[[ScriptedRun], Coroutine[Any, Any, None]], error: type[Exception], words: str
) -> None:
    with pytest.raises(error) as raised:
        scripted(script, tmp_path, limit_s=200.0)
    assert words in str(raised.value)


def test_the_text_of_a_rollout_is_that_of_its_scored_one(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        rollouts = await asked.sample(asked.prompts(1))
        for scored in await asked.score(rollouts):
            assert asked.text(scored) == asked.text(scored.trajectory)

    assert scripted(script, tmp_path).problems() == []


def test_rollouts_that_fill_their_room_are_named_by_who_waits_for_others(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        first, second = asked.sample(asked.prompts(8)), asked.sample(asked.prompts(8))
        await second
        await first

    with pytest.raises(
        RolloutsUnread, match=r"call 2, sample .*: rollouts that were sampled and not read fill their room .*call 1, sample"
    ):
        scripted(script, tmp_path, settings={"pipeline": {"queue_bytes": 1024}}, limit_s=200.0)


def test_a_script_that_works_for_long_between_two_calls_is_no_stall_and_one_that_waits_in_vain_is(tmp_path: Path) -> None:
    async def works(asked: ScriptedRun) -> None:
        await asked.train(await rows_of(asked))
        await asyncio.sleep(1000.0)  # three times the watchdog's limit
        await asked.publish()

    assert scripted(works, tmp_path).problems() == []

    async def scorer_that_never_answers(link: MemoryLink, **_: Any) -> None:
        link.send(ScorerReady(scorer_id=0, process_id=0, num_slots=4))
        await peers.beat(link)

    with pytest.raises(Stalled, match=r"script waits for call 2, score since 3\d\d s\n"):
        scripted(works, tmp_path, cast=Cast(scorer=scorer_that_never_answers))


def test_a_config_that_asks_for_several_nodes_is_told_what_a_script_can_have() -> None:
    asks = config(slurm={"trainer_nodes": 2, "engine_nodes": 1}, trainer={"ranks": 2}, kubernetes={"gpus_per_node": 1})
    (found,) = (one for one in not_in_scripts(asks) if one.level is Level.FAIL)
    assert str(found) == (
        "slurm: asks for 3 nodes, and a script starts all its processes on one machine; leave slurm.trainer_nodes, slurm.engine_nodes"
        " out, and start it on a machine with GPUs for all, or run the config without a script: `pipelinerl slurm`"
    )
    assert not [one for one in not_in_scripts(config()) if one.level is Level.FAIL]


def test_a_script_whose_engines_take_turns_in_part_is_told_why_not() -> None:
    asks = config(engine={"apart": 1}, pipeline={"placement": "colocated"})
    (found,) = (one for one in not_in_scripts(asks) if one.level is Level.FAIL)
    assert str(found).startswith("engine.apart: is 1, and a script may await what an engine has that sleeps until the script itself")
