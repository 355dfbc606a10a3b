"""`python -m scripts.bench.paced.agents --run-folder RUN --agents N`: agents that play one turn each time, over kept connections.

Their client is a few lines over asyncio's streams: what is measured is the gateway, and no SDK. What each turn took is written to
`<run>/agents.json` every second.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from pipelinerl.launch.run_folder import GATEWAY_FILE
from pipelinerl.runtime.process import die_with_parent
from pipelinerl.runtime.watch import wait_for_file


class Client:
    """One connection: JSON out, JSON in."""

    def __init__(self, address: str) -> None:
        self._url = urlsplit(address)

    async def open(self) -> None:
        self._reader, self._writer = await asyncio.open_connection(self._url.hostname, self._url.port)

    async def post(self, path: str, token: str, body: Any) -> tuple[int, Any]:
        data = json.dumps(body).encode()
        head = f"POST {path} HTTP/1.1\r\nHost: gateway\r\nAuthorization: Bearer {token}\r\nContent-Length: {len(data)}\r\n\r\n"
        self._writer.write(head.encode() + data)
        head_bytes = await self._reader.readuntil(b"\r\n\r\n")
        status = int(head_bytes.split(b" ", 2)[1])
        lengths = [line for line in head_bytes.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        answer = await self._reader.readexactly(int(lengths[0].split(b":")[1])) if lengths else b""
        return status, json.loads(answer) if answer else None


async def play(address: str, token: str, turns: list[tuple[float, float]], counts: dict[str, int]) -> None:
    """Play until the run ends. `turns` are (when, seconds beside the engine's)."""
    client = Client(address)
    await client.open()
    while True:
        status, episode = await client.post("/episodes/next", token, {"timeout_s": 30})
        counts["requests"] += 1
        if status == 204:
            continue
        if status != 200:
            return
        path = f"/episodes/{episode['episode_id']}"
        body = {"model": "policy", "messages": [{"role": "user", "content": episode["prompt"]["text"]}]}
        began = time.monotonic()
        status, answer = await client.post(f"{path}/v1/chat/completions", episode["token"], body)
        if status == 200:
            turns.append((time.time(), time.monotonic() - began - answer["choices"][0]["engine_s"]))
        await client.post(f"{path}/finish", episode["token"], {})
        counts["requests"] += 2


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True)
    parser.add_argument("--agents", type=int, required=True)
    given = parser.parse_args()
    listens = json.loads(wait_for_file(given.run_folder / GATEWAY_FILE, peer="the gateway", deadline_s=60.0))
    turns: list[tuple[float, float]] = []
    counts = {"requests": 0}
    playing = [asyncio.create_task(play(listens["address"], listens["token"], turns, counts)) for _ in range(given.agents)]
    while not any(task.done() for task in playing):
        await asyncio.sleep(1.0)  # the file is written meanwhile
        draft = given.run_folder / "agents.draft"
        draft.write_text(json.dumps({"turns": turns} | counts))
        draft.rename(given.run_folder / "agents.json")


if __name__ == "__main__":
    die_with_parent()
    with contextlib.suppress(OSError, asyncio.IncompleteReadError):  # the run has ended
        asyncio.run(main())
