"""What a user writes who wants no framework: a synchronous loop over vLLM and transformers, both on every core, in turns.

This is what the colocated mode of larger systems does: each rank has an engine and a copy of the model, samples its part of the batch,
trains on it, and takes part in the mean of the gradients; then the engine takes the weights. Sequences of like length are trained together.
"""

import importlib
import itertools
import os
import time
from pathlib import Path

import torch
import torch.multiprocessing as multiprocessing

from scripts.bench.beside import steps


def train(rank, ranks, told, gradients, barrier):
    os.sched_setaffinity(0, {sorted(os.sched_getaffinity(0))[rank]})
    torch.set_num_threads(1)
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from vllm import LLM, SamplingParams

    from pipelinerl.engine.vllm.weights import keep_plain_weights

    keep_plain_weights()  # on CPUs vLLM packs weights, after which they cannot be loaded again
    task = importlib.import_module(told["task"])
    tokenizer = AutoTokenizer.from_pretrained(told["model"])
    policy = AutoModelForCausalLM.from_pretrained(told["model"], dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=told["learning_rate"], betas=(0.9, 0.95), weight_decay=0.0)
    group_size, num_groups = told["group_size"], told["groups_per_step"] // ranks
    engine = LLM(
        told["model"],
        dtype="float32",
        max_model_len=told["context"],
        max_num_seqs=group_size * num_groups,
        kv_cache_memory_bytes=1 << 28,
        block_size=32,
        enforce_eager=True,
        seed=1000 * told["seed"] + rank,
        disable_log_stats=True,
    )
    sampling = SamplingParams(n=group_size, temperature=1.0, max_tokens=told["max_tokens"], logprobs=0, detokenize=False)
    prompts = itertools.islice(task.train_prompts(told["seed"]), rank, None, ranks)
    journal = steps.Steps(Path(told["journal"]) if rank == 0 else Path(f"{told['journal']}.{rank}"))
    for _ in range(told["steps"]):
        marks = [time.perf_counter()]
        rows = list(itertools.islice(prompts, num_groups))
        asked = engine.generate([row["prompt"] for row in rows], sampling, use_tqdm=False)
        marks.append(time.perf_counter())
        samples, rewards = [], []
        for row, answer in zip(rows, asked, strict=True):
            group = [task.reward(**row, completion=tokenizer.decode(one.token_ids, skip_special_tokens=True)) for one in answer.outputs]
            scores = torch.tensor(group)
            advantages = (scores - scores.mean()) / (scores.std() + 1e-6)
            rewards += group
            for one, advantage in zip(answer.outputs, advantages, strict=True):
                mu = [token[id].logprob for token, id in zip(one.logprobs, one.token_ids, strict=True)]
                samples.append((answer.prompt_token_ids, list(one.token_ids), mu, advantage))
        samples.sort(key=lambda sample: len(sample[0]) + len(sample[1]))
        num_tokens = sum(len(ids) for _, ids, _, _ in samples)
        for batch in batches(samples, told["batch_tokens"]):
            loss(policy, batch).backward()
        gradients[rank, -1] = num_tokens
        at = 0
        for parameter in policy.parameters():
            gradients[rank, at : at + parameter.numel()] = parameter.grad.flatten()
            at += parameter.numel()
        barrier.wait()
        mean, at = gradients[:, :-1].sum(0) / gradients[:, -1].sum(), 0
        barrier.wait()
        for parameter in policy.parameters():
            parameter.grad.copy_(mean[at : at + parameter.numel()].view_as(parameter))
            at += parameter.numel()
        torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        marks.append(time.perf_counter())
        engine.apply_model(lambda model: model.load_weights(policy.named_parameters()) and None)
        engine.reset_prefix_cache()
        marks.append(time.perf_counter())
        journal.sampled(rewards, [len(ids) for _, ids, _, _ in samples])
        journal.trained(dict(zip(("generation", "training", "weights"), map(float.__sub__, marks[1:], marks), strict=True)))


def batches(samples, limit):
    """Samples of like length, so many that they are at most so many tokens with their padding."""
    batch = []
    for sample in samples:
        if batch and (len(batch) + 1) * (len(sample[0]) + len(sample[1])) > limit:
            yield batch
            batch = []
        batch.append(sample)
    yield batch


def loss(policy, batch):
    """The clipped objective, summed over sampled tokens."""
    longest = max(len(prompt) + len(ids) for prompt, ids, _, _ in batch)
    tokens, mask = torch.zeros(len(batch), longest, dtype=torch.long), torch.zeros(len(batch), longest)
    mu, advantages = torch.zeros(len(batch), longest), torch.stack([advantage for *_, advantage in batch])[:, None]
    for row, (prompt, ids, logprobs, _) in enumerate(batch):
        end = len(prompt) + len(ids)
        tokens[row, :end] = torch.tensor([*prompt, *ids])
        mask[row, len(prompt) : end] = 1.0
        mu[row, len(prompt) : end] = torch.tensor(logprobs)
    logits = policy(input_ids=tokens).logits[:, :-1]  # padding is on the right, where nothing looks at it
    logprobs = torch.log_softmax(logits, -1).gather(-1, tokens[:, 1:, None])[..., 0]
    ratio = torch.exp((logprobs - mu[:, 1:]) * mask[:, 1:])
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.28) * advantages)
    return -(objective * mask[:, 1:]).sum()


if __name__ == "__main__":
    from pipelinerl.engine.environment import set_environment

    set_environment()
    from transformers import AutoModelForCausalLM

    told, ranks = steps.settings(), len(os.sched_getaffinity(0))
    size = sum(parameter.numel() for parameter in AutoModelForCausalLM.from_pretrained(told["model"]).parameters())
    gradients = torch.zeros(ranks, size + 1).share_memory_()
    context = multiprocessing.get_context("spawn")
    multiprocessing.spawn(train, (ranks, told, gradients, context.Barrier(ranks)), nprocs=ranks)
