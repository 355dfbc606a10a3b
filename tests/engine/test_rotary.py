"""Rotary positions of queries with a dimension of heads, by vLLM's class for CPUs as an engine has it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]
TOKENS, HEADS, SIZE = 7, 4, 64


def rotate(query: torch.Tensor, key: torch.Tensor) -> tuple[Any, Any]:
    """By the engine's way and by vLLM's plain torch code."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

    from pipelinerl.engine.vllm.rotary import rotate_every_head

    rotate_every_head()
    rotate_every_head()  # an engine after another in one process
    with set_current_vllm_config(VllmConfig()):
        positions: Any = RotaryEmbedding(SIZE, SIZE, 256, 10000.0, is_neox_style=False, dtype=torch.float32)
    steps = torch.arange(3, TOKENS + 3)
    expected = positions.forward_native(steps, query.clone(), key.clone())
    return positions.forward_cpu(steps, query.clone(), key.clone()), expected


@pytest.mark.parametrize("shape", [(TOKENS, HEADS, SIZE), (TOKENS, HEADS * SIZE)], ids=["heads", "flat"])
def test_every_head_of_a_token_is_turned_by_the_tokens_position(shape: tuple[int, ...]) -> None:
    found, expected = rotate(torch.randn(shape), torch.randn(TOKENS, 1, SIZE) if len(shape) == 3 else torch.randn(TOKENS, SIZE))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)
