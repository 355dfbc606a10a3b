"""`python -m scripts.chaos.agents RUN_FOLDER`: agents with OpenAI's own SDK, which play a run's episodes while its processes are killed.

Every request has to be answered, or to be told to try again: by a connection that breaks, 429, 503, or 409, which says that another attempt
has the episode. Any other answer is broken, and so is one that takes longer than `PATIENCE_S`. It plays until SIGTERM, and then prints its
counts as a line of JSON.
"""

from __future__ import annotations

import collections
import concurrent.futures
import json
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai

from pipelinerl.launch.run_folder import GATEWAY_FILE

NUM_AGENTS = 12
NUM_TURNS = 3
PATIENCE_S = 60.0
"""For an answer other than to try again."""
AGAIN_S = 0.2
"""Between two tries, beside those of the SDK."""


class Agents:
    """All agents of a run, and what they were told."""

    def __init__(self, run_folder: Path) -> None:
        self.counts: collections.Counter[str] = collections.Counter()
        self.broken: list[str] = []
        self.ends = threading.Event()
        self._run_folder = run_folder
        self._lock = threading.Lock()

    def play_on(self, number: int) -> None:
        """Play one episode after the other."""
        with httpx.Client(timeout=PATIENCE_S) as http:
            while not self.ends.is_set():
                if (episode := self._next(http)) is not None:
                    self._play(http, episode, posts=bool(number % 2))

    def _next(self, http: httpx.Client) -> dict[str, Any] | None:
        try:
            said = json.loads((self._run_folder / GATEWAY_FILE).read_text())
            headers = {"authorization": f"Bearer {said['token']}"}
            answer = http.post(f"{said['address']}/episodes/next", json={"timeout_s": 2}, headers=headers)
        except (FileNotFoundError, httpx.TransportError):
            self._wait("connections lost")
            return None
        if answer.status_code == 200:
            self._count("episodes")
            return answer.json()
        if answer.status_code != 204:
            self._refused("/episodes/next", answer.status_code, answer.text)
        return None

    def _play(self, http: httpx.Client, episode: dict[str, Any], *, posts: bool) -> None:
        messages: list[Any] = [{"role": "user", "content": episode["prompt"]["text"]}]
        num_said = 0
        with openai.OpenAI(base_url=episode["base_url"], api_key=episode["token"], timeout=PATIENCE_S) as client:
            for _ in range(NUM_TURNS):
                if (said := self._turn(client, messages)) is None:
                    return
                num_said += len(said)
                messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "hl"[len(said) % 2]}]
        headers = {"authorization": f"Bearer {episode['token']}"}
        try:
            answer = http.post(f"{episode['episode_url']}/finish", json={"reward": num_said % 2} if posts else {}, headers=headers)
        except httpx.TransportError:
            self._wait("connections lost")
            return
        if answer.status_code == 200:
            self._count("episodes finished")
        else:
            self._refused("finish", answer.status_code, answer.text)

    def _turn(self, client: openai.OpenAI, messages: list[Any]) -> str | None:
        """What the model says; None where the attempt is over."""
        end = time.monotonic() + PATIENCE_S
        while time.monotonic() < end and not self.ends.is_set():
            try:
                said = client.chat.completions.create(model="policy", messages=messages)
            except openai.APIConnectionError:
                self._wait("connections lost")
            except openai.APIStatusError as error:
                if self._refused("chat/completions", error.status_code, str(error)):
                    return None
            else:
                self._count("turns answered")
                return said.choices[0].message.content or ""
        if not self.ends.is_set():
            self._break(f"chat/completions was not answered for {PATIENCE_S:g} s")
        return None

    def _refused(self, route: str, status: int, text: str) -> bool:
        """Count a refusal; return whether another episode is to be asked for."""
        if status == 409:
            self._count("told that the attempt is over (409)")
            return True
        if status in (429, 503):
            self._wait(f"told to try again ({status})")
            return False
        self._break(f"{route}: {status} {text[:200]}")
        return True

    def _wait(self, what: str) -> None:
        self._count(what)
        self.ends.wait(AGAIN_S)

    def _count(self, what: str) -> None:
        with self._lock:
            self.counts[what] += 1

    def _break(self, words: str) -> None:
        with self._lock:
            self.broken.append(words)


def main() -> None:
    agents = Agents(Path(sys.argv[1]))
    signal.signal(signal.SIGTERM, lambda *_: agents.ends.set())
    with concurrent.futures.ThreadPoolExecutor(NUM_AGENTS) as pool:
        playing = [pool.submit(agents.play_on, number) for number in range(NUM_AGENTS)]
        while not agents.ends.wait(0.5):
            for one in playing:
                if one.done():
                    one.result()
    print(json.dumps({"counts": dict(agents.counts), "broken": agents.broken[:20]}), flush=True)


if __name__ == "__main__":
    main()
