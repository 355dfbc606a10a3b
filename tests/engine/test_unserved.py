"""A model that vLLM refuses is refused in its words, which a run then ends with (tests/e2e/test_run.py)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelinerl.errors import ConfigError
from tests import real_engine, tiny_models

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
