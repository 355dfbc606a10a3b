"""The seam between the step loop and an inference engine.

`pipelinerl.engine.loop` owns the loop and stamps every token with the version that sampled it; an `Engine` runs forward passes and
takes weights. Two of them pass the same contract tests: `vllm.engine` (real) and `fake` (deterministic, no model).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from pipelinerl.messages import Finish, Float32, Generate, Routes, Shards, StageWeights, Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an engine, fixed once its model is loaded."""

    max_model_tokens: int
    """Longest prompt plus completion."""
    max_running: int
    """Sequences decoded at once."""
    tensors: tuple[Tensor, ...]
    """Layout it wants a published policy in."""
    shards: Shards = ()
    """What each of its ranks holds; empty: one rank holds everything."""
    choices: tuple[str, ...] = ()
    """Decisions made when it started, each a sentence with its reason."""
    kv_tokens: int | None = None
    """Tokens that the KV cache holds; None where nothing bounds them."""
    transports: tuple[str, ...] = ()
    """Transports between devices by which policies could reach it."""
    tensor_parallel_size: int = 1
    """Its ranks that share every matrix."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sampled:
    """What one forward pass sampled, in columns: a token for each of N sequences; and which sequences ended with it.

    A pass that samples several tokens of a sequence is several of these, one after the other.
    """

    rollout_ids: Sequence[str]
    """[N], none twice."""
    token_ids: np.ndarray
    """[N] int32."""
    logprobs: np.ndarray
    """[N] float32, natural log under the distribution sampled from."""
    finishes: Mapping[str, Finish] = dataclasses.field(default_factory=dict)
    """Of the sequences that ended, by rollout id; one that ended without a token is here alone."""
    versions: int | np.ndarray | None = None
    """The policy whose weights sampled them: of the whole pass, or [N] int32 where an engine serves several side by side; None: the one
    that it committed last."""
    routes: Mapping[str, Routes] = dataclasses.field(default_factory=dict)
    """Routes of every token but the last, of sequences that ended; empty where experts are not recorded."""
    num_drafted: int = 0
    """Drafted tokens that the pass verified (speculative decoding), said with its first tokens; those that it kept are the others."""
    prompt_logprobs: Mapping[str, Float32] = dataclasses.field(default_factory=dict)
    """As in `Completion`, of sequences that begin with this pass and whose requests ask for them."""

    def only(self, is_kept: np.ndarray) -> Sampled:
        """The columns of these sequences ([N] bool), and every end but those of the others."""
        left = {rollout_id for rollout_id, kept in zip(self.rollout_ids, is_kept, strict=True) if not kept}
        return Sampled(
            rollout_ids=[rollout_id for rollout_id in self.rollout_ids if rollout_id not in left],
            token_ids=self.token_ids[is_kept],
            logprobs=self.logprobs[is_kept],
            finishes={rollout_id: finish for rollout_id, finish in self.finishes.items() if rollout_id not in left},
            versions=self.versions[is_kept] if isinstance(self.versions, np.ndarray) else self.versions,
            routes=self.routes,
            num_drafted=self.num_drafted,
            prompt_logprobs=self.prompt_logprobs,
        )


@runtime_checkable
class Sleeper(Protocol):
    """An engine that shares its device with the trainer, in turns."""

    def sleep(self) -> int:
        """Give back the memory of weights and KV cache, and keep the requests, until `commit`, which counts as recomputed those whose KV
        cache was dropped here. Between two forward passes. Returns the bytes given back.
        """
        ...


class Engine(Protocol):
    """Runs forward passes and takes weights. Belongs to one thread but for `stage`."""

    limits: Limits

    @property
    def kv_used(self) -> float | None:
        """Part of the KV cache that running sequences hold; None where there is none."""
        ...

    @property
    def waiting(self) -> Collection[str]:
        """Requests that are in no forward pass now: none has begun with them, or they gave way in a full KV cache."""
        ...

    def submit(self, request: Generate, *, version: int, rollback_epoch: int = 0) -> None:
        """Take a request; its prefix is cached under this version alone. Raises `EngineError` where it cannot be served, and
        `VersionNotHeld` where it names a version that is not here.
        """
        ...

    def cancel(self, rollout_id: str) -> None:
        """Forget a request; unknown ones are ignored."""
        ...

    def step(self) -> Sequence[Sampled]:
        """Begin a forward pass over the running sequences, and end one, which may have begun in an earlier call: what that one sampled.

        Raises `EngineError`; then every running request is lost.
        """
        ...

    def stage(self, order: StageWeights) -> None:
        """Fetch and verify a published policy, in a thread of its own, while `step` goes on. Raises `WeightsError`."""
        ...

    def commit(self, recompute: Collection[str] = ()) -> Collection[str]:
        """Take the staged policy, between two forward passes; everything slow was done by `stage`.

        The KV cache of the requests named in `recompute` is dropped, and computed again under this policy as they go on; not of those
        that go on under the policy they have. Returns those it was dropped for.
        """
        ...
