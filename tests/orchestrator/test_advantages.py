"""Credit: the method's advantages, laid over whole trajectories."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest

from orchestrator.advantages import MethodAdvantages
from orchestrator.ledger.ledger import Ledger
from orchestrator.rollouts.trajectories import trajectory_of
from orchestrator.rules.batch import Filtered, StepRules
from pipelinerl.algorithms.method import Need
from pipelinerl.algorithms.methods import resolve
from pipelinerl.config import RewardSection
from pipelinerl.data.episode_graph import EpisodeGraph, Node
from pipelinerl.errors import DataError
from pipelinerl.messages import Finish, Prompt, TraceScores, Trajectory
from tests.orchestrator import handmade


def weighed(function: str, weight: float) -> RewardSection:
    return RewardSection.model_validate({"function": function, "weight": weight})


ONE_REWARD = (weighed("rewards.py:right", 1.0),)


def members(rewards: list[float], *, lengths: list[int] | None = None, components: list[dict[str, float]] | None = None):
    lengths = lengths or [2] * len(rewards)
    parts = components or [{} for _ in rewards]
    return tuple(
        handmade.scored(handmade.trajectory([0] * length, sibling=sibling, num_prompt=3), reward, components=part)
        for sibling, (reward, length, part) in enumerate(zip(rewards, lengths, parts, strict=True))
    )


def test_dr_grpo_gives_reward_minus_mean_on_sampled_tokens_and_zero_on_the_prompt():
    credit = MethodAdvantages(resolve("dr_grpo", {}, group_size=4), ONE_REWARD)
    columns = credit(members([1.0, 0.0, 0.0, 0.0], lengths=[1, 2, 3, 4]))
    assert not isinstance(columns, Filtered)
    assert [column.tolist() for column in columns] == [
        [0.0, 0.0, 0.0, 0.75],
        [0.0, 0.0, 0.0, -0.25, -0.25],
        [0.0, 0.0, 0.0, -0.25, -0.25, -0.25],
        [0.0, 0.0, 0.0, -0.25, -0.25, -0.25, -0.25],
    ]
    assert all(column.dtype == np.float32 for column in columns)


def test_grpo_divides_by_the_standard_deviation():
    """Rewards 1, 0: mean 0.5, sample standard deviation sqrt(0.5): 0.5 / 0.70711 = 0.70711."""
    columns = MethodAdvantages(resolve("grpo", {}, group_size=2), ONE_REWARD)(members([1.0, 0.0]))
    assert not isinstance(columns, Filtered)
    assert columns[0].tolist() == pytest.approx([0, 0, 0, 0.70711, 0.70711], abs=1e-4)
    assert columns[1].tolist() == pytest.approx([0, 0, 0, -0.70711, -0.70711], abs=1e-4)


def test_a_group_the_filter_refuses_is_named_by_the_filter():
    credit = MethodAdvantages(resolve("dapo", {}, group_size=2), ONE_REWARD)
    refused = credit(members([1.0, 1.0]))
    assert isinstance(refused, Filtered)
    assert refused.reason == "zero_variance"
    assert not np.any(refused.advantages), "let through, it trains nothing"
    assert not isinstance(credit(members([1.0, 0.0])), Filtered)
    assert credit.step_rules() == StepRules(step_advantages=None, refill_batches=10, withhold=None)


def test_the_accuracy_band_reads_correctness_from_the_reward() -> None:
    credit = MethodAdvantages(resolve("grpo", {"group_filter": "accuracy_band"}, group_size=4), ONE_REWARD, correct_reward=0.5)
    assert not isinstance(credit(members([0.6, 0.4, 0.4, 0.4])), Filtered), "one of four is correct"
    assert isinstance(credit(members([0.4, 0.4, 0.4, 0.4])), Filtered)


def test_a_rule_over_the_step_sees_every_group_as_if_they_were_one_table() -> None:
    """REINFORCE++ with a baseline: R - mean of the group, whitened over the tokens of the step, worked out from the formula."""
    credit = MethodAdvantages(resolve("reinforce_pp_baseline", {}, group_size=2), ONE_REWARD)
    groups = [members([1.0, 0.0], lengths=[3, 1]), members([2.0, 0.0], lengths=[1, 2]), members([1.0, 1.0])]
    over_step = credit.step_rules().step_advantages
    assert over_step is not None
    tokens = np.array([0.5] * 3 + [-0.5] + [1.0] + [-1.0] * 2 + [0.0] * 4)
    expected = [[0.5, -0.5], [1.0, -1.0], [0.0, 0.0]]
    for columns, group, values in zip(over_step(groups), groups, expected, strict=True):
        for column, member, value in zip(columns, group, values, strict=True):
            sampled = member.trajectory.loss_mask
            assert column[sampled] == pytest.approx((value - tokens.mean()) / tokens.std(ddof=1), abs=1e-6)
            assert not column[~sampled].any()


def test_components_of_one_name_from_two_files_are_told_apart_as_the_scorer_does() -> None:
    """The scorer names them by their whole reference then; see `rewards.calls.component_names`."""
    rewards = (
        weighed("a.py:right", 1.0),
        weighed("b.py:right", 2.0),
    )
    credit = MethodAdvantages(resolve("gdpo", {"batch": "none"}, group_size=2), rewards)
    columns = credit(members([1.0, 2.0], components=[{"a.py:right": 1.0, "b.py:right": 0.0}, {"a.py:right": 0.0, "b.py:right": 1.0}]))
    assert not isinstance(columns, Filtered)
    assert columns[0][-1] == pytest.approx(0.70711 - 2 * 0.70711, abs=1e-4)


def test_a_component_that_does_not_apply_to_a_sibling_compares_none_of_them() -> None:
    rewards = (
        weighed("r.py:right", 1.0),
        weighed("r.py:short", 2.0),
    )
    credit = MethodAdvantages(resolve("gdpo", {"batch": "none"}, group_size=2), rewards)
    columns = credit(members([1.0, 0.0], components=[{"right": 1.0}, {"right": 0.0, "short": 5.0}]))
    assert not isinstance(columns, Filtered)
    assert columns[0][-1] == pytest.approx(0.70711, abs=1e-4)
    nothing = credit(members([1.0, 0.0], components=[{"right": 1.0}, {"short": 0.0}]))
    assert not isinstance(nothing, Filtered)
    assert not any(column.any() for column in nothing)


def test_components_reach_a_method_that_reads_them_with_their_weights():
    """gdpo: each component normalised in the group, then weighed: right differs (+-0.70711), short differs the other way, weight 2."""
    rewards = (
        weighed("rewards.py:right", 1.0),
        weighed("rewards.py:short", 2.0),
    )
    credit = MethodAdvantages(resolve("gdpo", {"batch": "none"}, group_size=2), rewards)
    columns = credit(members([1.0, 2.0], components=[{"short": 0.0, "right": 1.0}, {"right": 0.0, "short": 1.0}]))
    assert not isinstance(columns, Filtered)
    assert columns[0][-1] == pytest.approx(0.70711 - 2 * 0.70711, abs=1e-4)
    assert columns[1][-1] == pytest.approx(-0.70711 + 2 * 0.70711, abs=1e-4)


def _in_role(role: str | None, rewards: list[float]):
    columns: dict[str, object] = {} if role is None else {"role": role}
    found = members(rewards)
    prompts = [msgspec.structs.replace(one.trajectory.prompt, columns=columns) for one in found]
    trajectories = [msgspec.structs.replace(one.trajectory, prompt=prompt) for one, prompt in zip(found, prompts, strict=True)]
    return tuple(msgspec.structs.replace(one, trajectory=whole) for one, whole in zip(found, trajectories, strict=True))


def test_a_role_has_a_baseline_that_moves_with_its_groups_and_outlives_its_orchestrator() -> None:
    """Halfway to the mean reward of each group: 0, 0.25, 0.625 for the proposer; the solver's is its own."""
    method, ledger = resolve("rae", {"advantage": {"decay": 0.5}}, group_size=2), Ledger(None)

    def start() -> MethodAdvantages:
        return MethodAdvantages(
            method, ONE_REWARD, baselines=ledger.baselines(), remember=lambda means: ledger.store_baselines(means, now_s=0.0)
        )

    def last(credit: MethodAdvantages, role: str, rewards: list[float]) -> list[float]:
        columns = credit(_in_role(role, rewards))
        assert not isinstance(columns, Filtered)
        return [float(column[-1]) for column in columns]

    credit = start()
    assert last(credit, "proposer", [1.0, 0.0]) == [1.0, 0.0]
    assert last(credit, "solver", [1.0, 1.0]) == [1.0, 1.0]
    assert last(credit, "proposer", [1.0, 1.0]) == [0.75, 0.75]
    ledger.flush()
    assert last(start(), "proposer", [1.0, 0.0]) == [0.375, -0.625]
    with pytest.raises(DataError, match="prompt 0:0: column role is None, expected a text"):
        credit(_in_role(None, [1.0, 0.0]))


def test_an_empty_completion_gets_a_column_of_zeros_as_long_as_its_prompt():
    columns = MethodAdvantages(resolve("dr_grpo", {}, group_size=2), ONE_REWARD)(members([0.0, 1.0], lengths=[0, 2]))
    assert not isinstance(columns, Filtered)
    assert columns[0].tolist() == [0.0, 0.0, 0.0]
    assert columns[1].tolist() == [0.0, 0.0, 0.0, 0.5, 0.5]


def test_siblings_that_were_stopped_count_by_what_was_predicted_of_them():
    """A sibling of weight 4 with reward 1 where 0.1 was predicted is worth 0.1 + 4 * 0.9 = 3.7 to others, a stopped one 0.1."""
    credit = MethodAdvantages(resolve("rloo_early_stop", {}, group_size=3, offers={Need.PREDICTIONS}, stops_early=True), ONE_REWARD)
    trajectories = [handmade.trajectory([0] * length, sibling=sibling) for sibling, length in enumerate((2, 1, 2))]
    siblings = (handmade.flagged(trajectories[0], 1.0), handmade.flagged(trajectories[1]), handmade.scored(trajectories[2], 0.5))
    columns = credit(siblings)
    assert not isinstance(columns, Filtered)
    assert columns[0].tolist() == pytest.approx([0, 0, *[1.0 - (0.1 + 0.5) / 2] * 2])
    assert columns[2].tolist() == pytest.approx([0, 0, *[0.5 - (3.7 + 0.1) / 2] * 2])


def test_a_turn_scores_what_the_process_reward_model_said_where_the_method_reads_that() -> None:
    """step_reinforce sums this and the following scores: 0.5 + 0.25 for the first turn, 0.25 for the second, 0 for what was replied."""
    played = episode([5, 6], [7], [8], rewards=[3.0, 4.0])
    steps = TraceScores(ends=np.array([1, 3], np.int32), scores=np.array([0.5, 0.25], np.float32), version="model")
    siblings = (msgspec.structs.replace(handmade.scored(played, 7.0), steps=steps),)
    columns = MethodAdvantages(resolve("step_reinforce", {}, group_size=1, offers={Need.STEP_SCORES, Need.TURNS}), ONE_REWARD)(siblings)
    assert not isinstance(columns, Filtered)
    assert columns[0].tolist() == [0.0, 0.75, 0.75, 0.0, 0.25]
    columns = MethodAdvantages(resolve("mt_grpo", {}, group_size=2, offers={Need.TURNS}), ONE_REWARD)(siblings * 2)
    assert not isinstance(columns, Filtered), "it reads turns, and what the environment gave them"


def episode(first: list[int], reply: list[int], second: list[int], *, rewards: list[float]) -> Trajectory:
    """A prompt of one token, two turns and the reply between them."""
    graph = EpisodeGraph().append(Node.given(np.array([1], np.int32)))
    for parent, (token_ids, reward) in enumerate(((first, rewards[0]), (reply, None), (second, rewards[1]))):
        node = Node.given(np.array(token_ids, np.int32), parent=parent)
        if reward is not None:
            versions, logprobs = np.zeros(len(token_ids), np.int32), np.full(len(token_ids), -0.5, np.float32)
            node = msgspec.structs.replace(node, versions=versions, logprobs=logprobs, reward=reward)
        graph = graph.append(node)
    prompt = Prompt(prompt_id="0:0", text="?", token_ids=np.array([1], np.int32))
    return trajectory_of(prompt, graph, rollout_id="0/0", attempt=0, group_id=0, sibling=0, finish=Finish.STOP)
