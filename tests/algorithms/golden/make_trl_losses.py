"""Makes `trl_losses.json`: what TRL 1.16.0's `GRPOTrainer._compute_loss` gives for random rows, in value and gradient; how its coefficient
of the entropy bonus follows the entropy; and its divergences from a teacher (`GKDTrainer.generalized_jsd_loss`).

Run by hand, in an environment apart from this project's, because TRL brings dependencies that nothing here needs:

    python -m venv /tmp/trl && /tmp/trl/bin/pip install trl==1.16.0
    /tmp/trl/bin/python tests/algorithms/golden/make_trl_losses.py

The method is called on a stand-in that holds the options it reads; the model is left out, its log-probabilities are given. Its importance
weights are made in the middle of a long method: those lines are run as they stand there.
"""

from __future__ import annotations

import collections
import inspect
import json
import textwrap
import types
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import torch
import trl
from trl import GRPOTrainer
from trl.experimental.gkd import GKDTrainer

NUM_SEQUENCES, NUM_TOKENS = 6, 9
CASES: dict[str, dict[str, Any]] = {
    "dapo": {"loss_type": "dapo", "epsilon_high": 0.28},
    "grpo": {"loss_type": "grpo"},
    "grpo_kl": {"loss_type": "grpo", "beta": 0.04},
    "grpo_unbiased_kl": {"loss_type": "grpo", "beta": 0.04, "use_bias_correction_kl": True},
    "dr_grpo": {"loss_type": "dr_grpo"},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.15},
    "cispo": {"loss_type": "cispo", "epsilon_high": 5.0},
    "cispo_tight": {"loss_type": "cispo", "epsilon_high": 1.2},
    "sapo": {"loss_type": "sapo"},
    "vespo": {"loss_type": "vespo"},
    "opsm": {"loss_type": "dapo", "off_policy_mask_threshold": 0.05},
    "dual_clip": {"loss_type": "dapo", "delta": 1.3},
    "tis_token": {"loss_type": "dapo", "weight": ("token_truncate", None, 1.2)},
    "tis_sequence": {"loss_type": "dapo", "weight": ("sequence_truncate", None, 1.2)},
    "mis_token": {"loss_type": "dapo", "weight": ("token_mask", None, 1.2)},
    "mis_sequence": {"loss_type": "dapo", "weight": ("sequence_mask", None, 1.2)},
    "icepop": {"loss_type": "dapo", "weight": ("token_mask", 0.8, 1.2)},
}
"""TRL's options; `weight` is its mode of importance weights, and their bounds."""


def main() -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_SEQUENCES, NUM_TOKENS)
    logprobs = -0.05 - 2 * torch.rand(shape, generator=generator, dtype=torch.float64)
    inputs = {
        "old": (logprobs + 0.35 * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(max=-0.01),
        "reference": (logprobs + 0.4 * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(max=-0.01),
        "behaviour": (logprobs + 0.3 * torch.randn(shape, generator=generator, dtype=torch.float64)).clamp(max=-0.01),
        "mask": (torch.arange(NUM_TOKENS) < torch.tensor([[9], [1], [4], [7], [2], [9]])).long(),
        "advantages": torch.tensor([1.2, -0.7, 0.4, -1.5, 0.9, -0.2], dtype=torch.float64),
    }
    found = {name: _result(logprobs, inputs, options) for name, options in CASES.items()}
    record = {
        "trl": trl.__version__,
        "logprobs": logprobs.tolist(),
        **{name: value.tolist() for name, value in inputs.items()},
        "cases": found,
        "entropy_control": _entropy_control(inputs),
        "divergences": _divergences(),
    }
    Path(__file__).with_name("trl_losses.json").write_text(json.dumps(record) + "\n")


def _result(logprobs: torch.Tensor, inputs: dict[str, torch.Tensor], options: dict[str, Any]) -> dict[str, Any]:
    trainer = _stand_in(options)
    leaf = logprobs.clone().requires_grad_()
    trainer._get_per_token_logps_and_entropies = lambda *_, **__: (leaf, torch.zeros_like(leaf), None)
    loss = GRPOTrainer._compute_loss(trainer, None, _given(inputs, _weights(trainer, inputs)))
    loss.backward()
    assert leaf.grad is not None
    return {"options": options, "loss": loss.item(), "gradient": leaf.grad.tolist()}


def _stand_in(options: dict[str, Any]) -> Any:
    chosen = {
        "use_adaptive_entropy": False,
        "entropy_coef": 0.0,
        "epsilon_low": 0.2,
        "epsilon_high": 0.2,
        "beta": 0.0,
        "importance_sampling_level": "token",
        "off_policy_mask_threshold": None,
    }
    mode, low, high = options.get("weight", (None, None, None))
    chosen |= {f"vllm_importance_sampling_{name}": value for name, value in (("mode", mode), ("clip_min", low), ("clip_max", high))}
    chosen |= {"use_vllm": mode is not None, "vllm_importance_sampling_correction": True} | options
    trainer = MagicMock()
    trainer.configure_mock(**chosen)
    trainer.get_off_policy_mask = GRPOTrainer.get_off_policy_mask
    trainer.get_gamma_weights = GRPOTrainer.get_gamma_weights
    trainer.args = types.SimpleNamespace(
        delta=chosen.get("delta"),
        use_bias_correction_kl=chosen.get("use_bias_correction_kl", False),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        vespo_k_pos=2.0,
        vespo_lambda_pos=3.0,
        vespo_k_neg=3.0,
        vespo_lambda_neg=2.0,
        steps_per_generation=1,
    )
    trainer.model.training = False
    trainer.top_entropy_quantile, trainer.aux_loss_enabled, trainer._entropy_bonus_enabled = 1.0, False, False
    trainer.max_completion_length, trainer.current_gradient_accumulation_steps = NUM_TOKENS, 1
    trainer.accelerator.num_processes = 1
    trainer.accelerator.reduce = trainer.accelerator.gather = lambda tensor, **_: tensor
    trainer._metrics = collections.defaultdict(lambda: collections.defaultdict(list))
    return trainer


def _given(inputs: dict[str, torch.Tensor], weights: torch.Tensor | None) -> dict[str, Any]:
    empty = torch.zeros(NUM_SEQUENCES, 0, dtype=torch.long)
    ids = torch.zeros(NUM_SEQUENCES, NUM_TOKENS, dtype=torch.long)
    return {
        "prompt_ids": empty,
        "prompt_mask": empty,
        "completion_ids": ids,
        "completion_mask": inputs["mask"],
        "advantages": inputs["advantages"],
        "old_per_token_logps": inputs["old"],
        "ref_per_token_logps": inputs["reference"],
        "num_items_in_batch": inputs["mask"].sum(),
        "importance_sampling_ratio": weights,
    }


def _entropy_control(inputs: dict[str, torch.Tensor]) -> dict[str, Any]:
    """(coefficient in force, coefficient after) of some optimizer steps, by their entropy."""
    options = {"entropy_target": 0.5, "entropy_coef_delta": 0.003, "entropy_coef_min": 0.001, "entropy_coef_max": 0.012}
    entropies = [0.7, 0.5, 0.4, 0.3, 0.2, 0.45, 0.1, 0.6, 0.9, 0.8, 0.55, 0.51, 0.49]
    trainer = _stand_in({"loss_type": "dapo", "use_adaptive_entropy": True, "entropy_coef": 0.004})
    trainer._entropy_bonus_enabled, trainer._last_world_entropy, trainer._entropy_window_stats = True, float("inf"), None
    vars(trainer.args).update(options)
    trainer.model.training = True
    in_force, after = [], []
    for entropy in entropies:
        leaf = torch.full((NUM_SEQUENCES, NUM_TOKENS), entropy, dtype=torch.float64, requires_grad=True)
        logprobs = inputs["old"].clone().requires_grad_()
        trainer._get_per_token_logps_and_entropies = lambda *_, x=logprobs, h=leaf, **__: (x, h, None)
        GRPOTrainer._compute_loss(trainer, None, _given(inputs, None)).backward()
        in_force.append(0.0 if leaf.grad is None else -leaf.grad.sum().item())
        after.append(trainer.entropy_coef)
    return {"start": 0.004, "options": options, "entropies": entropies, "in_force": in_force, "after": after}


def _divergences() -> dict[str, Any]:
    """By GKD's beta: the divergence of each of some positions, and the slopes of their sum by the student's logits."""
    generator = torch.Generator().manual_seed(2)
    student, teacher = 2 * torch.randn(2, 1, 7, 5, generator=generator, dtype=torch.float64)
    found: dict[str, Any] = {"student": student[0].tolist(), "teacher": teacher[0].tolist(), "temperature": 0.8, "cases": {}}
    for beta in (0.0, 0.1, 0.5, 0.9, 1.0):
        leaf = student.clone().requires_grad_()
        values = GKDTrainer.generalized_jsd_loss(leaf, teacher, beta=beta, temperature=0.8, reduction="none")
        values.sum().backward()
        assert leaf.grad is not None
        found["cases"][str(beta)] = {"values": values.detach().sum(-1)[0].tolist(), "slopes": leaf.grad[0].tolist()}
    return found


def _weights(trainer: Any, inputs: dict[str, torch.Tensor]) -> torch.Tensor | None:
    source = inspect.getsource(GRPOTrainer._generate_and_score_completions)
    begin = source.index("# Compute the importance sampling ratio when using vLLM")
    lines = source[source.rindex("\n", 0, begin) : source.index("# Compute the per-token log probabilities for the reference model")]
    names = {
        "self": trainer,
        "tool_mask": None,
        "completion_mask": inputs["mask"],
        "old_per_token_logps": inputs["old"],
        "sampling_per_token_logps": inputs["behaviour"],
    }
    exec(textwrap.dedent(lines), vars(inspect.getmodule(GRPOTrainer)), names)
    return names.get("vllm_importance_sampling_ratio")


if __name__ == "__main__":
    main()
