"""Serve a toy model, and run recipes of tinker-cookbook against it, one after another: python -m scripts.bench.recipes FOLDER [RECIPE ...].

A network namespace of its own has nothing but a loopback: neither a recipe nor the server can reach anything outside. What each
recipe logged, and the server's journal, are written to FOLDER/found.json.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

from scripts.bench.recipes.environment import PYTHON, ROOT
from scripts.bench.recipes.serving import lines, served
from scripts.bench.recipes.tasks import BATCH, MODEL, make_data, make_model, make_taught_demo

SL_STEPS, RL_STEPS = 60, 12
LIMIT_S = 1800.0
CLOSED = "PIPELINERL_BENCH_CLOSED"
_SIZES = (f"batch_size={BATCH}", "learning_rate=0.003")
_RL = ("group_size=8", f"groups_per_batch={BATCH}", "max_tokens=24", "behavior_if_log_dir_exists=delete")
RECIPES: dict[str, tuple[str, tuple[str, ...]]] = {
    "sl_loop": ("sl_loop", (*_SIZES, "save_every=20")),
    "rl_loop": (
        "rl_loop",
        (
            f"batch_size={BATCH // 4}",
            "group_size=8",
            "max_tokens=24",
            "loss_fn=cispo",
            "learning_rate=0.001",
            "save_every=0",
            f"max_steps={SL_STEPS + RL_STEPS}",
        ),
    ),
    "dpo": ("preference.dpo.train", (f"batch_size={BATCH}", "learning_rate=0.001", "max_steps=8", "behavior_if_log_dir_exists=delete")),
    "math_rl": (
        "math_rl.train",
        (
            "env=arithmetic",
            "renderer_name=qwen3_instruct",  # as SmolLM2 itself writes chats
            "loss_fn=cispo",
            "group_size=8",
            "groups_per_batch=8",
            "max_tokens=8",
            "learning_rate=0.00003",
            "max_steps=12",
            "behavior_if_log_dir_exists=delete",
        ),
    ),
    "async_rl": (
        "",  # asynchronous.py beside this file, on the cookbook's own loop
        (
            "max_steps=150",
            "groups_per_batch=32",
            "group_size=8",
            "learning_rate=0.0001",
            "max_steps_off_policy=1",
            "loss_fn=ppo",
        ),
    ),
    "distillation": (
        "distillation.on_policy_distillation",
        (
            "group_size=4",
            f"groups_per_batch={BATCH}",
            "max_tokens=24",
            "learning_rate=0.0003",
            f"teacher_model={MODEL}",
            "max_steps=12",
            "behavior_if_log_dir_exists=delete",
        ),
    ),
}
"""Name -> module of the recipe ("": `asynchronous.py`), and what it is told beside the model and the folder of its logs. A name may end
with a seed (`async_rl-11`), which the recipe is told, too."""


def main(folder: Path, names: list[str]) -> None:
    """Run recipes in a folder that is not there yet."""
    folder.mkdir(parents=True)
    is_demo = names[0].startswith("async_rl")
    if "math_rl" in names:
        (folder / MODEL).parent.mkdir()
        (folder / MODEL).symlink_to(ROOT / "runs" / "smollm2-135m-instruct")
    elif is_demo:
        (folder / MODEL).parent.mkdir()
        (folder / MODEL).symlink_to(make_taught_demo(folder.with_name("taught-demo")))
    else:
        make_model(folder / MODEL)
    make_data(folder, sl_steps=SL_STEPS, rl_steps=RL_STEPS)
    found: dict[str, Any] = {}
    context = 64 if is_demo else 600  # the demo's model was made for 128 tokens
    with served(
        folder, "lora.rank=0", f"model.max_tokens={context}", "batch.max_tokens=4096", "engine.max_running=64", model=folder / MODEL
    ) as variables:
        for name in names:
            began = time.monotonic()
            num_steps = len(lines(folder, "client_step"))
            metrics = _recipe(name, folder, variables)
            steps = lines(folder, "client_step")[num_steps:]
            found[name] = {"seconds": time.monotonic() - began, "metrics": metrics, "steps": steps}
    (folder / "found.json").write_text(json.dumps(found))


def _recipe(name: str, folder: Path, variables: dict[str, str]) -> list[dict[str, Any]]:
    """Run a recipe; return what it logged, step by step. `rl_loop` goes on in the folder of `sl_loop`."""
    recipe, _, seed = name.partition("-")
    module, words = RECIPES[recipe]
    if seed:
        words = (*words, f"seed={seed}")
    logs = folder / ("logs" if name.endswith("_loop") else f"logs-{name}")
    taught, learned = (_checkpoints(folder / "logs", kind) for kind in ("state_path", "sampler_path"))
    if name in ("dpo", "distillation"):
        words = (*words, f"load_checkpoint_path={taught[-2]}")  # of sl_loop: the last is that of rl_loop
    if name == "distillation":
        words = (*words, f"teacher_checkpoint={learned[-1]}")
    program = ("-m", f"tinker_cookbook.recipes.{module}") if module else (str(ROOT / "scripts/bench/recipes/asynchronous.py"),)
    command = [PYTHON, *program, f"model_name={MODEL}", f"log_path={logs}", *words]
    environment = {**os.environ, **variables, "TINKER_TELEMETRY": "0", "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
    with (folder / f"{name}.log").open("w") as log:
        ended = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, timeout=LIMIT_S, check=False)
    if ended.returncode:
        sys.exit(f"{name} ended with {ended.returncode}:\n" + (folder / f"{name}.log").read_text()[-6000:])
    return [json.loads(line) for line in (logs / "metrics.jsonl").read_text().splitlines()]


def _checkpoints(logs: Path, kind: str) -> list[str]:
    if not (path := logs / "checkpoints.jsonl").exists():
        return []
    return [line[kind] for line in map(json.loads, path.read_text().splitlines()) if line.get(kind)]


if __name__ == "__main__":
    if CLOSED not in os.environ:
        closed = ["unshare", "-rn", "sh", "-c", 'ip link set lo up && exec "$@"', "sh", sys.executable, "-m", "scripts.bench.recipes"]
        os.chdir(ROOT)
        os.execvpe(closed[0], [*closed, str(Path(sys.argv[1]).resolve()), *sys.argv[2:]], {**os.environ, CLOSED: "1"})
    main(Path(sys.argv[1]), sys.argv[2:] or list(RECIPES))
