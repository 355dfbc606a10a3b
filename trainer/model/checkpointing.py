"""What a layer keeps for its backward pass where the rest is computed again (`trainer.activation_checkpointing`).

The choice is torch's `checkpoint`, by operators: outputs of matrix products and of fused attention are kept, which are nearly all of a
layer's arithmetic and about half of what its backward pass reads. Attention written as batched products is computed again with its scores,
which grow with the square of a sample's length.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  # it registers an operator that is named here
from torch.utils.checkpoint import create_selective_checkpoint_contexts

from pipelinerl.config.trainer_memory import ActivationCheckpointing

_aten = torch.ops.aten
KEPT = (
    _aten.mm.default,
    _aten.addmm.default,
    _aten._grouped_mm.default,
    torch.ops.transformers.grouped_mm_fallback.default,
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.torch_attn._varlen_attn.default,
)
"""Operators whose outputs are kept."""


def checkpoint_options(choice: ActivationCheckpointing) -> dict[str, Any]:
    """Give what `torch.utils.checkpoint.checkpoint` is told about every layer; `choice` is not "none"."""
    assert choice is not ActivationCheckpointing.NONE
    options: dict[str, Any] = {"use_reentrant": False}
    if choice is ActivationCheckpointing.SELECTIVE:
        options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(KEPT))
    return options
