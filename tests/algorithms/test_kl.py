"""Penalties towards a reference policy."""

from __future__ import annotations

import math

import pytest
import torch

from pipelinerl.algorithms.loss import TokenColumns, kl
from pipelinerl.algorithms.loss.call import call_rule
from pipelinerl.algorithms.loss.correction import terms_of
from pipelinerl.algorithms.method import Rule
from pipelinerl.algorithms.rules import rule_from
from tests.algorithms.rows import DIVERGES, Seq, loss_and_gradient, method_of


@pytest.mark.parametrize(("d", "expected"), [(0.1, 0.0051709), (-0.1, 0.0048374), (1.0, 0.7182818), (-1.0, 0.3678794), (0.0, 0.0)])
def test_k3_by_hand(d: float, expected: float) -> None:
    assert float(kl.estimate_k3(torch.tensor(d, dtype=torch.float64))) == pytest.approx(expected, abs=1e-7)


def with_reference(logprob: float, reference: float, *, old: float | None = None) -> Seq:
    return Seq(logprobs=[logprob], old=[logprob if old is None else old], behaviour=[-1.0], reference=[reference], advantages=[0.0])


X, REF = -0.8, -1.3
D = REF - X


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", -D, 1.0),
        ("k2", D**2 / 2, -D),
        ("k3", math.exp(D) - D - 1, 1 - math.exp(D)),
        ("k3_plus", math.exp(D) - D - 1, -D),
        ("full", DIVERGES * D**2, -2 * DIVERGES * D),  # of the trainer's divergence, here some function of the policy
        ("unbiased", math.exp(D) - D - 1, (1 - math.exp(D)) + (math.exp(D) - D - 1)),
    ],
)
def test_penalty_has_its_value_and_its_gradient(kind: str, value: float, slope: float) -> None:
    """k3+ and the unbiased form agree with k3 in value at the first update, and differ from it and each other in gradient."""
    method = method_of("grpo", proximal="recomputed", kl={"name": kind, "beta": 0.5})
    loss, gradient, _ = loss_and_gradient([with_reference(X, REF)], method=method)
    assert loss == pytest.approx(0.5 * value)
    assert gradient == pytest.approx([0.5 * slope])


def test_unbiased_penalty_is_weighted_by_the_ratio_to_the_proximal_policy() -> None:
    method = method_of("grpo", proximal="recomputed", kl={"name": "unbiased", "beta": 1.0})
    loss, _, _ = loss_and_gradient([with_reference(X, REF, old=X - 0.2)], method=method)
    assert loss == pytest.approx(math.exp(0.2) * (math.exp(D) - D - 1))


def expected_gradient(kind: str, logits: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """E over tokens of the policy of the gradient of the penalty, enumerated."""
    leaf = logits.clone().requires_grad_(True)
    logprobs = leaf.log_softmax(0)
    columns = TokenColumns(
        logprobs=logprobs,
        behaviour_logprobs=logprobs.detach(),
        reference_logprobs=reference,
        advantages=torch.zeros(3),
        loss_mask=torch.ones(3, dtype=torch.bool),
        versions=torch.zeros(3, dtype=torch.int32),
        sequence_ids=torch.zeros(3, dtype=torch.int64),
        trained_version=0,
    )
    penalties = call_rule(rule_from("kl", {"name": kind, "beta": 1.0}), terms_of(columns, proximal=Rule(name="engine")), column="kl")
    (logprobs.detach().exp() * penalties).sum().backward()
    assert leaf.grad is not None
    return leaf.grad


def test_expected_gradients_are_what_the_module_says() -> None:
    logits = torch.tensor([0.3, -0.4, 1.1], dtype=torch.float64)
    reference = torch.tensor([0.1, 0.2, -0.5], dtype=torch.float64).log_softmax(0)

    def gradient_of(divergence: str) -> torch.Tensor:
        leaf = logits.clone().requires_grad_(True)
        logprobs = leaf.log_softmax(0)
        terms = logprobs.exp() * (logprobs - reference) if divergence == "policy" else reference.exp() * (reference - logprobs)
        terms.sum().backward()
        assert leaf.grad is not None
        return leaf.grad

    torch.testing.assert_close(expected_gradient("k1", logits, reference), torch.zeros(3, dtype=torch.float64))
    torch.testing.assert_close(expected_gradient("k2", logits, reference), gradient_of("policy"))
    torch.testing.assert_close(expected_gradient("k3_plus", logits, reference), gradient_of("policy"))
    torch.testing.assert_close(expected_gradient("k3", logits, reference), gradient_of("reference"))


def test_penalty_covers_tokens_that_a_mask_rejects() -> None:
    method = method_of("decoupled_ppo", kl="k3", masks={"name": "outlier_band", "high": 1.0})
    loss, _, sums = loss_and_gradient([with_reference(X, REF)], method=method)
    assert float(sums.meters["outlier_band_dropped_fraction_sum"]) == 1
    assert loss == pytest.approx(0.04 * (math.exp(D) - D - 1))
