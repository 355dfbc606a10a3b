"""Experts computed one by one: two of them over two features, by hand."""

from __future__ import annotations

import pytest
import torch

from pipelinerl.engine.vllm.experts import compute_experts

GATE_UP = torch.tensor([[[1.0, 0], [0, 1]], [[0, 1], [1, 0]]])
"""The first expert's gate is the first feature, and the second the other way round."""
DOWN = torch.tensor([[[3.0], [0]], [[0], [5]]])
BIAS = torch.tensor([[1.0, 0], [0, 0]])
BIAS_DOWN = torch.tensor([[1.0, 1], [0, 0]])


@pytest.mark.parametrize(
    ("chosen", "biases", "expected"),
    [
        ([[0, 1]], (None, None), [[0.25 * 6, 0.75 * 10]]),
        ([[1, 0]], (None, None), [[0.75 * 6, 0.25 * 10]]),
        ([[0, -1]], (None, None), [[0.25 * 6, 0.0]]),
        ([[0, 1]], (BIAS, BIAS_DOWN), [[0.25 * 13, 0.25 * 1 + 0.75 * 10]]),
    ],
    ids=["both", "the other way round", "one is another rank's", "with biases"],
)
def test_a_token_gets_the_weighted_sum_of_its_experts(
    chosen: list[list[int]], biases: tuple[torch.Tensor | None, torch.Tensor | None], expected: list[list[float]]
):
    found = compute_experts(
        torch.tensor([[1.0, 2.0]]),
        gate_up=GATE_UP,
        down=DOWN,
        biases=biases,
        chosen=torch.tensor(chosen),
        weights=torch.tensor([[0.25, 0.75]]),
        activation=lambda gate: gate,
    )
    assert found.tolist() == expected


def test_each_token_goes_to_its_own():
    hidden = torch.tensor([[1.0, 2.0], [10.0, 20.0]])
    found = compute_experts(
        hidden,
        gate_up=GATE_UP,
        down=DOWN,
        biases=(None, None),
        chosen=torch.tensor([[0], [1]]),
        weights=torch.ones(2, 1),
        activation=lambda gate: gate,
    )
    assert found.tolist() == [[6, 0], [0, 1000]]
