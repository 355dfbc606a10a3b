"""The timeline: what overlaps, which seconds are shown, where swaps are marked."""

import itertools
import re
from pathlib import Path

import pytest

from pipelinerl.observe.lines import read_spans
from pipelinerl.observe.report.reading import Tables, read_tables
from pipelinerl.observe.report.timeline import choose_stretch, common_s, read_activity, round_values, timeline, union
from tests.observe.report.synthetic import BEGAN, Plan, write_run


def test_union_joins_what_touches() -> None:
    assert union([(3.0, 4.0), (0.0, 1.0), (0.5, 2.0), (2.0, 2.5)]) == [(0.0, 2.5), (3.0, 4.0)]


def test_common_seconds_are_counted_once() -> None:
    assert common_s([(0.0, 4.0), (6.0, 8.0)], [(1.0, 2.0), (3.0, 7.0)]) == pytest.approx(1.0 + 1.0 + 1.0)
    assert common_s([(0.0, 1.0)], [(1.0, 2.0)]) == 0.0


def _shares(folder: Path) -> list[float]:
    found = re.search(r"decodes ([\d.]+).%, the trainer works ([\d.]+).%, both at once ([\d.]+).%", timeline(read_tables(folder))[0].note)
    assert found is not None
    return [float(share) for share in found.groups()]


def test_streaming_shows_both_halves_at_once(tmp_path: Path) -> None:
    # Of 1.2004 s engines decode 1.2 s, and the trainer works the last 0.73 s, all but 0.4 ms of it beside them.
    write_run(tmp_path / "run", Plan())
    engines, trainer, both = _shares(tmp_path / "run")
    assert engines > 99.5
    assert trainer == pytest.approx(100 * 0.73 / 1.2004, abs=3.0)
    assert both == pytest.approx(trainer, abs=0.3)


def test_taking_turns_shows_no_overlap(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(takes_turns=True, mode="sync"))
    engines, trainer, both = _shares(tmp_path / "run")
    assert both == 0.0
    assert engines + trainer == pytest.approx(100.0, abs=0.3)


def test_the_stretch_lies_in_the_middle_and_is_long_enough_to_read(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan())
    tables = read_tables(tmp_path / "run")
    stretch = choose_stretch(tables)
    assert stretch is not None
    assert stretch[1] - stretch[0] == pytest.approx(10.0)
    assert stretch[0] < tables.steps[20].t < stretch[1]


def test_long_steps_widen_the_stretch_so_that_a_step_fits(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(generate_s=60.0, num_steps=4))
    stretch = choose_stretch(read_tables(tmp_path / "run"))
    assert stretch is not None
    assert stretch[1] - stretch[0] == pytest.approx(1.5 * 60.0, rel=1e-3)


def test_a_run_shorter_than_the_stretch_is_shown_whole(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(num_steps=2))
    tables = read_tables(tmp_path / "run")
    assert choose_stretch(tables) == (tables.worked_from, tables.ended)
    assert choose_stretch(Tables(folder=tmp_path)) is None


def test_busy_seconds_of_the_bins_are_the_seconds_worked(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan())
    activity = read_activity(read_tables(tmp_path / "run"), (BEGAN, BEGAN + 10))
    assert activity.bins["engine"].sum() == pytest.approx(2 * 40 * 1.2)
    assert activity.bins["scorer"].sum() == pytest.approx(4 * 40 * 0.4)
    assert activity.bins["trainer"].sum() == pytest.approx(40 * 0.73)


def test_every_swap_within_the_stretch_has_its_tick(tmp_path: Path) -> None:
    lines = write_run(tmp_path / "run", Plan())
    tables = read_tables(tmp_path / "run")
    stretch = choose_stretch(tables)
    assert stretch is not None
    within = [line for line in lines if line["kind"] == "swap" and stretch[0] <= line["t"] <= stretch[1]]
    marks = [mark for mark in timeline(tables)[0].marks if mark.css == "swap"]
    assert len(within) > 4
    assert len(marks) == len(within)
    expected = [100 * (line["t"] - stretch[0]) / (stretch[1] - stretch[0]) for line in within]
    assert sorted(mark.x for mark in marks) == pytest.approx(sorted(expected))
    assert f"engine-1 changed to v{within[0]['version']}" in [mark.title for mark in marks]


def test_a_span_is_drawn_where_it_was(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(takes_turns=True, mode="sync"))
    tables = read_tables(tmp_path / "run")
    stretch = choose_stretch(tables)
    assert stretch is not None
    picture = timeline(tables)[0]
    lane = next(lane for lane in picture.lanes if lane.name == "engine 0")
    ((colour, path),) = [shape for shape in lane.shapes if shape[0] == "engine"]
    drawn = re.findall(r"M([\d.]+) 0H([\d.]+)V1H[\d.]+z", path)
    spans = [span for span in read_spans(tables.folder) if span.lane == "engine-0" and stretch[0] < span.start and span.end < stretch[1]]
    worked = union((span.start, span.end) for span in spans)
    share = 1000 / (stretch[1] - stretch[0])
    inner = [(float(start), float(end)) for start, end in drawn if float(start) > 0 and float(end) < 1000]
    assert len(inner) == len(worked)
    assert [edge for pair in inner for edge in pair] == pytest.approx([share * (t - stretch[0]) for pair in worked for t in pair], abs=0.06)
    assert colour == "engine"


def test_words_have_room_beside_each_other_on_a_wide_screen_and_on_a_phone(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(generate_s=0.3, train_s=0.2, score_s=0.1))
    for picture in timeline(read_tables(tmp_path / "run")):
        for css, pixels in (("step", 84), ("tick", 50)):
            for width, places in ((920, ("first", "wide")), (260, ("first",))):
                at = sorted(mark.x for mark in picture.marks if mark.css == css and mark.place in places)
                assert all((after - before) * width / 100 >= pixels - 1e-6 for before, after in itertools.pairwise(at))
    assert {mark.place for mark in timeline(read_tables(tmp_path / "run"))[0].marks if mark.css == "step"} == {"first", "wide", ""}


def test_scoring_slots_that_are_not_drawn_are_counted(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(num_slots=9))
    assert timeline(read_tables(tmp_path / "run"))[0].note.endswith("3 more scoring slots not drawn")


def test_values_of_a_time_axis_are_round_and_lie_within() -> None:
    assert round_values(0.0, 53.0, count=5) == [0, 20, 40]
    assert round_values(0.12, 0.83, count=4) == pytest.approx([0.2, 0.4, 0.6, 0.8])
