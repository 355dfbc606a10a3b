"""The orchestrator's half without sockets: one session for each peer, and what was refused, by reason.

A frame that is none, a message that a peer may not send, or a name that nobody has costs one counter. An `Unread` in its place says whose
it was, so that the request can go to another peer.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

import msgspec

from pipelinerl.errors import PeerFull, PeerGone, WireError
from pipelinerl.messages import Message, Unread
from pipelinerl.transport.codec import Decoder, about, encode
from pipelinerl.transport.session import Session

NAME = re.compile(r"[a-z]+-\d{1,5}")
"""A peer's name: its role and its number. Bounds how many peers an intruder with a key could pretend to be."""
LOST_FOR_S = 5.0
"""A peer without a connection for so long counts as gone. Must exceed the longest pause between two attempts to connect again."""


class Router:
    """Sessions with named peers. `carry` puts a frame on a peer's connection, and returns False where it has none."""

    def __init__(self, *, accepts: Any, carry: Callable[[str, bytes], bool], clock: Callable[[], float]) -> None:
        self.refused: collections.Counter[str] = collections.Counter()
        """Number of frames and messages that were not accepted, by reason."""
        self._decoder: Decoder[Message] = Decoder(accepts)
        self._carry = carry
        self._clock = clock
        self._sessions: dict[str, Session] = {}
        self._lost_since: dict[str, float] = {}
        """Peers whose connection is gone, and since when on the clock."""

    def receive_frame(self, name: str, frame: bytes | memoryview) -> list[tuple[str, Message]]:
        """Take a frame that came from a peer; return the messages it lets through, mostly one, as (name, message), with an `Unread` in
        place of one that could not be read."""
        try:
            bodies = self._session(name).receive_frame(frame)
        except WireError as error:
            self.refused[error.reason] += 1
            if error.reason == "schema":  # a peer of another build, which hears in words what is wrong
                self._session(name).send_ack()
            return [] if error.reason in ("schema", "name") else [(name, Unread(reason=error.reason, words=str(error)))]
        return [(name, self._decode(body)) for body in bodies]

    def send(self, name: str, message: Message) -> None:
        """Send to a peer that was heard before. Raises `PeerGone` where there is none, or it left, or its connection is gone."""
        session = self._sessions.get(name)
        failed = f"cannot send {type(message).__name__} to {name}: its connection is closed"
        if session is None or not session.has_met or session.has_left:
            raise PeerGone(f"{failed}, or never was open")
        session.send(encode(message))
        lost_s = self._clock() - self._lost_since.get(name, float("inf"))
        if lost_s > LOST_FOR_S:
            raise PeerGone(f"{failed} since {lost_s:.0f} s")

    def send_all(self, message: Message) -> None:
        """Send to every peer that can be sent to."""
        for name in self._sessions:
            with contextlib.suppress(PeerGone, PeerFull):
                self.send(name, message)

    def probe(self) -> bool:
        """Ask for what is owed, see `Session.probe`. False where nobody owes anything."""
        for session in self._sessions.values():
            session.probe()
        return any(session.unacked_bytes for session in self._sessions.values())

    def _decode(self, body: memoryview) -> Message:
        try:
            return self._decoder.decode(body)
        except WireError as error:
            self.refused[error.reason] += 1
            return Unread(reason=error.reason, words=str(error), **msgspec.structs.asdict(about(body)))

    def _session(self, name: str) -> Session:
        session = self._sessions.get(name)
        if session is None:
            if not NAME.fullmatch(name):
                raise WireError(f"{name!r} is no peer's name; expected a role and a number, as engine-0", reason="name")
            transmit = functools.partial(self._transmit, name)
            session = self._sessions[name] = Session(name, transmit=transmit, introduction=lambda kept: ())
        return session

    def _transmit(self, name: str, frame: bytes) -> None:
        if self._carry(name, frame):
            self._lost_since.pop(name, None)
        else:
            self._lost_since.setdefault(name, self._clock())
