"""What the bench of the peers says of its runs, on numbers worked by hand; its page and figures are those that it stored."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from scripts.bench import peers
from scripts.bench.beside import countdown, page, systems
from scripts.bench.beside.memory import peak_of
from scripts.bench.beside.systems import Run, Step

STORED = Path(peers.__file__).parent / "results" / "peers.json"


def run_of(*steps: tuple[float, float]) -> Run:
    """A run of steps of two samples, by their seconds and rewards."""
    lengths = [4, 200] * len(steps)
    return Run(
        began_s=8.0, steps=[Step(seconds=s, reward=reward) for s, reward in steps], lengths=lengths, peak_mib=100.0, parts={"engine": 0.5}
    )


def test_a_run_is_timed_from_its_command_and_its_speed_from_its_first_token() -> None:
    figures = peers._figures(run_of((10.0, 0.6), (12.0, 0.8), (14.0, 0.8), (16.0, 1.0)))
    assert figures["first_step_s"] == 10.0
    assert figures["samples_per_s"] == pytest.approx(8 / 8.0)
    assert figures["area"] == pytest.approx(0.8)
    # Means of up to five steps: 0.6, 0.7, 0.7333, 0.8.
    assert figures["reached_s"] == {"0.7": 12.0, "0.8": 16.0, "0.9": None}
    assert figures["curve"][1] == [12.0, 4.0, pytest.approx(0.7)]
    assert figures["lengths"] == [102.0, 200.0, 200.0]


def made_of(**figures: dict[str, Any]) -> peers.Made:
    """The same figures for every seed of each system."""
    return {(peers.LONG_TAIL, system.replace("_", " "), seed): dict(one) for system, one in figures.items() for seed in peers.SEEDS}


def figures_of(first: float, rate: float, reached: float | None, area: float) -> dict[str, Any]:
    return {"first_step_s": first, "samples_per_s": rate, "reached_s": {"0.9": reached}, "area": area, "speeds": [1.0, 1.0]}


def test_goals_are_ratios_of_streaming_over_each_of_the_others() -> None:
    made = made_of(
        TRL=figures_of(20.0, 10.0, 200.0, 0.80),
        plain_loop=figures_of(10.0, 30.0, 80.0, 0.82),
        sync=figures_of(10.0, 20.0, None, 0.81),
        one_step_off=figures_of(10.0, 40.0, 60.0, 0.8),
        streaming=figures_of(15.0, 60.0, 50.0, 0.79),
    )
    values = {goal.name: goal.value for goal in peers._goals(made)}
    assert values["streaming over TRL, samples/s"] == pytest.approx(6.0)
    assert values["streaming over TRL, pace to reward 0.9"] == pytest.approx(4.0)
    assert values["streaming over plain loop, samples/s"] == pytest.approx(2.0)
    assert values["streaming over sync, pace to reward 0.9"] == float("inf")
    assert values["start to first step over TRL's"] == pytest.approx(0.75)
    assert values["reward per sample, area, over the best synchronous system's"] == pytest.approx(0.79 / 0.82)
    made[peers.LONG_TAIL, "streaming", 0]["reached_s"] = made[peers.LONG_TAIL, "streaming", 2]["reached_s"] = {"0.9": None}
    assert {goal.value for goal in peers._goals(made) if "pace" in goal.name} == {0.0}


def test_a_seed_that_met_another_machine_is_not_the_one_that_judges() -> None:
    made = made_of(TRL=figures_of(20.0, 10.0, 200.0, 0.8), streaming=figures_of(15.0, 60.0, 50.0, 0.8))
    made[peers.LONG_TAIL, "streaming", 1] |= {"speeds": [0.3, 1.0], "samples_per_s": 5.0}
    made[peers.LONG_TAIL, "TRL", 0]["speeds"] = [1.0, 0.9]
    value, speeds = peers._over(made, lambda run: run["samples_per_s"], "TRL")
    assert value == pytest.approx(6.0)
    assert speeds.drift == 0.9


def test_answers_have_a_long_tail_and_their_reward_is_the_part_that_is_small() -> None:
    rows = list(itertools.islice(countdown.train_prompts(0), 2000))
    lengths = sorted(len(row["answer"]) for row in rows)
    assert (lengths[0], lengths[-1]) == (countdown.SHORTEST, countdown.LONGEST)
    assert lengths[1000] == pytest.approx(countdown.MEDIAN, abs=4)
    answer = "b1b0a7a6a5a4a3a2a1a0"
    assert {"prompt": "=b1", "answer": answer} in rows
    assert countdown.reward("=b1", answer, answer) == 1.0
    assert countdown.reward("=b1", "B1B0" + answer[4:], answer) == pytest.approx(0.8)
    assert countdown.reward("=b1", answer[:-2], answer) == pytest.approx(0.9)
    assert countdown.reward("=b1", answer + "a0" * 10, answer) == pytest.approx(0.5)
    assert countdown.reward("=b1", "", answer) == 0.0
    shown = itertools.islice(countdown.demonstrations(0), 2000)
    small = [countdown.reward("", row["completion"], row["completion"].lower()) for row in shown]
    assert sum(small) / len(small) == pytest.approx(countdown.SMALL_FRACTION, abs=0.03)


@pytest.mark.slow
@pytest.mark.process
def test_memory_is_that_of_the_whole_tree() -> None:
    child = "held = bytearray(200 << 20); import time; time.sleep(2.5)"
    parent = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}], check=True)"
    with subprocess.Popen([sys.executable, "-c", parent]) as started, peak_of(started.pid) as peak:
        started.wait(30)
    assert 200 < peak.mib < 300


def test_lines_are_those_that_a_user_writes() -> None:
    lines = {system: systems.lines_written(system) for system in peers.SYSTEMS}
    assert lines["streaming"] == lines["sync"] < lines["TRL"] < lines["plain loop"]


def test_the_page_and_its_figures_are_what_is_stored(tmp_path: Path) -> None:
    record = json.loads(STORED.read_text()) if STORED.exists() else None
    assert page.PAGE.read_text().partition(page.HEADING)[2] == page.section(record).partition(page.HEADING)[2]
    if record is not None:
        peers.draw(record["curves"], tmp_path)
        drawn = {path.name: path.read_text() for path in tmp_path.iterdir()}
        assert drawn == {path.name: path.read_text() for path in STORED.parent.glob("peers-*.svg")}


def test_a_page_tells_every_system_and_every_goal() -> None:
    row = {"task": "demo", **dict.fromkeys(page.COLUMNS, 1.25), "system": "TRL"}
    goal = {"name": "speed", "value": 3.0, "goal": 5.0, "at_least": True, "verdict": "MISSED", "why": ""}
    record = {"date": "today", "machine": "here", "commit": "abc", "rows": [row], "goals": [goal], "notes": ["demo, TRL: generation 0.90"]}
    told = page.section(record)
    assert "| TRL | 1.25 |" in told
    assert "- speed: 3, goal ≥ 5: MISSED" in told
    assert "peers-demo-seconds.svg" in told
    assert "generation 0.90" in told
