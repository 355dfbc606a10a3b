"""`python -P tests/plain_models.py`: what plain transformers and plain vLLM say of a folder, in a process that imports nothing of ours.

It reads a JSON line `{"folder": ..., "sequences": [[id, ...], ...]}` at a time, and answers with one line, `{"transformers": [[...]],
"vllm": [[...]]}`: the log-probability of every token but a sequence's first, in float32.
"""

from __future__ import annotations

import gc
import json
import os
import sys
from typing import Any

os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "TORCH_COMPILE_DISABLE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
os.environ |= {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}

import torch
from transformers import AutoModelForCausalLM
from vllm import LLM, SamplingParams
from vllm.v1.engine import core
from vllm.v1.worker import gpu_worker

gc.freeze()
gc.unfreeze = core.freeze_gc_heap = gpu_worker.freeze_gc_heap = lambda: None  # as `real_engine` says


def by_transformers(folder: str, sequences: list[list[int]]) -> list[list[float]]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")  # others know no soft cap
    return [_chosen(model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1), ids) for ids in sequences]


def _chosen(logprobs: torch.Tensor, ids: list[int]) -> list[float]:
    return logprobs.gather(-1, torch.tensor(ids)[1:, None])[:, 0].tolist()


def by_vllm(folder: str, sequences: list[list[int]]) -> list[list[float]]:
    options: dict[str, Any] = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": 1 << 26, "max_model_len": 256}
    with open(f"{folder}/config.json") as file:
        if "kv_lora_rank" in json.load(file):
            options["attention_backend"] = "CPU_MLA"  # on a processor with AMX vLLM's own choice takes no float32
    model = LLM(folder, skip_tokenizer_init=True, disable_log_stats=True, **options)
    sampling = SamplingParams(max_tokens=1, prompt_logprobs=0, detokenize=False)
    replies = model.generate([{"prompt_token_ids": ids} for ids in sequences], sampling, use_tqdm=False)
    return [
        [found[token].logprob for token, found in zip(ids, reply.prompt_logprobs or (), strict=True) if found is not None]
        for ids, reply in zip(sequences, replies, strict=True)
    ]


def main() -> None:
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    for line in sys.stdin:
        task = json.loads(line)
        with torch.no_grad():
            # transformers first: vLLM's way to serve a model by transformers' code changes the class in this process
            found = {"transformers": by_transformers(**task), "vllm": by_vllm(**task)}
        gc.collect()
        print(json.dumps(found), file=answers, flush=True)


if __name__ == "__main__":
    main()
