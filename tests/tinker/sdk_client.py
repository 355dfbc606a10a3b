"""A client written for Tinker's SDK 0.38 alone; it knows nothing of what serves it. Prints what it found as JSON, in one line.

`python sdk_client.py MODEL RANK LEARNING_RATE`, with TINKER_BASE_URL and TINKER_API_KEY.
"""

# pyright: reportAttributeAccessIssue=false
# The SDK is not installed where types are checked.

from __future__ import annotations

import itertools
import json
import math
import sys
from typing import Any

import numpy as np
import tinker
from tinker import types

PROMPT = [5, 9, 12, 7, 3, 20]
TEXT = [40, 41, 42, 43, 44]


def of(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def taught(prompt: list[int], words: list[int]) -> types.Datum:
    """A datum that teaches words after a prompt."""
    tokens = prompt + words
    weights = [0.0] * (len(prompt) - 1) + [1.0] * len(words)
    return types.Datum(model_input=of(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:], "weights": weights})


def sampled(sequence: Any, advantage: float) -> types.Datum:
    """A datum of what was sampled, with where it is from."""
    n, k = len(PROMPT), len(sequence.tokens)
    inputs = {
        "target_tokens": PROMPT[1:] + sequence.tokens,
        "logprobs": [0.0] * (n - 1) + sequence.logprobs,
        "advantages": [0.0] * (n - 1) + [advantage] * k,
    }
    datum = types.Datum(model_input=of(PROMPT + sequence.tokens[:-1]), loss_fn_inputs=inputs)
    return datum.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, length=n),
            types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=k - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=sequence.sequence_id, offset=1, length=n - 1),
            types.SampledProvenanceSpan(sequence_id=sequence.sequence_id, length=k),
        ],
    )


def gap(client: tinker.TrainingClient, sampler: tinker.SamplingClient) -> float:
    """The largest distance between what trainer and engine say of the same tokens."""
    tokens = PROMPT + TEXT
    output = client.forward(
        [types.Datum(model_input=of(tokens[:-1]), loss_fn_inputs={"target_tokens": tokens[1:]})], "cross_entropy"
    ).result()
    by_trainer = np.array(output.loss_fn_outputs[0]["logprobs"].data)
    by_engine = np.array(sampler.compute_logprobs(of(tokens)).result()[1:], float)
    return float(np.abs(by_trainer - by_engine).max())


def failure(future: Any) -> list[str]:
    try:
        future.result()
    except tinker.RequestFailedError as error:
        return [str(error.category), str(error)]
    return ["none", ""]


def main(model: str, rank: int) -> None:
    service = tinker.ServiceClient()
    found: dict[str, Any] = {"capabilities": service.get_server_capabilities().supported_models[0].model_name}
    first = service.create_lora_training_client(base_model=model, rank=rank, seed=1).result()
    base = service.create_sampling_client(base_model=model).result()
    found["gap_at_start"] = gap(first, base)
    of_base = base.compute_logprobs(of(PROMPT + TEXT)).result()[1:]

    losses, rate = [], float(sys.argv[3])
    for _ in range(40):
        done = first.forward_backward([taught(PROMPT, TEXT)], "cross_entropy")
        step = first.optim_step(types.AdamParams(learning_rate=rate))
        losses.append(done.result().metrics["loss:sum"])
        step.result()
    found["losses"] = losses
    sampler = first.save_weights_and_get_sampling_client().result()
    found["gap_after_training"] = gap(first, sampler)
    greedy = sampler.sample(prompt=of(PROMPT), num_samples=1, sampling_params=types.SamplingParams(max_tokens=5, temperature=0.0)).result()
    words = greedy.sequences[0].tokens
    found["learned"] = words == TEXT

    pair = (words[1], words[2])
    stops = {
        "token": (pair[1], words.index(pair[1]) + 1),
        # The test's tokenizer has one printable character for each id from 3 on.
        "text": ("".join(chr(token + 29) for token in pair), list(itertools.pairwise(words)).index(pair) + 2),
    }
    for name, (stop, length) in stops.items():
        params = types.SamplingParams(max_tokens=5, temperature=0.0, stop=[stop])
        ended = sampler.sample(of(PROMPT), 1, params).result().sequences[0]
        found[f"stopped_at_{name}"] = [ended.tokens == words[:length], ended.stop_reason]

    second = service.create_lora_training_client(base_model=model, rank=rank, seed=2).result()
    found["gap_of_second_to_base"] = gap(second, base)
    found["base_is_as_it_was"] = float(np.abs(np.array(of_base) - np.array(base.compute_logprobs(of(PROMPT + TEXT)).result()[1:])).max())
    found["gap_of_first_again"] = gap(first, sampler)

    inflight = first.save_weights_and_get_sampling_client(kind="inflight").result()
    metrics: dict[str, float] = {}
    for loss in ("importance_sampling", "ppo", "cispo", "dro"):
        said = inflight.sample(prompt=of(PROMPT), num_samples=4, sampling_params=types.SamplingParams(max_tokens=6)).result()
        data = [sampled(one, 1.0 if number % 2 else -1.0) for number, one in enumerate(said.sequences)]
        first.forward_backward(data, loss).result()
        metrics = first.optim_step(types.AdamParams(learning_rate=1e-3)).result().metrics or {}
        found[loss] = {name.partition("/")[2]: value for name, value in metrics.items() if "/" in name}
        first.save_weights_and_get_sampling_client(kind="inflight").result()
    again = first.forward_backward(data, "importance_sampling")
    again.result()
    found["again"] = first.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["pipelinerl/repeated_tokens"]

    def squares(data: list[types.Datum], logprobs: list[Any]) -> tuple[Any, dict[str, float]]:
        loss = sum((one**2).sum() for one in logprobs)
        return loss, {"squares": float(loss.detach())}

    custom = first.forward_backward_custom([taught(PROMPT, TEXT)], squares).result()
    found["custom"] = [custom.metrics["squares"], first.optim_step(types.AdamParams(learning_rate=0.0)).result().metrics["grad_norm"]]

    saved = first.save_state("after").result().path
    restored = service.create_training_client_from_state_with_optimizer(saved).result()
    found["gap_of_restored"] = gap(restored, first.save_weights_and_get_sampling_client().result())

    found["unknown_loss"] = failure(second.forward_backward([taught(PROMPT, TEXT)], "stable_reinforce"))
    found["unknown_word"] = failure(second.forward_backward([taught(PROMPT, [10**6])], "cross_entropy"))
    found["no_such_state"] = failure(service.create_training_client_from_state("tinker://session-0:train:0/weights/none"))
    assert all(math.isfinite(loss) for loss in losses)
    print("FOUND " + json.dumps(found), flush=True)
    service.close("success").result()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
