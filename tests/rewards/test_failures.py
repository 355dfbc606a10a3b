"""The first failure of each cause is told at once and whole; a million more cost a few lines."""

from __future__ import annotations

import pytest

from pipelinerl.messages import FunctionFailed, FunctionKind, Outcome
from pipelinerl.rewards.failures import AGAIN_AFTER_S, AGAIN_AT, MAX_CAUSES, Failures
from pipelinerl.runtime.function_errors import FunctionError


class Told:
    """A `Failures` on a clock of the test's."""

    def __init__(self) -> None:
        self.now = 0.0
        self.said: list[str] = []
        self.failures = Failures(say=self.said.append, clock=lambda: self.now)

    def fail(self, cause: str = 'ValueError("broke")', *, where: str = "rewards.py:3", outcome: Outcome = Outcome.ERROR) -> None:
        error = FunctionError(cause=cause, where=where, traceback="Traceback: ...")
        self.failures.note("verify", error, kind=FunctionKind.REWARD, outcome=outcome, rollout_id="4/1")

    def news(self, num_calls: int = 0) -> list[FunctionFailed]:
        return self.failures.news(num_calls={"verify": num_calls})


def test_first_failure_of_a_cause_is_told_at_once_whole_and_said_in_the_log() -> None:
    told = Told()
    told.fail()
    (first,) = told.news(num_calls=3)
    assert (first.function, first.kind, first.outcome, first.rollout_id) == ("verify", FunctionKind.REWARD, Outcome.ERROR, "4/1")
    assert (first.cause, first.where, first.traceback) == ('ValueError("broke")', "rewards.py:3", "Traceback: ...")
    assert (first.num_new, first.num_calls) == (1, 3)
    assert told.said == ['verify (reward) failed on rollout 4/1: error: ValueError("broke") at rewards.py:3\nTraceback: ...']
    assert told.news() == []


@pytest.mark.slow
def test_a_million_failures_of_one_cause_are_one_traceback_and_an_account_a_second() -> None:
    told, accounts = Told(), []
    for number in range(1_000_000):
        told.now = number / 100_000  # ten seconds of it
        told.fail()
        if number % 100 == 0:
            accounts += told.news()
    told.now += AGAIN_AFTER_S
    accounts += told.news()
    assert len(told.said) == 1
    assert len(accounts) <= 10 / AGAIN_AFTER_S + 20, "twice as many are told sooner"
    assert sum(bool(account.traceback) for account in accounts) == 1
    assert sum(account.num_new for account in accounts) == 1_000_000


def test_a_run_in_which_nothing_else_comes_is_told_after_the_first_few() -> None:
    told = Told()
    accounts = []
    for _ in range(AGAIN_AT):
        told.fail()
        accounts += told.news(num_calls=AGAIN_AT)
    assert [account.num_new for account in accounts] == [1, AGAIN_AT - 1]


def test_causes_are_told_apart_by_outcome_line_and_words_but_not_by_what_varies() -> None:
    told = Told()
    for number in range(3):
        told.fail(f"KeyError(\"row {number} has no 'x{number}'\")")
    told.fail('KeyError("no row")')
    told.fail(where="rewards.py:9")
    told.fail(outcome=Outcome.TIMEOUT)
    assert [account.num_new for account in told.news()] == [3, 1, 1, 1]


def test_causes_without_end_are_counted_together() -> None:
    told = Told()
    for number in range(10 * MAX_CAUSES):
        told.fail("".join(chr(97 + int(digit)) for digit in str(number)))
    accounts = told.news()
    assert len(accounts) == MAX_CAUSES + 1
    assert sum(account.num_new for account in accounts) == 10 * MAX_CAUSES
    assert len(told.said) == MAX_CAUSES


def test_another_orchestrator_is_told_whole_again() -> None:
    told = Told()
    told.fail()
    told.news()
    told.failures.report_again()
    (again,) = told.news()
    assert again.traceback
