"""PrmScoring a journal: nothing lost, nothing twice, whatever the destination does."""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.observe.journal import Journal
from pipelinerl.observe.report.samples import ShownSample
from pipelinerl.observe.tracking import follow as following
from pipelinerl.observe.tracking.follow import follow
from pipelinerl.observe.tracking.names import Point
from tests.processes import wait_until

Line = dict[str, Any]


class Memory:
    """A destination that keeps what it is told, and breaks when asked to."""

    def __init__(self, *, breaks_at: int | None = None) -> None:
        self.points: list[Point] = []
        self.tables: list[list[ShownSample]] = []
        self.breaks_at = breaks_at
        self.num_opened = 0
        self.first_line = 0
        self.ends: list[bool] = []

    def open(self, run: Line) -> Memory:
        self.num_opened += 1
        self.first_line = self.points[-1].line + 1 if self.points else 0
        return self

    def take(self, point: Point) -> None:
        if self.breaks_at == point.line:
            self.breaks_at = None
            raise ConnectionError("the tracker is down")
        self.points.append(point)

    def take_samples(self, line: int, samples: list[ShownSample]) -> None:
        self.tables.append(samples)

    def close(self, *, has_ended: bool) -> None:
        self.ends.append(has_ended)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal(tmp_path, "orchestrator")) as journal:
        journal.write("run", config={})
        yield journal


def write_steps(journal: Journal, first: int, last: int) -> None:
    for number in range(first, last + 1):
        journal.write("step", step=number, reward_mean=number / 10)


def at_once() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def steps_of(memory: Memory) -> list[float]:
    return [point.at for point in memory.points]


def test_what_a_journal_holds_is_told_once_and_the_end_is_passed_on(journal: Journal, tmp_path: Path) -> None:
    memory = Memory()
    write_steps(journal, 0, 4)
    assert follow(tmp_path, memory.open, until=at_once())
    assert memory.ends == [False]
    journal.write("end", reason="finished")
    assert follow(tmp_path, memory.open, until=at_once())
    assert steps_of(memory) == [0, 1, 2, 3, 4]
    assert memory.ends == [False, True]


def test_a_tracker_that_breaks_is_opened_again_and_goes_on_where_it_was(
    journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "FIRST_RETRY_S", 0.01)
    monkeypatch.setattr(following, "LOOK_EVERY_S", 0.01)
    memory, until = Memory(breaks_at=3), threading.Event()
    write_steps(journal, 0, 4)
    with following_in_thread(tmp_path, memory, until):
        write_steps(journal, 5, 7)
        wait_until(lambda: bool(memory.points) and memory.points[-1].at == 7, what="the last step")
    assert steps_of(memory) == list(range(8))
    assert memory.num_opened == 2


def test_a_tracker_that_never_opens_is_given_up_when_the_run_is_over(journal: Journal, tmp_path: Path) -> None:
    def broken(_: Line) -> Memory:
        raise ConnectionError("nobody answers")

    assert not follow(tmp_path, broken, until=at_once())


def test_a_half_written_line_waits_until_it_is_whole(journal: Journal, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(following, "LOOK_EVERY_S", 0.01)
    memory, until = Memory(), threading.Event()
    whole = json.dumps({"t": 5.0, "kind": "step", "step": 2}) + "\n"
    with open(tmp_path / "journal" / "orchestrator.jsonl", "a") as file, following_in_thread(tmp_path, memory, until):
        write_steps(journal, 0, 1)
        file.write(whole[:20])
        file.flush()
        wait_until(lambda: len(memory.points) == 2, what="two steps")
        file.write(whole[20:])
        file.flush()
    assert steps_of(memory) == [0, 1, 2]


@contextlib.contextmanager
def following_in_thread(folder: Path, memory: Memory, until: threading.Event) -> Iterator[None]:
    thread = threading.Thread(target=follow, args=(folder, memory.open), kwargs={"until": until})
    thread.start()
    try:
        yield
    finally:
        until.set()
        thread.join()


def test_samples_of_a_step_stand_in_one_table(journal: Journal, tmp_path: Path) -> None:
    memory = Memory()
    for step in (0, 1):
        write_steps(journal, step, step)
        for reward in (1.0, 0.0):
            journal.write(
                "sample", step=step, rollout_id="1/0", prompt="2+2=", token_ids=[7, 8, 9], versions=[[3, 1], [4, 2]], reward=reward
            )
    follow(tmp_path, memory.open, until=at_once())
    assert [[(sample.step, sample.reward) for sample in table] for table in memory.tables] == [[(0, 1.0), (0, 0.0)], [(1, 1.0), (1, 0.0)]]
    assert memory.tables[0][0].versions == "v3 × 1, v4 × 2"
    assert memory.tables[0][0].completion == "7 8 9 ", "without a tokenizer the ids stand for themselves"


def test_what_failed_is_no_row_of_the_table_of_trained_samples(journal: Journal, tmp_path: Path) -> None:
    memory = Memory()
    for status in ("trained", "failed"):
        journal.write("sample", step=0, status=status, prompt="2+2=", token_ids=[7], versions=[[3, 1]])
    write_steps(journal, 0, 0)
    follow(tmp_path, memory.open, until=at_once())
    assert [[sample.status for sample in table] for table in memory.tables] == [["trained"]]
