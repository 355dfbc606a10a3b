"""Rollouts that are sent one by one, and groups that are cut by coins, in whole simulated runs: no promise breaks, whoever is killed."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.advantages import MethodAdvantages
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from tests.sim.chaos import Faults, survive
from tests.sim.peers import World
from tests.sim.run import config, run

ALL: dict[str, Any] = {"dispatch": "longest_first", "routing": "least_loaded", "kv_admission": True}
PARTS: dict[str, dict[str, Any]] = {
    "longest first": {"dispatch": "longest_first"},
    "least loaded": {"routing": "least_loaded"},
    "KV admission": {"kv_admission": True},
    "all, in rounds": ALL | {"mode": "sync"},
}


@pytest.mark.parametrize("part", PARTS)
def test_rollouts_sent_one_by_one_break_no_promise_and_the_rule_tells_of_itself(tmp_path: Path, part: str):
    simulated = run(config(pipeline=PARTS[part]), folder=tmp_path, world=World(kv_tokens=400, token_s=1e-5, prefill_s=2e-4))
    assert simulated.problems() == []
    assert simulated.ending.reason == "finished"
    told = [line["dispatch"] for line in simulated.lines if line["kind"] == "status"][-1]
    assert told["num_dispatched"] >= 10 * 8 * 4
    names = {"longest first": "length_tokens", "least loaded": "num_at_home", "KV admission": "kv_room_tokens"}
    for other, name in names.items():
        assert (name in told) == (other == part or part == "all, in rounds")


def test_no_engine_is_sent_more_than_its_part(tmp_path: Path):
    simulated = run(config(pipeline={"dispatch": "longest_first", "max_running": 10}), folder=tmp_path, world=World())
    assert simulated.problems() == []
    gauges = [engine for line in simulated.lines if line["kind"] == "status" for engine in line["engines"]]
    held = [engine["num_running"] + engine["num_waiting"] for engine in gauges]
    assert max(held) == 5


def cut(**sections: Any) -> Config:
    algorithm = {"name": "rloo_early_stop", "overrides": {"aggregation": "seq-mean-token-sum-norm"}}
    rollout = {"group_size": 6, "cut_after": 4, "cut_keep_probability": 0.25}
    return config(rollout=rollout, algorithm=algorithm, trainer={"steps": 12}, **sections)


EVERYBODY = Faults(seed=3, until_s=60.0, engine_s=5.0, scorer_s=5.0, trainer_s=6.0, orchestrator_s=8.0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "faults"),
    [(cut(), Faults()), (cut(pipeline=ALL), Faults()), (cut(pipeline=ALL), EVERYBODY)],
    ids=["alone", "with dispatch", "with dispatch, and everybody is killed"],
)
def test_the_last_of_a_group_are_stopped_by_coins_and_those_that_go_on_weigh_for_them(tmp_path: Path, settings: Config, faults: Faults):
    rule = MethodAdvantages(method_of(settings), settings.reward)
    survived = survive(settings, folder=tmp_path, faults=faults, world=World(token_s=1e-3), group_advantages=rule)
    assert survived.problems() == []
    assert survived.ending.reason == "finished"
    with sqlite3.connect(tmp_path / "ledger.sqlite") as ledger:
        said = ledger.execute("SELECT rollout_id, attempt, data FROM events WHERE kind = 'early_stop'").fetchall()
        last = dict(ledger.execute("SELECT rollout_id, max(attempt) FROM events WHERE kind = 'issued' GROUP BY rollout_id").fetchall())
        cut_off = {name for (name,) in ledger.execute("SELECT rollout_id FROM events WHERE kind = 'generated' AND reason = 'cancelled'")}
    decided = {name: json.loads(data) for name, attempt, data in said if attempt == last[name]}
    stopped = {name for name, data in decided.items() if data["stops"]}
    weights = survived.disk.record.weights
    assert weights == {name: pytest.approx(4.0 if name in decided else 1.0) for name in weights}
    assert not stopped & weights.keys(), "what was stopped trains nothing"
    assert len(stopped) > 20
    assert len(cut_off) > len(stopped) / 2, "engines are told while they write"
    fates = {row[0] for row in survived.rows}
    mean = np.mean([(0.0 if decided[name]["stops"] else 4.0) if name in decided else 1.0 for name in fates])
    assert mean == pytest.approx(1.0, abs=0.2)
