"""The seam between messages and the bytes that carry them: a `Hub` in the orchestrator, a `Link` in each peer.

`zmq` is the transport of a run (ROUTER and DEALER over TCP, encrypted). Its twin for tests (`tests/sim/memory.py`: in one process, on
whatever clock the event loop has, with faults on demand) passes the same contract tests. Both promise, by `session.Session`:

- between one pair messages arrive whole, in order and once, while both live, also when frames are lost, doubled or reordered, and when the
  connection breaks and comes back;
- sending never blocks, and what one peer has not taken is bounded in bytes: beyond, `send` raises `PeerFull`;
- every link finds an orchestrator that takes the place of a dead one, which receives each peer's introduction first;
- bytes that are not an accepted message cost one counter, by reason, in `refused`, and an `Unread` in their place; they never reach a
  stage.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

from pipelinerl.messages import Message

Introduction = Callable[[Sequence[bytes]], Iterable[Message]]
"""Makes the messages by which a peer introduces itself to an orchestrator; see `Link.introduce`."""


class Hub(Protocol):
    """The orchestrator's end: one for each kind of peer, many peers on it, told apart by name (`engine-0`)."""

    @property
    def refused(self) -> collections.Counter[str]:
        """Number of connections and messages that were refused, by reason: `unauthenticated`, `schema`, `malformed`, `oversize`, `name`."""
        ...

    async def receive(self) -> list[tuple[str, Message]]:
        """Wait for messages; return those that have arrived, as (peer name, message), in order of arrival; `Unread` for what is none."""
        ...

    def send(self, peer: str, message: Message) -> None:
        """Hand a message to a peer's connection. Raises `PeerGone` where no such peer is connected, `PeerFull` where it takes nothing."""
        ...

    def dismiss(self, message: Message) -> None:
        """Tell every peer the last it will hear: now, or where it cannot be reached now, once it looks for this hub, closed or not."""
        ...

    def close(self) -> None:
        """Deliver what was sent, for at most a second, and close."""
        ...


class Link(Protocol):
    """A peer's end: its one connection to the orchestrator."""

    name: str
    """This peer's name, for example `engine-0`."""

    @property
    def silent_s(self) -> float:
        """Seconds since the orchestrator's process last gave a sign of life, if only an acknowledgement."""
        ...

    def introduce(self, make: Introduction) -> None:
        """Send what `make` gives, and again, made anew, to every orchestrator that takes this one's place, before anything else.

        It is given the messages, encoded, that the dead one never took; they are not sent. It is called in `receive`, by the same thread.
        """
        ...

    def send(self, *messages: Message) -> None:
        """Hand messages to the connection, those of one call together where they are small; never blocks.

        Raises `PeerFull` where the orchestrator takes nothing; then none of them is sent.
        """
        ...

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message, waiting at most `timeout_s` seconds (0: not at all); None where none came, or at a `wake`."""
        ...

    def wake(self) -> None:
        """Have a `receive` that waits, or else the next one that would, return; the one method any thread may call."""
        ...

    def fileno(self) -> int:
        """A descriptor that becomes readable once when something happens; must be followed by `receive(0)` until that returns None."""
        ...

    def close(self) -> None:
        """Deliver what was sent, for at most a second, and close."""
        ...
