"""Tiny models of four families, and micro-batches made by hand."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PretrainedConfig, Qwen2Config, Qwen3Config, Qwen3MoeConfig

from pipelinerl.algorithms.method import ALWAYS_OFFERED, REFERENCE_OFFERS, TRAINER_OFFERS, Need
from pipelinerl.algorithms.methods import resolve
from pipelinerl.messages import MicroBatch, StepClosed
from trainer.backend import Backend, Outputs
from trainer.build import Trained, critic_of
from trainer.logprob_mismatch import Agreement
from trainer.model.model import Model
from trainer.model.reference import Reference
from trainer.model.teachers import Teachers
from trainer.optimizer import Optimizer, Schedule
from trainer.parallel.replicas import Replicas
from trainer.rows.arrange import arrange
from trainer.step import Step
from trainer.steps import Steps

FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")
VOCABULARY = 61
CPU = torch.device("cpu")

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,  # large, so that a wrong attention mask moves log-probabilities by far more than rounding
}

_EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}


def make_folder(folder: Path, *, family: str, seed: int = 0, **overrides: Any) -> Path:
    """Write a random model of `family` without a tokenizer. Grouped heads in all; Qwen3 has tied embeddings, Qwen3-MoE four experts."""
    kinds: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
        "llama": (LlamaConfig, {}),
        "qwen2": (Qwen2Config, {}),
        "qwen3": (Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
        "qwen3_moe": (Qwen3MoeConfig, _EXPERTS | {"head_dim": 16}),
    }
    kind, own = kinds[family]
    torch.manual_seed(seed)
    AutoModelForCausalLM.from_config(kind(**_SIZES | own | overrides), dtype=torch.float32).save_pretrained(folder)
    return folder


def make_model(
    folder: Path, *, dtype: str = "float32", temperature: float = 1.0, replicas: Replicas | None = None, **options: Any
) -> Model:
    return Model(folder, dtype=dtype, temperature=temperature, device=CPU, replicas=replicas, **options)


def make_sample(generator: np.random.Generator, *, prompt: int, completion: int) -> dict[str, np.ndarray]:
    """Columns of one sample; versions 0, log-probabilities and advantages drawn at random, reward and finish by its length."""
    length = prompt + completion
    loss_mask = np.arange(length) >= prompt
    columns = {
        "token_ids": generator.integers(0, VOCABULARY, length, dtype=np.int32),
        "loss_mask": loss_mask,
        "logprobs": np.where(loss_mask, -generator.uniform(0.5, 4, length), 0).astype(np.float32),
        "versions": np.where(loss_mask, 0, -1).astype(np.int32),
        "advantages": np.where(loss_mask, generator.normal(), 0).astype(np.float32),
    }
    return columns | {"reward": np.array(completion % 2, np.float32), "truncated": np.array(completion % 3 == 0)}


def make_batch(samples: Sequence[dict[str, np.ndarray]], *, step: int = 0, index: int = 0, first_id: int = 0) -> MicroBatch:
    """Lay samples end to end; without samples this is a zero-loss row."""
    dtypes = {"token_ids": np.int32, "loss_mask": np.bool_, "logprobs": np.float32, "versions": np.int32, "advantages": np.float32}
    columns: dict[str, Any] = {
        name: np.concatenate([np.zeros(0, dtype), *(sample[name] for sample in samples)]).astype(dtype) for name, dtype in dtypes.items()
    }
    return MicroBatch(
        step=step,
        index=index,
        lengths=np.array([len(sample["token_ids"]) for sample in samples], np.int32),
        rollout_ids=tuple(f"rollout-{first_id + number}" for number in range(len(samples))),
        rewards=np.array([sample["reward"] for sample in samples], np.float32),
        truncated=np.array([sample["truncated"] for sample in samples], np.bool_),
        group_ids=np.array([sample.get("group", 0) for sample in samples], np.int32),
        engine_ids=np.array([sample.get("engine", -1) for sample in samples], np.int32),
        **columns,
    )


def make_seal(samples: Sequence[dict[str, np.ndarray]], *, step: int = 0, num_micro_batches: int = 1) -> StepClosed:
    num_tokens = sum(int(sample["loss_mask"].sum()) for sample in samples)
    return StepClosed(step=step, num_micro_batches=num_micro_batches, num_tokens=num_tokens, num_samples=len(samples))


def make_step(
    model: Model,
    *,
    replicas: Replicas | None = None,
    max_logprob_gap: float = 1e9,
    max_mismatch_kl: float = 1e9,
    first_step: int = 0,
    num_engines: int = 0,
    learning_rate: float = 1e-3,
    max_grad_norm: float = 1e9,
    method: str = "grpo",
    overrides: dict[str, Any] | None = None,
    is_offloaded: bool = False,
    reference: Model | Teachers | None = None,
    critic: Model | None = None,
    **options: Any,
) -> tuple[Step, Optimizer]:
    """A step whose importance ratios are pi / mu, so that the engine's log-probabilities matter. The critic learns at the same rate."""
    replicas = replicas or Replicas(ranks=1, deadline_s=60)
    optimizer, *of_critic = [
        Optimizer(
            trained.parameters(),
            schedule=Schedule(learning_rate=learning_rate, num_steps=10),
            betas=(0.9, 0.95),
            weight_decay=0.0,
            max_grad_norm=max_grad_norm,
            shardings=trained.shardings,
            replicas=replicas,
            is_offloaded=is_offloaded,
        )
        for trained in (model, critic)
        if trained is not None
    ]
    chosen = {"proximal": "engine", "weight": "none"} if overrides is None else overrides
    resolved = resolve(method, chosen, group_size=8, offers=ALWAYS_OFFERED | TRAINER_OFFERS | REFERENCE_OFFERS, epochs=2)
    trained = None if critic is None else Trained(model=critic, optimizer=of_critic[0])
    step = Step(
        Backend(model, optimizer=optimizer, replicas=replicas, read=functools.partial(Outputs.of, extras=model.extras)),
        method=resolved,
        replicas=replicas,
        max_completion_tokens=32,
        agreement=Agreement(
            max_logprob_gap=max_logprob_gap,
            max_mismatch_kl=max_mismatch_kl,
            first_step=first_step,
            num_engines=num_engines,
            device=replicas.device,
        ),
        reference=Reference(reference, replicas=replicas, gives_states=Need.DIVERGENCE in resolved.needs)
        if isinstance(reference, Model)
        else reference,
        critic=None if trained is None else critic_of(trained, method=resolved, replicas=replicas),
        **options,
    )
    return step, optimizer


def steps_of(step: Step, *, reference: Reference | Teachers | None = None, critic: Trained | None = None) -> Steps:
    """A run whose own loss is that of `step`, and whose other losses are rows of the table."""
    offers = ALWAYS_OFFERED | TRAINER_OFFERS | REFERENCE_OFFERS
    return Steps(
        step,
        method_of=lambda name: resolve(name, group_size=4, offers=offers),
        critic_of=lambda method: None if critic is None else critic_of(critic, method=method, replicas=step.replicas),
        reference=lambda: reference,
        max_tokens=64,
    )


def critic_optimizer(step: Step) -> Optimizer:
    """Of the critic beside the policy."""
    assert step.critic is not None
    return step.critic.backend._optimizer


def packed_logprobs(model: Model, samples: Sequence[dict[str, np.ndarray]]) -> torch.Tensor:
    """[K] log-probabilities of the trained tokens of one packed row, with gradient."""
    batch = make_batch(samples)
    row = arrange(batch.token_ids, loss_mask=batch.loss_mask, lengths=batch.lengths, names=batch.rollout_ids)
    assert row is not None
    return model.logprobs(row)[0]
