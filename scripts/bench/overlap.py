"""Measures what streaming gains: the same work in the modes streaming, one_step_off and sync, engine and trainer on a core each.

The task is balanced: generating a batch takes about as long as training on it. Sync then uses one core at a time, and no schedule
can be more than twice as fast, plus what sync loses while the last sequences of a batch finish alone. The engine has a core to itself;
trainer, orchestrator and scorers share the other. `engine alone` is the same engine, kept full by the same prompts, with nobody else
running; `engine beside a busy core` is that engine while the other core multiplies matrices: what the machine itself takes from it, its
memory and clock shared, whoever works there.

Every mode does the same whole work, and its time runs from the first token generated to the last step trained: no head start counts as
speed, and filling and draining the pipeline, once per run, is paid for. The reward can be learnt (even characters), so that the time to
reach it can be shown: staleness might buy samples that teach less.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import shutil
import signal
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from pipelinerl.config import Config, Mode
from pipelinerl.config.file import parse
from scripts.bench import children, harness, warm
from scripts.bench.demo_runs import lines_of, mean


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The amount of work of a run, and what streaming must gain on it."""

    num_rounds: int
    """Of all that is compared, so that each thing is measured beside each other one."""
    num_steps: int
    groups_per_step: int
    max_running: int
    max_tokens: int
    alone_s: float
    """Seconds for which the engine alone is measured."""
    goal: float


FULL = Size(num_rounds=2, num_steps=20, groups_per_step=16, max_running=96, max_tokens=128, alone_s=12, goal=1.8)
QUICK = Size(num_rounds=1, num_steps=8, groups_per_step=4, max_running=32, max_tokens=64, alone_s=2.5, goal=1.5)
"""Its goal is lower, because filling and draining the pipeline is an eighth of so short a run."""
FOLDER = Path("runs/bench-overlap")
ENGINE_CORE, OTHER_CORE = 0, 1
GROUP_SIZE = 8
PROMPT_TOKENS = 16
"""Longer makes training dearer and generation, which caches the prompts of a group, hardly: it balances the halves."""
REWARD_GOAL = 0.7
"""Mean reward of a step's samples whose first time is the `s to reward` column."""


def prompts():
    """Endless prompts of random characters; the prompt source of the runs."""
    chance = np.random.default_rng(0)
    while True:
        yield {"prompt": "".join(chr(code) for code in chance.integers(48, 58, size=PROMPT_TOKENS))}


def reward(prompt: str, completion: str) -> float:
    """The fraction of even characters: 0.5 by chance, cheap, different between siblings, and it does not pull at the length."""
    return sum(ord(character) % 2 == 0 for character in completion) / max(1, len(completion))


def measure(arguments: Any) -> harness.Measured:
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("overlap needs two cores: with one, nothing can overlap")
    size = QUICK if arguments.quick else FULL
    warm.import_roles()
    shutil.rmtree(FOLDER, ignore_errors=True)
    children.result_of(_make_model)
    modes = [Mode.SYNC, Mode.STREAMING] if arguments.quick else [Mode.SYNC, Mode.ONE_STEP_OFF, Mode.STREAMING]
    ways: dict[str, Callable[[], Any]] = {"alone": lambda: children.result_of(_engine_alone, size, cores={ENGINE_CORE})}
    ways |= {"beside": lambda: _beside_a_busy_core(size)} | {mode.value: functools.partial(_run, mode, size) for mode in modes}
    turns = harness.in_turns(size.num_rounds, ways)
    rows = []
    for number, (alone, sync) in enumerate(zip(turns["alone"], turns[Mode.SYNC], strict=True)):
        for row in (turns[mode][number] for mode in modes):
            row["x sync"] = row["samples/s"] / sync["samples/s"]
            row["engine speed / alone"] = row["engine tokens/s"] / alone
            rows.append(row)
    streaming = turns[Mode.STREAMING]
    speeds = [row["engine tokens/s"] for row in streaming]
    alone, beside = statistics.median(turns["alone"]), statistics.median(turns["beside"])
    idle = statistics.median(row["engine idle"] for row in turns[Mode.SYNC])
    judged: dict[str, Any] = {"work": harness.Work.CPU, "speeds": turns.speeds}
    limit = 1 + min(idle, 1 - idle) / max(idle, 1 - idle)
    return harness.Measured(
        rows=rows,
        goals=[
            harness.at_least("streaming samples/s over sync", statistics.median(row["x sync"] for row in streaming), size.goal, **judged),
            harness.at_least("engine speed while training over alone", harness.median_ratio(speeds, turns["alone"]), 0.97, **judged),
            harness.at_least(
                "engine speed while training over beside a busy core", harness.median_ratio(speeds, turns["beside"]), 0.97, **judged
            ),
        ],
        notes=[
            f"engine alone: {alone:.0f} tokens/s; beside a busy core: {beside:.0f}, {beside / alone:.3f} of it: the limit of this machine",
            f"in sync the engine idles {idle:.0%} of the time: perfect overlap of these halves is {limit:.2f} x sync",
        ],
    )


def _config(mode: Mode, size: Size) -> Config:
    module = str(Path(__file__).resolve())
    tree: dict[str, Any] = {
        "run": {"name": mode.value, "folder": str(FOLDER)},
        "model": {"path": str(FOLDER / "model"), "dtype": "float32", "max_tokens": 256},
        "data": {"source": f"{module}:prompts"},
        "rollout": {"group_size": GROUP_SIZE, "max_tokens": size.max_tokens},
        "reward": [{"function": f"{module}:reward"}],
        "engine": {"max_running": size.max_running, "cores": [ENGINE_CORE]},
        "scorer": {"slots": 1},
        "batch": {"groups_per_step": size.groups_per_step, "max_tokens": 2048},
        "pipeline": {"mode": mode.value, "max_staleness": 4},
        "trainer": {"steps": size.num_steps, "learning_rate": 1e-3, "cores": [OTHER_CORE]},
    }
    return parse(tree, origin="overlap")


def _run(mode: Mode, size: Size) -> harness.Row:
    """A row of the table; what is told beside other rows or the engine alone is to be divided by them yet."""
    others = {"orchestrator": {OTHER_CORE}, "scorer-0": {OTHER_CORE}, "trainer": {OTHER_CORE}}
    lines = lines_of(warm.run(_config(mode, size), cores=others, deadline_s=300))
    steps = lines["step"]
    began = min(line["start"] for line in lines["span"] if line["process"].startswith("engine"))
    seconds = steps[-1]["t"] - began
    engine = [line for line in lines["load"] if "num_tokens" in line][-1]
    pauses = [line["pause_s"] * 1e3 for line in lines["swap"]]
    return {
        "mode": mode.value,
        "samples/s": sum(line["num_samples"] for line in steps) / seconds,
        "x sync": 1.0,
        f"s to reward {REWARD_GOAL}": next((line["t"] - began for line in steps if line["reward_mean"] >= REWARD_GOAL), None),
        "tokens/s": sum(line["num_trained_tokens"] for line in steps) / seconds,
        "engine idle": 1 - engine["busy_s"] / seconds,
        "trainer idle": 1 - sum(_working_s(line["trainer"]) for line in steps) / seconds,
        "staleness mean": mean(steps, "staleness_mean"),
        "max": max(line["staleness_max"] for line in steps),
        "pause p50 ms": float(np.percentile(pauses, 50)),
        "p99 ms": float(np.percentile(pauses, 99)),
        "engine tokens/s": engine["num_tokens"] / engine["busy_s"],
        "engine speed / alone": 1.0,
    }


def _working_s(trainer: dict[str, float]) -> float:
    """Seconds a step's trainer did not wait for rows."""
    return sum(trainer.get(f"{phase}_s", 0.0) for phase in ("forward_backward", "optimizer", "publish"))


def _make_model() -> None:
    """A random 1.1 M parameter Qwen3 over 512 characters, whose completions end by chance after about 110 tokens."""
    import torch
    from transformers import Qwen3ForCausalLM

    from scripts.bench.qwen3 import qwen3_config
    from tests.tiny_models import make_tokenizer

    torch.manual_seed(0)
    Qwen3ForCausalLM(qwen3_config(vocabulary=512)).save_pretrained(FOLDER / "model")
    make_tokenizer(FOLDER / "model")


def _engine_alone(size: Size) -> float:
    """Tokens per second of the engine on its core, kept full, with nobody else running."""
    from pipelinerl.engine.vllm.engine import VllmEngine
    from pipelinerl.messages import Generate, Sampling

    config = _config(Mode.STREAMING, size)
    engine = VllmEngine(model=config.model, engine=config.engine, rollout=config.rollout, seed=0)
    chance = np.random.default_rng(0)
    running = submitted = tokens = 0
    end = measuring = 0.0
    while not end or time.monotonic() < end:
        while running < size.max_running * 5 // 4:
            ids = chance.integers(19, 29, size=PROMPT_TOKENS, dtype=np.int32)
            engine.submit(
                Generate(rollout_id=str(submitted), attempt=0, token_ids=ids, sampling=Sampling(max_tokens=size.max_tokens)), version=0
            )
            submitted, running = submitted + 1, running + 1
        passed = engine.step()
        running -= sum(len(sampled.finishes) for sampled in passed)
        tokens += sum(len(sampled.token_ids) for sampled in passed)
        if not end and submitted > 2 * size.max_running:
            measuring = time.monotonic()
            end, tokens = measuring + size.alone_s, 0
    return tokens / (time.monotonic() - measuring)


def _beside_a_busy_core(size: Size) -> float:
    neighbour = children.start(_multiply_matrices, cores={OTHER_CORE})
    try:
        return children.result_of(_engine_alone, size, cores={ENGINE_CORE})
    finally:
        os.kill(neighbour, signal.SIGKILL)
        os.waitpid(neighbour, 0)


def _multiply_matrices() -> None:
    """What a trainer would do on the other core, without end."""
    import torch

    matrix = torch.randn(1024, 384)
    while True:
        torch.nn.functional.linear(matrix, matrix)


if __name__ == "__main__":
    harness.run("overlap", measure)
