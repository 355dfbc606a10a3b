"""vLLM's CUDA classes as far as they go without a GPU: chosen for our options, made in the host's memory, and given a policy."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from tests import families
from tests.engine.test_vllm_attributes import THINGS, uses_of
from tests.pretended import build_nvml

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.vllm, pytest.mark.timeout(300)]
MODELS: dict[str, dict[str, int]] = {
    "qwen3": {},
    "qwen3_moe": {},
    "deepseek_v3": {"qk_nope_head_dim": 128, "v_head_dim": 128, "head_dim": 192},  # sizes for which GPUs have kernels
}
ATTENTION = {"qwen3": "FlashAttentionImpl", "qwen3_moe": "FlashAttentionImpl", "deepseek_v3": "FlashAttnMLAImpl"}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("pretended")
    models = [families.make_folder(folder / name, model_type=name, **sizes) for name, sizes in MODELS.items()]
    command = [sys.executable, "-m", "tests.pretended.vllm_on_cuda", str(build_nvml(folder)), *map(str, models)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False, timeout=250)
    assert ended.returncode == 0, ended.stderr[-4000:]
    told = json.loads(ended.stdout.splitlines()[-1])
    return told | {"models": dict(zip(MODELS, told["models"], strict=True))}


def test_vllm_takes_the_machine_for_one_with_gpus(found: dict[str, Any]) -> None:
    assert found["platform"] == "NvmlCudaPlatform"
    assert found["capability"] == [9, 0]
    assert found["uuid"] == "GPU-00000001-0000-4000-8000-000000000000"


def test_both_model_runners_of_a_gpu_have_the_methods_that_are_touched(found: dict[str, Any]) -> None:
    """What a constructor sets is looked for in its source, by `test_vllm_attributes`."""
    for name, methods in found["runners"].items():
        touched, _ = uses_of(THINGS[f"{name} runner"])
        assert "execute_model" in touched & set(methods), name


def test_our_options_choose_the_classes_that_were_read(found: dict[str, Any]) -> None:
    for name, model in found["models"].items():
        assert model["worker"] == "vllm.v1.worker.gpu_worker.Worker", name
        assert model["is_v2"], name
        assert model["graphs"] == "FULL_AND_PIECEWISE", name
        assert model["async_scheduling"], name
        assert model["attention"] == [ATTENTION[name]], name
        assert model["experts"] == ([] if name == "qwen3" else ["TritonExperts"]), "kernels that leave experts as they were loaded"


def test_the_cache_is_what_the_budget_leaves_of_the_gpu(found: dict[str, Any]) -> None:
    for name, model in found["models"].items():
        assert 70 << 30 < model["cache_bytes"] < 76 << 30, name
        assert 0.9 < model["utilization"] < 0.96, name
        assert model["budget"].startswith("of 80.0 GiB free on each GPU: weights "), name


def test_a_policy_is_copied_into_the_layers_of_a_gpu_where_they_are(found: dict[str, Any]) -> None:
    for name, model in found["models"].items():
        assert model["swap"].startswith("policies are committed by copy: pointer would break: captured graphs keep"), name
        assert model["are_taken"], name
        assert model["are_in_place"], name
        assert "model.embed_tokens.weight" in model["tensors"], name
