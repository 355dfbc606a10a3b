"""A script trains steps by other losses than the run's, on demonstrations, and reads log-probabilities: exactly once, through kills."""

from __future__ import annotations

import contextlib
import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.rollouts.micro_batch import micro_batch_of
from orchestrator.rules.validation.trainer import logprobs_computed
from orchestrator.scripted_run import ScriptedRun
from pipelinerl.messages import ComputeLogprobs, LogprobModel, LogprobsComputed
from tests.orchestrator import handmade
from tests.sim.chaos import Faults, survive
from tests.sim.peers import World
from tests.sim.run import config
from tests.sim.test_script import KILLS, rows_of, scripted

REFERENCE: dict[str, Any] = {"reference": {"path": "unused"}}


async def mixed(asked: ScriptedRun) -> None:
    """Every third step is of demonstrations, every third by another loss."""
    while asked.step < asked.num_steps:
        if asked.step % 3 == 0:
            await asked.sft([{"prompt": [3, asked.step], "completion": [4, number, 9]} for number in range(5)])
        else:
            await asked.train(await rows_of(asked, 3), loss="gspo" if asked.step % 3 == 1 else None)
        await asked.publish()


def test_each_step_has_the_loss_that_the_script_names_and_demonstrations_arrive_whole(tmp_path: Path) -> None:
    simulated = scripted(mixed, tmp_path, settings=REFERENCE, is_recorded=True)
    assert simulated.problems() == []
    assert [simulated.record.losses[step] for step in range(4)] == [{"sft"}, {"gspo"}, {""}, {"sft"}]
    closed = simulated.record.sealed[3]
    assert [one.token_ids.tolist() for one in closed.demonstrations] == [[3, 3, 4, number, 9] for number in range(5)]
    assert (closed.num_micro_batches, closed.num_tokens, closed.num_samples) == (0, 15, 5)
    with contextlib.closing(sqlite3.connect(tmp_path / "ledger.sqlite")) as ledger:
        said = [json.loads(data or "{}") for (data,) in ledger.execute("SELECT data FROM events WHERE kind = 'closed' ORDER BY step")]
    assert [one.get("loss") for one in said] == ["sft", "gspo", None, "sft"]
    assert said[0]["num_demonstrations"] == 5
    assert said[0]["digest"] != said[3]["digest"]
    steps = [line for line in simulated.lines if line["kind"] == "step"]
    assert ["reward_mean" in line for line in steps] == [False, True, True, False], "no reward is not a reward of 0"


def test_log_probabilities_are_of_each_rollouts_own_tokens_in_the_order_asked_for(tmp_path: Path) -> None:
    async def script(asked: ScriptedRun) -> None:
        rollouts = await asked.sample(asked.prompts(9))  # more than one row
        assert sum(one.num_tokens for one in rollouts) > 2 * 256
        for model, age in (("reference", 0), ("policy", 0), ("policy", 1)):
            if age:
                await asked.sft([{"prompt": [3], "completion": [4]}])
            found = await asked.logprobs(rollouts[::-1], model=model)  # pyright: ignore[reportArgumentType]
            for one, column in zip(rollouts[::-1], found, strict=True):
                expected = np.where(one.loss_mask, -(one.token_ids + 1.0 + 1000.0 * age), 0.0)
                np.testing.assert_array_equal(column, expected.astype(np.float32))
        assert await asked.logprobs([]) == []

    assert scripted(script, tmp_path, settings=REFERENCE).problems() == []


@pytest.mark.slow
@pytest.mark.parametrize("who", ["trainer", "script", "everything"])
def test_losses_and_demonstrations_of_steps_survive_whoever_is_killed(tmp_path: Path, who: str) -> None:
    async def script(asked: ScriptedRun) -> None:
        while asked.step < asked.num_steps:
            step = asked.step
            if step % 3 == 0:
                await asked.sft([{"prompt": [3, step], "completion": [4, number, 9]} for number in range(5)])
            else:
                rows = await rows_of(asked, 3)
                for model in LogprobModel:
                    for row, column in zip(rows, await asked.logprobs([row.trajectory for row in rows], model=model), strict=True):
                        assert np.count_nonzero(column) == row.trajectory.num_trained_tokens
                await asked.train(rows, loss="gspo" if step % 3 == 1 else None)
            if asked.step > asked.version:
                await asked.publish()

    faults = Faults(seed=2, until_s=30.0, **KILLS[who])
    settings = config(trainer={"steps": 24}, pipeline={"max_staleness": 1}, **REFERENCE)
    survived = survive(settings, folder=tmp_path, faults=faults, world=World(token_s=4e-3), script=script)
    assert survived.problems() == []
    assert survived.disk.version == 24
    assert survived.kills
    assert [survived.disk.record.losses[step] for step in range(24)] == [{"sft"}, {"gspo"}, {""}] * 8


def test_an_answer_of_another_shape_or_of_no_log_probabilities_is_refused() -> None:
    asked = ComputeLogprobs(request_id=3, model=LogprobModel.POLICY, rows=(micro_batch_of((handmade.sample(5),), step=0, index=0),))
    num = int(asked.rows[0].loss_mask.sum())
    for request_id, values, is_refused in (
        (3, [-1.0] * num, False),
        (3, [-1.0] * (num + 1), True),
        (3, [-1.0] * (num - 1) + [0.1], True),
        (3, [-1.0] * (num - 1) + [np.nan], True),
        (2, [0.1], False),  # nobody waits for it
    ):
        said = LogprobsComputed(request_id=request_id, logprobs=np.array(values, np.float32))
        assert (logprobs_computed(said, asked=asked) is not None) == is_refused, values
