"""Meters, by hand."""

from __future__ import annotations

import math

import pytest
import torch

from pipelinerl.algorithms.loss import finish_meters, merge_meters, policy_loss, reduces_by_maximum
from pipelinerl.algorithms.loss.meters import effective_sample_fraction
from tests.algorithms.rows import Seq, changed, loss_and_gradient, method_of, pack


def numbers(sequences: list[Seq], name: str = "grpo", **overrides: object) -> dict[str, float]:
    return finish_meters(loss_and_gradient(sequences, method=method_of(name, **overrides))[2].meters)


SEQ = Seq(
    logprobs=[-1.0, -2.0, math.nan, -1.5],
    behaviour=[-1.0 - math.log(1.5), -2.0, math.nan, -1.5 + math.log(2.0)],
    advantages=[1.0, -3.0, math.nan, 0.0],
    loss_mask=[True, True, False, True],
    versions=[5, 4, -1, 1],
    entropy=[0.3, 0.6, math.nan, 0.9],
    reference=[-1.1, -2.0, math.nan, -1.5],
)


def test_effective_sample_fraction_by_hand() -> None:
    assert effective_sample_fraction(5.0, square_sum=7.0, count=4.0) == pytest.approx(0.892857, abs=1e-6)
    doubled = Seq(logprobs=[-1.0] * 4, behaviour=[-1.0, -1.0, -1.0, -1.0 - math.log(2)], advantages=[0.0] * 4)
    assert numbers([doubled])["ess_fraction"] == pytest.approx(0.892857, abs=1e-6)


def test_meters_by_hand() -> None:
    got = numbers([SEQ], proximal="engine", weight="none")
    expected = {
        "tokens": 3,
        "sequences": 1,
        "ratio_mean": (1.5 + 1.0 + 0.5) / 3,
        "ratio_min": 0.5,
        "ratio_max": 1.5,
        "clip_fraction": 1 / 3,
        "ppo_kl": (-math.log(1.5) + math.log(2)) / 3,
        "mismatch_kl_k1": (-math.log(1.5) + math.log(2)) / 3,
        "mismatch_kl_k3": ((0.5 - math.log(1.5)) + (-0.5 + math.log(2))) / 3,
        "entropy": 0.6,
        "staleness_mean": (0 + 1 + 4) / 3,
        "staleness_max": 4,
        "reference_kl_k1": 0.1 / 3,
        "advantage_mean": -2 / 3,
        "advantage_abs_mean": 4 / 3,
        "weight_mean": 1.0,
        "importance_max": 1.5,
    }
    assert {name: got[name] for name in expected} == pytest.approx(expected)


def test_the_logprob_gap_looks_only_at_tokens_of_the_version_being_trained() -> None:
    old = Seq(logprobs=[-1.0], behaviour=[-9.0], advantages=[1.0], versions=[4])
    assert "logprob_gap_max" not in numbers([old]), "absent, not 0.0"
    fresh = Seq(logprobs=[-1.0], behaviour=[-1.01], advantages=[1.0], versions=[5])
    got = numbers([old, fresh])
    assert got["logprob_gap_max"] == pytest.approx(0.01)
    assert got["mismatch_kl_on_policy"] == pytest.approx(math.exp(0.01) - 1 - 0.01)


def test_the_high_quantile_is_that_of_the_worst_row_with_enough_tokens() -> None:
    """1 to 200 thousandths: the 0.99 quantile lies at 1 + 0.99 * 199 = 198.01 of them, linearly between two."""

    def row(gaps: list[float]) -> Seq:
        logprobs = [-1.0] * len(gaps)
        return Seq(logprobs=logprobs, behaviour=[-1.0 - gap for gap in gaps], advantages=logprobs, versions=[5] * len(gaps))

    rising = [number / 1000 for number in range(1, 201)]
    assert numbers([row(rising)])["logprob_gap_p99"] == pytest.approx(0.19801)
    assert "logprob_gap_p99" not in numbers([row(rising[:99])])
    method = method_of("grpo")
    parts = [policy_loss(pack([row(gaps)]), method=method).meters for gaps in (rising, [0.0] * 200, [9.0] * 99)]
    assert finish_meters(merge_meters(parts))["logprob_gap_p99"] == pytest.approx(0.19801)


def test_a_token_that_saw_keys_and_values_of_an_older_policy_is_no_measure_of_arithmetic() -> None:
    """Its sequence lived through a swap, and the engine kept what it had computed before."""
    through_a_swap = Seq(logprobs=[-1.0, -1.0], behaviour=[-1.0, -1.4], advantages=[1.0, 1.0], versions=[4, 5])
    assert "mismatch_kl_on_policy" not in numbers([through_a_swap])
    whole = Seq(logprobs=[-1.0, -1.0], behaviour=[-1.0, -1.0], advantages=[1.0, 1.0], versions=[5, 5])
    assert numbers([through_a_swap, whole])["mismatch_kl_on_policy"] == 0.0


def test_what_kept_keys_and_values_do_is_measured_on_tokens_of_the_trained_version_alone() -> None:
    through_a_swap = Seq(logprobs=[-1.0, -1.0], behaviour=[-9.0, -1.4], advantages=[1.0, 1.0], versions=[4, 5])
    whole = Seq(logprobs=[-1.0, -1.0], behaviour=[-1.7, -1.0], advantages=[1.0, 1.0], versions=[5, 5])
    got = numbers([through_a_swap, whole])
    assert got["mismatch_kl_stale_kv"] == pytest.approx(math.exp(0.4) - 1 - 0.4)
    assert got["tokens_stale_kv"] == 1
    assert "mismatch_kl_stale_kv" not in numbers([whole]), "absent, not 0.0"


def test_at_the_first_step_ratio_is_one_and_kl_zero() -> None:
    seq = Seq(logprobs=[-1.0, -2.0], behaviour=[-1.0, -2.0], old=[-1.0, -2.0], advantages=[1.0, 1.0], versions=[5, 5])
    for proximal in ("current", "recomputed", "loglinear", "engine"):
        got = numbers([seq], proximal=proximal, objective="gpg")
        assert (got["ppo_kl"], got["mismatch_kl_k3"], got["ratio_mean"], got["ess_fraction"]) == (0, 0, 1, 1)


def test_weights_and_masks_are_counted_before_rejection() -> None:
    seq = Seq(logprobs=[-3.0] * 4, behaviour=[-3.0 - math.log(x) for x in (0.4, 1.0, 3.0, 6.0)], advantages=[1.0] * 4)
    got = numbers([seq], "icepop", masks={"name": "outlier_band", "high": 2.0})
    assert got["weight_zero_fraction"] == pytest.approx(0.5)
    assert got["weight_mean"] == pytest.approx(1.0)
    assert got["weight_max"] == pytest.approx(3.0)
    assert got["outlier_band_dropped_fraction"] == pytest.approx(0.5)


def test_loss_parts_are_logged_over_the_denominator_and_sum_to_the_loss() -> None:
    method = method_of("grpo", kl="k3", auxiliary="squared_log_ratio")
    loss, _, sums = loss_and_gradient([SEQ], method=method)
    got = finish_meters(sums.meters, denominator=3.0)
    assert got["loss"] == pytest.approx(loss / 3)
    assert got["loss_kl"] + got["loss_objective"] + got["loss_squared_log_ratio"] == pytest.approx(got["loss"])


def test_meters_merge_by_sum_and_maximum_and_skip_rows_without_tokens() -> None:
    method = method_of("grpo", proximal="engine", weight="none")
    halves = [Seq(logprobs=[-1.0], behaviour=[-1.0 + shift], advantages=[1.0], versions=[4]) for shift in (0.3, -0.2)]
    parts = [policy_loss(pack([half]), method=method).meters for half in halves] + [policy_loss(pack([]), method=method).meters]
    merged = finish_meters(merge_meters(parts))
    assert merged["ratio_min"] == pytest.approx(math.exp(-0.3))
    assert merged["ratio_max"] == pytest.approx(math.exp(0.2))
    assert merged["tokens"] == 2
    assert {name for name in parts[0] if reduces_by_maximum(name)} == {
        "ratio_max", "importance_max", "ratio_negative_max", "weight_max", "staleness_max", "logprob_gap_max",
        "logprob_gap_p99_max",
    }  # fmt: skip
    assert finish_meters(merge_meters([parts[2]])) == {"tokens": 0.0}


def test_meters_hold_no_graph_and_are_scalars() -> None:
    meters = policy_loss(pack([changed(SEQ, versions=[5, 5, -1, 5])]), method=method_of("grpo", kl="k3")).meters
    assert all(value.ndim == 0 and not value.requires_grad for value in meters.values())
    # Minus infinity is the largest of nothing: of so few tokens no quantile is taken.
    assert all(torch.isfinite(value) for name, value in meters.items() if name != "logprob_gap_p99_max")
