"""An environment whose tools are those of an MCP server in a sandbox: find out what a pear costs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from pipelinerl.environments import Said, answers
from pipelinerl.environments.mcp import Server, sandboxed, tools_of

TOOLS = Path(__file__).with_name("mcp_tools.py")
COMMAND = sandboxed([sys.executable, str(TOOLS)], reads=[TOOLS])


class Shop:
    """One purchase."""

    tools = tools_of(COMMAND)

    def reset(self) -> str:
        self._server = Server(COMMAND)
        return "What is a pear?"

    def step(self, message: Said) -> tuple[list[dict[str, Any]] | None, float, bool]:
        if message.tool_calls:
            return answers(message.tool_calls, self._server.call), 0.1, False
        return None, float(message.strip() == "3"), True

    def close(self) -> None:
        self._server.close()
