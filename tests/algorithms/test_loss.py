"""The loss of packed rows: what must not matter does not, what must is by hand."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelinerl.algorithms.loss import StepStatistics, denominator, finish_meters, measure_step, merge_meters, policy_loss
from pipelinerl.algorithms.method import Aggregation, Method
from tests.algorithms.every_method import EVERY_METHOD, sample
from tests.algorithms.rows import Seq, changed, loss_and_gradient, method_of, pack, single


def whole_step(rows: Sequence[Sequence[Seq]], *, method: Method) -> tuple[float, list[list[float]], dict[str, float]]:
    """Loss of a step cut into rows, divided once by the global denominator; gradients row by row; meters."""
    packed = [pack(row) for row in rows]
    statistics = measure_step(packed, method=method, reduce=lambda tensor: tensor)
    sums = [policy_loss(row, method=method, statistics=statistics) for row in packed]
    num_tokens = sum(int(row.loss_mask.sum()) for row in packed)
    divisor = denominator(method.aggregation, num_tokens=num_tokens, num_sequences=sum(map(len, rows)), max_tokens=16)
    for one in sums:
        (one.loss / divisor).backward()
    gradients = [[] if row.logprobs.grad is None else row.logprobs.grad.tolist() for row in packed]
    meters = finish_meters(merge_meters([one.meters for one in sums]), denominator=divisor)
    return sum(float(one.loss.detach()) for one in sums) / divisor, gradients, meters


def by_sequence(rows: Sequence[Sequence[Seq]], gradients: list[list[float]]) -> dict[int, list[float]]:
    """Gradient of each sequence, whatever row it lay in, by the sequence's identity."""
    found: dict[int, list[float]] = {}
    for row, gradient in zip(rows, gradients, strict=True):
        start = 0
        for seq in row:
            found[id(seq)] = gradient[start : start + len(seq.logprobs)]
            start += len(seq.logprobs)
    return found


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_loss_gradient_and_meters_do_not_depend_on_packing_order_or_number_of_ranks(name: str) -> None:
    method = EVERY_METHOD[name]
    sequences = sample(3)
    one_row = [sequences]
    layouts = (
        [sequences[::-1]],
        [sequences[:2], sequences[2:]],
        [[s] for s in sequences],
        [sequences[3:5], [], sequences[:3], sequences[5:]],
    )
    loss, gradients, meters = whole_step(one_row, method=method)
    expected = by_sequence(one_row, gradients)
    assert any(slope != 0 for slope in gradients[0]), "a loss without a gradient would pass every comparison below"
    for rows in layouts:
        other_loss, other_gradients, other_meters = whole_step(rows, method=method)
        assert other_loss == pytest.approx(loss, rel=1e-9, abs=1e-12)
        assert other_meters == pytest.approx(meters, rel=1e-9, abs=1e-12)
        found = by_sequence(rows, other_gradients)
        for seq in sequences:
            assert found[id(seq)] == pytest.approx(expected[id(seq)], rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_what_stands_where_nothing_trains_changes_nothing(name: str) -> None:
    """NaN, infinity and -1e4 at tool tokens, in every column, leak into neither loss nor gradient nor meters."""
    method = EVERY_METHOD[name]
    clean = sample(5)
    dirty = [spoiled(seq, seed=i) for i, seq in enumerate(clean)]
    loss, gradients, meters = whole_step([clean], method=method)
    dirty_loss, dirty_gradients, dirty_meters = whole_step([dirty], method=method)
    assert dirty_loss == pytest.approx(loss, rel=1e-12)
    assert dirty_gradients[0] == pytest.approx(gradients[0], rel=1e-12)
    assert dirty_meters == pytest.approx(meters, rel=1e-12)
    assert all(
        slope == 0 for slope, loss_mask in zip(dirty_gradients[0], [t for s in clean for t in s.trained()], strict=True) if not loss_mask
    )


def spoiled(seq: Seq, *, seed: int) -> Seq:
    generator = random.Random(seed)

    def spoil(values: list[float]) -> list[float]:
        garbage = [math.nan, math.inf, -math.inf, -1e4, 0.0]
        return [value if loss_mask else generator.choice(garbage) for value, loss_mask in zip(values, seq.trained(), strict=True)]

    names = ("logprobs", "behaviour", "old", "reference", "entropy", "advantages")
    return changed(seq, **{name: spoil(getattr(seq, name)) for name in names})


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_the_sequence_of_a_token_that_does_not_train_is_not_read(name: str) -> None:
    row = pack(sample(5))
    loss = policy_loss(row, method=EVERY_METHOD[name], statistics=StepStatistics()).loss
    padded = dataclasses.replace(row, sequence_ids=torch.where(row.loss_mask, row.sequence_ids, 10**9))
    assert torch.equal(policy_loss(padded, method=EVERY_METHOD[name], statistics=StepStatistics()).loss, loss)


@pytest.mark.parametrize("name", EVERY_METHOD)
def test_a_row_without_a_trained_token_changes_neither_loss_nor_gradient_nor_meters(name: str) -> None:
    method = EVERY_METHOD[name]
    sequences = sample(7)
    silent = [changed(seq, loss_mask=[False] * len(seq.logprobs)) for seq in sample(8)]
    loss, gradients, meters = whole_step([sequences], method=method)
    packed = [pack(sequences), pack(silent), pack([])]
    statistics = measure_step(packed, method=method, reduce=lambda tensor: tensor)
    sums = [policy_loss(row, method=method, statistics=statistics) for row in packed]
    divisor = denominator(method.aggregation, num_tokens=int(packed[0].loss_mask.sum()), num_sequences=len(sequences), max_tokens=16)
    (torch.stack([one.loss for one in sums]).sum() / divisor).backward()
    assert [float(one.loss.detach()) for one in sums[1:]] == [0.0, 0.0]
    assert packed[1].logprobs.grad is not None
    assert not packed[1].logprobs.grad.any()
    assert packed[0].logprobs.grad is not None
    assert packed[0].logprobs.grad.tolist() == pytest.approx(gradients[0])
    assert float(sums[0].loss.detach()) / divisor == pytest.approx(loss)
    assert finish_meters(merge_meters([one.meters for one in sums]), denominator=divisor) == pytest.approx(meters)


@given(st.integers(0, 10**6), st.sampled_from(list(EVERY_METHOD)), st.lists(st.integers(0, 3), min_size=6, max_size=6))
@settings(max_examples=40)
def test_any_split_of_whole_sequences_over_ranks_gives_the_same_loss(seed: int, name: str, ranks: list[int]) -> None:
    method = EVERY_METHOD[name]
    sequences = sample(seed)
    rows = [[seq for seq, owner in zip(sequences, ranks, strict=True) if owner == rank] for rank in range(4)]
    assert whole_step(rows, method=method)[0] == pytest.approx(whole_step([sequences], method=method)[0], rel=1e-8, abs=1e-11)


# --- by hand ---------------------------------------------------------------------------------------------------------------------

UNEVEN = [
    Seq(logprobs=[-1.0, -1.0, -1.0], behaviour=[-1.0] * 3, advantages=[1.0] * 3),
    Seq(logprobs=[-2.0], behaviour=[-2.0], advantages=[-2.0]),
]
"""Ratios are 1, so each token's loss is -A."""


@pytest.mark.parametrize(
    ("aggregation", "raw", "divided"),
    [
        ("token-mean", -1.0, -0.25),
        ("token-sum", -1.0, -1.0),
        ("seq-mean-token-sum", -1.0, -0.5),
        ("seq-mean-token-sum-norm", -1.0, -0.05),
        ("seq-mean-token-mean", 1.0, 0.5),
    ],
)
def test_aggregation_by_hand(aggregation: str, raw: float, divided: float) -> None:
    """Two sequences of 3 and 1 tokens: token-mean and seq-mean-token-mean even differ in sign."""
    loss, _, _ = loss_and_gradient(UNEVEN, method=method_of("grpo", aggregation=aggregation))
    assert loss == pytest.approx(raw)
    assert loss / denominator(aggregation, num_tokens=4, num_sequences=2, max_tokens=10) == pytest.approx(divided)


def test_the_log_of_a_run_names_the_aggregation() -> None:
    assert "aggregation  seq-mean-token-mean" in method_of("gspo").describe()


@given(st.integers(0, 10**6), st.floats(0.2, 1.0), st.floats(1.0, 3.0), st.sampled_from(["token-mean", "seq-mean-token-mean"]))
@settings(max_examples=40)
def test_a_mask_changes_numerators_only(seed: int, low: float, high: float, aggregation: str) -> None:
    """The loss with a mask is the unmasked loss minus the dropped tokens' own terms; no count moves."""
    columns: dict[str, Any] = {"aggregation": aggregation}
    masked = method_of("decoupled_ppo", masks={"name": "outlier_band", "low": low * 0.999, "high": high}, **columns)
    sequences = sample(seed)
    row = pack(sequences)
    rho = (row.old_logprobs - row.behaviour_logprobs).exp() if row.old_logprobs is not None else row.logprobs
    keep = (rho >= low * 0.999) & (rho <= high)
    _, plain_gradient, plain = loss_and_gradient(sequences, method=method_of("decoupled_ppo", **columns))
    _, gradient, sums = loss_and_gradient(sequences, method=masked)
    assert gradient == pytest.approx([slope * kept for slope, kept in zip(plain_gradient, keep.tolist(), strict=True)])
    for count in ("tokens_sum", "sequences_sum"):
        assert float(sums.meters[count]) == float(plain.meters[count])


def test_a_filtered_group_leaves_numerator_and_denominator_a_masked_one_only_the_numerator() -> None:
    """DAPO's filter takes tokens out of the global count; a mask over the same sequence does not."""
    kept, gone = UNEVEN
    filtered, _, _ = whole_step([[kept]], method=method_of("dapo"))
    masked = method_of("grpo", masks={"name": "version_withhold", "bound": 0})
    withheld, _, _ = whole_step([[changed(kept, versions=[5] * 3), changed(gone, versions=[4])]], method=masked)
    assert filtered == pytest.approx(-3 / 3)
    assert withheld == pytest.approx(-3 / 4)


def test_sample_weights_multiply_numerators_and_leave_counts_alone() -> None:
    weighted = [changed(UNEVEN[0], weight=4.0), changed(UNEVEN[1], weight=0.0)]
    loss, gradient, sums = loss_and_gradient(weighted, method=method_of("grpo"))
    assert loss == pytest.approx(-12.0)
    assert gradient == pytest.approx([-4.0, -4.0, -4.0, 0.0])
    assert float(sums.meters["tokens_sum"]) == 4


@pytest.mark.parametrize("eps", [1.0, 0.5, 0.1])
def test_an_unbiased_stop_leaves_the_expected_gradient_unchanged(eps: float) -> None:
    """Enumerated: with probability eps the row weighs 1/eps, else 0; the denominator counts it either way."""
    method = method_of("rloo_early_stop", auxiliary={"name": "entropy_bonus", "coef": 0.1}, kl="k3")
    seq = sample(11)[1]

    def gradient(weight: float) -> list[float]:
        return loss_and_gradient([changed(seq, weight=weight)], method=method)[1]

    expected = [eps * on + (1 - eps) * off for on, off in zip(gradient(1 / eps), gradient(0.0), strict=True)]
    assert expected == pytest.approx(gradient(1.0))


def test_log_ratios_beyond_the_limit_are_clamped_and_stay_finite() -> None:
    method = method_of("reinforce_is", objective={"cap": 1e12})
    loss, gradient, _ = loss_and_gradient([single(-1.0, behaviour=-500.0, advantage=1.0)], method=method, dtype=torch.float32)
    assert gradient[0] == pytest.approx(-math.exp(20), rel=1e-5)
    assert math.isfinite(loss)
    below, slope, _ = loss_and_gradient([single(-1e4, behaviour=-1.0, advantage=-1.0)], method=method, dtype=torch.float32)
    assert math.isfinite(below)
    assert math.isfinite(slope[0])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_inputs_are_upcast_before_any_difference_is_taken(dtype: torch.dtype) -> None:
    """-10.0625 and -10 differ in bfloat16 by an exact 1/16; e^(1/16) - 1 computed there would be 0.0625, not 0.0645."""
    method = method_of("grpo", proximal="engine", weight="none")
    narrow = pack([single(-10.0, behaviour=-10.0625, advantage=1.0)], dtype=dtype)
    sums = policy_loss(narrow, method=method)
    assert sums.loss.dtype == torch.float32
    assert float(sums.loss.detach()) == pytest.approx(-math.exp(0.0625), abs=1e-6)


def test_float64_stays_float64() -> None:
    assert policy_loss(pack(UNEVEN), method=method_of("grpo")).loss.dtype == torch.float64


def test_a_number_that_is_not_finite_where_a_token_trains_reaches_the_loss() -> None:
    """It is a failure of the forward pass, and hiding it would train on."""
    loss, _, _ = loss_and_gradient([single(math.nan, behaviour=-1.0, advantage=1.0)], method=method_of("gpg"))
    assert math.isnan(loss)


def test_positive_nll_is_the_mean_over_tokens_of_correct_sequences() -> None:
    method = method_of("grpo", advantage="none", auxiliary={"name": "positive_nll", "coef": 0.5})
    right = Seq(logprobs=[-1.0, -3.0], behaviour=[-1.0, -3.0], advantages=[0.0] * 2, correct=True)
    wrong = Seq(logprobs=[-7.0] * 6, behaviour=[-7.0] * 6, advantages=[0.0] * 6)
    assert whole_step([[right], [wrong]], method=method)[0] == pytest.approx(0.5 * 2.0)
    assert whole_step([[wrong]], method=method)[0] == 0.0


def test_entropy_bonus_rewards_entropy_on_every_trained_token() -> None:
    method = method_of("grpo", auxiliary={"name": "entropy_bonus", "coef": 0.25})
    seq = Seq(logprobs=[-1.0, -1.0], behaviour=[-1.0, -1.0], advantages=[0.0, 0.0], entropy=[2.0, 9.0], loss_mask=[True, False])
    assert loss_and_gradient([seq], method=method)[0] == pytest.approx(-0.5)


@pytest.mark.parametrize(("step", "share"), [(0, 1.0), (5, 0.75), (10, 0.5), (25, 0.5)])
def test_a_coefficient_fades_in_a_straight_line_and_then_stays(step: int, share: float) -> None:
    fading = {"coef": 0.5, "final": 0.25, "fade_steps": 10}
    for columns, names in (
        ({"auxiliary": {"name": "entropy_bonus", **fading}}, "loss_entropy_bonus_total"),
        ({"kl": {"name": "k3", "beta": 0.5, "final": 0.25, "fade_steps": 10}}, "loss_kl_total"),
    ):
        rows = [pack(sample(2), trained_version=version) for version in (0, step)]
        first, now = (float(policy_loss(row, method=method_of("grpo", **columns)).meters[names]) for row in rows)
        assert now == pytest.approx(share * first)


def test_an_empty_completion_counts_as_a_sequence_and_adds_nothing() -> None:
    empty = changed(UNEVEN[0], loss_mask=[False] * 3)
    method = method_of("grpo", aggregation="seq-mean-token-mean")
    assert whole_step([[UNEVEN[1], empty]], method=method)[0] == pytest.approx(2.0 / 2)


def test_denominator_of_a_step_without_tokens_is_one() -> None:
    assert [denominator(mode, num_tokens=0, num_sequences=0, max_tokens=8) for mode in Aggregation] == [1.0] * len(Aggregation)


def test_columns_of_unequal_length_are_refused_with_their_name() -> None:
    row = pack(UNEVEN)
    with pytest.raises(ValueError, match="versions has shape"):
        dataclasses.replace(row, versions=row.versions[:-1])
    with pytest.raises(ValueError, match=r"expected torch\.bool"):
        dataclasses.replace(row, loss_mask=row.loss_mask.int())


@pytest.mark.parametrize("name", [name for name in EVERY_METHOD if name != "segments"])
def test_every_tensor_is_made_where_the_row_lives(name: str) -> None:
    """On torch's "meta" tensors a mixture with host tensors fails as it would on a GPU. Counting runs needs their values, so not here."""
    row = pack(sample(1))
    tensors = {field: value for field in row.__dataclass_fields__ if isinstance(value := getattr(row, field), torch.Tensor)}
    elsewhere = {field: value.detach().to("meta").requires_grad_(field in ("logprobs", "divergence")) for field, value in tensors.items()}
    sums = policy_loss(dataclasses.replace(row, **elsewhere), method=EVERY_METHOD[name], statistics=StepStatistics())
    sums.loss.backward()
    assert {value.device.type for value in (sums.loss, *sums.meters.values())} == {"meta"}
