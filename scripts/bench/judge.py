#!/usr/bin/env python
"""A judge behind vLLM's own OpenAI server: does it answer as a reward and as a process reward model, and how fast?

The judge is a random model of 0.4 M parameters, held to `SCORE: <digit>` by structured outputs: what it says means nothing, how it is asked
and read is what runs with any model. Some completions are asked for one by one as the built-in reward asks, so many at once; then every
step of as many traces, as `prm.judge` has them asked. The server's start is not counted.
"""

from __future__ import annotations

import contextlib
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import httpx

from pipelinerl.config import PrmJudgeSection, PrmSection
from pipelinerl.messages import Outcome
from pipelinerl.rewards.functions.judge import ask_judge
from pipelinerl.rewards.prm.judge import JudgeScorer
from pipelinerl.rewards.prm.steps import Splitter
from scripts.bench import harness

AT_ONCE = 8
START_S = 120.0
"""Longest wait for the server."""
TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
EXTRA: dict[str, Any] = {"structured_outputs": {"regex": "SCORE: [0-9]"}}


def measure(arguments: Any) -> harness.Measured:
    count = 16 if arguments.quick else 64
    found = harness.Measured(notes=[f"{AT_ONCE} questions at once, 0.4 M parameters, CPU"])
    with tempfile.TemporaryDirectory() as name, _server(Path(name)) as url:
        for way, ask in (("reward", _as_reward), ("every step", _as_process_reward_model)):
            scores, seconds = ask(url, count)
            given = sum(score is not None for score in scores)
            times = {"p50 s": statistics.median(seconds), "longest s": max(seconds)}
            found.rows.append({"asked as": way, "questions": len(scores), "with a score": given, **times})
            found.goals.append(harness.at_least(f"{way}: part with a score", given / len(scores), 1.0))
    return found


def _as_reward(url: str, count: int) -> tuple[list[float | None], list[float]]:
    def ask(number: int) -> tuple[float, float]:
        begin = time.perf_counter()
        score = ask_judge(f"What is {number} + 1?", f"It is {number + 1}.", url=url, model="judge", extra=EXTRA)
        return score, time.perf_counter() - begin

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask, range(count)))
    return [score for score, _ in answers], [duration for _, duration in answers]


def _as_process_reward_model(url: str, count: int) -> tuple[list[float | None], list[float]]:
    """Traces of three steps; the seconds are those of a batch of `AT_ONCE` traces."""
    section = PrmSection(judge=PrmJudgeSection(url=url, model="judge", concurrency=AT_ONCE, extra=EXTRA))  # pyright: ignore[reportCallIssue]
    scorer = JudgeScorer(section)
    scores: list[float | None] = []
    seconds: list[float] = []
    for first in range(0, count, AT_ONCE):
        traces = []
        for number in range(first, first + AT_ONCE):
            splitter = Splitter(lambda ids: "".join(map(chr, ids)), max_steps=10)
            traces.append(scorer.begin(f"{number}", 0, prompt=f"What is {number} + 1?", splitter=splitter))
            traces[-1].feed([ord(character) for character in "We count.\n\nOne more.\n\nDone."], is_last=True)
        begin = time.perf_counter()
        answers = scorer.score(traces)
        seconds.append(time.perf_counter() - begin)
        scores += [answer.score if answer.outcome is Outcome.OK else None for answer in answers]
    return scores, seconds


@contextlib.contextmanager
def _server(folder: Path) -> Iterator[str]:
    """vLLM's server around a fresh model; its address."""
    from tests.tiny_models import make_qwen2

    make_qwen2(folder / "judge")
    (folder / "template").write_text(TEMPLATE)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder / "judge"), "--served-model-name", "judge"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--chat-template", str(folder / "template"), "--dtype", "float32"]
    command += ["--enforce-eager", "--kv-cache-memory-bytes", str(64 << 20), "--max-model-len", "1024", "--disable-log-stats"]
    url = f"http://127.0.0.1:{port}"
    with open(folder / "log", "w+") as log, subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT) as server:
        try:
            _wait_for(url, server, log=folder / "log")
            yield f"{url}/v1"
        finally:
            server.terminate()


def _wait_for(url: str, server: subprocess.Popen[bytes], *, log: Path) -> None:
    deadline = time.monotonic() + START_S
    while True:
        with contextlib.suppress(httpx.HTTPError):
            if httpx.get(f"{url}/health", trust_env=False).status_code == 200:
                return
        if server.poll() is not None or time.monotonic() > deadline:
            raise SystemExit(f"vLLM's server did not start within {START_S:g} s:\n{log.read_text()[-3000:]}")
        time.sleep(0.2)


if __name__ == "__main__":
    harness.run("judge", measure, works=())
