"""Measures what `pipelinerl simulate` foresees: published cases, its speed, and live runs on this machine, foretold blind.

    python -m scripts.bench.foresight                  # the published cases, and 1,000 engines with 10^6 rollouts: about 6 minutes
    python -m scripts.bench.foresight --blind draw     # eight configurations by seed; then `calibrate`, `forecast`, a commit, `run`
    python -m scripts.bench.foresight --blind table    # forecast, live and error of every try

`foreseen/blind.py` says how the blind runs are kept honest. Of OrchestrRL's gain of 1.40x (arXiv 2601.01209) neither lengths nor speeds are
published, so nothing that would come out here could be compared with it.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from scripts.bench import harness
from scripts.bench.foreseen.fleet import fleet
from scripts.bench.foreseen.published import applied_compute_rows, pipeline_rl_rows
from scripts.bench.pieces import BUDGET

FLEET_GOAL_S = 300.0


def measure(arguments: Any) -> harness.Measured | None:
    """Add the table of cases, and what the simulator takes for a fleet."""
    if arguments.blind is not None:
        from scripts.bench.foreseen import blind

        blind.act(arguments.blind, seed=arguments.seed, number=arguments.number, budget_s=arguments.budget_s)
        return None
    found = harness.Measured()
    pipeline_rl_rows(found, quick=arguments.quick)
    applied_compute_rows(found, quick=arguments.quick)
    _judge(found)
    engines, rollouts = (64, 20_000) if arguments.quick else (1000, 1_000_000)
    ended, took_s = fleet(engines=engines, rollouts=rollouts)
    name = f"{engines:,} engines, {ended.rollouts.admitted:,} rollouts, {ended.num_generated_tokens / 1e6:,.0f} M tokens"
    found.rows.append({"case": "speed", "figure": name, "published": "", "simulated": took_s, "error": "s"})
    goal_s = FLEET_GOAL_S * rollouts / 1e6
    found.goals.append(harness.at_most(f"seconds for {engines:,} engines and {rollouts:,} rollouts", took_s, goal_s, **harness.SECONDS))
    return found


def _judge(found: harness.Measured) -> None:
    """Add the goals of the published cases."""
    by_figure = {row["figure"]: row for row in found.rows}

    def off(figure: str) -> float:
        return abs(by_figure[figure]["simulated"] / by_figure[figure]["published"] - 1)

    for figure, most in (
        ("tokens per flash, pipeline", 0.02),
        ("tokens per flash, in turns", 0.04),
        ("speed-up", 0.05),
        ("largest lag in flight, batches of 128", 0.05),
    ):
        found.goals.append(harness.at_most(f"PipelineRL, {figure}: off by", off(figure), most))
    rows = [row for row in found.rows if row["case"].startswith("Applied")]
    errors = [abs(row["simulated"] - row["published"]) for row in rows if ", q 2," in row["figure"]]
    found.goals.append(harness.at_most("Applied Compute, mean staleness of the rows with q 2: largest error", max(errors), 0.27))
    found.notes.append(
        "Applied Compute's rows with q 1 bound one queue at a single batch, beside the step being filled; here three queues are bounded in"
        " bytes, one behind another, and the step being filled counts in none of them, so less room than that cannot be asked for"
    )


if __name__ == "__main__":
    harness.run(
        "foresight",
        measure,
        options={
            "--blind": {"choices": ["draw", "calibrate", "forecast", "run", "table"], "help": "a stage of the blind forecasts"},
            "--seed": {"type": int, "default": 0, "help": "of the configurations that are drawn"},
            "--number": {"type": int, "help": "of one configuration; default: all"},
            **BUDGET,
        },
    )
