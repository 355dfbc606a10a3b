"""A deterministic engine without a model: tokens follow from the prompt with its images, the position and the version, by hashing.

For rehearsals of a pipeline, and for tests and simulations that need many engines; it passes the same contract tests as the real one.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Collection

import numpy as np

from pipelinerl.engine.base import Limits, Sampled
from pipelinerl.errors import EngineError, WeightsError
from pipelinerl.messages import Finish, Float32, Generate, StageWeights


class FakeEngine:
    """Samples `token(prompt, position, version)`; see `engine.base.Engine`.

    A sequence ends by `Finish.STOP` after a length drawn from the hash of its rollout id, geometric-like with mean `mean_tokens`, or at
    `max_tokens`.
    """

    def __init__(
        self, *, max_model_tokens: int, max_running: int, mean_tokens: int = 32, vocabulary: int = 1000, tensor_parallel_size: int = 1
    ) -> None:
        """`tensor_parallel_size` is what it says to have; it is one process whatever that is."""
        self.limits = Limits(
            max_model_tokens=max_model_tokens, max_running=max_running, tensors=(), tensor_parallel_size=tensor_parallel_size
        )
        self._mean_tokens = mean_tokens
        self._vocabulary = vocabulary
        self._requests: dict[str, tuple[Generate, int, int]] = {}
        """(request, hash of its prompt, length at which it stops) by rollout id."""
        self._positions: dict[str, int] = {}
        self._num_commits = 0
        self._staged: str | None = None
        self._is_asleep = False
        self._dropped: list[str] = []
        """Sequences whose KV cache was dropped, to sleep."""

    @property
    def kv_used(self) -> float | None:
        return None

    @property
    def waiting(self) -> Collection[str]:
        return self._requests.keys() - set(self.running())

    def submit(self, request: Generate, *, version: int, rollback_epoch: int = 0) -> None:
        if request.rollout_id in self._requests:
            raise EngineError(f"{request.rollout_id} is being served already; cancel it before asking again")
        room = self.limits.max_model_tokens - len(request.token_ids)
        if room <= 0 or len(request.token_ids) == 0:
            raise EngineError(f"prompt of {len(request.token_ids)} tokens; this engine serves 1 to {self.limits.max_model_tokens - 1}")
        num_written = request.num_written
        given = request.token_ids[: len(request.token_ids) - num_written]
        seed = zlib.crc32(b"".join(request.images), zlib.crc32(given.tobytes()))
        uniform = (zlib.crc32(request.rollout_id.encode(), seed) + 1) / (2**32 + 1)
        length = 1 + int(-math.log(uniform) * self._mean_tokens)
        self._requests[request.rollout_id] = (request, seed, length)
        self._positions[request.rollout_id] = num_written

    def cancel(self, rollout_id: str) -> None:
        self._requests.pop(rollout_id, None)
        self._positions.pop(rollout_id, None)

    def step(self) -> list[Sampled]:
        assert not self._is_asleep, "a forward pass of an engine that is asleep"
        running, token_ids = self.running(), []
        finishes: dict[str, Finish] = {}
        judged: dict[str, Float32] = {}
        logprob = -math.log(self._vocabulary)
        for rollout_id in running:
            request, seed, length = self._requests[rollout_id]
            position = self._positions[rollout_id] = self._positions[rollout_id] + 1
            token_ids.append(token := self.token(seed, position))
            if position == request.num_written + 1 and request.sampling.has_prompt_logprobs:
                judged[rollout_id] = np.array([math.nan] + [logprob] * (len(request.token_ids) - 1), np.float32)
            if position >= length or token in request.sampling.stop_token_ids:
                finishes[rollout_id] = Finish.STOP
            elif position - request.num_written >= min(request.sampling.max_tokens, self.limits.max_model_tokens - len(request.token_ids)):
                finishes[rollout_id] = Finish.LENGTH
        for rollout_id in finishes:
            self.cancel(rollout_id)
        return [
            Sampled(
                rollout_ids=running,
                token_ids=np.array(token_ids, np.int32),
                logprobs=np.full(len(running), logprob, np.float32),
                finishes=finishes,
                prompt_logprobs=judged,
            )
        ]

    def running(self) -> list[str]:
        """The requests that the next pass samples for."""
        return list(self._requests)[: self.limits.max_running]

    def token(self, seed: int, position: int) -> int:
        """The token at a position under the weights current now: another commit, another token."""
        return (seed + 7919 * position + 104729 * self._num_commits) % self._vocabulary

    def stage(self, order: StageWeights) -> None:
        self._staged = None
        if order.buffer == "corrupt":
            raise WeightsError(f"weight buffer {order.buffer}: digest is not {order.digest}")
        self._staged = order.buffer

    def commit(self, recompute: Collection[str] = ()) -> Collection[str]:
        if self._staged is None:
            raise WeightsError("nothing is staged: commit follows stage")
        self._staged = None
        self._num_commits += 1
        self._is_asleep, dropped, self._dropped = False, self._dropped, []
        return [rollout_id for rollout_id in dict.fromkeys((*recompute, *dropped)) if rollout_id in self._requests]

    def sleep(self) -> int:
        self._is_asleep, self._dropped = True, [rollout_id for rollout_id in self.running() if self._positions[rollout_id]]
        return 0
