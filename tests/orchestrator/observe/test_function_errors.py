"""What peers tell of failed functions, in the journal: at once, by cause, and not a line for each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.observe.function_errors import AGAIN_AFTER_S, MAX_CAUSES, FunctionErrors
from pipelinerl.messages import FunctionFailed, FunctionKind, Outcome
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.lines import read_journal


def failed(cause: str = 'ValueError("broke")', *, num_new: int = 1, traceback: str = "") -> FunctionFailed:
    return FunctionFailed(
        function="verify",
        kind=FunctionKind.REWARD,
        outcome=Outcome.ERROR,
        cause=cause,
        where="rewards.py:12",
        traceback=traceback,
        rollout_id="4/1",
        num_new=num_new,
        num_calls=9,
    )


class Journaled:
    def __init__(self, folder: Path) -> None:
        self.now = 1000.0
        self._folder = folder
        self.journal = Journal(folder, "orchestrator", clock=lambda: self.now)
        self.errors = FunctionErrors(self.journal)

    def lines(self) -> list[dict[str, Any]]:
        return list(read_journal(self._folder / "journal" / "orchestrator.jsonl"))


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Journaled]:
    run = Journaled(tmp_path)
    yield run
    run.journal.close()


def test_first_failure_is_one_whole_line_and_is_printed(run: Journaled, capsys: pytest.CaptureFixture[str]) -> None:
    run.errors.take(failed(traceback="Traceback: line 12"))
    (line,) = run.lines()
    assert line == {
        "t": 1000.0,
        "kind": "function_error",
        "process": "orchestrator",
        "function": "verify",
        "function_kind": "reward",
        "outcome": "error",
        "cause": 'ValueError("broke")',
        "where": "rewards.py:12",
        "traceback": "Traceback: line 12",
        "rollout_id": "4/1",
        "count": 1,
        "num_calls": 9,
    }
    expected = 'verify (reward) failed on rollout 4/1: error: ValueError("broke") at rewards.py:12\nTraceback: line 12\n'
    assert capsys.readouterr().err == expected


def test_further_failures_are_counted_in_a_line_now_and_then_and_whole_at_the_end(run: Journaled) -> None:
    run.errors.take(failed(traceback="Traceback"))
    for _ in range(1000):
        run.now += AGAIN_AFTER_S / 500
        run.errors.take(failed(num_new=1000))
    run.errors.finish()
    run.errors.finish()
    lines = run.lines()
    assert len(lines) <= 5
    assert [bool(line["traceback"]) for line in lines] == [True] + [False] * (len(lines) - 1)
    assert lines[-1]["count"] == 1_000_001


def test_words_name_the_commonest_causes(run: Journaled) -> None:
    assert run.errors.words() == ""
    for number, cause in enumerate("abcde"):
        run.errors.take(failed(cause, num_new=number + 1))
    assert run.errors.words().splitlines() == [
        "verify failed at least 5 times: e at rewards.py:12",
        "verify failed at least 4 times: d at rewards.py:12",
        "verify failed at least 3 times: c at rewards.py:12",
        "and by 2 other causes",
    ]


def test_a_peer_that_makes_causes_up_fills_neither_memory_nor_journal(run: Journaled) -> None:
    for number in range(3 * MAX_CAUSES):
        run.errors.take(failed(str(number)))
    assert len(run.lines()) == MAX_CAUSES
