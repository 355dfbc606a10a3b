"""A model of the shape of SmolLM2-135M with random weights, and rows as a run at that size has them.

Weights do not change what work costs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.rollouts.micro_batch import micro_batch_of
from pipelinerl.data.packing import Packing
from pipelinerl.messages import Finish, MicroBatch, Prompt, Sample, Trajectory

SMOLLM2_135M: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 8192,
    "rope_theta": 100_000.0,
    "tie_word_embeddings": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
}
GROUP_SIZE = 8
PROMPT_TOKENS = 96
"""A few-shot prompt of a short sum."""
COMPLETION = (48, 0.6, 4, 144)
"""Lengths of completions are log-normal: median, sigma of the logarithm, shortest, longest."""
EQUAL_REWARD = 0.71
"""The part of groups whose rewards were all equal, in a run of SmolLM2-135M-Instruct on sums that learned."""


def make_model(folder: str, num_layers: int) -> None:
    """Write it, with a tokenizer of single characters; with fewer layers it is quicker, and its embeddings weigh more."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    from tests.tiny_models import make_tokenizer

    torch.manual_seed(0)
    shape: dict[str, Any] = SMOLLM2_135M | {"num_hidden_layers": num_layers}
    LlamaForCausalLM(LlamaConfig(**shape)).save_pretrained(folder)
    make_tokenizer(Path(folder))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """The samples of a prompt."""

    samples: tuple[Sample, ...]

    @property
    def has_signal(self) -> bool:
        return any(sample.advantages.any() for sample in self.samples)

    @property
    def num_trained(self) -> int:
        return sum(int(sample.trajectory.loss_mask.sum()) for sample in self.samples)


def make_groups(count: int, *, equal_reward: float, seed: int = 0) -> list[Group]:
    """Groups of siblings; in the first `equal_reward` of every so many, spread evenly, all have the same reward."""
    chance = np.random.default_rng(seed)
    return [_group(chance, number, has_signal=_is_due(number, 1 - equal_reward)) for number in range(count)]


def rows_of(groups: list[Group], *, row_tokens: int) -> Iterator[MicroBatch]:
    """Pack groups into rows by the orchestrator's own rule."""
    packing = Packing(max_tokens=row_tokens)
    rows = [row for group in groups for sample in group.samples for row in packing.add(sample)]
    rows += packing.flush()
    yield from (micro_batch_of(tuple(row), step=0, index=index) for index, row in enumerate(rows))


def _is_due(number: int, part: float) -> bool:
    return int((number + 1) * part + 1e-9) > int(number * part + 1e-9)


def _group(chance: np.random.Generator, number: int, *, has_signal: bool) -> Group:
    prompt = chance.integers(0, SMOLLM2_135M["vocab_size"], PROMPT_TOKENS, dtype=np.int32)
    rewards = chance.permutation(np.arange(GROUP_SIZE) % 2) if has_signal else np.zeros(GROUP_SIZE)
    advantages = rewards - rewards.mean()
    return Group(
        samples=tuple(
            _sample(chance, prompt, name=f"{number}/{sibling}", group=number, reward=float(rewards[sibling]), advantage=advantages[sibling])
            for sibling in range(GROUP_SIZE)
        )
    )


def _sample(chance: np.random.Generator, prompt: np.ndarray, *, name: str, group: int, reward: float, advantage: float) -> Sample:
    median, sigma, shortest, longest = COMPLETION
    length = int(np.clip(chance.lognormal(np.log(median), sigma), shortest, longest))
    ids = np.concatenate((prompt, chance.integers(0, SMOLLM2_135M["vocab_size"], length, dtype=np.int32)))
    loss_mask = np.arange(len(ids)) >= len(prompt)
    trajectory = Trajectory(
        rollout_id=name,
        group_id=group,
        sibling=0,
        attempt=0,
        prompt=Prompt(prompt_id=f"0:{group}", text="", token_ids=prompt),
        token_ids=ids,
        loss_mask=loss_mask,
        logprobs=np.where(loss_mask, -10.8, 0.0).astype(np.float32),
        versions=np.where(loss_mask, 0, -1).astype(np.int32),
        finish=Finish.STOP,
    )
    return Sample(trajectory=trajectory, reward=reward, advantages=np.where(loss_mask, advantage, 0.0).astype(np.float32))
