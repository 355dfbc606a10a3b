"""A run with a real process reward model: vLLM writes, vLLM's pooling engine scores steps meanwhile, hopeless rollouts are stopped, and the
trainer trains on the others."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.observe.lines import read_journals
from scripts.chaos import victims
from tests.listeners import listeners_of, name_of, tree_of
from tests.tiny_models import make_classifier, make_prm

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(300)]


def rewards_with(model: Path) -> str:
    """A rule, and an outcome reward model beside it, as an override."""
    rule = f'{{function = "{Path(__file__).with_name("rewards.py")}:even_length"}}'
    return f'[{rule}, {{model = "{model}", weight = 0.1, dtype = "float32", deadline_s = 60.0}}]'


def test_steps_are_scored_and_rollouts_stopped_while_they_are_written_also_when_the_model_is_killed(tmp_path: Path) -> None:
    settings = demo_config(folder=tmp_path, seed=0)
    make_demo_model(tmp_path / "demo-model", seed=0)
    make_prm(tmp_path / "prm")
    make_classifier(tmp_path / "orm", "Llama")
    overrides = ("run.name=prm", "trainer.steps=12", "batch.groups_per_step=4", "evaluation.every=0", "evaluation.limit=4")
    overrides += (f"reward={rewards_with(tmp_path / 'orm')}", "run.restart_wait_s=0.0")
    overrides += ("model.max_tokens=104", "rollout.max_tokens=96", "algorithm.name=step_reinforce", "checkpoint.every=100")
    overrides += ('algorithm.overrides={aggregation = "seq-mean-token-sum-norm"}', "prm.early_stop.keep_probability=0.5")
    # Most rollouts are flagged, as soon as may be, and from first to last: some are still being written then, however slow the model is.
    overrides += ("prm.early_stop.threshold=0.9", "prm.early_stop.min_steps=1", "prm.early_stop.max_false_stop_fraction=1.0")
    overrides += (f"prm.path={tmp_path / 'prm'}", "prm.tag=#", 'prm.separator="5"', "prm.chunk_tokens=8", "prm.dtype=float32")
    core = max(os.sched_getaffinity(0))
    overrides += (f"prm.cores=[{core}]",)
    run = subprocess.Popen([sys.executable, "-m", "pipelinerl", "run", str(settings), *overrides], stdout=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 150
    while not (found := [*tmp_path.glob("prm-2*/journal/orchestrator.jsonl")]) or found[0].read_text().count('"kind": "step"') < 4:
        assert time.monotonic() < deadline, "4 steps were not trained within 150 s"
        assert run.poll() is None
        time.sleep(0.1)
    run_folder = found[0].parent.parent
    assert [one for one in listeners_of(tree_of(run.pid)) if not name_of(one)] == []
    (process_id,) = victims.find("prm", run_folder)
    assert os.sched_getaffinity(process_id) == {core}
    os.kill(process_id, signal.SIGKILL)
    output, _ = run.communicate(timeout=150)
    assert run.returncode == 0, output
    lines = read_journals(run_folder)
    steps = [line for line in lines if line["kind"] == "step"]
    assert len(steps) == 12
    assert {frozenset(line["components"]) for line in steps} == {frozenset({"even_length", "orm"})}, "a rule and a model, each apart"
    subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(run_folder)], check=True)
    loads = [line for line in lines if line["kind"] == "load" and "num_trace_tokens" in line]
    best = max(loads, key=lambda line: line["num_uncached_tokens"])
    print(
        f"tokens taken {best['num_trace_tokens']}, computed {best['num_computed']}, every step from scratch {best['num_uncached_tokens']}"
    )
    assert 0 < best["num_batches"] <= best["num_steps"]
    prm = [line["prm"] for line in lines if line["kind"] == "status" and line["prm"]][-1]
    print(f"{prm['num_hopeless']} flagged, {prm['num_stopped']} stopped, about {prm['num_saved_tokens']:.0f} tokens saved")
    assert prm["num_stopped"] > 0
    assert best["num_computed"] < best["num_uncached_tokens"]
    scored = [line for line in lines if line["kind"] == "span" and line["lane"] == "scorer-1"]
    passes = [line for line in lines if line["kind"] == "span" and line["lane"] == "engine-0"]
    is_overlapping = (one["start"] < other["end"] and other["start"] < one["end"] for one in scored for other in passes)
    assert any(is_overlapping), "engines went on meanwhile"


def test_completions_that_the_engine_writes_are_tried_with_rewards_and_process_reward_model(tmp_path: Path) -> None:
    """`step_reinforce` gives a token the score of its step: of one step, the score and the advantage are one number."""
    settings = demo_config(folder=tmp_path, seed=0)
    make_demo_model(tmp_path / "demo-model", seed=0)
    make_prm(tmp_path / "prm")
    make_classifier(tmp_path / "orm", "Llama")
    overrides = [f"reward={rewards_with(tmp_path / 'orm')}", "algorithm.name=step_reinforce"]
    overrides += ['algorithm.overrides={aggregation = "seq-mean-token-sum-norm"}', "rollout.max_tokens=16"]
    overrides += [f"prm.path={tmp_path / 'prm'}", "prm.tag=#", "prm.dtype=float32"]
    tried = [sys.executable, "-m", "pipelinerl", "try", str(settings), "--sample", "2", "--rows", "1", *overrides]
    said = subprocess.run(tried, capture_output=True, text=True, check=False)
    assert said.returncode == 0, said.stdout + said.stderr
    assert said.stdout.endswith("2 completions tried: every function answered\n")
    assert len(re.findall(r"even_length +[01] x 1 = [01] ", said.stdout)) == 2
    assert len(re.findall(r"orm +-?[0-9.]+ x 0.1 = ", said.stdout)) == 2
    scores = re.findall(r" (\S+)  \(to token \d+\) ", said.stdout)
    assert len(scores) == 2
    assert all(0 < float(score) < 1 for score in scores)
    assert re.findall(r"advantage \+(\S+)", said.stdout) == scores
