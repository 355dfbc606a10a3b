"""Experts of a mixture on CPUs, computed from their weights as a checkpoint has them.

vLLM repacks experts for its CPU kernel: no policy can be taken into that without repacking it inside the pause. And the kernel knows no
expert parallelism: it takes an expert's number for its place among those that a rank holds. Here they stay plain, and each expert that has
tokens is two matrix products. The kernel is faster; by how much is not measured in this project.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional

_ACTIVATIONS = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda gate: functional.gelu(gate, approximate="tanh"),
}
"""Of the gate, whose product with `up` goes on. Experts with another are left to vLLM, and can take no policies."""


def keep_plain_experts() -> None:
    """Have vLLM leave experts as they are loaded; must run before a model is. A vLLM that has other classes for them keeps its ways."""
    try:
        from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
    except ImportError:
        return
    kernel: Any = CPUUnquantizedExperts
    repack, apply_packed = kernel.process_weights_after_loading, kernel.apply
    if getattr(kernel, "can_be_plain", False):
        return

    def leave(experts: Any, layer: torch.nn.Module) -> None:
        experts.is_plain = experts.moe_config.activation.value in _ACTIVATIONS
        if not experts.is_plain:
            repack(experts, layer)

    def apply(experts: Any, *arguments: Any, **named: Any) -> None:
        if experts.is_plain:
            sum_experts(**named, bias=experts.w1_bias, bias_out=experts.w2_bias)
        else:
            apply_packed(experts, *arguments, **named)

    kernel.process_weights_after_loading, kernel.apply, kernel.can_be_plain = leave, apply, True


def are_plain(kernel: Any) -> bool:
    """Whether the experts behind a layer's kernel compute with the parameters they were loaded into."""
    return getattr(getattr(kernel, "fused_experts", None), "is_plain", False)


def sum_experts(
    *,
    output: torch.Tensor,
    hidden_states: torch.Tensor,
    w1: torch.Tensor,
    w2: torch.Tensor,
    topk_weights: torch.Tensor,
    topk_ids: torch.Tensor,
    activation: Any,
    expert_map: torch.Tensor | None,
    apply_router_weight_on_input: bool,
    bias: torch.Tensor | None = None,
    bias_out: torch.Tensor | None = None,
    **_: Any,
) -> None:
    """Write into `output` [T, H] the sum of what those of a token's experts that are here make of it, each times its weight.

    `hidden_states` [T, H]; `w1` [E, 2 I, H], gate above up, and `w2` [E, H, I] of the E experts here, with biases [E, 2 I] and [E, H];
    `topk_weights` and `topk_ids` [T, k], numbered over all ranks; `expert_map` [all experts]: which of those here it is, or -1.
    """
    total = torch.zeros(output.shape, dtype=torch.float32)
    here = topk_ids.long() if expert_map is None else expert_map[topk_ids.long()]
    for expert in here.unique().tolist():
        if expert < 0:
            continue
        tokens, choice = torch.where(here == expert)
        gate, up = functional.linear(hidden_states[tokens], w1[expert], None if bias is None else bias[expert]).chunk(2, dim=-1)
        inner = _ACTIVATIONS[activation.value](gate) * up
        made = functional.linear(inner, w2[expert], None if bias_out is None else bias_out[expert]).float()
        if not apply_router_weight_on_input:
            made *= topk_weights[tokens, choice, None]
        total.index_add_(0, tokens, made)
    output.copy_(total)
