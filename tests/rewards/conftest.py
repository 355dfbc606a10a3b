"""A run folder with keys, a tokenizer of single characters, and a real scorer process on the other end of a real ZeroMQ hub."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.messages import (
    CancelRequest,
    Finish,
    FromScorer,
    Message,
    Prompt,
    Request,
    RequestKind,
    Result,
    Score,
    ScorerLoad,
    ScorerTask,
    Stop,
)
from pipelinerl.storage.schema import SCHEMA
from pipelinerl.transport.keys import make_keys
from pipelinerl.transport.zmq import ZmqHub
from tests.keys import PEERS

REPOSITORY = Path(__file__).parents[2]
REWARDS = Path(__file__).parent / "example_rewards.py"
PATIENCE_S = 60.0
"""Longest wait of a test for the scorer; a busy machine needs seconds to import transformers."""
SECRETS = {
    "WANDB_API_KEY": "wandb-secret",
    "HF_TOKEN": "hf-secret",
    "AWS_SECRET_ACCESS_KEY": "aws-secret",
    "AWS_PROFILE": "aws-profile-secret",
    "OPENAI_API_KEY": "openai-secret",
    "GITHUB_TOKEN": "github-secret",
    "DB_PASSWORD": "password-secret",
    "SLURM_JWT": "jwt-secret",
    "SENTRY_DSN": "dsn-secret",
    "INDEX_URL": "https://someone:url-secret@example.org/simple",
}


class Scorer:
    """A `python -m pipelinerl.rewards` and the orchestrator's end of its connection, driven from the test's own thread."""

    def __init__(self, run_folder: Path, *, scratch: Path) -> None:
        self.run_folder = run_folder
        self.scratch = scratch
        self._loop = asyncio.new_event_loop()
        self._hub = self._loop.run_until_complete(self._open())
        self._arrived: list[Message] = []
        self._names: dict[int, str] = {}
        """Rollout of each request."""
        self.log = open(run_folder / "scorer.log", "w+")  # noqa: SIM115
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pipelinerl.rewards", "--run-folder", str(run_folder), "--index", "3"],
            cwd=REPOSITORY,
            env=dict(os.environ) | SECRETS | {"TMPDIR": str(scratch)},
            stdout=self.log,
            stderr=subprocess.STDOUT,
        )

    async def _open(self) -> ZmqHub:
        return ZmqHub(self.run_folder, "scorer", accepts=FromScorer)

    def send(self, message: Message) -> None:
        """Send a message, or a task as a request of its own."""
        if isinstance(message, ScorerTask):
            request_id = len(self._names)
            self._names[request_id] = message.rollout_id
            message = Request(request_id=request_id, task=message)
        self._hub.send("scorer-3", message)

    def cancel(self, rollout_id: str) -> None:
        """Withdraw the requests about a rollout."""
        for request_id, name in self._names.items():
            if name == rollout_id:
                self.send(CancelRequest(request_id=request_id))

    def name_of(self, message: Message) -> str | None:
        """Rollout that a result is about; None for any other message."""
        return self._names[message.request_id] if isinstance(message, Result) else None

    def result_of(self, *rollout_ids: str, within_s: float = PATIENCE_S) -> Result:
        """Wait for the next result about one of these rollouts."""
        return self.next(Result, within_s=within_s, is_wanted=lambda result: self.name_of(result) in rollout_ids)

    def next(self, kind: type[Any], *, within_s: float = PATIENCE_S, is_wanted: Callable[[Any], bool] = lambda message: True) -> Any:
        """Wait for the next message of a class; others are kept for later."""
        end = time.monotonic() + within_s
        while True:
            for index, message in enumerate(self._arrived):
                if isinstance(message, kind) and is_wanted(message):
                    return self._arrived.pop(index)
            left_s = end - time.monotonic()
            assert left_s > 0, f"no {kind.__name__} within {within_s} s; log:\n{Path(self.log.name).read_text()}"
            self._receive(min(left_s, 1.0))

    def wait_until(self, claim: Callable[[], bool], *, what: str) -> None:
        """Wait for what no message tells, reading on: the scorer connects anew to an orchestrator that is silent."""
        end = time.monotonic() + PATIENCE_S
        while not claim():
            assert time.monotonic() < end, f"waited {PATIENCE_S:g} s: {what}"
            self._receive(0.01)

    def scored(self, *rollout_ids: str, within_s: float = PATIENCE_S) -> dict[str, Score]:
        """Wait for the scores of these rollouts."""
        scores: dict[str, Score] = {}
        while set(scores) < set(rollout_ids):
            result = self.result_of(*rollout_ids, within_s=within_s)
            name = self._names[result.request_id]
            assert name not in scores, f"answered twice: {result}"
            reward, components = (result.rewards[0], result.components[0]) if result.rewards else (None, {})
            facts = {"outcome": result.outcome, "error": result.error, "duration_s": result.duration_s}
            scores[name] = Score(rollout_id=name, attempt=0, reward=reward, components=components, **facts)
        return scores

    def ask(self, completion: str, **columns: Any) -> Score:
        """Have one completion scored and wait for it."""
        self.send(score("one", completion, **columns))
        return self.scored("one")["one"]

    def new_load(self) -> ScorerLoad:
        """Wait for a load sent after the last answer that was waited for."""
        self._arrived = [message for message in self._arrived if not isinstance(message, ScorerLoad)]
        return self.next(ScorerLoad)

    def wait_for_no_process_with(self, marker: str, *, within_s: float = PATIENCE_S) -> None:
        """Wait until no process has `marker` in its command line or environment."""
        end = time.monotonic() + within_s
        while found := processes_with(marker):
            assert time.monotonic() < end, f"still there after {within_s} s: {found}"
            time.sleep(0.02)

    def _receive(self, timeout_s: float) -> None:
        with contextlib.suppress(TimeoutError):
            for name, message in self._loop.run_until_complete(asyncio.wait_for(self._hub.receive(), timeout_s)):
                assert name == "scorer-3"
                self._arrived.append(message)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._hub.close()
        self._loop.close()
        self.log.close()


def score(rollout_id: str, *completions: str, finish: Finish = Finish.STOP, **columns: Any) -> ScorerTask:
    """A task: to score a completion, or to compare several, under the tokenizer of single characters."""
    num = len(completions)
    return ScorerTask(
        kind=RequestKind.REWARD if num == 1 else RequestKind.GROUP_REWARD,
        rollout_id=rollout_id,
        attempt=0,
        prompt=Prompt(prompt_id="0:0", text="what?", token_ids=encode("what?"), columns=columns),
        completions=tuple(map(encode, completions)),
        finishes=(finish,) * num,
        turns=(None,) * num,
    )


def encode(text: str) -> np.ndarray:
    return np.array([3 + ord(character) - 32 for character in text], np.int32)


def processes_with(marker: str) -> list[int]:
    """Processes, zombies aside, with `marker` in their command line or environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if marker.encode() in (folder / "cmdline").read_bytes() + (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def descendants_of(process_id: int) -> list[int]:
    """Children of a process, their children, and so on, nearest first."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            children.setdefault(int(stat.read_text().rpartition(")")[2].split()[1]), []).append(int(stat.parent.name))
    found = list(children.get(process_id, []))
    for one in found:
        found += children.get(one, [])
    return found


def is_alive(process_id: int) -> bool:
    """It exists and is no zombie."""
    with contextlib.suppress(OSError):
        return Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face folder with one token for each printable ASCII character, after <pad>, <bos> and <eos>."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers

    folder = tmp_path_factory.mktemp("tokenizer")
    special = ["<pad>", "<bos>", "<eos>"]
    vocabulary = {token: index for index, token in enumerate([*special, *map(chr, range(32, 127))])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(special)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "pad_token": "<pad>", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.fixture(scope="module")
def start_scorer(tmp_path_factory: pytest.TempPathFactory, tokenizer_folder: Path) -> Iterator[Callable[..., Scorer]]:
    """Start a scorer process with these rewards, each with a weight or settings: names in `example_rewards.py`, references, or folders."""
    started: list[Scorer] = []

    def start(
        rewards: dict[str, float | dict[str, Any]],
        *,
        slots: int = 2,
        deadline_s: float = 20.0,
        environment: str = "",
        stateful: str = "",
        concurrency: int | None = None,
        variables: Sequence[str] = (),
    ) -> Scorer:
        run_folder = tmp_path_factory.mktemp("run")
        make_keys(run_folder, PEERS)
        config = {
            "model": {"path": str(tokenizer_folder)},
            "data": {"source": "unused.jsonl"},
            "rollout": {"max_tokens": 100},
            "scorer": {"slots": slots, "deadline_s": deadline_s, "variables": list(variables)},
            "reward": [
                ({"model": name} if "/" in name and ":" not in name else {"function": name if ":" in name else f"{REWARDS}:{name}"})
                | (settings if isinstance(settings, dict) else {"weight": settings})
                for name, settings in rewards.items()
            ],
        }
        if environment:
            config["environment"] = {"function": f"{REWARDS}:{environment}", "options": {"mark": "!"}}
        if stateful:
            config["environment"] = {"cls": stateful, "concurrency": concurrency}
        (run_folder / "config.json").write_text(json.dumps({"schema": SCHEMA} | config))
        started.append(Scorer(run_folder, scratch=tmp_path_factory.mktemp("scratch")))
        return started[-1]

    yield start
    for scorer in started:
        scorer.close()


def stop(scorer: Scorer) -> int:
    """Stop a scorer; return its exit code."""
    scorer.send(Stop(reason="the test is over"))
    return scorer.process.wait(PATIENCE_S)
