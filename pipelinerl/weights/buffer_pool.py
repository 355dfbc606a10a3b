"""The trainer's slots, whatever they are made of: who may write one, who may read it, and for how long.

Two things hold on every road. A slot is written again only after the orchestrator said that no engine reads it (`release`). The latest
published policy is never handed out, released or not, so that an engine that starts late, or is refilled, can always load it.
"""

from __future__ import annotations

import threading
import time

from pipelinerl.errors import PeerSilent, WeightsError
from pipelinerl.weights.manifest import Manifest, digest_of, encode
from pipelinerl.weights.transport import Medium, Slot


def num_slots_for(num_engines: int) -> int:
    """How many slots suffice so that no engine, however slow, holds up the trainer while another one is served.

    At most one policy that each engine serves from and one that it has been told to fetch, and one being written. Slots are made when
    first needed: engines that keep pace share theirs, and three do for any number of them.
    """
    return 2 * num_engines + 1


class SlotPool:
    """`acquire` and `publish` belong to the training loop; `release` and `give_up` may come from any thread."""

    def __init__(self, medium: Medium, *, num_bytes: int, max_slots: int = num_slots_for(1)) -> None:
        self.num_bytes = num_bytes
        self._medium = medium
        self._max_slots = max_slots
        self._slots: list[Slot] = []
        self._latest: Slot | None = None
        self._changed = threading.Condition()
        self._has_given_up = False

    def acquire(self, timeout_s: float) -> Slot | None:
        """Wait for a slot that nobody reads, and hand it out for writing.

        Returns None after `give_up`. Raises `PeerSilent` naming every slot and the policy it holds when none becomes free in time, and
        `NoRoom` when there is none for one.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            while not self._has_given_up:
                slot = next((slot for slot in self._slots if self._is_free(slot)), None)
                if slot is None and len(self._slots) < self._max_slots:
                    slot = self._medium.make(len(self._slots), self.num_bytes)
                    self._slots.append(slot)
                if slot is not None:
                    slot.is_taken, slot.version = True, None
                    return slot
                if not self._changed.wait(end - time.monotonic()):
                    raise PeerSilent(
                        f"waited {timeout_s:g} s for the engines to release one of {len(self._slots)} slots: {self._holders()}. An engine"
                        " that neither commits a newer policy nor is declared dead keeps its slot: see which version each engine serves"
                    )
            return None

    def publish(self, slot: Slot, manifest: Manifest) -> str:
        """Make a slot handed out by `acquire` readable, whole; return the digest to announce. Raises `WeightsError` if it cannot be."""
        assert slot.is_taken, slot.name
        encoded = encode(manifest)
        try:
            self._medium.offer(slot, manifest, encoded)
        except WeightsError:
            with self._changed:
                slot.is_taken = False
            raise
        with self._changed:
            slot.is_taken, slot.is_read, slot.version = False, True, manifest.version
            self._latest = slot
            self._changed.notify_all()
        return digest_of(encoded)

    def release(self, name: str) -> None:
        """Note that no engine reads a slot any more. Raises `WeightsError` for a slot that no engine could have been reading."""
        with self._changed:
            slot = next((slot for slot in self._slots if slot.name == name), None)
            if slot is None or not slot.is_read:
                why = "it is not a slot of this trainer" if slot is None else "it was not announced, or was released before"
                raise WeightsError(f"release of {name!r}: {why}; the slots are {self._holders() or 'none'}")
            slot.is_read = False
            self._changed.notify_all()

    def give_up(self) -> None:
        """Have a present or later wait in `acquire` return None: the run ends."""
        with self._changed:
            self._has_given_up = True
            self._changed.notify_all()

    def close(self) -> None:
        """Take back every slot. Engines that have mapped one keep its memory until they let go of it."""
        self.give_up()
        self._medium.close()

    def _is_free(self, slot: Slot) -> bool:
        return not slot.is_read and not slot.is_taken and slot is not self._latest

    def _holders(self) -> str:
        holds = {slot.name: "being written" if slot.version is None else f"policy {slot.version}" for slot in self._slots}
        return ", ".join(f"{name} ({what})" for name, what in holds.items())
