"""A script's rollouts are scored by the stages of every run: comparisons of siblings, scores of steps, coins that stop rollouts early."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import json
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.advantages import MethodAdvantages
from orchestrator.rules.batch import Filtered, Siblings, sample_of
from orchestrator.scripted_run import ScriptedRun
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.errors import ScriptError
from pipelinerl.messages import Finish, Outcome, Sample
from tests.sim.chaos import Faults, Survived, survive
from tests.sim.peers import World
from tests.sim.run import config, run
from tests.sim.test_group_rewards import compared
from tests.sim.test_prm_scoring import credit, followed
from tests.sim.test_script import grpo

WORLD = World(token_s=2e-3, bad_score_fraction=0.02)
STOPS = {"algorithm": {"name": "rloo_early_stop", "overrides": {"aggregation": "seq-mean-token-sum-norm"}}}
ONE_BEHIND: dict[str, Any] = {"max_staleness": 1}
KILLS: dict[str, dict[str, Any]] = {
    "script": {"orchestrator_s": 2.0},
    "everything": {"engine_s": 3.0, "scorer_s": 3.0, "prm_s": 3.0, "trainer_s": 4.0, "orchestrator_s": 4.0},
}


def both(**sections: Any) -> Config:
    """A process reward model, and rewards that compare siblings."""
    settings = followed(pipeline=ONE_BEHIND, **sections)
    return settings.model_copy(update={"reward": compared().reward})


def places(survived: Survived) -> list[list[float]]:
    """The rewards of each group that trained, in order."""
    trained = collections.defaultdict[int, list[float]](list)
    for row in survived.rows:
        if row[3] == "trained":
            trained[row[1]].append(float(row[6]))
    return [sorted(rewards) for rewards in trained.values()]


@pytest.mark.parametrize("group", [4, 2])
def test_siblings_are_compared_once_all_are_there_however_many_they_are(tmp_path: Path, group: int) -> None:
    async def script(asked: ScriptedRun) -> None:
        while asked.step < asked.num_steps:
            scored = await asked.score(asked.sample(asked.prompts(3), group=group))
            assert [one.score.components.keys() for one in scored] == [{"reward", "rank"}] * 3 * group
            await asked.train(asked.advantages(scored))
            await asked.publish()

    found = survive(compared(steps=3), folder=tmp_path, faults=Faults(), script=script)
    assert found.problems() == []
    for rewards in places(found):
        assert len(rewards) == group
        assert all(0.0 <= reward - place <= 1.0 for place, reward in enumerate(rewards)), "its own 0 or 1, and its place"


@pytest.mark.slow
@pytest.mark.parametrize("replays", [False, True], ids=["goes on", "replays"])
@pytest.mark.parametrize("who", KILLS)
def test_steps_and_comparisons_of_a_script_survive_whoever_is_killed_and_count_once(tmp_path: Path, who: str, replays: bool) -> None:
    steps: list[float] = []

    async def script(asked: ScriptedRun) -> None:
        steps.clear()
        ahead = asked.score(asked.sample(asked.prompts(6)))
        while asked.step < asked.num_steps:
            scored = await ahead
            steps.extend(float(one.steps.scores.sum()) for one in scored if one.steps is not None)
            rows = asked.advantages(scored)
            prompts = [] if asked.step + 1 == asked.num_steps else asked.prompts(6)
            ahead = asked.score(asked.sample(prompts, step=asked.step + 1))
            await asyncio.sleep(0.5)  # some of those ahead are scored by then, and some of these compared
            await asked.train(rows)
            await asked.publish()
        assert not await ahead

    faults = Faults(seed=3, until_s=30.0, **KILLS[who])
    settings = both(trainer={"steps": 20})
    world = dataclasses.replace(WORLD, score_s=0.2, prm_s=0.1)
    found = survive(settings, folder=tmp_path, faults=faults, world=world, group_advantages=credit, script=script, replays=replays)
    assert found.problems() == []
    assert found.disk.version == 20
    assert found.kills["orchestrator"] >= 2
    assert len(steps) > 20 * 24 * 0.8 if replays else steps, "a script that is led through its calls reads all scores of steps again"
    assert places(found)


def test_the_advantages_of_a_scripts_rollouts_are_those_of_the_pipeline(tmp_path: Path) -> None:
    settings = both(trainer={"steps": 3}, algorithm={"name": "step_reinforce"}, batch={"groups_per_step": 3})
    settings = settings.model_copy(update={"pipeline": settings.pipeline.model_copy(update={"max_staleness": 0})})

    def noted(into: dict[str, np.ndarray]) -> Callable[[Siblings], list[np.ndarray] | Filtered]:
        rule = MethodAdvantages(method_of(settings), settings.reward)

        def advantages(siblings: Siblings) -> list[np.ndarray] | Filtered:
            columns = rule(siblings)
            assert isinstance(columns, list)
            into.update({one.trajectory.rollout_id: column for one, column in zip(siblings, columns, strict=True)})
            return columns

        return advantages

    of_script: dict[str, np.ndarray] = {}
    of_pipeline: dict[str, np.ndarray] = {}
    found = run(settings, folder=tmp_path / "script", script=grpo, group_advantages=noted(of_script))
    assert found.problems() == []
    assert run(settings, folder=tmp_path / "pipeline", group_advantages=noted(of_pipeline)).problems() == []
    assert of_script.keys() == of_pipeline.keys()
    assert len(of_script) == 3 * 3 * 4
    for name, column in of_script.items():
        np.testing.assert_array_equal(column, of_pipeline[name])
    assert max(len(set(column.tolist())) for column in of_script.values()) > 2, "of steps, not of the whole"


def test_a_rollout_that_the_script_leaves_unscored_or_scores_itself_needs_no_steps_and_no_comparison(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        while asked.step < asked.num_steps:
            first, *others = await asked.sample(asked.prompts(2))
            assert len(others) == 7
            await asked.train([Sample(trajectory=first, reward=0.5, advantages=first.loss_mask.astype(np.float32))])
            await asked.publish()
        prm = asked._run.pipeline.prm
        assert prm is not None
        assert {name.partition("/")[0] for name in prm._traces} <= {"5"}, "what is over is forgotten"

    found = survive(both(trainer={"steps": 3}), folder=tmp_path, faults=Faults(), world=WORLD, script=script)
    assert found.problems() == []
    reasons = collections.Counter((row[3], row[4]) for row in found.rows)
    stale = ("stale", "oldest token over 1 versions old")
    assert reasons == {("trained", ""): 3, ("filtered", "the script left it out"): 9, stale: 8, ("cancelled", "the run ended"): 4}


async def compares_some(asked: ScriptedRun) -> None:
    rollouts = await asked.sample(asked.prompts(1))
    asked.score(rollouts[:3])


async def compares_some_of_a_stream(asked: ScriptedRun) -> None:
    async def without_the_first():
        _, *others = await asked.sample(asked.prompts(1))
        for one in others:
            yield one

    await asked.score(without_the_first())


@pytest.mark.parametrize("script", [compares_some, compares_some_of_a_stream])
def test_siblings_that_are_missing_in_a_comparison_are_named(tmp_path: Path, script: Any) -> None:
    with pytest.raises(ExceptionGroup) as raised:
        run(compared(), folder=tmp_path, script=script, limit_s=200.0)
    (error,) = raised.value.exceptions
    assert isinstance(error, ScriptError)
    assert "3 of the 4 siblings of group 0 are given, and a reward compares all of them" in str(error)


# --- rollouts that are stopped early ----------------------------------------------------------------------------------------------


def stopping(*, below: float = 0.1, keep: float = 0.25) -> Config:
    stop = {"threshold": below, "keep_probability": keep, "min_steps": 1, "max_false_stop_fraction": 1.0}
    prm = {"path": "unused", "chunk_tokens": 3, "early_stop": stop}
    return config(prm=prm, trainer={"steps": 12}, pipeline=ONE_BEHIND, **STOPS)


def cutting() -> Config:
    rollout = {"group_size": 4, "max_tokens": 64, "cut_after": 2, "cut_keep_probability": 0.25}
    return config(rollout=rollout, trainer={"steps": 12}, pipeline=ONE_BEHIND, **STOPS)


@pytest.mark.slow
@pytest.mark.parametrize("who", ["nobody", "script", "everything"])
@pytest.mark.parametrize("settings", [stopping(), cutting()], ids=["by their steps", "by their siblings"])
def test_stopped_rollouts_of_a_script_are_counted_and_survivors_weigh_for_them(tmp_path: Path, settings: Config, who: str) -> None:
    rule = MethodAdvantages(method_of(settings), settings.reward)
    faults = Faults(seed=2, until_s=30.0, **KILLS.get(who, {}))
    seen = collections.Counter[Outcome]()

    async def script(asked: ScriptedRun) -> None:
        ahead = asked.sample(asked.prompts(6)) if asked.step < asked.num_steps else None
        while ahead is not None:
            scored = await asked.score(await ahead)
            seen.update(one.score.outcome for one in scored)
            stopped = {one.trajectory.rollout_id for one in scored if one.score.outcome is Outcome.STOPPED}
            assert all(one.early_stop is not None and one.early_stop.stops for one in scored if one.trajectory.rollout_id in stopped)
            rows = asked.advantages(scored)
            assert not stopped & {row.trajectory.rollout_id for row in rows}
            ahead = asked.sample(asked.prompts(6)) if asked.step + 1 < asked.num_steps else None
            await asked.train(rows)
            await asked.publish()

    survived = survive(settings, folder=tmp_path, faults=faults, world=World(token_s=2e-3), group_advantages=rule, script=script)
    assert survived.problems() == [], "the checker holds coins, reasons and the samples of each step against each other"
    assert survived.disk.version == 12
    assert seen[Outcome.STOPPED] > 10
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:
        said = ledger.execute("SELECT rollout_id, data FROM events WHERE kind = 'early_stop' ORDER BY seq").fetchall()
        cut_off = {name for (name,) in ledger.execute("SELECT rollout_id FROM events WHERE kind = 'generated' AND reason = 'cancelled'")}
    flags = {name: json.loads(data) for name, data in said}
    weights = survived.disk.record.weights
    assert set(weights.values()) == {1.0, 4.0}
    if who == "nobody":
        assert weights == {name: pytest.approx(4.0 if name in flags else 1.0) for name in weights}
        stopped = {name for name, flag in flags.items() if flag["stops"]}
        assert cut_off <= stopped, "engines are told while they write"
        assert len(cut_off) > len(stopped) / 2
        assert not stopped & weights.keys()


def test_groups_of_which_all_was_stopped_take_their_place_in_the_step(tmp_path: Path) -> None:
    settings = stopping(below=2.0, keep=1e-6)
    rule = MethodAdvantages(method_of(settings), settings.reward)

    async def script(asked: ScriptedRun) -> None:
        for _ in range(3):
            scored = await asked.score(asked.sample(asked.prompts(8), group=2))
            rows = asked.advantages(scored)
            whole = {one.trajectory.group_id for one in scored} - {row.trajectory.group_id for row in rows}
            assert len(whole) > 2
            assert {one.score.outcome for one in scored if one.trajectory.group_id in whole} == {Outcome.STOPPED}
            await asked.train(rows)
            await asked.publish()

    found = survive(settings, folder=tmp_path, faults=Faults(), world=World(token_s=1e-3), group_advantages=rule, script=script)
    assert found.problems() == []
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:
        sizes = ledger.execute("SELECT num_samples FROM events WHERE kind = 'closed' ORDER BY step").fetchall()
    assert sizes == [(16,), (16,), (16,)], "sums are divided by all that were started"


def test_what_a_coin_decided_is_not_left_out_of_account(tmp_path: Path) -> None:
    settings = cutting()
    rule = MethodAdvantages(method_of(settings), settings.reward)

    async def script(asked: ScriptedRun) -> None:
        rollouts = await asked.sample(asked.prompts(6))
        own = [
            Sample(trajectory=one, reward=1.0, advantages=one.loss_mask.astype(np.float32)) for one in rollouts if one.num_trained_tokens
        ]
        with pytest.raises(ScriptError, match=r"was not scored, and its score says what it weighs.*Have it scored first"):
            await asked.train(own)
        scored = await asked.score(rollouts)
        stopped = next(one.trajectory for one in scored if one.score.outcome is Outcome.STOPPED)
        with pytest.raises(ScriptError, match=r"was stopped early, and the others weigh for it\. Leave it out of the rows"):
            await asked.train([row for row in own if row.trajectory is stopped])
        kept = next(one for one in scored if one.weight == 4.0)
        with pytest.raises(ScriptError, match="the reward stays what was scored"):
            await asked.train([row for row in own if row.trajectory is kept.trajectory])
        await asked.train(asked.advantages(scored))
        whole = [one for one in await asked.sample(asked.prompts(6)) if one.finish is not Finish.CANCELLED]
        assert len(whole) < 20
        marks = [one for one in await asked.score(whole) if one.score.reward is not None]
        await asked.train([sample_of(one, one.trajectory.loss_mask.astype(np.float32)) for one in marks])

    found = survive(settings, folder=tmp_path, faults=Faults(), script=script, group_advantages=rule)
    assert found.problems() == []
