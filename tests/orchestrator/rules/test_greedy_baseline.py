"""Groups with a greedy sibling: its reward is the baseline, it never trains, and a group without it trains nothing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from orchestrator.advantages import MethodAdvantages
from orchestrator.rules.batch import BatchCut, Verdict
from pipelinerl.algorithms.methods import resolve
from pipelinerl.config import RewardSection
from pipelinerl.messages import Group, Outcome, TerminalStatus
from tests.orchestrator import handmade

ONE_REWARD = (RewardSection.model_validate({"function": "rewards.py:right", "weight": 1.0}),)


def remax(*, group_size: int = 2, max_staleness: int = 2, **overrides: str) -> BatchCut:
    """Steps of two groups."""
    credit = MethodAdvantages(resolve("remax", overrides, group_size=group_size), ONE_REWARD)
    return BatchCut(groups_per_step=2, max_staleness=max_staleness, min_group_size=2, group_advantages=credit, rules=credit.step_rules())


def group_of(
    group_id: int, rewards: Sequence[float | Outcome], *, greedy: float | Outcome, version: int = 0, greedy_version: int = 0
) -> Group:
    """Siblings of three sampled tokens, the greedy one last, of five."""
    members = list(handmade.plain_group(group_id, rewards, versions=(version,) * 3).members)
    of = handmade.trajectory((greedy_version,) * 5, group_id=group_id, sibling=len(rewards), is_greedy=True)
    members.append(handmade.scored(of, outcome=greedy) if isinstance(greedy, Outcome) else handmade.scored(of, greedy))
    return handmade.group(group_id, members)


def endings(verdict: Verdict) -> dict[str, tuple[TerminalStatus, str]]:
    return {ended.scored.trajectory.rollout_id: (ended.status, ended.reason) for ended in verdict.ended}


def test_siblings_train_with_their_reward_less_the_greedy_one_which_ends_as_filtered():
    verdict = remax().take(group_of(7, [1.0, 0.25], greedy=0.5))
    assert [sample.trajectory.rollout_id for sample in verdict.samples] == ["7/0", "7/1"]
    assert [sample.advantages.tolist() for sample in verdict.samples] == [[0, 0, 0.5, 0.5, 0.5], [0, 0, -0.25, -0.25, -0.25]]
    assert endings(verdict) == {"7/2": (TerminalStatus.FILTERED, "greedy baseline")}
    assert verdict.ended[0].step is None, "it counts among no step's samples"


def test_one_sibling_beside_a_greedy_one_is_a_group():
    verdict = remax(group_size=1).take(group_of(7, [1.0], greedy=0.0))
    assert [sample.advantages[-1] for sample in verdict.samples] == [1.0]


def test_a_step_is_sealed_without_its_greedy_rollouts():
    cut = remax()
    cut.take(group_of(7, [1.0, 0.0], greedy=1.0))
    closing = cut.take(group_of(8, [1.0, Outcome.ERROR, 0.0], greedy=0.0))
    assert closing.closes_step
    assert (closing.num_samples, closing.num_tokens) == (4, 12)


@pytest.mark.parametrize("outcome", [Outcome.TIMEOUT, Outcome.ERROR, Outcome.INVALID])
def test_without_a_greedy_reward_the_group_fails_whole(outcome: Outcome):
    verdict = remax().take(group_of(7, [1.0, 0.0], greedy=outcome))
    assert not verdict.is_assigned
    why = (TerminalStatus.FAILED, "its greedy sibling has no reward")
    assert endings(verdict) == {"7/0": why, "7/1": why, "7/2": (TerminalStatus.FAILED, str(outcome))}


def test_a_greedy_rollout_is_no_survivor_and_is_filtered_whatever_becomes_of_its_group():
    too_few = remax().take(group_of(7, [1.0, Outcome.ERROR], greedy=0.0))
    assert endings(too_few) == {
        "7/0": (TerminalStatus.FAILED, "fewer than 2 siblings scored"),
        "7/1": (TerminalStatus.FAILED, "error"),
        "7/2": (TerminalStatus.FILTERED, "greedy baseline"),
    }
    set_aside = remax(group_filter="zero_variance").take(group_of(8, [1.0, 1.0], greedy=0.0))
    assert set_aside.is_filtered
    assert endings(set_aside)["8/2"] == (TerminalStatus.FILTERED, "greedy baseline")


def test_the_age_of_a_greedy_rollout_decides_nothing_and_that_of_its_siblings_as_ever():
    cut = remax(max_staleness=0)
    cut.step = 1
    assert cut.take(group_of(7, [1.0, 0.0], greedy=0.0, version=1, greedy_version=0)).is_assigned
    stale = cut.take(group_of(8, [1.0, 0.0], greedy=0.0, version=0, greedy_version=1))
    assert {fate for fate, _ in endings(stale).values()} == {TerminalStatus.STALE, TerminalStatus.FILTERED}


def test_a_rule_over_the_whole_step_has_the_baselines_of_every_group_also_after_a_restart():
    """Advantages 1, 0 and 1, -1, each on three tokens: mean 0.25, variance 0.6875 * 12 / 11 = 0.75."""
    groups = [group_of(7, [1.0, 0.0], greedy=0.0), group_of(8, [2.0, 0.0], greedy=1.0)]
    straight, resumed = remax(batch="whiten_tokens"), remax(batch="whiten_tokens")
    first = straight.take(groups[0])
    assert first.delivered == ()
    resumed.restore(first.samples, num_groups=1, groups=[groups[0].members])
    expected = (np.array([1.0, 0.0, 1.0, -1.0]) - 0.25) / np.sqrt(0.75)
    for cut in (straight, resumed):
        closing = cut.take(groups[1])
        assert [float(sample.advantages[-1]) for sample in closing.delivered] == pytest.approx(expected, rel=1e-6)
        assert (closing.num_samples, closing.num_tokens) == (4, 12)
