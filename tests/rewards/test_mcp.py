"""Tools behind an MCP server of the real package, in a sandbox: called, kept for an episode, and unable to do harm."""

from __future__ import annotations

import os
import shutil
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.environments import ToolCall
from pipelinerl.environments.mcp import Server, sandboxed
from pipelinerl.messages import Outcome
from pipelinerl.rewards.calls import Component
from pipelinerl.rewards.stateful import load_stateful
from tests.rewards.test_stateful import TOOLS as TEMPLATE
from tests.rewards.test_stateful import Played, chat_tokenizer

__all__ = ["chat_tokenizer"]
SHOP = Path(__file__).with_name("mcp_shop.py")
TOOLS = Path(__file__).with_name("mcp_tools.py")
pytest.importorskip("mcp.server.mcpserver")
pytestmark = [
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.skipif(shutil.which("bwrap") is None, reason="bubblewrap is not installed"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    os.environ["SECRET_OF_OURS"] = "x"
    found = Server(sandboxed([sys.executable, str(TOOLS)], reads=[TOOLS]))
    yield found
    found.close()


def asked(server: Server, name: str, **arguments: object) -> str:
    return server.call(ToolCall(name=name, arguments=dict(arguments)))


def test_tools_are_known_by_their_schemas_and_called_with_what_they_keep(server: Server) -> None:
    schemas = {tool["function"]["name"]: tool["function"] for tool in server.tools}
    assert schemas["price"]["description"] == "The price of an item."
    assert schemas["price"]["parameters"]["required"] == ["item"]
    assert asked(server, "price", item="pear") == "3"
    assert [asked(server, "keep", note=note) for note in "ab"] == ["1", "2"]


def test_what_goes_wrong_in_a_tool_is_told_to_the_model(server: Server) -> None:
    assert asked(server, "price", item="plum").startswith("error: ")
    assert asked(server, "price").startswith("error: ")
    assert asked(server, "nothing").startswith("error: ")
    assert asked(server, "price", item="apple") == "2"


def test_a_tool_in_a_sandbox_sees_and_reaches_nothing_of_ours(server: Server, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    assert asked(server, "look", path=str(tmp_path)).startswith("error: ")
    assert asked(server, "look", path=str(Path(__file__))).startswith("error: "), "beside what it reads"
    assert "SECRET_OF_OURS" not in asked(server, "look", path="/proc/self/environ")
    assert len([name for name in asked(server, "look", path="/proc").split() if name.isdigit()]) <= 3, "processes of its own alone"
    assert asked(server, "write", path=str(TOOLS)).startswith("error: ")
    assert asked(server, "write", path="/tmp/x") == "written"
    with socket.create_server(("127.0.0.1", 0)) as listening:
        assert asked(server, "reach", port=listening.getsockname()[1]).startswith("error: ")


def test_an_environments_tools_stand_in_the_prompt_and_their_answers_follow_the_call(chat_tokenizer: Any) -> None:
    chat_tokenizer.chat_template = TEMPLATE
    loaded = load_stateful(Component(function=f"{SHOP}:Shop", name="shop", options={}, is_environment=True, is_stateful=True))
    game = Played(chat_tokenizer, loaded, chat=True)
    try:
        game.begin()
        assert game.text.startswith("price\nkeep\nlook\nwrite\nreach\n<|im_start|>user\nwhat?")
        answer = game.say('<tool_call>{"name": "price", "arguments": {"item": "pear"}}</tool_call>')
        assert (answer.outcome, answer.reward) == (Outcome.OK, 0.1)
        assert game.text.endswith("<|im_end|>\n<|im_start|>tool\n3<|im_end|>\n<|im_start|>assistant\n")
        assert game.say("3").reward == 1.0
    finally:
        game.runner.close()


@pytest.mark.parametrize(
    ("program", "words"), [("import time; time.sleep(60)", "no answer within 1 s"), ("raise SystemExit('no')", "could not be spoken with")]
)
def test_a_server_that_does_not_speak_is_named(program: str, words: str) -> None:
    deadline_s = 1.0 if "sleep" in program else 60.0
    with pytest.raises(ConnectionError, match=words):
        Server([sys.executable, "-c", program], deadline_s=deadline_s)
