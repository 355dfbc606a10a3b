"""Experts of a mixture on CPUs, computed from the parameters they were loaded with.

vLLM repacks them for a kernel of its own, and a new policy has no way into such a copy: an engine of a mixture could take no weights. Here
each expert that was chosen is two matrix products over the tokens sent to it: the same sums, for tests and small models.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional

PLAIN_ON_DEVICE = ("TritonExperts", "BatchedTritonExperts")
"""vLLM's kernels on a device that leave experts as they were loaded (vLLM 0.32, `fused_moe/oracle/unquantized.py`). Others swap gate and
up, or cut them into blocks: a new policy copied in would be taken for what it is not."""
_ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": functools.partial(functional.gelu, approximate="tanh"),
}
"""Activations of the gate, by vLLM's name, that plain experts compute. Experts with another one are repacked, and their engine is refused.
"""


def keep_plain_experts() -> None:
    """On CPU, have vLLM keep experts as they are instead of packing them; must run before a model is loaded."""
    from vllm.model_executor.layers.fused_moe.experts import cpu_moe

    experts: Any = cpu_moe.CPUUnquantizedExperts
    pack, apply_packed = experts.process_weights_after_loading, experts.apply

    def process_weights_after_loading(self: Any, layer: torch.nn.Module) -> None:
        self.has_plain_weights = self.moe_config.activation.value in _ACTIVATIONS
        if not self.has_plain_weights:
            pack(self, layer)

    def apply(self: Any, output: torch.Tensor, hidden_states: torch.Tensor, w1: torch.Tensor, w2: torch.Tensor, **others: Any) -> None:
        if not self.has_plain_weights:
            apply_packed(self, output, hidden_states, w1, w2, **others)
            return
        chosen, expert_map = others["topk_ids"], others["expert_map"]
        weights = torch.ones_like(others["topk_weights"]) if others["apply_router_weight_on_input"] else others["topk_weights"]
        output.copy_(
            compute_experts(
                hidden_states,
                gate_up=w1,
                down=w2,
                biases=(self.w1_bias, self.w2_bias),
                chosen=chosen if expert_map is None else expert_map[chosen],
                weights=weights,
                activation=_ACTIVATIONS[others["activation"].value],
            )
        )

    experts.process_weights_after_loading, experts.apply = process_weights_after_loading, apply


def device_options(*, replay_routing: bool) -> dict[str, Any]:
    """Options of vLLM on a device, by which experts stay as they were loaded and, for the trainer to replay, are told."""
    return {"moe_backend": "triton"} | ({"enable_return_routed_experts": True} if replay_routing else {})


def has_plain_experts(method: Any) -> bool:
    """True for a layer's method that computes with the parameters it was loaded with, or is not one of experts."""
    kernel = getattr(method, "moe_kernel", None)
    experts = getattr(kernel, "fused_experts", None)
    return kernel is None or getattr(experts, "has_plain_weights", False) or type(experts).__name__ in PLAIN_ON_DEVICE


def compute_experts(
    hidden: torch.Tensor,
    *,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    chosen: torch.Tensor,
    weights: torch.Tensor,
    activation: Callable[[torch.Tensor], torch.Tensor],
) -> torch.Tensor:
    """Each token's weighted sum over the experts it was sent to, [T, H], summed in float32.

    `hidden` is [T, H]; `gate_up` [E, 2 I, H], gates first; `down` [E, H, I]; `biases` [E, 2 I] and [E, H]; `chosen` [T, K], below 0 where
    an expert is another rank's; `weights` [T, K].
    """
    total = torch.zeros(hidden.shape, dtype=torch.float32)
    for expert in chosen.unique().tolist():
        if expert < 0:
            continue
        tokens, places = torch.where(chosen == expert)
        bias, bias_down = (None if bias is None else bias[expert] for bias in biases)
        gate, up = functional.linear(hidden[tokens], gate_up[expert], bias).chunk(2, dim=-1)
        out = functional.linear(activation(gate) * up, down[expert], bias_down)
        total.index_add_(0, tokens, out.float() * weights[tokens, places, None].float())
    return total
