"""The in-process twin of the ZeroMQ transport: same promises, same bytes, on whatever clock the event loop has.

Messages are encoded and decoded as on the wire, so what passes here passes there. `NetworkFaults` may delay, repeat, drop or
reorder frames, seeded. It corrupts none: under ZeroMQ the encryption finds a changed byte and the connection is made anew, a loss like any.
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import random
import time
from collections.abc import Callable
from typing import Any

from pipelinerl.messages import Message
from pipelinerl.runtime.stage import Signal
from pipelinerl.transport.base import Introduction
from pipelinerl.transport.codec import Decoder, encode
from pipelinerl.transport.frame import Kind, pack
from pipelinerl.transport.router import Router
from pipelinerl.transport.session import PROBE_EVERY_S, Session


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NetworkFaults:
    """Faults of a network. Delays are seconds on the loop's clock; frames of one pair stay in order unless `reorders`."""

    delay_s: float = 0.0
    jitter_s: float = 0.0
    repeat_fraction: float = 0.0
    drop_fraction: float = 0.0
    reorders: bool = False
    seed: int = 0


NO_FAULTS = NetworkFaults()


class MemoryHub:
    """See `transport.base.Hub`. Links are made by `connect`."""

    def __init__(self, *, accepts: Any, network: NetworkFaults = NO_FAULTS) -> None:
        self._router = Router(accepts=accepts, carry=self._carry, clock=_now_s)
        self._network = FaultyNetwork(network)
        self._links: dict[str, MemoryLink] = {}
        self._arrived: collections.deque[tuple[str, bytes]] = collections.deque()
        self._something = Signal()
        self._probe_timer = _Timer(self._router.probe)
        self._is_dead = False
        self._closing_message: Message | None = None

    @property
    def refused(self) -> collections.Counter[str]:
        return self._router.refused

    def connect(self, name: str, *, accepts: Any) -> MemoryLink:
        """Connect a peer; one of the same name takes over, as after a restart."""
        link = MemoryLink(name, accepts=accepts, to_hub=self._take, network=self._network)
        self._links[name] = link
        self._router.receive_frame(name, pack(Kind.ACK, link.identity, 0, 0, 0))  # it can be sent to before it was heard
        if self._closing_message is not None:
            self.send(name, self._closing_message)
        return link

    def kill(self) -> None:
        """Say nothing any more, as if its process were killed."""
        self._is_dead = True
        self._probe_timer.cancel()

    def succeed(self, dead: MemoryHub) -> None:
        """Take the place of a hub that was killed: its links reach this one from now on."""
        self._links, dead._links = dead._links, {}
        for link in self._links.values():
            link.reach(self._take)

    async def receive(self) -> list[tuple[str, Message]]:
        messages: list[tuple[str, Message]] = []
        while not messages:
            while not self._arrived:
                await self._something.wait()
            while self._arrived:
                messages += self._router.receive_frame(*self._arrived.popleft())
        return messages

    def send(self, peer: str, message: Message) -> None:
        self._router.send(peer, message)
        self._probe_timer.arm()

    def dismiss(self, message: Message) -> None:
        self._closing_message = message
        self._router.send_all(message)
        self._probe_timer.arm()

    def close(self) -> None:
        self._probe_timer.cancel()
        self._links.clear()

    def _carry(self, peer: str, frame: bytes) -> bool:
        link = self._links.get(peer)
        if link is None or link.is_closed or self._is_dead:
            return False
        self._network.carry(f"hub>{peer}", frame, link.take)
        return True

    def _take(self, name: str, frame: bytes) -> None:
        self._arrived.append((name, frame))
        self._something.set()


class MemoryLink:
    """See `transport.base.Link`. `receive` never waits; `wait` does, for peers that are coroutines."""

    def __init__(self, name: str, *, accepts: Any, to_hub: Callable[[str, bytes], None], network: FaultyNetwork) -> None:
        self.name = name
        self.is_closed = False
        self._decoder: Decoder[Message] = Decoder(accepts)
        self._to_hub = to_hub
        self._network = network
        self._arrived: collections.deque[bytes] = collections.deque()
        self._bodies: collections.deque[memoryview] = collections.deque()
        """Messages to be handed over, still encoded."""
        self._something = Signal()
        self._session = Session("the orchestrator", transmit=self.send_frame, introduction=lambda kept: kept)
        self._probe_timer = _Timer(self._probe)
        self._heard_at = _now_s()

    @property
    def identity(self) -> int:
        """Its identity to the hub, see `session`."""
        return self._session.identity

    @property
    def silent_s(self) -> float:
        return _now_s() - self._heard_at

    def send(self, *messages: Message) -> None:
        self._session.send(*map(encode, messages))
        self._probe_timer.arm()

    def introduce(self, make: Introduction) -> None:
        self._session.introduction = lambda kept: map(encode, make(kept))
        for message in make(()):
            self.send(message)

    def send_frame(self, frame: bytes) -> None:
        """Hand over bytes as they are; also for tests of what a hub refuses."""
        if not self.is_closed:
            self._network.carry(f"{self.name}>hub", frame, lambda arrived: self._to_hub(self.name, arrived))

    def receive(self, timeout_s: float) -> Message | None:
        while self._arrived and not self._bodies:
            self._heard_at = _now_s()
            self._bodies += self._session.receive_frame(self._arrived.popleft())
        return self._decoder.decode(self._bodies.popleft()) if self._bodies else None

    async def wait(self) -> Message:
        """Wait for the next message."""
        while (message := self.receive(0.0)) is None:
            await self._something.wait()
        return message

    def reach(self, hub: Callable[[str, bytes], None]) -> None:
        """Send to another hub from now on."""
        self._to_hub = hub

    def take(self, frame: bytes) -> None:
        """A frame arrives; lost where the peer is gone."""
        if not self.is_closed:
            self._arrived.append(frame)
            self._something.set()

    def wake(self) -> None:
        """Nothing here waits in a thread."""

    def fileno(self) -> int:
        raise NotImplementedError("a link in memory has no descriptor; use `wait`")

    def close(self) -> None:
        self._session.say_goodbye()
        self._probe_timer.cancel()
        self.is_closed = True

    def _probe(self) -> bool:
        self._session.probe()
        return self._session.unacked_bytes > 0


class FaultyNetwork:
    """Carries frames, with faults on demand."""

    def __init__(self, faults: NetworkFaults) -> None:
        self._faults = faults
        self._random = random.Random(faults.seed)
        self._last_arrival: dict[str, float] = {}

    def carry(self, pair: str, frame: bytes, deliver: Callable[[bytes], None]) -> None:
        """Have `deliver` called with the frame once or twice, now or later, or never; `pair` names who sends to whom."""
        faults = self._faults
        if faults is NO_FAULTS:
            deliver(frame)
            return
        if self._random.random() < faults.drop_fraction:
            return
        copies = 2 if self._random.random() < faults.repeat_fraction else 1
        loop = asyncio.get_running_loop()
        for _ in range(copies):
            arrival = loop.time() + faults.delay_s + self._random.random() * faults.jitter_s
            if not faults.reorders:
                arrival = max(arrival, self._last_arrival.get(pair, 0.0) + 1e-9)
            self._last_arrival[pair] = arrival
            loop.call_at(arrival, deliver, frame)


class _Timer:
    """Calls `probe` every so often, from `arm` on until it returns False: nobody owes anything any more."""

    def __init__(self, probe: Callable[[], bool]) -> None:
        self._probe = probe
        self._handle: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        if self._handle is None:
            self._handle = asyncio.get_running_loop().call_later(PROBE_EVERY_S, self._ring)

    def cancel(self) -> None:
        if self._handle is not None:
            self._handle.cancel()

    def _ring(self) -> None:
        self._handle = None
        if self._probe():
            self.arm()


def _now_s() -> float:
    """Seconds on the loop's clock; outside of one, on the system's."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()
