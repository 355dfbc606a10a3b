"""The Codex CLI of npm, unmodified, plays a whole run: real vLLM, the real trainer, and the gateway at its base URL.

The model is tiny and random, so vLLM's structured outputs hold its turns to calls of Codex's shell tool: what the calls say within that is
sampled, Codex carries them out and comes back with what they printed. Skipped where `codex` is not on the path.
"""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.launch.run_folder import GATEWAY_FILE
from pipelinerl.observe.lines import read_journals
from tests.e2e.test_gateway import folder_of, started
from tests.gateway.serving import CHATML
from tests.tokenizers import make_bytes

CODEX = shutil.which("codex")
CONTEXT = 24_576
"""Tokens of an episode: nearly all are Codex's own instructions, a byte each."""
CALL = r'<tool_call>\{"name": "exec_command", "arguments": \{"cmd": "echo [a-z]{3} >> log\.txt"\}\}</tool_call>'
SETTINGS = f"""
[model]
dtype = "float32"
max_tokens = {CONTEXT}
[rollout]
group_size = 2
max_tokens = 128
structured_outputs = [{{ regex = '{CALL}' }}, {{ regex = '{CALL}' }}, {{ regex = '{CALL}' }}, {{ choice = ["Done."] }}]
[gateway]
[engine]
max_running = 2
[batch]
groups_per_step = 1
max_tokens = {CONTEXT}
[trainer]
steps = 1
max_logprob_gap = 100.0
max_mismatch_kl = 100.0
"""

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(400)),
    pytest.mark.skipif(CODEX is None, reason="codex is not installed (npm install -g @openai/codex)"),
]


def make_model(folder: Path) -> None:
    """A model of one small layer that reads bytes, with a chat template."""
    from tests.tiny_models import change_config, make_qwen2

    make_qwen2(folder, tied=False, vocabulary=320)
    make_bytes(folder)
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = CHATML
    tokenizer.add_special_tokens({"eos_token": "<|end|>"})
    tokenizer.save_pretrained(str(folder))
    (folder / "generation_config.json").unlink(missing_ok=True)
    end = tokenizer.eos_token_id
    change_config(folder, max_position_embeddings=CONTEXT, bos_token_id=end, eos_token_id=end, pad_token_id=end)


def codex(lent: dict[str, Any], work: Path, home: Path) -> None:
    """Have Codex play an episode, in a folder of its own."""
    for folder in (work, home):
        folder.mkdir()
    provider = f'{{name="gateway", base_url="{lent["base_url"]}", env_key="GATEWAY_KEY", wire_api="responses"}}'
    settings = ('model="policy"', 'model_provider="gateway"', f"model_providers.gateway={provider}")
    command = [str(CODEX), "exec", "--skip-git-repo-check", "-C", str(work), "-s", "danger-full-access"]
    command += [word for setting in settings for word in ("-c", setting)]
    variables = {**os.environ, "GATEWAY_KEY": lent["token"], "CODEX_HOME": str(home), "HOME": str(home)}
    said = subprocess.run(
        [*command, lent["prompt"]["text"]],
        env=variables,
        capture_output=True,
        text=True,
        timeout=150,
        stdin=subprocess.DEVNULL,
        check=False,
    )
    assert said.returncode == 0, said.stderr


def test_codex_takes_three_turns_with_tools_and_every_token_it_was_told_trains_once(tmp_path: Path) -> None:
    make_model(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "write three lines to log.txt"}) + "\n")
    (tmp_path / "agent_openai.toml").write_text(SETTINGS)
    words = (
        f"run.folder={tmp_path}",
        "run.name=agent_openai",
        f"model.path={tmp_path / 'model'}",
        f"data.source={tmp_path / 'rows.jsonl'}",
    )
    sampled, lines = 0, collections.Counter[str]()
    with started("-m", "pipelinerl", "run", tmp_path / "agent_openai.toml", *words) as run:
        run_folder = folder_of(run, tmp_path)
        listens = json.loads((run_folder / GATEWAY_FILE).read_text())
        until_it_listens = httpx.HTTPTransport(retries=10)  # its address is known a little before
        with httpx.Client(base_url=listens["address"], timeout=120.0, transport=until_it_listens) as client:
            for number in range(2):
                answer = client.post("/episodes/next", json={"timeout_s": 60}, headers={"authorization": f"Bearer {listens['token']}"})
                lent = answer.json()
                headers = {"authorization": f"Bearer {lent['token']}"}
                codex(lent, tmp_path / f"work-{number}", tmp_path / f"home-{number}")
                written = (tmp_path / f"work-{number}" / "log.txt").read_text()
                assert re.fullmatch(r"([a-z]{3}\n){3}", written), "three calls, carried out one after the other"
                lines.update(written.split())
                turns = client.get(f"/episodes/{lent['episode_id']}", headers=headers).json()["turns"]
                assert [turn["parent"] for turn in turns] == [-1, 1, 3, 5], "each turn goes on from the ids of the one before"
                sampled += sum(turn["num_sampled"] for turn in turns)
                client.post(f"/episodes/{lent['episode_id']}/finish", json={"reward": float(number)}, headers=headers).raise_for_status()
        said, _ = run.communicate(timeout=200)
    assert run.returncode == 0, said
    assert len(lines) > 1, "what a call says within the grammar is sampled"
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", run_folder], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    journal = read_journals(run_folder)
    (step,) = [line for line in journal if line["kind"] == "step"]
    assert (step["num_samples"], step["num_trained_tokens"], step["trainer"]["tokens"]) == (2, sampled, sampled)
    assert next(line for line in journal if line["kind"] == "end")["rollouts"]["trained"] == 2
    print(f"{sampled} sampled tokens of {step['num_tokens']}, {sum(lines.values())} calls of tools: {' '.join(lines)}")
