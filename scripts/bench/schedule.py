"""Is each rule of the scheduler worth it? Ablations on simulated time: the figures follow from the seed alone, on any machine.

    python -m scripts.bench.schedule                    # dispatch, routing, KV admission: alone and together
    python -m scripts.bench.schedule --part network     # static fabrics and one that reconfigures, 48 to 2,048 GPUs
    python -m scripts.bench.schedule --part migration   # sequences that move between engines by re-prefill
    python -m scripts.bench.schedule --part roles       # devices that change roles while answers grow, 48 GPUs; and other loads
    python -m scripts.bench.schedule --part live        # dispatch, routing, KV admission, cut groups on two real engines, and simulated

The rules are the live ones (`orchestrator.rules`). Only the part `live` measures anything: it takes more than half an hour of two
quiet cores, in pieces (`--budget-s`).
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import harness
from scripts.bench.pieces import BUDGET
from scripts.bench.scheduled import live, migration, network, roles, rules

PARTS = {
    "rules": rules.measure,
    "network": network.measure,
    "migration": migration.measure,
    "roles": roles.measure,
    "roles_swings": functools.partial(roles.measure, load="swings"),
    "roles_tails": functools.partial(roles.measure, load="tails"),
    "roles_tasks": functools.partial(roles.measure, load="tasks"),
    "roles_documents": functools.partial(roles.measure, load="documents"),
    "roles_1024": functools.partial(roles.measure, num_gpus=1024),
    "roles_documents_1024": functools.partial(roles.measure, num_gpus=1024, load="documents"),
}


def measure(arguments: Any) -> harness.Measured | None:
    """Measure one part; None where it has to be called again."""
    if arguments.part == "live":
        return live.measure(quick=arguments.quick, budget_s=arguments.budget_s)
    return PARTS[arguments.part](quick=arguments.quick)


if __name__ == "__main__":
    part = {"--part": {"choices": [*PARTS, "live"], "default": "rules", "help": "what is measured"}}
    is_live = "live" in sys.argv
    harness.run("schedule", measure, works=(harness.Work.CPU,) if is_live else (), options=part | BUDGET)
