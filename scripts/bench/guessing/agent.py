"""Play every rollout of a run as a tree of games: python agent.py NUM_LEAVES NUM_AT_ONCE, with a gateway's two variables set.

A tree begins with a game from its first guess to its end. Each of its other games goes on from one of that game's questions, each as
likely, with a guess of its own, to its end (Tree-GRPO, arXiv:2509.21240, with one round of expansions). A leaf's reward stands at its last
guess, over the number of leaves: the reward of a tree is then the mean of its games, and no rule that divides by a spread sees the factor.
"""

from __future__ import annotations

import asyncio
import os
import random
import sys
from pathlib import Path
from typing import Any

import aiohttp  # vLLM brings it; several times as fast as httpx with hundreds of connections

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.guessing.games import MAX_TURNS, PROMPT, reply, reward

Line = tuple[str, ...]
"""The guesses before a turn."""


async def play(http: aiohttp.ClientSession, episode: dict[str, Any], *, num_leaves: int) -> None:
    """Play one tree, and finish its episode."""
    draw = random.Random(f"{episode['episode_id']} {episode['attempt']}")
    stem = await _game(http, episode, (), share=1 / num_leaves)
    branches = [stem[: draw.randrange(len(stem))] for _ in range(num_leaves - 1)]
    await asyncio.gather(*(_game(http, episode, guesses, share=1 / num_leaves) for guesses in branches))
    headers = {"authorization": f"Bearer {episode['token']}"}
    await _post(http, f"{episode['episode_url']}/finish", headers, {})


async def _game(http: aiohttp.ClientSession, episode: dict[str, Any], guesses: Line, *, share: float) -> Line:
    """Play a game to its end from what was guessed already, and post its share of the reward; return all its guesses."""
    headers = {"authorization": f"Bearer {episode['token']}"}
    number: int = episode["prompt"]["columns"]["number"]
    while True:
        said, turn_id = await _guess(http, episode["base_url"], headers, guesses, number=number)
        guesses = (*guesses, said)
        if reply(guesses, number) is None or len(guesses) == MAX_TURNS:
            break
    body = {"turn": turn_id, "reward": share * reward(guesses, number)}
    await _post(http, f"{episode['episode_url']}/reward", headers, body)
    return guesses


async def _guess(http: aiohttp.ClientSession, url: str, headers: dict[str, str], guesses: Line, *, number: int) -> tuple[str, str]:
    """Return what the model says after these guesses, and the id of its turn."""
    messages = [{"role": "user", "content": PROMPT}]
    for turn, guess in enumerate(guesses):
        answer = reply(guesses[: turn + 1], number)
        assert answer is not None, "a game that is over has no next guess"
        messages += [{"role": "assistant", "content": guess}, {"role": "user", "content": answer[0]}]
    body = await _post(http, f"{url}/chat/completions", headers, {"model": "policy", "messages": messages})
    return body["choices"][0]["message"]["content"] or "", body["id"]


async def _post(http: aiohttp.ClientSession, url: str, headers: dict[str, str], body: dict[str, Any]) -> dict[str, Any]:
    async with http.post(url, json=body, headers=headers) as heard:
        heard.raise_for_status()
        return {} if heard.status == 204 else await heard.json()


async def work(http: aiohttp.ClientSession, *, num_leaves: int) -> None:
    """Play episode after episode, until the run has ended."""
    url, headers = (
        f"{os.environ['PIPELINERL_GATEWAY']}/episodes/next",
        {"authorization": f"Bearer {os.environ['PIPELINERL_GATEWAY_TOKEN']}"},
    )
    while True:
        if lent := await _post(http, url, headers, {}):
            await play(http, lent, num_leaves=num_leaves)


async def main(num_leaves: int, num_at_once: int) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as http:
        found = await asyncio.gather(*(work(http, num_leaves=num_leaves) for _ in range(num_at_once)), return_exceptions=True)
    for error in found:
        if isinstance(error, BaseException) and not isinstance(error, aiohttp.ClientError):  # those say that the run has ended
            raise error


if __name__ == "__main__":
    asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))
