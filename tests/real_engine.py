"""A real vLLM engine around a tiny model, and policies published to it; for tests marked `vllm`."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import sys
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pipelinerl.config import EngineSection, ModelSection, RolloutSection, WeightsSection
from pipelinerl.engine.environment import set_environment
from pipelinerl.runtime.imports import of_large_packages

if TYPE_CHECKING:
    import torch

    from pipelinerl.engine.vllm.engine import VllmEngine
    from pipelinerl.weights.adapters import AdapterShape
    from pipelinerl.weights.buffer_pool import WeightBufferPool


@contextlib.contextmanager
def vllm_engine(
    folder: Path,
    *,
    max_running: int = 64,
    max_tokens: int | None = None,
    dtype: Literal["float32", "bfloat16"] = "float32",
    weights: WeightsSection | None = None,
    policies: Path = Path("weights"),
    adapters: AdapterShape | None = None,
    replay_routing: bool = False,
    options: dict[str, Any] | None = None,
    quantization: Literal["none", "int8"] = "none",
    async_scheduling: bool | None = None,
    is_colocated: bool = False,
    structured_outputs: tuple[dict[str, Any], ...] = (),
    speculation: Literal["off", "ngram", "siblings"] = "off",
    kv_cache_bytes: int | None = None,
) -> Iterator[VllmEngine]:
    """Load the model of a folder, in the environment that an engine process sets itself. `options`: as `engine.options`."""
    section = EngineSection(  # pyright: ignore[reportCallIssue]
        max_running=max_running,
        options=options or {},
        kv_cache_bytes=kv_cache_bytes,
        quantization=quantization,
        async_scheduling=async_scheduling,
        speculation=speculation,
        speculate_below=max_running + 1,
        speculative_tokens=3,
    )
    gc.collect()  # an engine that was let go of takes vLLM's process-wide state with it: that must happen before the next one begins
    before = dict(os.environ)
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)  # vLLM asks for the thread's loop; without one it would make one and leave it open
    set_environment(num_ranks=section.num_ranks)
    with of_large_packages() if "vllm" not in sys.modules else contextlib.nullcontext():
        import torch._dynamo

        from pipelinerl.engine.vllm.engine import VllmEngine
    keep_modules_frozen()

    try:
        # An engine process says so in its environment, which torch reads once: here another test may have imported it before. A rank that
        # compiles is forked from the threads of all tests before it, and may wait for a lock that one of them held.
        with torch._dynamo.config.patch(disable=True):
            yield VllmEngine(
                model=ModelSection(path=folder, dtype=dtype, max_tokens=max_tokens, replay_routing=replay_routing),
                engine=section,
                rollout=RolloutSection(structured_outputs=structured_outputs),  # pyright: ignore[reportCallIssue]
                seed=0,
                weights=weights,
                policies=policies,
                adapters=adapters,
                is_colocated=is_colocated,
            )
    finally:
        gc.collect()
        asyncio.set_event_loop(None)
        loop.close()
        os.environ.clear()
        os.environ.update(before)


def keep_modules_frozen() -> None:
    """An engine that ends thaws all that importing froze: each later collection, of which an engine asks for ten, then takes half a second.

    Nor is an engine frozen that has been loaded, since it could then not be collected.
    """
    from vllm.v1.engine import core
    from vllm.v1.worker import gpu_worker

    gc.unfreeze = core.freeze_gc_heap = gpu_worker.freeze_gc_heap = lambda: None


class Publisher:
    """Publishes policies to one engine, through buffers in shared memory like the trainer's."""

    def __init__(self, engine: VllmEngine) -> None:
        from pipelinerl.weights.base import num_bytes
        from pipelinerl.weights.buffer_pool import WeightBufferPool
        from pipelinerl.weights.shared_memory import SharedMemorySender

        self._tensors = engine.limits.tensors
        self._pool: WeightBufferPool = WeightBufferPool(SharedMemorySender(uuid.uuid4().hex), num_bytes=num_bytes(self._tensors))

    def publish(self, weights: Mapping[str, torch.Tensor], *, version: int) -> tuple[str, str]:
        """Write a policy into a free buffer; its name and digest."""
        from pipelinerl.weights.base import views
        from pipelinerl.weights.manifest import seal

        buffer = self._pool.acquire(1.0)
        assert buffer is not None
        for name, view in views(buffer.memory, self._tensors).items():
            view.copy_(weights[name])
        digest = self._pool.publish(buffer, seal(version, buffer.memory, self._tensors))
        return buffer.name, digest

    def release(self, buffer: str) -> None:
        """Say that the engine reads a buffer no more."""
        self._pool.release(buffer)

    def close(self) -> None:
        self._pool.close()
