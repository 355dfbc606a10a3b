"""Records what became of everything that peers said, inside the orchestrator: heard, refused as what, or fenced.

The real hub is asked for one message at a time, so that what is refused between two of them was refused of the first. `<run>/heard.log` has
a line for each message that was dealt with whole: process of the orchestrator, peer, connection, digest, type, and what became of it. One
that is not there never came, or died with the orchestrator that had it in hand.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.peers.engine_requests import EngineRequests
from orchestrator.peers.peers import Peers
from orchestrator.peers.scorers import Scorers
from orchestrator.recovery.trainer_session import TrainerSession
from orchestrator.rules.validation import penalties, violations
from pipelinerl.messages import Message
from pipelinerl.transport.router import Router
from pipelinerl.transport.zmq import ZmqHub
from scripts.chaos.liar import digest_of

MAX_REPLACED = 10**6
"""In place of the product's bound: a run that is to be lied to for minutes needs liars that are replaced, and never banned."""
TAKEN, FENCED = "taken", "fenced"


@dataclasses.dataclass(slots=True)
class _InHand:
    """A message that the orchestrator is dealing with."""

    peer: str
    connection: str
    digest: str
    message: Message
    refused: list[str] = dataclasses.field(default_factory=list)
    is_fenced: bool = False
    is_put_off: bool = False
    """It is dealt with once the trainer that said it has started."""


class Witness:
    """Writes down what becomes of messages."""

    def __init__(self, run_folder: Path) -> None:
        self._log = os.open(run_folder / "heard.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._digests: collections.deque[str] = collections.deque()
        """Of the bodies of a frame."""
        self._waiting: dict[ZmqHub, collections.deque[_InHand]] = collections.defaultdict(collections.deque)
        self._in_hand: dict[ZmqHub, _InHand] = {}
        self._now: _InHand | None = None

    def install(self) -> None:
        """Look at everything from now on. The liars are replaced any number of times."""
        penalties.MAX_REPLACED = MAX_REPLACED
        self._see_bodies()
        self._see_messages()
        self._see_verdicts()

    def _see_bodies(self) -> None:
        decode, hear = Router._decode, Router.receive_frame

        def see_body(exchange: Router, body: memoryview) -> Message:
            self._digests.append(digest_of(body))
            return decode(exchange, body)

        def see_frame(exchange: Router, name: str, frame: bytes | memoryview) -> list[tuple[str, Message]]:
            self._digests.clear()
            before = exchange.refused.copy()
            arrived = hear(exchange, name, frame)
            hub: ZmqHub = exchange._carry.__self__  # pyright: ignore[reportFunctionMemberAccess]
            connection = hub._routes[name].hex()
            for number, (peer, message) in enumerate(arrived):
                digest = self._digests[number] if self._digests else digest_of(frame)
                self._waiting[hub].append(_InHand(peer, connection, digest, message))
            for reason in (exchange.refused - before) if not arrived else ():
                self._write(name, connection, digest_of(frame), "", [reason], is_fenced=False)
            return arrived

        Router._decode, Router.receive_frame = see_body, see_frame  # pyright: ignore[reportAttributeAccessIssue]

    def _see_messages(self) -> None:
        receive = ZmqHub.receive

        async def receive_one(hub: ZmqHub) -> list[tuple[str, Message]]:
            self._now = None
            done = self._in_hand.pop(hub, None)
            if done is not None and not done.is_put_off:
                self._put_down(done)
            while not self._waiting[hub]:
                await receive(hub)
            self._now = self._in_hand[hub] = self._waiting[hub].popleft()
            return [(self._now.peer, self._now.message)]

        ZmqHub.receive = receive_one  # pyright: ignore[reportAttributeAccessIssue]

    def _see_verdicts(self) -> None:
        hold, asked_of, not_asked = Peers._hold_against, EngineRequests._asked_of, Scorers._on_unawaited

        def see_refusal(peers: Peers, peer: str, lie: violations.Violation, **options: Any) -> None:
            if self._now is not None:
                self._now.refused.append(str(lie.kind))
            hold(peers, peer, lie, **options)

        def see_asked(requests: EngineRequests, *arguments: Any, **options: Any) -> Any:
            asked = asked_of(requests, *arguments, **options)
            if asked is None and self._now is not None:
                self._now.is_fenced = not self._now.refused
            return asked

        def see_not_asked(scorers: Scorers, *arguments: Any) -> None:
            not_asked(scorers, *arguments)
            if self._now is not None:
                self._now.is_fenced = not self._now.refused

        once_started = TrainerSession._once_started

        def see_put_off(session: TrainerSession, handler: Callable[[str, Any], None], peer: str, said: Message) -> None:
            in_hand = self._now

            def handle(peer: str, said: Message) -> None:
                if in_hand is None or not in_hand.is_put_off:
                    handler(peer, said)
                    return
                self._now = in_hand
                handler(peer, said)
                self._now = None
                self._put_down(in_hand)

            num_early = len(session.early)
            once_started(session, handle, peer, said)
            if in_hand is not None:
                in_hand.is_put_off = len(session.early) > num_early

        TrainerSession._once_started = see_put_off  # pyright: ignore[reportAttributeAccessIssue]
        Peers._hold_against, EngineRequests._asked_of, Scorers._on_unawaited = see_refusal, see_asked, see_not_asked  # pyright: ignore[reportAttributeAccessIssue]

    def _put_down(self, done: _InHand) -> None:
        """A message was dealt with."""
        step = getattr(done.message, "step", "")
        what = f"{type(done.message).__name__}{f' {step}' if step != '' else ''}"
        self._write(done.peer, done.connection, done.digest, what, done.refused, is_fenced=done.is_fenced)

    def _write(self, peer: str, connection: str, digest: str, what: str, refused: list[str], *, is_fenced: bool) -> None:
        outcome = refused or [FENCED if is_fenced else TAKEN]
        os.write(self._log, f"{json.dumps([os.getpid(), peer, connection, digest, what, outcome])}\n".encode())
