"""The trainer's part of `real`: tokens with a gradient per second, over a plain transformers forward and backward on the same samples.

The reference is what one would write by hand: the model of transformers, the prompt and completion of every sample of a group, logits for
the completion's tokens only (`logits_to_keep`), log-softmax, the policy loss, backward. It runs padded (one group a batch) or packed
(as many tokens a batch as our rows, told apart by their positions), in the same dtype with as many threads; what is faster on the first
group counts.
Neither side updates weights. Seconds are those of the core: what other processes take of it is nobody's here.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM

from pipelinerl.algorithms.methods import resolve
from pipelinerl.messages import Sample
from scripts.bench.real_model import GROUP_SIZE, Group, make_groups, rows_of
from trainer.backend import Backend, Outputs
from trainer.logprob_mismatch import Agreement
from trainer.model.lora import Adapters, add_adapters
from trainer.model.model import Model
from trainer.optimizer import Optimizer, Schedule
from trainer.parallel.replicas import Replicas
from trainer.step import Step

ADAPTERS = Adapters(rank=16, alpha=32, targets=("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"))


def measure(folder: str, *, lora: bool, equal_reward: float, num_groups: int, rounds: int, row_tokens: int) -> dict[str, Any]:
    """Useful tokens per second of both, in turns, and their ratio."""
    torch.set_num_threads(1)
    groups = make_groups(num_groups, equal_reward=equal_reward)
    adapters = ADAPTERS if lora else None
    step = _make_step(Path(folder), adapters)
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    if adapters is not None:
        add_adapters(plain, adapters, dtype=torch.float32)
    ways: dict[str, Callable[[list[Group]], object]] = {
        "ours": lambda given: _ours(step, given, row_tokens=row_tokens),
        "padded": lambda given: _plain(plain, [_padded(group.samples) for group in given]),
        "packed": lambda given: _plain(plain, [_packed(samples) for samples in _filled(given, row_tokens)]),
    }
    first = next([group] for group in groups if group.has_signal)
    gradients, alone = {}, {}
    for name, work in ways.items():  # warms up, shows that all compute the same, and which reference is the faster one
        alone[name] = _seconds(lambda work=work: work(first))
        gradients[name] = _gradient(step.backend._model.module if name == "ours" else plain)
    best = min(("padded", "packed"), key=lambda name: alone[name])
    turns = [{name: _seconds(lambda name=name: ways[name](groups)) for name in ("ours", best)} for _ in range(rounds)]
    seconds = {name: [turn[name] for turn in turns] for name in ("ours", best)}
    useful = sum(group.num_trained for group in groups if group.has_signal)
    return {
        "ours": useful / float(np.median(seconds["ours"])),
        "plain": useful / float(np.median(seconds[best])),
        "way": best,
        "ratio": statistics.median(theirs / ours for theirs, ours in zip(seconds[best], seconds["ours"], strict=True)),
        "difference": max(float((gradients["ours"] - gradients[name]).norm() / gradients[name].norm()) for name in ("padded", "packed")),
    }


def _make_step(folder: Path, adapters: Adapters | None) -> Step:
    replicas = Replicas(ranks=1, deadline_s=60)
    model = Model(folder, dtype="float32", temperature=1.0, device=replicas.device, adapters=adapters)
    schedule = Schedule(learning_rate=1e-6, num_steps=1000)
    optimizer = Optimizer(model.parameters(), schedule=schedule, betas=(0.9, 0.95), weight_decay=0.0, max_grad_norm=1.0)
    return Step(
        Backend(model, optimizer=optimizer, replicas=replicas, read=Outputs.of),
        method=resolve("grpo", {"objective": {"clip_low": 0.99, "clip_high": 99.0}}, group_size=GROUP_SIZE),  # the reference clips nothing
        replicas=replicas,
        max_completion_tokens=1024,
        agreement=Agreement(max_logprob_gap=1e9, device=replicas.device),
    )


def _ours(step: Step, groups: list[Group], *, row_tokens: int) -> None:
    for row in rows_of(groups, row_tokens=row_tokens):
        for part, has_gradient in zip(step.split(row), (True, False), strict=True):
            if len(part.token_ids):
                step.add(part, has_gradient=has_gradient)


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    return time.process_time() - start


def _gradient(module: Any) -> torch.Tensor:
    """The gradient of the last pass, all of it side by side; none is left behind."""
    parts = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    found = torch.cat([part.flatten() for part in parts])
    module.zero_grad(set_to_none=True)
    return found


def _plain(model: Any, batches: Sequence[dict[str, torch.Tensor]]) -> None:
    model.zero_grad(set_to_none=True)
    for batch in batches:
        given = {name: batch[name] for name in ("input_ids", "attention_mask", "position_ids", "logits_to_keep") if name in batch}
        logits = model(**given, use_cache=False).logits  # with a cache transformers would let packed samples see each other
        logprobs = logits.float().log_softmax(-1).gather(-1, batch["targets"][..., None])[..., 0]
        (-(logprobs - batch["logprobs"]).exp() * batch["advantages"]).sum().backward()


def _padded(samples: Sequence[Sample]) -> dict[str, Any]:
    """A group as one batch, padded on the right: all have the same prompt."""
    ids = [torch.from_numpy(sample.trajectory.token_ids.astype(np.int64)) for sample in samples]
    prompt = len(samples[0].trajectory.prompt.token_ids)

    def column(values: list[torch.Tensor]) -> torch.Tensor:
        return torch.nn.utils.rnn.pad_sequence(values, batch_first=True)

    whole = column(ids)
    return {
        "input_ids": whole[:, :-1],
        "attention_mask": column([torch.ones_like(one) for one in ids])[:, :-1],
        "logits_to_keep": torch.arange(prompt - 1, whole.shape[1] - 1),
        "targets": whole[:, prompt:],
        "logprobs": column([torch.from_numpy(sample.trajectory.logprobs) for sample in samples])[:, prompt:],
        "advantages": column([torch.from_numpy(sample.advantages) for sample in samples])[:, prompt:],
    }


def _filled(groups: list[Group], row_tokens: int) -> list[list[Sample]]:
    """The samples of as few batches as hold them in order."""
    batches: list[list[Sample]] = [[]]
    room = row_tokens
    for sample in (sample for group in groups for sample in group.samples):
        if (length := len(sample.trajectory.token_ids)) > room:
            batches.append([])
            room = row_tokens
        batches[-1].append(sample)
        room -= length
    return batches


def _packed(samples: Sequence[Sample]) -> dict[str, Any]:
    """Samples end to end; transformers tells them apart where positions start anew."""
    ids = torch.from_numpy(np.concatenate([sample.trajectory.token_ids for sample in samples]).astype(np.int64))
    trained = torch.from_numpy(np.concatenate([sample.trajectory.loss_mask for sample in samples])).nonzero()[:, 0]
    return {
        "input_ids": ids[None],
        "position_ids": torch.cat([torch.arange(len(sample.trajectory.token_ids)) for sample in samples])[None],
        "logits_to_keep": trained - 1,
        "targets": ids[trained][None],
        "logprobs": torch.from_numpy(np.concatenate([sample.trajectory.logprobs for sample in samples]))[trained][None],
        "advantages": torch.from_numpy(np.concatenate([sample.advantages for sample in samples]))[trained][None],
    }
