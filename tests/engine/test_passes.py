"""vLLM's forward passes: whose weights each was launched under, and its tokens in columns."""

from __future__ import annotations

import collections
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytestmark = pytest.mark.vllm  # the package is vLLM's


class Core:
    """Launches a pass, or ends the oldest, or both, as vLLM's `step_with_batch_queue` may; the output of a pass is its weights."""

    def __init__(self, *, size: int, seed: int) -> None:
        self.engine_core = SimpleNamespace(batch_queue=collections.deque[int]())
        self.weights = 0
        self.most = 0
        self._size = size
        self._chance = np.random.default_rng(seed)

    def get_output(self) -> Any:
        queue = self.engine_core.batch_queue
        launches = self._chance.random() < 0.8
        if launches:
            queue.appendleft(self.weights)
            self.most = max(self.most, len(queue))
            if len(queue) < self._size:
                return SimpleNamespace(outputs=[])
        return SimpleNamespace(outputs=[queue.pop()] if queue else [])


@pytest.mark.parametrize(("size", "seed"), [(2, 0), (2, 1), (3, 2), (5, 3)])
def test_a_pass_has_the_weights_of_its_launch_however_many_are_under_way(size: int, seed: int) -> None:
    from pipelinerl.engine.vllm.passes import Passes

    core = Core(size=size, seed=seed)
    passes: Passes[int] = Passes(core)
    num_late = 0
    for step in range(400):
        core.weights = step // 3
        outputs, weights = passes.advance(core.weights)
        assert outputs in ([], [weights])
        num_late += outputs != [] and weights != core.weights
    assert (core.most, num_late > 20) == (size, True)


def test_after_a_failed_pass_the_next_ones_are_told_apart_again() -> None:
    from pipelinerl.engine.vllm.passes import Passes

    queue: collections.deque[int] = collections.deque()
    core = SimpleNamespace(engine_core=SimpleNamespace(batch_queue=queue))

    def launch_and_end() -> Any:
        queue.appendleft(core.weights)
        return SimpleNamespace(outputs=[queue.pop()] if len(queue) == 3 else [])

    def fail() -> Any:
        queue.pop()
        raise RuntimeError("out of memory")

    passes: Passes[int] = Passes(core)
    core.get_output = launch_and_end
    for core.weights in (0, 1):
        assert passes.advance(core.weights)[0] == []
    core.get_output = fail
    with pytest.raises(RuntimeError, match="out of memory"):
        passes.advance(2)
    passes.forget_failed()
    core.get_output, core.weights = launch_and_end, 3
    assert passes.advance(3)[0] == []
    core.weights = 4
    assert passes.advance(4) == ([1], 1)


def output_of(name: str, token_ids: list[int]) -> Any:
    from vllm.v1.engine import EngineCoreOutput
    from vllm.v1.outputs import LogprobsLists

    column = np.array(token_ids, np.int32)[:, None]
    table = np.concatenate([-column / 8, np.full_like(column, 9)], 1).astype(np.float32)  # the sampled token's, and another's
    logprobs = LogprobsLists(column, table, np.zeros(len(token_ids), np.int32))
    return EngineCoreOutput(request_id=name, new_token_ids=token_ids, new_logprobs=logprobs)


@pytest.mark.parametrize(
    ("sampled", "columns"),
    [
        ({}, [("", [])]),
        ({"a": []}, [("", [])]),
        ({"a": [5], "b": [6], "c": [7]}, [("abc", [5, 6, 7])]),
        ({"a": [5], "b": [], "c": [7]}, [("ac", [5, 7])]),
        ({"a": [5, 6, 7], "b": [8], "c": [], "d": [9, 10]}, [("abd", [5, 8, 9]), ("ad", [6, 10]), ("a", [7])]),
    ],
)
def test_tokens_come_in_columns_with_one_of_each_sequence(sampled: dict[str, list[int]], columns: list[tuple[str, list[int]]]) -> None:
    from pipelinerl.engine.vllm.passes import columns_of

    found = list(columns_of([output_of(name, token_ids) for name, token_ids in sampled.items()]))
    assert [("".join(output.request_id for output in outputs), token_ids.tolist()) for outputs, token_ids, _ in found] == columns
    for _, token_ids, logprobs in found:
        assert (token_ids.dtype, logprobs.dtype) == (np.int32, np.float32)
        assert logprobs.tolist() == [-token_id / 8 for token_id in token_ids.tolist()]
