"""The seam between the two ends of a weight transport: a trainer writes policies into weight buffers, an engine fetches them by name.

All transports keep the same promises (`tests/contract/test_weights.py`). A `Sender` makes weight buffers at the trainer's end, a
`Receiver` reads them at an engine's; `buffer_pool.WeightBufferPool` decides, for all transports, who may write or read a buffer when. A
weight buffer's name says by which transport it is reached, so an engine needs no setting of its own (`transports.AutoReceiver`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch

from pipelinerl.weights.manifest import Manifest


@dataclasses.dataclass(slots=True, kw_only=True)
class WeightBuffer:
    """Memory for one policy at the trainer's end."""

    name: str
    """Engines find it by this name."""
    memory: torch.Tensor
    """[bytes] uint8: where a policy is written before it is published."""
    version: int | None = None
    """The policy it holds, or None while it holds none that was announced."""
    is_read: bool = False
    """Engines may read it: announced, and not yet released."""
    is_taken: bool = False
    """Handed out to be written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Payload:
    """A policy, or a delta, as an engine fetched it: it is the one announced, and not yet compared with the engine's layout."""

    manifest: Manifest
    data: torch.Tensor
    """[manifest.num_bytes] uint8; empty where it lies at the ranks of the engine."""
    is_verified: bool = False
    """Every tensor was compared with the manifest as it arrived."""


class Sender(Protocol):
    """The trainer's end of a transport: it makes weight buffers and lets engines read them."""

    def make(self, number: int, num_bytes: int) -> WeightBuffer:
        """Make weight buffer `number` for payloads of up to `num_bytes`. Raises `NoRoom` where there is none."""
        ...

    def offer(self, buffer: WeightBuffer, manifest: Manifest, encoded: bytes) -> None:
        """Make the first `manifest.num_bytes` of a weight buffer's memory readable, and the encoded manifest, whole or not at all.

        May give the buffer another name. Raises `WeightsError`, or `NoRoom` where that is the reason; what the buffer held before is then
        lost, and no other buffer is touched.
        """
        ...

    def close(self) -> None:
        """Take everything back; safe to repeat."""
        ...


class Receiver(Protocol):
    """The engine's end of a transport."""

    def fetch(self, name: str, digest: str, spare: Callable[[Manifest], torch.Tensor]) -> Payload:
        """Fetch what the weight buffer of this name holds; the name comes off the wire.

        Bytes that are not in this process's memory already are put into `spare(manifest)` ([layout bytes] uint8), which nobody reads;
        asking for it raises `WeightsError` where the manifest does not fit the engine, before anything is moved. Raises `WeightsError`
        where the buffer does not hold what `digest` announced, or its peer stops half way.
        """
        ...

    def close(self) -> None:
        """Let go of every connection; safe to repeat."""
        ...
