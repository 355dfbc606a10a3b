"""The traps that loss code for RL of language models is known to fall into, each with the tests that hold it open.

A table that is read: `python tests/algorithms/test_coverage.py` prints it. That the tests named exist is checked; that they were each
seen red is in the history.
"""

from __future__ import annotations

import re
from pathlib import Path

TESTS = Path(__file__).resolve().parents[1]

TRAPS: dict[str, tuple[str, ...]] = {
    "a group of one is given its raw reward as advantage": (
        "algorithms/test_advantage.py::test_a_group_of_one_has_no_advantage_rather_than_its_raw_reward",
        "algorithms/test_every_method.py::test_a_group_of_one_and_an_empty_completion_have_finite_advantages",
        "algorithms/test_methods.py::test_refuses_a_group_rule_with_groups_of_one",
    ),
    "the standard deviation's ddof is not the documented one": (
        "algorithms/test_advantage.py::test_grpo_matches_the_documented_ddof_for_four_and_for_two_siblings",
    ),
    "whitening is computed on each rank apart": (
        "algorithms/test_batch_rule.py::test_whitening_by_added_moments_is_the_same_on_one_two_and_four_ranks",
    ),
    "pi/mu is counted twice where the engine is the old policy": (
        "algorithms/test_methods.py::test_refuses_a_weight_beside_the_bypass",
        "algorithms/test_correction.py::test_two_policy_form_has_the_gradient_of_the_untruncated_three_policy_form_at_the_first_update",
    ),
    "bounds on k1 = -log rho are reversed": ("algorithms/test_correction.py::test_k1_bounds_are_bounds_on_rho_not_on_its_inverse",),
    "rounding below zero rejects tokens that agree": (
        "algorithms/test_correction.py::test_rounding_below_zero_rejects_no_token_that_agrees",
    ),
    "a filter's denominator is that of before": (
        "algorithms/test_loss.py::test_a_filtered_group_leaves_numerator_and_denominator_a_masked_one_only_the_numerator",
    ),
    "a mask changes the denominator": ("algorithms/test_loss.py::test_a_mask_changes_numerators_only",),
    "GAE is reset at tool tokens": ("algorithms/test_token_advantage.py::test_gae_carries_value_and_sum_through_a_tool_token",),
    "TOPR with the ratio of the token": (
        "algorithms/test_objective.py::test_topr_uses_the_ratio_of_the_trajectory_and_its_token_form_does_not",
    ),
    "what stands at tool tokens reaches the loss": ("algorithms/test_loss.py::test_what_stands_where_nothing_trains_changes_nothing",),
    "log-ratios overflow, or are taken in 16 bits": (
        "algorithms/test_loss.py::test_log_ratios_beyond_the_limit_are_clamped_and_stay_finite",
        "algorithms/test_loss.py::test_narrow_inputs_are_upcast_before_any_difference_is_taken",
    ),
    "an importance weight carries gradient": ("algorithms/test_correction.py::test_importance_weight_carries_no_gradient",),
    "the dual clip acts on good answers": ("algorithms/test_objective.py::test_dual_clip_bounds_bad_answers_only",),
    "GSPO's gradient is that of the mean alone": ("algorithms/test_objective.py::test_gspo_gradient_is_that_of_the_sequence_ratio",),
    "a gradient flows through what is stopped": (
        "algorithms/test_objective.py::test_gradient_flows_through_log_pi_alone",
        "algorithms/test_every_method.py::test_loss_and_gradient_are_those_of_the_formula",
    ),
    "DPPO masks a move towards the engine": ("algorithms/test_objective.py::test_dppo_kl_does_not_mask_a_move_towards_the_engine",),
    "the log-linear proxy divides by zero, or by row": (
        "algorithms/test_correction.py::test_loglinear_is_the_engine_where_a_token_has_the_version_being_trained_and_is_per_token",
        "algorithms/test_correction.py::test_loglinear_loss_has_finite_gradients_for_mixed_versions_in_a_row",
    ),
    "ranks with unequal rows wait for one another, or sum to another loss": (
        "algorithms/test_loss.py::test_any_split_of_whole_sequences_over_ranks_gives_the_same_loss",
        "trainer/test_loader.py::test_ranks_of_a_replica_get_its_rows_and_all_ranks_end_after_the_same_wave",
    ),
    "packing and padding matter": (
        "algorithms/test_loss.py::test_loss_gradient_and_meters_do_not_depend_on_packing_order_or_number_of_ranks",
        "algorithms/test_loss.py::test_columns_of_unequal_length_are_refused_with_their_name",
    ),
    "a zero-loss row counts": ("algorithms/test_loss.py::test_a_row_without_a_trained_token_changes_neither_loss_nor_gradient_nor_meters",),
    "a run starves, or fails, where all groups are set aside": (
        "orchestrator/rules/test_batch.py::test_once_the_budget_of_a_step_is_spent_it_is_filled_with_what_comes",
        "algorithms/test_every_method.py::test_the_order_of_groups_and_a_step_without_signal_change_no_advantage",
    ),
    "a filter splits a group": (
        "algorithms/test_advantage.py::test_filter_sets_aside_equal_rewards_up_to_rounding_and_counts_whole_groups",
    ),
    "a score that failed becomes a number": ("algorithms/test_advantage.py::test_an_unscored_sibling_cannot_enter_a_group_as_a_number",),
    "GPG divides by no groups": ("algorithms/test_batch_rule.py::test_gpg_with_no_signal_anywhere_is_zero_and_divides_by_nothing",),
    "MaxRL at mean 0, OPO without tokens": ("algorithms/test_advantage.py::test_maxrl_with_mean_zero_and_opo_without_tokens_stay_finite",),
    "the optimal baseline's energies are off": (
        "algorithms/test_token_advantage.py::test_energy_equals_the_brute_force_squared_score_on_three_tokens",
        "algorithms/test_token_advantage.py::test_optimal_baseline_minimises_the_variance_of_the_gradient",
        "trainer/test_optimal_baseline.py::test_a_step_has_the_advantages_of_the_whole_table_of_probabilities",
    ),
    "PRIME counts the outcome twice": (
        "algorithms/test_token_advantage.py::test_prime_adds_the_outcome_exactly_once_and_no_process_reward_to_the_last_token",
        "trainer/test_implicit_prm.py::test_policy_and_process_reward_model_get_the_gradients_of_their_formulas",
    ),
    "the value clip takes the minimum, or clips around the new value": (
        "algorithms/test_critic.py::test_value_clip_takes_the_larger_loss_around_the_old_value",
    ),
    "M2PO's threshold differs between ranks": (
        "algorithms/test_step_statistics.py::test_m2po_keeps_as_many_tokens_as_sorting_all_of_them_would",
        "algorithms/test_step_statistics.py::test_every_rank_gets_the_numbers_of_one_process",
    ),
    "a run starts although engine and trainer disagree": (
        "algorithms/test_meters.py::test_at_the_first_step_ratio_is_one_and_kl_zero",
        "trainer/test_step.py::test_wrong_engine_logprobs_end_the_first_step_before_its_update",
    ),
    "the mismatch grows by itself": ("trainer/test_step.py::test_at_learning_rate_zero_the_mismatch_stays_flat",),
    "a sample weight changes the expected gradient": (
        "algorithms/test_early_stop.py::test_leave_one_out_with_weights_has_the_exact_gradient_in_expectation",
        "algorithms/test_loss.py::test_an_unbiased_stop_leaves_the_expected_gradient_unchanged",
    ),
    "prime-rl's squared term covers kept tokens only": (
        "algorithms/test_objective.py::test_the_squared_term_of_prime_rl_covers_tokens_its_mask_drops",
    ),
    "k3+ and the unbiased form are taken for k3": (
        "algorithms/test_kl.py::test_penalty_has_its_value_and_its_gradient",
        "algorithms/test_kl.py::test_unbiased_penalty_is_weighted_by_the_ratio_to_the_proximal_policy",
    ),
    "which mean is in force is left to guess": (
        "algorithms/test_loss.py::test_aggregation_by_hand",
        "algorithms/test_loss.py::test_the_log_of_a_run_names_the_aggregation",
    ),
    "a withheld token takes its reward out of the baseline": (
        "algorithms/test_advantage.py::test_a_withheld_sibling_still_counts_in_the_baseline",
    ),
}


def test_every_trap_has_its_tests() -> None:
    for trap, tests in TRAPS.items():
        for test in tests:
            path, name = test.split("::")
            assert re.search(rf"^(async )?def {name}", (TESTS / path).read_text(), re.MULTILINE), f"{trap}: no test {test}"


if __name__ == "__main__":
    for trap, tests in TRAPS.items():
        print(f"{trap}\n" + "".join(f"    {test}\n" for test in tests))
