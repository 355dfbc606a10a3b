"""The part that all benches share: options, table, JSON file, goals and verdict.

A bench is a function from its options to what it measured (`Measured`) or None where it has to be called again. It measures ratios against
a reference in the same run, because machines are noisy. What it measured is stored with date, machine and commit; with `--check` the
process exits 1 where a goal is missed. The last line printed always says the figure.
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
"""A row of the table, by the names of its columns."""


@dataclasses.dataclass(frozen=True, slots=True)
class Goal:
    """One figure against its goal."""

    name: str
    value: float
    goal: float
    at_least: bool
    """False: the value must not exceed the goal."""

    @property
    def is_met(self) -> bool:
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def __str__(self) -> str:
        sign = ("≥" if self.at_least else "≤") if self.is_met else ("<" if self.at_least else ">")
        return f"{self.name} {self.value:.4g} {sign} {self.goal:g} ({'met' if self.is_met else 'MISSED'})"


def at_least(name: str, value: float, goal: float) -> Goal:
    return Goal(name, value, goal, at_least=True)


def at_most(name: str, value: float, goal: float) -> Goal:
    return Goal(name, value, goal, at_least=False)


@dataclasses.dataclass(slots=True, kw_only=True)
class Measured:
    """What a bench found; its parts may add to it in turn. All rows have the same columns."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    goals: list[Goal] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)


def run(name: str, measure: Callable[[argparse.Namespace], Measured | None], *, options: Mapping[str, Row] | None = None) -> None:
    """Run a bench from the command line: its module's docstring is its help, and `options` are its own, as argparse takes them.

    Print the table, store it as JSON, print each goal and last the verdict; exit 1 under `--check` where a goal is missed.
    """
    parser = argparse.ArgumentParser(
        description=sys.modules[measure.__module__].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under 50 s: fewer repetitions and sizes")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    for option, words in (options or {}).items():
        parser.add_argument(option, **words)
    arguments = parser.parse_args()
    if (found := measure(arguments)) is None:
        return
    show(name, found)
    record = {
        "bench": name,
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {_processor()}",
        "options": vars(arguments),
        "rows": found.rows,
        "goals": [{**dataclasses.asdict(goal), "is_met": goal.is_met} for goal in found.goals],
        "notes": found.notes,
    }
    RESULTS.mkdir(exist_ok=True)
    stored_at(name, arguments).write_text(json.dumps(record, indent=1, default=str) + "\n")
    for goal in found.goals:
        print(goal)
    missed = [goal for goal in found.goals if not goal.is_met]
    met = f"{name}: {len(found.goals) - len(missed)} of {len(found.goals)} goals met"
    print(met + "".join(f"; {goal}" for goal in missed or found.goals[:1]), flush=True)
    if arguments.check and missed:
        sys.exit(1)


def show(title: str, found: Measured) -> None:
    """Print a table and what is to be said of it."""
    console = Console(width=160)
    table = Table(*(found.rows[0] if found.rows else ()), title=title)
    for row in found.rows:
        table.add_row(*(f"{value:.4g}" if isinstance(value, float) else str(value) for value in row.values()))
    console.print(table)
    for note in found.notes:
        console.print(note, highlight=False)


def stored_at(name: str, arguments: argparse.Namespace) -> Path:
    """The file that holds the newest results of a bench."""
    return RESULTS / f"{name}{'-quick' if arguments.quick else ''}.json"


def in_turns(repetitions: int, ways: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Measure each way and then all of them again, so that all see the machine in the same moods."""
    found: dict[str, list[float]] = collections.defaultdict(list)
    for _ in range(repetitions):
        for name, measure in ways.items():
            found[name].append(measure())
    return found


def median_ratio(values: Sequence[float], references: Sequence[float]) -> float:
    """The median of each value over the reference that was measured beside it."""
    return statistics.median(value / reference for value, reference in zip(values, references, strict=True))


def median_s(work: Callable[[], Any], *, repetitions: int) -> tuple[float, Any]:
    """The median seconds of some work, and what it returned last."""
    seconds, found = [], None
    for _ in range(repetitions):
        before = time.perf_counter()
        found = work()
        seconds.append(time.perf_counter() - before)
    return statistics.median(seconds), found


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent, check=False)
    return found.stdout.strip() or "uncommitted"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"
