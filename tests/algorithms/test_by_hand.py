"""Every rule of every column has a test on numbers worked by hand; a rule that is added without one fails here.

`test_every_method` and `test_loss` run whatever the table holds. A rule of the loss (objective, proximal, weight, mask, kl, auxiliary)
needs one more entry: `reference.py` computes it a second time, in plain Python.
"""

from __future__ import annotations

import ast
import math
import re
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.algorithms.loss import measure_step, policy_loss
from pipelinerl.algorithms.method import RULE_COLUMNS
from pipelinerl.algorithms.methods import METHODS
from pipelinerl.algorithms.rules import COLUMNS
from tests.algorithms.rows import DIVERGES, Seq, loss_and_gradient, method_of, pack

BY_HAND: dict[str, dict[str, str]] = {
    "shaping": {
        "overlong_penalty": "test_advantage.py::test_overlong_penalty_of_dapo",
        "minus_token_kl": "test_advantage.py::test_kl_in_the_reward_sums_over_trained_tokens_only",
    },
    "group_filter": {
        "zero_variance": "test_advantage.py::test_filter_sets_aside_equal_rewards_up_to_rounding_and_counts_whole_groups",
        "accuracy_band": "test_advantage.py::test_accuracy_band_keeps_groups_between_a_fifth_and_four_fifths",
    },
    "advantage": {
        **dict.fromkeys(
            ("grpo", "dr_grpo", "rloo", "maxrl", "passk"),
            "test_advantage.py::test_one_correct_sibling_of_four_gets_the_published_advantages",
        ),
        "rloo_doubly_robust": "test_early_stop.py::test_leave_one_out_under_a_stop_by_hand",
        "remax": "test_advantage.py::test_remax_subtracts_the_greedy_reward_and_refuses_a_group_without_one",
        "opo": "test_advantage.py::test_opo_weighs_the_baseline_by_length",
        "gdpo": "test_advantage.py::test_gdpo_normalises_each_component_before_it_weighs_them",
        "rae": "test_advantage.py::test_role_baseline_is_the_mean_before_the_group_and_survives_a_snapshot",
        "reinforce_pp": "test_token_advantage.py::test_reinforce_pp_puts_the_outcome_at_the_last_trained_token_and_kl_on_each",
        "step_difference": "test_token_advantage.py::test_step_difference_spreads_over_tokens_and_adds_the_centred_outcome",
        "step_min": "test_token_advantage.py::test_step_min_is_centred_over_the_pooled_steps",
        "step_grpo": "test_token_advantage.py::test_process_grpo_credits_a_token_with_its_own_and_all_following_steps",
        "step_reinforce": "test_token_advantage.py::test_step_reinforce_discounts_by_steps_not_by_tokens",
        "gigpo": "test_token_advantage.py::test_gigpo_adds_an_advantage_among_equal_states",
        "hgpo": "test_graph_advantage.py::test_hgpo_weighs_levels_by_how_far_back_histories_agree",
        "mt_grpo": "test_graph_advantage.py::test_mt_grpo_adds_the_outcome_to_turns_of_equal_depth",
        "tree_grpo": "test_graph_advantage.py::test_tree_grpo_compares_leaves_in_their_tree_and_in_the_forest",
        "tree_rpo": "test_graph_advantage.py::test_tree_rpo_compares_a_subtree_with_its_siblings",
        "gae": "test_token_advantage.py::test_gae_by_hand",
        "vapo_gae": "test_token_advantage.py::test_vapo_takes_lambda_from_the_length_and_returns_with_lambda_one",
        "turn_gae": "test_token_advantage.py::test_turn_gae_is_constant_inside_a_turn_and_zero_on_tool_tokens",
        "otb": "test_token_advantage.py::test_optimal_baseline_uses_at_each_position_only_the_siblings_that_reach_it",
        "prime": "test_token_advantage.py::test_prime_process_part_by_hand",
    },
    "batch": {
        "whiten_tokens": "test_batch_rule.py::test_whitening_tokens_counts_a_sequence_once_per_trained_token",
        "whiten_sequences": "test_batch_rule.py::test_whitening_sequences_counts_each_once_and_refuses_token_columns",
        "std_of_rewards": "test_batch_rule.py::test_std_of_rewards_divides_by_the_spread_of_the_whole_step",
        "gpg_alpha": "test_batch_rule.py::test_gpg_scales_by_the_share_of_groups_with_signal",
    },
    "objective": dict.fromkeys(COLUMNS["objective"], "test_by_hand.py::test_objective_of_one_token_twice_as_likely_as_to_the_engine"),
    "proximal": {
        "current": "test_correction.py::test_weights_around_the_current_policy_equal_a_clip_that_has_nothing_to_clip",
        "recomputed": "test_correction.py::test_weight_by_hand",
        "engine": "test_correction.py::test_two_policy_form_has_the_gradient_of_the_untruncated_three_policy_form_at_the_first_update",
        "loglinear": "test_correction.py::test_loglinear_puts_prox_so_many_versions_behind_the_policy",
    },
    "weight": {
        **dict.fromkeys(COLUMNS["weight"], "test_correction.py::test_weight_by_hand"),
        "tis_segment": "test_correction.py::test_segment_weight_is_one_geometric_mean_per_turn",
    },
    "masks": {
        **dict.fromkeys(COLUMNS["masks"], "test_correction.py::test_mask_by_hand"),
        "probability_band": "test_correction.py::test_probability_band_looks_at_probabilities_not_at_ratios",
        "kpop": "test_correction.py::test_kpop_masks_when_either_direction_of_the_binary_kl_is_large",
        "opsm": "test_correction.py::test_opsm_drops_bad_sequences_the_policy_has_left_and_no_others",
        "m2po": "test_correction.py::test_m2po_keeps_what_lies_at_or_below_the_threshold_of_the_step",
        "top_entropy": "test_by_hand.py::test_top_entropy_keeps_so_large_a_part_of_the_step",
        "tv_gate": "test_correction.py::test_mask_by_hand",
        "overlong": "test_by_hand.py::test_overlong_drops_a_truncated_sequence_whole",
        "version_withhold": "test_correction.py::test_version_masks_read_the_version_of_each_token",
        "partial_rollout": "test_correction.py::test_version_masks_read_the_version_of_each_token",
    },
    "kl": dict.fromkeys(COLUMNS["kl"], "test_kl.py::test_penalty_has_its_value_and_its_gradient"),
    "auxiliary": {
        "entropy_bonus": "test_loss.py::test_entropy_bonus_rewards_entropy_on_every_trained_token",
        "squared_log_ratio": "test_objective.py::test_the_squared_term_of_prime_rl_covers_tokens_its_mask_drops",
        "positive_nll": "test_loss.py::test_positive_nll_is_the_mean_over_tokens_of_correct_sequences",
    },
    "critic": {
        "huber": "test_critic.py::test_huber_loss_is_square_within_delta_and_a_line_beyond",
        "clipped": "test_critic.py::test_value_clip_takes_the_larger_loss_around_the_old_value",
        "implicit_prm": "test_critic.py::test_implicit_prm_loss_is_the_cross_entropy_of_the_summed_log_ratio",
    },
}
OTHER_WORDS = {
    "zero_variance": "dapo",
    "accuracy_band": "prime",
    "rae": "RoleBaselines",
    "clipped": "value_loss",
    "recomputed": "RECOMPUTED",
}
OTHER_WORDS |= {
    "huber": "huber_value_loss",
    "overlong_penalty": "overlong_penalties",
    "squared_log_ratio": "prime_rl",
    "implicit_prm": "implicit_prm_loss",
}
"""By which a test speaks of a rule without its name: a row that has it, what it is made of."""


@pytest.mark.parametrize("column", COLUMNS)
def test_every_rule_has_a_test_by_hand_that_speaks_of_it(column: str) -> None:
    rules = set(COLUMNS[column]) - {"none"}
    assert rules <= set(BY_HAND[column]), f"name a test on numbers worked by hand for {column} {rules - set(BY_HAND[column])}"
    for rule in rules:
        path, name = BY_HAND[column][rule].split("::")
        rows = [row for row, method in METHODS.items() if column in RULE_COLUMNS and getattr(method, column).name == rule]
        words = [rule, *rows, *([OTHER_WORDS[rule]] if rule in OTHER_WORDS else [])]
        text = spoken_by(Path(__file__).with_name(path), name)
        assert re.search("|".join(rf"\b{re.escape(word)}\b" for word in words), text), f"{name} says nothing of {rule}"


def spoken_by(path: Path, name: str) -> str:
    """The source of a test, its parametrisation and the module's constants and functions they name."""
    source = path.read_text()
    nodes = ast.parse(source).body
    named: dict[str, ast.stmt] = {}
    for node in nodes:
        if isinstance(node, ast.FunctionDef):
            named[node.name] = node
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            named |= {target.id: node for target in targets if isinstance(target, ast.Name)}
    assert name in named, f"no test {path.name}::{name}"
    test = named[name]
    parts = [test, *(test.decorator_list if isinstance(test, ast.FunctionDef) else [])]
    inner = {each.id for part in parts for each in ast.walk(part) if isinstance(each, ast.Name)}
    parts += [named[word] for word in inner & named.keys()]
    return "\n".join(filter(None, (ast.get_source_segment(source, part) for part in parts)))


LN2 = math.log(2)
OBJECTIVES: dict[str, tuple[dict[str, Any], float, float]] = {
    "clip": ({}, -1.2, 2.0),
    "gspo": ({}, -1.0004, 2.0),
    "cispo": ({}, 2 * LN2, -2 * LN2),
    "sapo": ({}, -4 / (1 + math.exp(-1)), 4 / 1.05 / (1 + math.exp(-1.05))),
    "gmpo": ({}, -math.exp(0.4), 2.0),
    "dppo_tv": ({}, 0.0, -2 * LN2),
    "dppo_kl": ({"threshold": 0.13}, 0.0, -2 * LN2),
    "prime_rl": ({}, 0.0, 2.0),
    "ipo": ({"threshold": 0.25}, -2.0, 2.0),
    "opd": ({}, -2 * LN2, -2 * LN2),
    "gkd": ({}, DIVERGES * LN2**2, DIVERGES * LN2**2),
    "topr": ({}, LN2, -LN2),
    "topr_token": ({}, LN2, -LN2),
    "vespo": ({}, 4 * math.exp(3 - 6) * LN2, -8 * math.exp(2 - 4) * LN2),
    "kimi": ({"tau": 0.5}, LN2 + LN2**2 / 4, -LN2 + LN2**2 / 4),
    "dro": ({"beta": 0.5}, LN2 + LN2**2 / 4, -LN2 + LN2**2 / 4),
    "gpg": ({}, LN2, -LN2),
    "reinforce_is": ({}, 2 * LN2, -2 * LN2),
    "clip_cov": ({}, -1.2, 2.0),
    "kl_cov": ({"fraction": 1.0}, -2 + 0.1 * LN2, 2 + 0.1 * LN2),
}
"""Options beyond the defaults, and the loss for A = 1 and for A = -1."""


@pytest.mark.parametrize("name", COLUMNS["objective"])
def test_objective_of_one_token_twice_as_likely_as_to_the_engine(name: str) -> None:
    """pi = 1/2, mu = prox = 1/4, so r = 2 and log pi = -ln 2; log ref = 0. KL(mu, pi) = 0.1308 counts as a large move, above 0.13."""
    options, *expected = OBJECTIVES[name]
    row = name if name in ("opd", "gkd") else "grpo"
    method = method_of(row, proximal="engine", weight="none", objective={"name": name} | options, auxiliary=[], aggregation="token-sum")
    for advantage, loss in zip((1.0, -1.0), expected, strict=True):
        mu = math.log(0.25)
        columns = pack([Seq(logprobs=[-LN2], behaviour=[mu], old=[mu], reference=[0.0], advantages=[advantage])])
        statistics = measure_step([columns], method=method, reduce=lambda tensor: tensor)
        assert policy_loss(columns, method=method, statistics=statistics).loss.item() == pytest.approx(loss, abs=1e-12)


def test_top_entropy_keeps_so_large_a_part_of_the_step() -> None:
    """Two of five trained tokens, wherever they stand; what stands at a tool token counts for nothing."""
    method = method_of("grpo_top_entropy", masks={"name": "top_entropy", "fraction": 0.4}, aggregation="token-sum")
    rows = [
        Seq(logprobs=[-1.0] * 3, behaviour=[-1.0] * 3, advantages=[1.0] * 3, entropy=[0.1, 0.9, 5.0], loss_mask=[True, True, False]),
        Seq(logprobs=[-1.0] * 3, behaviour=[-1.0] * 3, advantages=[1.0] * 3, entropy=[0.8, 0.2, 0.3]),
    ]
    columns = pack(rows)
    statistics = measure_step([columns], method=method, reduce=lambda tensor: tensor)
    policy_loss(columns, method=method, statistics=statistics).loss.backward()
    assert columns.logprobs.grad is not None
    assert columns.logprobs.grad.tolist() == [0.0, -1.0, 0.0, -1.0, 0.0, 0.0]


def test_overlong_drops_a_truncated_sequence_whole() -> None:
    """Of three tokens of -A each, with A = 1, the two of the truncated sequence do not train."""
    method = method_of("grpo", masks="overlong", weight="none", aggregation="token-sum")
    cut_off = Seq(logprobs=[-1.0, -1.0], behaviour=[-1.0, -1.0], advantages=[1.0, 1.0], truncated=True)
    whole = Seq(logprobs=[-1.0], behaviour=[-1.0], advantages=[1.0])
    loss, gradient, _ = loss_and_gradient([cut_off, whole], method=method)
    assert loss == -1.0
    assert gradient == [0.0, 0.0, -1.0]
