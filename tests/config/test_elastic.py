"""Runs whose devices cannot change what they do are refused when their settings are read, by name."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.controller import not_in_scripts
from orchestrator.elastic import drain_s_of
from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.config.scaling import elastic_sizes
from pipelinerl.errors import ConfigError
from pipelinerl.launch.node_roles import check_gpus, record_roles
from pipelinerl.launch.preflight import Level


def settings(**sections: dict[str, Any]) -> Config:
    tree: dict[str, Any] = {
        "model": {"path": "unused"},
        "data": {"source": "unused"},
        "reward": [{"function": "unused:reward"}],
        "engine": {"kind": "fake", "count": 3},
        "pipeline": {"elastic": True},
    }
    return parse(
        {name: {**tree.get(name, {}), **sections.get(name, {})} if name != "reward" else tree[name] for name in tree | sections}, origin=""
    )


def test_three_engines_and_a_rank_may_change_what_they_do():
    assert settings().pipeline.elastic


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"pipeline": {"placement": "colocated"}}, 'pipeline.placement is "colocated"'),
        ({"weights": {"transport": "sharded"}}, 'weights.transport is "sharded"'),
        ({"lora": {"rank": 4}}, "lora.rank is 4"),
        ({"pipeline": {"mode": "sync"}}, 'pipeline.mode is "sync": engines and trainer wait for each other'),
        ({"engine": {"elsewhere": 1}}, "engine.elsewhere is 1: no rank can be started there"),
        ({"engine": {"cores": [0, 1, 2]}}, "engine.cores names a core for each process"),
        ({"trainer": {"cores": [0]}}, "trainer.cores names a core for each process"),
        ({"prm": {"path": "prm", "cores": [0]}}, "prm.cores names a core for each process"),
        ({"engine": {"count": 1}}, "engine.count is 1 and trainer.ranks is 1: neither can give any away"),
        (
            {"trainer": {"ranks": 2, "parallel": {"shard": 2}}},
            "engine.count is 3: 2 devices change together (engines of 1 ranks, 2 ranks of the trainer), which hold 2 engines",
        ),
    ],
)
def test_runs_whose_devices_cannot_change_are_refused(sections: dict[str, Any], said: str):
    with pytest.raises(ConfigError) as error:
        settings(**sections)
    assert "pipeline.elastic is true" in str(error.value)
    assert said in str(error.value)


def test_where_all_ranks_share_one_copy_one_of_them_changes_and_those_that_a_run_begins_with_stay():
    sharded = settings(trainer={"ranks": 2, "parallel": {"shard": "all"}})
    assert sharded.trainer.least_ranks == 2
    assert settings(trainer={"ranks": 3, "min_ranks": 2, "parallel": {"shard": "all"}}).trainer.least_ranks == 2
    assert settings(trainer={"ranks": 3}).trainer.least_ranks == 1
    with pytest.raises(ConfigError, match=r"engine\.count is 1 and trainer\.ranks is 2: neither can give any away"):
        settings(engine={"count": 1}, trainer={"ranks": 2, "parallel": {"shard": "all"}})
    with pytest.raises(ConfigError, match=r"trainer\.min_ranks is 3 but trainer\.ranks is 2: lower it"):
        settings(trainer={"ranks": 2, "min_ranks": 3})


def test_units_hold_whole_engines_of_every_size_that_is_named():
    assert settings(engine={"count": 4}, pipeline={"elastic": True, "elastic_tensor_parallel_sizes": [2]}).engine.count == 4
    one = settings(engine={"count": 2}, pipeline={"elastic": True, "elastic_tensor_parallel_sizes": [2]})
    assert elastic_sizes(one.engine, one.pipeline) == (1, 2), "one unit, whose engines get other ranks"
    said = r"engine\.count is 3: 2 devices change together \(engines of 1 or 2 ranks, 1 ranks of the trainer\), which hold 2 engines"
    with pytest.raises(ConfigError, match=said):
        settings(pipeline={"elastic": True, "elastic_tensor_parallel_sizes": [2]})


def test_runs_over_the_nodes_of_a_job_are_refused_before_they_are_submitted(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"pipeline\.elastic is true, but the processes of this run are dealt to the nodes of a job"):
        check_gpus(settings(), settings().slurm, key="slurm")
    with pytest.raises(ConfigError, match=r"pipeline\.elastic is true"):
        record_roles(settings(), settings().ray, tmp_path)


def test_scripts_keep_their_engines_and_ranks():
    found = [one for one in not_in_scripts(settings()) if one.level is Level.FAIL]
    assert [one.what for one in found] == ["pipeline.elastic"]


@pytest.mark.parametrize(
    ("sections", "seconds"),
    [
        ({}, 0.0),
        ({"environment": {"function": "unused:reply"}}, 60.0),
        ({"prm": {"path": "unused", "separator": "="}}, 60.0),
        ({"rollout": {"cut_after": 2}}, 60.0),
        ({"rollout": {"structured_outputs": [{"regex": "a+"}]}, "trainer": {"max_logprob_gap": 100, "max_mismatch_kl": 100}}, 60.0),
    ],
)
def test_leaving_engines_have_time_where_what_they_have_would_begin_anew(sections: dict[str, Any], seconds: float):
    assert drain_s_of(settings(**sections)) == seconds
