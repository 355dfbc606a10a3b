"""vLLM's forward passes: each with the weights that it was launched under, and what it sampled in columns.

Along a pipeline, and with asynchronous scheduling, a pass ends in a later call than the one that launches it, and weights may change in
between. The swap does not wait for it: it is launched behind the pass, on the device's stream, in a rank's queue of calls, or, on a CPU in
this process, after the pass has computed. So a pass computes under the weights of its launch alone, and its tokens carry their version.
Draining would have been as exact, and would have had the device wait for Python at every swap.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar

import numpy as np

Weights = TypeVar("Weights")
"""What tells the weights in force: a version, or the versions of several that are served side by side."""


class Passes(Generic[Weights]):
    """Launches and ends forward passes. They end in the order in which they were launched."""

    def __init__(self, core: Any) -> None:
        """`core` is vLLM's client of an engine core in this process."""
        self._core = core
        self._launched: collections.deque[Weights] = collections.deque()
        """The weights of the passes under way, oldest first: as long as vLLM's own queue of them."""

    def advance(self, weights: Weights) -> tuple[list[Any], Weights]:
        """Have vLLM launch a pass, or end the oldest, or both: the outputs of the ended one (`EngineCoreOutput`), and its weights.

        `weights` are those in force. Without a queue a pass ends in the call that launches it.
        """
        queue = self._core.engine_core.batch_queue
        if queue is None:
            return self._core.get_output().outputs, weights
        before = len(queue)
        outputs = self._core.get_output().outputs
        if len(queue) >= before:  # a call ends one pass at most, so one was launched, or there was nothing to launch or end
            self._launched.append(weights)
        return outputs, self._launched.popleft() if len(self._launched) > len(queue) else weights

    def forget_failed(self) -> None:
        """A pass failed, and its requests were aborted: what others that are under way sample of these, vLLM drops."""
        while len(self._launched) > len(self._core.engine_core.batch_queue or ()):
            self._launched.popleft()


def columns_of(outputs: Sequence[Any]) -> Iterator[tuple[Sequence[Any], np.ndarray, np.ndarray]]:
    """The tokens that a pass sampled (`EngineCoreOutput`): those outputs [N], token ids [N] int32 and log-probabilities [N] float32.

    A token of each output; where a pass sampled several of a sequence (speculative decoding), once for the first of each, once for the
    second, and so on. At least once, with N = 0 where nothing was sampled.
    """
    outputs = [output for output in outputs if output.new_token_ids]
    if not outputs:
        yield outputs, np.zeros(0, np.int32), np.zeros(0, np.float32)
        return
    token_ids = np.array(list(itertools.chain.from_iterable([output.new_token_ids for output in outputs])), np.int32)
    tables = [output.new_logprobs.logprobs for output in outputs]
    # Each is a few bytes of vLLM's table of the pass. `np.concatenate` takes ten times as long, more than all else here together.
    logprobs = np.frombuffer(b"".join(tables), tables[0].dtype).reshape(-1, tables[0].shape[1])[:, 0]
    if len(token_ids) == len(outputs):
        yield outputs, token_ids, logprobs
        return
    counts = np.array([len(output.new_token_ids) for output in outputs])
    firsts = np.cumsum(counts) - counts
    for place in range(counts.max()):
        rows = np.flatnonzero(counts > place)
        yield [outputs[row] for row in rows], token_ids[firsts[rows] + place], logprobs[firsts[rows] + place]


def prompt_logprobs_of(output: Any) -> np.ndarray:
    """[P] float32 of a prompt's log-probabilities, NaN for its first token: nothing stands before it."""
    return np.append(np.float32(np.nan), output.new_prompt_logprobs_tensors.logprobs[:, 0].float().numpy())
