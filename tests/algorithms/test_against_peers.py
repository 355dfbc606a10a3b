"""The same numbers through functions of verl and OpenRLHF and ours. The file is made by `golden/make_peer_values.py`."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.algorithms.advantage import group_advantages
from pipelinerl.algorithms.advantage.optimal_baseline import energy
from pipelinerl.algorithms.advantage.outcome import ScoredGroup
from pipelinerl.algorithms.loss import StepStatistics, measure_step
from pipelinerl.algorithms.method import Method
from pipelinerl.errors import ConfigError
from tests.algorithms.rows import Seq, loss_and_gradient, method_of, pack

GOLDEN: dict[str, Any] = json.loads(Path(__file__).with_name("golden").joinpath("peer_values.json").read_text())


@pytest.mark.parametrize(("case", "kind"), [("k3_verl", "k3"), ("k3_openrlhf", "k3"), ("k3_plus_verl", "k3_plus")])
def test_penalties_are_those_of_the_peers_where_they_clamp_and_where_not(case: str, kind: str) -> None:
    """In value and gradient. Beyond +-20 verl's k3+ has k2's unbounded slope, and ours stands still."""
    method = method_of("grpo", kl={"name": kind, "beta": 1.0}, aggregation="token-sum")
    for gap, value, slope in zip(GOLDEN["gaps"], GOLDEN[case]["values"], GOLDEN[case]["slopes"], strict=True):
        if kind == "k3_plus" and abs(gap) > 20:
            continue
        row = Seq(logprobs=[-30.0], behaviour=[-30.0], old=[-30.0], reference=[-30.0 + gap], advantages=[0.0])
        loss, gradient, _ = loss_and_gradient([row], method=method)
        assert loss == pytest.approx(value, rel=1e-5, abs=1e-7), gap  # OpenRLHF counts in float32
        assert gradient[0] == pytest.approx(slope, rel=1e-5, abs=1e-7), gap


def test_one_far_token_cannot_outweigh_a_batch() -> None:
    """Without the clamp a token at 10 nats has 22,025 times the slope of one at 1; with it, none."""
    method = method_of("grpo", kl={"name": "k3", "beta": 1.0}, aggregation="token-sum")
    open_ended = method_of("grpo", kl={"name": "k3", "beta": 1.0, "clamp": 0.0}, aggregation="token-sum")
    row = Seq(logprobs=[-30.0] * 2, behaviour=[-30.0] * 2, reference=[-20.0, -29.0], advantages=[0.0] * 2)
    assert loss_and_gradient([row], method=method)[1] == pytest.approx([0.0, 1 - np.e])
    assert loss_and_gradient([row], method=open_ended)[1] == pytest.approx([1 - np.exp(10), 1 - np.e])


@pytest.mark.parametrize("handles", [False, True])
def test_optimal_baseline_is_that_of_verl_with_and_without_its_zero_tail(handles: bool) -> None:
    golden = GOLDEN["optimal_baseline"]
    method = method_of("otb", advantage={"handle_zero_tail": handles})
    lengths, groups = np.array(golden["lengths"]), np.array(golden["groups"])
    for group in np.unique(groups):
        members = np.flatnonzero(groups == group)
        energies = tuple(
            energy(
                np.exp(np.array(golden["logprobs"][row][: lengths[row]])),
                square_sums=np.array(golden["square_sums"][row][: lengths[row]]),
                importance=np.ones(lengths[row]),
            )
            for row in members
        )
        scored = ScoredGroup(rewards=np.array(golden["rewards"])[members], lengths=lengths[members], energies=energies)
        for row, credit in zip(members, group_advantages(scored, method=method), strict=True):
            assert credit == pytest.approx(golden["advantages"][str(handles)][row][: lengths[row]], abs=1e-7)


NORMALIZED: dict[str, dict[str, Any]] = {
    "token": {"name": "tis_token", "cap": 1.3},
    "sequence": {"name": "tis_sequence", "cap": 1.5},
    "icepop": {"name": "icepop", "low": 0.6, "high": 1.7},
}


@pytest.mark.parametrize("num_ranks", [1, 2, 5])
@pytest.mark.parametrize("case", NORMALIZED)
def test_normalized_weights_are_those_of_verl_however_many_ranks_hold_the_step(case: str, num_ranks: int) -> None:
    """With A = -1 the slope of a token's loss is its weight; verl divides by the mean over its whole batch, on all ranks."""
    golden = GOLDEN["normalized_weights"]
    method = method_of("grpo_tis", weight={**NORMALIZED[case], "batch_normalize": True}, aggregation="token-sum")
    log_ratios = [row[:length] for row, length in zip(golden["log_ratio"], golden["lengths"], strict=True)]
    sequences = [Seq(logprobs=[-1.0] * len(row), behaviour=[-1.0 - gap for gap in row], advantages=[-1.0] * len(row)) for row in log_ratios]
    parts = [sequences[rank::num_ranks] for rank in range(num_ranks)]
    statistics = measured_on_ranks(parts, method=method)
    assert statistics.mean_weight == pytest.approx(golden["cases"][case]["mean"], rel=1e-6)
    expected = [row[:length] for row, length in zip(golden["cases"][case]["weights"], golden["lengths"], strict=True)]
    for rank, part in enumerate(parts):
        slopes = loss_and_gradient(part, method=method, statistics=statistics)[1]
        assert slopes == pytest.approx([weight for row in expected[rank::num_ranks] for weight in row], rel=1e-6)


def measured_on_ranks(parts: list[list[Seq]], *, method: Method) -> StepStatistics:
    """The statistics that each of several ranks gets, which are the same on all."""
    ranks = len(parts)
    barrier, sums, found = threading.Barrier(ranks), [torch.zeros(0)] * ranks, [StepStatistics()] * ranks

    def run(rank: int) -> None:
        def reduce(tensor: torch.Tensor) -> torch.Tensor:
            sums[rank] = tensor
            barrier.wait(10)
            total = torch.stack(sums).sum(0)
            barrier.wait(10)
            return total

        statistics = measure_step([pack(parts[rank])] if parts[rank] else [], method=method, reduce=reduce)
        assert statistics is not None
        found[rank] = statistics

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(statistics == found[0] for statistics in found)
    return found[0]


def test_weights_that_are_all_zero_are_divided_by_nothing() -> None:
    method = method_of("grpo_tis", weight={"name": "mis_token", "cap": 1.0, "batch_normalize": True}, aggregation="token-sum")
    rows = [Seq(logprobs=[-1.0] * 3, behaviour=[-2.0] * 3, advantages=[1.0] * 3)]
    statistics = measured_on_ranks([rows], method=method)
    assert statistics.mean_weight == 1.0
    assert loss_and_gradient(rows, method=method, statistics=statistics)[1] == [0.0] * 3


def test_normalized_weights_before_masks_are_refused() -> None:
    columns: dict[str, Any] = {"proximal": "recomputed", "weight": {"name": "tis_sequence", "batch_normalize": True}, "masks": "ratio_band"}
    with pytest.raises(ConfigError, match="got mask_order 'before_weight', expected 'after_weight'"):
        method_of("grpo", **columns, mask_order="before_weight")
    assert method_of("grpo", **columns, mask_order="after_weight").weight.options["batch_normalize"] is True


def test_the_zero_tail_acts_in_the_golden_file() -> None:
    assert GOLDEN["optimal_baseline"]["advantages"]["False"] != GOLDEN["optimal_baseline"]["advantages"]["True"]
