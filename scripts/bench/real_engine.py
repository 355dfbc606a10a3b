"""The engine's part of `real`: tokens per second over plain vLLM, and what staging a policy takes while no sequence runs.

Each engine lives in a process of its own on the same core, and they take turns, so that both are warm and never share the core. Plain vLLM
is its `LLMEngine` with the kernels that it chooses by itself, eager like ours (what it compiles is not measured), without a tokenizer, and
with the log-probability of each token, which RL needs. Tokens are counted by seconds of the core: what other processes take is not theirs.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl.config.file import parse
from scripts.bench import children
from scripts.bench.real_model import SMOLLM2_135M

CACHE_BYTES = 512 << 20
POSITIONS = 512
NUM_WARM, NUM_STAGED = 3, 3
"""Policies that are staged before any is counted: each of three weight buffers once; and those counted."""


class Turns:
    """A child that does its work each time it is told to, and returns what it found."""

    def __init__(self, make: Callable[[], Callable[[str], Any]], *, core: int) -> None:
        reader, self._tell = os.pipe()
        self._hear, writer = os.pipe()

        def serve() -> None:
            os.close(self._tell)
            work = make()
            while (word := os.read(reader, 64).decode()) != "end":
                os.write(writer, json.dumps(work(word)).encode())

        self._child = children.start(serve, cores={core})
        os.close(reader)
        os.close(writer)

    def __call__(self, word: str) -> Any:
        os.write(self._tell, word.encode())
        if not (found := os.read(self._hear, 1 << 16)):
            raise SystemExit("an engine of the bench failed; its error stands above")
        return json.loads(found)

    def end(self) -> None:
        os.write(self._tell, b"end")
        os.waitpid(self._child, 0)


def plain(folder: Path, *, num_sequences: int, num_tokens: int, num_prompt_tokens: int) -> Callable[[str], float]:
    """Load plain vLLM; the work is tokens per second of the core."""
    from vllm import EngineArgs, SamplingParams
    from vllm.v1.engine.llm_engine import LLMEngine

    sizes: dict[str, Any] = {"max_model_len": POSITIONS, "max_num_seqs": num_sequences, "kv_cache_memory_bytes": CACHE_BYTES}
    engine = LLMEngine.from_engine_args(
        EngineArgs(model=str(folder), dtype="float32", enforce_eager=True, disable_log_stats=True, skip_tokenizer_init=True, **sizes)
    )
    sampling = SamplingParams(max_tokens=num_tokens, ignore_eos=True, logprobs=0, detokenize=False)

    def work(_: str) -> float:
        began = time.process_time()
        for number, ids in enumerate(_prompts(num_sequences, num_prompt_tokens)):
            engine.add_request(f"{began}/{number}", {"prompt_token_ids": ids.tolist()}, sampling)
        while engine.has_unfinished_requests():
            engine.step()
        return num_sequences * num_tokens / (time.process_time() - began)

    return work


def ours(folder: Path, *, num_sequences: int, num_tokens: int, num_prompt_tokens: int) -> Callable[[str], Any]:
    """Load our engine; the work "decode" is the same through its own loop, "stage" is `_staging`."""
    from pipelinerl.engine.loop import EngineLoop
    from pipelinerl.engine.staging import StagingThread
    from pipelinerl.engine.vllm.engine import VllmEngine
    from pipelinerl.messages import Generate, Sampling

    tree: dict[str, Any] = {
        "run": {"name": "real"},
        "model": {"path": str(folder), "dtype": "float32", "max_tokens": POSITIONS},
        "data": {"source": "scripts.bench.real_run:prompts"},
        "reward": [{"function": "scripts.bench.real_run:reward"}],
        "rollout": {"max_tokens": num_tokens},
        "engine": {"max_running": num_sequences, "kv_cache_bytes": CACHE_BYTES},
    }
    config = parse(tree, origin="real")
    engine = VllmEngine(model=config.model, engine=config.engine, rollout=config.rollout, seed=0)
    print(engine.limits.choices[-1], flush=True)
    stager = StagingThread(engine).__enter__()
    loop = EngineLoop(engine, engine_id=0, stager=stager)
    num_rounds = 0

    def decode() -> float:
        nonlocal num_rounds
        num_rounds += 1
        began = time.process_time()
        for number, ids in enumerate(_prompts(num_sequences, num_prompt_tokens)):
            sampling = Sampling(max_tokens=num_tokens)
            loop.handle(Generate(rollout_id=f"{num_rounds}/{number}", attempt=0, token_ids=ids, sampling=sampling))
        while loop.has_work:
            loop.advance()
        sampled = sum(len(getattr(message, "token_ids", ())) for message in loop.outbox)
        loop.outbox.clear()
        return sampled / (time.process_time() - began)

    return lambda word: decode() if word == "decode" else _staging(engine, stager)


def _staging(engine: Any, stager: Any) -> dict[str, float]:
    """Seconds of staging a policy while no sequence runs, and of what it consists of at full speed; the pause of its commit.

    The first policies are not counted: weight buffers are mapped then, and the memory of packed copies is had from the system, as in the
    first steps of a run alone.
    """
    import torch

    from pipelinerl.messages import StageWeights
    from pipelinerl.weights import manifest
    from pipelinerl.weights.base import num_bytes, views
    from tests.real_engine import Publisher

    publisher = Publisher(engine)
    tensors = engine.limits.tensors
    held = torch.zeros(num_bytes(tensors), dtype=torch.uint8)
    engine._weights._swap.save(held)
    found: dict[str, list[float]] = {name: [] for name in ("stage", "hash", "copy", "pack", "pause")}
    target = torch.zeros_like(held)
    before = ""
    for version in range(1, 1 + NUM_WARM + NUM_STAGED):
        changed = {
            name: view * (1 + version / 1000) for name, view in views(held, tensors).items()
        }  # what is as it was is not packed again
        buffer, digest = publisher.publish(changed, version=version)
        order = StageWeights(version=version, buffer=buffer, digest=digest)
        with stager.while_decoding_rests():
            found["stage"].append(_seconds(lambda order=order: stager(order).result()))
        found["pause"].append(_seconds(engine.commit))
        if before:
            publisher.release(before)  # its memory is written again, as a trainer's is
        before = buffer
        found["hash"].append(_seconds(lambda: list(manifest.digests(held, tensors))))
        found["copy"].append(_seconds(lambda: target.copy_(held)))
        found["pack"].append(_seconds(lambda: _pack(engine)))
    return {name: float(np.median(seconds[NUM_WARM:])) for name, seconds in found.items()} | {"mb": len(held) / 1e6}


def _pack(engine: Any) -> None:
    """Pack what a staging packs, if it does."""
    swap = engine._weights._swap
    if hasattr(swap, "_kernels"):
        swap._kernels.pack([one.parameter.data for one in swap._placed])


def _seconds(work: Callable[[], object]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _prompts(count: int, num_tokens: int) -> list[np.ndarray]:
    chance = np.random.default_rng(time.time_ns())  # none is in the prefix cache
    return [chance.integers(3, SMOLLM2_135M["vocab_size"], num_tokens, dtype=np.int32) for _ in range(count)]
