"""Does credit for turns help? GRPO, GiGPO and Tree-GRPO on `guess_number` with turns of one digit, at equal budgets of sampled tokens.

A model of 1.07 M parameters is taught games of which half are played blindly, and half by the hints (0.39 on average; halving what is left
is worth 0.81); then RL trains it with the real engine and trainer, five seeds a method, from one warm start. GRPO and GiGPO are played
by the built-in environment, groups of eight games; Tree-GRPO by an agent through the gateway (`guessing/agent.py`), groups of two trees
of six games that share beginnings. A run is stopped at the first step by which `BUDGET` sampled tokens were trained. Columns: the area
under the reward curve over tokens; the final policy's expected return over all ten numbers and every line of guesses, computed and not
sampled, for ten numbers leave none to hold out. Settings were chosen on a seed that is not among the judged ones. Each run is a file:
call again where it was interrupted.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from orchestrator.replay.recorded import read_recording
from pipelinerl.demo.sort_digits import make_model
from pipelinerl.launch.run_folder import GATEWAY_FILE
from scripts.bench import harness
from scripts.bench.demo_runs import lines_of, program
from scripts.bench.guessing.games import DIGITS, MAX_TURNS, expected_return, write_games
from scripts.bench.pieces import BUDGET as IN_PIECES
from scripts.bench.pieces import Pieces

ROOT = Path(__file__).resolve().parents[2]
FOLDER = Path("runs/bench-credit")
METHODS = ("grpo", "gigpo", "tree_grpo")
BUDGET = 15_000
"""Sampled tokens that are trained in a run; a token is a guess."""
NUM_LEAVES, NUM_AT_ONCE = 6, 64
SETTINGS = """
[run]
folder = "{folder}"
[model]
path = "{model}"
dtype = "float32"
max_tokens = 32
[data]
source = "pipelinerl.demo.guess_number:prompts"
[engine]
max_running = 128
options = {{ block_size = 32 }}
[scorer]
slots = 1
[algorithm]
overrides = {{ objective = {{ clip_low = 0.2, clip_high = 0.28 }} }}
[batch]
groups_per_step = 8
max_tokens = 1024
[pipeline]
max_staleness = 3
[trainer]
steps = 100000
learning_rate = 1e-3
warmup_steps = 5
betas = [0.9, 0.95]
[checkpoint]
every = 100000
[sft]
steps = 250
batch_size = 128
learning_rate = 2e-3
warmup_steps = 20
"""
GAMES = f"""
[rollout]
group_size = 8
max_tokens = 16
stop_token_ids = {list(DIGITS)}
[environment]
function = "scripts/bench/guessing/games.py:reply"
max_turns = {MAX_TURNS}
[[reward]]
function = "scripts/bench/guessing/games.py:reward"
"""
TREES = """
[rollout]
group_size = 2
max_tokens = 1
[gateway]
deadline_s = 120
"""


def measure(arguments: Any) -> harness.Measured | None:
    quick: bool = arguments.quick
    folder = FOLDER / ("quick" if quick else "full")
    if arguments.again or quick:
        shutil.rmtree(folder, ignore_errors=True)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    seeds = [100] if quick else list(range(5))
    methods = METHODS[:2] if quick else METHODS
    pieces = Pieces(folder / "figures", [(method, seed) for seed in seeds for method in methods], budget_s=arguments.budget_s)
    taught = _taught(folder)
    while (missing := [key for key in pieces.missing if key[0] in (arguments.only or methods)]) and pieces.may_start:
        method, seed = missing[0]
        print(f"credit: {method}, seed {seed}; {len(missing)} runs left", flush=True)
        pieces.keep(missing[0], _run(method, seed, folder / f"{method}-{seed}", taught, budget=2_000 if quick else BUDGET))
    made = list(pieces.made.values())
    rows = [run["row"] for run in made]
    if pieces.missing:
        harness.show("credit, so far", harness.Measured(rows=rows))
        return None
    found = harness.Measured(rows=[*rows, *(_mean(rows, method) for method in methods)])
    found.curves = {f"{run['row']['method']}, seed {run['row']['seed']}": run["curve"] for run in made}
    least = min(row["final return"] - row["before"] for row in rows)
    found.goals = [harness.at_least("sampled tokens of the shortest run", min(row["tokens"] for row in rows), 2_000 if quick else BUDGET)]
    found.goals += [] if quick else [harness.at_least("gain of the worst run over its warm start", least, 0.05)]
    found.notes = [f"final return less grpo's, seed by seed: {method} {_less_grpo(rows, method)}" for method in methods[1:]]
    found.notes.append("area of tree_grpo: games that go on from later questions count like whole ones, so it is no return, and lower")
    return found


def _taught(folder: Path) -> Path:
    """Return the warm start, made where it is missing."""
    if not (folder / "taught" / "model.safetensors").exists():
        make_model(folder / "model", seed=0)
        write_games(folder / "games.jsonl", num=4000, seed=0)
        settings = _settings(folder, folder / "model", "")  # without the run's stop tokens, which would become the model's own ends
        program("trainer.sft", str(settings), f"sft.source={folder / 'games.jsonl'}", f"sft.output={folder / 'taught'}")
    return folder / "taught"


def _settings(folder: Path, model: Path, played: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "credit.toml"
    path.write_text(SETTINGS.format(folder=folder, model=model) + played)
    return path


def _run(method: str, seed: int, folder: Path, taught: Path, *, budget: int) -> dict[str, Any]:
    """Train until the budget is used up; return the row, and the reward over tokens."""
    shutil.rmtree(folder, ignore_errors=True)
    is_tree = method == "tree_grpo"
    settings = _settings(folder, taught, TREES if is_tree else GAMES)
    words = ["run", str(settings), "run.name=run", f"run.seed={seed}", f"algorithm.name={method}"]
    with subprocess.Popen([sys.executable, "-m", "pipelinerl", *words], cwd=ROOT) as run:
        agent: subprocess.Popen[bytes] | None = None
        try:
            while run.poll() is None:
                if is_tree and (agent is None or agent.poll() is not None):  # it ends where nobody listens, as before the gateway does
                    agent = _agent(folder)
                if sum(tokens for tokens, _ in _steps(folder)) >= budget:
                    run.send_signal(signal.SIGINT)
                    run.wait(timeout=300)
                time.sleep(1.0)
        finally:
            run.terminate()
            if agent is not None:
                agent.kill()
                agent.wait()
    if run.returncode:
        sys.exit(f"credit: the run of {method}, seed {seed}, ended with {run.returncode}; its logs are in {folder}")
    curve, spent, area = list[tuple[int, float]](), 0, 0.0
    for tokens, reward in _steps(folder):
        tokens = min(tokens, budget - spent)
        spent, area = spent + tokens, area + tokens * reward
        curve.append((spent, reward))
        if spent == budget:
            break
    last = [reward for tokens, reward in curve if tokens > 0.9 * budget]
    run_folder = _run_folder(folder)
    row: harness.Row = {
        "method": method,
        "seed": seed,
        "before": expected_return(taught),
        "area": area / budget,
        "last tenth": statistics.mean(last),
        "final return": expected_return(run_folder / "model"),
        "tokens": sum(tokens for tokens, _ in _steps(folder)),
        "steps": len(_steps(folder)),
        "states met again": "-" if is_tree else _met_again(run_folder),
    }
    return {"row": row, "curve": curve}


def _agent(folder: Path) -> subprocess.Popen[bytes] | None:
    """Start the agent, once the run has a gateway."""
    if not (found := list(folder.glob(f"run-2*/{GATEWAY_FILE}"))):
        return None
    listens = json.loads(found[0].read_text())
    variables = {"PIPELINERL_GATEWAY": listens["address"], "PIPELINERL_GATEWAY_TOKEN": listens["token"]}
    command = [sys.executable, ROOT / "scripts/bench/guessing/agent.py", str(NUM_LEAVES), str(NUM_AT_ONCE)]
    return subprocess.Popen(command, env={**os.environ, **variables})


def _run_folder(folder: Path) -> Path:
    return max(folder.glob("run-2*"), key=lambda path: path.stat().st_mtime)


def _steps(folder: Path) -> list[tuple[int, float]]:
    """Sampled tokens and mean reward of each step so far."""
    if not list(folder.glob("run-2*/journal/orchestrator.jsonl")):
        return []
    return [(line["num_trained_tokens"], line["reward_mean"]) for line in lines_of(_run_folder(folder))["step"]]


def _met_again(run_folder: Path) -> float:
    """The part of the turns after a game's first whose state another turn of the same group answers: what GiGPO has beyond GRPO."""
    met = num = 0
    for group in read_recording(run_folder / "ledger.sqlite").groups:
        states = [state for member in group.members if (turns := member.trajectory.turns) is not None for state in turns.states[1:]]
        num += len(states)
        met += sum(states.count(state) > 1 for state in states)
    return met / num


def _mean(rows: list[harness.Row], method: str) -> harness.Row:
    """The mean of a method's rows, and the spread over seeds in place of the seed."""
    own = [row for row in rows if row["method"] == method]
    spreads = {name: _spread([row[name] for row in own]) for name in own[0] if name not in ("method", "seed")}
    return {"method": method, "seed": "mean ± std", **spreads}


def _less_grpo(rows: list[harness.Row], method: str) -> str:
    final = {(row["method"], row["seed"]): row["final return"] for row in rows}
    return _spread([value - final["grpo", seed] for (name, seed), value in final.items() if name == method])


def _spread(values: list[Any]) -> str:
    if isinstance(values[0], str):
        return values[0]
    return f"{statistics.mean(values):.3f} ± {statistics.stdev(values) if len(values) > 1 else 0.0:.3f}"


if __name__ == "__main__":
    again = {"--again": {"action": "store_true", "help": "forget the runs made before"}}
    only = {"--only": {"choices": METHODS, "action": "append", "help": "make runs of this method alone now; may be given again"}}
    harness.run("credit", measure, works=(), options={**IN_PIECES, **again, **only})
