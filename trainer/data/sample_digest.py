"""A count and a digest of the samples in the weights: every checkpoint carries them, so that anyone can compare it with the ledger.

A sample's part is 64 bits of blake2b of `<step>/<rollout>`; the digest is the sum of all parts modulo 2^64. A sum does not mind the
order in which rows were trained, nor which replica trained them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch

from pipelinerl.messages import MicroBatch


class SampleDigest:
    """The samples that this replica has trained, since the run began or since the checkpoint it started from."""

    def __init__(self) -> None:
        self._trained = (0, 0)
        """Samples, and the sum of their parts, of the steps that are done."""
        self._step = (0, 0)
        """The same for the step under way."""
        self._base = (0, 0)
        """The count and sum of the checkpoint that all replicas started from."""

    def restore(self, *, num_samples: int, digest: str) -> None:
        """Take over what a checkpoint holds."""
        self._base = (num_samples, int(digest, 16))

    def add(self, batch: MicroBatch) -> None:
        """A row adds its gradient to the step under way."""
        parts = (hashlib.blake2b(f"{batch.step}/{name}".encode(), digest_size=8).digest() for name in batch.rollout_ids)
        count, total = self._step
        self._step = (count + len(batch.rollout_ids), total + sum(int.from_bytes(part, "little") for part in parts))

    def finish_step(self) -> None:
        """The step under way is in the weights."""
        self._trained = (self._trained[0] + self._step[0], self._trained[1] + self._step[1])
        self._step = (0, 0)

    def whole(self, add_up: Callable[[torch.Tensor], None], *, device: torch.device) -> tuple[int, str]:
        """(samples, digest) over all replicas; `add_up` replaces an int64 tensor by its sum over them."""
        sums = torch.tensor([self._trained[0], _signed(self._trained[1])], dtype=torch.int64, device=device)
        add_up(sums)
        count, total = sums.tolist()
        return self._base[0] + count, f"{(self._base[1] + total) % 2**64:016x}"


def _signed(number: int) -> int:
    """The same 64 bits as a number that int64 holds: its sums wrap around like those modulo 2^64."""
    number %= 2**64
    return number - 2**64 if number >= 2**63 else number
