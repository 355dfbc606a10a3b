"""Modes side by side: figures by hand, forecasts as notes of the table and of the page, and a mode that has nothing to show."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelinerl.errors import DataError
from pipelinerl.observe.report.comparison import write_comparison
from pipelinerl.observe.report.modes import ModeFigures, ModeRun, common_reward, figures_of, num_steps_to, table_of
from pipelinerl.observe.report.reading import Tables, read_tables
from tests.observe.report.synthetic import START_UP_S, Plan, write_run

PLAN = Plan(num_steps=10)
BEGINS_S = 3.0
"""The last gauges before the first evaluation, seconds after the run's first line."""


def run_with(folder: Path, *, slope: float, without: frozenset[str] = frozenset()) -> Tables:
    """A run of ten steps with the rewards 0, slope, ..., 9 slope: one sample in each of the first five steps, three in the others."""
    write_run(folder, PLAN, without=without)
    path = folder / "journal" / "orchestrator.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        if line["kind"] == "step":
            line |= {"reward_mean": slope * line["step"], "num_samples": 1 if line["step"] < 5 else 3}
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return read_tables(folder)


def test_seconds_and_samples_of_a_mode_are_those_worked_by_hand(tmp_path: Path) -> None:
    whole, half = run_with(tmp_path / "whole", slope=0.1), run_with(tmp_path / "half", slope=0.05)
    assert common_reward({"a": whole, "b": half}) == 0.35, "the last five steps of the slower one"
    assert num_steps_to("a", whole, 0.35) == 7, "steps 2 to 6 have 0.4, those before 0.3"
    assert num_steps_to("b", half, 0.36) is None
    found = figures_of("a", whole, reward=0.35)
    assert found.reached_s == pytest.approx(START_UP_S + 7 * PLAN.period_s - BEGINS_S)
    assert found.reward_per_sample == pytest.approx((0.1 * 10 + 0.3 * 35) / 20)
    assert found.samples_per_s == pytest.approx((4 + 15) / (9 * PLAN.period_s))
    assert found.staleness_mean == pytest.approx(0.3 + 2 * 0.1, rel=1e-3)
    assert found.trainer_idle_fraction == pytest.approx(1 - (PLAN.train_s + PLAN.publish_s) / PLAN.period_s, rel=1e-3)
    assert found.engines_idle_fraction == pytest.approx(0.0, abs=1e-9)


def test_what_is_foretold_stands_behind_what_was_measured_in_the_table_and_on_the_page(tmp_path: Path) -> None:
    run = run_with(tmp_path / "run", slope=0.1)
    foretold = ModeFigures(samples_per_s=1.5, staleness_mean=0.25)
    measured = figures_of("sync", run, reward=0.35)
    told = [
        ModeRun(mode="sync", run_folder="run", num_steps=10, measured=measured, foretold=foretold, foretold_from="from streaming"),
        ModeRun(
            mode="streaming", run_folder="run", num_steps=10, measured=measured, foretold=ModeFigures(), foretold_from="not foretold: why"
        ),
    ]
    table = table_of(told, reward=0.35)
    assert table.headings == ("", "sync", "streaming")
    assert table.rows[1] == ["samples/s", ("1.76", " (1.50)"), ("1.76", "")]
    assert table.rows[2][0] == "to reward 0.35"
    assert "streaming not foretold: why" in table.note
    text = write_comparison([run.folder, run.folder], path=tmp_path / "page.html", modes=table).read_text()
    assert text.index('id="modes"') < text.index('id="numbers"')
    assert "(1.50)" in text
    assert 'id="modes"' not in write_comparison([run.folder, run.folder], path=tmp_path / "page.html").read_text()


def test_a_mode_that_has_trained_nothing_is_named(tmp_path: Path) -> None:
    nothing = run_with(tmp_path / "run", slope=0.1, without=frozenset({"step"}))
    with pytest.raises(DataError, match="mode sync has trained no step"):
        common_reward({"sync": nothing})
