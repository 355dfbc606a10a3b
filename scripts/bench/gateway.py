#!/usr/bin/env python
"""Measures what it costs that agents outside of the run play its rollouts over HTTP: the same run by its own loop, and by 64 agents.

Launcher, orchestrator, transport, gateway and scorer are the product's, each a process of its own; the engine is the rehearsals' one with a
pause for each forward pass, the trainer the rehearsals' own. An agent asks for an episode, for one turn, and finishes: three requests a
rollout, each agent over a connection of its own, through a client of a few lines, so that no SDK is measured.

*Rollouts/s* are the samples that the engine has written, per second, in the steady state; the goal is the agents' over the loop's. What the
gateway *adds* to a turn is its time at the agent, from the request to the answer, less the time in which the orchestrator had asked the
engine and had no answer, as the run's own loop asks it: HTTP, rendering, tokens, leases, and one more process on two cores.
"""

from __future__ import annotations

import json
import sqlite3
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.launch.roles import Role
from scripts.bench import harness
from scripts.bench.demo_runs import lines_of
from scripts.bench.paced import processes
from scripts.bench.paced.processes import PASS_S, WARM_S

OPEN = 64
"""Episodes that agents have at once, and the engine's slots."""
ADDED_MS, RATIO = 3.0, 0.9


def measure(arguments: Any) -> harness.Measured:
    seconds = 5.0 if arguments.quick else 15.0
    words = f"{OPEN} slots, {PASS_S * 1e3:g} ms for a forward pass, steps of {processes.SAMPLES_PER_STEP} samples, {seconds:g} s of each"
    found = harness.Measured(notes=[words])
    ways = {"own loop": lambda: _own(seconds), "agents": lambda: _agents(seconds)}
    turns = harness.in_turns(1 if arguments.quick else arguments.rounds, ways)
    for name, rows in turns.items():
        for row in rows:
            found.rows.append({"rollouts by": name} | row)
    own, agents = turns["own loop"], turns["agents"]
    ratio = harness.median_ratio([row["rollouts/s"] for row in agents], [row["rollouts/s"] for row in own])
    added = statistics.median(row["added ms"] for row in agents)
    found.goals.append(harness.at_least("rollouts/s with agents over the run's own loop", ratio, RATIO, work=harness.Work.CPU))
    found.goals.append(harness.at_most(f"ms that the gateway adds to a turn, {OPEN} open", added, ADDED_MS, **harness.SECONDS))
    return found


def _own(seconds: float) -> harness.Row:
    with processes.run_of(_slots(), seconds=seconds) as run_folder:
        return _steady(run_folder, seconds=seconds) | {"requests/s": 0.0, "added ms": 0.0}


def _agents(seconds: float) -> harness.Row:
    def agents(run_folder: Path) -> list[Role]:
        words = (sys.executable, "-m", "scripts.bench.paced.agents", "--run-folder", str(run_folder), "--agents", str(OPEN * 5 // 4))
        return [Role(name="agents", command=words, has_nothing_to_save=True)]

    with processes.run_of([*_slots(), "gateway.deadline_s=60"], seconds=seconds, further=agents) as run_folder:
        row = _steady(run_folder, seconds=seconds)
        said = json.loads((run_folder / "agents.json").read_text())
        begin = lines_of(run_folder)["step"][0]["t"] + WARM_S
    added = [added_s for at, added_s in said["turns"] if begin <= at <= begin + seconds]
    return row | {"requests/s": 3.0 * len(added) / seconds, "added ms": 1e3 * statistics.median(added)}


def _slots() -> list[str]:
    """As in any run, a quarter more rollouts are under way than are decoded: an agent between two requests leaves no slot empty."""
    return [f"engine.max_running={OPEN}", f"pipeline.max_running={OPEN * 5 // 4}"]


def _steady(run_folder: Path, *, seconds: float) -> harness.Row:
    lines = lines_of(run_folder)
    begin = lines["step"][0]["t"] + WARM_S
    loads = [line for line in lines["load"] if "num_steps" in line and begin <= line["t"] <= begin + seconds + 1.0]
    first, last = loads[0], loads[-1]
    tokens_per_s = (last["num_tokens"] - first["num_tokens"]) / (last["t"] - first["t"])
    with sqlite3.connect(run_folder / "ledger.sqlite") as ledger:
        (mean_tokens,) = ledger.execute("SELECT avg(num_tokens) FROM events WHERE kind = 'generated'").fetchone()
    return {"rollouts/s": tokens_per_s / mean_tokens, "tokens/s": tokens_per_s, "idle": 1.0 - tokens_per_s * PASS_S / OPEN}


if __name__ == "__main__":
    rounds = {"--rounds": {"type": int, "default": 3, "help": "runs of each kind; one takes half a minute"}}
    harness.run("gateway", measure, options=rounds)
