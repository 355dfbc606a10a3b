"""A journal in segments: whole across rotations, whoever is killed in between, and small once it is old."""

from __future__ import annotations

import contextlib
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.observe import thinning
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.lines import JournalTail, read_journal, read_journals, read_spans
from pipelinerl.observe.report.reading import read_tables
from pipelinerl.observe.segments import SegmentReader, closed_path, compressed_path, has_lines, journals_of
from pipelinerl.observe.thinning import GAUGES_EVERY_S, compact, thinned
from scripts.bench.demo_journal import STEPS_PER_S, DemoJournals
from scripts.bench.report import aged_bytes, month_bytes_of

Line = dict[str, Any]


def numbers(folder: Path) -> list[int]:
    return [line["number"] for line in read_journals(folder) if line["kind"] == "x"]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "journal").iterdir())


def write(folder: Path, *, count: int, first: int = 0, segment_bytes: int = 220) -> None:
    """Lines of 73 and 74 bytes, so that a segment of 220 holds four."""
    with contextlib.closing(Journal(folder, "a", segment_bytes=segment_bytes, clock=lambda: 1.5)) as journal:
        for number in range(first, first + count):
            journal.write("x", number=number, text="." * 8)


def test_a_process_that_may_open_no_file_writes_on_and_begins_the_next_segment_once_it_may(tmp_path: Path):
    """As while strangers hold all descriptors."""
    journal = Journal(tmp_path, "orchestrator", segment_bytes=1)
    journal.write("a", number=0)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # what is open stays open
    try:
        journal.write("a", number=1)
        journal.write("a", number=2)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert len(list((tmp_path / "journal").iterdir())) == 1
    journal.write("a", number=3)
    journal.close()
    assert len(list((tmp_path / "journal").iterdir())) > 1
    assert [line["number"] for line in read_journals(tmp_path)] == [0, 1, 2, 3]


def test_a_journal_that_has_grown_goes_on_in_another_file_and_reads_as_one(tmp_path: Path):
    write(tmp_path, count=12)
    assert names(tmp_path) == ["a.000001.jsonl.gz", "a.000002.jsonl.gz", "a.000003.jsonl", "a.jsonl"], "the newest closed one is plain"
    assert numbers(tmp_path) == list(range(12))
    assert journals_of(tmp_path / "journal") == [tmp_path / "journal" / "a.jsonl"]


def test_a_process_that_starts_again_goes_on_in_the_open_segment(tmp_path: Path):
    for life in range(5):
        write(tmp_path, count=3, first=3 * life)
    assert numbers(tmp_path) == list(range(15))
    assert names(tmp_path)[-1] == "a.jsonl"


def test_a_follower_gets_every_line_once_wherever_segments_are_closed_and_compressed_meanwhile(tmp_path: Path):
    for pause in (1, 3, 4, 7, 30):
        folder, tail, found = tmp_path / str(pause), None, []
        with contextlib.closing(Journal(folder, "a", segment_bytes=220, clock=lambda: 1.5)) as journal:
            tail = JournalTail(folder)
            for number in range(40):
                journal.write("x", number=number, text="." * 8)
                if number % pause == 0:
                    found += [line["number"] for line in tail.new_lines()]
        assert [*found, *(line["number"] for line in tail.new_lines())] == list(range(40))
        assert tail.num_unreadable == 0


def test_a_follower_that_stopped_within_a_segment_goes_on_in_it_once_it_is_thinned(tmp_path: Path):
    journal = tmp_path / "a.jsonl"
    lines = [json.dumps({"t": float(t), "kind": "status" if t % 2 else "step", "number": t}).encode() + b"\n" for t in range(8)]
    journal.write_bytes(b"".join(lines[:4]))
    reader = SegmentReader(journal)
    assert [json.loads(raw)["number"] for raw in reader.new_lines()] == [0, 1, 2, 3]
    journal.write_bytes(b"".join(lines))
    journal.rename(closed_path(journal, 1))
    compact(closed_path(journal, 1), compressed_path(journal, 1))
    journal.write_bytes(b'{"t": 9.0, "kind": "end", "number": 9}\n')
    # Gauges of the seconds 1 to 7: those at 1 and 7 stay, five seconds apart.
    assert [(json.loads(raw)["number"], reader.number - 1) for raw in reader.new_lines()] == [(4, 4), (6, 6), (7, 7), (9, 8)]


def test_the_number_of_a_line_stays_whatever_is_thinned(tmp_path: Path):
    with contextlib.closing(Journal(tmp_path, "a", segment_bytes=1000, clock=iter(range(10**6)).__next__)) as journal:
        for number in range(60):
            journal.write("status" if number % 3 else "x", number=number)
    reader = SegmentReader(tmp_path / "journal" / "a.jsonl")
    kept = [(json.loads(raw)["number"], reader.number - 1) for raw in reader.new_lines()]
    assert all(number == at for number, at in kept)
    assert [number for number, _ in kept if number % 3 == 0] == list(range(0, 60, 3))
    assert len(kept) < 50


def test_a_segment_that_was_cut_off_on_the_disk_costs_its_rest_alone(tmp_path: Path):
    write(tmp_path, count=18)
    damaged = tmp_path / "journal" / "a.000002.jsonl.gz"
    damaged.write_bytes(damaged.read_bytes()[:-20])
    assert numbers(tmp_path)[-10:] == list(range(8, 18))
    assert sum(line["kind"] == "unreadable" for line in read_journals(tmp_path)) == 1


KILLED_AT = ("rename", "after rename", "replace", "after replace", "unlink")


@pytest.mark.slow
@pytest.mark.parametrize("moment", KILLED_AT)
def test_whoever_is_killed_while_segments_change_loses_no_line(tmp_path: Path, moment: str):
    """A process is killed by SIGKILL at a moment of the change; another goes on in its journal."""
    code = f"""
import os, signal, sys
from pathlib import Path
from pipelinerl.observe.journal import Journal
name, after = {moment.removeprefix("after ")!r}, {moment.startswith("after")}
kept, seen = getattr(Path, name), [0]
def killed(self, *arguments):
    seen[0] += 1
    if seen[0] == 2 and not after:
        os.kill(os.getpid(), signal.SIGKILL)
    found = kept(self, *arguments)
    if seen[0] == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    return found
setattr(Path, name, killed)
journal = Journal(Path(sys.argv[1]), "a", segment_bytes=220, clock=lambda: 1.5)
for number in range(400):
    print(number, flush=True)
    journal.write("x", number=number, text="." * 8)
journal.close()
"""
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr
    last = int(done.stdout.split()[-1])
    found = numbers(tmp_path)
    assert found in (list(range(last)), list(range(last + 1)))
    write(tmp_path, count=30, first=len(found))
    assert numbers(tmp_path) == list(range(len(found) + 30))
    assert not [name for name in names(tmp_path) if name.endswith("unfinished")], "what was half compressed was compressed anew"


def test_on_a_full_disk_a_segment_stays_as_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    write(tmp_path, count=18)
    assert numbers(tmp_path) == list(range(18))
    assert not list((tmp_path / "journal").glob("*.gz"))


def test_of_old_gauges_one_in_five_seconds_stays_and_of_all_else_every_line():
    lines = [{"t": t / 2, "kind": "status", "n": t} for t in range(40)]
    lines += [{"t": t / 2, "kind": kind, "n": t} for t in range(40) for kind in ("load", "swap", "sample", "evaluation", "end", "alarm")]
    kept = [json.loads(raw) for raw in thinned(json.dumps(line).encode() + b"\n" for line in lines) if raw != b"\n"]
    gauges = [line["t"] for line in kept if line["kind"] == "status"]
    assert gauges == [0.0, 5.0, 10.0, 15.0]
    assert [line for line in kept if line["kind"] not in ("status", "load")] == [
        line for line in lines if line["kind"] not in ("status", "load")
    ]
    assert GAUGES_EVERY_S == 5.0


def test_old_spans_become_their_sum_minute_by_minute_and_busy_seconds_are_kept(tmp_path: Path):
    spans = [("forward", 10.0 * n, 10.0 * n + 4.0) for n in range(20)] + [("swap", 10.0 * n + 5.0, 10.0 * n + 5.5) for n in range(20)]
    with contextlib.closing(Journal(tmp_path, "engine-0")) as journal:
        for name, start, end in sorted(spans, key=lambda span: span[2]):
            journal.span("engine-0", name, start=start, end=end)
    path = tmp_path / "journal" / "engine-0.jsonl"
    compact(path, compressed_path(path, 1))
    found = list(read_spans(tmp_path))
    assert {name: sum(span.busy_s or 0.0 for span in found if span.name == name) for name in ("forward", "swap")} == {
        "forward": pytest.approx(80.0),
        "swap": pytest.approx(10.0),
    }
    assert all(span.end - span.start <= thinning.WORK_S for span in found)
    assert len(found) == 8, "six of each fit into a minute: 6 + 6 + 6 + 2"
    tables = read_tables(tmp_path)
    assert tables.whole_from == 195.5


def test_figures_of_an_old_step_keep_seven_digits_and_its_time_all():
    line = {
        "t": 1795330531.2249463,
        "kind": "step",
        "step": 49,
        "reward_mean": 0.3593537697533414,
        "trainer": {"loss": -0.0018572254148994953},
    }
    (raw,) = thinned([json.dumps(line).encode() + b"\n"])
    assert json.loads(raw) == {**line, "reward_mean": 0.3593538, "trainer": {"loss": -0.001857225}}


def test_what_cannot_be_decoded_stays_to_be_counted():
    damage = [b'{"t": 1, "kind": "status"\n', b'{"t": 1, "kind": "span"}\n', b"\0\0\n", b'{"t": 2, "kind": "span", "lane": 1}\n']
    assert thinned(damage) == damage


@pytest.mark.slow
def test_a_month_of_the_demos_pace_stays_under_four_gigabytes(tmp_path: Path):
    """1.8 steps a second for 30 days are 4.67 million steps. Bytes of a step as it ages are counted on journals like the demo's, and every
    process keeps two segments as they were written."""
    step_bytes = aged_bytes(tmp_path)
    assert month_bytes_of(step_bytes) < 3.5e9
    assert step_bytes > 200, "every step is still there"


@pytest.mark.slow
def test_reports_read_across_segments_and_show_the_same_run(tmp_path: Path):
    DemoJournals(tmp_path / "whole", num_steps=300).write()
    DemoJournals(tmp_path / "rotated", num_steps=300, segment_bytes=100_000).write()
    assert len(list((tmp_path / "rotated" / "journal").glob("orchestrator.*.gz"))) > 10
    whole, rotated = read_tables(tmp_path / "whole"), read_tables(tmp_path / "rotated")
    assert [step.step for step in rotated.steps] == list(range(300))
    assert [step.reward_mean for step in rotated.steps] == pytest.approx([step.reward_mean for step in whole.steps], rel=1e-6)
    assert rotated.swaps == whole.swaps
    assert (rotated.began, rotated.ended, rotated.end) == (whole.began, whole.ended, whole.end)
    assert len(rotated.statuses) < len(whole.statuses) / 2
    assert rotated.duration_s == pytest.approx(300 / STEPS_PER_S + 4.0)


def test_a_journal_of_which_only_closed_segments_are_left_is_there(tmp_path: Path):
    write(tmp_path, count=9)
    path = tmp_path / "journal" / "a.jsonl"
    path.unlink()  # as between the closing of a segment and the start of the next
    assert has_lines(path)
    assert not has_lines(tmp_path / "journal" / "b.jsonl")
    assert [line["number"] for line in read_journal(path)] == list(range(8))


def test_gzip_of_others_reads_an_old_segment(tmp_path: Path):
    write(tmp_path, count=18)
    packed = tmp_path / "journal" / "a.000001.jsonl.gz"
    told = subprocess.run(["gzip", "-dc", str(packed)], capture_output=True, check=True).stdout
    assert [json.loads(raw)["number"] for raw in told.splitlines()] == [0, 1, 2, 3]
    assert gzip.decompress(packed.read_bytes()) == told
