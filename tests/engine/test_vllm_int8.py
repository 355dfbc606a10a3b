"""An engine that computes in int8: transformers' forward pass with rounded weights and activations, before and after a policy is taken."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from pipelinerl.messages import Generate, Sampling, StageWeights
from tests import real_engine, tiny_models

if TYPE_CHECKING:
    import torch

    from pipelinerl.engine.vllm.engine import VllmEngine

pytestmark = [pytest.mark.vllm, pytest.mark.slow, pytest.mark.timeout(200)]
PROMPT = list(range(20, 60))


def sampled(engine: VllmEngine) -> tuple[list[int], list[float]]:
    """24 greedy tokens and their log-probabilities."""
    sampling = Sampling(max_tokens=24, temperature=0.0)
    engine.submit(Generate(rollout_id="r", attempt=0, token_ids=np.array(PROMPT, np.int32), sampling=sampling), version=0)
    passed = []
    while not passed or not passed[-1].finishes:
        passed += engine.step()
    token_ids, logprobs = (np.concatenate([getattr(one, name) for one in passed]).tolist() for name in ("token_ids", "logprobs"))
    return token_ids, logprobs


def rounded(tensor: torch.Tensor) -> torch.Tensor:
    """Round every row to 127 steps on either side of zero."""
    scales = tensor.abs().amax(-1, keepdim=True).clamp_min(1e-30) / 127
    return (tensor / scales).round() * scales


def by_transformers(folder: Path, weights: dict[str, torch.Tensor], token_ids: list[int], *, in_int8: bool) -> np.ndarray:
    """Log-probabilities of these tokens by transformers, with what its linear layers read and hold rounded to int8, or not."""
    import torch
    from transformers import AutoModelForCausalLM

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model.load_state_dict(weights)
    if in_int8:
        for name, module in model.named_modules():
            if isinstance(module, torch.nn.Linear) and name != "lm_head":
                module.weight.data = rounded(module.weight.data)
                module.register_forward_pre_hook(lambda _, given: (rounded(given[0]),))
    whole = torch.tensor([PROMPT + token_ids])
    with torch.no_grad():
        found = torch.log_softmax(model(whole).logits[0, len(PROMPT) - 1 : -1], -1)
    return found.gather(1, whole[0, len(PROMPT) :, None])[:, 0].numpy()


def test_log_probabilities_are_those_of_the_rounded_model_also_after_a_swap(tmp_path: Path) -> None:
    import torch

    tensors = tiny_models.make_qwen2(tmp_path, tied=False, seed=3)
    generator = torch.Generator().manual_seed(5)
    others = {
        name: tensor + tensor.std() * torch.randn(tensor.shape, generator=generator) if tensor.dim() > 1 else tensor
        for name, tensor in tensors.items()
    }
    with real_engine.vllm_engine(tmp_path, max_running=4, max_tokens=128, quantization="int8") as engine:
        assert engine.limits.choices[-1].endswith("; linear layers compute in int8")
        publisher = real_engine.Publisher(engine)
        with contextlib.closing(publisher):
            before = sampled(engine)
            buffer, digest = publisher.publish(others, version=1)
            engine.stage(StageWeights(version=1, buffer=buffer, digest=digest))
            engine.commit()
            after = sampled(engine)
    for (token_ids, logprobs), weights in ((before, tensors), (after, others)):
        rounding = np.abs(np.array(logprobs) - by_transformers(tmp_path, weights, token_ids, in_int8=True))
        quantisation = np.abs(np.array(logprobs) - by_transformers(tmp_path, weights, token_ids, in_int8=False))
        assert rounding.max() < quantisation.mean() / 3, "the engine computes what rounding to int8 gives"
        assert 1e-5 < quantisation.mean() < 0.1
