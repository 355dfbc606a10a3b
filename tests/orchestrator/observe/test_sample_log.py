"""Samples in the journal: which, how often, and what of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from orchestrator.observe.sample_log import EVERY_S, MAX_COLUMN_CHARACTERS, MAX_COLUMNS, MAX_REASONS, MAX_TOKENS, SampleLog, worth_showing
from orchestrator.rules.batch import Ended
from pipelinerl.messages import Outcome, Sample, TerminalStatus, TraceScores
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.lines import read_journals
from tests.orchestrator import handmade


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal(tmp_path, "orchestrator")) as journal:
        yield journal


def sample(reward: float, versions: tuple[int, ...], *, sibling: int = 0) -> Sample:
    trajectory = handmade.trajectory(versions, sibling=sibling, num_prompt=2)
    advantages = np.where(trajectory.loss_mask, np.float32(reward - 0.5), np.float32(0.0))
    return Sample(trajectory=trajectory, reward=reward, advantages=advantages)


def test_the_best_the_worst_and_the_longest_are_shown_each_once() -> None:
    samples = [sample(reward, versions, sibling=n) for n, (reward, versions) in enumerate([(0.5, (1,)), (1.0, (1, 1)), (0.0, (1, 1, 1))])]
    assert [shown.reward for shown in worth_showing(samples)] == [1.0, 0.0]
    assert worth_showing([samples[0]]) == [samples[0]]


def test_a_sample_is_told_with_its_tokens_and_the_versions_along_it(tmp_path: Path, journal: Journal) -> None:
    SampleLog(journal).trained(4, [sample(1.0, (3, 3, 4))], now_s=0.0)
    (line,) = read_journals(tmp_path)
    assert line["kind"] == "sample"
    assert (line["step"], line["token_ids"], line["versions"]) == (4, [10, 11, 12], [[3, 2], [4, 1]])
    assert (line["reward"], line["advantage"], line["num_tokens"]) == (1.0, 0.5, 3)


def test_step_scores_stand_beside_the_tokens_they_end_at(tmp_path: Path, journal: Journal) -> None:
    one = sample(1.0, (3, 3, 4))
    trace = TraceScores(ends=np.array([1, 2], np.int32), scores=np.array([0.5, 0.25], np.float32), version="prm")
    member = msgspec.structs.replace(handmade.scored(one.trajectory), steps=trace)
    SampleLog(journal).trained(4, [one], now_s=0.0, members={one.trajectory.rollout_id: member})
    assert [line["step_scores"] for line in read_journals(tmp_path)] == [[[1, 0.5], [2, 0.25]]]


def test_steps_in_quick_succession_are_not_all_sample_log(tmp_path: Path, journal: Journal) -> None:
    shown = SampleLog(journal)
    for step, now_s in enumerate((0.0, EVERY_S - 0.1, EVERY_S)):
        shown.trained(step, [sample(1.0, (0,))], now_s=now_s)
    assert [line["step"] for line in read_journals(tmp_path)] == [0, 2]


def test_a_long_sample_is_cut_and_its_true_length_told(tmp_path: Path, journal: Journal) -> None:
    SampleLog(journal).trained(0, [sample(1.0, (0,) * (MAX_TOKENS + 5))], now_s=0.0)
    (line,) = read_journals(tmp_path)
    assert len(line["token_ids"]) == MAX_TOKENS
    assert line["num_tokens"] == MAX_TOKENS + 5


def test_a_sample_is_told_with_its_answer_and_what_each_reward_said(tmp_path: Path, journal: Journal) -> None:
    handmade.show(SampleLog(journal))
    failed, trained = read_journals(tmp_path)
    assert (trained["status"], trained["columns"], trained["components"]) == ("trained", {"answer": "<b>41"}, {"right": 1.0})
    assert (trained["reward"], trained["advantage"]) == (1.0, 0.5)
    assert (failed["status"], failed["reason"], failed["error"]) == ("failed", "timeout", "slow.py took 3 s")
    assert (failed["step"], failed["reward"], failed["columns"]) == (3, None, {"answer": "<b>41"})


def test_of_what_ended_otherwise_one_of_each_reason_is_shown_and_not_too_often(tmp_path: Path, journal: Journal) -> None:
    shown = SampleLog(journal)
    failed = handmade.scored(handmade.trajectory(), outcome=Outcome.ERROR)
    for now_s in (0.0, EVERY_S - 0.1, EVERY_S):
        shown.ended(
            [Ended(scored=failed, status=TerminalStatus.FAILED, reason=reason) for reason in ("error", "timeout", "error")],
            step=1,
            now_s=now_s,
        )
    assert [line["reason"] for line in read_journals(tmp_path)] == ["error", "timeout"] * 2


def test_reasons_without_number_do_not_fill_the_journal(tmp_path: Path, journal: Journal) -> None:
    failed = handmade.scored(handmade.trajectory(), outcome=Outcome.ERROR)
    SampleLog(journal).ended(
        [Ended(scored=failed, status=TerminalStatus.FAILED, reason=f"error {number}") for number in range(99)], step=1, now_s=0.0
    )
    assert len(list(read_journals(tmp_path))) == MAX_REASONS


def test_a_row_of_many_long_columns_is_cut(tmp_path: Path, journal: Journal) -> None:
    one = sample(1.0, (0,))
    columns = {"tests": list(range(10_000)), **{f"column {number}": "x" for number in range(99)}}
    asked = msgspec.structs.replace(one.trajectory.prompt, columns=columns)
    one = msgspec.structs.replace(one, trajectory=msgspec.structs.replace(one.trajectory, prompt=asked))
    SampleLog(journal).trained(0, [one], now_s=0.0)
    (line,) = read_journals(tmp_path)
    assert len(line["columns"]) == MAX_COLUMNS
    assert len(line["columns"]["tests"]) == MAX_COLUMN_CHARACTERS + 2
    assert line["columns"]["tests"].startswith("[0, 1, 2")
