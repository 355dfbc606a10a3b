"""A script drives real processes: vLLM, the trainer, reward workers; each of them is killed under it, and the checker finds nothing."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.observe.lines import read_journals

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(400)]
ROOT = Path(__file__).parents[2]
SCRIPT = """
import asyncio, json, os, signal, sys
from pathlib import Path
from pipelinerl import Controller

def kill(run, peer):
    os.kill(int((run.folder / "processes" / peer).read_text().split()[1]), signal.SIGKILL)

async def compare(run, rollouts):
    # What the trainer says of rollouts of this very policy is what the engine said; the reference is the model that the run began with.
    for model in ("policy", "reference"):
        for one, found in zip(rollouts, await run.logprobs(rollouts, model=model)):
            is_of_policy = one.loss_mask & (one.versions == run.step)
            if model == "policy" or not run.step:
                assert abs(found - one.logprobs)[is_of_policy].max(initial=0.0) < 1e-3, (model, found, one)
            else:
                assert abs(found - one.logprobs)[one.loss_mask].max() > 1e-3, "the policy has moved away"

async def main():
    async with Controller(*sys.argv[1:], resume=True) as run:
        told = {"folder": str(run.folder), "first": run.step, "evaluated": await run.evaluate(), "texts": []}
        while run.step < 4:
            ahead = run.score(run.sample(run.prompts(6)))
            victim = {0: "engine-0", 1: "scorer-0", 2: "trainer-0", 3: "the script"}[run.step]
            if victim != "the script":
                kill(run, victim)
            elif told["first"] == 0:
                await asyncio.sleep(1.0)  # the ledger is written twice a second
                os.kill(os.getpid(), signal.SIGKILL)
            scored = await ahead
            told["texts"] += [(run.text(one.trajectory), one.trajectory.token_ids[one.trajectory.loss_mask].tolist()) for one in scored[:2]]
            rows = run.advantages(scored)
            if run.step == told["first"]:
                await compare(run, [row.trajectory for row in rows])
            done = await run.train(rows, loss="gspo" if run.step == 1 else None)
            assert done.metrics["num_trained_tokens"] > 0
            assert await run.publish() == run.step
            if run.step == 2:
                assert (await run.save() / "manifest.json").is_file()
        done = await run.sft([{"prompt": "12=", "answer": "21"}, {"prompt": "345=", "answer": "543"}])
        assert done.metrics["sft_tokens"] == 7  # each with the token that ends it
        assert await run.publish() == 5
        told["after"] = await run.evaluate()
        told["trained"], told["admitted"] = run.rollouts.trained, run.rollouts.admitted
    Path(sys.argv[2].partition("=")[2], "told.json").write_text(json.dumps(told))

asyncio.run(main())
"""


def test_a_script_outlives_the_kill_of_each_of_its_processes_and_goes_on_after_its_own(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "examples" / "make_model.py", tmp_path / "model"], check=True, capture_output=True, cwd=ROOT)
    small = ("trainer.steps=5", "rollout.group_size=4", "engine.max_running=16", "checkpoint.every=3", "evaluation.limit=4")
    held_out = f"evaluation.source={ROOT / 'examples' / 'custom_reward.py'}:prompts"
    settings = [f"run.folder={tmp_path}", f"model.path={tmp_path / 'model'}", f"reference.path={tmp_path / 'model'}", held_out, *small]
    arguments = [ROOT / "examples" / "custom_reward.toml", *settings, "sft.completion_column=answer"]
    command = [sys.executable, "-W", "error", "-c", SCRIPT, *map(str, arguments)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    folder = Path(told["folder"])
    assert told["first"] == 3
    assert told["trained"] == 4 * 24
    assert 4 * 24 < told["admitted"] <= 5 * 24, "what the killed script had asked for beside is cancelled"
    assert {type(told["evaluated"]), type(told["after"])} == {float}
    tokenizer = load_tokenizer(tmp_path / "model")
    assert len(told["texts"]) == 2
    assert [text for text, _ in told["texts"]] == [tokenizer.decode(ids, skip_special_tokens=True) for _, ids in told["texts"]]
    assert (folder / "model" / "config.json").is_file()
    lines = read_journals(folder)
    assert [line["version"] for line in lines if line["kind"] == "swap"][-1] == 5
    assert [line["version"] for line in lines if line["kind"] == "evaluation"] == [0, 3, 5]
    assert {2, 3, 5} <= {line["version"] for line in lines if line["kind"] == "checkpoint"}, "asked for, due, and at the end"
    killed_names = (folder / "logs" / "launcher.log").read_text()
    assert killed_names.count("starting it again") >= 2, killed_names
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", folder], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert str(folder) not in subprocess.check_output(["ps", "-eo", "args"], text=True), "nothing is left behind"
