"""Engines whose KV cache is full: which sequences wait, and that they lose nothing; the real one, and the simulated runs' own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.engine.base import Engine
from pipelinerl.messages import Generate
from tests.contract.test_engine import CONTEXT, Reply, note, request, serve
from tests.sim.peers import SimulatedEngine

BLOCK_TOKENS, NUM_BLOCKS = 32, 3
"""Of the cache: 96 tokens, room for one sequence of the whole context and half of another."""
TOKEN_BYTES = 2 * 2 * 2 * 32 * 4
"""Two layers, keys and values of two heads of 32 in float32."""


@pytest.fixture(params=["simulated", pytest.param("vllm", marks=pytest.mark.vllm)])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Engine]:
    if request.param == "simulated":
        kv_tokens = BLOCK_TOKENS * NUM_BLOCKS
        yield SimulatedEngine(fraction=0.0, seed=0, max_model_tokens=CONTEXT, max_running=4, mean_tokens=10**9, kv_tokens=kv_tokens)
        return
    from tests import real_engine, tiny_models

    tiny_models.make_qwen2(tmp_path, tied=False, seed=2)
    cache_bytes = (NUM_BLOCKS + 1) * BLOCK_TOKENS * TOKEN_BYTES  # vLLM keeps one block for itself
    options = {"block_size": BLOCK_TOKENS}
    with real_engine.vllm_engine(tmp_path, max_running=4, max_tokens=CONTEXT, kv_cache_bytes=cache_bytes, options=options) as engine:
        yield engine


def asked(name: str, prompt: str) -> Generate:
    """Of other prompts, so that neither finds its cache in the other's."""
    return request(name, prompt=(5, 6, 7) if prompt == "a" else (9, 8, 7), max_tokens=50, ignores_ends=True)


def test_a_sequence_that_gives_way_waits_with_its_tokens_and_goes_on_when_there_is_room(engine: Engine):
    alone = serve(engine, asked("reference", "b"))["reference"].token_ids
    assert engine.limits.kv_tokens is not None
    assert BLOCK_TOKENS * NUM_BLOCKS <= engine.limits.kv_tokens <= BLOCK_TOKENS * (NUM_BLOCKS + 1)
    for name in "ab":
        engine.submit(asked(name, name), version=0)
    replies = {name: Reply() for name in "ab"}
    note(engine.step(), replies)
    while not engine.waiting:
        note(engine.step(), replies)
    assert list(engine.waiting) == ["b"], "the one that came last gives way"
    num_written = len(replies["b"].token_ids)
    assert 20 < num_written < 50, "with its prompt, at most half of the cache; by whole blocks, at least a third"
    while not replies["a"].finishes:
        assert list(engine.waiting) == ["b"]
        note(engine.step(), replies)
    assert len(replies["b"].token_ids) == num_written, "it is given nothing while it waits"
    while not replies["b"].finishes:
        note(engine.step(), replies)
    assert list(engine.waiting) == []
    assert replies["b"].token_ids == alone
