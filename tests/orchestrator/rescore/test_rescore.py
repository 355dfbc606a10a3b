"""`pipelinerl try`: what each function says of a few rows, by the scorer, the environment and the method of a run."""

from __future__ import annotations

import dataclasses
import http.server
import io
import json
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.rescore.__main__ import main
from tests.tiny_models import make_tokenizer

pytestmark = pytest.mark.process

REWARDS = """
import time

def right(prompt, completion, answer):
    return float(completion == answer)

def fussy(completion, num_tokens):
    if completion == "7":
        raise ValueError("my verifier broke")
    if completion == "8":
        time.sleep(60)
    return num_tokens / 10

def best(prompts, completions):
    return [float(one == max(completions)) for one in completions]

def reply(turns, answer):
    if turns[-1] == "9":
        raise KeyError("no such guess")
    return None if turns[-1] == answer else "no"

class Game:
    def reset(self, answer):
        self.answer = answer
        return "?"

    def step(self, message):
        return ("no", -0.5, False) if message != self.answer else (None, 1.0, True)

def solved(completion, turns, answer):
    return float(turns[-1] == answer)
"""
CONFIG = """
[model]
path = "model"
max_tokens = 64
[data]
source = "rows.jsonl"
[rollout]
max_tokens = 16
[[reward]]
function = "rewards.py:right"
"""
EVERY_REWARD = (
    'reward=[{function="rewards.py:right"}, {function="rewards.py:fussy", weight=0.5, deadline_s=1.0},'
    ' {function="rewards.py:best", per="group"}]'
)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A config, its rewards, two rows, and a model of which nobody loads more than the tokenizer."""
    make_tokenizer(tmp_path / "model")
    (tmp_path / "model" / "config.json").write_text(json.dumps({"model_type": "qwen2", "max_position_embeddings": 64, "eos_token_id": 2}))
    (tmp_path / "rewards.py").write_text(REWARDS)
    (tmp_path / "my.toml").write_text(CONFIG)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n{"prompt": "1+1=", "answer": "2"}\n')
    return tmp_path


@dataclasses.dataclass(frozen=True)
class Shown:
    returncode: int
    stdout: str
    stderr: str


@pytest.fixture
def tried(folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., Shown]:
    """What the process behind `pipelinerl try` does, in this one: the scorer's processes are its own."""
    monkeypatch.chdir(folder)

    def run(*words: str, typed: str = "") -> Shown:
        monkeypatch.setattr("sys.stdin", io.StringIO(typed))
        with pytest.raises(SystemExit) as end:
            main(["my.toml", *words])
        return Shown(int(end.value.code or 0), *map(str, capfd.readouterr()))

    return run


def test_siblings_are_scored_compared_and_given_advantages_and_a_failure_has_its_line(tried: Callable[..., Shown]):
    shown = tried(EVERY_REWARD, "--rows=1", "--completion=4", "--completion=7", "--completion=8", "--completion=12")
    assert shown.returncode == 1, "functions failed"
    text = shown.stdout
    assert text.startswith("== rows.jsonl:1: prompt of 4 tokens\n   | 2+2=\n   answer = '4'\n")
    assert "-- completion 1 of 4: 1 token, finish stop\n   | 4\n" in text
    assert "right                             1 x 1 = 1 " in text
    assert "fussy                           0.2 x 0.5 = 0.1 " in text
    assert "best                              1 x 1 = 1 " in text
    assert 'fussy                    FAILED: ValueError("my verifier broke") at rewards.py:9\n' in text
    assert 'File "' in text
    assert re.search(r"fussy +FAILED: no answer within 1 s, its deadline; its process was killed at \S*rewards.py:11\n", text)
    assert "no reward: timeout: fussy did not return within 1 s; its process was killed" in text
    assert "-- grpo over 2 of 4 siblings\n   reward       2.05   advantage +0.7071\n   reward        0.1   advantage -0.7071\n" in text
    assert text.endswith("4 completions tried: 2 without a reward, see FAILED above\n")


def test_a_column_is_tried_on_every_row(tried: Callable[..., Shown]):
    shown = tried("--column=answer")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("right                             1 x 1 = 1 ") == 2
    assert shown.stdout.endswith("2 completions tried: every function answered\n")
    missing = tried("--column=solution")
    assert missing.returncode == 1
    assert missing.stderr == "DataError: rows.jsonl:1 has no column 'solution'; it has answer\n"


def test_completions_are_asked_for_where_none_is_named(tried: Callable[..., Shown]):
    shown = tried("--rows=2", typed="4\n\n\n")
    assert shown.returncode == 0, shown.stderr
    assert shown.stdout.count("== rows.jsonl:1: ") == 1, "the prompt is shown once, before the question"
    assert "   | 4\n   right                             1 x 1 = 1 " in shown.stdout
    assert shown.stdout.endswith("1 completions tried: every function answered\n"), "nothing was typed for the second row"


def test_with_an_environment_completions_are_the_turns_of_one_rollout(tried: Callable[..., Shown]):
    options = ('environment.function="rewards.py:reply"', 'reward=[{function="rewards.py:solved"}]')
    shown = tried(*options, "--rows=1", "--completion=3", "--completion=4")
    assert shown.returncode == 0, shown.stderr
    assert (
        "   [turn 1]\n   | 3\n   [environment 1]\n   | no\n   [turn 2]\n   | 4\n   solved                            1 x 1 = 1 "
        in shown.stdout
    )
    failed = tried(*options, "--rows=1", "--completion=9")
    assert failed.returncode == 1
    assert "reply                    FAILED: KeyError(" in failed.stdout
    assert "at rewards.py:19\n" in failed.stdout
    assert "no reward: error: environment: reply raised KeyError" in failed.stdout


def test_with_a_class_completions_are_the_turns_of_one_episode(tried: Callable[..., Shown]):
    shown = tried('environment.cls="rewards.py:Game"', "reward=[]", "--rows=1", "--completion=3", "--completion=4")
    assert shown.returncode == 0, shown.stderr
    turns = "   [environment 0]\n   | ?\n   [turn 1]\n   | 3\n   [environment 1]\n   | no\n   [turn 2]\n   | 4\n"
    assert turns + "   environment                     0.5 x 1 = 0.5\n" in shown.stdout


def test_the_engine_writes_siblings(tried: Callable[..., Shown]):
    """The engine without a model; with vLLM it is the same process with another engine in it."""
    shown = tried("engine.kind=fake", "--sample=3", "--rows=1")
    assert shown.returncode == 0, shown.stderr
    assert "-- completion 3 of 3: " in shown.stdout
    assert "-- grpo over 3 of 3 siblings" in shown.stdout


class Judge(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))["messages"][0]["content"]
        score = 3 if "second" in asked else 9
        body = json.dumps({"choices": [{"message": {"content": f"SCORE: {score}"}}]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture
def judge() -> Iterator[str]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1"
        server.shutdown()
        thread.join()


def test_a_judge_says_what_it_thinks_of_every_step(tried: Callable[..., Shown], judge: str):
    prm = f'prm={{ separator = ";", judge = {{ url = "{judge}", model = "m" }} }}'
    shown = tried(prm, "--rows=1", "--completion=first;second")
    assert shown.returncode == 0, shown.stderr
    assert f"   steps, by m at {judge}:\n            0.9  (to token 5) first\n            0.3  (to token 11) second\n" in shown.stdout


def test_one_way_of_naming_completions_at_a_time(folder: Path):
    command = [sys.executable, "-m", "pipelinerl", "try", "my.toml"]
    refused = subprocess.run([*command, "--column=answer", "--sample=2"], capture_output=True, text=True, check=False, cwd=folder)
    assert refused.returncode == 1
    assert "--column and --sample: a row is tried with one of them" in refused.stderr
    shown = subprocess.run([*command, "--column=answer", "--rows=1"], capture_output=True, text=True, check=False, cwd=folder)
    assert shown.stdout.endswith("1 completions tried: every function answered\n")


def test_a_reward_that_cannot_be_imported_is_told(tried: Callable[..., Shown]):
    shown = tried('reward=[{function="rewards.py:rigth"}]', "--column=answer")
    assert shown.returncode == 1
    assert "rewards.py has no 'rigth'; did you mean 'right'?" in shown.stderr
    assert "Traceback" not in shown.stderr
