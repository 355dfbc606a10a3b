"""PRIME in the trainer: what its implicit process reward model says, what it is trained towards, and that it comes to know the outcome."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from tests.trainer.tiny import critic_optimizer, make_batch, make_folder, make_model, make_sample, make_seal, make_step, packed_logprobs
from trainer.model.model import Model

Samples = list[dict[str, np.ndarray]]
BETA = 0.05


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What phi starts from here, so that it says something at the first step; in a run it mostly is the reference."""
    return make_folder(tmp_path_factory.mktemp("other"), family="qwen3", seed=5)


def _samples() -> Samples:
    """Four groups of three, some right and some wrong."""
    generator = np.random.default_rng(9)
    samples = [make_sample(generator, prompt=3, completion=int(generator.integers(1, 8))) for _ in range(12)]
    return [sample | {"group": np.array(number // 3)} for number, sample in enumerate(samples)]


def _credit(q: list[np.ndarray], correct: np.ndarray) -> np.ndarray:
    """The formula with plain sums: r = 0.05 q but at the end, over its largest return; 5 RLOO(r) + 5 RLOO(outcome); returns; whitened."""
    rewards = [np.append(BETA * row[:-1], 0.0) for row in q]
    largest = max(abs(row[t:].sum()) for row in rewards for t in range(len(row)))
    rewards = [row / (largest + 1e-6) for row in rewards]
    returns = []
    for number, row in enumerate(rewards):
        siblings = [other for other in range(12) if other // 3 == number // 3]
        others = [other for other in siblings if other != number]
        # n/(n-1) r - sum of the siblings' means / (n-1), which for r at its own mean is that mean minus the others'
        token = 5 * (1.5 * row - 0.5 * sum(rewards[other].mean() for other in siblings))
        token[-1] += 5 * (correct[number] - correct[others].mean())
        returns.append([token[t:].sum() for t in range(len(token))])
    flat = np.concatenate(returns)
    return (flat - flat.mean()) / np.sqrt(flat.var(ddof=1) + 1e-8)


def _gradient(model: Model) -> torch.Tensor:
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.slow
@pytest.mark.parametrize("split", [[12], [4, 0, 8]])
def test_policy_and_process_reward_model_get_the_gradients_of_their_formulas(
    folders: dict[str, Path], other: Path, split: list[int]
) -> None:
    samples = _samples()
    policy, phi, frozen = make_model(folders["qwen3"]), make_model(other), make_model(folders["qwen3"], is_frozen=True)
    lengths = [int(sample["loss_mask"].sum()) for sample in samples]
    correct = np.array([float(sample["reward"]) for sample in samples])
    q = packed_logprobs(phi, samples) - packed_logprobs(frozen, samples)
    rows = np.split(q.detach().double().numpy(), np.cumsum(lengths)[:-1])
    a = torch.from_numpy(_credit(rows, correct)).float()
    batch = make_batch(samples)
    ratio = (packed_logprobs(policy, samples) - torch.from_numpy(batch.logprobs[batch.loss_mask])).exp()
    (-torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a)).sum().backward()
    logits = torch.stack([BETA * part.sum() for part in q.split(lengths)])
    labels = torch.from_numpy(correct).float()
    losses = -labels * F.logsigmoid(logits) - (1 - labels) * F.logsigmoid(-logits)
    losses.sum().backward()

    step, optimizer = make_step(
        make_model(folders["qwen3"]),
        method="prime",
        overrides={"proximal": "engine", "weight": "none"},
        critic=make_model(other),
        reference=make_model(folders["qwen3"], is_frozen=True),
    )
    for index, chosen in enumerate(np.split(np.arange(12), np.cumsum(split)[:-1])):
        step.add(make_batch([samples[number] for number in chosen], index=index))
    step.train_held(make_seal(samples))
    for gradient, model in ((optimizer.gradient, policy), (critic_optimizer(step).gradient, phi)):
        assert float((gradient - _gradient(model)).norm() / _gradient(model).norm()) < 1e-5
    told = step.finish(make_seal(samples))
    assert told["prm_loss"] == pytest.approx(float(losses.detach().mean()), rel=1e-5), "a mean over sequences"
    assert told["prm_accuracy"] == pytest.approx(float(((logits > 0) == labels.bool()).float().mean()))
    assert told["critic_grad_norm"] == pytest.approx(float(_gradient(phi).norm()) / 12, rel=1e-4)


def test_from_the_reference_on_it_comes_to_know_the_outcome(folders: dict[str, Path]) -> None:
    """At its start it is the reference: no process reward, no loss but log 2; the policy rests meanwhile."""
    samples = _samples()
    step, _ = make_step(
        make_model(folders["qwen3"]),
        method="prime",
        overrides={},
        critic=make_model(folders["qwen3"]),
        reference=make_model(folders["qwen3"], is_frozen=True),
        learning_rate=3e-3,
        critic_warmup_steps=8,
    )
    told = []
    for number in range(8):
        step.add(make_batch(samples, step=number))
        step.train_held(make_seal(samples, step=number))
        told.append(step.finish(make_seal(samples, step=number)))
    assert told[0]["prm_loss"] == pytest.approx(np.log(2), abs=1e-4)
    assert told[-1]["prm_loss"] < 0.5
    assert told[-1]["prm_accuracy"] == 1.0
