"""The sbatch script: what is rendered is what stands in scripts/slurm, one owner of the requeue, nothing killed by name."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import Config
from pipelinerl.config.file import load, load_run, parse
from pipelinerl.errors import ConfigError
from pipelinerl.launch.placement import nodes_of, roles_on
from pipelinerl.launch.slurm.script import OWNED, render
from pipelinerl.launch.slurm.submit import prepare
from pipelinerl.runtime.parts import share_of

pytestmark = pytest.mark.process

TEMPLATES = Path(__file__).parents[2] / "scripts" / "slurm"
ROLES = ["orchestrator", "engines", "scorer-0", "trainer"]


def config(**slurm: Any) -> Config:
    tree = {"model": {"path": "m"}, "data": {"source": "p.jsonl"}, "reward": [{"function": "r:f"}], "engine": {"count": 4}, "slurm": slurm}
    return parse(tree, origin="test")


def script(**slurm: Any) -> str:
    return render(config(**slurm), run_folder=Path("runs/a run"), python="python")


def test_engines_on_nodes_of_another_kind_are_a_component_of_their_own():
    text = script(engine_nodes=2, scorer_nodes=1, gpus_per_node=8, engine_gpus_per_node=4, engine_options=["--partition=l40s"])
    asked = [line for line in text.splitlines() if re.search(r"hetjob|--nodes|--gpus-per|--partition", line)]
    assert [line.removeprefix("#SBATCH ") for line in asked] == [
        *("--nodes=1", "--gpus-per-node=8"),
        *("hetjob", "--nodes=2", "--gpus-per-node=4", "--partition=l40s"),
        *("hetjob", "--nodes=1"),
    ]
    assert "srun --kill-on-bad-exit=1 --het-group=0,1,2 " in text
    assert "scontrol requeue" not in text
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    assert script(engine_nodes=2, gpus_per_node=8, engine_options=["--constraint=l40s"]).count("hetjob") == 1
    with pytest.raises(ConfigError, match=r"slurm\.engine_options: '--nodes=3' cannot be used"):
        script(engine_nodes=2, engine_options=["--nodes=3"])


@pytest.mark.parametrize("key", ["engine_gpus_per_node", "engine_options"])
def test_what_engines_alone_would_have_is_refused_where_they_are_on_the_first_node(key: str):
    with pytest.raises(ConfigError, match=f"slurm.{key} is set, but slurm.engine_nodes is 0"):
        config(**{key: 4 if key.startswith("engine_gpus") else ["--partition=l40s"]})


@pytest.mark.parametrize("name", ["one-node", "many-nodes", "cpu-scorers", "chain"])
def test_the_templates_are_what_is_rendered(name: str):
    rendered = render(load(TEMPLATES / f"{name}.toml"), run_folder=Path("runs") / name, python="python")
    assert rendered == (TEMPLATES / f"{name}.sbatch").read_text()


def test_a_time_needs_no_quotes(tmp_path: Path):
    for written, expected in (("04:00:00", "04:00:00"), ("90", "90"), ('"1-12"', "1-12")):
        assert f"--time={expected}\n" in render(
            load(TEMPLATES / "one-node.toml", overrides=[f"slurm.time={written}"]), run_folder=tmp_path, python="python"
        )


@pytest.mark.parametrize("at_limit", ["requeue", "chain", "end"])
def test_every_script_is_valid_shell(at_limit: str):
    subprocess.run(["bash", "-n"], input=script(at_limit=at_limit, engine_nodes=1, scorer_nodes=1), text=True, check=True)


def test_a_heterogeneous_job_is_submitted_again_and_never_requeued():
    text = script(scorer_nodes=1)
    assert "scontrol requeue" not in text
    assert "#SBATCH --no-requeue" in text
    assert text.count("$(sbatch ") == 1
    assert "sbatch " not in script(scorer_nodes=1, at_limit="end").replace("#SBATCH", "").replace(".sbatch", "").partition("set -uo")[2]


def test_the_requeue_has_one_owner():
    assert script().count("scontrol requeue") == 1
    for at_limit in ("chain", "end"):
        assert "scontrol requeue" not in script(at_limit=at_limit)
        assert "#SBATCH --no-requeue" in script(at_limit=at_limit)


@pytest.mark.parametrize("option", [f"--{name}=1" for name in OWNED] + ["--requeue", "-p main"])
def test_options_that_the_script_sets_itself_are_refused(option: str):
    with pytest.raises(ConfigError, match=re.escape(option)):
        script(options=(option,))


def test_the_signal_leaves_time_to_save_though_slurm_may_send_it_a_minute_early():
    assert "#SBATCH --signal=B:USR1@360" in script(save_s=300)


def test_nothing_is_killed_by_name_and_no_port_is_fixed():
    text = script(engine_nodes=2, scorer_nodes=1)
    assert not re.findall(r"pkill|killall|MASTER_PORT|29500", text)
    assert re.findall(r"\bkill (.*?) 2>", text) == ['-0 "$step"'], "whether our own step lives; nobody is signalled"


@pytest.mark.parametrize(
    ("slurm", "expected"),
    [
        ({}, [ROLES]),
        ({"engine_nodes": 1}, [["orchestrator", "scorer-0", "trainer"], ["engines"]]),
        ({"scorer_nodes": 1}, [["orchestrator", "engines", "trainer"], ["scorer-0"]]),
        ({"engine_nodes": 1, "scorer_nodes": 1}, [["orchestrator", "trainer"], ["engines"], ["scorer-0"]]),
    ],
)
def test_processes_go_to_the_nodes_of_their_kind(slurm: dict[str, int], expected: list[list[str]]):
    nodes = nodes_of(config(**slurm).slurm)
    assert nodes.count == len(expected)
    assert [roles_on(node, ROLES, nodes) for node in range(nodes.count)] == expected


def test_numbered_processes_are_dealt_out_over_their_nodes():
    nodes = nodes_of(config(engine_nodes=2).slurm)
    names = ["orchestrator", *(f"engines-{number}" for number in range(4))]
    assert [roles_on(node, names, nodes) for node in (1, 2)] == [["engines-0", "engines-2"], ["engines-1", "engines-3"]]


def test_nodes_without_work_and_ranks_that_do_not_spread_evenly_are_refused():
    tree = {"model": {"path": "m"}, "data": {"source": "p.jsonl"}, "reward": [{"function": "r:f"}]}
    for section, words in (({"engine_nodes": 2}, "engine.count is 1: nodes would idle"), ({"trainer_nodes": 2}, "trainer.ranks is 1")):
        with pytest.raises(ConfigError, match=words):
            parse(tree | {"slurm": section}, origin="test")


def test_over_several_nodes_engines_and_ranks_are_split_and_each_node_starts_its_part(tmp_path: Path):
    tree = {"model": {"path": "m"}, "data": {"source": "p.jsonl"}, "reward": [{"function": "r:f"}], "run": {"folder": str(tmp_path)}}
    tree |= {"engine": {"count": 5}, "trainer": {"ranks": 4}, "slurm": {"trainer_nodes": 2, "engine_nodes": 2}}
    run_folder = prepare(parse(tree, origin="test")).parent
    roles = {role["name"]: role["command"] for role in json.loads((run_folder / "roles.json").read_text())}
    nodes = nodes_of(load_run(run_folder).slurm)
    assert [roles_on(node, list(roles), nodes) for node in range(nodes.count)] == [
        ["orchestrator", "scorer-0", "trainer-0"],
        ["trainer-1"],
        ["engines-0"],
        ["engines-1"],
    ]
    assert roles["engines-1"][-2:] == roles["trainer-1"][-2:] == ["--part", "1/2"]
    assert [list(share_of(part, count=5)) for part in ("0/2", "1/2", None)] == [[0, 1], [2, 3, 4], [0, 1, 2, 3, 4]]
