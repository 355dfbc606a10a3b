"""A model that vLLM refuses is refused in its words, with which a run ends as with those of any process (tests/launch/test_launcher.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from tests import real_engine, tiny_models
from tests.trainer.tiny import make_folder

pytestmark = [pytest.mark.vllm, pytest.mark.slow]


def test_an_architecture_that_vllm_does_not_know_is_refused_in_its_words(tmp_path: Path) -> None:
    tiny_models.make_qwen2(tmp_path, seed=2)
    config = tmp_path / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"architectures": ["NobodysForCausalLM"]}))
    with (
        pytest.raises(ConfigError, match=rf"vLLM cannot serve {tmp_path}.*(?s:.)*NobodysForCausalLM"),
        real_engine.vllm_engine(tmp_path, max_running=4),
    ):
        pass


def test_a_model_that_loads_and_that_no_kernel_runs_is_refused_before_the_first_rollout(tmp_path: Path) -> None:
    """No kernel has heads of 16."""
    make_folder(tmp_path, family="qwen3", head_dim=16, vocab_size=128)
    with (
        pytest.raises(ConfigError, match=rf"vLLM loads {tmp_path} but cannot run it here: .*[Hh]ead"),
        real_engine.vllm_engine(tmp_path, max_running=4),
    ):
        pass
