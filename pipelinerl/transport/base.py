"""The seam between messages and the bytes that carry them: a `Hub` in the orchestrator, a `Link` in each peer.

Two transports pass the same contract tests: `zmq` (ROUTER and DEALER over TCP, encrypted) and `memory` (in one process, on whatever
clock the event loop has, with faults on demand). Both promise: messages between one pair arrive whole, in order, at most once while
both live; sending never blocks, because what may be outstanding is bounded by admission and pulls, never by a socket's own limits;
bytes that are not an accepted message are counted in `num_refused` and dropped, and never reach a stage.
"""

from __future__ import annotations

from typing import Protocol

from pipelinerl.messages import Message


class Hub(Protocol):
    """The orchestrator's end: one for each kind of peer, many peers on it, told apart by name (`engine-0`)."""

    num_refused: int
    """Frames that were not an accepted message."""

    async def receive(self) -> list[tuple[str, Message]]:
        """Wait for messages; return all that have arrived, as (peer name, message), in order of arrival."""
        ...

    def send(self, peer: str, message: Message) -> None:
        """Hand a message to a peer's connection. Raises `PeerGone` where no such peer is connected."""
        ...

    def close(self) -> None:
        """Deliver what was sent, for at most a second, and close."""
        ...


class Link(Protocol):
    """A peer's end: its one connection to the orchestrator."""

    name: str
    """This peer's name, for example `engine-0`."""

    def send(self, message: Message) -> None:
        """Hand a message to the connection; never blocks."""
        ...

    def receive(self, timeout_s: float) -> Message | None:
        """Return the next message, waiting at most `timeout_s` seconds (0: not at all); None where none came."""
        ...

    def close(self) -> None:
        """Deliver what was sent, for at most a second, and close."""
        ...
