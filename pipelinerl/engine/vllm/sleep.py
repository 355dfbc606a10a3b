"""An engine that shares its device with the trainer sleeps while that trains: its memory is given back, its requests stay.

On a CPU, vLLM knows no sleep (its worker says so and does nothing), so it is done here: running sequences are preempted as vLLM does when
its cache is full, the prefix cache is emptied, and the pages of KV cache and weights are given back to the system. On a CUDA device it is
vLLM's own sleep of level 2, in its mode `keep`, which preempts the same way and unmaps weights and KV cache (its cumem allocator), so that
addresses in captured graphs stay good; that path was never run on a device.

Preempted sequences are computed again from their start when they go on: the policy that wakes the engine computes their KV cache.
In an engine of several ranks each gives its own memory back; the requests are where the engine is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from pipelinerl.errors import ConfigError
from pipelinerl.weights.host_memory import give_back, give_back_freed
from pipelinerl.weights.swap import CopySwap, PointerSwap


class SleepMode:
    """The sleep of one vLLM engine."""

    def __init__(self, llm: Any, *, give_back: Callable[[bool], int], drops_kv: bool) -> None:
        """`give_back` gives back what the ranks hold on a CPU, with or without the KV cache, and returns the bytes.

        Raises `ConfigError` where the KV cache shall be kept and vLLM's own sleep gives it away.
        """
        self._llm = llm
        self._give_back = give_back
        self._drops_kv = drops_kv
        self._is_device = llm.vllm_config.device_config.device_type != "cpu"
        self._is_asleep = False
        self._preempted: list[str] = []
        if self._is_device and not drops_kv:
            raise ConfigError('engine.sleep_kv is "keep", and vLLM gives the KV cache away when it sleeps on a device. Set it to "drop".')

    def fall_asleep(self) -> int:
        """Give back the memory of weights and KV cache, between two forward passes; return the bytes."""
        core: Any = self._llm.engine_core
        self._is_asleep = True
        if self._drops_kv:
            self._preempted = [request.request_id for request in core.engine_core.scheduler.running]
        if self._is_device:
            before = torch.accelerator.get_memory_info()[0]
            self._llm.sleep(level=2, mode="keep")
            return torch.accelerator.get_memory_info()[0] - before
        if self._drops_kv:
            self._llm.reset_prefix_cache(reset_running_requests=True)
        return self._give_back(self._drops_kv)

    def wake(self) -> list[str]:
        """Take the memory again, before a policy is committed; return vLLM's ids of the requests whose KV cache was dropped meanwhile."""
        if self._is_asleep and self._is_device:
            self._llm.wake_up()
        preempted, self._preempted, self._is_asleep = self._preempted, [], False
        return preempted


def give_back_rank(runner: Any, swap: PointerSwap | CopySwap, *, drops_kv: bool) -> int:
    """Give back what one rank holds of policies and, with `drops_kv`, of the KV cache; return the bytes."""
    caches = _memory_of(runner.kv_caches) if drops_kv else []
    num_bytes = swap.discard() + sum(map(give_back, caches))
    give_back_freed()
    return num_bytes


def _memory_of(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
    """The memory behind tensors, [bytes] uint8 each, once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    return [torch.empty(0, dtype=torch.uint8).set_(storage) for storage in storages.values()]  # pyright: ignore[reportArgumentType]
