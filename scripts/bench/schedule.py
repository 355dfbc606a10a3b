"""Is each rule of the scheduler worth it? Ablations on simulated time: the figures follow from the seed alone, on any machine.

    python -m scripts.bench.schedule                    # dispatch, routing, KV admission: alone and together
    python -m scripts.bench.schedule --part network     # static fabrics and one that reconfigures, 48 to 2,048 GPUs
    python -m scripts.bench.schedule --part migration   # sequences that move between engines by re-prefill
    python -m scripts.bench.schedule --part roles       # devices that change roles while answers grow, 48 GPUs; roles_1024, too

The rules are the live ones (`orchestrator.rules`). How a real vLLM gains is not shown by this.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import harness
from scripts.bench.scheduled import migration, network, roles, rules

PARTS = {
    "rules": rules.measure,
    "network": network.measure,
    "migration": migration.measure,
    "roles": roles.measure,
    "roles_1024": functools.partial(roles.measure, num_gpus=1024),
}


def measure(arguments: Any) -> harness.Measured:
    """Measure one part."""
    return PARTS[arguments.part](quick=arguments.quick)


if __name__ == "__main__":
    harness.run("schedule", measure, works=(), options={"--part": {"choices": list(PARTS), "default": "rules", "help": "what is measured"}})
