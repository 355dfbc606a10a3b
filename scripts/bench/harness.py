"""The part that all benches share: options, table, JSON file, goals and verdict.

A bench is a function from its options to what it measured (`Measured`) or None where it has to be called again. It measures ratios against
a reference in the same run, because machines are noisy, and it knows how fast its machine is: fixed work of the kinds that its goals are of
(`works`) is timed before it, after it, and between the parts that `in_turns` and `steadily` measure; parts during which the machine changed
are measured again. Goals in seconds hold at the speed of the reference machine (`machine.py`). `verdict.py` has the rules.

What was measured is stored with date, machine, its speed, and commit. With `--check` the process exits 0 where every goal was judged and
met, 1 where one is missed, and 75 (EX_TEMPFAIL of sysexits: try again later) where none is missed but some could not be judged, or the
bench has to be called again. That is neither of the other two: a machine too busy to judge by shows no regression, and "passed" would hide
one for as long as it stays so.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from rich.console import Console
from rich.table import Table

from scripts.bench.machine import Watch, machine_name
from scripts.bench.verdict import Goal, Scale, Speeds, Verdict, Work, disturbed, kept

RESULTS = Path(__file__).parent / "results"
Row = dict[str, Any]
"""A row of the table, by the names of its columns."""


NOT_JUDGED_EXIT = 75
"""EX_TEMPFAIL: it failed for a reason that may be gone next time."""
SECONDS: dict[str, Any] = {"work": Work.CPU, "scale": Scale.SECONDS}
"""What a goal in seconds is told: they are a processor's, and hold at reference speed."""
T = TypeVar("T")
watch = Watch(())
"""Of the bench that this process runs; `run` says which kinds of work it times."""


def at_least(
    name: str, value: float, goal: float, *, work: Work | None = None, scale: Scale = Scale.RATIO, speeds: Speeds | None = None
) -> Goal:
    """A value that must reach its goal; see `Goal` for what it takes from the machine."""
    return Goal(name=name, value=value, goal=goal, is_at_least=True, work=work, scale=scale, speeds=speeds)


def at_most(
    name: str, value: float, goal: float, *, work: Work | None = None, scale: Scale = Scale.RATIO, speeds: Speeds | None = None
) -> Goal:
    """A value that must not exceed its goal."""
    return Goal(name=name, value=value, goal=goal, is_at_least=False, work=work, scale=scale, speeds=speeds)


@dataclasses.dataclass(slots=True, kw_only=True)
class Measured:
    """What a bench found; its parts may add to it in turn. All rows have the same columns."""

    rows: list[Row] = dataclasses.field(default_factory=list)
    goals: list[Goal] = dataclasses.field(default_factory=list)
    notes: list[str] = dataclasses.field(default_factory=list)
    curves: dict[str, Any] = dataclasses.field(default_factory=dict)
    """What figures are drawn from; stored where there is any."""


def run(
    name: str,
    measure: Callable[[argparse.Namespace], Measured | None],
    *,
    works: Collection[Work] = (Work.CPU,),
    options: Mapping[str, Row] | None = None,
    then: Callable[[dict[str, Any]], None] = lambda record: None,
) -> None:
    """Run a bench from the command line: its module's docstring is its help, and `options` are its own, as argparse takes them.

    `works` are the kinds of work that its goals are of; none, where its figures follow from a seed. Print the table, store it as JSON,
    print each goal and last the verdict; exit as the module says under `--check`. `then` is given what was stored.
    """
    parser = argparse.ArgumentParser(
        description=sys.modules[measure.__module__].__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="under 50 s: fewer repetitions and sizes")
    parser.add_argument("--check", action="store_true", help="exit 1 where a goal is missed, 75 where one cannot be judged now")
    for option, words in (options or {}).items():
        parser.add_argument(option, **words)
    arguments = parser.parse_args()
    watch.works = tuple(works)
    watch.mark()
    if (found := measure(arguments)) is None:
        sys.exit(NOT_JUDGED_EXIT if arguments.check else 0)
    watch.mark()
    if works:
        found.notes.append(str(watch))
    show(name, found)
    told = [(goal, None if goal.work is None else goal.speeds or watch.speeds(goal.work)) for goal in found.goals]
    record = {
        "bench": name,
        "date": time.strftime("%Y-%m-%d"),
        "commit": _commit(),
        "machine": machine_name(),
        "speed": watch.record,
        "options": vars(arguments),
        "rows": found.rows,
        "goals": [_recorded(goal, speeds) for goal, speeds in told],
        "notes": found.notes,
        **({"curves": found.curves} if found.curves else {}),
    }
    RESULTS.mkdir(exist_ok=True)
    stored_at(name, arguments).write_text(text := json.dumps(record, indent=1, default=str) + "\n")
    then(json.loads(text))
    by_verdict: dict[Verdict, list[str]] = {verdict: [] for verdict in Verdict}
    for goal, speeds in told:
        print(goal.told(speeds))
        by_verdict[goal.verdict(speeds)[0]].append(goal.told(speeds))
    troubled = by_verdict[Verdict.MISSED] + by_verdict[Verdict.NOT_JUDGED]
    met = f"{name}: {len(by_verdict[Verdict.MET])} of {len(told)} goals met"
    print(met + "".join(f"; {line}" for line in troubled or by_verdict[Verdict.MET][:1]), flush=True)
    if arguments.check and troubled:
        sys.exit(1 if by_verdict[Verdict.MISSED] else NOT_JUDGED_EXIT)


def _recorded(goal: Goal, speeds: Speeds | None) -> Row:
    verdict, why = goal.verdict(speeds)
    kept = {"name": goal.name, "value": goal.value, "at_reference": goal.at_reference(speeds), "goal": goal.goal}
    return {**kept, "at_least": goal.is_at_least, "work": goal.work, "verdict": verdict, "why": why}


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
    """The file that holds the newest results of a bench, or of the one part of it that its own option `--part` names."""
    part = getattr(arguments, "part", None)
    return RESULTS / f"{name}{f'-{part}' if part else ''}{'-quick' if arguments.quick else ''}.json"


class Turns(dict[str, list[T]]):
    """What each way gave in each round, and how steady the machine was within the round in the middle."""

    speeds: Speeds


def in_turns(repetitions: int, ways: Mapping[str, Callable[[], T]]) -> Turns[T]:
    """Measure each way and then all of them again, every other time in the reverse order, so that all see the machine in the same moods.

    The references are timed between any two. A round during which the machine changed is measured again, at most as many times as there
    are rounds; where that does not do, the least disturbed are kept, and a goal with these `speeds` is not judged if half are disturbed.
    """
    rounds: list[tuple[dict[str, T], list[dict[Work, float]]]] = []
    last = watch.look()
    while len(rounds) < 2 * repetitions:
        if len(rounds) - len(disturbed([_least_steady(marks) for _, marks in rounds])) >= repetitions:
            break
        found, marks = {}, [last]
        for name, measure in list(ways.items())[:: -1 if len(rounds) % 2 else 1]:
            found[name] = measure()
            marks.append(last := watch.look())
        rounds.append((found, marks))
    chosen = kept([_least_steady(marks) for _, marks in rounds], count=repetitions)
    watch.num_repeated += len(rounds) - repetitions
    watch.marks += [mark for number in chosen for mark in rounds[number][1][1:]]
    turns: Turns[T] = Turns({name: [rounds[number][0][name] for number in chosen] for name in ways})
    by_drift = sorted((_least_steady(rounds[number][1]) for number in chosen), key=lambda speeds: speeds.drift)
    turns.speeds = by_drift[(repetitions - 1) // 2]
    return turns


def steadily(measure: Callable[[], T]) -> T:
    """Measure once, and once more where the machine changed meanwhile."""
    return in_turns(1, {"it": measure})["it"][0]


def _least_steady(marks: Sequence[Mapping[Work, float]]) -> Speeds:
    """The speeds of the kind of work in which the machine changed most; steady where the bench times none."""
    by_work = [Speeds(tuple(mark[work] for mark in marks)) for work in watch.works]
    return min(by_work, key=lambda speeds: speeds.drift, default=Speeds((1.0,)))


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
