"""Which methods have no gradient where a sequence has no advantage: what is said is what autograd says, for every row of the table."""

from __future__ import annotations

import dataclasses

import pytest

from pipelinerl.algorithms.loss import measure_step, policy_loss
from pipelinerl.algorithms.method import Method, Need, Rule
from pipelinerl.algorithms.rules import COLUMNS, makes_advantages_in_trainer
from pipelinerl.algorithms.signal import SCALES_WITH_ADVANTAGE, gradient_needs_advantage
from tests.algorithms.every_method import EVERY_METHOD, EVERY_RULE, sample
from tests.algorithms.rows import changed, method_of, pack

EVERYTHING = EVERY_METHOD | EVERY_RULE
OF_THEIR_OWN = {"opd", "gkd", "kimi", "dro", "kl_cov"}
"""Objectives with a term beside the advantage."""


def _moves(method: Method) -> bool:
    """Whether sequences without an advantage move the policy."""
    columns = pack([changed(seq, advantages=[0.0] * len(seq.logprobs)) for seq in sample(3)])
    assert columns.entropy is not None
    columns.entropy.requires_grad_()
    statistics = measure_step([columns], method=method, reduce=lambda sums: sums) if Need.WHOLE_STEP in method.needs else None
    policy_loss(columns, method=method, statistics=statistics).loss.backward()
    found = [tensor.grad for tensor in (columns.logprobs, columns.entropy) if tensor.grad is not None]
    return any(bool(gradient.any()) for gradient in found)


@pytest.mark.parametrize("name", EVERYTHING)
def test_what_is_said_to_need_an_advantage_has_no_gradient_without_one(name: str) -> None:
    method = EVERYTHING[name]
    if gradient_needs_advantage(method):
        assert not _moves(method)
    elif method.objective.name in SCALES_WITH_ADVANTAGE and not makes_advantages_in_trainer(method) and method.critic.name == "none":
        assert _moves(method), "its backward pass could be saved"


@pytest.mark.parametrize("name", COLUMNS["objective"])
def test_every_objective_is_on_the_right_side(name: str) -> None:
    assert (name in SCALES_WITH_ADVANTAGE) != (name in OF_THEIR_OWN), "say whether it is a product with the advantage"
    needs_engine = {"dppo_kl": {"threshold": 0.02}, "ipo": {"threshold": 0.1}, "kimi": {"tau": 0.5}, "dro": {"beta": 0.5}}
    options = {"kl_cov": {"fraction": 0.5}, "clip_cov": {"fraction": 0.5}} | needs_engine
    own_signal = {"advantage": "none"} if name in ("opd", "gkd") else {}
    method = method_of("grpo", objective={"name": name} | options.get(name, {}), proximal="engine", weight="none", **own_signal)
    assert _moves(method) == (name in OF_THEIR_OWN)


def test_a_users_own_objective_is_computed_whatever_the_advantages() -> None:
    plain = method_of("grpo")
    assert gradient_needs_advantage(plain)
    assert not gradient_needs_advantage(dataclasses.replace(plain, objective=Rule(name="my_loss.py:f")))
