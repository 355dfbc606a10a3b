"""Agents that nobody here wrote, unmodified, pointed at the gateway by its base URL: LangChain's, and the Codex CLI of npm.

Both are skipped where they are not installed. `codex` is looked for on the path; LangChain in an environment of its own, since it asks for
other versions of what vLLM needs: `python -m venv runs/langchain && runs/langchain/bin/pip install langchain-openai`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.serving import Serving, serving

LANGCHAIN = Path(__file__).parents[2] / "runs" / "langchain" / "bin" / "python"
CODEX = shutil.which("codex")

pytestmark = [pytest.mark.slow, pytest.mark.process]


def state_of(desk: Serving, lent: dict[str, Any]) -> list[dict[str, Any]]:
    with desk.client() as client:
        return client.get(f"/episodes/{lent['episode_id']}", headers={"authorization": f"Bearer {lent['token']}"}).json()["turns"]


def lend(desk: Serving) -> dict[str, Any]:
    with desk.client() as client:
        return desk.lend(client, text="task", name="0/0")


@pytest.mark.skipif(not LANGCHAIN.exists(), reason="LangChain has no environment at runs/langchain")
def test_langchain_calls_tools_and_every_turn_goes_on_from_the_one_before(tmp_path: Path) -> None:
    with serving(tmp_path) as desk:
        call = '<tool_call>{"name": "add", "arguments": {"a": 1,   "b": 2}}</tool_call>'
        desk.engine.says = lambda prompt: "It is 3." if prompt.count("<|tool|>") == 2 else f"I add. {call}"
        lent = lend(desk)
        command = [LANGCHAIN, Path(__file__).with_name("langchain_agent.py"), lent["base_url"], lent["token"]]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert ended.returncode == 0, ended.stderr
        assert ended.stdout == "It is 3.\n"
        assert [turn["parent"] for turn in state_of(desk, lent)] == [-1, 1, 3]
        assert desk.orchestrator.counts["num_drifted"] == 0


@pytest.mark.skipif(CODEX is None, reason="codex is not installed (npm install -g @openai/codex)")
def test_the_codex_cli_takes_three_turns_with_tools_and_all_their_tokens_are_one_row(tmp_path: Path) -> None:
    model, work, home = (tmp_path / name for name in ("model", "work", "home"))
    for folder in (model, work, home):
        folder.mkdir()
    with serving(model, max_context_tokens=1 << 20) as desk:

        def says(prompt: str) -> str:
            number = prompt.count("<|tool|>")
            arguments = {"cmd": f"echo step {number} >> log.txt"}
            return "Done." if number == 3 else f"<tool_call>{json.dumps({'name': 'exec_command', 'arguments': arguments})}</tool_call>"

        desk.engine.says = says
        lent = lend(desk)
        provider = f'{{name="gateway", base_url="{lent["base_url"]}", env_key="GATEWAY_KEY", wire_api="responses"}}'
        settings = ('model="policy"', 'model_provider="gateway"', f"model_providers.gateway={provider}")
        command = [str(CODEX), "exec", "--skip-git-repo-check", "-C", str(work), "-s", "danger-full-access"]
        command += [word for setting in settings for word in ("-c", setting)]
        variables = {**os.environ, "GATEWAY_KEY": lent["token"], "CODEX_HOME": str(home), "HOME": str(tmp_path)}
        ended = subprocess.run(
            [*command, "write three lines to log.txt"],
            env=variables,
            capture_output=True,
            text=True,
            timeout=90,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        assert (work / "log.txt").read_text() == "step 0\nstep 1\nstep 2\n"
        turns = state_of(desk, lent)
        assert [turn["parent"] for turn in turns] == [-1, 1, 3, 5]
        with desk.client() as client:
            client.post(
                f"/episodes/{lent['episode_id']}/finish", json={"reward": 1.0}, headers={"authorization": f"Bearer {lent['token']}"}
            )
        (trajectory,) = desk.trajectories
        assert trajectory.num_trained_tokens == sum(turn["num_sampled"] for turn in turns)
