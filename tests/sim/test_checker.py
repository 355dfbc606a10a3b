"""The checker can fail: a clean run's records, doctored in one place each, are found out by the sentence about that place."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest

from pipelinerl.messages import MicroBatch, Nodes
from tests.sim import checker, peers
from tests.sim.run import Simulated, config, run

Rows = list[list[Any]]
COLUMNS = (
    "rollout_id",
    "group_id",
    "prompt_id",
    "fate",
    "reason",
    "step",
    "reward",
    "oldest_version",
    "newest_version",
    "num_tokens",
    "admitted_s",
    "ended_s",
)


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Simulated:
    """Three steps, with some failures."""
    simulated = run(config(trainer={"steps": 3}), folder=tmp_path_factory.mktemp("clean"), world=peers.World(bad_score_fraction=0.1))
    assert simulated.problems() == []
    return simulated


def at(column: str) -> int:
    return COLUMNS.index(column)


def first(rows: Rows, fate: str) -> list[Any]:
    return next(row for row in rows if row[at("fate")] == fate)


def judged(rows: Rows, record: peers.TrainerRecord) -> list[str]:
    return checker.check([tuple(row) for row in rows], record, groups_per_step=8, num_steps=3, max_staleness=2, max_tokens=256)


def ends_twice(rows: Rows, record: peers.TrainerRecord) -> None:
    rows.append(list(rows[0]))


def has_an_unknown_fate(rows: Rows, record: peers.TrainerRecord) -> None:
    first(rows, "failed")[at("fate")] = "lost"


def fails_without_a_reason(rows: Rows, record: peers.TrainerRecord) -> None:
    first(rows, "failed")[at("reason")] = ""


def is_trained_with_a_reason(rows: Rows, record: peers.TrainerRecord) -> None:
    first(rows, "trained")[at("reason")] = "timeout"


def is_trained_without_a_reward(rows: Rows, record: peers.TrainerRecord) -> None:
    first(rows, "trained")[at("reward")] = None


def has_falling_versions(rows: Rows, record: peers.TrainerRecord) -> None:
    first(rows, "trained")[at("newest_version")] = -1


def ends_before_it_begins(rows: Rows, record: peers.TrainerRecord) -> None:
    rows[0][at("ended_s")] = -1.0


def is_booked_in_another_step(rows: Rows, record: peers.TrainerRecord) -> None:
    first(rows, "trained")[at("step")] += 1


def is_booked_as_younger(rows: Rows, record: peers.TrainerRecord) -> None:
    row = first(rows, "trained")
    row[at("oldest_version")] += 1
    row[at("newest_version")] += 1


def is_booked_as_trained_but_was_not(rows: Rows, record: peers.TrainerRecord) -> None:
    row = first(rows, "failed")
    row[3:10] = ["trained", "", 0, 1.0, 0, 0, 5]


def is_trained_but_not_booked(rows: Rows, record: peers.TrainerRecord) -> None:
    rows.remove(first(rows, "trained"))


def is_trained_but_booked_as_failed(rows: Rows, record: peers.TrainerRecord) -> None:
    row = first(rows, "trained")
    row[at("fate")], row[at("reason")] = "failed", "timeout"


def has_a_turn_in_two_rows(rows: Rows, record: peers.TrainerRecord) -> None:
    record.num_tokens[first(rows, "trained")[0]] += 3


def is_trained_twice(rows: Rows, record: peers.TrainerRecord) -> None:
    record.repeated.append("0/0")


def has_a_wrong_stamp(rows: Rows, record: peers.TrainerRecord) -> None:
    record.mislabelled.append("0/0")


def is_too_old(rows: Rows, record: peers.TrainerRecord) -> None:
    rollout = next(rollout for rollout, step in record.trained.items() if step == 2)
    record.oldest[rollout] = -1
    next(row for row in rows if row[0] == rollout)[at("oldest_version")] = -1


def comes_from_the_future(rows: Rows, record: peers.TrainerRecord) -> None:
    record.oldest[next(iter(record.trained))] = 3


def is_torn_from_its_group(rows: Rows, record: peers.TrainerRecord) -> None:
    rollout = next(rollout for rollout, step in record.trained.items() if step == 0)
    record.trained[rollout] = 1


def leaves_a_step_short(rows: Rows, record: peers.TrainerRecord) -> None:
    group = next(rollout for rollout, step in record.trained.items() if step == 1).split("/")[0]
    for rollout in [rollout for rollout in record.trained if rollout.split("/")[0] == group]:
        del record.trained[rollout]


def is_not_sealed(rows: Rows, record: peers.TrainerRecord) -> None:
    del record.sealed[1]


def is_sealed_with_other_tokens(rows: Rows, record: peers.TrainerRecord) -> None:
    record.tokens[1] -= 1


def is_sealed_with_other_samples(rows: Rows, record: peers.TrainerRecord) -> None:
    record.samples[1] += 1


def is_sealed_with_other_micro_batches(rows: Rows, record: peers.TrainerRecord) -> None:
    record.micro_batches[2] -= 1


def fills_a_row_too_far(rows: Rows, record: peers.TrainerRecord) -> None:
    record.longest_row = 257


DOCTORED: dict[Callable[[Rows, peers.TrainerRecord], None], str] = {
    ends_twice: "ended 2 times",
    has_an_unknown_fate: "ended as lost",
    fails_without_a_reason: "ended as failed for the reason ''",
    is_trained_with_a_reason: "ended as trained for the reason 'timeout'",
    is_trained_without_a_reward: "was trained without its facts",
    has_falling_versions: "was trained without its facts",
    ends_before_it_begins: "ended at -1.0 s, before it was admitted",
    is_booked_in_another_step: "the ledger says",
    is_booked_as_younger: "the ledger says",
    is_booked_as_trained_but_was_not: "the trainer saw None",
    is_trained_but_not_booked: "the ledger says (step, oldest version, tokens) None",
    is_trained_but_booked_as_failed: "the ledger says (step, oldest version, tokens) None",
    has_a_turn_in_two_rows: "the ledger says",
    is_trained_twice: "0/0 trained twice",
    has_a_wrong_stamp: "0/0 carries versions that did not sample its tokens",
    is_too_old: "trained at step 2 with a token of version -1",
    comes_from_the_future: "with a token of the future version 3",
    is_torn_from_its_group: "trained in steps [0, 1]",
    leaves_a_step_short: "step 1 trained 7 groups, not 8",
    is_not_sealed: "steps [0, 2] were sealed, not 0 to 2",
    is_sealed_with_other_tokens: "step 1 sealed with",
    is_sealed_with_other_samples: "samples, trained",
    is_sealed_with_other_micro_batches: "micro-batches, trained",
    fills_a_row_too_far: "a row had 257 tokens, at most 256",
}


@pytest.mark.parametrize("doctor", DOCTORED, ids=lambda doctor: doctor.__name__)
def test_a_rollout_or_step_that(clean: Simulated, doctor: Callable[[Rows, peers.TrainerRecord], None]):
    rows, record = [list(row) for row in clean.rows], copy.deepcopy(clean.record)
    assert judged(rows, record) == []
    doctor(rows, record)
    found = judged(rows, record)
    assert any(DOCTORED[doctor] in sentence for sentence in found), found


@pytest.mark.parametrize(
    ("name", "by", "sentence"),
    [
        ("admitted", 1, "admitted is not the sum of the fates"),
        ("trained", -1, "trained counted"),
        ("failed", 1, "failed counted"),
        ("in_flight", 1, "1 in flight after the end"),
    ],
)
def test_counts_that_are_off_by_one_are_found(clean: Simulated, name: str, by: int, sentence: str):
    counts = dataclasses.asdict(clean.ending.rollouts)
    assert checker.check_counts(clean.rows, counts) == []
    counts[name] += by
    assert any(sentence in found for found in checker.check_counts(clean.rows, counts))


def micro_batch(versions: list[int]) -> MicroBatch:
    """One rollout of three tokens that versions 4, 4 and 5 sampled, whatever its stamps say."""
    prompt = np.array([7, 8], np.int32)
    sampled = [peers.token(prompt, position=position, version=version) for position, version in enumerate((4, 4, 5), start=1)]
    return MicroBatch(
        step=5,
        index=0,
        token_ids=np.array([7, 8, *sampled], np.int32),
        loss_mask=np.array([False, False, True, True, True]),
        logprobs=np.zeros(5, np.float32),
        versions=np.array([-1, -1, *versions], np.int32),
        advantages=np.zeros(5, np.float32),
        lengths=np.array([5], np.int32),
        rollout_ids=("0/0",),
        engine_ids=np.array([0], np.int32),
    )


@pytest.mark.parametrize(("versions", "is_right"), [([4, 4, 5], True), ([4, 5, 5], False), ([4, 4, 4], False), ([5, 5, 5], False)])
def test_the_simulated_trainer_tells_a_wrong_stamp_by_the_token(versions: list[int], is_right: bool):
    record = peers.TrainerRecord()
    peers.note(micro_batch(versions), record)
    assert (record.mislabelled == []) == is_right


def test_the_simulated_trainer_notices_a_rollout_that_comes_twice():
    record = peers.TrainerRecord()
    for _ in range(2):
        peers.note(micro_batch([4, 4, 5]), record)
    assert record.repeated == ["0/0"]


def branching(*, parents: list[int], versions: list[int]) -> MicroBatch:
    """Nodes 7 8 (given), a turn under version 4, 9 (given after it), a turn under 5 after that, and one under 4 beside the first turn."""
    prompt, between = [7, 8], 9
    first = peers.token(np.array(prompt), position=1, version=4)
    second = peers.token(np.array([*prompt, first, between]), position=1, version=5)
    token_ids = np.array([*prompt, first, between, second, first], np.int32)
    loss_mask = np.array([False, False, True, False, True, True])
    return msgspec.structs.replace(
        micro_batch([4, 4, 5]),
        token_ids=token_ids,
        loss_mask=loss_mask,
        logprobs=np.zeros(6, np.float32),
        versions=np.array([-1, -1, versions[0], -1, *versions[1:]], np.int32),
        advantages=np.zeros(6, np.float32),
        lengths=np.array([6], np.int32),
        nodes=Nodes(parents=np.array(parents, np.int32), lengths=np.array([2, 1, 1, 1, 1], np.int32)),
    )


@pytest.mark.parametrize(
    ("parents", "versions", "is_right"),
    [
        ([-1, 0, 1, 2, 0], [4, 5, 4], True),
        ([-1, 0, 1, 2, 1], [4, 5, 4], False),
        ([-1, 0, 1, 0, 0], [4, 5, 4], False),
        ([-1, 0, 1, 2, 0], [4, 5, 5], False),
        ([-1, 0, 1, 2, 0], [6, 5, 4], False),
    ],
)
def test_the_simulated_trainer_tells_a_wrong_branch_by_the_token(parents: list[int], versions: list[int], is_right: bool):
    record = peers.TrainerRecord()
    peers.note(branching(parents=parents, versions=versions), record)
    assert (record.mislabelled == []) == is_right
    assert (record.branching, record.num_tokens, record.turns) == (["0/0"], {"0/0": 3}, {"0/0": 3})
