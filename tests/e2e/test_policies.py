"""Two trained policies and a frozen one in one script, on real processes: one of each is killed, then the script, and it goes on."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.launch.run_folder import policy_folders
from pipelinerl.observe.lines import read_journals

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.process, pytest.mark.timeout(500)]
ROOT = Path(__file__).parents[2]
SCRIPT = """
import asyncio, json, os, runpy, signal, sys
from pathlib import Path
from pipelinerl import Policies

rows_of = runpy.run_path("examples/scripts/self_play.py")["rows_of"]
play = runpy.run_path("examples/scripts/self_play.py")["play"]

def kill(policy, peer):
    os.kill(int((policy.folder / "processes" / peer).read_text().split()[1]), signal.SIGKILL)

async def main():
    async with Policies(*sys.argv[1:], resume=True) as run:
        alice, bob, judge = run.policies["alice"], run.policies["bob"], run.frozen["judge"]
        told = {"first": [alice.step, bob.step]}
        while alice.step < 3:
            prompts = alice.prompts(4)
            victim = {0: (alice, "engine-0"), 1: (bob, "trainer-0"), 2: None}[alice.step]
            playing = [asyncio.ensure_future(play(one, prompts)) for one in (alice, bob)]
            opposed = judge.sample(prompts, group=1)
            with open(sys.argv[2].partition("=")[2] + "/judges", "a") as seen:
                print((judge.folder / "processes" / "engine-0").read_text().split()[1], file=seen)
            if victim is not None:
                kill(*victim)
                kill(judge, "engine-0")
            elif told["first"] == [0, 0]:
                await asyncio.sleep(1.0)
                os.kill(os.getpid(), signal.SIGKILL)
            (hers, a), (his, b) = await asyncio.gather(*playing)
            assert [one.finish for one in await opposed if one.error] == []
            likely = await judge.logprobs(hers)
            if not alice.step:  # the judge is the model that alice began with
                assert max(abs(found - one.logprobs).max() for one, found in zip(hers, likely)) < 1e-3
            await alice.train(rows_of(hers, a))
            if alice.step != 2:  # bob is a step behind from here on
                await bob.train(rows_of(his, b))
                await bob.publish()
            await alice.publish()
        told |= {"steps": [alice.step, bob.step], "folder": str(run.folder)}
    Path(sys.argv[2].partition("=")[2], "told.json").write_text(json.dumps(told))

asyncio.run(main())
"""


def test_policies_outlive_the_kill_of_their_processes_and_each_goes_on_at_its_own_step(tmp_path: Path) -> None:
    subprocess.run([sys.executable, ROOT / "examples" / "make_model.py", tmp_path / "model"], check=True, capture_output=True, cwd=ROOT)
    policies = "policies={alice={}, bob={trainer={learning_rate=3e-4}}, judge={frozen=true}}"
    settings = [f"run.folder={tmp_path}", f"model.path={tmp_path / 'model'}", policies, "trainer.steps=4", "rollout.group_size=4"]
    arguments = [ROOT / "examples" / "custom_reward.toml", *settings, "engine.max_running=16", "checkpoint.every=1"]
    command = [sys.executable, "-W", "error", "-c", SCRIPT, *map(str, arguments)]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    told = json.loads((tmp_path / "told.json").read_text())
    assert (told["first"], told["steps"]) == ([2, 1], [3, 2]), "each at its own last step"
    folder = Path(told["folder"])
    alice, bob, judge = policy_folders(folder)
    for policy, steps in ((alice, 3), (bob, 2)):
        assert (policy / "model" / "config.json").is_file()
        assert [line["version"] for line in read_journals(policy) if line["kind"] == "swap"][-1] == steps
    assert len(set((tmp_path / "judges").read_text().split())) == 4, "killed twice, and begun once more with the script"
    assert "trainer was killed by SIGKILL; starting it again" in (bob / "logs" / "launcher.log").read_text()
    checked = subprocess.run([sys.executable, "-m", "pipelinerl", "check", folder], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert checked.stdout.count("policy ") == 2
    said = subprocess.run([sys.executable, "-m", "pipelinerl", "report", folder], capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    assert all((one / "report.html").is_file() for one in (folder, alice, bob, judge))
    assert str(folder) not in subprocess.check_output(["ps", "-eo", "args"], text=True), "nothing is left behind"
