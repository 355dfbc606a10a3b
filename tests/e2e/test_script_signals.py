"""SIGTERM, as a cluster sends it before it ends a job, and Ctrl-C: a script is saved, and goes on where it was. Real processes without a
model.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.observe.lines import read_journals

pytestmark = [pytest.mark.process, pytest.mark.slow, pytest.mark.timeout(200)]
ROOT = Path(__file__).parents[2]
PLUGINS = ROOT / "scripts" / "chaos" / "plugins.py"
SCRIPT = """
import asyncio, dataclasses, os, signal, sys
from orchestrator import controller
from pipelinerl import Controller

def with_stand_in(config, folder, made=controller.processes_beside_script):
    trainer = (sys.executable, "-m", "scripts.chaos.trainer", "--run-folder", str(folder))
    return tuple(dataclasses.replace(role, command=trainer) if role.name == "trainer" else role for role in made(config, folder))

controller.processes_beside_script = with_stand_in

def signalled_while_it_saves(run):
    stop = run.stop
    def stops(reason, **how):
        stop(reason, **how)
        os.kill(os.getpid(), signal.SIGTERM)
        os.kill(os.getpid(), signal.SIGINT)
    run.stop = stops

async def main():
    async with Controller(*sys.argv[1:], resume=True) as run:
        first = run.step
        print("first", first, flush=True)
        if first:
            signalled_while_it_saves(run._run)
        while run.step < 4:
            await run.train(run.advantages(await run.score(run.sample(run.prompts(2)))))
            await run.publish()
            if not first and run.step == 2:
                os.kill(os.getpid(), signal.SIGTERM)
                os.kill(os.getpid(), signal.SIGTERM)  # some send it to the step and to its batch script
                await asyncio.sleep(60.0)
    print("ended", run.step, flush=True)

asyncio.run(main())
"""


def test_a_script_that_gets_sigterm_saves_and_the_next_goes_on_and_saves_whatever_signals_come_meanwhile(tmp_path: Path) -> None:
    settings = demo_config(folder=tmp_path, seed=0)
    make_demo_model(tmp_path / "demo-model", seed=0)
    overrides = ["trainer.steps=8", "checkpoint.every=100", "evaluation.every=0", 'engine.kind="fake"', "engine.count=1", "engine.cores=[]"]
    overrides += [f'data.source="{PLUGINS}:prompts"', f'reward=[{{function = "{PLUGINS}:reward"}}]', f'run.folder="{tmp_path}"']
    command = [sys.executable, "-W", "error", "-c", SCRIPT, str(settings), *overrides]
    told = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert told.returncode == 128 + signal.SIGTERM, told.stdout + told.stderr
    assert "first 0" in told.stdout
    assert "ended" not in told.stdout
    assert told.stderr.count("SIGTERM: the script is ended, and what it has trained is saved") == 1
    assert "Traceback" not in told.stderr
    (folder,) = (path.parent for path in tmp_path.glob("*/ledger.sqlite"))
    lines = read_journals(folder)
    assert [line["version"] for line in lines if line["kind"] == "checkpoint"] == [2], "no other was due"
    assert [line["reason"] for line in lines if line["kind"] == "end"] == ["the script was stopped"]
    whole = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert whole.returncode == 128 + signal.SIGTERM, whole.stdout + whole.stderr
    assert "first 2" in whole.stdout
    assert "SIGINT: what the script has trained is being saved" in whole.stderr
    assert "Traceback" not in whole.stderr
    lines = read_journals(folder)
    assert [line["version"] for line in lines if line["kind"] == "checkpoint"] == [2, 4]
    assert [line["reason"] for line in lines if line["kind"] == "end"][1:] == ["the script has ended"]
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", folder], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    assert str(folder) not in subprocess.check_output(["ps", "-eo", "args"], text=True), "nothing is left behind"
