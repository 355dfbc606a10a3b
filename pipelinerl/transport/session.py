"""One end of a session between two processes: every message arrives once and in order, while both live, whatever the connection does.

No socket, no clock, no loop: frames go in by `receive_frame`, out by `transmit`. Both ends use this class.

- Frames that carry messages are numbered. An end takes only the next number; it drops what it has (a repetition) and what comes too early,
  and says behind which number something is missing: all that follows is sent again. Small messages that are sent at once share a frame.
- A frame is kept until the other end says that it was handed over. Credit: kept frames are on their way only up to `WINDOW_BYTES`,
  the rest waits here, up to `LIMIT_BYTES`; beyond, `send` raises. So a peer that takes nothing costs `LIMIT_BYTES` at most, of which
  at most `WINDOW_BYTES` (or one message) lie in the network's queues on either side.
- An end that is owed an acknowledgement asks for it (`probe`, now and then). On a connection that keeps order the answer is exact: what was
  sent before the question and is not in the answer is lost. So it is sent again, also after the connection broke and came back.
- Each end draws an identity when it comes to life; a process that was restarted has another one. What its predecessor never took goes to
  the `introduction`, which makes of it what the successor hears first. The orchestrator tells a restarted peer nothing of it; a peer may
  tell a restarted orchestrator all of it, or restate where it stands. So no peer answers what a dead orchestrator asked, unless its
  introduction does.
"""

from __future__ import annotations

import collections
import secrets
from collections.abc import Callable, Iterable, Sequence

from pipelinerl.errors import PeerFull, WireError
from pipelinerl.transport.frame import OVERHEAD_BYTES, Kind, join, pack, split, unpack

WINDOW_BYTES = 32 << 20
"""Credit of one direction. Must cover what flows during a round trip; larger holds more in the network's queues for a peer that stands."""
LIMIT_BYTES = 256 << 20
"""Most that is kept for one peer. Requests and rows are bounded by admission and pulls far below it: reaching it means it takes nothing."""
PROBE_EVERY_S = 1.0
"""Seconds between two calls of `probe`: a loss is noticed after one to two of them. Shorter asks peers that are merely busy."""
_FORMER = 8
"""Identities remembered of those who were replaced, so that their late frames are known for what they are."""


class Session:
    """One end."""

    def __init__(self, name: str, *, transmit: Callable[[bytes], None], introduction: Callable[[Sequence[bytes]], Iterable[bytes]]) -> None:
        """`transmit` puts a frame on the wire, or loses it."""
        self.name = name
        """Name of the other end, for messages of errors."""
        self.identity = secrets.randbits(64) or 1
        self.has_left = False
        """The other end said goodbye."""
        self.unacked_bytes = 0
        """Bytes of messages that the other end has not acknowledged."""
        self.introduction = introduction
        """Makes, from what the other end, which is gone, never took, the messages for the one that takes its place."""
        self._transmit = transmit
        self._other = 0
        self._former: collections.deque[int] = collections.deque(maxlen=_FORMER)
        self._in_flight: collections.deque[bytes] = collections.deque()
        """Frames on their way, not acknowledged, the oldest numbered `_first`."""
        self._queued: collections.deque[bytes] = collections.deque()
        """Frames without credit."""
        self._first = 1
        self._next = 1
        self._in_flight_bytes = 0
        self._received = 0
        """Number of the last frame taken."""
        self._ack_due_bytes = 0
        """Bytes of messages taken and not yet acknowledged to the other end."""
        self._reported_gap = -1
        """Value of `_received` when a gap was last reported."""
        self._first_at_probe = 0

    @property
    def has_met(self) -> bool:
        """The other end was heard of."""
        return self._other != 0

    def send(self, *messages: bytes) -> None:
        """Send encoded messages, once there is credit. Raises `PeerFull` where too much waits already; then none of them is sent."""
        if not messages:
            return
        size = sum(OVERHEAD_BYTES + len(message) for message in messages)
        if self.unacked_bytes + size > LIMIT_BYTES and self.unacked_bytes:
            raise PeerFull(
                f"{self.name} has not taken the last {self.unacked_bytes} bytes sent to it, and {size} more would exceed the bound of"
                f" {LIMIT_BYTES}: it stands still, or its connection is gone; see its log"
            )
        for parts in join(messages):
            frame = b"".join((self._header(Kind.MESSAGES, number=self._next), *parts))
            self._next += 1
            self.unacked_bytes += len(frame)
            self._queued.append(frame)
        self._spend_credit()
        if not self._queued:  # it is on its way, and with it what was heard
            self._ack_due_bytes = 0

    def receive_frame(self, frame: bytes | memoryview) -> Sequence[memoryview]:
        """Take a frame; return the messages in it, where it is the next one. Raises `WireError` for what is no frame."""
        header = unpack(frame)
        if header.receiver not in (0, self.identity):  # meant for the process before this one: its sender learns of the change
            self._transmit(pack(Kind.ACK, self.identity, header.sender, 0, 0))
            return ()
        if header.sender != self._other and not self._meet(header.sender):
            return ()
        if header.acked >= self._next:
            raise WireError(f"{self.name} says it received frame {header.acked}; {self._next - 1} were sent")
        self._acknowledge(header.acked)
        if header.kind is Kind.MESSAGES:
            return self._take(header.number, frame)
        if header.kind is Kind.PROBE:
            self._transmit(self._header(Kind.RESEND if self._received < header.number else Kind.ACK))
        elif header.kind is Kind.RESEND:
            for kept in tuple(self._in_flight):
                self._transmit(kept)
        elif header.kind is Kind.GOODBYE:
            self.has_left = True
        return ()

    def probe(self) -> None:
        """Ask for a sign where nothing was acknowledged since the last call, although something is on its way."""
        if self._in_flight and self._first == self._first_at_probe:
            self._transmit(self._header(Kind.PROBE, number=self._first + len(self._in_flight) - 1))
        self._first_at_probe = self._first

    def say_goodbye(self) -> None:
        """Tell the other end that this one closes."""
        self._transmit(self._header(Kind.GOODBYE))

    def send_ack(self) -> None:
        """Send a frame without a message: a sign of life; an end of another schema then says in words what is wrong."""
        self._transmit(self._header(Kind.ACK))

    def _meet(self, other: int) -> bool:
        """The other end is `other` from now on. False where that is a predecessor of the one that speaks now."""
        if other in self._former:
            return False
        before, self._other = self._other, other
        self._received, self._ack_due_bytes, self._reported_gap, self.has_left = 0, 0, -1, False
        if before:
            self._former.append(before)
            self._begin_again()
        return True

    def _take(self, number: int, frame: bytes | memoryview) -> Sequence[memoryview]:
        if number > self._received + 1 and self._reported_gap != self._received:
            self._reported_gap = self._received
            self._transmit(self._header(Kind.RESEND))
        if number != self._received + 1:
            return ()
        taken = split(frame)
        self._received = number
        self._ack_due_bytes += len(frame)
        if self._ack_due_bytes >= WINDOW_BYTES // 4:
            self._ack_due_bytes = 0
            self._transmit(self._header(Kind.ACK))
        return taken

    def _acknowledge(self, acked: int) -> None:
        """Let go of messages that were handed over there; their credit is free again."""
        while self._in_flight and self._first <= acked:
            size = len(self._in_flight.popleft())
            self._first += 1
            self._in_flight_bytes -= size
            self.unacked_bytes -= size
        if self._queued:
            self._spend_credit()

    def _spend_credit(self) -> None:
        while self._queued and (not self._in_flight or self._in_flight_bytes + len(self._queued[0]) <= WINDOW_BYTES):
            frame = self._queued.popleft()
            self._in_flight.append(frame)
            self._in_flight_bytes += len(frame)
            self._transmit(frame)

    def _begin_again(self) -> None:
        kept = [bytes(body) for frame in (*self._in_flight, *self._queued) for body in split(frame)]
        self._in_flight.clear()
        self._queued.clear()
        self._first = self._next = 1
        self._in_flight_bytes = self.unacked_bytes = self._first_at_probe = 0
        for body in self.introduction(kept):
            self.send(body)

    def _header(self, kind: Kind, *, number: int = 0) -> bytes:
        return pack(kind, self.identity, self._other, number, self._received)
