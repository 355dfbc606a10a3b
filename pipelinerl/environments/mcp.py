"""Tools behind an MCP server (`mcp`), which the model calls: for an environment of your own.

    SERVER = sandboxed(["python", "tools.py"], reads=["tools.py"])

    class Task:
        tools = tools_of(SERVER)                       # their JSON schemas, which the model's template writes into the prompt

        def reset(self, question):
            self._server = Server(SERVER)              # one for each episode: what it keeps is the episode's own
            return question

        def step(self, message):
            if message.tool_calls:
                return answers(message.tool_calls, self._server.call), 0.0, False
            return None, float(message == "42"), True

        def close(self):
            self._server.close()

The server speaks over its standard input and output. It ends with the object that has it, and with the worker, however that one ends.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import importlib
import os
import shutil
import sys
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives")
_INSIDE = "65534"
"""User and group of a server in a sandbox: nobody."""


def sandboxed(command: Sequence[str], *, reads: Sequence[str | os.PathLike[str]] = (), disk_bytes: int = 64 << 20) -> list[str]:
    """Return the command in namespaces of its own, by bubblewrap: no network, no other process, no variable of ours, nobody's rights.

    It sees the system, Python and what it `reads`, all read-only; `/tmp`, where it begins, has room for `disk_bytes` and is gone with it.
    Raises `RuntimeError` where bubblewrap is missing.
    """
    if (bubblewrap := shutil.which("bwrap")) is None:
        raise RuntimeError("bwrap is not installed, and tools that the model calls would run with all of your rights: install bubblewrap")
    seen = dict.fromkeys([*_SYSTEM, sys.base_prefix, sys.prefix, *(str(Path(path).resolve()) for path in reads)])
    spaces = [bubblewrap, "--unshare-all", "--die-with-parent", "--new-session", "--uid", _INSIDE, "--gid", _INSIDE, "--clearenv"]
    files = ["--proc", "/proc", "--dev", "/dev", "--size", str(disk_bytes), "--tmpfs", "/tmp"]
    binds = [part for path in seen for part in ("--ro-bind-try", path, path)]
    return [*spaces, *files, *binds, "--remount-ro", "/", "--chdir", "/tmp", "--", *command]


def tools_of(command: Sequence[str], *, deadline_s: float = 60.0) -> list[dict[str, Any]]:
    """Start a server, ask for its tools, and end it; return their JSON schemas, as chat templates take them."""
    server = Server(command, deadline_s=deadline_s)
    try:
        return server.tools
    finally:
        server.close()


class Server:
    """A server that runs, and the connection to it. Its calls wait, and need no event loop of the caller."""

    def __init__(self, command: Sequence[str], *, deadline_s: float = 60.0) -> None:
        """Start `command`. Raises `ConnectionError` where it cannot be started, ends, or has not answered within `deadline_s`."""
        self._mcp = importlib.import_module("mcp")
        self._deadline_s = deadline_s
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="mcp", daemon=True)
        self._thread.start()
        self._session: Any = None
        self._closing = asyncio.Event()
        begun: concurrent.futures.Future[None] = concurrent.futures.Future()
        self._ended = asyncio.run_coroutine_threadsafe(self._hold(list(command), begun), self._loop)
        try:
            begun.result(deadline_s)
            self.tools = self._ask(self._list())
            """JSON schemas of all tools."""
        except Exception as error:
            self.close()
            words = f"no answer within {deadline_s:.0f} s" if isinstance(error, TimeoutError) else f"{type(error).__name__}: {error}"
            said = f"the MCP server `{' '.join(command)}` could not be spoken with: {words}. What it said itself is on standard error"
            raise ConnectionError(said) from error

    def call(self, call: Any) -> str:
        """Return what a tool answers to a `ToolCall`: all text of it. What went wrong in it is told in the same way, behind `error:`."""
        refused = getattr(self._mcp, "MCPError", None) or self._mcp.McpError
        try:
            found = self._ask(self._session.call_tool(call.name, call.arguments))
        except refused as error:
            return f"error: {error}"
        text = "\n".join(getattr(part, "text", f"({part.type})") for part in found.content)
        is_error = getattr(found, "is_error", getattr(found, "isError", False))
        return f"error: {text}" if is_error else text

    def close(self) -> None:
        """End the server."""
        if self._loop.is_closed():
            return
        self._loop.call_soon_threadsafe(self._closing.set)
        with contextlib.suppress(Exception):
            self._ended.result(self._deadline_s)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    async def _hold(self, command: list[str], begun: concurrent.futures.Future[None]) -> None:
        """Hold the connection, in one task from its beginning to its end, until it is closed."""
        try:
            parameters = self._mcp.StdioServerParameters(command=command[0], args=command[1:])
            async with self._mcp.stdio_client(parameters) as (reads, writes), self._mcp.ClientSession(reads, writes) as self._session:
                await self._session.initialize()
                begun.set_result(None)
                await self._closing.wait()
        except BaseException as error:
            if not begun.done():
                begun.set_exception(error)
            raise

    async def _list(self) -> list[dict[str, Any]]:
        found = (await self._session.list_tools()).tools
        return [_schema(tool) for tool in found]

    def _ask(self, question: Any) -> Any:
        asked = asyncio.run_coroutine_threadsafe(question, self._loop)
        try:
            return asked.result(self._deadline_s)
        except TimeoutError:
            asked.cancel()
            raise


def _schema(tool: Any) -> dict[str, Any]:
    parameters = getattr(tool, "input_schema", None) or tool.inputSchema
    return {"type": "function", "function": {"name": tool.name, "description": tool.description or "", "parameters": parameters}}
