"""The example of DPO: its rows have the gradient of DPO's published loss."""

from __future__ import annotations

import runpy
import tomllib
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.tiny import make_batch, make_folder, make_model, make_sample, make_seal, make_step

EXAMPLE = Path(__file__).parents[2] / "examples" / "scripts" / "dpo.py"


def _sums(module: torch.nn.Module, samples: list[dict[str, np.ndarray]]) -> torch.Tensor:
    """[N] log-probability of each answer."""
    found: list[torch.Tensor] = []
    for sample in samples:
        tokens = torch.from_numpy(sample["token_ids"]).long()
        logprobs = module(input_ids=tokens[None]).logits[0, :-1].log_softmax(-1).gather(-1, tokens[1:, None])[:, 0]
        found.append(logprobs[torch.from_numpy(sample["loss_mask"])[1:]].sum())
    return torch.stack(found)


def test_the_rows_of_the_example_have_the_gradient_of_the_published_loss(folders: dict[str, Path], tmp_path: Path) -> None:
    example = runpy.run_path(str(EXAMPLE))
    generator = np.random.default_rng(0)
    samples = [make_sample(generator, prompt=3, completion=int(generator.integers(2, 7))) for _ in range(6)]
    module, frozen = (
        AutoModelForCausalLM.from_pretrained(folder)
        for folder in (folders["qwen3"], make_folder(tmp_path / "reference", family="qwen3", seed=9))
    )
    policy = _sums(module, samples)
    with torch.no_grad():
        reference = _sums(frozen, samples)
    ratios = policy - reference
    torch.nn.functional.logsigmoid(example["BETA"] * (ratios[::2] - ratios[1::2])).mean().neg().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in module.parameters() if parameter.grad is not None])

    weights = example["advantages_of"](policy.detach()[:, None].numpy(), reference[:, None].numpy())
    for sample, weight in zip(samples, weights, strict=True):
        sample["advantages"] = sample["loss_mask"] * np.float32(weight)
    model = make_model(folders["qwen3"])
    overrides = tomllib.loads(example["LOSS"].removeprefix("algorithm."))["overrides"]
    step, _ = make_step(model, overrides=overrides, learning_rate=0.0)
    step.add(make_batch(samples))
    numbers = step.finish(make_seal(samples))
    assert abs(numbers["grad_norm"] / float(expected.norm()) - 1) < 1e-4
