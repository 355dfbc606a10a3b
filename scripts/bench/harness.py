"""The parts that all benches share: options, table, JSON file, and verdict.

A bench measures ratios against a reference in the same run, because machines are noisy; it stores what it measured with date, machine and
commit; with `--check` it exits 1 where a goal is missed. The last line printed always says the figure.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One figure against its goal."""

    name: str
    value: float
    goal: float
    at_least: bool = True
    """False: the value must not exceed the goal."""

    @property
    def is_met(self) -> bool:
        return self.value >= self.goal if self.at_least else self.value <= self.goal

    def __str__(self) -> str:
        sign = ("≥" if self.at_least else "≤") if self.is_met else ("<" if self.at_least else ">")
        return f"{self.name} {self.value:.4g} {sign} {self.goal:g} ({'met' if self.is_met else 'MISSED'})"


def options(description: str) -> argparse.ArgumentParser:
    """The options every bench takes; a bench may add its own."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="under 50 s: fewer repetitions and sizes")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed")
    return parser


def finish(
    name: str, *, arguments: argparse.Namespace, columns: list[str], rows: list[list[Any]], goals: list[Goal], notes: list[str]
) -> None:
    """Print the table, store it as JSON, print each goal and last the verdict; exit 1 under `--check` where one is missed."""
    show(name, columns=columns, rows=rows, notes=notes)
    RESULTS.mkdir(exist_ok=True)
    path = RESULTS / f"{name}{'-quick' if arguments.quick else ''}.json"
    record = {
        "bench": name,
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, {_processor()}",
        "options": vars(arguments),
        "rows": [dict(zip(columns, row, strict=True)) for row in rows],
        "goals": [{**dataclasses.asdict(goal), "is_met": goal.is_met} for goal in goals],
        "notes": notes,
    }
    path.write_text(json.dumps(record, indent=1, default=str) + "\n")
    for goal in goals:
        print(goal)
    missed = [goal for goal in goals if not goal.is_met]
    print(
        f"{name}: {len(goals) - len(missed)} of {len(goals)} goals met" + "".join(f"; {goal}" for goal in missed or goals[:1]), flush=True
    )
    if arguments.check and missed:
        sys.exit(1)


def show(title: str, *, columns: list[str], rows: list[list[Any]], notes: list[str]) -> None:
    """Print a table and what is to be said of it."""
    console = Console(width=160)
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*(_text(value) for value in row))
    console.print(table)
    for note in notes:
        console.print(note, highlight=False)


def _text(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _commit() -> str:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, cwd=RESULTS.parent, check=False)
    return found.stdout.strip() or "uncommitted"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return "unknown processor"
