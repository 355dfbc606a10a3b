"""The seam between the step loop and an inference engine.

`pipelinerl.engine.loop` owns the loop and stamps every token with the version that sampled it; an `Engine` runs forward passes and
takes weights. Two of them pass the same contract tests: `vllm.engine` (real) and `fake` (deterministic, no model).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Protocol

from pipelinerl.messages import Finish, Float32, Generate, Routes, StageWeights, Tensor


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of an engine, fixed once its model is loaded."""

    max_model_tokens: int
    """Longest prompt plus completion."""
    max_running: int
    """Sequences decoded at once."""
    tensors: tuple[Tensor, ...]
    """Layout it wants a published policy in."""
    choices: tuple[str, ...] = ()
    """Decisions made when it started, each a sentence with its reason."""
    transports: tuple[str, ...] = ()
    """Transports between devices by which policies could reach it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chunk:
    """The tokens that one forward pass sampled for one request."""

    rollout_id: str
    token_ids: list[int]
    logprobs: list[float]
    """Natural log under the distribution sampled from; as long as `token_ids`."""
    finish: Finish | None
    """None while the sequence goes on."""
    version: int | None = None
    """The policy that sampled these tokens, where an engine serves several side by side; None: the one it committed last."""
    routes: Routes | None = None
    """Routes of every token but the last; None before the finish, and where experts are not recorded."""
    prompt_logprobs: Float32 | None = None
    """As in `Completion`, in the chunk that begins the completion, where the request asks for them."""


class Engine(Protocol):
    """Runs forward passes and takes weights. Belongs to one thread but for `stage`."""

    limits: Limits

    @property
    def kv_used(self) -> float | None:
        """Part of the KV cache that running sequences hold; None where there is none."""
        ...

    def submit(self, request: Generate, *, version: int, rollback_epoch: int = 0) -> None:
        """Take a request; its prefix is cached under this version alone. Raises `EngineError` where it cannot be served, and
        `VersionNotHeld` where it names a version that is not here.
        """
        ...

    def cancel(self, rollout_id: str) -> None:
        """Forget a request; unknown ones are ignored."""
        ...

    def step(self) -> list[Chunk]:
        """Run one forward pass over the running sequences. Raises `EngineError`; then every running request is lost."""
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
