"""The policy that the trust region is drawn around: recomputed, the engine's, or between the two by versions; one real step each."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.trainer.tiny import make_batch, make_model, make_sample, make_seal, make_step, packed_logprobs

Samples = list[dict[str, np.ndarray]]
STEP = 5
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "current": ("grpo_tis", {}),
    "recomputed": ("decoupled_ppo", {}),
    "engine": ("grpo_dual_clip", {}),
    "loglinear": ("loglinear_ppo", {}),
}


def _samples() -> Samples:
    """Sampled half under version 3 and half under 4, by an engine up to 0.3 nats off."""
    generator = np.random.default_rng(1)
    return [make_sample(generator, prompt=3, completion=6) for _ in range(8)]


def _near(folder: Path) -> Samples:
    samples = _samples()
    with torch.no_grad():
        logprobs = packed_logprobs(make_model(folder), samples).numpy().reshape(8, 6)
    noise = np.random.default_rng(2).uniform(-0.3, 0.3, (8, 6))
    for sample, row in zip(samples, (logprobs + noise).astype(np.float32), strict=True):
        sample["logprobs"][sample["loss_mask"]] = row
        sample["versions"][sample["loss_mask"]] = [3, 3, 3, 4, 4, 4]
    return samples


def _expected_gradient(folder: Path, samples: Samples, name: str) -> torch.Tensor:
    """By its formula over one row: w clip(pi / prox), prox with a = (4 - v) / (5 - v), so 1/2 for version 3 and 0 for version 4."""
    model, batch = make_model(folder), make_batch(samples)
    pi = packed_logprobs(model, samples)
    mu, advantages = (torch.from_numpy(getattr(batch, column)[batch.loss_mask]) for column in ("logprobs", "advantages"))
    share = torch.tensor([0.5, 0.5, 0.5, 0.0, 0.0, 0.0]).repeat(8)
    prox = {"engine": mu, "loglinear": mu + share * (pi.detach() - mu)}.get(name, pi.detach())
    weight = 1.0 if name == "engine" else (prox - mu).exp().clamp(max=2.0 if name == "current" else 5.0)
    ratio = (pi - prox).exp()
    values = -weight * torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    values.sum().backward()
    return torch.cat([parameter.grad.flatten() for parameter in model.parameters() if parameter.grad is not None])


@pytest.mark.parametrize("name", CASES)
def test_a_step_draws_its_region_around_the_policy_it_is_told(folders: dict[str, Path], name: str) -> None:
    samples = _near(folders["llama"])
    method, overrides = CASES[name]
    step, optimizer = make_step(make_model(folders["llama"]), method=method, overrides=overrides)
    step.add(make_batch(samples, step=STEP))
    expected = _expected_gradient(folders["llama"], samples, name)
    assert float((optimizer.gradient - expected).norm() / expected.norm()) < 1e-5
    assert step.finish(make_seal(samples, step=STEP))["clip_fraction"] == pytest.approx(
        0.0 if name in ("current", "recomputed") else 0.2, abs=0.15
    )


@pytest.mark.parametrize(("name", "high"), [("decoupled_ppo", 1.2), ("dapo", 1.28)])
def test_a_second_pass_over_a_step_clips_around_the_policy_it_is_told(folders: dict[str, Path], name: str, high: float) -> None:
    """Against two updates by hand: around the log-probabilities from before the first, or, for `dapo`, around the engine's."""
    samples = _near(folders["llama"])
    batch = make_batch(samples, step=STEP)
    mu, advantages = (torch.from_numpy(getattr(batch, column)[batch.loss_mask]) for column in ("logprobs", "advantages"))
    by_hand = make_model(folders["llama"])
    _, optimizer = make_step(by_hand, learning_rate=1e-3)
    old = packed_logprobs(by_hand, samples).detach()
    prox = mu if name == "dapo" else old
    ratio = torch.ones(())
    for _ in range(2):
        ratio = (packed_logprobs(by_hand, samples) - prox).exp()
        weight = (prox - mu).exp().clamp(max=5.0)
        (-weight * torch.minimum(ratio * advantages, ratio.clamp(0.8, high) * advantages)).sum().backward()
        optimizer.step(STEP, denominator=48)

    model = make_model(folders["llama"])
    step, _ = make_step(model, method=name, overrides={}, epochs=2)
    step.add(make_batch(samples[:3], step=STEP))
    step.add(make_batch(samples[3:], step=STEP, index=1))
    step.train_held(make_seal(samples, step=STEP))
    metrics = step.finish(make_seal(samples, step=STEP))
    for got, expected in zip(model.parameters(), by_hand.parameters(), strict=True):
        assert torch.allclose(got, expected, atol=1e-5)
    assert metrics["ratio_mean"] == pytest.approx(float(ratio.detach().mean()), rel=1e-4)
    assert abs(metrics["ratio_max"] - 1) > 0.01
    assert metrics["mismatch_kl_k3"] == pytest.approx(float(((old - mu).exp() - 1 - (old - mu)).mean()), rel=1e-4), "as it was before"
