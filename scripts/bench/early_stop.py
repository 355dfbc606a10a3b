#!/usr/bin/env python
"""Measures what stopping hopeless rollouts early saves in a real training run: the same run with it and without, same seed, real vLLM.

The demo's model (1.07 M parameters) learns to put 6 digits in order, in three steps of 12 tokens, after a warm start on four behaviours of
which one is rewarded. A process reward model of 0.4 M parameters, trained on the task for seconds, scores every step while it is written,
in both runs; in one of them a step under `BELOW` has four of five such rollouts stopped. Both train as many steps of as many rollouts.

Tokens are those the engine sampled, up to the same step. `--quick` makes the run that stops alone, whose survivors tell what it saved.
What can be saved falls as the policy gets better: there is less to stop.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import harness
from scripts.bench.demo_runs import lines_of, mean, prepare, program, warm_start
from scripts.bench.stopped import prm
from scripts.bench.stopped.digits import SEPARATOR

BELOW, KEEP = 0.2, 0.2
TASK = Path(__file__).parent / "stopped" / "digits.py"
LAST = 10
"""Steps whose mean reward is reported."""


def measure(arguments: Any) -> harness.Measured:
    warm, updates, steps = (5, 20, 3) if arguments.quick else (220, 300, 40)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        overrides = _prepare(folder, warm_steps=warm, steps=steps, held_out=16 if arguments.quick else 256)
        right = prm.train(folder / "prm", updates=updates)
        rows = [_run(folder, [*overrides, *more], name) for name, more in _ARMS.items() if not (arguments.quick and name == "no stop")]
    sampled, by_survivors = rows[-1]["tokens sampled"], rows[-1]["saved, by the survivors"]
    saved = by_survivors / (sampled + by_survivors) if arguments.quick else 1.0 - sampled / rows[0]["tokens sampled"]
    return harness.Measured(
        rows=rows,
        goals=[harness.at_least("tokens saved by stopping, part of those without", saved, 0.0)],
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
    overrides = [f'data.source="{TASK}:train_prompts"', f'evaluation.source="{TASK}:held_out_prompts"']
    overrides += [f'reward=[{{function="{TASK}:reward"}}]', f'sft.source="{TASK}:demonstrations"', f"sft.steps={warm_steps}"]
    overrides += ["model.max_tokens=56", "rollout.max_tokens=44", "engine.max_running=8"]
    overrides += ["batch.groups_per_step=16", "batch.max_tokens=2048", "pipeline.max_staleness=2"]
    overrides += [f"trainer.steps={steps}", f"evaluation.every={steps}", f"evaluation.limit={held_out}", "trainer.learning_rate=5e-5"]
    overrides += [f"prm.path={folder / 'prm'}", f"prm.tag={prm.TAG}", f'prm.separator="{SEPARATOR}"', "prm.dtype=float32"]
    overrides += ["prm.chunk_tokens=7", "prm.early_stop.min_steps=1"]
    return [*overrides, warm_start(prepare(folder), *overrides)]


def _run(folder: Path, overrides: list[str], name: str) -> harness.Row:
    program("pipelinerl", "run", str(folder / "demo.toml"), *overrides)
    run_folder = next(folder.glob("stopped-2*" if name == "early stop" else "whole-2*"))
    program("pipelinerl.checker", str(run_folder))
    lines = lines_of(run_folder)
    steps, last = lines["step"], lines["status"][-1]
    stopping = last["prm"] if "num_stopped" in (last["prm"] or {}) else {"num_hopeless": 0, "num_stopped": 0, "num_saved_tokens": 0.0}
    return {
        "run": name,
        "tokens sampled": last["generated_tokens"],
        "rollouts started": last["rollouts"]["admitted"],
        "flagged": stopping["num_hopeless"],
        "stopped": stopping["num_stopped"],
        "saved, by the survivors": stopping["num_saved_tokens"],
        f"reward, last {LAST} steps": mean(steps[-LAST:], "reward_mean"),
        "held-out before": lines["evaluation"][0]["reward_mean"],
        "held-out after": lines["evaluation"][-1]["reward_mean"],
        "seconds": steps[-1]["t"] - steps[0]["t"],
    }


if __name__ == "__main__":
    harness.run("early_stop", measure, works=())
