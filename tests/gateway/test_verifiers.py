"""verifiers 0.4, unmodified, plays leased episodes by its own client: a game of several turns, and a taskset of one.

Skipped where it is not installed. It asks for another OpenAI SDK than vLLM: `python -m venv runs/verifiers && runs/verifiers/bin/pip
install verifiers==0.4.0`.
"""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from tests.gateway.serving import serving
from tests.gateway.test_foreign_agents import lend

HERE, ROOT = Path(__file__).parent, Path(__file__).parents[2]
PYTHON = ROOT / "runs" / "verifiers" / "bin" / "python"
pytestmark = [
    pytest.mark.slow,
    pytest.mark.process,
    pytest.mark.timeout(200),
    pytest.mark.skipif(not PYTHON.exists(), reason="verifiers has no environment at runs/verifiers"),
]


@pytest.mark.parametrize(("taskset", "num_turns"), [("verifiers_game", 4), ("verifiers_sort", 1)])
def test_verifiers_own_client_plays_an_episode_and_all_that_was_sampled_trains(tmp_path: Path, taskset: str, num_turns: int) -> None:
    with serving(tmp_path, max_context_tokens=1 << 16) as desk:
        desk.engine.says = lambda prompt: "123459"[len(desk.engine.asked)] if taskset == "verifiers_game" else "012345"
        desk.tokenizer.save_pretrained(tmp_path / "model")
        lent = lend(desk)
        command = [PYTHON, HERE / "verifiers_client.py", taskset, tmp_path / "model", desk.address, lent["episode_url"]]
        environment = {**os.environ, "LEASE": lent["token"], "HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{HERE}:{ROOT}"}
        ended = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=180, check=False)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-6000:]
        found = json.loads(ended.stdout.partition("FOUND ")[2])
        (trajectory,) = desk.trajectories
        assert found["num_turns"] == num_turns
        assert trajectory.num_trained_tokens == found["sampled"] == (7 if num_turns == 1 else 2 * num_turns)
