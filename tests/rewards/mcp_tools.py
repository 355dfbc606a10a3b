"""An MCP server with tools that look around: `python mcp_tools.py`, under an interpreter that has `mcp`."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from mcp.server import MCPServer

server = MCPServer("tools")
kept: list[str] = []


@server.tool()
def price(item: str) -> int:
    """The price of an item."""
    return {"pear": 3, "apple": 2}[item]


@server.tool()
def keep(note: str) -> int:
    """Keep a note; how many there are."""
    kept.append(note)
    return len(kept)


@server.tool()
def look(path: str) -> str:
    """Names in a folder, or what a file says."""
    return " ".join(sorted(os.listdir(path))) if Path(path).is_dir() else Path(path).read_text()


@server.tool()
def write(path: str) -> str:
    """Write a file."""
    Path(path).write_text("x")
    return "written"


@server.tool()
def reach(port: int) -> str:
    """Connect to a port of this machine."""
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    return "reached"


if __name__ == "__main__":
    server.run("stdio")
