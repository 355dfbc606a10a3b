"""What a model may be told: to recompute its layers, to compute its logits in float32; and what it refuses to be."""

from pathlib import Path

import numpy as np
import pytest
import torch

from pipelinerl.errors import ConfigError
from tests.trainer.tiny import FAMILIES, make_folder, make_model, make_sample, packed_logprobs


def _samples() -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    return [make_sample(generator, prompt=3, completion=completion) for completion in (4, 9, 30)]


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_changes_what_is_kept_and_nothing_else(folders: dict[str, Path], family: str) -> None:
    gradients: list[list[torch.Tensor]] = []
    num_passes: list[int] = []
    for activation_checkpointing in (False, True):
        model = make_model(folders[family], activation_checkpointing=activation_checkpointing)
        passes: list[str] = []
        model.module.get_submodule("model.layers.0.input_layernorm").register_forward_hook(lambda *_, seen=passes: seen.append("pass"))
        packed_logprobs(model, _samples()).sum().backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        num_passes.append(len(passes))
    assert num_passes == [1, 2]
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))


def test_a_float32_head_is_nearer_to_float32_than_a_bfloat16_one(folders: dict[str, Path]) -> None:
    """The body is the same, so what the head rounds away is the difference to logits computed in float32 from the same hidden states."""
    with torch.no_grad():
        plain, precise = (
            packed_logprobs(make_model(folders["llama"], dtype="bfloat16", has_float32_head=has), _samples()) for has in (False, True)
        )
        wide = make_model(folders["llama"])
        for name, tensor in make_model(folders["llama"], dtype="bfloat16").module.state_dict().items():
            wide.module.state_dict()[name].copy_(tensor)
        exact = packed_logprobs(wide, _samples())
    assert float((precise - exact).abs().mean()) < float((plain - exact).abs().mean())


def test_a_model_that_does_more_to_its_logits_than_a_product_is_refused(folders: dict[str, Path], tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "scaled", family="llama", lm_head_multiplier=2.0)
    with pytest.raises(ConfigError, match=r"LlamaForCausalLM computes logits in a way .* it sets lm_head_multiplier"):
        make_model(folder)
