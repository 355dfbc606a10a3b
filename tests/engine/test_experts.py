"""Experts of a mixture computed from plain weights; what they make of a token is worked out by hand."""

from __future__ import annotations

import enum
import math

import pytest
import torch

from pipelinerl.engine.vllm_experts import sum_experts


class Activation(enum.Enum):
    """vLLM's own has more."""

    SILU = "silu"


GATES, UPS, OUTS = (1.0, 2.0, -1.0), (1.0, 3.0, 5.0), (1.0, 10.0, 100.0)
"""Of three experts with one value inside, which make x into out * silu(gate * x) * up * x."""
CHOICES = ((0, 1), (2, 1))
SHARES = ((0.75, 0.25), (0.5, 0.5))


def made(expert: int, x: float) -> float:
    inner = GATES[expert] * x
    return OUTS[expert] * inner / (1 + math.exp(-inner)) * UPS[expert] * x


@pytest.mark.parametrize(("here", "is_weighted_before"), [((0, 1, 2), False), ((1,), False), ((2, 0), False), ((0, 1, 2), True)])
def test_a_token_gets_what_its_experts_here_make_of_it_in_their_shares(here: tuple[int, ...], is_weighted_before: bool):
    """Ranks hold some of the experts, and their sums are added up: what another one holds counts as nothing here."""
    expert_map = torch.tensor([here.index(expert) if expert in here else -1 for expert in range(3)], dtype=torch.int32)
    output = torch.full((2, 1), 7.0)
    sum_experts(
        output=output,
        hidden_states=torch.tensor([[1.0], [-0.5]]),
        w1=torch.tensor([[[GATES[expert]], [UPS[expert]]] for expert in here]),
        w2=torch.tensor([[[OUTS[expert]]] for expert in here]),
        topk_weights=torch.tensor(SHARES),
        topk_ids=torch.tensor(CHOICES, dtype=torch.int32),
        activation=Activation.SILU,
        expert_map=None if here == (0, 1, 2) else expert_map,
        apply_router_weight_on_input=is_weighted_before,
        a1q_scale=None,
    )
    expected = [
        sum(
            (1.0 if is_weighted_before else share) * made(expert, x) for expert, share in zip(choice, shares, strict=True) if expert in here
        )
        for x, choice, shares in zip((1.0, -0.5), CHOICES, SHARES, strict=True)
    ]
    assert output.view(-1).tolist() == pytest.approx(expected, rel=1e-5)
