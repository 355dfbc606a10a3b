"""The manifests of a run: held to Kubernetes' own schemas, and to what the pods do with them."""

from __future__ import annotations

import importlib
import json
from typing import Any

import pytest

from pipelinerl.config import Config
from pipelinerl.config.file import parse
from pipelinerl.errors import ConfigError
from pipelinerl.launch.kubernetes.manifest import as_list, manifests

NAME = "math_7B-20261123-101500"


def settings(**sections: Any) -> Config:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"source": "p"}, "reward": [{"function": "r:f"}], "engine": {"count": 4}}
    kubernetes = {"image": "registry.example/pipelinerl:1", "claim": "runs", "engine_nodes": 1, "gpus_per_node": 4}
    tree |= {"run": {"folder": "/runs"}, "kubernetes": kubernetes | sections.pop("kubernetes", {})}
    return parse(tree | sections, origin="test")


def test_one_job_holds_the_nodes_with_gpus_and_one_those_without() -> None:
    config_map, gpus, scorers = manifests(settings(kubernetes={"scorer_nodes": 1}), name=NAME)
    assert [one["metadata"]["name"] for one in (config_map, gpus, scorers)] == [
        *("math-7b-20261123-101500", "math-7b-20261123-101500", "math-7b-20261123-101500-scorers")
    ]
    assert (gpus["spec"]["completions"], scorers["spec"]["completions"]) == (2, 1)
    first, apart = (one["spec"]["template"]["spec"]["containers"][0] for one in (gpus, scorers))
    assert first["args"][-2:] == ["--first-node", "0"]
    assert apart["args"][-2:] == ["--first-node", "2"]
    assert first["args"][3] == f"/runs/{NAME}"
    assert first["resources"]["limits"] == {"nvidia.com/gpu": "4"}
    assert apart["resources"]["limits"] == {}


def test_engines_on_nodes_of_another_kind_are_a_job_of_their_own() -> None:
    other = {"engine_gpus_per_node": 2, "scorer_nodes": 1, "pod": {"nodeSelector": {"pool": "h100"}, "hostIPC": True}}
    config = settings(kubernetes=other | {"engine_pod": {"nodeSelector": {"pool": "l40s"}}})
    _, *jobs = manifests(config, name="run-1")
    pods = [job["spec"]["template"]["spec"] for job in jobs]
    assert [job["metadata"]["name"] for job in jobs] == ["run-1", "run-1-engines", "run-1-scorers"]
    assert [pod["containers"][0]["args"][-1] for pod in pods] == ["0", "1", "2"]
    assert [pod["containers"][0]["resources"]["limits"].get("nvidia.com/gpu") for pod in pods] == ["4", "2", None]
    assert [pod["nodeSelector"]["pool"] for pod in pods] == ["h100", "l40s", "h100"]
    assert all(pod["hostIPC"] for pod in pods)
    with pytest.raises(ConfigError, match=r"kubernetes\.engine_pod\.volumes cannot be used"):
        manifests(settings(kubernetes={"engine_pod": {"volumes": []}}), name=NAME)


def test_what_pods_read_as_settings_are_these_settings() -> None:
    config = settings()
    config_map, *_ = json.loads(as_list(manifests(config, name=NAME)))["items"]
    assert Config.model_validate_json(config_map["data"]["settings.json"]) == config


def test_a_pod_has_the_time_to_save_and_one_that_was_taken_is_not_counted() -> None:
    *_, job = manifests(settings(kubernetes={"save_s": 120, "restarts": 3, "pod": {"nodeSelector": {"pool": "h100"}}}), name=NAME)
    pod = job["spec"]["template"]["spec"]
    assert (pod["terminationGracePeriodSeconds"], pod["restartPolicy"], pod["nodeSelector"]) == (120, "Never", {"pool": "h100"})
    assert job["spec"]["backoffLimit"] == 3
    ignore, fail = job["spec"]["podFailurePolicy"]["rules"]
    assert (ignore["action"], ignore["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (fail["action"], fail["onExitCodes"]["values"]) == ("FailJob", [1])


def test_everything_that_pods_lack_is_told_at_once() -> None:
    config = settings(run={"folder": "runs"}, kubernetes={"image": "", "claim": "", "pod": {"volumes": []}})
    with pytest.raises(ConfigError) as error:
        manifests(config, name=NAME)
    for said in ("kubernetes.image is not set", "kubernetes.claim is not set", "run.folder is runs", "kubernetes.pod.volumes cannot be"):
        assert said in str(error.value)


def test_nodes_without_work_are_refused_by_the_name_of_their_section() -> None:
    with pytest.raises(ConfigError, match=r"kubernetes\.engine_nodes is 5 but engine\.count is 4"):
        settings(kubernetes={"engine_nodes": 5})


@pytest.mark.parametrize("version", ["1.31", "1.34"])
def test_kubernetes_own_schemas_take_them_strictly(version: str) -> None:
    pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed: pip install -r scripts/lock/outside.txt")
    validator = importlib.import_module("kubernetes_validate")
    config = settings(kubernetes={"scorer_nodes": 1, "memory_per_node": "64Gi"})
    objects = json.loads(as_list(manifests(config, name=NAME)))["items"]
    for one in objects:
        validator.validate(one, version, strict=True)
    wrong = json.loads(json.dumps(objects[1]))
    wrong["spec"]["completionsMode"] = wrong["spec"].pop("completionMode")
    with pytest.raises(Exception, match="completionsMode"):
        validator.validate(wrong, version, strict=True)


def test_a_long_name_becomes_one_that_pods_can_carry() -> None:
    config_map, *_ = manifests(settings(), name=f"{'a_long_name' * 9}-20261123-101500")
    name = config_map["metadata"]["name"]
    assert len(name) <= 50
    assert name.endswith("-20261123-101500")
    assert not name.startswith("-")
