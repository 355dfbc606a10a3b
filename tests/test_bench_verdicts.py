"""What a bench may say of a goal on a machine that is slow or changes, on numbers worked by hand."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from scripts.bench import harness
from scripts.bench.harness import Scale, Speeds, Verdict, Work
from scripts.bench.machine import REFERENCE, Others, Watch, reference_s
from scripts.bench.verdict import SLOWEST, STEADY, Goal, disturbed, kept


def seconds(value: float, goal: float = 10.0) -> Goal:
    return harness.at_most("start", value, goal, **harness.SECONDS)


@pytest.mark.parametrize(
    ("goal", "speeds", "verdict"),
    [
        (seconds(12.0), (0.8, 0.8), Verdict.MET),  # 9.6 s at reference speed
        (seconds(12.0), (0.9, 0.9), Verdict.MISSED),  # 10.8 s
        (seconds(9.0), (1.2, 1.2), Verdict.MISSED),  # 10.8 s: a fast machine is no excuse
        (seconds(30.0), (0.27, 0.27), Verdict.NOT_JUDGED),
        (seconds(9.0), (0.27, 0.27), Verdict.MET),  # met although slow
        (seconds(9.0), (0.27, 1.2), Verdict.NOT_JUDGED),  # perhaps it was fast when it counted
        (seconds(20.0), (1.0, 0.7), Verdict.NOT_JUDGED),  # changed too much to know by what to scale
        (harness.at_least("rate", 1700.0, 2000.0, work=Work.CPU, scale=Scale.RATE), (0.8, 0.8), Verdict.MET),  # 2,125
        (harness.at_least("rate", 1700.0, 2000.0, work=Work.CPU, scale=Scale.RATE), (0.9, 0.9), Verdict.MISSED),  # 1,889
        (harness.at_least("ratio", 1.7, 1.8, work=Work.CPU), (0.8, 0.8), Verdict.MISSED),  # a ratio is not scaled
        (harness.at_least("ratio", 1.9, 1.8, work=Work.CPU), (0.27, 0.27), Verdict.NOT_JUDGED),
        (harness.at_least("ratio", 1.9, 1.8, work=Work.CPU), (1.0, 0.7), Verdict.NOT_JUDGED),
        (harness.at_least("ratio", 1.9, 1.8, work=Work.CPU), (1.0, 0.76), Verdict.MET),
        (harness.at_most("bytes", 11.0, 10.0), None, Verdict.MISSED),  # no machine's speed changes it
    ],
)
def test_a_goal_is_judged_at_reference_speed_or_not_at_all(goal: Goal, speeds: tuple[float, ...] | None, verdict: Verdict) -> None:
    assert goal.verdict(None if speeds is None else Speeds(speeds))[0] is verdict


def test_a_verdict_says_how_slow_the_machine_was_and_what_the_figure_is_at_reference_speed() -> None:
    assert seconds(30.0).told(Speeds((0.25, 0.27, 0.27))).endswith("not judged: machine at 0.27 of its speed")
    assert seconds(30.0).told(Speeds((1.0, 0.6))).endswith("not judged: machine between 0.60 and 1.00 of its speed")
    assert seconds(12.0).told(Speeds((0.8,))) == "start 12 (9.6 at reference speed), goal ≤ 10: met"


def test_the_limits_themselves_are_allowed() -> None:
    assert not Speeds((SLOWEST, SLOWEST)).trouble
    assert not Speeds((1.0, STEADY)).trouble


def test_disturbed_rounds_give_way_to_steady_ones_and_the_least_disturbed_are_kept() -> None:
    rounds = [Speeds((1.0, 0.5)), Speeds((1.0, 0.9)), Speeds((0.6, 0.6)), Speeds((1.0, 0.7))]
    assert disturbed(rounds) == [0, 3]
    assert kept(rounds, count=2) == [1, 2]
    assert kept(rounds, count=3) == [1, 2, 3]
    assert kept(rounds[:1], count=1) == [0]


def speeds_of(values: list[float]) -> Watch:
    """A machine that has these speeds, one after another."""
    left = iter(values)
    return Watch((Work.CPU,), measure_s=lambda work: reference_s(work) / next(left))


def test_what_was_disturbed_is_measured_again_and_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    # A look before, then one after each way: the second round sees the machine fall to a quarter and stay there.
    monkeypatch.setattr(harness, "watch", speeds_of([1.0, 1.0, 1.0, 0.25, 0.25, 0.25, 0.25]))
    numbers = iter(range(100))
    turns = harness.in_turns(2, {"a": lambda: next(numbers), "b": lambda: -next(numbers)})
    assert turns == {"a": [0, 4], "b": [-1, -5]}
    assert turns.speeds.drift == 1.0
    assert harness.watch.num_repeated == 1


def test_a_comparison_that_stays_disturbed_ends_and_is_not_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(harness, "watch", speeds_of([1.0, 0.4] * 10))
    turns = harness.in_turns(2, {"a": lambda: 1.0})
    assert len(turns["a"]) == 2
    goal = harness.at_least("ratio", 2.0, 1.0, work=Work.CPU, speeds=turns.speeds)
    assert goal.verdict(turns.speeds)[0] is Verdict.NOT_JUDGED


@pytest.mark.parametrize(
    ("speed", "value", "exits"),
    [(1.0, 9.0, None), (1.0, 11.0, 1), (0.3, 40.0, harness.NOT_JUDGED_EXIT), (0.3, 9.0, None)],
)
def test_a_check_that_cannot_judge_neither_passes_nor_fails(
    speed: float, value: float, exits: int | None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def measure(arguments: argparse.Namespace) -> harness.Measured:
        return harness.Measured(rows=[{"what": "start", "s": value}], goals=[seconds(value)])

    monkeypatch.setattr(harness, "watch", speeds_of([speed] * 2))
    monkeypatch.setattr(harness, "RESULTS", tmp_path / "results")
    monkeypatch.setattr(sys, "argv", ["bench", "--check"])
    code = None
    try:
        harness.run("bench", measure)
    except SystemExit as end:
        code = end.code
    assert code == exits
    stored = json.loads((tmp_path / "results" / "bench.json").read_text())
    assert stored["speed"]["speeds"]["cpu"]["median"] == pytest.approx(speed)
    assert stored["goals"][0]["at_reference"] == pytest.approx(value * speed)
    assert "machine" in stored["notes"][-1]


def test_the_reference_machine_has_a_name_and_a_figure_for_each_kind_of_work() -> None:
    stored = json.loads(REFERENCE.read_text())
    assert stored["machine"]
    assert set(stored["seconds"]) == {work.value for work in Work}
    assert all(value > 0 for value in stored["seconds"].values())


def test_what_others_take_of_the_machine_leaves_out_a_grandchild_that_nobody_waits_for():
    """It works for a while and is killed with its parent, which has not waited for it; beside it, somebody else's work may go on."""
    work = "left = 20_000_000\nwhile left:\n    left -= 1\nprint('done', flush=True)\nimport time\ntime.sleep(60)"
    parent = (
        f"import subprocess, sys\nchild = subprocess.Popen([sys.executable, '-c', {work!r}])\nprint(child.pid, flush=True)\nchild.wait()"
    )
    others = Others()
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert process.stdout.readline() == "done\n"
        process.kill()
        worked_s = others._by_process.get(child, 0.0)
        os.kill(child, 9)
    others.fraction()
    assert worked_s > 0.2
    assert others._by_process[child] >= worked_s
