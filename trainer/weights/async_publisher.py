"""Publishes policies while the next step trains: between two updates the weights stand still, whoever reads them.

Where one rank holds all weights, a thread of its own writes them down while rows go forward and backward, and the training loop waits for
it before it changes them. Where they are sharded, ranks write together, in collectives that must not get in between those of training: then
the loops write before they go on, and the thread seals what was written, which takes digests of all of it, and announces it.

Where there is no room for a policy (`NoRoom`: a full disk, full shared memory), the engines serve on with the one before, and training goes
on: the thread tries again until the weights change, and the next policy is a new chance. The last one is waited for. Sharded weights were
then written together, into memory of the rank that publishes, and only that one tries again. Where no policy found room for `PATIENCE_S`,
the run ends with the reason.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import sys
import threading
import time
from collections.abc import Callable

from pipelinerl.errors import NoRoom
from pipelinerl.messages import Failed, PolicyPublished
from pipelinerl.weights.timeline import HostTimeline, Timeline
from trainer.weights.publisher import Publisher
from trainer.weights.sharded_weights import ShardedWeights

PATIENCE_S = 60.0
"""Without room for any policy. Shorter ends a run for what is cleared away in a minute; longer has one stand still without a word."""
RETRY_AFTER_S = 0.5
"""Until the same policy is tried again, while its weights stand still."""


class AsyncPublisher:
    """Decides when the publisher writes a policy, and tries again where there is no room.

    Use as a context, inside that of the publisher, whose buffers must stay while they are written into.
    """

    def __init__(
        self,
        publisher: Publisher | None,
        *,
        sharded: ShardedWeights | None,
        send: Callable[[PolicyPublished | Failed], None],
        patience_s: float = PATIENCE_S,
        clock: Callable[[], float] = time.monotonic,
        timeline: Timeline | None = None,
    ) -> None:
        """`publisher` where this rank publishes, `sharded` where no rank holds all the weights; `send` hands on an announcement.

        `timeline` is that of the weights' device, default the host's: what the thread copies waits for the update before, and for nothing
        that is launched after it.
        """
        self._timeline = timeline or HostTimeline()
        self._publisher = publisher
        self._sharded = sharded
        self._send = send
        self._patience_s = patience_s
        self._clock = clock
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="publication")
        self._under_way: concurrent.futures.Future[float] | None = None
        self._async_s = 0.0
        self._moves_on = threading.Event()
        """The weights are about to change: what could not be published so far will not be."""
        self._num_skipped = 0
        """Since they were asked for."""
        self._no_room_since: float | None = None

    def __enter__(self) -> AsyncPublisher:
        return self

    def __exit__(self, *_: object) -> None:
        if self._under_way is not None and self._publisher is not None:
            self._publisher.give_up()  # whoever ends before it is whole waits for no buffer
            self._moves_on.set()
        self._thread.shutdown()

    def begin(self, version: int) -> None:
        """Begin to publish the present weights as `version`; every rank calls this. Waits for the one before."""
        self.wait()
        if self._publisher is None:
            if self._sharded is not None:
                self._sharded.follow()
            return
        self._moves_on.clear()
        if self._sharded is not None:
            self._write_together(self._publisher, self._sharded, version)
        self._publisher.move_in(version)
        self._under_way = self._thread.submit(self._publish, self._publisher, version, updated=self._timeline.mark())

    def wait(self, *, is_last: bool = False) -> None:
        """Wait until what was begun is published, or has no room: then weights may change. Raises as `Publisher.publish`.

        `is_last`: no other policy follows, so this one is tried until it has room.
        """
        if self._under_way is not None:
            if not is_last:
                self._moves_on.set()
            self._async_s += self._under_way.result()
            self._under_way = None

    def take_metrics(self) -> dict[str, float]:
        """Since the last call: seconds that publishing took beside training, where all of it is; policies without room, if any."""
        found = {"publish_async_s": self._async_s} if self._sharded is None and self._publisher is not None else {}
        found |= {"policies_skipped": float(self._num_skipped)} if self._num_skipped else {}
        self._async_s, self._num_skipped = 0.0, 0
        return found

    def _write_together(self, publisher: Publisher, sharded: ShardedWeights, version: int) -> None:
        """Have all ranks write a policy, for the thread to seal and announce."""
        try:
            with contextlib.suppress(NoRoom):  # it was written down all the same, and the thread is patient about the room
                publisher.write(version)
        finally:
            sharded.end()

    def _publish(self, publisher: Publisher, version: int, *, updated: object) -> float:
        """Publish, as soon as there is room or until the weights change; the seconds it took. `updated` marks the end of the update."""
        started = time.perf_counter()
        with self._timeline.beside(updated):
            while not self._find_room(publisher, version):
                if self._moves_on.wait(RETRY_AFTER_S):
                    self._num_skipped += 1
                    break
        return time.perf_counter() - started

    def _find_room(self, publisher: Publisher, version: int) -> bool:
        try:
            policy = publisher.publish(version)
        except NoRoom as error:
            self._be_patient(error)
            return False
        self._no_room_since = None
        if policy is not None:
            self._send(policy)
        return True

    def _be_patient(self, error: NoRoom) -> None:
        now = self._clock()
        if self._no_room_since is None:
            self._no_room_since = now
            with contextlib.suppress(OSError):  # the log may lie on the same full disk
                print(f"NoRoom: {error}; trying for {self._patience_s:g} s", file=sys.stderr, flush=True)
        if now - self._no_room_since >= self._patience_s:
            self._send(Failed(error=f"NoRoom for {self._patience_s:g} s: {error}"))  # the loop may be waiting for rows that never come
            raise error
