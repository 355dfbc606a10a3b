"""Journals are read as they grow, whole lines only, and long ones are thinned without losing their end."""

import contextlib
import itertools
import json
from pathlib import Path

from pipelinerl.observe.fold import rows
from pipelinerl.observe.fold.counters import growth, growth_of_all, rate_points
from pipelinerl.observe.fold.thinned import Thinned
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.lines import JournalTail, Span, read_spans
from pipelinerl.observe.report.reading import read_tables
from tests.observe.report.synthetic import BEGAN, START_UP_S, Plan, write_run


def test_a_half_written_line_is_read_once_it_is_whole(tmp_path: Path) -> None:
    (tmp_path / "journal").mkdir()
    path = tmp_path / "journal" / "orchestrator.jsonl"
    whole = json.dumps({"t": 1.0, "kind": "step", "step": 0})
    tail = JournalTail(tmp_path)
    path.write_text(whole + "\n" + whole[:9])
    assert len(list(tail.new_lines())) == 1
    assert list(tail.new_lines()) == []
    path.write_text(whole + "\n" + whole + "\n")
    assert [line["step"] for line in tail.new_lines()] == [0]
    assert tail.num_unreadable == 0


def test_journals_written_by_the_journal_class_are_told_apart_by_kind(tmp_path: Path) -> None:
    journal = Journal(tmp_path, "engine-0")
    journal.write("load", engine_id=0, num_tokens=5)
    journal.span("engine-0", "forward", start=1.0, end=2.0)
    journal.close()
    assert [line["kind"] for line in JournalTail(tmp_path).new_lines()] == ["load"]
    assert list(read_spans(tmp_path)) == [Span(lane="engine-0", name="forward", start=1.0, end=2.0)]


def test_thinning_keeps_the_first_and_the_last_and_equal_distances() -> None:
    thinned: Thinned[int] = Thinned(8)
    for number in range(100):
        thinned.add(number)
    kept = thinned.rows()
    assert kept[0] == 0
    assert kept[-1] == 99
    assert len(kept) <= 9
    assert len({after - before for before, after in itertools.pairwise(kept[:-1])}) == 1


def test_a_counter_that_starts_again_from_zero_has_not_shrunk() -> None:
    assert growth([5.0, 8.0, None, 2.0, 4.0]) == 3.0 + 2.0 + 2.0
    assert growth([5.0]) is None
    assert growth([]) is None


def test_counters_of_peers_are_followed_one_by_one() -> None:
    # Engine 1 announces itself later: its first reading is no growth.
    readings = [{0: 10.0}, {0: 12.0, 1: 100.0}, {0: 15.0, 1: 101.0}]
    statuses = [
        rows.StatusRow(t=float(t), engines=tuple(rows.EngineGauge(engine_id=engine, busy_s=busy) for engine, busy in reading.items()))
        for t, reading in enumerate(readings)
    ]
    assert growth_of_all(statuses, lambda row: {engine.engine_id: engine.busy_s for engine in row.engines}) == 5.0 + 1.0


def test_rates_are_per_second_of_their_stretch() -> None:
    assert rate_points([(0.0, 0.0), (2.0, 10.0), (4.0, 40.0)], num_points=3) == [(2.0, 5.0), (4.0, 15.0)]
    assert rate_points([(0.0, 0.0), (2.0, 10.0), (4.0, 40.0)], num_points=1) == [(4.0, 10.0)]
    assert rate_points([(0.0, 0.0)], num_points=3) == []


def test_two_readings_close_together_make_no_spike() -> None:
    assert rate_points([(0.0, 0.0), (2.0, 10.0), (4.0, 20.0), (4.001, 25.0)], num_points=3) == [(2.0, 5.0), (4.0, 5.0)]


def test_a_stretch_is_never_shorter_than_told() -> None:
    # The counter is brought up to date every second reading.
    readings = [(float(t), 10.0 * (t // 2)) for t in range(9)]
    assert rate_points(readings, num_points=100, shortest_s=2.0) == [(2.0, 5.0), (4.0, 5.0), (6.0, 5.0), (8.0, 5.0)]


def test_start_up_ends_with_the_last_gauges_before_the_first_token(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(num_steps=5), without=frozenset({"evaluation"}))
    assert read_tables(tmp_path / "run").worked_from == BEGAN + START_UP_S
    write_run(tmp_path / "evaluated", Plan(num_steps=5))
    assert read_tables(tmp_path / "evaluated").worked_from == BEGAN + 3.0, "the evaluation before the first step is work"
    write_run(tmp_path / "bare", Plan(num_steps=5), without=frozenset({"status"}))
    assert read_tables(tmp_path / "bare").worked_from == BEGAN


def test_tables_hold_what_was_written(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", Plan(num_steps=5))
    tables = read_tables(tmp_path / "run")
    assert [step.reward_mean for step in tables.steps] == [line["reward_mean"] for line in lines if line["kind"] == "step"]
    assert tables.steps[3].staleness == {int(age): count for age, count in _step(lines, 3)["staleness"].items()}
    assert tables.steps[3].trainer == _step(lines, 3)["trainer"]
    assert tables.setting("pipeline", "max_staleness") == 4
    assert tables.setting("pipeline", "no_such_key") is None
    assert tables.duration_s == lines[-1]["t"] - lines[0]["t"]


def _step(lines: list[dict], step: int) -> dict:
    return next(line for line in lines if line["kind"] == "step" and line["step"] == step)


def test_alarms_are_told_in_the_scale_that_the_run_was_begun_with(tmp_path: Path) -> None:
    for name, config in (("ones", {}), ("tens", {"algorithm": {"correct_reward": 10.0}})):
        with contextlib.closing(Journal(tmp_path / name, "orchestrator")) as journal:
            journal.write("run", config=config)
            for step in range(20):
                journal.write("step", step=step, reward_mean=0.95, num_groups=8, zero_variance_fraction=0.9)
    assert not read_tables(tmp_path / "ones").alarms, "solved"
    assert [alarm.name for alarm in read_tables(tmp_path / "tens").alarms] == ["no_signal"]
