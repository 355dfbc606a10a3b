"""The orchestrator's half that both transports share: one conversation for each peer, and what was refused, by reason.

Whatever a peer sends costs at most one counter: a frame that is none, a message it may not send, a name nobody has. Whose it was, an
`Unread` in its place says: what it was asked for is asked of another.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import re
from collections.abc import Callable
from typing import Any

from pipelinerl.errors import PeerFull, PeerGone, WireError
from pipelinerl.messages import Message, Unread
from pipelinerl.transport.codec import Decoder, about, encode
from pipelinerl.transport.session import Conversation

NAME = re.compile(r"[a-z]+-\d{1,5}")
"""A peer's name: its role and its number. Bounds how many peers an intruder with a key could pretend to be."""
LOST_FOR_S = 5.0
"""A peer without a connection for so long counts as gone. Must exceed the longest pause between two attempts to connect again."""


class Exchange:
    """Conversations with named peers. `carry` puts a frame on a peer's connection, and returns False where it has none."""

    def __init__(self, *, accepts: Any, carry: Callable[[str, bytes], bool], clock: Callable[[], float]) -> None:
        self.refused: collections.Counter[str] = collections.Counter()
        """What was not accepted, by reason."""
        self._decoder: Decoder[Message] = Decoder(accepts)
        self._carry = carry
        self._clock = clock
        self._conversations: dict[str, Conversation] = {}
        self._lost_since: dict[str, float] = {}
        """Peers whose connection is gone, and since when on the clock."""

    def introduce(self, name: str, identity: int) -> None:
        """A peer connected that will call itself `identity`: it can be sent to before it was heard."""
        self._conversation(name).meet(identity)

    def hear(self, name: str, frame: bytes | memoryview) -> list[tuple[str, Message]]:
        """Take a frame that came from a peer; return the messages it lets through, mostly one, as (name, message), with an `Unread` in
        place of one that could not be read."""
        try:
            bodies = self._conversation(name).hear(frame)
        except WireError as error:
            self.refused[error.reason] += 1
            if error.reason == "schema":  # a peer of another build, which hears in words what is wrong
                self._conversation(name).show_sign()
            return [] if error.reason in ("schema", "name") else [(name, Unread(reason=error.reason, words=str(error)))]
        return [(name, self._decode(body)) for body in bodies]

    def send(self, name: str, message: Message) -> None:
        """Send to a peer that was heard before. Raises `PeerGone` where there is none, or it left, or its connection is gone."""
        conversation = self._conversations.get(name)
        if conversation is None or not conversation.has_met:
            raise PeerGone(f"cannot send {type(message).__name__} to {name}: its connection is closed, or never was open")
        if conversation.has_left:
            raise PeerGone(f"cannot send {type(message).__name__} to {name}: it said goodbye, and its connection is closed")
        conversation.send(encode(message))
        lost_s = self._clock() - self._lost_since.get(name, float("inf"))
        if lost_s > LOST_FOR_S:
            raise PeerGone(f"cannot send {type(message).__name__} to {name}: its connection is closed since {lost_s:.0f} s")

    def send_all(self, message: Message) -> None:
        """Send to every peer that can be sent to."""
        for name in self._conversations:
            with contextlib.suppress(PeerGone, PeerFull):
                self.send(name, message)

    def remind(self) -> bool:
        """Ask for what is owed, see `Conversation.remind`. False where nobody owes anything."""
        for conversation in self._conversations.values():
            conversation.remind()
        return any(conversation.kept_bytes for conversation in self._conversations.values())

    def say_goodbye(self) -> None:
        """Tell every peer that this end closes."""
        for conversation in self._conversations.values():
            conversation.say_goodbye()

    @property
    def kept_bytes(self) -> int:
        """Bytes of messages that peers have not acknowledged."""
        return sum(conversation.kept_bytes for conversation in self._conversations.values())

    def _decode(self, body: memoryview) -> Message:
        try:
            return self._decoder.decode(body)
        except WireError as error:
            self.refused[error.reason] += 1
            of = about(body)
            return Unread(reason=error.reason, words=str(error), rollout_id=of.name, attempt=of.attempt, turn=of.turn)

    def _conversation(self, name: str) -> Conversation:
        conversation = self._conversations.get(name)
        if conversation is None:
            if not NAME.fullmatch(name):
                raise WireError(f"{name!r} is no peer's name; expected a role and a number, as engine-0", reason="name")
            transmit = functools.partial(self._transmit, name)
            conversation = self._conversations[name] = Conversation(name, transmit=transmit, keeps_for_successor=False)
        return conversation

    def _transmit(self, name: str, frame: bytes) -> None:
        if self._carry(name, frame):
            self._lost_since.pop(name, None)
        else:
            self._lost_since.setdefault(name, self._clock())
