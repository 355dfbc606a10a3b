"""What a trainer backend cannot do is refused from the config, before anything starts."""

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from pipelinerl.config.backends import TrainerBackend, check_installed, check_model
from pipelinerl.config.file import parse
from pipelinerl.config.layout import Layout
from pipelinerl.errors import ConfigError

QWEN3 = {"model_type": "qwen3", "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
TITAN = TrainerBackend.TORCHTITAN


def tree_of(backend: str, **sections: dict[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {"model": {"path": "m"}, "data": {"source": "d"}, "reward": [{"function": "r.py:r"}]}
    trainer = {"backend": backend, **sections.pop("trainer", {})}
    return {**tree, **sections, "model": {"path": "m", **sections.get("model", {})}, "trainer": trainer}


ASKED: dict[str, dict[str, dict[str, Any]]] = {
    "lora.rank": {"lora": {"rank": 8}},
    "model.replay_routing": {"model": {"replay_routing": True}},
    'trainer.offload = "weights"': {"trainer": {"ranks": 2, "parallel": {"shard": 2}, "offload": "weights"}},
    "parallel.context = 2": {"trainer": {"ranks": 2, "parallel": {"context": 2}}},
    "parallel.expert = 2": {"trainer": {"ranks": 2, "parallel": {"shard": 2, "expert": 2}}},
    "set parallel.shard = 2": {"trainer": {"ranks": 2}},
}


@pytest.mark.parametrize("key", ASKED)
def test_what_a_backend_cannot_do_is_refused_and_is_right_without_it(key: str) -> None:
    with pytest.raises(ConfigError, match=r'trainer\.backend is "torchtitan"') as refused:
        parse(tree_of("torchtitan", **ASKED[key]), origin="a.toml")
    assert key in str(refused.value)
    assert parse(tree_of("fsdp2", **ASKED[key]), origin="a.toml").trainer.backend is TrainerBackend.FSDP2
    asked = parse(tree_of("torchtitan", trainer={"ranks": 4, "parallel": {"shard": 2, "tensor": 2}}), origin="a.toml")
    assert asked.trainer.backend is TITAN


def test_megatron_is_refused_shards_and_schedules(tmp_path: Path) -> None:
    for asked, words in (({"shard": 2}, "distributed optimizer"), ({"pipeline": 2, "schedule": "interleaved"}, "written for fsdp2 alone")):
        with pytest.raises(ConfigError, match=words):
            parse(tree_of("megatron", trainer={"ranks": 2, "parallel": asked}), origin="a.toml")
    parse(tree_of("megatron", trainer={"ranks": 8, "parallel": {"tensor": 2, "pipeline": 2}}), origin="a.toml")
    (tmp_path / "config.json").write_text(json.dumps(QWEN3 | {"num_hidden_layers": 3}))
    with pytest.raises(ConfigError, match=r"parallel\.pipeline = 2 does not divide its 3 layers"):
        check_model(TrainerBackend.MEGATRON, Layout(ranks=2, pipeline=2), tmp_path)


@pytest.mark.parametrize(
    ("settings", "layout", "words"),
    [
        ({"model_type": "qwen3_moe"}, Layout(), "it is a qwen3_moe, expected one of llama, qwen3"),
        ({"rope_parameters": {"rope_type": "yarn"}}, Layout(), r"rotary embeddings are scaled \(yarn\)"),
        ({"attention_bias": True}, Layout(), "attention_bias is set"),
        ({"use_sliding_window": True}, Layout(), "use_sliding_window is set"),
        ({"hidden_act": "gelu"}, Layout(), "hidden_act is gelu, expected silu"),
        ({"tie_word_embeddings": True}, Layout(ranks=2, pipeline=2), "its embeddings are tied"),
    ],
)
def test_a_model_that_a_backend_does_not_compute_is_refused(tmp_path: Path, settings: dict[str, Any], layout: Layout, words: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(QWEN3 | settings))
    with pytest.raises(ConfigError, match=words):
        check_model(TITAN, layout, tmp_path)
    check_model(TrainerBackend.FSDP2, layout, tmp_path)
    path.write_text(json.dumps(QWEN3))
    check_model(TITAN, layout, tmp_path)


def test_a_package_that_is_not_there_is_named_with_what_installs_it() -> None:
    with mock.patch("importlib.util.find_spec", return_value=None):
        with pytest.raises(ConfigError, match=r"torchtitan is not installed\. .* `pip install \"pipelinerl\[torchtitan\]\"`"):
            check_installed(TITAN)
        check_installed(TrainerBackend.FSDP2)
