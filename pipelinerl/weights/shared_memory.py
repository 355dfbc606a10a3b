"""Published policies in shared memory: the trainer writes a slot once, and every engine on the machine reads the very same bytes.

A slot is a file in `/dev/shm`, named `pipelinerl-<run token>-<k>`, readable by its owner only. Engines point their parameters straight
into it, so two things must hold: a slot is written again only after the orchestrator said that no engine reads it (`release`), and the
latest published policy is never handed out, released or not, so that an engine that starts late can always load it.
"""

from __future__ import annotations

import ctypes
import dataclasses
import mmap
import os
import re
import stat
import threading
import time
from pathlib import Path

import numpy as np
import torch

from pipelinerl.errors import PeerSilent, WeightsError
from pipelinerl.weights.slots import FOLDER, unlink_slots

MAX_SLOTS = 3
"""One that engines decode from, one they move to, one being written. Fewer: the trainer waits for the slowest engine; more: memory."""

_NAME = re.compile(r"pipelinerl-[0-9a-zA-Z]+-[0-9]+")


@dataclasses.dataclass(slots=True, kw_only=True)
class Slot:
    """One shared buffer of the pool."""

    name: str
    buffer: torch.Tensor
    """[num_bytes] uint8, mapped to the file."""
    version: int | None = None
    """The policy it holds, or None while it holds none that was announced."""
    is_read: bool = False
    """Engines may read it: announced, and not yet released."""
    is_taken: bool = False
    """Handed out to be written."""


class SlotPool:
    """The trainer's slots. `acquire` and `publish` belong to the training loop; `release` and `give_up` may come from any thread."""

    def __init__(self, token: str, *, num_bytes: int, max_slots: int = MAX_SLOTS, folder: Path = FOLDER) -> None:
        """Remove what a dead run of the same token left behind. Slots are made when first needed."""
        assert _NAME.fullmatch(f"pipelinerl-{token}-0"), token
        self.num_bytes = num_bytes
        self._token, self._folder, self._max_slots = token, folder, max_slots
        self._slots: dict[str, Slot] = {}
        self._latest: Slot | None = None
        self._changed = threading.Condition()
        self._has_given_up = False
        unlink_slots(token, folder=folder)

    def acquire(self, timeout_s: float) -> Slot | None:
        """Wait for a slot that nobody reads, and hand it out for writing.

        Returns None after `give_up`. Raises `PeerSilent` naming every slot and the policy it holds when none becomes free in time, and
        `WeightsError` when the shared memory has no room for one.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            while True:
                slot = next((slot for slot in self._slots.values() if self._is_free(slot)), None)
                if slot is None and len(self._slots) < self._max_slots:
                    slot = self._make()
                if slot is not None:
                    slot.is_taken, slot.version = True, None
                    return slot
                if self._has_given_up:
                    return None
                if not self._changed.wait(end - time.monotonic()):
                    raise PeerSilent(
                        f"waited {timeout_s:g} s for the engines to release one of {len(self._slots)} slots: {self._holders()}. An engine"
                        " that neither commits a newer policy nor is declared dead keeps its slot: see which version each engine serves"
                    )

    def publish(self, slot: Slot, *, version: int) -> None:
        """Say that a slot handed out by `acquire` now holds policy `version`, whole. From here on engines may read it."""
        with self._changed:
            assert slot.is_taken, slot.name
            slot.is_taken, slot.is_read, slot.version = False, True, version
            self._latest = slot
            self._changed.notify_all()

    def release(self, name: str) -> None:
        """Note that no engine reads a slot any more. Raises `WeightsError` for a slot that no engine could have been reading."""
        with self._changed:
            slot = self._slots.get(name)
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
        """Remove the slots' names. Engines that have mapped one keep its memory until they let go of it."""
        self.give_up()
        unlink_slots(self._token, folder=self._folder)

    def _is_free(self, slot: Slot) -> bool:
        return not slot.is_read and not slot.is_taken and slot is not self._latest

    def _holders(self) -> str:
        holds = {slot.name: "being written" if slot.version is None else f"policy {slot.version}" for slot in self._slots.values()}
        return ", ".join(f"{name} ({what})" for name, what in holds.items())

    def _make(self) -> Slot:
        # By process, too: engines keep slots mapped by name, and a trainer that starts again must not be taken for the one before.
        name = f"pipelinerl-{self._token}-{os.getpid()}{len(self._slots)}"
        file = os.open(self._folder / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            self._reserve(file, name)
            mapped = mmap.mmap(file, max(1, self.num_bytes))
        except BaseException:
            os.unlink(self._folder / name)
            raise
        finally:
            os.close(file)
        slot = Slot(name=name, buffer=torch.frombuffer(mapped, dtype=torch.uint8)[: self.num_bytes])
        self._slots[name] = slot
        return slot

    def _reserve(self, file: int, name: str) -> None:
        # Reserved, not only sized: writing to a page that the file system has no room for would kill the process with SIGBUS.
        system = os.statvfs(self._folder)
        room = system.f_bavail * system.f_frsize
        try:
            if self.num_bytes > room:
                raise OSError(f"{room} bytes free")
            os.posix_fallocate(file, 0, max(1, self.num_bytes))
        except OSError as error:
            raise WeightsError(
                f"no room for {name} of {self.num_bytes} bytes in {self._folder}: {error}. A run keeps up to {self._max_slots} policies"
                " there: enlarge it (a container: its shared-memory size), or remove what dead runs left in it"
            ) from None


def attach(name: str, num_bytes: int, *, folder: Path = FOLDER) -> torch.Tensor:
    """Map a slot for reading: [num_bytes] uint8, the trainer's own bytes, never to be written (the kernel ends a process that tries).

    `name` comes off the wire. Raises `WeightsError` where it is not a slot's name, or the file is missing, of another size, or not ours.
    """
    if not _NAME.fullmatch(name):
        raise WeightsError(f"{name!r} is not the name of a slot: expected pipelinerl-<run token>-<number>")
    try:
        file = os.open(folder / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise WeightsError(f"cannot open {name} in {folder}: {error.strerror}; is the trainer alive, and on this machine?") from None
    try:
        state = os.fstat(file)
        if not stat.S_ISREG(state.st_mode) or state.st_uid != os.geteuid():
            raise WeightsError(f"{name} in {folder} is not a plain file of user {os.geteuid()}: another user's file stands in its place")
        if state.st_size != max(1, num_bytes):
            raise WeightsError(f"{name} has {state.st_size} bytes, expected {num_bytes}: it was made for another layout")
        mapped = mmap.mmap(file, 0, prot=mmap.PROT_READ)
    finally:
        os.close(file)
    # By address, because torch warns of every buffer that Python calls read-only. The array keeps the mapping alive, the tensor the array.
    array = (ctypes.c_uint8 * len(mapped)).from_address(np.frombuffer(mapped, np.uint8).ctypes.data)
    array.mapped = mapped  # pyright: ignore[reportAttributeAccessIssue]
    return torch.frombuffer(array, dtype=torch.uint8)[:num_bytes]
