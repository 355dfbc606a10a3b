"""Losses of the models that judge."""

from __future__ import annotations

import math

import pytest
import torch

from pipelinerl.algorithms.loss.columns import Segments
from pipelinerl.algorithms.loss.critic import clipped_value_loss, huber_value_loss, implicit_prm_loss


def value_loss(value: float, *, old: float, target: float) -> tuple[float, int, float]:
    leaf = torch.tensor([value, float("nan")], dtype=torch.float64, requires_grad=True)
    loss, clipped = clipped_value_loss(
        leaf,
        old_values=torch.tensor([old, 0.0]),
        returns=torch.tensor([target, float("inf")]),
        loss_mask=torch.tensor([True, False]),
        clip=0.5,
    )
    loss.backward()
    assert leaf.grad is not None
    assert leaf.grad[1] == 0
    return float(loss.detach()), int(clipped), float(leaf.grad[0])


def test_value_clip_takes_the_larger_loss_around_the_old_value() -> None:
    assert value_loss(2.0, old=0.0, target=2.0) == (pytest.approx(0.5 * 1.5**2), 1, 0.0)
    assert value_loss(2.0, old=0.0, target=-1.0) == (pytest.approx(4.5), 0, pytest.approx(3.0))
    assert value_loss(0.3, old=0.0, target=1.0) == (pytest.approx(0.245), 0, pytest.approx(-0.7))


def test_implicit_prm_loss_is_the_cross_entropy_of_the_summed_log_ratio() -> None:
    phi = torch.tensor([-1.0, -2.0, -1e4, -0.5], dtype=torch.float64, requires_grad=True)
    loss_mask = torch.tensor([True, True, False, True])
    sequences = Segments(torch.tensor([0, 0, 0, 1]), loss_mask, 2)
    reference = torch.tensor([-2.0, -2.5, -3.0, -0.1], dtype=torch.float64)
    loss, num_right = implicit_prm_loss(
        phi, reference_logprobs=reference, correct=torch.tensor([True, False]), sequences=sequences, beta=0.5
    )
    first, second = 0.5 * 1.5, 0.5 * -0.4
    assert float(loss.detach()) == pytest.approx(math.log(1 + math.exp(-first)) + math.log(1 + math.exp(second)))
    assert int(num_right) == 2, "logits of 0.75 and -0.2"
    loss.backward()
    assert phi.grad is not None
    assert phi.grad[2] == 0
    assert phi.grad[0] < 0 < phi.grad[3]


def test_huber_loss_is_square_within_delta_and_a_line_beyond() -> None:
    values = torch.tensor([0.5, -3.0, float("nan")], dtype=torch.float64, requires_grad=True)
    loss, beyond = huber_value_loss(values, returns=torch.tensor([0.0, 0.0, 1.0]), loss_mask=torch.tensor([True, True, False]), delta=1.0)
    loss.backward()
    assert values.grad is not None
    assert (float(loss.detach()), int(beyond)) == (pytest.approx(0.125 + 2.5), 1)
    assert values.grad.tolist() == [0.5, -1.0, 0.0]
