"""The store over CURVE (`transport.rendezvous`) as a store of torch.distributed: what process groups of gloo and NCCL meet by."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from pipelinerl.errors import PeerError
from pipelinerl.transport.rendezvous import Operation, RendezvousClient


class RendezvousStore(dist.Store):
    """Keep a reference to it for as long as a process group lives that meets by it: torch's C++ calls these methods, and holds none."""

    def __init__(self, client: RendezvousClient, *, timeout: timedelta) -> None:
        super().__init__()
        self._timeout = timeout
        self._client = client

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(Operation.SET, key, value=_bytes(value))

    def get(self, key: str) -> bytes:
        return self._ask(Operation.GET, key)

    def add(self, key: str, value: int) -> int:
        return int(self._ask(Operation.ADD, key, value=str(value).encode()))

    def check(self, keys: Sequence[str]) -> bool:
        return bool(self._ask(Operation.CHECK, *keys))

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        self._ask(Operation.GET, *keys, timeout=timeout)

    def delete_key(self, key: str) -> bool:
        return bool(self._ask(Operation.DELETE, key))

    def compare_set(self, key: str, expected_value: str | bytes, desired_value: str | bytes) -> bytes:
        return self._ask(Operation.COMPARE_SET, key, value=_bytes(desired_value), expected=_bytes(expected_value))

    def call(self, value: str) -> None:
        """Put `value` where the store's own process waits for calls."""
        self._ask(Operation.CALL, value=value.encode())

    def clone(self) -> RendezvousStore:
        return self

    def _ask(self, operation: Operation, *keys: str, timeout: timedelta | None = None, **words: Any) -> bytes:
        """Raises `dist.DistStoreError`, as torch's own stores do, where the store is gone or the time over."""
        try:
            return self._client.ask(operation, *keys, timeout_s=(timeout or self._timeout).total_seconds(), **words)
        except PeerError as error:
            raise dist.DistStoreError(str(error)) from error


def _bytes(value: str | bytes) -> bytes:
    return value.encode() if isinstance(value, str) else value
