"""RL in one process, where the age of every token is exactly what it is told to be: what a policy learns per sample under staleness.

The losses, the packing into rows, the optimizer and the advantages are the product's own (`trainer.step`, `pipelinerl.algorithms`); only
the pipeline is left out, because its ages depend on the speed of a machine. The sampler keeps the last K + 1 policies and decodes each
token under the one it is told to, keeping keys and values over a change of policy, as an engine does over a swap.

    queue   a batch is sampled whole by the policy of K versions ago: it waited K versions to be trained
    flight  the policy changes while a sequence is sampled: its first token is K versions old, its last is the policy's own

Step s trains version s; before there are K versions, the age is s at most.
"""

from __future__ import annotations

import collections
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache, Qwen3ForCausalLM, set_seed

from pipelinerl.algorithms.advantage import group_advantages
from pipelinerl.algorithms.advantage.outcome import ScoredGroup
from pipelinerl.algorithms.method import ALWAYS_OFFERED, TRAINER_OFFERS, Method
from pipelinerl.algorithms.methods import resolve
from pipelinerl.demo.sort_digits import BEHAVIOURS, CHARACTERS, held_out_prompts, reward, train_prompts
from pipelinerl.messages import UNSAMPLED, MicroBatch, StepClosed
from scripts.bench.qwen3 import qwen3_config
from trainer.backend import Backend, Outputs
from trainer.logprob_mismatch import Agreement
from trainer.model.model import Model
from trainer.optimizer import Optimizer, Schedule
from trainer.parallel.replicas import Replicas
from trainer.step import Step

EOS, FIRST_CHARACTER = 1, 2
PROMPT_TOKENS, MAX_TOKENS = 7, 8
"""Six digits and "="; six digits, the end, and one that may be wrong."""
CPU = torch.device("cpu")
Policy = dict[str, torch.Tensor]

OBJECTIVES: dict[str, dict[str, Any]] = {
    "uncorrected": {"objective": "gpg", "proximal": "current"},
    "ppo": {},
    "decoupled": {"objective": "gpg", "proximal": "current", "weight": {"name": "tis_token", "cap": 5.0}},
}
"""Overrides of the row `grpo`. Uncorrected takes every sample for the policy's own; ppo clips pi / mu (what AReaL calls naive); decoupled
weighs by min(prox / mu, 5), which is all that is left of AReaL's form where a step is one update: prox is pi, and a clip does nothing. All
see the same samples and the same advantages."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """The sizes of a task."""

    steps: int = 80
    groups: int = 8
    group_size: int = 8
    learning_rate: float = 2e-4
    """As the demo's. At 5e-4 the clip alone still learns from stale samples; at 1e-3 even fresh ones end below where they began."""
    evaluate_every: int = 4
    num_held_out: int = 128


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One curve."""

    folder: Path
    """Of the warm-started model."""
    objective: str
    """Of `OBJECTIVES`."""
    bound: int
    """K."""
    where: str
    """Where tokens get old: "queue" or "flight"."""
    seed: int
    task: Task


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """The learning curve of one job."""

    samples: list[int]
    """Trained when each evaluation was made."""
    scores: list[float]
    """Greedy accuracy on held-out prompts."""
    age_mean: float
    """Over trained tokens of the second half of the run."""
    ess: float
    """Mean effective sample fraction, there."""

    @property
    def area(self) -> float:
        """Mean score over samples: the area under the curve, of 1."""
        return float(np.mean(self.scores))

    @property
    def last(self) -> float:
        """Mean of the last three scores."""
        return float(np.mean(self.scores[-3:]))


def make_small_model(folder: Path) -> None:
    """Write a fresh Qwen3 of 0.16 M parameters over the demo's characters."""
    set_seed(0)
    config = qwen3_config(
        vocabulary=len(CHARACTERS) + FIRST_CHARACTER,
        hidden=64,
        layers=3,
        heads=2,
        positions=32,
        eos_token_id=EOS,
        bos_token_id=None,
        dtype="float32",
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def warm_start(folder: Path, *, steps: int, batch: int = 64) -> float:
    """Teach the model in `folder` the demo's four behaviours in equal parts, in place; return its greedy held-out accuracy."""
    torch.set_num_threads(1)
    module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=3e-3, total_steps=steps, pct_start=0.1)
    prompts = train_prompts(seed=10**6)
    for _ in range(steps):
        texts = [f"{(digits := next(prompts)['prompt'])}{BEHAVIOURS[number % 4](digits[:-1])}" for number in range(batch)]
        tokens = torch.tensor([[*_encode(text), EOS] for text in texts])
        logits = module(input_ids=tokens[:, :-1]).logits[:, PROMPT_TOKENS - 1 :]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, PROMPT_TOKENS:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    module.save_pretrained(folder)
    return _score(Sampler(folder), module.state_dict(), num_held_out=256)


def learn(job: Job) -> Curve:
    """Train from the warm start under the job's staleness, and judge every policy by the same held-out prompts."""
    torch.set_num_threads(1)
    torch.manual_seed(job.seed)
    task = job.task
    model = Model(job.folder, dtype="float32", temperature=1.0, device=CPU)
    method = resolve("grpo", OBJECTIVES[job.objective], group_size=task.group_size, offers=ALWAYS_OFFERED | TRAINER_OFFERS)
    step, sampler = _step(model, method=method, task=task), Sampler(job.folder)
    prompts = train_prompts(seed=job.seed)
    policies: collections.deque[Policy] = collections.deque([_copy(model)], maxlen=job.bound + 1)
    samples, scores, ages, ess = [0], [_score(sampler, policies[-1], num_held_out=task.num_held_out)], [], []
    for number in range(task.steps):
        rows = [next(prompts) for _ in range(task.groups)]
        batch = _sample(rows, sampler=sampler, policies=policies, where=job.where, step=number, method=method, task=task)
        step.add(batch)
        num_tokens = int(batch.loss_mask.sum())
        sealed = StepClosed(step=number, num_micro_batches=1, num_tokens=num_tokens, num_samples=len(batch.lengths))
        step.train_held(sealed)
        metrics = step.finish(sealed)
        policies.append(_copy(model))
        if number >= task.steps // 2:
            ages.append(metrics["staleness_mean"])
            ess.append(metrics["ess_fraction"])
        if (number + 1) % task.evaluate_every == 0:
            samples.append((number + 1) * task.groups * task.group_size)
            scores.append(_score(sampler, policies[-1], num_held_out=task.num_held_out))
    return Curve(samples=samples, scores=scores, age_mean=float(np.mean(ages)), ess=float(np.mean(ess)))


class Sampler:
    """Decodes a batch of prompts of one length, each token under the policy it is told to."""

    def __init__(self, folder: Path) -> None:
        self._module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._module.eval()

    @torch.no_grad()
    def decode(self, prompts: list[list[int]], *, policies: list[Policy], greedy: bool) -> tuple[np.ndarray, np.ndarray]:
        """[n, MAX_TOKENS] tokens and log-probabilities; `policies` has one entry for each position. What follows an end is meaningless."""
        cache, tokens = DynamicCache(), torch.tensor(prompts)
        sampled, logprobs = [], []
        current: Policy | None = None
        for policy in policies:
            if policy is not current:
                self._module.load_state_dict(policy)
                current = policy
            logits = self._module(input_ids=tokens, past_key_values=cache, use_cache=True).logits[:, -1]
            distribution = logits.float().log_softmax(-1)
            tokens = distribution.argmax(-1, keepdim=True) if greedy else torch.multinomial(distribution.exp(), 1)
            sampled.append(tokens)
            logprobs.append(distribution.gather(1, tokens))
        return torch.cat(sampled, 1).numpy(), torch.cat(logprobs, 1).numpy()


def ages_of(step: int, *, bound: int, where: str) -> list[int]:
    """Age in versions of each sampled position of a sequence that step `step` trains."""
    oldest = min(bound, step)
    if where == "queue":
        return [oldest] * MAX_TOKENS
    return [oldest - position * (oldest + 1) // MAX_TOKENS for position in range(MAX_TOKENS)]


def _sample(
    rows: list[dict[str, str]],
    *,
    sampler: Sampler,
    policies: collections.deque[Policy],
    where: str,
    step: int,
    method: Method,
    task: Task,
) -> MicroBatch:
    """Sample and score the groups of a step, and lay them end to end in one row."""
    ages = ages_of(step, bound=policies.maxlen - 1 if policies.maxlen else 0, where=where)
    asked = [row for row in rows for _ in range(task.group_size)]
    tokens, logprobs = sampler.decode(
        [_encode(row["prompt"]) for row in asked], policies=[policies[-1 - age] for age in ages], greedy=False
    )
    lengths = np.array([_length(row) for row in tokens])
    rewards = np.array([_reward(row, answer) for row, answer in zip(tokens, asked, strict=True)])
    columns: dict[str, list[np.ndarray]] = collections.defaultdict(list)
    for start in range(0, len(asked), task.group_size):
        group = slice(start, start + task.group_size)
        advantages = np.asarray(group_advantages(ScoredGroup(rewards=rewards[group], lengths=lengths[group]), method=method))
        for index in range(start, start + task.group_size):
            length = lengths[index]
            loss_mask = np.arange(PROMPT_TOKENS + length) >= PROMPT_TOKENS
            columns["token_ids"].append(np.array([*_encode(asked[index]["prompt"]), *tokens[index, :length]], np.int32))
            columns["loss_mask"].append(loss_mask)
            columns["logprobs"].append(_behind_prompt(logprobs[index, :length], np.float32, before=0.0))
            columns["versions"].append(_behind_prompt(step - np.array(ages[:length]), np.int32, before=UNSAMPLED))
            columns["advantages"].append(np.where(loss_mask, advantages[index - start], 0).astype(np.float32))
    return MicroBatch(
        step=step,
        index=0,
        lengths=(lengths + PROMPT_TOKENS).astype(np.int32),
        rollout_ids=tuple(f"{step}/{index}" for index in range(len(asked))),
        **{name: np.concatenate(parts) for name, parts in columns.items()},  # pyright: ignore[reportArgumentType]
    )


def _step(model: Model, *, method: Method, task: Task) -> Step:
    optimizer = Optimizer(
        model.parameters(),
        schedule=Schedule(learning_rate=task.learning_rate, num_steps=task.steps, warmup_steps=5),
        betas=(0.9, 0.95),
        weight_decay=0.0,
        max_grad_norm=1.0,
    )
    replicas = Replicas(ranks=1, deadline_s=60)
    backend = Backend(model, optimizer=optimizer, replicas=replicas, read=Outputs.of)
    return Step(
        backend,
        method=method,
        replicas=replicas,
        max_completion_tokens=MAX_TOKENS,
        agreement=Agreement(max_logprob_gap=1e-3, device=replicas.device),
    )


def _score(sampler: Sampler, policy: Policy, *, num_held_out: int) -> float:
    rows = held_out_prompts()[:num_held_out]
    tokens, _ = sampler.decode([_encode(row["prompt"]) for row in rows], policies=[policy] * MAX_TOKENS, greedy=True)
    return float(np.mean([_reward(row, asked) for row, asked in zip(tokens, rows, strict=True)]))


def _reward(tokens: np.ndarray, asked: dict[str, str]) -> float:
    length = _length(tokens)
    text = "".join(CHARACTERS[token - FIRST_CHARACTER] if token >= FIRST_CHARACTER else "?" for token in tokens[: length - 1])
    return reward(asked["prompt"], text, asked["answer"]) if tokens[length - 1] == EOS else 0.0


def _length(tokens: np.ndarray) -> int:
    """Sampled tokens up to the end of sequence, that one included."""
    ends = np.flatnonzero(tokens == EOS)
    return int(ends[0]) + 1 if len(ends) else len(tokens)


def _encode(text: str) -> list[int]:
    return [CHARACTERS.index(character) + FIRST_CHARACTER for character in text]


def _behind_prompt(values: np.ndarray, dtype: type, *, before: float) -> np.ndarray:
    return np.concatenate([np.full(PROMPT_TOKENS, before), values]).astype(dtype)


def _copy(model: Model) -> Policy:
    return {name: tensor.detach().clone() for name, tensor in model.module.state_dict().items()}
