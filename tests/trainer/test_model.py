"""What a model may be told: to recompute its layers, to compute its logits in float32; and what it refuses to be."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pipelinerl.config.trainer_memory import ActivationCheckpointing
from pipelinerl.errors import ConfigError
from tests.trainer.tiny import FAMILIES, make_folder, make_model, make_sample, packed_logprobs
from trainer.model.checkpointing import KEPT

NONE, SELECTIVE, FULL = ActivationCheckpointing.NONE, ActivationCheckpointing.SELECTIVE, ActivationCheckpointing.FULL


def _samples() -> list[dict[str, np.ndarray]]:
    generator = np.random.default_rng(0)
    return [make_sample(generator, prompt=3, completion=completion) for completion in (4, 9, 30)]


@pytest.mark.parametrize("family", FAMILIES)
def test_recomputing_changes_what_is_kept_and_nothing_else(folders: dict[str, Path], family: str) -> None:
    gradients: list[list[torch.Tensor]] = []
    num_passes: list[int] = []
    num_products: list[int] = []
    for choice in (NONE, SELECTIVE, FULL):
        model = make_model(folders[family], activation_checkpointing=choice)
        passes: list[str] = []
        model.module.get_submodule("model.layers.0.input_layernorm").register_forward_hook(lambda *_, seen=passes: seen.append("pass"))
        logprobs = packed_logprobs(model, _samples()).sum()
        with Products() as products:
            logprobs.backward()
        gradients.append([parameter.grad for parameter in model.parameters() if parameter.grad is not None])
        num_passes.append(len(passes))
        num_products.append(products.num)
    assert num_passes == [1, 2, 2]
    assert num_products[0] == num_products[1] < num_products[2], "selective computes no matrix product again"
    for again in gradients[1:]:
        assert all(torch.equal(*pair) for pair in zip(gradients[0], again, strict=True))


def test_experts_are_one_grouped_product_that_equals_the_loop_over_them(folders: dict[str, Path]) -> None:
    """transformers takes torch's grouped product where the device has it, and its own loop elsewhere, which is the reference here."""
    gradients: dict[str, list[torch.Tensor]] = {}
    num_grouped: dict[str, int] = {}
    for kind in ("grouped_mm", "eager"):
        model = make_model(folders["qwen3_moe"])
        if kind == "eager":
            model.module.set_experts_implementation("eager")
        with Products(torch.ops.aten._grouped_mm.default) as products:
            packed_logprobs(model, _samples()).sum().backward()
        num_grouped[kind] = products.num
        gradients[kind] = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert num_grouped == {"grouped_mm": 2 * (2 + 4), "eager": 0}, (
        "of two layers with two products each, and two for each in the backward pass"
    )
    for grouped, looped in zip(*gradients.values(), strict=True):
        assert float((grouped - looped).norm() / looped.norm()) < 1e-6


class Products(TorchDispatchMode):
    """Counts what selective checkpointing keeps the outputs of, or other operators."""

    def __init__(self, *operators: Any) -> None:
        super().__init__()
        self.num = 0
        self._operators = operators or KEPT

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num += func in self._operators
        return func(*args, **(kwargs or {}))


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
