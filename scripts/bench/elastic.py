#!/usr/bin/env python
"""Do devices change roles by themselves, and back? `pipeline.elastic` in live runs of real vLLM engines and the real trainer, on CPUs.

    python -m scripts.bench.elastic --part trainer     # an engine's device becomes a rank of the trainer
    python -m scripts.bench.elastic --part prm         # ... an engine of the process reward model
    python -m scripts.bench.elastic --part reward      # ... a process of a reward model
    python -m scripts.bench.elastic --part ranks       # two engines become one of two ranks (tensor_parallel_size)

A run begins with three engines, a rank and, where a model scores, one process of it. The task is the long-tailed one of `peers.py`, whose
answers are as long as their prompts say. They are of 4 to 8 tokens first, for which the model that scores is the slower part. Once the rule
has given it devices and has measured a whole window with them, answers are of 140 to 192 tokens, of which a KV cache holds few at a time,
so that engines are the slower part. The run is ended once all devices are back and one more window was measured, or after ten minutes. The
reward is chance, so that nothing is learnt.

In `trainer` answers stay short, and steps are of one group, so that the trainer is the slower part, and two ranks that share the machine
hinder each other more than they help. The rule takes them for proportional until it has seen that, and then gives the device back.

`ranks` begins with two engines, which have few rollouts, so that their passes are mostly reading weights; answers are long. The run has had
no engine of two ranks, so the rule guesses what its passes take, and comes back where the window with it says otherwise.

All processes share the machine's cores, and none is bound to one. So a device is a fair part of the machine: one more process of a kind
gets a larger part, as long as the others are busy, and the cores do not become more. What the rule foretells is for devices of their own:
the table has it beside what the next whole window wrote, and no goal is set for that.

`--quick` trains two steps of the part's run with a fresh model, in which nothing can change yet.
"""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.observe.lines import read_journals
from scripts.bench import harness, peers
from scripts.bench.beside import countdown, systems
from scripts.bench.elastic_runs import live
from scripts.bench.elastic_runs.loads import LONG_COUNTS, SHORT_COUNTS, make_policy
from scripts.bench.elastic_runs.told import Decision, decisions_of, went_and_came_back
from scripts.bench.machine import Others

FOLDER = Path("runs/bench-elastic")
LIMIT_S = 560.0
"""Of a run, until it is told to end."""
QUICK_STEPS = 2
MANY_STEPS = 100_000
"""More than a run comes to."""
KEPT = "every promise was kept"
"""What the checker says last of such a run."""


def measure(arguments: Any) -> harness.Measured:
    part, quick = arguments.part, arguments.quick
    others = Others()
    run_folder = live.run(part, _task(part, quick=quick), folder=_home(part, quick=quick), models=_models(quick=quick), limit_s=LIMIT_S)
    taken, lines = others.fraction(), read_journals(run_folder)
    decisions = decisions_of(lines)
    found = harness.Measured(rows=[_row(one) for one in decisions])
    if quick:
        steps = sum(line["kind"] == "step" for line in lines)
        found.goals.append(harness.at_least("steps trained", steps, QUICK_STEPS))
    else:
        went, came_back = went_and_came_back(decisions, role=live.PARTS[part].role)
        found.goals.append(harness.at_least("went there", int(went), 1))
        found.goals.append(harness.at_least("came back", int(came_back), 1))
    found.goals.append(harness.at_least("every promise kept", int(_is_kept(run_folder)), 1))
    found.goals.append(harness.at_most("rollouts failed", _num_failed(run_folder), 0))
    found.notes += _notes(part, lines, decisions)
    found.notes.append(f"other programs took {taken:.2f} of the machine")
    return found


def _home(part: str, *, quick: bool) -> Path:
    return FOLDER / (f"{part}-quick" if quick else part)


def _models(*, quick: bool) -> Path:
    return FOLDER / ("models-quick" if quick else "models")


def _task(part: str, *, quick: bool) -> systems.Task:
    """Return the long-tailed task, whose model learns next to nothing, so that answers stay as long as their prompts say."""
    models = _models(quick=quick)
    if quick and not (models / "fresh").exists():
        countdown.make_model(models / "fresh", 0)
    task = None if quick else peers.task_of(peers.LONG_TAIL)
    warm = models / "fresh" if task is None else task.model
    return systems.Task(
        module="scripts.bench.beside.countdown",
        model=make_policy(models / f"policy-{part}", warm=warm, width=live.PARTS[part].width),
        steps=QUICK_STEPS if quick else MANY_STEPS,
        groups_per_step=live.PARTS[part].groups,
        group_size=live.PARTS[part].group_size,
        max_tokens=countdown.LONGEST + 8,
        context=countdown.MAX_TOKENS,
        learning_rate=1e-6,
    )


def _is_kept(run_folder: Path) -> bool:
    told = subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(run_folder)], capture_output=True, text=True, check=False)
    print(told.stdout, told.stderr, sep="", end="", flush=True)
    return told.returncode == 0 and KEPT in told.stdout


def _num_failed(run_folder: Path) -> int:
    with contextlib.closing(sqlite3.connect(f"file:{run_folder / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
        return ledger.execute("SELECT count(*) FROM ended_rollouts WHERE status = 'failed'").fetchone()[0]


# --- what is shown ---


def _row(one: Decision) -> harness.Row:
    return {
        "at s": round(one.at_s),
        "step": one.step,
        "word": one.word,
        "before": "/".join(map(str, one.before)),
        "after": "/".join(map(str, one.after)),
        "tokens/s now, by the window": _told(one.speed_now),
        "foretold": _told(one.speed_then),
        "written in it": _told(one.written),
        "in the next": _told(one.written_next),
        "foretold over that": _told(one.foretold_over_written),
        "s until taken": _told(one.taken_s),
        "without a trainer": _told(one.away_s),
    }


def _told(value: float | None) -> float | str:
    return "" if value is None else value


def _notes(part: str, lines: Sequence[dict[str, Any]], decisions: Sequence[Decision]) -> list[str]:
    scored = {"prm": ", engines of the process reward model", "reward": ", processes of the reward model"}.get(part, "")
    shape, seconds = live.PARTS[part], lines[-1]["t"] - lines[0]["t"]
    of_changes = [f"{one.foretold_over_written:.2f}" for one in decisions if one.foretold_over_written is not None]
    gained = [f"{one.written_next / one.written:.2f}" for one in decisions if one.written_next and one.written]
    answers = (f"{2 * low} to {2 * high}" for low, high in (SHORT_COUNTS, LONG_COUNTS))
    told = dict(zip(("short", "long"), answers, strict=True))
    lengths = " and then ".join(told[length] for length in shape.lengths)
    return [
        f"before and after: engines, ranks of the trainer{scored or ' (no model scores: 0)'}, ranks of an engine",
        "begins and stays say on which figures",
        f"{seconds:.0f} s, answers of {lengths} tokens; groups of {shape.group_size} in a step: {shape.groups}; slots:"
        f" {shape.slots}; KV caches of {shape.blocks * live.BLOCK_TOKENS} tokens; K = {live.STALENESS}",
        f"foretold over what the next whole window wrote: {', '.join(of_changes) or 'nothing to compare'}; that window over the one"
        f" before the change: {', '.join(gained) or 'nothing to compare'}",
    ]


if __name__ == "__main__":
    options = {"--part": {"choices": list(live.PARTS), "default": "trainer", "help": "what an engine's device becomes"}}
    harness.run("elastic", measure, works=(), options=options)
