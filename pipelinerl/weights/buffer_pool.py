"""The trainer's weight buffers, whatever they are made of, and the rule that says when each may be written again.

Two things hold on every transport. A buffer is written again only after the orchestrator said that no engine reads it (`release`). The
latest published policy is never handed out, released or not, so that an engine that starts late, or is refilled, can always load it.
"""

from __future__ import annotations

import threading
import time

from pipelinerl.errors import PeerSilent, WeightsError
from pipelinerl.weights.manifest import Manifest, digest_of, encode
from pipelinerl.weights.transport import Sender, WeightBuffer


def num_buffers_for(num_engines: int) -> int:
    """The number of buffers with which no engine, however slow, holds up the trainer while another one is served.

    At most one policy that each engine serves from and one that it has been told to fetch, and one being written. Buffers are made when
    first needed: engines that keep pace share theirs, and three do for any number of them.
    """
    return 2 * num_engines + 1


class WeightBufferPool:
    """`acquire` and `publish` belong to the training loop; `release` and `give_up` may come from any thread."""

    def __init__(
        self, sender: Sender, *, num_bytes: int, max_buffers: int = num_buffers_for(1), in_place: bool = False, first_number: int = 0
    ) -> None:
        """`in_place`: one buffer holds every policy in turn, because no engine reads while it is written (they are colocated).
        `first_number`: the first one's, where another pool has buffers of the same sender.
        """
        self.num_bytes = num_bytes
        self._first_number = first_number
        self._in_place = in_place
        self._sender = sender
        self._max_buffers = 1 if in_place else max_buffers
        self._buffers: list[WeightBuffer] = []
        self._latest: WeightBuffer | None = None
        self._changed = threading.Condition()
        self._has_given_up = False

    def acquire(self, timeout_s: float) -> WeightBuffer | None:
        """Wait for a buffer that nobody reads, and hand it out for writing.

        Returns None after `give_up`. Raises `PeerSilent` naming every buffer and the policy it holds when none becomes free in time, and
        `NoRoom` when there is none for one.
        """
        end = time.monotonic() + timeout_s
        with self._changed:
            while not self._has_given_up:
                buffer = next((buffer for buffer in self._buffers if self._is_free(buffer)), None)
                if buffer is None and len(self._buffers) < self._max_buffers:
                    buffer = self._sender.make(self._first_number + len(self._buffers), self.num_bytes)
                    self._buffers.append(buffer)
                if buffer is not None:
                    buffer.is_taken, buffer.version = True, None
                    return buffer
                if not self._changed.wait(end - time.monotonic()):
                    raise PeerSilent(
                        f"waited {timeout_s:g} s for the engines to release one of {len(self._buffers)} weight buffers: {self._holders()}."
                        " An engine that neither commits a newer policy nor is declared dead keeps its buffer: see which version each"
                        " engine serves"
                    )
            return None

    def publish(self, buffer: WeightBuffer, manifest: Manifest) -> str:
        """Make a buffer handed out by `acquire` readable, whole; return the digest to announce. Raises `WeightsError` if it cannot be."""
        assert buffer.is_taken, buffer.name
        encoded = encode(manifest)
        try:
            self._sender.offer(buffer, manifest, encoded)
        except WeightsError:
            with self._changed:
                buffer.is_taken = False
            raise
        with self._changed:
            buffer.is_taken, buffer.is_read, buffer.version = False, True, manifest.version
            self._latest = buffer
            self._changed.notify_all()
        return digest_of(encoded)

    def has(self, name: str) -> bool:
        """Return whether a buffer is one of these."""
        with self._changed:
            return any(buffer.name == name for buffer in self._buffers)

    def release(self, name: str) -> None:
        """Note that no engine reads a buffer any more. Raises `WeightsError` for a buffer that no engine could have been reading."""
        with self._changed:
            buffer = next((buffer for buffer in self._buffers if buffer.name == name), None)
            if buffer is None or not buffer.is_read:
                why = "it is not a buffer of this trainer" if buffer is None else "it was not announced, or was released before"
                raise WeightsError(f"release of {name!r}: {why}; the buffers are {self._holders() or 'none'}")
            buffer.is_read = False
            self._changed.notify_all()

    def give_up(self) -> None:
        """Have a present or later wait in `acquire` return None: the run ends."""
        with self._changed:
            self._has_given_up = True
            self._changed.notify_all()

    def close(self) -> None:
        """Take back every buffer. Engines that have mapped one keep its memory until they let go of it."""
        self.give_up()
        self._sender.close()

    def _is_free(self, buffer: WeightBuffer) -> bool:
        return not buffer.is_taken and (self._in_place or (not buffer.is_read and buffer is not self._latest))

    def _holders(self) -> str:
        holds = {buffer.name: "being written" if buffer.version is None else f"policy {buffer.version}" for buffer in self._buffers}
        return ", ".join(f"{name} ({what})" for name, what in holds.items())
