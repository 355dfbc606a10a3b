"""The load of a server by Tinker's own SDK, in an environment of its own (`scripts/bench/recipes/environment.py` makes it)."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import os
from pathlib import Path
from typing import Any

from scripts.bench.recipes.environment import PYTHON, make
from scripts.chaos.wire_client import PATIENCE_S, Broken


class SdkLoad:
    """The load of a server: `sdk_client.py`, in a process of its own."""

    def __init__(self, address: str, key: str, *, folder: Path, rank: int) -> None:
        make()
        self.counts: collections.Counter[str] = collections.Counter()
        self.num_steps = self.num_gradients = 0
        self.paths: list[str] = []
        """Of the models that were saved at the end, of both times."""
        self.problems: list[str] = []
        self._environment = {**os.environ, "TINKER_BASE_URL": address, "TINKER_API_KEY": key, "TINKER_TELEMETRY": "0"}
        self._log = folder / "sdk.log"
        self._file = folder / "told.json"
        program = Path(__file__).with_name("sdk_client.py")
        self._command = (str(PYTHON), str(program), "demo-model", str(rank), str(self._file))

    async def train(self, harmed: asyncio.Event) -> None:
        """Train and sample until all harm is done."""
        await self._run(harmed)
        said = _read(self._file)
        self.num_steps, self.num_gradients = len(said["asked"]), 2 * len(said["asked"])
        self.counts["samples beside"] = said["beside"]

    async def repeat(self) -> None:
        """Ask for the same again, of another model, and compare."""
        harmed = asyncio.Event()
        harmed.set()
        await self._run(harmed, "again")
        first, second = _read(self._file), _read(self._file.with_name(self._file.name + ".again"))
        self.paths = [first["path"], second["path"]]
        pairs = enumerate(zip(first["told"], second["told"], strict=True))
        self.problems = [f"step {step}: {str(one)[:200]} and {str(other)[:200]}" for step, (one, other) in pairs if one != other]

    async def _run(self, harmed: asyncio.Event, *options: str) -> None:
        """Run the client to its end. Raises `Broken` where it fails, or says nothing for `PATIENCE_S`."""
        with open(self._log, "ab") as log:  # noqa: ASYNC230  # a local file
            pipe = asyncio.subprocess.PIPE
            client = await asyncio.create_subprocess_exec(
                *self._command, *options, stdin=pipe, stdout=pipe, stderr=log, env=self._environment
            )
        telling = asyncio.create_task(_tell(client, harmed))
        try:
            assert client.stdout is not None
            while line := await asyncio.wait_for(client.stdout.readline(), PATIENCE_S):
                self.counts["answered"] = int(line.split()[1])
            if code := await client.wait():
                raise Broken(f"the client ended with {code}: {self._log.read_text()[-3000:]}")
        except TimeoutError:
            raise Broken(f"the client heard nothing for {PATIENCE_S:g} s: {self._log.read_text()[-3000:]}") from None
        finally:
            telling.cancel()
            if client.returncode is None:
                client.kill()
                await client.wait()


async def _tell(client: asyncio.subprocess.Process, harmed: asyncio.Event) -> None:
    """Tell the client that it has trained enough, once all harm is done."""
    await harmed.wait()
    assert client.stdin is not None
    with contextlib.suppress(ConnectionError):
        client.stdin.write(b"enough\n")
        await client.stdin.drain()


def _read(file: Path) -> Any:
    return json.loads(file.read_text())
