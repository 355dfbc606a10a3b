"""The seam between the two ends of the tensor road: a trainer lays policies into slots, an engine fetches them by the slot's name.

Three roads keep the same promises (`tests/contract/test_weights.py`): `shared_memory`, `files`, `gloo`. A `Medium` is what a road is made
of at the trainer's end, a `Receiver` at an engine's; who may write or read a slot when is `pool.SlotPool`'s affair, for all of them.
A slot's name says by which road it is reached, so an engine needs no setting of its own (`receivers.Receivers`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Protocol

import torch

from pipelinerl.weights.manifest import Manifest


@dataclasses.dataclass(slots=True, kw_only=True)
class Slot:
    """One place for a policy at the trainer's end."""

    name: str
    """Under which engines find it."""
    buffer: torch.Tensor
    """[bytes] uint8: where a policy is written before it is published."""
    version: int | None = None
    """The policy it holds, or None while it holds none that was announced."""
    is_read: bool = False
    """Engines may read it: announced, and not yet released."""
    is_taken: bool = False
    """Handed out to be written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Arrival:
    """What an engine fetched: as announced, but not yet compared with the engine's layout."""

    manifest: Manifest
    payload: torch.Tensor
    """[manifest.num_bytes] uint8."""


class Medium(Protocol):
    """What slots are made of."""

    def make(self, number: int, num_bytes: int) -> Slot:
        """Make slot `number` for payloads of up to `num_bytes`. Raises `NoRoom` where there is none."""
        ...

    def offer(self, slot: Slot, manifest: Manifest, encoded: bytes) -> None:
        """Make the first `manifest.num_bytes` of the slot's buffer readable, and the encoded manifest, whole or not at all.

        May give the slot another name. Raises `WeightsError`, `NoRoom` where that is why; what the slot held before is then lost, and no
        other slot is touched.
        """
        ...

    def close(self) -> None:
        """Take everything back; safe to repeat."""
        ...


class Receiver(Protocol):
    """The engine's end of a road."""

    def fetch(self, slot: str, digest: str, spare: Callable[[Manifest], torch.Tensor]) -> Arrival:
        """Bring in what a slot holds. `slot` comes off the wire.

        A road whose bytes are not in this process's memory already puts them into `spare(manifest)` ([layout bytes] uint8), which nobody
        reads; asking for it raises `WeightsError` where the manifest does not fit the engine, before anything is moved.
        Raises `WeightsError` where the slot does not hold what `digest` announced, or its peer stops half way.
        """
        ...

    def close(self) -> None:
        """Let go of every connection; safe to repeat."""
        ...
