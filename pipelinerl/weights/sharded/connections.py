"""Long-lived connections of two: whoever needs something calls the process that has it, and both keep the channel for the next time.

A process that serves listens at a *place*; what is asked for travels through its rendezvous store (CURVE), the bytes through a channel of
gloo or NCCL (`point_to_point.Connect`) that only the two are in. Each caller is answered by a thread of its own, so a dead or slow one
holds up nobody else, and every wait has a deadline. A channel on which anything failed is dropped at both ends, and the next call makes
another one.
"""

from __future__ import annotations

import contextlib
import queue
import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Literal

import msgspec
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.runtime.network import address_towards
from pipelinerl.transport.rendezvous import RendezvousClient, RendezvousServer
from pipelinerl.weights.point_to_point import BYE, ENGINE, TRAINER, Channel, Connect
from pipelinerl.weights.rendezvous_store import RendezvousStore


class Place(msgspec.Struct, frozen=True, kw_only=True):
    """Where a process serves."""

    who: str
    """For messages: "trainer rank 3"."""
    address: str
    port: int
    token: str
    """Whoever knows it may call; it stays out of logs."""

    def __str__(self) -> str:
        return f"{self.who} at {self.address}:{self.port}"


class Ask(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One request."""

    kind: Literal["route", "manifest", "shard", "relay"]
    number: int = 0
    """Of the weight buffer."""
    target: int = 0
    """Rank of the engine."""
    known: str = ""
    """Digest of the list of pieces that the caller has from an earlier time."""
    policy: str = ""
    """Digest of the weight buffer's name, for a relay."""
    layout: str = ""
    """Digest of the caller's parts: engine ranks with the same ones may relay to each other."""
    place: Place | None = None
    """Where the caller itself serves."""
    failed: tuple[Place, ...] = ()
    """Engine ranks that could not relay to the caller."""
    caller: str = ""
    """The caller's name for the channel, or for the answer."""
    is_new: bool = True
    """The caller has no channel of this name yet."""


class Server:
    """Answers calls. `answer` talks to one caller over its channel; `route` answers in a few words through the store."""

    def __init__(
        self,
        connect: Connect,
        *,
        who: str,
        address: str,
        deadline_s: float,
        answer: Callable[[Ask, Channel], None],
        route: Callable[[Ask], bytes] = lambda ask: b"",
    ) -> None:
        """Raises `WeightsError` where nobody may listen on `address`."""
        self._connect, self._answer, self._route = connect, answer, route
        self._deadline = timedelta(seconds=deadline_s)
        token = secrets.token_hex(16)
        try:
            self._server = RendezvousServer(address, token)
        except OSError as error:
            raise WeightsError(f"cannot offer weights on weights.address = {address!r}: {error.strerror}") from None
        self.place = Place(who=who, address=address, port=self._server.port, token=token)
        self._client = RendezvousClient(address, self._server.port, token)
        self._callers: dict[str, queue.SimpleQueue[Ask | None]] = {}
        self._channels: dict[str, Channel] = {}
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        self._start(self._accept)

    def hang_up(self) -> None:
        """Hang up on every caller; each may call again."""
        with self._lock:
            channels, self._channels = dict(self._channels), {}
            callers = dict(self._callers)
        for channel in channels.values():
            channel.abort()
        for caller in channels.keys() & callers.keys():
            callers[caller].put(None)

    def close(self) -> None:
        """Hang up and stop; safe to repeat."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            self._server.calls.put(BYE)
            with self._lock:
                callers = list(self._callers.values())
            for waiting in callers:
                waiting.put(None)
            self.hang_up()
            for thread in self._threads:
                thread.join()
            self._client.close()
            self._server.close()

    def _start(self, work: Callable[..., None], *arguments: object) -> None:
        # Not as daemons: a thread that is inside a collective library when the interpreter ends would abort the process.
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=work, args=arguments, name="shards"))
        self._threads[-1].start()

    def _accept(self) -> None:
        decoder = msgspec.json.Decoder(Ask)
        while (call := self._server.calls.get()) != BYE:
            with contextlib.suppress(msgspec.DecodeError, ValueError):  # who knows the token says nothing else
                self._take(decoder.decode(call))

    def _take(self, ask: Ask) -> None:
        if ask.kind == "route":
            RendezvousStore(self._client, timeout=self._deadline).set(f"{ask.caller}/route", self._route(ask))
            return
        with self._lock:
            waiting = self._callers.get(ask.caller)
            if waiting is None and ask.is_new:
                waiting = self._callers[ask.caller] = queue.SimpleQueue()
                self._start(self._serve, ask.caller, waiting)
            if waiting is not None:  # else it was dropped here, and the caller sees that by itself
                waiting.put(ask)

    def _serve(self, caller: str, waiting: queue.SimpleQueue[Ask | None]) -> None:
        store = RendezvousStore(self._client, timeout=self._deadline)
        try:
            with contextlib.suppress(RuntimeError):  # the caller says what went wrong
                channel = self._connect(store, caller, TRAINER, address=self.place.address, deadline=self._deadline)
                with self._lock:
                    self._channels[caller] = channel
                while (ask := waiting.get()) is not None and not self._is_closed.is_set():
                    self._answer(ask, channel)
        finally:
            with self._lock:
                self._callers.pop(caller, None)
                channel = self._channels.pop(caller, None)
            if channel is not None:
                channel.abort()
            self._server.forget(f"{caller}/")


class Line:
    """The calling end: one channel to one place, made when first needed."""

    def __init__(self, place: Place, connect: Connect, *, deadline_s: float) -> None:
        self.place = place
        self._connect = connect
        self._deadline = timedelta(seconds=deadline_s)
        self._client = RendezvousClient(place.address, place.port, place.token)
        self._store = RendezvousStore(self._client, timeout=self._deadline)
        self._caller = ""
        self._asked = Ask(kind="route")
        self._channel: Channel | None = None

    def ask(self, ask: Ask) -> None:
        """Ask for something; `begin` receives the beginning of the answer. Raises `RuntimeError`."""
        self._asked = ask
        if self._channel is not None:
            self._call(msgspec.structs.replace(ask, is_new=False))

    def begin(self, first: torch.Tensor) -> Channel:
        """Receive the beginning of the answer; a channel kept from earlier may be gone, then over another one. Raises `RuntimeError`."""
        if self._channel is not None:
            try:
                self._channel.receive(first)
                return self._channel
            except RuntimeError:
                self.drop()
        self._caller = secrets.token_hex(8)
        self._call(self._asked)
        try:
            self._channel = self._connect(
                self._store, self._caller, ENGINE, address=address_towards(self.place.address, self.place.port), deadline=self._deadline
            )
            self._channel.receive(first)
        except BaseException:
            self.drop()
            raise
        return self._channel

    def route(self, ask: Ask) -> bytes:
        """Ask for a few words. Raises `RuntimeError`."""
        caller = secrets.token_hex(8)
        self._store.call(msgspec.json.encode(msgspec.structs.replace(ask, caller=caller)).decode())
        answer = self._store.get(f"{caller}/route")
        self._store.delete_key(f"{caller}/route")
        return answer

    def drop(self) -> None:
        """Hang up; the next call makes another channel."""
        if self._channel is not None:
            self._channel.abort()
            self._channel = None

    def close(self) -> None:
        """Hang up for good; safe to repeat."""
        self.drop()
        self._client.close()

    def _call(self, ask: Ask) -> None:
        self._store.call(msgspec.json.encode(msgspec.structs.replace(ask, caller=self._caller)).decode())
