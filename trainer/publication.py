"""Publishes a version beside the training of the next step: between two updates the weights stand still, whoever reads them.

Where one rank holds all weights, a thread of its own writes them down while rows go forward and backward, and the training loop waits for
it before it changes them. Where they are spread, ranks write together, in collectives that must not get in between those of training: then
the loop itself publishes before it goes on.
"""

from __future__ import annotations

import concurrent.futures
import time
from collections.abc import Callable

from pipelinerl.messages import PolicyPublished
from trainer.publish import Publisher
from trainer.spread_weights import SpreadWeights


class Publication:
    """The publication under way. Use as a context, inside that of the publisher, whose buffers must stay while they are written into."""

    def __init__(self, publisher: Publisher | None, *, spread: SpreadWeights | None, send: Callable[[PolicyPublished], None]) -> None:
        """`publisher` where this rank publishes, `spread` where no rank holds all the weights; `send` hands on an announcement."""
        self._publisher = publisher
        self._spread = spread
        self._send = send
        self._thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="publication")
        self._under_way: concurrent.futures.Future[float] | None = None
        self._beside_s = 0.0

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, *_: object) -> None:
        if self._under_way is not None and self._publisher is not None:
            self._publisher.give_up()  # whoever ends before it is whole waits for no slot
        self._thread.shutdown()

    def begin(self, version: int) -> None:
        """Begin to publish the present weights as `version`; every rank calls this. Waits for the one before."""
        self.wait()
        if self._spread is None:
            if self._publisher is not None:
                self._under_way = self._thread.submit(self._publish, self._publisher, version)
        elif self._publisher is None:
            self._spread.follow()
        else:
            try:
                self._publish(self._publisher, version)
            finally:
                self._spread.end()

    def wait(self) -> None:
        """Wait until what was begun is published: then weights may change. Raises as `Publisher.publish`."""
        if self._under_way is not None:
            self._beside_s += self._under_way.result()
            self._under_way = None

    def take_seconds(self) -> dict[str, float]:
        """Seconds that publishing took beside training since the last call; empty where it is not done so."""
        seconds, self._beside_s = self._beside_s, 0.0
        return {"publish_beside_s": seconds} if self._spread is None and self._publisher is not None else {}

    def _publish(self, publisher: Publisher, version: int) -> float:
        started = time.perf_counter()
        policy = publisher.publish(version)
        if policy is not None:
            self._send(policy)
        return time.perf_counter() - started
