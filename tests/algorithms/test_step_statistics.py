"""Numbers of a whole step that some rules need before the first backward pass."""

from __future__ import annotations

import math
import random
import threading
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from pipelinerl.algorithms.loss import TokenColumns, measure_step, policy_loss
from pipelinerl.algorithms.loss.columns import StepStatistics
from pipelinerl.algorithms.loss.step_statistics import covariance, second_moments, uniform_draws
from pipelinerl.algorithms.method import Method
from tests.algorithms.rows import Seq, method_of, pack, random_seq


def alone(tensor: Tensor) -> Tensor:
    return tensor


def measured(rows: list[TokenColumns], *, method: Method) -> StepStatistics:
    statistics = measure_step(rows, method=method, reduce=alone)
    assert statistics is not None
    return statistics


def measured_by_ranks(shards: list[list[TokenColumns]], *, method: Method) -> list[StepStatistics | None]:
    """One thread per rank, joined by a sum that every rank must reach equally often."""
    barrier = threading.Barrier(len(shards), timeout=20)
    slots: list[Tensor] = [torch.zeros(0)] * len(shards)
    results: list[StepStatistics | None] = [None] * len(shards)

    def reduce_of(rank: int) -> Callable[[Tensor], Tensor]:
        def reduce(tensor: Tensor) -> Tensor:
            slots[rank] = tensor
            barrier.wait()
            total = torch.stack(slots).sum(0)
            barrier.wait()
            return total

        return reduce

    def run(rank: int) -> None:
        results[rank] = measure_step(shards[rank], method=method, reduce=reduce_of(rank))

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(shards))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results


def rows_of(seed: int, num_rows: int = 4) -> list[TokenColumns]:
    generator = random.Random(seed)
    return [pack([random_seq(generator, length=generator.randint(1, 9)) for _ in range(3)]) for _ in range(num_rows)]


def kept_by_sorting(values: list[float], tau: float) -> int:
    """How many of the smallest values have a mean below tau."""
    values = sorted(values)
    return max((k for k in range(len(values) + 1) if k == 0 or sum(values[:k]) / k < tau), default=0)


@given(st.integers(0, 10**6), st.floats(0.001, 0.2))
@settings(max_examples=25)
def test_m2po_keeps_as_many_tokens_as_sorting_all_of_them_would(seed: int, tau: float) -> None:
    rows = rows_of(seed)
    squares = [second_moments(row)[row.loss_mask] for row in rows]
    flat = torch.cat(squares)
    statistics = measured(rows, method=method_of("m2po", masks={"name": "m2po", "tau": tau}))
    assert int((flat <= statistics.m2po_threshold).sum()) == kept_by_sorting(flat.double().tolist(), tau)


@pytest.mark.parametrize("name", ["m2po", "kl_cov", "clip_cov", "vapo"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_every_rank_gets_the_numbers_of_one_process(name: str, ranks: int) -> None:
    rows = rows_of(2)
    method = method_of(name)
    expected = measured(rows, method=method)
    shards = [rows[rank::ranks] for rank in range(ranks - 1)] + [rows[ranks - 1 :: ranks]]
    for got in measured_by_ranks(shards, method=method):
        assert got is not None
        for field in StepStatistics.__dataclass_fields__:
            assert getattr(got, field) == pytest.approx(getattr(expected, field), rel=1e-12)


def test_a_rank_without_rows_takes_part_and_gets_the_same_numbers() -> None:
    rows = rows_of(4)
    method = method_of("m2po")
    first, second = measured_by_ranks([rows, []], method=method)
    assert first == second == measured(rows, method=method)


def test_covariance_is_centred_on_the_whole_step() -> None:
    rows = rows_of(6)
    statistics = measured(rows, method=method_of("kl_cov", objective={"fraction": 0.1}))
    advantages = torch.cat([row.advantages[row.loss_mask] for row in rows])
    old = torch.cat([row.old_logprobs[row.loss_mask] for row in rows if row.old_logprobs is not None])
    expected = (advantages - advantages.mean()) * (old - old.mean())
    got = torch.cat([covariance(row, statistics=statistics)[row.loss_mask] for row in rows])
    torch.testing.assert_close(got.double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("fraction", [0.05, 0.3, 1.0])
def test_kl_cov_chooses_the_tokens_of_largest_covariance(fraction: float) -> None:
    """Also where that reaches down to negative ones."""
    rows = rows_of(8)
    statistics = measured(rows, method=method_of("kl_cov", objective={"fraction": fraction}))
    values = torch.cat([covariance(row, statistics=statistics)[row.loss_mask] for row in rows])
    wanted = max(1, int(fraction * len(values)))
    assert statistics.covariance_threshold == float(values.sort(descending=True).values[wanted - 1])


def test_clip_cov_zeroes_about_its_fraction_and_the_same_tokens_in_any_packing() -> None:
    generator = random.Random(1)
    sequences = [random_seq(generator, length=400, holes=False) for _ in range(10)]
    method = method_of("clip_cov", objective={"fraction": 0.1, "low": 0.01, "high": 100.0, "clip_low": 1.0, "clip_high": 1e6})

    def zeroed(rows: list[TokenColumns]) -> list[bool]:
        statistics = measured(rows, method=method)
        found: list[bool] = []
        for row in rows:
            policy_loss(row, method=method, statistics=statistics).loss.backward()
            assert row.logprobs.grad is not None
            found += (row.logprobs.grad == 0).tolist()
        return found

    whole = zeroed([pack(sequences)])
    assert 0.08 * 4000 < sum(whole) < 0.12 * 4000
    assert zeroed([pack(sequences[:3]), pack(sequences[3:])]) == whole


def test_draws_are_uniform_and_differ_between_steps() -> None:
    generator = random.Random(9)
    seq = random_seq(generator, length=20000, holes=False)
    draws = uniform_draws(pack([seq]))
    counts = torch.histc(draws, bins=10, min=0, max=1)
    assert ((counts - 2000).abs() < 5 * math.sqrt(2000)).all()
    assert abs(float(torch.corrcoef(torch.stack([draws, torch.tensor(seq.old, dtype=torch.float64)]))[0, 1])) < 0.03
    later = uniform_draws(pack([seq], trained_version=6))
    assert abs(float(torch.corrcoef(torch.stack([draws, later]))[0, 1])) < 0.03


def test_nothing_is_measured_for_a_method_that_compares_no_tokens() -> None:
    assert measure_step(rows_of(1), method=method_of("grpo"), reduce=alone) is None


def test_positive_scale_is_zero_where_no_sequence_is_correct() -> None:
    wrong = Seq(logprobs=[-1.0], behaviour=[-1.0], advantages=[0.0])
    assert measured([pack([wrong])], method=method_of("vapo")).positive_scale == 0.0
