"""Tinker's own SDK, unmodified, drives a real vLLM engine and the real trainer: `pipelinerl serve`, adapters and whole weights.

Skipped where the SDK is not installed. It wants an environment of its own, since it asks for other versions of what vLLM needs:
`scripts/bench/recipes/environment.py` makes it.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from scripts.bench.recipes.environment import PYTHON
from scripts.bench.recipes.serving import lines, served
from tests.tiny_models import make_qwen2

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PYTHON.exists(), reason="Tinker's SDK has no environment at runs/tinker"),
]


def drive(folder: Path, variables: dict[str, str], *, rank: int, learning_rate: float) -> dict[str, Any]:
    command = [PYTHON, Path(__file__).with_name("sdk_client.py"), folder / "model", str(rank), str(learning_rate)]
    environment = {**os.environ, **variables, "TINKER_TELEMETRY": "0"}
    ended = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environment)
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
    line = next(line for line in ended.stdout.splitlines() if line.startswith("FOUND "))
    return json.loads(line.removeprefix("FOUND "))


@pytest.mark.parametrize("rank", [8, 0], ids=["adapters", "whole weights"])
def test_the_sdk_trains_and_samples_and_every_token_is_known_again(tmp_path: Path, rank: int) -> None:
    make_qwen2(tmp_path / "model")
    with served(tmp_path, f"lora.rank={rank}", model=tmp_path / "model") as variables:
        assert variables["TINKER_API_KEY"].startswith("tml-")
        found = drive(tmp_path, variables, rank=rank or 32, learning_rate=0.003)
    assert found["losses"][-1] < (0.6 if rank else 0.1) * found["losses"][0]
    assert found["learned"] or rank, "an adapter over random weights cannot say everything"
    for name in ("gap_at_start", "gap_after_training", "gap_of_second_to_base", "gap_of_first_again", "gap_of_restored"):
        assert found[name] < 1e-3, name
    assert found["base_is_as_it_was"] < 1e-3
    assert found["stopped_at_token"] == [True, "stop"]
    assert found["stopped_at_text"] == [True, "stop"]
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        known = found[loss]
        assert known["sampled_tokens"] > 0
        assert not known["unknown_tokens"]
        assert not known["drifted_tokens"]
        assert not known["repeated_tokens"]
        assert known["staleness_max"] == 0
    assert found["again"] > 0
    assert found["custom"][1] > 0
    for name, words in (("unknown_loss", "not published"), ("unknown_word", "the model knows 0 to"), ("no_such_state", "no saved model")):
        category, said = found[name]
        assert category == "user", said
        assert words in said
    steps = lines(tmp_path, "client_step")
    assert len(steps) >= 45
    assert sum(step["pipelinerl/sampled_tokens"] for step in steps) > 40
