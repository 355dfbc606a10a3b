#!/usr/bin/env python
"""Measures what stopping hopeless rollouts early saves in a real training run: the same run with it and without, same seed, real vLLM.

The demo's model (1.07 M parameters) learns to put 6 digits in order, in three steps of 12 tokens, after a warm start on four behaviours of
which one is rewarded. A process reward model of 0.4 M parameters, trained on the task for seconds, scores every step while it is written,
in both runs; in one of them a step under `BELOW` has four of five such rollouts stopped. Both train as many steps of as many rollouts.

Tokens are those the engine sampled, up to the same step. `--quick` makes the run that stops alone, whose survivors tell what it saved.
What can be saved falls as the policy gets better: there is less to stop.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.config.file import load
from pipelinerl.demo.settings import demo_config, make_demo_model
from pipelinerl.observe.lines import read_journals
from scripts.bench import harness
from scripts.bench.stopped import prm
from scripts.bench.stopped.digits import SEPARATOR

BELOW, KEEP = 0.2, 0.2
TASK = Path(__file__).parent / "stopped" / "digits.py"
LAST = 10
"""Steps whose mean reward is reported."""


def main() -> None:
    arguments = harness.options(__doc__ or "").parse_args()
    warm, updates, steps = (5, 20, 3) if arguments.quick else (220, 300, 40)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = _prepare(folder, warm_steps=warm, steps=steps, held_out=16 if arguments.quick else 256)
        right = prm.train(folder / "prm", updates=updates)
        rows = [_run(folder, [*overrides, *more], name) for name, more in _ARMS.items() if not (arguments.quick and name == "no stop")]
    sampled, by_survivors = rows[-1][1], rows[-1][5]
    saved = by_survivors / (sampled + by_survivors) if arguments.quick else 1.0 - sampled / rows[0][1]
    harness.finish(
        "early_stop",
        arguments=arguments,
        columns=[
            "run",
            "tokens sampled",
            "rollouts started",
            "flagged",
            "stopped",
            "saved, by the survivors",
            f"reward, last {LAST} steps",
            "held-out before",
            "held-out after",
            "seconds",
        ],
        rows=rows,
        goals=[harness.Goal(name="tokens saved by stopping, part of those without", value=saved, goal=0.0)],
        notes=[
            f"{steps} steps of 128 rollouts started, 38 tokens whole, staleness bound 2, a step under {BELOW} flags, {KEEP:.0%} go on",
            f"the process reward model is right about {right:.1%} of steps; warm start of {warm} steps",
        ],
    )


_ARMS = {
    # Where nothing is stopped, rloo_early_stop is this.
    "no stop": ["run.name=whole", "algorithm.name=rloo_early_stop", 'algorithm.overrides={ advantage = "rloo" }'],
    "early stop": [
        "run.name=stopped",
        "algorithm.name=rloo_early_stop",
        "algorithm.overrides={}",
        f"prm.early_stop.threshold={BELOW}",
        f"prm.early_stop.keep_probability={KEEP}",
    ],
}


def _prepare(folder: Path, *, warm_steps: int, steps: int, held_out: int) -> list[str]:
    """A warm-started model, and what both runs are told."""
    settings = demo_config(folder=folder, seed=0)
    make_demo_model(folder / "demo-model", seed=0)
    overrides = [f'data.source="{TASK}:train_prompts"', f'evaluation.source="{TASK}:held_out_prompts"']
    overrides += [f'reward=[{{function="{TASK}:reward"}}]', f'sft.source="{TASK}:demonstrations"', f"sft.steps={warm_steps}"]
    overrides += [
        "model.max_tokens=56",
        "rollout.max_tokens=44",
        "engine.max_running=8",
        "batch.groups_per_step=16",
        "batch.max_tokens=2048",
    ]
    overrides += [f"trainer.steps={steps}", f"evaluation.every={steps}", f"evaluation.limit={held_out}", "trainer.learning_rate=5e-5"]
    overrides += [f"prm.path={folder / 'prm'}", f"prm.tag={prm.TAG}", f'prm.separator="{SEPARATOR}"', "prm.dtype=float32"]
    overrides += ["prm.chunk_tokens=7", "prm.early_stop.min_steps=1", "pipeline.max_staleness=2"]
    subprocess.run([sys.executable, "-m", "trainer.sft", str(settings), *overrides], check=True)
    return [*overrides, f"model.path={load(settings).sft_output}"]


def _run(folder: Path, overrides: list[str], name: str) -> list[Any]:
    subprocess.run([sys.executable, "-m", "pipelinerl", "run", str(folder / "demo.toml"), *overrides], check=True)
    run_folder = next(folder.glob("stopped-2*" if name == "early stop" else "whole-2*"))
    subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(run_folder)], check=True)
    lines = list(read_journals(run_folder))
    steps = [line for line in lines if line["kind"] == "step"]
    status = [line for line in lines if line["kind"] == "status"]
    held_out = [line["reward_mean"] for line in lines if line["kind"] == "evaluation"]
    last = status[-1]
    stopping = last["prm"] if "num_stopped" in (last["prm"] or {}) else {"num_hopeless": 0, "num_stopped": 0, "num_saved_tokens": 0.0}
    return [
        name,
        last["generated_tokens"],
        last["rollouts"]["admitted"],
        stopping["num_hopeless"],
        stopping["num_stopped"],
        stopping["num_saved_tokens"],
        sum(line["reward_mean"] for line in steps[-LAST:]) / len(steps[-LAST:]),
        held_out[0],
        held_out[-1],
        steps[-1]["t"] - steps[0]["t"],
    ]


if __name__ == "__main__":
    main()
