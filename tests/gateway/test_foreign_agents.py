"""LangChain's agent, unmodified, pointed at the gateway by its base URL (the Codex CLI: `tests/e2e/test_codex.py`).

It is skipped where it is not installed, in an environment of its own, since it asks for other versions of what vLLM needs:
`python -m venv runs/langchain && runs/langchain/bin/pip install langchain-openai`.
"""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.serving import Serving, serving

LANGCHAIN = Path(__file__).parents[2] / "runs" / "langchain" / "bin" / "python"

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
