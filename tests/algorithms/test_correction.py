"""Proximal policies, importance weights and masks."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch

from pipelinerl.algorithms.loss import StepStatistics, policy_loss
from pipelinerl.algorithms.loss.call import call_rule
from pipelinerl.algorithms.loss.correction import importance_weights, loglinear_logprobs, terms_of
from pipelinerl.algorithms.method import Rule
from pipelinerl.algorithms.rules import rule_from
from pipelinerl.errors import ConfigError
from tests.algorithms.rows import Seq, changed, loss_and_gradient, method_of, pack

RECOMPUTED = Rule(name="recomputed")


def with_rho(*rho: float, advantage: float = 1.0, ratio: float = 1.0, mu: float = -3.0, **columns: Any) -> Seq:
    old = [mu + math.log(x) for x in rho]
    return Seq(
        logprobs=[x + math.log(ratio) for x in old], old=old, behaviour=[mu] * len(rho), advantages=[advantage] * len(rho), **columns
    )


def weights_of(rule: str | dict[str, Any], *sequences: Seq) -> list[float]:
    terms = terms_of(pack(sequences), proximal=RECOMPUTED)
    return importance_weights(terms, rule=rule_from("weight", rule)).tolist()


def keeps_of(rule: str | dict[str, Any], *sequences: Seq, **known: float) -> list[bool]:
    terms = terms_of(pack(sequences), proximal=RECOMPUTED, statistics=StepStatistics(**known) if known else None)
    return call_rule(rule_from("masks", rule), terms, column="masks").tolist()


SPREAD = with_rho(0.5, 1.0, 4.0)


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("none", [1, 1, 1]),
        ("tis_token", [0.5, 1, 2]),
        ({"name": "tis_token", "floor": 0.8}, [0.8, 1, 2]),
        ("tis_sequence", [2, 2, 2]),
        ({"name": "tis_sequence", "cap": 1.5}, [1.5] * 3),
        ({"name": "tis_geometric", "cap": 2.0}, [1.25992] * 3),
        ("tis_geometric", [1.2] * 3),
        ("mis_token", [0.5, 1, 0]),
        ("mis_sequence", [2, 2, 2]),
        ({"name": "mis_sequence", "cap": 1.9}, [0, 0, 0]),
        ({"name": "icepop", "low": 0.4}, [0.5, 1, 4]),
        ({"name": "icepop", "low": 0.6, "high": 3.0}, [0, 1, 0]),
    ],
)
def test_weight_by_hand(rule: str | dict[str, Any], expected: list[float]) -> None:
    assert weights_of(rule, SPREAD) == pytest.approx(expected, abs=1e-5)


def test_sequence_weights_do_not_mix_sequences_and_skip_tool_tokens() -> None:
    tooled = with_rho(0.5, 1e4, 3.0, loss_mask=[True, False, True])
    got = weights_of("tis_sequence", SPREAD, tooled)
    assert [*got[:3], got[3], got[5]] == pytest.approx([2.0, 2.0, 2.0, 1.5, 1.5])


def test_segment_weight_is_one_geometric_mean_per_turn() -> None:
    turns = with_rho(0.5, 0.5, 9.0, 1.1, 0.9, loss_mask=[True, True, False, True, True])
    turn = math.sqrt(1.1 * 0.9)
    got = weights_of("tis_segment", turns, with_rho(1.1))
    assert [got[0], got[1], got[3], got[4], got[5]] == pytest.approx([0.5, 0.5, turn, turn, 1.1])


def test_segment_weight_finds_turns_in_columns_that_hold_trained_tokens_only() -> None:
    columns = dataclasses.replace(pack([with_rho(0.5, 0.5, 1.1, 0.9)]), positions=torch.tensor([3, 4, 6, 7]))
    terms = terms_of(columns, proximal=RECOMPUTED)
    turn = math.sqrt(1.1 * 0.9)
    assert importance_weights(terms, rule=rule_from("weight", "tis_segment")).tolist() == pytest.approx([0.5, 0.5, turn, turn])


@pytest.mark.parametrize("weight", ["tis_token", "tis_sequence", "tis_geometric", "tis_segment", "mis_token", "mis_sequence", "icepop"])
@pytest.mark.parametrize("proximal", ["current", "recomputed", "loglinear"])
def test_importance_weight_carries_no_gradient(weight: str, proximal: str) -> None:
    """With the weight held as a constant the gradient is the weighted policy gradient, and nothing else."""
    seq = changed(with_rho(0.6, 0.9, 1.15, ratio=1.02, advantage=0.7), versions=[2, 3, 4])
    objective = "gpg" if proximal == "current" else {"clip_high": 5.0}
    method = method_of("grpo", weight=weight, proximal=proximal, objective=objective, aggregation="token-sum")
    _, gradient, _ = loss_and_gradient([seq], method=method)
    terms = terms_of(pack([seq]), proximal=method.proximal)
    expected = -importance_weights(terms, rule=method.weight) * 0.7 * terms.ratio
    assert gradient == pytest.approx(expected.tolist())


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ({"name": "ratio_band", "low": 0.8, "high": 1.2}, [False, True, False]),
        ("outlier_band", [True, True, True]),
        ({"name": "outlier_band", "high": 3.9}, [True, True, False]),
        ({"name": "reject_token", "metric": "k1", "low": 0.4, "high": 3.0}, [True, True, False]),
        ({"name": "reject_token", "metric": "k2", "high": 0.3}, [True, True, False]),
        ({"name": "reject_token", "metric": "k3", "high": 0.2}, [True, True, False]),
        ({"name": "geo_rs", "low": 1.25, "high": 1.27}, [True] * 3),
        ("geo_rs", [False] * 3),
        ({"name": "k3_rs", "high": 0.6023}, [True] * 3),
        ({"name": "k3_rs", "high": 0.6022}, [False] * 3),
        ({"name": "product_band", "high": 2.01}, [True] * 3),
        ({"name": "product_band", "high": 1.99}, [False] * 3),
        ({"name": "tv_gate", "high": 0.59}, [True] * 3),
        ({"name": "tv_gate", "high": 0.58}, [False] * 3),
        ({"name": "veto", "low": 0.4}, [True] * 3),
        ({"name": "veto", "low": 0.6}, [False] * 3),
        ({"name": "reject_sequence", "metric": "ratio", "over": "max", "high": 3.9}, [False] * 3),
        ({"name": "reject_sequence", "metric": "ratio", "over": "mean", "high": 1.84}, [True] * 3),
        ({"name": "reject_sequence", "metric": "k3", "over": "sum", "high": 1.8}, [False] * 3),
        ({"name": "vaco_tv", "delta": 1.1}, [True, True, False]),
        ({"name": "vaco_tv", "delta": 1.2}, [True, True, True]),
    ],
)
def test_mask_by_hand(rule: str | dict[str, Any], expected: list[bool]) -> None:
    assert keeps_of(rule, SPREAD) == expected


@pytest.mark.parametrize("metric", ["ratio", "k1"])
def test_k1_bounds_are_bounds_on_rho_not_on_its_inverse(metric: str) -> None:
    """0.5 <= rho <= 4 is not the same as 0.5 <= 1/rho <= 4: rho = 3 is inside the first alone, rho = 0.3 inside the second."""
    rule = {"name": "reject_token", "metric": metric, "low": 0.5, "high": 4.0}
    assert keeps_of(rule, with_rho(3.0, 0.3)) == [True, False]
    by_sequence = {"name": "reject_sequence", "metric": metric, "over": "mean", "low": 0.5, "high": 4.0}
    assert keeps_of(by_sequence, with_rho(3.0), with_rho(0.3)) == [True, False]


@pytest.mark.parametrize("metric", ["k2", "k3", "binary_kl"])
def test_rounding_below_zero_rejects_no_token_that_agrees(metric: str) -> None:
    """In float32 the divergence of nearly equal log-probabilities may come out as -1e-8, and the lower bound is 0."""
    logprobs = [-0.01 * n for n in range(1, 400)]
    seq = Seq(logprobs=logprobs, behaviour=[x + 3e-7 * (n % 7 - 3) for n, x in enumerate(logprobs)], advantages=[1.0] * len(logprobs))
    for mask in ("reject_token", "reject_sequence"):
        method = method_of("grpo", proximal="engine", weight="none", masks={"name": mask, "metric": metric, "high": 0.1})
        _, gradient, _ = loss_and_gradient([seq], method=method, dtype=torch.float32)
        assert all(gradient)


def test_sequence_masks_decide_each_sequence_by_its_own_trained_tokens() -> None:
    tooled = with_rho(1.0, 1e-6, 1.0, loss_mask=[True, False, True])
    vetoed = keeps_of({"name": "veto", "low": 0.6}, SPREAD, tooled)
    assert (vetoed[0], vetoed[3], vetoed[5]) == (False, True, True)


def test_kpop_masks_when_either_direction_of_the_binary_kl_is_large() -> None:
    """mu = 0.9, prox = 0.1 and the reverse: 1.758 both ways, and nothing between nearly certain tokens."""
    far = Seq(logprobs=[math.log(0.1)], old=[math.log(0.1)], behaviour=[math.log(0.9)], advantages=[1.0])
    certain = Seq(logprobs=[-1e-9], old=[-1e-9], behaviour=[-1e-7], advantages=[1.0])
    lopsided = Seq(logprobs=[math.log(0.999)], old=[math.log(0.999)], behaviour=[math.log(0.6)], advantages=[1.0])
    sure = [Seq(logprobs=[x], old=[x], behaviour=[y], advantages=[1.0]) for x, y in ((0.0, -1e-7), (-1e-7, 0.0), (0.0, 0.0))]
    assert keeps_of("kpop", *sure) == [True, True, True], "a probability of 1 is no infinite distance"
    assert keeps_of({"name": "kpop", "high": 1.75}, far, certain) == [False, True]
    assert keeps_of({"name": "kpop", "high": 1.76}, far, certain) == [True, True]
    mirrored = Seq(logprobs=[math.log(0.6)], old=[math.log(0.6)], behaviour=[math.log(0.999)], advantages=[1.0])
    assert keeps_of({"name": "kpop", "high": 1.0}, lopsided, mirrored) == [False, False], "0.50 one way, 2.09 the other"


def test_probability_band_looks_at_probabilities_not_at_ratios() -> None:
    rare, common = with_rho(5.0, mu=math.log(0.01)), with_rho(1.5, mu=math.log(0.6))
    assert keeps_of("probability_band", rare, common) == [True, False]


def test_opsm_drops_bad_sequences_the_policy_has_left_and_no_others() -> None:
    left, kept = 0.9, 1.1
    sequences = [with_rho(1.0, 1.0, advantage=a, ratio=r) for a in (-1.0, 1.0) for r in (left, kept)]
    assert keeps_of("opsm", *sequences) == [False, False, True, True, True, True, True, True]


def test_vaco_drops_only_tokens_that_push_further_out() -> None:
    assert keeps_of({"name": "vaco_tv", "delta": 0.1}, with_rho(0.5, 2.0, advantage=1.0)) == [True, False]
    assert keeps_of({"name": "vaco_tv", "delta": 0.1}, with_rho(0.5, 2.0, advantage=-1.0)) == [False, True]


def test_version_masks_read_the_version_of_each_token() -> None:
    seq = changed(with_rho(1.0, 1.0, 1.0), versions=[1, 4, 5])
    assert keeps_of({"name": "version_withhold", "bound": 1}, seq) == [False, True, True]
    assert keeps_of("partial_rollout", seq, changed(with_rho(1.0), versions=[2])) == [False, False, True, True]


def test_masks_see_the_mismatch_also_where_the_engine_is_the_proximal_policy() -> None:
    method = method_of("reinforce_is", masks={"name": "outlier_band", "high": 2.0}, aggregation="token-sum")
    _, gradient, _ = loss_and_gradient([Seq(logprobs=[-1.0, -1.0], behaviour=[-1.1, -4.0], advantages=[1.0, 1.0])], method=method)
    assert gradient[0] != 0
    assert gradient[1] == 0


def test_chained_masks_all_have_to_keep_a_token_and_are_counted_apart() -> None:
    chain = [{"name": "reject_token", "metric": "ratio", "high": 2.0}, {"name": "reject_token", "metric": "k2", "high": 0.1}]
    method = method_of("decoupled_ppo", masks=chain, aggregation="token-sum")
    _, gradient, sums = loss_and_gradient([SPREAD], method=method)
    assert [slope != 0 for slope in gradient] == [False, True, False]
    assert float(sums.meters["reject_token_0_dropped_fraction_sum"]) == 1
    assert float(sums.meters["reject_token_1_dropped_fraction_sum"]) == 2


def test_mask_order_decides_whether_removed_tokens_stay_in_the_product() -> None:
    columns: dict[str, Any] = {"weight": "tis_sequence", "masks": {"name": "ratio_band", "low": 0.1, "high": 1.5}, "proximal": "recomputed"}
    after = method_of("grpo", **columns, mask_order="after_weight", aggregation="token-sum")
    before = method_of("grpo", **columns, mask_order="before_weight", aggregation="token-sum")
    assert loss_and_gradient([SPREAD], method=after)[1] == pytest.approx([-2.0, -2.0, 0.0])
    assert loss_and_gradient([SPREAD], method=before)[1] == pytest.approx([-0.5, -0.5, 0.0])


def test_loglinear_interpolates_by_versions() -> None:
    got = loglinear_logprobs(
        torch.tensor([-1.0]), behaviour=torch.tensor([-3.0]), versions=torch.tensor([3]), prox_version=5, current_version=7
    )
    assert got.tolist() == [-2.0]


def test_loglinear_is_the_engine_where_a_token_has_the_version_being_trained_and_is_per_token() -> None:
    got = loglinear_logprobs(
        torch.tensor([-1.0] * 4), behaviour=torch.tensor([-3.0] * 4), versions=torch.tensor([7, 6, 5, 3]), prox_version=6, current_version=7
    )
    assert got.tolist() == pytest.approx([-3.0, -3.0, -2.0, -1.5])


def test_loglinear_stays_between_the_engine_and_the_policy() -> None:
    """Also with prox = theta, where a fresh token's interval and its part of it are both empty, and for a token newer than prox."""
    one = torch.tensor([-1.0])
    fresh = loglinear_logprobs(one, behaviour=one * 3, versions=torch.tensor([7]), prox_version=7, current_version=7)
    newer = loglinear_logprobs(one, behaviour=one * 3, versions=torch.tensor([6]), prox_version=5, current_version=7)
    assert fresh.tolist() == newer.tolist() == [-3.0]


@pytest.mark.parametrize(("lag", "fraction"), [(0, 1.0), (1, 0.5), (2, 0.0)])
def test_loglinear_puts_prox_so_many_versions_behind_the_policy(lag: int, fraction: float) -> None:
    seq = Seq(logprobs=[-1.0], behaviour=[-1.4], advantages=[1.0], versions=[3])
    terms = terms_of(pack([seq], trained_version=5), proximal=Rule(name="loglinear", options={"prox_lag": lag}))
    assert terms.proximal.tolist() == pytest.approx([-1.4 + 0.4 * fraction])


def test_loglinear_loss_has_finite_gradients_for_mixed_versions_in_a_row() -> None:
    seq = changed(with_rho(0.9, 1.1, 1.0), versions=[5, 4, 1])
    _, gradient, _ = loss_and_gradient([seq], method=method_of("loglinear_ppo"))
    assert all(math.isfinite(slope) and slope != 0 for slope in gradient)


def test_weights_around_the_current_policy_equal_a_clip_that_has_nothing_to_clip() -> None:
    """One update per batch: the clip does nothing, and the forward pass that "recomputed" costs changes nothing."""
    seq = with_rho(0.7, 1.3, 2.5, advantage=-0.8)
    weighted, clipped = method_of("grpo_tis"), method_of("grpo", proximal="recomputed", weight="tis_token")
    assert loss_and_gradient([seq], method=weighted)[1] == loss_and_gradient([seq], method=clipped)[1]


def test_two_policy_form_has_the_gradient_of_the_untruncated_three_policy_form_at_the_first_update() -> None:
    """pi/mu counted once: bypass equals weight prox/mu times ratio pi/prox; a weight on top of it is refused."""
    seq = with_rho(0.7, 1.1, 1.15, advantage=0.9)
    three = method_of("grpo_tis", weight={"cap": 1000.0})
    two = method_of("grpo")
    assert loss_and_gradient([seq], method=two)[1] == pytest.approx(loss_and_gradient([seq], method=three)[1])
    with pytest.raises(ConfigError, match="would count pi/mu twice"):
        method_of("grpo", weight="tis_token")


def test_a_method_that_reads_old_logprobs_says_so_where_the_trainer_gives_none() -> None:
    with pytest.raises(ConfigError, match="reads old_logprobs"):
        policy_loss(pack([changed(SPREAD, old=[])]), method=method_of("decoupled_ppo"))
    with pytest.raises(ConfigError, match="compares all tokens of a step"):
        policy_loss(pack([SPREAD]), method=method_of("m2po"))


def test_m2po_keeps_what_lies_at_or_below_the_threshold_of_the_step() -> None:
    squares = [math.log(x) ** 2 for x in (0.5, 1.0, 4.0)]
    assert keeps_of("m2po", SPREAD, m2po_threshold=float(torch.tensor(squares[0]))) == [True, True, False]
