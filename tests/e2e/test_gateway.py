"""The example's agent, with OpenAI's client, trains a real run: real vLLM, the real trainer, and a gateway that is killed on the way."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.launch.run_folder import GATEWAY_FILE
from pipelinerl.observe.lines import read_journals
from scripts.chaos import victims

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "agent_openai"
STEPS = 5

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(400)]


@contextlib.contextmanager
def started(*words: object, **environment: str) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env={**os.environ, **environment},
    )
    try:
        yield process
    finally:
        process.kill()
        process.wait()
        assert process.stdout is not None
        process.stdout.close()


def folder_of(run: subprocess.Popen[str], parent: Path) -> Path:
    """The run's folder, once its gateway listens."""
    while run.poll() is None:
        if found := list(parent.glob(f"agent_openai-*/{GATEWAY_FILE}")):
            return found[0].parent
        time.sleep(0.2)
    raise AssertionError(run.communicate()[0])


def test_an_agent_plays_every_rollout_of_a_run_whose_gateway_is_killed(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "examples" / "make_model.py", tmp_path / "model"], check=True, capture_output=True, cwd=ROOT)
    overrides = (f"run.folder={tmp_path}", f"model.path={tmp_path / 'model'}", f"trainer.steps={STEPS}", "batch.groups_per_step=4")
    with started("-m", "pipelinerl", "run", EXAMPLE / "run.toml", *overrides) as run:
        deadline = time.monotonic() + 200.0
        killed, run_folder = "", folder_of(run, tmp_path)
        listens = json.loads((run_folder / GATEWAY_FILE).read_text())
        while run.poll() is None:
            assert time.monotonic() < deadline, "the run did not end"
            variables = {"PIPELINERL_GATEWAY": listens["address"], "PIPELINERL_GATEWAY_TOKEN": listens["token"]}
            with started(EXAMPLE / "agent.py", **variables) as agent:
                while agent.poll() is None and run.poll() is None and time.monotonic() < deadline:
                    journal = run_folder / "journal" / "orchestrator.jsonl"
                    if not killed and journal.exists() and journal.read_text().count('"kind": "step"') >= 2:
                        (process_id,) = victims.find("gateway", run_folder)
                        os.kill(process_id, signal.SIGKILL)
                        killed = listens["address"]
                    time.sleep(0.2)
            time.sleep(0.5)
        assert run.stdout is not None
        said = run.stdout.read()
    assert run.returncode == 0, said
    assert f"export PIPELINERL_GATEWAY={listens['address']}" in said
    assert killed == listens["address"], "it was killed, and came back at the same address"
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", run_folder], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    lines = read_journals(run_folder)
    assert next(line for line in lines if line["kind"] == "end")["rollouts"]["trained"] == STEPS * 4 * 8
    with sqlite3.connect(run_folder / "ledger.sqlite") as ledger:
        lost = [reason for (reason,) in ledger.execute("SELECT reason FROM events WHERE kind = 'lost'")]
        versions = ledger.execute("SELECT oldest_version, newest_version FROM events WHERE kind = 'generated'").fetchall()
    assert "lost: the gateway was started again" in lost
    assert {newest for _, newest in versions} >= set(range(STEPS - 2)), "weights were swapped while agents played"
    assert (run_folder / GATEWAY_FILE).stat().st_mode & 0o777 == 0o600
