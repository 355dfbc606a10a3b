"""Do environments of other people's packages train a model, through their adapters and under an interpreter of their own?

TextArena's GuessTheNumber-v0 (1 to 20, six turns) and a game behind a real OpenEnv server (a digit, eight turns, 0.1 lost for each wrong
guess). A fresh model of 1.1 M parameters is shown games that are played blindly, or by the hints without halving (`played`); then GRPO
trains it, three seeds each. Held-out games are sampled as in training, before and after it; the least mean return after it was set before
the first run (`LEAST`). Each run is a file; one that was interrupted goes on from its last checkpoint: call again.
`runs/environments` has the packages: `python -m venv runs/environments && runs/environments/bin/pip install textarena openenv`.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import harness
from scripts.bench.demo_runs import lines_of, mean, program
from scripts.bench.pieces import BUDGET, Pieces
from scripts.bench.played.demonstrations import GAMES, OPENING
from scripts.bench.played.model import make_model

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("runs/bench-games")
OTHER = ROOT / "runs" / "environments" / "bin" / "python"
LEAST = {"textarena": 0.9, "openenv": 0.65}
"""Mean return of held-out games after training, at least, with each seed: heeding the hints is worth about 0.9 and 0.7."""
STEPS, NUM_GAMES, NUM_HELD_OUT = 60, 600, 128
SETTINGS = """
[model]
dtype = "float32"
max_tokens = 400
[rollout]
group_size = 8
max_tokens = 320
stop = ["]"]
[engine]
max_running = 64
options = {{ block_size = 32 }}
[scorer]
slots = 1
[environment]
cls = "{module}:{cls}"
python = "{python}"
options = {options}
max_turns = 8
concurrency = 8
[algorithm]
name = "grpo"
[batch]
groups_per_step = 8
max_tokens = 4096
[pipeline]
max_staleness = 2
[trainer]
learning_rate = 5e-4
warmup_steps = 3
[checkpoint]
every = 5
[evaluation]
temperature = 1.0
[sft]
steps = 150
batch_size = 64
learning_rate = 2e-3
warmup_steps = 15
final_learning_rate_fraction = 0.05
"""


def measure(arguments: Any) -> harness.Measured | None:
    if not OTHER.exists():
        sys.exit(f"no interpreter with the packages at {OTHER}; --help says how it is made")
    folder = FOLDER / ("quick" if arguments.quick else "full")
    if arguments.again or arguments.quick:
        shutil.rmtree(folder, ignore_errors=True)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    wanted = [(name, seed) for seed in range(1 if arguments.quick else 3) for name in LEAST if arguments.only in ("", name)]
    pieces = Pieces(folder / "figures", wanted, budget_s=arguments.budget_s)
    while (missing := pieces.missing) and pieces.may_start:
        name, seed = missing[0]
        print(f"games: {name}, seed {seed}; {len(missing)} runs left", flush=True)
        with _game(name) as options:
            pieces.keep(missing[0], _run(name, seed, options, folder / name, num_steps=8 if arguments.quick else STEPS))
    rows = list(pieces.made.values())
    if missing:
        harness.show("games, so far", harness.Measured(rows=rows))
        return None
    worst = {name: min((row["held-out after"] for row in rows if row["game"] == name), default=None) for name in LEAST}
    goals = [
        harness.at_least(f"{name}: held-out return, worst seed", value, LEAST[name]) for name, value in worst.items() if value is not None
    ]
    return harness.Measured(rows=rows, goals=[] if arguments.quick else goals)


def _run(name: str, seed: int, options: dict[str, Any], folder: Path, *, num_steps: int) -> harness.Row:
    """Warm-start the model, unless an earlier seed has; train it, and return the row."""
    folder.mkdir(parents=True, exist_ok=True)
    module, cls, *_ = GAMES[name]
    settings = folder / "games.toml"
    table = "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items()) + " }"
    settings.write_text(SETTINGS.format(module=module, cls=cls, python=OTHER, options=table))
    taught = folder / "taught"
    words = [f"model.path={folder / 'model'}", f"run.folder={folder}"]
    if not (taught / "model.safetensors").exists():
        shown = folder / "demonstrations.jsonl"
        command = [OTHER, ROOT / "scripts/bench/played/demonstrations.py", name, str(NUM_GAMES), json.dumps(options)]
        with shown.open("w") as file:
            subprocess.run(command, check=True, stdout=file)
        shutil.rmtree(folder / "model", ignore_errors=True)
        texts = [row["prompt"] + row["completion"] for row in map(json.loads, shown.read_text().splitlines()[:200])]
        make_model(folder / "model", texts=texts, context=512)
        program("trainer.sft", str(settings), *words, f"sft.source={shown}", f"sft.output={taught}")
    prompts, held_out = folder / f"prompts-{seed}.jsonl", folder / "held-out.jsonl"
    _write_seeds(prompts, start=10_000 * (seed + 1), number=8 * num_steps + 64)
    _write_seeds(held_out, start=900_000, number=NUM_HELD_OUT)
    words = [f"model.path={taught}", f"run.folder={folder}", f"run.name=seed-{seed}", f"run.seed={seed}"]
    words += [f"data.source={prompts}", f"evaluation.source={held_out}", f"evaluation.limit={NUM_HELD_OUT}", f"trainer.steps={num_steps}"]
    begun = [path.parent.parent for path in folder.glob(f"seed-{seed}-2*/checkpoints/*")]
    program("pipelinerl", "run", str(settings), *words, *(["--resume", str(begun[0])] if begun else []))
    run_folder = max(folder.glob(f"seed-{seed}-2*"), key=lambda path: path.stat().st_mtime)
    lines = lines_of(run_folder)
    return {
        "game": name,
        "seed": seed,
        "held-out before": lines["evaluation"][0]["reward_mean"],
        "held-out after": lines["evaluation"][-1]["reward_mean"],
        "reward, first 5 steps": mean(lines["step"][:5], "reward_mean"),
        "reward, last 5 steps": mean(lines["step"][-5:], "reward_mean"),
        "steps": lines["step"][-1]["step"],
    }


@contextlib.contextmanager
def _game(name: str) -> Iterator[dict[str, Any]]:
    """The adapter's options, while what it needs is there."""
    if name == "textarena":
        yield {"env_id": "GuessTheNumber-v0", "max_turns": 6}
        return
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with subprocess.Popen([OTHER, ROOT / "tests/environments/openenv_game.py", str(port)], env=os.environ) as process:
        try:
            end = time.monotonic() + 120.0
            while process.poll() is None and time.monotonic() < end:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.2)
            yield {"url": f"http://127.0.0.1:{port}", "observation": "text"}
        finally:
            process.kill()


def _write_seeds(path: Path, *, start: int, number: int) -> None:
    path.write_text("".join(json.dumps({"prompt": OPENING, "seed": seed}) + "\n" for seed in range(start, start + number)))


if __name__ == "__main__":
    again = {"--again": {"action": "store_true", "help": "make all runs again"}}
    only = {"--only": {"default": "", "help": "of one game alone: textarena or openenv"}}
    harness.run("games", measure, works=(), options={**BUDGET, **again, **only})
