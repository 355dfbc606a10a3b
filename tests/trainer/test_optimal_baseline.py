"""The optimal token baseline in the trainer: what it reads is computed there, over all words, and the weights it squares are the loss's."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.trainer.tiny import make_batch, make_model, make_sample, make_seal, make_step, packed_logprobs


@pytest.mark.parametrize(("weight", "cap"), [("tis_token", 2.0), ("none", 0.0)])
def test_a_step_has_the_advantages_of_the_whole_table_of_probabilities(folders: dict[str, Path], weight: str, cap: float) -> None:
    """From transformers' own logits, sample by sample: no packing, no chunks."""
    generator = np.random.default_rng(12)
    samples = [make_sample(generator, prompt=4, completion=int(generator.integers(1, 9))) for _ in range(8)]
    samples = [sample | {"group": np.array(number // 4)} for number, sample in enumerate(samples)]
    plain = AutoModelForCausalLM.from_pretrained(folders["qwen3"], dtype=torch.float32)
    energies, importance = [], []
    for sample in samples:
        ids = torch.from_numpy(sample["token_ids"]).long()
        with torch.no_grad():
            table = plain(ids[None]).logits[0, 3:-1].double().softmax(-1).numpy()
        chosen = table[np.arange(len(table)), ids[4:].numpy()]
        ratio = chosen / np.exp(sample["logprobs"][4:].astype(np.float64))
        importance.append(np.minimum(ratio, cap) if cap else np.ones(len(chosen)))
        energies.append(np.cumsum(importance[-1] ** 2 * ((np.eye(61)[ids[4:].numpy()] - table) ** 2).sum(-1)))
    advantages = []
    for number, sample in enumerate(samples):
        siblings = [other for other in range(8) if other // 4 == number // 4]
        row = []
        for t in range(len(energies[number])):
            reach = [other for other in siblings if len(energies[other]) > t]
            row.append(sample["reward"] - sum(samples[o]["reward"] * energies[o][t] for o in reach) / sum(energies[o][t] for o in reach))
        advantages.append(row)
    a, w = (torch.from_numpy(np.concatenate(rows)).float() for rows in (advantages, importance))
    model = make_model(folders["qwen3"])
    (-w * a * packed_logprobs(model, samples)).sum().backward()
    expected = torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])

    step, optimizer = make_step(make_model(folders["qwen3"], gives_square_sums=True), method="otb", overrides={"weight": weight})
    step.add(make_batch(samples[:3]))
    step.add(make_batch(samples[3:], index=1))
    step.train_held(make_seal(samples))
    assert float((optimizer.gradient - expected).norm() / expected.norm()) < 1e-5
