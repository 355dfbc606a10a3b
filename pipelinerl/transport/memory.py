"""The in-process twin of the ZeroMQ transport: same promises, same bytes, on whatever clock the event loop has.

Messages are encoded and decoded as on the wire, so what passes here passes there. A `Weather` may delay, repeat or drop them, seeded.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import random
from collections.abc import Callable
from typing import Any

from pipelinerl.errors import PeerGone, WireError
from pipelinerl.messages import Message
from pipelinerl.stages import Signal
from pipelinerl.transport.codec import Decoder, encode


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weather:
    """What the network does to messages. Delays are seconds on the loop's clock; messages of one pair stay in order unless `reorders`."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    repeat_fraction: float = 0.0
    drop_fraction: float = 0.0
    reorders: bool = False
    seed: int = 0


CALM = Weather()


class MemoryHub:
    """See `transport.base.Hub`. Links are made by `connect`."""

    def __init__(self, *, accepts: Any, weather: Weather = CALM) -> None:
        self.num_refused = 0
        self._decoder = Decoder(accepts)
        self._wind = _Wind(weather)
        self._links: dict[str, MemoryLink] = {}
        self._arrived: collections.deque[tuple[str, bytes]] = collections.deque()
        self._something = Signal()

    def connect(self, name: str, *, accepts: Any) -> MemoryLink:
        """Connect a peer; one of the same name takes over, as after a restart."""
        link = MemoryLink(name, accepts=accepts, to_hub=self._take, wind=self._wind)
        self._links[name] = link
        return link

    async def receive(self) -> list[tuple[str, Message]]:
        messages: list[tuple[str, Message]] = []
        while not messages:
            while not self._arrived:
                await self._something.wait()
            while self._arrived:
                name, frame = self._arrived.popleft()
                try:
                    messages.append((name, self._decoder.decode(frame)))
                except WireError:
                    self.num_refused += 1
        return messages

    def send(self, peer: str, message: Message) -> None:
        link = self._links.get(peer)
        if link is None or link.is_closed:
            raise PeerGone(f"cannot send {type(message).__name__} to {peer}: its connection is closed")
        self._wind.carry(f"hub>{peer}", encode(message), link.take)

    def close(self) -> None:
        self._links.clear()

    def _take(self, name: str, frame: bytes) -> None:
        self._arrived.append((name, frame))
        self._something.set()


class MemoryLink:
    """See `transport.base.Link`. `receive` never waits; `wait` does, for peers that are coroutines."""

    def __init__(self, name: str, *, accepts: Any, to_hub: Callable[[str, bytes], None], wind: _Wind) -> None:
        self.name = name
        self.is_closed = False
        self._decoder = Decoder(accepts)
        self._to_hub = to_hub
        self._wind = wind
        self._arrived: collections.deque[bytes] = collections.deque()
        self._something = Signal()

    def send(self, message: Message) -> None:
        self.send_frame(encode(message))

    def send_frame(self, frame: bytes) -> None:
        """Hand over bytes as they are, for tests of what a hub refuses."""
        if not self.is_closed:
            self._wind.carry(f"{self.name}>hub", frame, lambda arrived: self._to_hub(self.name, arrived))

    def receive(self, timeout_s: float) -> Message | None:
        return self._decoder.decode(self._arrived.popleft()) if self._arrived else None

    async def wait(self) -> Message:
        """Wait for the next message."""
        while not self._arrived:
            await self._something.wait()
        return self._decoder.decode(self._arrived.popleft())

    def take(self, frame: bytes) -> None:
        """A frame arrives; lost where the peer is gone."""
        if not self.is_closed:
            self._arrived.append(frame)
            self._something.set()

    def close(self) -> None:
        self.is_closed = True


class _Wind:
    """Carries frames through the weather."""

    def __init__(self, weather: Weather) -> None:
        self._weather = weather
        self._random = random.Random(weather.seed)
        self._last_arrival: dict[str, float] = {}

    def carry(self, pair: str, frame: bytes, deliver: Callable[[bytes], None]) -> None:
        weather = self._weather
        if weather is CALM:
            deliver(frame)
            return
        if self._random.random() < weather.drop_fraction:
            return
        copies = 2 if self._random.random() < weather.repeat_fraction else 1
        loop = asyncio.get_running_loop()
        for _ in range(copies):
            arrival = loop.time() + weather.delay_s + self._random.random() * weather.jitter_s
            if not weather.reorders:
                arrival = max(arrival, self._last_arrival.get(pair, 0.0) + 1e-9)
            self._last_arrival[pair] = arrival
            loop.call_at(arrival, deliver, frame)
