"""verifiers 0.4, unmodified, plays a whole run: two of its environments, by its own client, with real vLLM and the real trainer.

The demo's model is shown moves of both for a little while, so that rewards differ: digits in four orders, of which one is paid, and guesses
at random. Then it is trained by what verifiers' environments pay. The run is too short to learn much; what is held is that every token
that verifiers was told trains, once, while weights are swapped under its episodes. Skipped where verifiers is not installed:
`python -m venv runs/verifiers && runs/verifiers/bin/pip install verifiers==0.4.0`.
"""

from __future__ import annotations

import itertools
import json
import os
import random
import sqlite3
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.demo import guess_number, sort_digits
from pipelinerl.launch.run_folder import GATEWAY_FILE
from pipelinerl.observe.lines import read_journals
from tests.e2e.test_gateway import ROOT, folder_of, started

HERE = ROOT / "tests" / "gateway"
PYTHON = ROOT / "runs" / "verifiers" / "bin" / "python"
STEPS, GROUPS, SIBLINGS, NUM_AT_ONCE = 16, 8, 8, 16
TEMPLATE = "{% for m in messages %}{{ m.content }}{% if m.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
SETTINGS = f"""
[model]
dtype = "float32"
max_tokens = 48
[rollout]
group_size = {SIBLINGS}
max_tokens = 8
[gateway]
deadline_s = 120
[engine]
max_running = 64
options = {{ block_size = 32 }}
[batch]
groups_per_step = {GROUPS}
max_tokens = 1024
[trainer]
steps = {STEPS}
learning_rate = 4e-4
[sft]
steps = 100
batch_size = 128
learning_rate = 2e-3
"""

pytestmark = [
    *(pytest.mark.vllm, pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(900)),
    pytest.mark.skipif(not PYTHON.exists(), reason="verifiers has no environment at runs/verifiers"),
]


def shown() -> Iterator[dict[str, str]]:
    """Moves of both environments, by turns: the digits in each order, and as many guesses, none of which heeds a hint."""
    draw, games = random.Random(0), guess_number.prompts(seed=1)
    for row in sort_digits.demonstrations():
        yield row
        said, turns, number = "guess=", list[str](), int(str(next(games)["number"]))
        while len(turns) < 4:
            guess = str(draw.randrange(10))
            yield {"prompt": said, "completion": guess}
            turns.append(guess)
            if (reply := guess_number.reply(turns, number)) is None:
                break
            said += f"{guess}{sort_digits.EOS}{reply[0]}"


def rows() -> Iterator[dict[str, Any]]:
    """Rows of a run: what the environment opens with is verifiers' own affair, and so is what a task is."""
    for task in range(STEPS * GROUPS):
        yield {"prompt": "verifiers", "taskset": ("verifiers_sort", "verifiers_game")[task % 2], "task": task}


def write(path: Path, made: Iterator[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in made))
    return path


def test_two_environments_of_verifiers_train_a_model_by_its_own_client(tmp_path: Path) -> None:
    model, taught = tmp_path / "model", tmp_path / "taught"
    sort_digits.make_model(model, seed=0)
    tokenizer = load_tokenizer(model)
    tokenizer.chat_template = TEMPLATE
    tokenizer.backend_tokenizer.model.unk_token = sort_digits.PAD  # verifiers' renderer also tries characters that no turn has
    tokenizer.save_pretrained(str(model))
    (tmp_path / "agent_openai.toml").write_text(SETTINGS)
    always = [f"run.folder={tmp_path}", "run.name=agent_openai"]
    source = write(tmp_path / "shown.jsonl", itertools.islice(shown(), 30_000))
    words = [f"model.path={model}", f"sft.source={source}", f"sft.output={taught}"]
    subprocess.run([sys.executable, "-m", "trainer.sft", tmp_path / "agent_openai.toml", *always, *words], check=True, cwd=ROOT)

    data, played = write(tmp_path / "rows.jsonl", rows()), tmp_path / "played.jsonl"
    words = [f"model.path={taught}", f"data.source={data}"]
    with started("-m", "pipelinerl", "run", tmp_path / "agent_openai.toml", *always, *words) as run:
        run_folder = folder_of(run, tmp_path)
        listens = json.loads((run_folder / GATEWAY_FILE).read_text())
        variables = {"PIPELINERL_GATEWAY": listens["address"], "PIPELINERL_GATEWAY_TOKEN": listens["token"]}
        variables |= {"HF_HUB_OFFLINE": "1", "PYTHONPATH": f"{HERE}:{ROOT}"}
        command = [PYTHON, HERE / "verifiers_agents.py", taught, str(NUM_AT_ONCE), played]
        with (tmp_path / "agents.log").open("w") as log, subprocess.Popen(command, env={**os.environ, **variables}, stderr=log) as agents:
            try:
                said, _ = run.communicate(timeout=600)
            except subprocess.TimeoutExpired:
                raise AssertionError((tmp_path / "agents.log").read_text()[-4000:]) from None
            finally:
                agents.kill()
    assert run.returncode == 0, said
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", run_folder], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr

    episodes = [json.loads(line) for line in played.read_text().splitlines()]
    journal = read_journals(run_folder)
    with sqlite3.connect(run_folder / "ledger.sqlite") as ledger:
        trained = {name for (name,) in ledger.execute("SELECT rollout_id FROM events WHERE kind = 'trained'")}
        versions = ledger.execute("SELECT oldest_version, newest_version FROM events WHERE kind = 'generated'").fetchall()
    own = [episode for episode in episodes if episode["rollout_id"].replace("-", "/") in trained]
    by_taskset = {
        name: [episode["reward"] for episode in own if episode["taskset"] == name] for name in ("verifiers_sort", "verifiers_game")
    }
    sampled = sum(episode["sampled"] for episode in own)
    assert sum(line["num_trained_tokens"] for line in journal if line["kind"] == "step") == sampled, "no token of unknown origin, none lost"
    assert len(trained) == STEPS * GROUPS * SIBLINGS
    assert sum(line["trainer"]["grad_norm"] > 0 for line in journal if line["kind"] == "step") >= STEPS // 2, "rewards of siblings differ"
    assert {newest for _, newest in versions} >= set(range(STEPS - 2)), "weights were swapped while verifiers played"
    assert min(map(len, by_taskset.values())) >= STEPS * GROUPS * SIBLINGS // 4, "both environments are played"
    means = {name: statistics.mean(rewards) for name, rewards in by_taskset.items()}
    print(f"{sampled} sampled tokens trained, {len(trained)} rollouts, mean rewards {means}")
