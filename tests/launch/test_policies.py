"""The folders, processes and GPUs of a run of several policies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import Config
from pipelinerl.config.file import load_run, parse
from pipelinerl.config.policies import PolicySettings, policies_of
from pipelinerl.errors import ConfigError
from pipelinerl.launch import resuming
from pipelinerl.launch.policies import make_folders, make_ready, place_policies, roles_of_policy, settings_in
from pipelinerl.launch.run_folder import SCRIPT_FILE, folder_of_policy, policy_folders
from pipelinerl.runtime.devices import Gpu

GPUS = [Gpu(index=index, uuid=f"GPU-{index}", name="H100", total_bytes=80 << 30, free_bytes=79 << 30) for index in range(8)]


def config_of(tmp_path: Path, policies: dict[str, Any], **sections: Any) -> Config:
    base = {"run": {"folder": str(tmp_path)}, "model": {"path": "m"}, "data": {"source": "s"}, "reward": [{"function": "a.py:b"}]}
    return parse({**base, **sections, "policies": policies}, origin="test")


def dealt(config: Config, num_gpus: int) -> dict[str, dict[str, list[int]]]:
    placed = place_policies(policies_of(config), Path("RUN"), GPUS[:num_gpus])
    return {name: {who: [gpu.index for gpu in gpus] for who, gpus in placement.taken.items()} for name, (_, placement) in placed.items()}


def test_each_policy_has_processes_in_a_folder_of_its_own_and_a_frozen_one_engines_alone(tmp_path: Path):
    policies = policies_of(config_of(tmp_path, {"alice": {}, "judge": {"frozen": True}}))
    roles = {one.name: [role.name for role in roles_of_policy(one, Path("RUN"))] for one in policies}
    assert roles == {"alice": ["engines", "scorer-0", "trainer"], "judge": ["engines"]}
    (engines,) = roles_of_policy(policies[1], Path("RUN"))
    assert engines.command[-2:] == ("--run-folder", "RUN/policies/judge")


def test_gpus_are_dealt_over_policies_and_what_one_names_is_left_out_of_what_the_others_get(tmp_path: Path):
    policies = {"alice": {"engine": {"count": 2}}, "bob": {"engine": {"gpus": [0]}}, "judge": {"frozen": True}}
    assert dealt(config_of(tmp_path, policies), 6) == {
        "alice": {"engine-0": [1], "engine-1": [2], "trainer": [3]},
        "bob": {"engine-0": [0], "trainer": [4]},
        "judge": {"engine-0": [5]},
    }
    placed = place_policies(policies_of(config_of(tmp_path, policies)), Path("RUN"), GPUS[:6])
    assert placed["judge"][0][0].command[-2:] == ("--gpus", "GPU-5")


def test_policies_that_share_gpus_share_what_the_others_leave(tmp_path: Path):
    shares = {"engine": {"shares_gpus": True, "kv_cache_bytes": 1 << 30}}
    assert dealt(config_of(tmp_path, {"alice": shares, "bob": shares, "carol": {}}), 4) == {
        "alice": {"engine-0": [2], "trainer": [3]},
        "bob": {"engine-0": [2], "trainer": [3]},
        "carol": {"engine-0": [0], "trainer": [1]},
    }


@pytest.mark.parametrize(
    ("policies", "num_gpus", "words"),
    [
        ({"alice": {}, "bob": {}}, 3, r"policies\.bob: engine 1 and trainer 1 GPUs are needed .* \(alice has 2\)"),
        ({"alice": {}, "bob": {}}, 2, r"policies\.bob: no GPU is left of 2 found here: alice has 2\. Lower engine\.count"),
        (
            {"alice": {"engine": {"gpus": [0]}}, "bob": {"engine": {"gpus": [0]}}},
            4,
            r"policies\.alice and policies\.bob both name GPU GPU-0",
        ),
        ({"alice": {"engine": {"gpus": [7]}}}, 2, r"policies\.alice\.engine\.gpus names GPU 7, which is not among those found here"),
        ({"alice": {"engine": {"gpus": [0]}}}, 0, r"policies\.alice: engine\.gpus names 0, and no GPU was found"),
    ],
)
def test_devices_that_do_not_suffice_are_refused_by_policy(tmp_path: Path, policies: dict[str, Any], num_gpus: int, words: str):
    with pytest.raises(ConfigError, match=words):
        dealt(config_of(tmp_path, policies), num_gpus)


def made(config: Config) -> tuple[tuple[PolicySettings, ...], Path]:
    policies = policies_of(config)
    folder = make_folders(config, policies)
    for path in policy_folders(folder):
        (path / SCRIPT_FILE).write_text("{}")
    return policies, folder


def test_each_policys_folder_is_a_whole_run_folder_and_its_checkpoints_have_a_place_of_their_own_in_a_store(tmp_path: Path):
    policies, folder = made(config_of(tmp_path, {"alice": {}, "bob": {}}, checkpoint={"to": "s3://bucket/all/"}))
    assert [path.name for path in policy_folders(folder)] == ["alice", "bob"]
    assert load_run(folder_of_policy(folder, "bob")) == settings_in(policies[1], folder)
    assert settings_in(policies[1], folder).checkpoint.to == f"s3://bucket/all/{folder.name}"
    assert policy_folders(folder_of_policy(folder, "bob")) == ()


def test_a_run_goes_on_with_the_policies_it_was_begun_with_alone(tmp_path: Path):
    config = config_of(tmp_path, {"alice": {}, "judge": {"frozen": True}})
    policies, folder = made(config)
    assert resuming.find_run(config) is None, "no policy has admitted anything"
    manifest = folder_of_policy(folder, "alice") / "checkpoints" / "step-000001" / "manifest.json"
    manifest.parent.mkdir(parents=True)
    manifest.write_text("{}")
    found = resuming.find_run(config)
    assert found is not None
    assert found.folder == folder
    make_ready(config, policies, folder)
    for changed, words in (
        ({"alice": {}}, r"begun with alice, judge \(frozen\), and this config has alice\. Keep them"),
        ({"alice": {}, "judge": {}}, r"this config has alice, judge\. Keep them"),
        ({"alice": {"rollout": {"group_size": 3}}, "judge": {"frozen": True}}, r"rollout\.group_size was 8, and is 3"),
        ({"alice": {}, "judge": {"frozen": True, "model": {"path": "x"}}}, r"model\.path was .*'m'.*, and is .*'x'"),
    ):
        other = config_of(tmp_path, changed)
        with pytest.raises(ConfigError, match=words):
            make_ready(other, policies_of(other), folder)
    (folder / SCRIPT_FILE).write_text("{}")
    with pytest.raises(ConfigError, match=r"is a run of several policies \(alice, judge\): go on with `pipelinerl\.Policies`"):
        resuming.make_ready(config, folder, in_script=True)
