"""`python -m scripts.loop_lines WHEELS`: how many lines one reads to change the order of things in an algorithm's loop, here and elsewhere.

The rule: lines of the functions that hold the loop, from `def` to the last line, as the wheels have them; a script's is its `train` and
what that calls in the same file. What the functions call elsewhere (queues, weights, losses) is counted nowhere. WHEELS is a folder with
`pip download --no-deps trl==1.16.0 verl==0.9.1`. Writes `scripts/loop_lines.json`.
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
FIT = [("verl/trainer/ppo/ray_trainer.py", "RayPPOTrainer.fit")]
GRPO = [("trl/trainer/grpo_trainer.py", f"GRPOTrainer.{name}") for name in ("_generate_and_score_completions", "_compute_loss")]
GKD = [
    ("trl/experimental/gkd/gkd_trainer.py", f"GKDTrainer.{name}")
    for name in ("generate_on_policy_outputs", "compute_loss", "training_step")
]
LOOPS = {
    "GRPO": ("grpo", GRPO, FIT),
    "PPO with critic": ("ppo", [], FIT),
    "on-policy distillation": ("distillation", GKD, FIT),
    "online DPO": ("dpo", [("trl/experimental/online_dpo/online_dpo_trainer.py", "OnlineDPOTrainer.training_step")], []),
}
"""By loop: the script here, and the functions in TRL's and verl's wheel; none where they have no such loop."""


def lines_of(source: str, name: str) -> int:
    """Return the lines of a function, a class, or a method that is named `Class.method`."""
    body: list[ast.stmt] = ast.parse(source).body
    node: ast.stmt | None = None
    for part in name.split("."):
        node = next(one for one in body if getattr(one, "name", None) == part)
        body = getattr(node, "body", [])
    assert node is not None
    assert node.end_lineno is not None
    return node.end_lineno - node.lineno + 1


def own_lines(script: str) -> int:
    """Return the lines of a script's functions but `main`, which holds its settings."""
    source = (ROOT / "examples" / "scripts" / f"{script}.py").read_text()
    functions = [node.name for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    return sum(lines_of(source, name) for name in functions if name != "main")


def main(folder: Path) -> None:
    """Count, and write the figures."""
    wheels = {path.name.partition("-")[0]: zipfile.ZipFile(path) for path in folder.glob("*.whl")}

    def counted(package: str, functions: list[tuple[str, str]]) -> dict[str, int]:
        return {name: lines_of(wheels[package].read(path).decode(), name) for path, name in functions}

    found = {
        loop: {"here": own_lines(script), "trl": counted("trl", trl), "verl": counted("verl", verl)}
        for loop, (script, trl, verl) in LOOPS.items()
    }
    (ROOT / "scripts" / "loop_lines.json").write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
