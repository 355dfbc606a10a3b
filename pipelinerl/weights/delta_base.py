"""The trainer's memory of what it published, so that it can send what changed instead of the whole.

It keeps one copy of the policy published last, and for every policy since the *delta base*, the oldest one that any engine still holds,
which elements it changed. What is sent is the union of those with their newest values: right over every version from the delta base on,
whichever of them an engine holds, however often it is told. The delta base moves when every engine holds a newer policy and says so; a
publication that fails, or that nobody took, moves nothing.

The policy is compared in the host's memory, and sealed there. For engines that hold it on a device, the digests that a device computes
are kept up to date beside that: such an engine proves a delta without a byte of its weights brought to its host.
"""

from __future__ import annotations

import functools

import msgspec
import torch

from pipelinerl.messages import Tensor
from pipelinerl.weights.base import num_bytes
from pipelinerl.weights.codec import encode
from pipelinerl.weights.delta import Delta, Positions, Space, union
from pipelinerl.weights.manifest import Manifest, digest_of, seal, with_sums
from pipelinerl.weights.position_sums import RunningSums

MAX_CHANGED_FRACTION = 0.25
"""Part of all elements beyond which the whole is sent: changes then cost half of it or more, and time to encode and to lay over. Also
bounds what is remembered: positions of so many elements, two bytes for each element of the model."""


class DeltaBase:
    """Changes since the oldest policy that any engine holds. Belongs to one thread."""

    def __init__(self, layout: tuple[Tensor, ...], *, for_devices: bool = False) -> None:
        """`for_devices`: engines hold their weights on devices."""
        self.version: int | None = None
        """The version that deltas are applied to; None while some engine needs a whole policy."""
        self._layout = layout
        self._space = Space(layout)
        self._limit = MAX_CHANGED_FRACTION * sum(self._space.num_elements.values())
        self._last = torch.zeros(num_bytes(layout), dtype=torch.uint8)
        self._steps: dict[int, dict[int, Positions]] = {}
        """The positions that each version changed against the one before it, by version, ascending."""
        self._for_devices = for_devices
        self._sums: RunningSums | None = None
        """Of `_last`; None where no device asks for them, and before the first publication."""
        self._oldest: int | None = None
        """Every step after this version is remembered; None before the first publication."""

    @functools.cached_property
    def policy(self) -> torch.Tensor:
        """[bytes] uint8: where the present policy is written, whole, before `fill`."""
        return torch.zeros_like(self._last)

    def delta_of(self, version: int, buffer: torch.Tensor) -> Delta | None:
        """Note policy `version`, whole in `buffer` ([bytes] uint8), and return what to send; None where that is the whole.

        A version that could not be published may be told once more; its bits are the same.
        """
        if self._oldest is None:
            self._oldest = version
        elif version not in self._steps:
            found = self._steps[version] = self._space.compare(self._last, buffer)
            if self._sums is not None:
                self._sums.follow(self._space.words_of(found), old=self._last, new=buffer)
            self._forget()
        if self._sums is None and self._for_devices:
            self._sums = RunningSums(self._layout, buffer)
        self._last.copy_(buffer)
        if self.version is None:
            return None
        return self._space.take(buffer, union(self._steps.values()))

    def move(self, version: int | None) -> None:
        """Every engine holds policy `version` or a later one; None: one of them needs a whole policy next. Repeated news are harmless."""
        if version is None or self._oldest is None or version < self._oldest:
            self.version = None
            return
        self.version = self._oldest = version
        self._steps = {step: found for step, found in self._steps.items() if step > version}

    def fill(self, target: torch.Tensor, version: int) -> Manifest:
        """Write what is to be sent of `policy` into `target` ([bytes] uint8), and describe it: changes where they are less."""
        whole = seal(version, self.policy, self._layout)
        changes = self.delta_of(version, self.policy)
        if self._sums is not None:
            whole = with_sums(whole, self._sums.digests())
        encoded = encode(changes) if changes is not None else b""
        if changes is None or len(encoded) >= len(self.policy):
            target[: len(self.policy)].copy_(self.policy)
            return whole
        target[: len(encoded)].copy_(torch.frombuffer(bytearray(encoded), dtype=torch.uint8))
        return msgspec.structs.replace(whole, num_bytes=len(encoded), base_version=self.version, payload_digest=digest_of(encoded))

    def _forget(self) -> None:
        """Drop the oldest steps beyond what may be remembered; whoever holds a policy before them needs a whole one."""
        while sum(len(found) for step in self._steps.values() for found in step.values()) > self._limit:
            self._oldest = next(iter(self._steps))
            del self._steps[self._oldest]
        if self.version is not None and self._oldest is not None and self.version < self._oldest:
            self.version = None
