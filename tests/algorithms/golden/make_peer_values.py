"""Makes `peer_values.json`: what functions of verl 0.9.1 and OpenRLHF 0.11.2 give for random rows, in value and gradient, and over steps.

Run by hand, in an environment apart from this project's, because they bring dependencies that nothing here needs:

    python -m venv /tmp/peers && /tmp/peers/bin/pip install verl==0.9.1 openrlhf==0.11.2
    /tmp/peers/bin/python tests/algorithms/golden/make_peer_values.py

OpenRLHF's file of estimators is run by itself: the package imports engines that want a GPU.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from verl.trainer.ppo import core_algos, rollout_corr_helper

GAPS = (0.0, 0.1, -0.7, 1.3, -2.0, 2.4, 2.7, -5.0, 6.0, -12.0, 10.0, 19.0, -25.0, 23.0)
"""log ref - log pi, on both sides of where k3 is 10 and of where differences are clamped."""
LENGTHS, REWARDS, GROUPS = (5, 3, 4, 2, 2), (1.0, 0.25, 0.0, 0.5, 1.0), (0, 0, 0, 1, 1)


def main() -> None:
    record = {
        "verl": importlib.metadata.version("verl"),
        "openrlhf": importlib.metadata.version("openrlhf"),
        "gaps": GAPS,
        "k3_verl": _slopes(lambda pi, ref: core_algos.kl_penalty(pi, ref, "k3")),
        "k3_plus_verl": _slopes(lambda pi, ref: core_algos.kl_penalty(pi, ref, "k3+")),
        "k3_openrlhf": _slopes(lambda pi, ref: _openrlhf().compute_approx_kl(pi, ref, kl_estimator="k3")),
        "optimal_baseline": _optimal_baseline(),
        "adaptive_kl": _adaptive_kl(),
        "normalized_weights": _normalized_weights(),
    }
    Path(__file__).with_name("peer_values.json").write_text(json.dumps(record) + "\n")


def _slopes(penalty: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> dict[str, list[float]]:
    leaf = torch.full((len(GAPS),), -30.0, dtype=torch.float64, requires_grad=True)
    values = penalty(leaf, leaf.detach() + torch.tensor(GAPS, dtype=torch.float64))
    values.sum().backward()
    assert leaf.grad is not None
    return {"values": values.detach().tolist(), "slopes": leaf.grad.tolist()}


def _optimal_baseline() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    shape = (len(LENGTHS), max(LENGTHS))
    mask = (torch.arange(shape[1]) < torch.tensor(LENGTHS)[:, None]).double()
    logprobs = -0.1 - 2 * torch.rand(shape, generator=generator, dtype=torch.float64)
    square_sums = logprobs.exp().square() + 0.1 * torch.rand(shape, generator=generator, dtype=torch.float64)
    rewards = torch.zeros(shape, dtype=torch.float64)
    for row, (length, reward) in enumerate(zip(LENGTHS, REWARDS, strict=True)):
        rewards[row, length - 1] = reward
    found = {}
    for handles in (False, True):
        advantages, _ = core_algos.compute_optimal_token_baseline_advantage(
            rewards, mask, np.array(GROUPS), logprobs, square_sums, handle_zero_tail=handles
        )
        found[str(handles)] = advantages.tolist()
    shared = {"lengths": LENGTHS, "rewards": REWARDS, "groups": GROUPS}
    return {**shared, "logprobs": logprobs.tolist(), "square_sums": square_sums.tolist(), "advantages": found}


def _adaptive_kl() -> dict[str, Any]:
    """The coefficient after each of some steps, by their measured KL."""
    start, target, horizon, num_sequences = 0.2, 0.1, 1000, 64
    controller = core_algos.AdaptiveKLController(start, target, horizon)
    measured = [0.1, 0.11, 0.5, 0.07, 0.0, -0.3, 0.119, 0.13, 9.0, 0.1]
    found = []
    for kl in measured:
        controller.update(kl, num_sequences)
        found.append(controller.value)
    shared = {"start": start, "target": target, "horizon": horizon, "num_sequences": num_sequences, "measured": measured}
    return {**shared, "coefficients": found}


def _normalized_weights() -> dict[str, Any]:
    generator = torch.Generator().manual_seed(1)
    mask = (torch.arange(max(LENGTHS)) < torch.tensor(LENGTHS)[:, None]).double()
    log_ratio = 0.8 * torch.randn(mask.shape, generator=generator, dtype=torch.float64)
    cases = {"token": ("token", 1.3), "sequence": ("sequence", 1.5), "icepop": ("token", "0.6_1.7")}
    found: dict[str, Any] = {"lengths": LENGTHS, "log_ratio": log_ratio.tolist(), "cases": {}}
    for name, (level, bounds) in cases.items():
        weights, numbers = rollout_corr_helper.compute_rollout_correction_weights(
            log_ratio, mask, rollout_is=level, rollout_is_threshold=bounds, rollout_is_batch_normalize=True
        )
        found["cases"][name] = {"bounds": bounds, "weights": weights.tolist(), "mean": numbers["rollout_is_batch_norm_factor"]}
    return found


def _openrlhf() -> Any:
    files = importlib.metadata.files("openrlhf") or []
    path = next(file.locate() for file in files if str(file).endswith("openrlhf/models/utils.py"))
    sys.modules.setdefault("deepspeed", types.ModuleType("deepspeed"))  # for another function of the file
    spec = importlib.util.spec_from_file_location("estimators", str(path))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    main()
