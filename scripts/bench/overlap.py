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
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from pipelinerl.config import Config, Mode
from pipelinerl.config.file import parse
from pipelinerl.observe.lines import read_journals
from scripts.bench import harness, warm


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The amount of work of a run, and what streaming must gain on it."""

    num_steps: int
    groups_per_step: int
    max_running: int
    max_tokens: int
    alone_s: float
    """Seconds for which the engine alone is measured."""
    goal: float


FULL = Size(num_steps=20, groups_per_step=16, max_running=96, max_tokens=128, alone_s=12, goal=1.8)
QUICK = Size(num_steps=8, groups_per_step=4, max_running=32, max_tokens=64, alone_s=2.5, goal=1.5)
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


def main() -> None:
    arguments = harness.options(__doc__ or "").parse_args()
    if len(os.sched_getaffinity(0)) < 2:
        sys.exit("overlap needs two cores: with one, nothing can overlap")
    size = QUICK if arguments.quick else FULL
    warm.import_roles()
    shutil.rmtree(FOLDER, ignore_errors=True)
    _in_child(_make_model)
    alone = _in_child(_engine_alone, size)
    neighbour = _busy_neighbour()
    beside = _in_child(_engine_alone, size)
    os.kill(neighbour, signal.SIGKILL)
    os.waitpid(neighbour, 0)
    modes = [Mode.SYNC, Mode.STREAMING] if arguments.quick else [Mode.SYNC, Mode.ONE_STEP_OFF, Mode.STREAMING]
    measured = {mode: _measure(mode, size) for mode in modes}
    sync, streaming = measured[Mode.SYNC], measured[Mode.STREAMING]
    rows = [
        [
            mode.value,
            found["samples_per_s"],
            found["samples_per_s"] / sync["samples_per_s"],
            found["reward_s"],
            found["tokens_per_s"],
            found["engine_idle"],
            found["trainer_idle"],
            found["staleness_mean"],
            found["staleness_max"],
            found["pause_p50_ms"],
            found["pause_p99_ms"],
            found["busy_tokens_per_s"] / alone,
        ]
        for mode, found in measured.items()
    ]
    columns = [
        "mode",
        "samples/s",
        "x sync",
        f"s to reward {REWARD_GOAL}",
        "tokens/s",
        "engine idle",
        "trainer idle",
        "staleness mean",
        "max",
    ]
    columns += ["pause p50 ms", "p99 ms", "engine speed / alone"]
    limit = 1 + min(sync["engine_idle"], 1 - sync["engine_idle"]) / max(sync["engine_idle"], 1 - sync["engine_idle"])
    harness.finish(
        "overlap",
        arguments=arguments,
        columns=columns,
        rows=rows,
        goals=[
            harness.Goal(name="streaming samples/s over sync", value=streaming["samples_per_s"] / sync["samples_per_s"], goal=size.goal),
            harness.Goal(name="engine speed while training over alone", value=streaming["busy_tokens_per_s"] / alone, goal=0.97),
            harness.Goal(
                name="engine speed while training over beside a busy core", value=streaming["busy_tokens_per_s"] / beside, goal=0.97
            ),
        ],
        notes=[
            f"engine alone: {alone:.0f} tokens/s; beside a busy core: {beside:.0f}, {beside / alone:.3f} of it: the limit of this machine",
            f"in sync the engine idles {sync['engine_idle']:.0%} of the time: perfect overlap of these halves is {limit:.2f} x sync",
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


def _measure(mode: Mode, size: Size) -> dict[str, Any]:
    others = {"orchestrator": {OTHER_CORE}, "scorer-0": {OTHER_CORE}, "trainer": {OTHER_CORE}}
    run_folder = warm.run(_config(mode, size), cores=others, deadline_s=300)
    lines = read_journals(run_folder)
    done = [line for line in lines if line["kind"] == "step"]
    began = min(line["start"] for line in lines if line["kind"] == "span" and line["process"].startswith("engine"))
    seconds = done[-1]["t"] - began
    engine = [line for line in lines if line["kind"] == "load" and "num_tokens" in line][-1]
    pauses = [line["pause_s"] * 1e3 for line in lines if line["kind"] == "swap"]
    good = [line["t"] - began for line in done if line["reward_mean"] >= REWARD_GOAL]
    return {
        "seconds": seconds,
        "samples_per_s": sum(line["num_samples"] for line in done) / seconds,
        "reward_s": good[0] if good else None,
        "tokens_per_s": sum(line["num_trained_tokens"] for line in done) / seconds,
        "engine_idle": 1 - engine["busy_s"] / seconds,
        "trainer_idle": 1 - sum(_working_s(line["trainer"]) for line in done) / seconds,
        "staleness_mean": float(np.mean([line["staleness_mean"] for line in done])),
        "staleness_max": max(line["staleness_max"] for line in done),
        "pause_p50_ms": float(np.percentile(pauses, 50)),
        "pause_p99_ms": float(np.percentile(pauses, 99)),
        "busy_tokens_per_s": engine["num_tokens"] / engine["busy_s"],
    }


def _working_s(trainer: dict[str, float]) -> float:
    """Seconds a step's trainer did not wait for rows."""
    return sum(trainer.get(f"{phase}_s", 0.0) for phase in ("forward_backward", "optimizer", "publish"))


def _make_model() -> float:
    """A random 1.1 M parameter Qwen3 over 512 characters, whose completions end by chance after about 110 tokens."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from tests.tiny_models import make_tokenizer

    torch.manual_seed(0)
    folder = FOLDER / "model"
    config = Qwen3Config(
        vocab_size=512,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=32,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        eos_token_id=2,
        bos_token_id=1,
        pad_token_id=0,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    make_tokenizer(folder)
    return 0.0


def _engine_alone(size: Size) -> float:
    """Tokens per second of the engine on its core, kept full, with nobody else running."""
    os.sched_setaffinity(0, {ENGINE_CORE})
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
        chunks = engine.step()
        running -= sum(chunk.finish is not None for chunk in chunks)
        tokens += sum(len(chunk.token_ids) for chunk in chunks)
        if not end and submitted > 2 * size.max_running:
            measuring = time.monotonic()
            end, tokens = measuring + size.alone_s, 0
    return tokens / (time.monotonic() - measuring)


def _busy_neighbour() -> int:
    """A process that multiplies matrices on the other core, as a trainer would."""
    child = os.fork()
    if child:
        return child
    os.sched_setaffinity(0, {OTHER_CORE})
    import torch

    matrix = torch.randn(1024, 384)
    while True:
        torch.nn.functional.linear(matrix, matrix)


def _in_child(work, *arguments) -> float:
    """Run in a fork, so that this process never runs a torch operation and stays safe to fork."""
    reader, writer = os.pipe()
    if (child := os.fork()) == 0:
        try:
            os.write(writer, json.dumps(work(*arguments)).encode())
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as result:
        text = result.read()
    os.waitpid(child, 0)
    if not text:
        sys.exit(f"{work.__name__} failed; its error stands above")
    return json.loads(text)


if __name__ == "__main__":
    main()
