"""Does a model learn to look? Images in chat messages, by a real engine and the trainer, from random weights.

An Idefics3 model of 0.2 M random parameters is shown letters drawn at random, and then answers with any of four, whatever the picture
(`pictures`): a quarter is right. GRPO rewards the colour of the picture's square. Nothing of the warm start says how to see it, so what the
held-out pictures gain was found by RL, through the vision tower, which is trained and published with all other weights. `step 0` is the
largest difference of the engine's log-probabilities from the trainer's in the first step, in nats.
"""

from __future__ import annotations

import shutil
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import harness
from scripts.bench.demo_runs import lines_of, mean, program
from scripts.bench.pictures import make_model

FOLDER = Path("runs/bench-images")
SETTINGS = """
[model]
dtype = "float32"
max_tokens = 64
[data]
source = "scripts/bench/pictures.py:prompts"
[rollout]
group_size = 8
max_tokens = 4
[[reward]]
function = "scripts/bench/pictures.py:reward"
[algorithm]
name = "grpo"
[engine]
max_running = 64
options = { block_size = 32 }
[scorer]
slots = 1
[batch]
groups_per_step = 16
max_tokens = 2048
[pipeline]
max_staleness = 1
[trainer]
learning_rate = 2e-3
warmup_steps = 3
[evaluation]
source = "scripts/bench/pictures.py:held_out"
temperature = 1.0
limit = 256
[checkpoint]
every = 1000
"""


def measure(arguments: Any) -> harness.Measured:
    folder = FOLDER / ("quick" if arguments.quick else "full")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    began = time.monotonic()
    make_model(folder / "model", seed=0)
    warm_s = time.monotonic() - began
    settings = folder / "images.toml"
    settings.write_text(SETTINGS)
    words = [f"model.path={folder / 'model'}", f"run.folder={folder}", "run.name=images", "run.seed=0"]
    program("pipelinerl", "run", str(settings), *words, f"trainer.steps={10 if arguments.quick else 120}")
    lines = lines_of(next(folder.glob("images-2*")))
    row = {
        "steps": len(lines["step"]),
        "held-out before": lines["evaluation"][0]["reward_mean"],
        "held-out after": lines["evaluation"][-1]["reward_mean"],
        "reward, first 5 steps": mean(lines["step"][:5], "reward_mean"),
        "reward, last 5 steps": mean(lines["step"][-5:], "reward_mean"),
        "step 0": lines["step"][0]["trainer"]["logprob_gap_max"],
        "warm start s": round(warm_s, 1),
        "s": round(time.monotonic() - began, 1),
    }
    goals = [harness.at_most("step 0: engine and trainer differ by, nats", row["step 0"], 5e-5)]
    goals += [] if arguments.quick else [harness.at_least("held-out pictures after training", row["held-out after"], 0.9)]
    return harness.Measured(rows=[row], goals=goals)


if __name__ == "__main__":
    harness.run("images", measure, works=())
