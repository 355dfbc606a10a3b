"""Journals: whole lines in order of time, and work close together joined into one span."""

from __future__ import annotations

import contextlib
import resource
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.observe.journal import Journal
from pipelinerl.observe.lines import read_journal, read_journals


def spans(folder: Path) -> list[tuple[str, str, float, float, int]]:
    lines = [line for line in read_journals(folder) if line["kind"] == "span"]
    return sorted((line["lane"], line["name"], line["start"], line["end"], line["count"]) for line in lines)


def test_a_line_says_when_what_and_who_and_is_there_at_once(tmp_path: Path):
    with contextlib.closing(Journal(tmp_path, "engine-1")) as journal:
        journal.write("load", num_tokens=5, parts=[1, None, "a"])
        (line,) = read_journals(tmp_path)
    assert line.pop("t") > 1.7e9
    assert line == {"kind": "load", "process": "engine-1", "num_tokens": 5, "parts": [1, None, "a"]}


def test_the_journals_of_all_processes_are_one_story(tmp_path: Path):
    clock = iter([3.0, 1.0, 2.0, 4.0]).__next__
    with (
        contextlib.closing(Journal(tmp_path, "a", clock=clock)) as first,
        contextlib.closing(Journal(tmp_path, "b", clock=clock)) as second,
    ):
        first.write("x", number=3)
        second.write("x", number=1)
        first.write("x", number=2)
        second.write("x", number=4)
    assert [line["number"] for line in read_journals(tmp_path)] == [1, 2, 3, 4]


def test_on_a_full_disk_lines_are_left_out_and_counted_and_the_next_ones_are_whole(tmp_path: Path):
    """Files may not grow past 200 bytes: the second line is written in part, the third not at all."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with contextlib.closing(Journal(tmp_path, "a")) as journal:
        resource.setrlimit(resource.RLIMIT_FSIZE, (200, before[1]))
        try:
            for number in range(3):
                journal.write("x", number=number, text="." * 70)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        journal.write("x", number=3)
    lines = read_journals(tmp_path)
    assert sorted((line["kind"], line.get("number", line.get("num_lines"))) for line in lines if line["kind"] != "unreadable") == [
        ("unwritten", 2),
        ("x", 0),
        ("x", 3),
    ]
    assert len(lines) == 4


def test_a_process_that_starts_again_goes_on_in_its_journal(tmp_path: Path):
    for number in range(2):
        with contextlib.closing(Journal(tmp_path, "a")) as journal:
            journal.write("x", number=number)
    assert [line["number"] for line in read_journals(tmp_path)] == [0, 1]


def test_a_line_still_being_written_is_left_out(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"t": 1, "kind": "x"}\n{"t": 2, "ki')
    assert list(read_journal(path)) == [{"t": 1, "kind": "x"}]


@pytest.mark.parametrize(
    "damage",
    [
        b"\0" * 40,
        b'{"t": 2, "ki',
        b"[1]",
        b'{"kind": "x"}',
        b'{"t": "2", "kind": "x"}',
        b'{"t": NaN, "kind": "x"}',
        b"\xff",
        b"[" * 10**5,
    ],
)
def test_a_damaged_line_costs_itself_and_is_counted(tmp_path: Path, damage: bytes):
    path = tmp_path / "engine-0.jsonl"
    path.write_bytes(b'{"t": 1, "kind": "x"}\n' + damage + b'\n{"t": 3, "kind": "x"}\n')
    first, broken, last = read_journal(path)
    assert (first["t"], last["t"]) == (1, 3)
    assert broken == {"t": 1, "kind": "unreadable", "process": "engine-0", "line": 2}


def work(*parts: tuple[str, str, float, float], folder: Path, **options: Any) -> list[tuple[str, str, float, float, int]]:
    with contextlib.closing(Journal(folder, "p")) as journal:
        for lane, name, start, end in parts:
            journal.span(lane, name, start=start, end=end, **options)
    return spans(folder)


def test_work_closer_than_ten_milliseconds_is_one_span_and_a_longer_gap_ends_it(tmp_path: Path):
    found = work(
        ("e", "forward", 10.0, 10.1),
        ("e", "forward", 10.105, 10.2),
        ("e", "forward", 10.3, 10.4),
        folder=tmp_path,
    )
    assert found == [("e", "forward", 10.0, 10.2, 2), ("e", "forward", 10.3, 10.4, 1)]


def test_a_span_is_written_after_a_second_though_work_goes_on(tmp_path: Path):
    parts = [("e", "forward", number / 10, (number + 1) / 10) for number in range(25)]
    found = work(*parts, folder=tmp_path)
    assert [count for *_, count in found] == [10, 10, 5]
    assert max(end - start for _, _, start, end, _ in found) <= 1.0


def test_lanes_and_names_are_kept_apart(tmp_path: Path):
    found = work(
        ("a", "forward", 1.0, 1.1),
        ("b", "forward", 1.0, 1.2),
        ("a", "swap", 1.1, 1.15),
        ("a", "forward", 1.1, 1.3),
        folder=tmp_path,
        count=3,
    )
    assert found == [("a", "forward", 1.0, 1.3, 6), ("a", "swap", 1.1, 1.15, 3), ("b", "forward", 1.0, 1.2, 3)]
