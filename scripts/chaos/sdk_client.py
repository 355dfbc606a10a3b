"""`python sdk_client.py MODEL RANK FILE [again]`: a client written for Tinker's SDK alone, which trains while its server is killed.

With TINKER_BASE_URL and TINKER_API_KEY. It samples from what it trains, adds two gradients and steps, all three asked for before any is
answered, and beside that it samples without end from what all models begin with. It prints `answered N` after each step, until a line comes
in; then it saves, and writes what it asked and was told to FILE. `again` asks for what FILE says once more, of a new model, and writes what
it is told this time to FILE.again. It catches nothing: what the SDK raises is a broken promise.
"""

# pyright: reportAttributeAccessIssue=false, reportMissingImports=false
# The SDK is not installed where types are checked.

from __future__ import annotations

import concurrent.futures
import json
import sys
import threading
from pathlib import Path
from typing import Any

import tinker
from tinker import types

PROMPT = [5, 9, 12, 7, 3, 6]
LEAST = 4
"""Steps, however soon the line comes in."""
RATE = 1e-3


def of(tokens: list[int]) -> types.ModelInput:
    return types.ModelInput.from_ints(tokens)


def datum(sequence: dict[str, Any]) -> types.Datum:
    """What was sampled, with where it is from."""
    n, tokens, name = len(PROMPT), sequence["tokens"], sequence["name"]
    inputs = {
        "target_tokens": PROMPT[1:] + tokens,
        "logprobs": [0.0] * (n - 1) + sequence["logprobs"],
        "advantages": [0.0] * (n - 1) + [sequence["advantage"]] * len(tokens),
    }
    made = types.Datum(model_input=of(PROMPT + tokens[:-1]), loss_fn_inputs=inputs)
    if len(tokens) < 2:
        return made
    return made.with_provenance(
        model_input=[
            types.PromptProvenanceSpan(sequence_id=name, length=n),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens) - 1),
        ],
        loss_fn_inputs=[
            types.PromptProvenanceSpan(sequence_id=name, offset=1, length=n - 1),
            types.SampledProvenanceSpan(sequence_id=name, length=len(tokens)),
        ],
    )


def train(client: tinker.TrainingClient, halves: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Two gradients and a step; what the server says of them."""
    futures = [client.forward_backward([datum(one) for one in half], "importance_sampling") for half in halves]
    step = client.optim_step(types.AdamParams(learning_rate=RATE))
    outputs = [future.result() for future in futures]
    return {
        "losses": [output.metrics["loss:sum"] for output in outputs],
        "logprobs": [[one["logprobs"].data for one in output.loss_fn_outputs] for output in outputs],
        "grad_norm": step.result().metrics["grad_norm"],
    }


def sampled(sampler: tinker.SamplingClient, *, num: int, max_tokens: int) -> list[dict[str, Any]]:
    params = types.SamplingParams(max_tokens=max_tokens, stop=[])
    said = sampler.sample(prompt=of(PROMPT), num_samples=num, sampling_params=params).result()
    return [
        {"name": one.sequence_id, "tokens": list(one.tokens), "logprobs": list(one.logprobs), "advantage": 1.0 if n % 2 else -1.0}
        for n, one in enumerate(said.sequences)
    ]


def main(model: str, rank: int, file: Path, *, is_again: bool) -> None:
    service = tinker.ServiceClient()
    client = service.create_lora_training_client(base_model=model, rank=rank, seed=1).result()
    asked: list[list[list[dict[str, Any]]]] = json.loads(file.read_text())["asked"] if is_again else []
    told: list[dict[str, Any]] = []
    num_beside = 0
    for halves in asked:
        told.append(train(client, halves))
        print("answered", len(told), flush=True)
    if not is_again:
        ends = threading.Event()
        threading.Thread(target=lambda: (sys.stdin.readline(), ends.set()), daemon=True).start()
        beside = concurrent.futures.ThreadPoolExecutor(1).submit(sample_on, service, model, ends)
        while not ends.is_set() or len(told) < LEAST:
            sampler = client.save_weights_and_get_sampling_client(**({"kind": "inflight"} if len(told) % 2 else {})).result()
            sequences = sampled(sampler, num=4, max_tokens=12)
            asked.append([sequences[:2], sequences[2:]])
            told.append(train(client, asked[-1]))
            print("answered", len(told), flush=True)
        num_beside = beside.result()
    path = client.save_state("end").result().path
    out = file.with_name(file.name + ".again") if is_again else file
    out.write_text(json.dumps({"asked": asked, "told": told, "path": path, "beside": num_beside}))


def sample_on(service: tinker.ServiceClient, model: str, ends: threading.Event) -> int:
    """Sample from what all models begin with; return how often."""
    number, sampler = 0, service.create_sampling_client(base_model=model).result()
    while not ends.is_set():
        sampled(sampler, num=2, max_tokens=20)
        number += 1
    return number


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]), is_again="again" in sys.argv[4:])
