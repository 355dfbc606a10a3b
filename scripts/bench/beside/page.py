"""The part of docs/results.md that tells of the peers: written from the stored figures, by the bench, and held to them by a test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[3] / "docs" / "results.md"
HEADING = "## Beside other systems"
COLUMNS = (
    "system",
    "first step s",
    "s to 0.7",
    "s to 0.8",
    "s to 0.9",
    "samples/s",
    "area",
    "MiB",
    "lines",
    "tokens: mean",
    "p50, p90, most",
)
_WHAT = """
`scripts/bench/peers.py`, all in one run: the same cores, warm-started model, prompts, batch and learning rate. Seconds count from the
command, start-up included, to a mean reward of five steps; one figure for each seed. `area` is the mean reward over all samples of a run.
"""
_NOT_YET = "No full run is stored yet; it takes about 40 minutes on a quiet machine with two cores.\n"


def section(record: dict[str, Any] | None) -> str:
    """The heading and all below it; of no record, that there is none."""
    if record is None:
        return f"{HEADING}\n{_WHAT}\n{_NOT_YET}"
    parts = [f"{HEADING}\n{_WHAT}", f"{record['date']}, {record['machine']}, commit {record['commit']}.\n"]
    for task in dict.fromkeys(row["task"] for row in record["rows"]):
        rows = [row for row in record["rows"] if row["task"] == task]
        parts += [f"**{task.capitalize()}**\n", _table(rows), _figures(task)]
    parts += ["Goals, of the long tail:\n", "".join(f"- {_goal(goal)}\n" for goal in record["goals"])]
    parts += ["Where the time went, and what the machine was like:\n", "".join(f"- {note}\n" for note in record["notes"])]
    return "\n".join(parts)


def write(record: dict[str, Any]) -> None:
    """Put the section in place of the one that is there."""
    before = PAGE.read_text().partition(HEADING)[0]
    PAGE.write_text(before + section(record))


def _table(rows: list[dict[str, Any]]) -> str:
    lines = [f"| {' | '.join(COLUMNS)} |", f"|{' --- |' * len(COLUMNS)}"]
    lines += [f"| {' | '.join(_cell(row[column]) for column in COLUMNS)} |" for row in rows]
    return "".join(f"{line}\n" for line in lines)


def _cell(value: Any) -> str:
    return f"{value:.3g}" if isinstance(value, float) and abs(value) < 1000 else f"{value:.0f}" if isinstance(value, float) else str(value)


def _figures(task: str) -> str:
    name = task.replace(" ", "-")
    figures = ((unit, f"../scripts/bench/results/peers-{name}-{unit}.svg") for unit in ("seconds", "samples"))
    return "".join(f"![{task}: mean reward over {unit}]({path})\n" for unit, path in figures)


def _goal(goal: dict[str, Any]) -> str:
    sign = "≥" if goal["at_least"] else "≤"
    return (
        f"{goal['name']}: {goal['value']:.3g}, goal {sign} {goal['goal']:g}: {goal['verdict']}{': ' + goal['why'] if goal['why'] else ''}"
    )
