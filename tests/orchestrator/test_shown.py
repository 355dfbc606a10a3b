"""Samples in the journal: which, how often, and what of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from orchestrator.shown import EVERY_S, MAX_TOKENS, Shown, worth_showing
from pipelinerl.messages import Sample, TraceScores
from pipelinerl.metrics import Journal, read_journals
from tests.orchestrator import handmade


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal(tmp_path, "orchestrator")) as journal:
        yield journal


def sample(reward: float, versions: tuple[int, ...], *, sibling: int = 0) -> Sample:
    trajectory = handmade.trajectory(versions, sibling=sibling, num_prompt=2)
    advantages = np.where(trajectory.trains, np.float32(reward - 0.5), np.float32(0.0))
    return Sample(trajectory=trajectory, reward=reward, advantages=advantages)


def test_the_best_the_worst_and_the_longest_are_shown_each_once() -> None:
    samples = [sample(reward, versions, sibling=n) for n, (reward, versions) in enumerate([(0.5, (1,)), (1.0, (1, 1)), (0.0, (1, 1, 1))])]
    assert [shown.reward for shown in worth_showing(samples)] == [1.0, 0.0]
    assert worth_showing([samples[0]]) == [samples[0]]


def test_a_sample_is_told_with_its_tokens_and_the_versions_along_it(tmp_path: Path, journal: Journal) -> None:
    Shown(journal).trained(4, [sample(1.0, (3, 3, 4))], now_s=0.0)
    (line,) = read_journals(tmp_path)
    assert line["kind"] == "sample"
    assert (line["step"], line["token_ids"], line["versions"]) == (4, [10, 11, 12], [[3, 2], [4, 1]])
    assert (line["reward"], line["advantage"], line["num_tokens"]) == (1.0, 0.5, 3)


def test_step_scores_stand_beside_the_tokens_they_end_at(tmp_path: Path, journal: Journal) -> None:
    one = sample(1.0, (3, 3, 4))
    trace = TraceScores(ends=np.array([1, 2], np.int32), scores=np.array([0.5, 0.25], np.float32), version="prm")
    Shown(journal).trained(4, [one], now_s=0.0, traces={one.trajectory.rollout_id: trace})
    assert [line["steps"] for line in read_journals(tmp_path)] == [[[1, 0.5], [2, 0.25]]]


def test_steps_in_quick_succession_are_not_all_shown(tmp_path: Path, journal: Journal) -> None:
    shown = Shown(journal)
    for step, now_s in enumerate((0.0, EVERY_S - 0.1, EVERY_S)):
        shown.trained(step, [sample(1.0, (0,))], now_s=now_s)
    assert [line["step"] for line in read_journals(tmp_path)] == [0, 2]


def test_a_long_sample_is_cut_and_its_true_length_told(tmp_path: Path, journal: Journal) -> None:
    Shown(journal).trained(0, [sample(1.0, (0,) * (MAX_TOKENS + 5))], now_s=0.0)
    (line,) = read_journals(tmp_path)
    assert len(line["token_ids"]) == MAX_TOKENS
    assert line["num_tokens"] == MAX_TOKENS + 5
