"""The way between peers and orchestrator, below the encryption: bytes pass through here, and may be held, changed, or cut off.

One listener for each role, in the process that makes the chaos; `<run>/detours.json` tells links where. Who connects is led to the address
that the living orchestrator has published.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
from pathlib import Path

ROLES = ("engine", "scorer", "trainer")
"""Those whose connections may be harmed."""
_LED = (*ROLES, "gateway")


def detour_of(run_folder: Path, role: str) -> str:
    """Return the address that links of a role connect to."""
    return json.loads((run_folder / "detours.json").read_text())[role]


class Detours:
    """All listeners of a run. Use as a context."""

    def __init__(self, run_folder: Path, *, chance: random.Random) -> None:
        self._run_folder = run_folder
        self._chance = chance
        self._open: dict[str, set[_Way]] = {role: set() for role in _LED}
        self._servers: list[asyncio.Server] = []

    async def __aenter__(self) -> Detours:
        addresses = {}
        for role in _LED:
            server = await asyncio.start_server(lambda reader, writer, role=role: self._lead(role, reader, writer), "127.0.0.1", 0)
            self._servers.append(server)
            addresses[role] = f"tcp://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        (self._run_folder / "detours.json").write_text(json.dumps(addresses))
        return self

    async def __aexit__(self, *error: object) -> None:
        for server in self._servers:
            server.close()
        for way in [way for ways in self._open.values() for way in ways]:
            way.cut()

    def strike(self, role: str, fault: str) -> bool:
        """Have one connection of a role suffer a fault; False where there is none."""
        ways = sorted(self._open[role], key=lambda way: way.number)
        if not ways:
            return False
        way = self._chance.choice(ways)
        match fault:
            case "cut":
                way.cut()
            case "corrupt":
                way.corrupts = True
            case _:
                way.hold(3 * self._chance.random())
        return True

    async def _lead(self, role: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            endpoint = json.loads((self._run_folder / "endpoints" / f"{role}.json").read_text())
            host, _, port = endpoint["address"].removeprefix("tcp://").partition(":")
            there = await asyncio.open_connection(host, int(port))
        except (OSError, ValueError):
            writer.close()
            return
        way = _Way(number=len(self._open[role]), ends=(writer, there[1]))
        self._open[role].add(way)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(way.pass_on(reader, there[1]))
                group.create_task(way.pass_on(there[0], writer))
        finally:
            self._open[role].discard(way)


class _Way:
    """One connection and its other half."""

    def __init__(self, *, number: int, ends: tuple[asyncio.StreamWriter, asyncio.StreamWriter]) -> None:
        self.number = number
        self.corrupts = False
        """The next bytes that pass are changed."""
        self._ends = ends
        self._held_until = 0.0

    def cut(self) -> None:
        for end in self._ends:
            end.close()

    def hold(self, seconds: float) -> None:
        self._held_until = asyncio.get_running_loop().time() + seconds

    async def pass_on(self, source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
        loop = asyncio.get_running_loop()
        with contextlib.suppress(OSError):
            while data := await source.read(1 << 16):
                await asyncio.sleep(max(0.0, self._held_until - loop.time()))
                if self.corrupts:
                    self.corrupts = False
                    data = bytes([*data[:-1], data[-1] ^ 0x55])
                target.write(data)
                await target.drain()
        self.cut()
