"""The batch: who trains, who ends how, and when a step is whole; on groups made by hand."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from orchestrator.rules.batch import BatchCut, Filtered, GroupAdvantages, Siblings, StepRules, Verdict
from pipelinerl.messages import Outcome, TerminalStatus
from tests.orchestrator import handmade


def cut(
    *,
    groups_per_step: int = 2,
    max_staleness: int = 2,
    min_group_size: int = 2,
    group_advantages: GroupAdvantages = handmade.centred,
    first_step: int = 0,
    **rules: Any,
):
    return BatchCut(
        groups_per_step=groups_per_step,
        max_staleness=max_staleness,
        min_group_size=min_group_size,
        group_advantages=group_advantages,
        rules=StepRules(**rules),
        first_step=first_step,
    )


def set_aside(siblings: Siblings) -> Filtered:
    """A method that wants no group."""
    return Filtered(reason="zero_variance", advantages=handmade.centred(siblings))


def endings(verdict: Verdict) -> dict[str, tuple[TerminalStatus, str]]:
    return {ended.scored.trajectory.rollout_id: (ended.status, ended.reason) for ended in verdict.ended}


def trained(verdict: Verdict) -> list[str]:
    return [sample.trajectory.rollout_id for sample in verdict.samples]


def test_a_group_is_placed_with_the_advantages_of_its_siblings():
    verdict = cut().take(handmade.plain_group(7, [1.0, 0.0, 0.0, 0.0]))
    assert verdict.is_assigned
    assert verdict.step == 0
    assert trained(verdict) == ["7/0", "7/1", "7/2", "7/3"]
    assert [sample.reward for sample in verdict.samples] == [1.0, 0.0, 0.0, 0.0]
    assert verdict.samples[0].advantages.tolist() == [0.0, 0.0, 0.75, 0.75, 0.75]
    assert verdict.samples[3].advantages.tolist() == [0.0, 0.0, -0.25, -0.25, -0.25]
    assert verdict.ended == ()


def test_survivors_train_and_failed_siblings_fail_by_their_outcome():
    verdict = cut().take(handmade.plain_group(7, [1.0, Outcome.TIMEOUT, 0.0, Outcome.INVALID, Outcome.ERROR]))
    assert trained(verdict) == ["7/0", "7/2"]
    assert verdict.samples[0].advantages[-1] == 0.5, "a failed sibling is absent from the mean, not 0"
    assert endings(verdict) == {
        "7/1": (TerminalStatus.FAILED, "timeout"),
        "7/3": (TerminalStatus.FAILED, "invalid"),
        "7/4": (TerminalStatus.FAILED, "error"),
    }


def test_too_few_survivors_fail_with_their_group():
    verdict = cut(min_group_size=3).take(handmade.plain_group(7, [1.0, Outcome.TIMEOUT, 0.0, Outcome.TIMEOUT]))
    assert not verdict.is_assigned
    assert endings(verdict) == {
        "7/0": (TerminalStatus.FAILED, "fewer than 3 siblings scored"),
        "7/1": (TerminalStatus.FAILED, "timeout"),
        "7/2": (TerminalStatus.FAILED, "fewer than 3 siblings scored"),
        "7/3": (TerminalStatus.FAILED, "timeout"),
    }


@pytest.mark.parametrize("size", [1, 3])
def test_a_group_with_no_survivor_fails(size: int):
    verdict = cut(min_group_size=1).take(handmade.plain_group(7, [Outcome.ERROR] * size))
    assert not verdict.is_assigned
    assert [ending for ending, _ in endings(verdict).values()] == [TerminalStatus.FAILED] * size


def test_the_oldest_token_decides_about_staleness():
    """Step 3 with K = 2: one token of version 1 is in bounds, one of version 0 among later ones is not."""
    rule = cut(first_step=3)
    assert rule.take(handmade.plain_group(7, [1.0, 0.0], versions=(1, 2, 3))).is_assigned
    verdict = rule.take(handmade.plain_group(8, [1.0, 0.0], versions=(0, 3, 3)))
    assert not verdict.is_assigned
    assert endings(verdict) == {f"8/{n}": (TerminalStatus.STALE, "oldest token over 2 versions old") for n in range(2)}


def test_one_stale_sibling_makes_its_group_stale_but_a_failed_one_does_not():
    fresh = handmade.scored(handmade.trajectory((3, 3), group_id=7, sibling=0), 1.0)
    other = handmade.scored(handmade.trajectory((3, 3), group_id=7, sibling=1), 0.0)
    old = handmade.trajectory((0, 3), group_id=7, sibling=2)
    verdict = cut(first_step=3).take(handmade.group(7, [fresh, other, handmade.scored(old, 1.0)]))
    assert [fate for fate, _ in endings(verdict).values()] == [TerminalStatus.STALE] * 3
    verdict = cut(first_step=3).take(handmade.group(7, [fresh, other, handmade.scored(old, outcome=Outcome.TIMEOUT)]))
    assert trained(verdict) == ["7/0", "7/1"]
    assert endings(verdict) == {"7/2": (TerminalStatus.FAILED, "timeout")}


def test_a_group_the_method_sets_aside_is_filtered_for_the_methods_reason():
    verdict = cut(group_advantages=set_aside).take(handmade.plain_group(7, [1.0, 1.0, Outcome.TIMEOUT]))
    assert not verdict.is_assigned
    assert verdict.is_filtered
    assert endings(verdict) == {
        "7/0": (TerminalStatus.FILTERED, "zero_variance"),
        "7/1": (TerminalStatus.FILTERED, "zero_variance"),
        "7/2": (TerminalStatus.FAILED, "timeout"),
    }


def test_every_member_ends_in_exactly_one_place():
    for rewards in ([1.0, 0.0, Outcome.ERROR], [1.0, Outcome.ERROR, Outcome.TIMEOUT], [Outcome.ERROR] * 3, [0.0, 0.0, 0.0]):
        verdict = cut().take(handmade.plain_group(7, rewards))
        assert sorted([*trained(verdict), *endings(verdict)]) == ["7/0", "7/1", "7/2"]


def test_a_step_is_sealed_with_the_exact_counts_of_its_own_groups():
    """Lengths 3 + 3, then 1 + 5 + 2 sampled tokens; a group given up and a failed sibling count nothing."""
    rule = cut(groups_per_step=2)
    first = rule.take(handmade.plain_group(0, [1.0, 0.0]))
    assert not first.closes_step
    given_up = rule.take(handmade.plain_group(1, [Outcome.ERROR, 1.0]))
    assert not given_up.is_assigned
    assert not given_up.closes_step
    assert rule.num_groups == 1
    members = [
        handmade.scored(handmade.trajectory([0] * length, group_id=2, sibling=sibling), float(sibling))
        for sibling, length in enumerate((1, 5, 2))
    ]
    members.append(handmade.scored(handmade.trajectory([0] * 100, group_id=2, sibling=3), outcome=Outcome.TIMEOUT))
    second = rule.take(handmade.group(2, members))
    assert second.closes_step
    assert (second.step, second.num_tokens, second.num_samples) == (0, 6 + 8, 2 + 3)
    assert (rule.step, rule.num_groups) == (1, 0)


def test_the_next_step_counts_from_zero():
    rule = cut(groups_per_step=1)
    for step in range(3):
        verdict = rule.take(handmade.plain_group(step, [1.0, 0.0], versions=(step,)))
        assert verdict.closes_step
        assert (verdict.step, verdict.num_tokens, verdict.num_samples) == (step, 2, 2)


def test_an_empty_completion_has_no_age_and_trains_nothing():
    members = [
        handmade.scored(handmade.trajectory((), group_id=7, sibling=0), 0.0),
        handmade.scored(handmade.trajectory((5,), group_id=7, sibling=1), 1.0),
    ]
    verdict = cut(groups_per_step=1, first_step=5).take(handmade.group(7, members))
    assert verdict.is_assigned
    assert verdict.num_tokens == 1
    assert not np.any(verdict.samples[0].advantages)


# --- setting aside, with a budget ------------------------------------------------------------------------------------------------


def test_once_the_budget_of_a_step_is_spent_it_is_filled_with_what_comes() -> None:
    """Steps of two groups and a budget of two batches: four groups are set aside, the next two train; then the budget is whole again."""
    rule = cut(group_advantages=set_aside, refill_batches=2)
    verdicts = [rule.take(handmade.plain_group(number, [1.0, 0.0], versions=(0,))) for number in range(12)]
    assert [verdict.is_filtered for verdict in verdicts] == ([True] * 4 + [False] * 2) * 2
    assert [verdict.is_let_through for verdict in verdicts] == ([False] * 4 + [True] * 2) * 2
    assert [verdict.closes_step for verdict in verdicts] == ([False] * 5 + [True]) * 2
    assert trained(verdicts[4]) == ["4/0", "4/1"], "a group is let through whole"


def test_a_group_with_signal_trains_without_touching_the_budget() -> None:
    rule = cut(
        group_advantages=lambda siblings: set_aside(siblings) if siblings[0].score.reward else handmade.centred(siblings), refill_batches=1
    )
    placed = rule.take(handmade.plain_group(0, [0.0, 1.0]))
    assert (placed.is_assigned, placed.is_let_through) == (True, False)
    assert [rule.take(handmade.plain_group(number, [1.0, 1.0])).is_filtered for number in range(1, 4)] == [True, True, False]


# --- rules over the whole step ---------------------------------------------------------------------------------------------------


def doubled(groups: Sequence[Siblings]) -> list[list[np.ndarray]]:
    """A rule over the step: each group's advantages times the number of groups."""
    return [[len(groups) * column for column in handmade.centred(siblings)] for siblings in groups]


def test_a_rule_over_the_step_holds_samples_until_it_closes_and_then_gives_all_of_them_their_final_advantages() -> None:
    rule = cut(step_advantages=doubled)
    first, given_up, second, third = (
        rule.take(handmade.plain_group(number, rewards))
        for number, rewards in enumerate([[1.0, 0.0], [Outcome.ERROR] * 2, [0.0, 1.0], [1.0, 0.0]])
    )
    assert first.delivered == given_up.delivered == third.delivered == ()
    assert trained(first) == ["0/0", "0/1"], "it is placed all the same: its credit returns at once"
    assert [sample.trajectory.rollout_id for sample in second.delivered] == ["0/0", "0/1", "2/0", "2/1"]
    assert [float(sample.advantages[-1]) for sample in second.delivered] == [1.0, -1.0, -1.0, 1.0]
    assert second.closes_step


def test_without_such_a_rule_a_group_goes_at_once() -> None:
    verdict = cut().take(handmade.plain_group(0, [1.0, 0.0]))
    assert verdict.delivered == verdict.samples


# --- withholding stale tokens ----------------------------------------------------------------------------------------------------


def test_a_group_that_withholds_old_tokens_is_stale_only_where_none_is_young_enough() -> None:
    """Step 5 with K = 2 and bound 1: a token of version 4 may train, and takes its old siblings' rewards into the baseline."""
    rule = cut(first_step=5, withhold=1)
    assert rule.take(handmade.plain_group(0, [1.0, 0.0], versions=(0, 4))).is_assigned
    stale = rule.take(handmade.plain_group(1, [1.0, 0.0], versions=(0, 3)))
    assert [fate for fate, _ in endings(stale).values()] == [TerminalStatus.STALE] * 2
    old = handmade.scored(handmade.trajectory((0, 0), group_id=2, sibling=0), 1.0)
    young = handmade.scored(handmade.trajectory((5, 5), group_id=2, sibling=1), 0.0)
    verdict = rule.take(handmade.group(2, [old, young]))
    assert [float(sample.advantages[-1]) for sample in verdict.samples] == [0.5, -0.5], "the old sibling's reward is in the mean"


def advantages_of_one(siblings: Siblings) -> list[np.ndarray]:
    return [np.where(member.trajectory.loss_mask, 1.0, 0.0).astype(np.float32) for member in siblings]


def siblings(*rewards: float | None, group_id: int = 7, versions: Sequence[int] = (0, 0, 0)):
    """A reward, or None for one that was stopped; all were flagged."""
    members = [
        handmade.flagged(handmade.trajectory(versions, group_id=group_id, sibling=sibling), reward)
        for sibling, reward in enumerate(rewards)
    ]
    return handmade.group(group_id, members)


def test_stopped_siblings_count_as_started_and_those_that_went_on_weigh_for_them():
    """Four of one prompt at a probability of 1/4: one went on and weighs 4, three end as filtered; the step counts four."""
    rule = cut(groups_per_step=1, group_advantages=advantages_of_one)
    verdict = rule.take(siblings(None, 1.0, None, None))
    assert [(sample.trajectory.rollout_id, sample.weight) for sample in verdict.samples] == [("7/1", 4.0)]
    assert endings(verdict) == {f"7/{sibling}": (TerminalStatus.FILTERED, "stopped early") for sibling in (0, 2, 3)}
    assert {ended.step for ended in verdict.ended} == {0}
    assert (verdict.is_assigned, verdict.closes_step, verdict.num_samples, verdict.num_tokens) == (True, True, 4, 3)


def test_group_whose_siblings_were_all_stopped_takes_its_place_in_the_step():
    rule = cut(groups_per_step=1, group_advantages=advantages_of_one)
    verdict = rule.take(siblings(None, None))
    assert (verdict.is_assigned, verdict.samples, verdict.closes_step, verdict.num_samples) == (True, (), True, 2)


def test_stopped_siblings_of_a_group_that_is_given_up_count_in_no_step():
    rule = cut(max_staleness=1, first_step=3, group_advantages=advantages_of_one)
    verdict = rule.take(siblings(None, 1.0, versions=(1, 3, 3)))
    assert endings(verdict) == {
        "7/0": (TerminalStatus.FILTERED, "stopped early"),
        "7/1": (TerminalStatus.STALE, "oldest token over 1 versions old"),
    }
    assert {ended.step for ended in verdict.ended} == {None}


def test_restored_step_counts_what_was_stopped_before():
    rule = cut(groups_per_step=2, group_advantages=advantages_of_one)
    before = rule.take(siblings(None, 1.0))
    after = cut(groups_per_step=2, group_advantages=advantages_of_one)
    after.restore(before.samples, num_groups=1, groups=(), num_stopped=1)
    assert after.take(siblings(None, 1.0, group_id=8)).num_samples == 4 == rule.take(siblings(None, 1.0, group_id=8)).num_samples
