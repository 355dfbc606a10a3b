"""Do environments of other people's packages train a model, through their adapters and under an interpreter of their own?

TextArena's Secretary-v0, as it is registered (five values, one is to be taken, and it has to be the largest), and a game behind a real
OpenEnv server (a digit, eight turns, 0.1 lost for each wrong guess). A fresh model of 1.1 M parameters is shown moves (`played`), each
drawn by itself from a family of rules: a value is taken by a threshold from anywhere between 0 and 1, a digit is guessed blindly half of
the time. Then Dr. GRPO trains it, 256 games a step, three seeds each. Held-out games are sampled as in training, before and after it. What
policies are worth follows from arithmetic (`played.worth`), and the least mean return after training was set before the judged runs
(`GAMES`), after runs of seed 10: more than what was shown is worth. Each run is a file; one that was interrupted goes on from its last
checkpoint: call again.
`runs/environments` has the packages: `python -m venv runs/environments && runs/environments/bin/pip install textarena openenv`.
"""

from __future__ import annotations

import contextlib
import dataclasses
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
from scripts.bench.played import worth
from scripts.bench.played.demonstrations import ADAPTERS, OPENING
from scripts.bench.played.model import make_model

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("runs/bench-games")
OTHER = ROOT / "runs" / "environments" / "bin" / "python"
GROUPS_PER_STEP, NUM_HELD_OUT = 32, 512


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Game:
    """How a game is taught and trained, and what is asked of it."""

    least: float
    """Mean return of held-out games after training, at least, with each seed."""
    num_shown: int
    """Games that the warm start is shown."""
    sft_steps: int
    steps: int
    learning_rate: float
    concurrency: int
    """Games at once, each in a process of its own that has imported the package."""


GAMES = {
    "secretary": Game(least=0.55, num_shown=1000, sft_steps=150, steps=80, learning_rate=2e-4, concurrency=32),
    "openenv": Game(least=0.65, num_shown=2000, sft_steps=500, steps=60, learning_rate=3e-4, concurrency=16),
}
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
concurrency = {game.concurrency}
[algorithm]
name = "dr_grpo"
overrides = {{ objective = {{ clip_low = 0.2, clip_high = 0.28 }} }}
[batch]
groups_per_step = {groups_per_step}
max_tokens = 4096
[pipeline]
max_staleness = 2
[trainer]
learning_rate = {game.learning_rate}
warmup_steps = 5
final_learning_rate_fraction = 0.1
[checkpoint]
every = 10
[evaluation]
limit = {held_out}
temperature = 1.0
[sft]
steps = {game.sft_steps}
batch_size = 128
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
    names = [arguments.only] if arguments.only else list(GAMES)
    seeds = [arguments.seed] if arguments.seed is not None else range(1 if arguments.quick else 3)
    pieces = Pieces(folder / "figures", [(name, seed) for seed in seeds for name in names], budget_s=arguments.budget_s)
    while (missing := pieces.missing) and pieces.may_start:
        name, seed = missing[0]
        print(f"games: {name}, seed {seed}; {len(missing)} runs left", flush=True)
        with _served(name) as options:
            pieces.keep(missing[0], _run(name, seed, options, folder / name, num_steps=8 if arguments.quick else GAMES[name].steps))
    rows = list(pieces.made.values())
    if missing or arguments.seed is not None:
        harness.show("games, so far", harness.Measured(rows=rows))
        return None
    worst = {name: min(row["held-out after"] for row in rows if row["game"] == name) for name in names}
    goals = [harness.at_least(f"{name}: held-out return, worst seed", value, GAMES[name].least) for name, value in worst.items()]
    return harness.Measured(rows=rows, goals=[] if arguments.quick else goals, notes=worth.told())


def _run(name: str, seed: int, options: dict[str, Any], folder: Path, *, num_steps: int) -> harness.Row:
    """Warm-start the model, unless an earlier seed has; train it, and return the row."""
    settings = _settings(name, options, folder)
    taught = _taught(name, options, settings, folder)
    prompts, held_out = folder / f"prompts-{seed}.jsonl", folder / "held-out.jsonl"
    _write_seeds(prompts, start=10_000 * (seed + 1), number=GROUPS_PER_STEP * num_steps + 64)
    _write_seeds(held_out, start=900_000, number=NUM_HELD_OUT)
    words = [f"model.path={taught}", f"run.folder={folder}", f"run.name=seed-{seed}", f"run.seed={seed}"]
    words += [f"data.source={prompts}", f"evaluation.source={held_out}", f"trainer.steps={num_steps}"]
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
        "seconds": lines["step"][-1]["t"] - lines["step"][0]["t"],
    }


def _settings(name: str, options: dict[str, Any], folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    module, cls = ADAPTERS[name]
    table = "{ " + ", ".join(f"{key} = {json.dumps(value)}" for key, value in options.items()) + " }"
    words = {"module": module, "cls": cls, "python": OTHER, "options": table, "game": GAMES[name]}
    path = folder / "games.toml"
    path.write_text(SETTINGS.format(groups_per_step=GROUPS_PER_STEP, held_out=NUM_HELD_OUT, **words))
    return path


def _taught(name: str, options: dict[str, Any], settings: Path, folder: Path) -> Path:
    """Return the warm start, made where it is missing."""
    taught = folder / "taught"
    if not (taught / "model.safetensors").exists():
        shown = folder / "demonstrations.jsonl"
        command = [OTHER, ROOT / "scripts/bench/played/demonstrations.py", name, str(GAMES[name].num_shown), json.dumps(options)]
        with shown.open("w") as file:
            subprocess.run(command, check=True, stdout=file)
        shutil.rmtree(folder / "model", ignore_errors=True)
        texts = [row["prompt"] + row["completion"] for row in map(json.loads, shown.read_text().splitlines()[:200])]
        make_model(folder / "model", texts=texts, context=512)
        words = [f"model.path={folder / 'model'}", f"run.folder={folder}", f"sft.source={shown}", f"sft.output={taught}"]
        program("trainer.sft", str(settings), *words)
    return taught


@contextlib.contextmanager
def _served(name: str) -> Iterator[dict[str, Any]]:
    """The adapter's options, while what it needs is there."""
    if name == "secretary":
        yield {"env_id": "Secretary-v0"}
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
    only = {"--only": {"choices": list(GAMES), "help": "of one game alone"}}
    seed = {"--seed": {"type": int, "help": "one run with a seed that is not judged, to choose settings by"}}
    harness.run("games", measure, works=(), options={**BUDGET, **again, **only, **seed})
