"""A script's accounts, worked by hand: two groups of two, K = 1."""

from __future__ import annotations

import numpy as np
import pytest

from orchestrator.rules.script import ScriptBook
from orchestrator.rules.script_cut import ScriptCut
from orchestrator.rules.script_decisions import LEFT_OUT
from pipelinerl.errors import ScriptError, TrainedTwice
from pipelinerl.messages import Outcome, Sample, ScoredTrajectory, TerminalStatus
from tests.orchestrator import handmade


def row(of: ScoredTrajectory) -> Sample:
    assert of.score.reward is not None
    return Sample(trajectory=of.trajectory, reward=of.score.reward, advantages=np.ones(of.trajectory.num_tokens, np.float32))


def book_of(*versions: int, first_step: int = 0) -> tuple[ScriptBook, list[list[ScoredTrajectory]]]:
    """A book with a group of two for each of these versions, read and scored."""
    book = ScriptBook(num_steps=9, max_staleness=1, first_step=first_step)
    groups: list[list[ScoredTrajectory]] = []
    for group_id, version in enumerate(versions):
        book.admitted(group_id, num_siblings=2)
        members = [handmade.trajectory((version,) * 3, group_id=group_id, sibling=sibling) for sibling in range(2)]
        for one in members:
            book.read(one)
            book.begin_scoring(one)
        groups.append([handmade.scored(one, reward=float(one.sibling)) for one in members])
        for one in groups[-1]:
            book.scored(one)
    return book, groups


def test_a_group_ends_with_the_step_that_trains_one_of_it_and_the_other_is_left_out() -> None:
    book, ((first, second), _) = book_of(0, 0)
    (decision,), given = book.train([row(second)])
    assert [sample.trajectory for sample in decision.samples] == [second.trajectory]
    assert [(one.scored, one.status, one.reason) for one in decision.ended] == [(first, TerminalStatus.FILTERED, LEFT_OUT)]
    assert (book.step, given) == (1, [])
    with pytest.raises(TrainedTwice, match="its group ended with step 0"):
        book.train([row(first)])


def test_one_version_behind_trains_two_are_stale_and_a_group_that_nobody_offers_is_forgotten_alike() -> None:
    book, groups = book_of(0, 0, 1, first_step=2)
    decisions, _ = book.train([row(groups[0][0]), row(groups[2][0])])
    ends = {decision.group.group_id: {one.status for one in decision.ended} for decision in decisions}
    assert ends == {0: {TerminalStatus.STALE}, 1: {TerminalStatus.STALE}, 2: {TerminalStatus.FILTERED}}
    assert [len(decision.samples) for decision in decisions] == [0, 0, 1]


def test_rows_of_which_none_is_young_enough_change_nothing() -> None:
    book, groups = book_of(0, first_step=2)
    with pytest.raises(ScriptError, match=r"more than pipeline.max_staleness = 1 versions older than step 2"):
        book.train([row(groups[0][0])])
    assert book.step == 2
    assert book.siblings(groups[0]) == [tuple(groups[0])], "it is open still"


def test_a_sibling_that_failed_ends_by_its_own_cause_and_one_that_was_never_scored_as_left_out() -> None:
    book = ScriptBook(num_steps=9, max_staleness=1)
    book.admitted(0, num_siblings=3)
    members = [handmade.trajectory(sibling=sibling) for sibling in range(3)]
    for one in members:
        book.read(one)
    book.scored(handmade.scored(members[0], outcome=Outcome.TIMEOUT))
    good = handmade.scored(members[1])
    book.scored(good)
    (decision,), _ = book.train([row(good)])
    assert [(one.status, one.reason) for one in decision.ended] == [
        (TerminalStatus.FAILED, "timeout"),
        (TerminalStatus.FILTERED, LEFT_OUT),
    ]


def test_a_cut_that_goes_on_counts_what_was_assigned_before() -> None:
    book, ((first, second), (third, fourth)) = book_of(3, 3, first_step=3)
    cut = ScriptCut(first_step=3)
    cut.restore([row(first), row(second)], num_groups=1, groups=())
    (decision,), _ = book.train([row(third)])
    assert [one.scored for one in decision.ended] == [fourth]
    cut.decide(decision)
    verdict = cut.take(decision.group)
    assert (verdict.step, verdict.is_assigned, verdict.closes_step) == (3, True, False)
    assert cut.close() == (9, 3)
    assert cut.step == 4
