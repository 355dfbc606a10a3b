"""Long-lived connections of two: whoever needs something calls the process that has it, and both keep the channel for the next time.

A process that serves listens at a *place*. Words travel through its rendezvous store (CURVE): what is asked for, and the answer, in one
round. Bytes travel through a channel of gloo or NCCL (`point_to_point.Connect`) that only the two are in, and nothing else does. Each
caller's bytes are sent by a thread of its own, so a dead or slow one holds up nobody else, and every wait has a deadline. A channel on
which anything failed is dropped at both ends, and the next call makes another one.

A server hears messages of at most 1 MiB, and keeps `MAX_CALLERS` channels. For one more it lets go of the one that has been idle for
longest, whose caller makes another when it next needs one; where none is idle, the call is refused with the reason.
"""

from __future__ import annotations

import contextlib
import dataclasses
import queue
import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Annotated, Literal

import msgspec

from pipelinerl.errors import WeightsError
from pipelinerl.runtime.network import address_towards
from pipelinerl.transport.rendezvous import Operation, Question, RendezvousClient, RendezvousServer
from pipelinerl.weights.point_to_point import ENGINE, TRAINER, Channel, Connect
from pipelinerl.weights.rendezvous_store import RendezvousStore

MAX_BYTES = 64 << 20
"""Of one answer: a manifest, or a list of pieces, of some hundred thousand tensors."""
MAX_CALLERS = 1024
"""Of one server, each with a thread and a channel. Fewer than the engine ranks that call it would have them make channels again and again;
more let whoever knows the token take the process's memory and descriptors."""
MAX_OPEN = 2
"""Questions of one caller that are not wholly answered: one, and the next from a caller that has all bytes before this end notices."""
_DROPPED = b""
"""The answer to a caller whose channel is not there any more."""
_REFUSED = b"\0"
"""How the answer to a caller begins that is refused; the reason follows."""


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

    kind: Literal["route", "policy"]
    number: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Of the weight buffer."""
    target: Annotated[int, msgspec.Meta(ge=0)] = 0
    """Rank of the engine."""
    held: Annotated[int, msgspec.Meta(ge=-1)] = -1
    """The version over which the caller can lay changes; negative: it takes whole policies alone."""
    policy: str = ""
    """Digest of the weight buffer's name: what an engine rank is asked for."""
    layout: str = ""
    """Digest of the caller's parts: engine ranks with the same ones may relay to each other."""
    place: Place | None = None
    """Where the caller itself serves."""
    failed: tuple[Place, ...] = ()
    """Engine ranks that could not relay to the caller."""
    caller: str = ""
    """The caller's name for its channel, or for the answer."""
    is_new: bool = True
    """The caller has no channel of this name yet."""


@dataclasses.dataclass(slots=True)
class _Caller:
    questions: queue.SimpleQueue[tuple[Ask, bytes | None] | None] = dataclasses.field(default_factory=queue.SimpleQueue)
    """Each with what was said of it already; None: this end hangs up."""
    num_open: int = 0
    """Those not wholly answered."""
    channel: Channel | None = None


class Server:
    """Answers calls, in words, and then in bytes by a thread of the caller's own."""

    def __init__(
        self,
        connect: Connect,
        *,
        who: str,
        address: str,
        deadline_s: float,
        words: Callable[[Ask], bytes | None],
        send: Callable[[Ask, Channel, bytes], None],
        wait_for_words: Callable[[Ask], bytes] = lambda ask: b"",
    ) -> None:
        """`words` are what can be said at once, in the one thread of the store: it must not wait. Where that is nothing (None),
        `wait_for_words` finds them in the caller's thread. `send` is given what was said, and sends the bytes that were asked for.

        Raises `WeightsError` where nobody may listen on `address`.
        """
        self._connect, self._words, self._wait_for_words, self._send = connect, words, wait_for_words, send
        self._deadline = timedelta(seconds=deadline_s)
        self._decoder = msgspec.json.Decoder(Ask)
        self._callers: dict[str, _Caller] = {}
        """The one that asked last at the end."""
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._is_closed = threading.Event()
        token = secrets.token_hex(16)
        try:
            self._server = RendezvousServer(address, token, on_call=self._take)
        except OSError as error:
            raise WeightsError(f"cannot offer weights on weights.address = {address!r}: {error.strerror}") from None
        self.place = Place(who=who, address=address, port=self._server.port, token=token)
        self._client = RendezvousClient(address, self._server.port, token)

    def publish(self, key: str, value: bytes) -> None:
        """Give `value` to whoever asks for it by `Line.get`, now or later."""
        self._server.set(key, value)

    def hang_up(self) -> None:
        """Hang up on the callers that are being answered; each may call again. Those that have their answer keep their channels."""
        with self._lock:
            busy = [caller.channel for caller in self._callers.values() if caller.num_open and caller.channel is not None]
        for channel in busy:
            channel.abort()

    def close(self) -> None:
        """Hang up and stop; safe to repeat."""
        if not self._is_closed.is_set():
            self._is_closed.set()
            with self._lock:
                callers = list(self._callers.values())
            for caller in callers:
                caller.questions.put(None)
            self.hang_up()
            for thread in self._threads:
                thread.join()
            self._client.close()
            self._server.close()

    def _take(self, call: bytes) -> bytes | None:
        """Begin to answer a call; return what is said of it, where that is known. Raises `msgspec.DecodeError` or `ValueError` where it is
        none.
        """
        ask = self._decoder.decode(call)
        words = self._words(ask)
        if ask.kind == "policy":
            with self._lock:
                refused = self._hand_over(ask, words)
            words = words if refused is None else refused
        return words

    def _hand_over(self, ask: Ask, words: bytes | None) -> bytes | None:
        """Have the caller's thread send; None, or what the caller is told where it does not."""
        caller = self._callers.pop(ask.caller, None)
        if caller is None:
            if not ask.is_new or self._is_closed.is_set():
                return _DROPPED
            if len(self._callers) >= MAX_CALLERS and not self._let_go():
                return _REFUSED + f"it is answering {len(self._callers)} callers, as many as it may".encode()
            caller = _Caller()
            # Not as daemons: a thread that is inside a collective library when the interpreter ends would abort the process.
            self._threads = [thread for thread in self._threads if thread.is_alive()]
            self._threads.append(threading.Thread(target=self._serve, args=(ask.caller, caller), name="shards"))
            self._threads[-1].start()
        self._callers[ask.caller] = caller
        if caller.num_open >= MAX_OPEN:
            return _REFUSED + b"it has not answered this caller's questions before"
        caller.num_open += 1
        caller.questions.put((ask, words))
        return None

    def _let_go(self) -> bool:
        """Hang up on the caller that has been idle for longest; tell whether there was one."""
        idle = next((name for name, caller in self._callers.items() if not caller.num_open), None)
        if idle is not None:
            self._callers.pop(idle).questions.put(None)
        return idle is not None

    def _serve(self, name: str, caller: _Caller) -> None:
        store = RendezvousStore(self._client, timeout=self._deadline)
        try:
            with contextlib.suppress(RuntimeError):  # the caller says what went wrong
                while (asked := caller.questions.get()) is not None and not self._is_closed.is_set():
                    ask, words = asked
                    if words is None:
                        self._server.set(f"{name}/answer", words := self._wait_for_words(ask))
                    if caller.channel is None:
                        caller.channel = self._connect(store, name, TRAINER, address=self.place.address, deadline=self._deadline)
                    self._send(ask, caller.channel, words)
                    with self._lock:
                        caller.num_open -= 1
        finally:
            with self._lock:
                if self._callers.get(name) is caller:
                    del self._callers[name]
            if caller.channel is not None:
                caller.channel.abort()
            self._server.forget(f"{name}/")


class Line:
    """The calling end: one channel to one place, made when first needed. What goes wrong is a `RuntimeError` or a `PeerError`."""

    def __init__(self, place: Place, connect: Connect, *, deadline_s: float) -> None:
        self.place = place
        self._connect = connect
        self._deadline_s = deadline_s
        self._client = RendezvousClient(place.address, place.port, place.token, max_bytes=MAX_BYTES)
        self._store = RendezvousStore(self._client, timeout=timedelta(seconds=deadline_s))
        self._caller = ""
        self._asked = Ask(kind="policy")
        self._question: Question | None = None
        self._channel: Channel | None = None

    def get(self, key: str) -> bytes:
        """What is published there under a key."""
        return self._client.ask(Operation.GET, key, timeout_s=self._deadline_s)

    def route(self, ask: Ask) -> bytes:
        """Ask for a few words."""
        return self._call(ask, caller=secrets.token_hex(8)).answer(self._deadline_s)

    def ask(self, ask: Ask) -> None:
        """Ask for a policy; `answer` waits for what is said of it."""
        self._asked = ask
        if self._channel is None:
            self._caller = secrets.token_hex(8)
        self._question = self._call(msgspec.structs.replace(ask, is_new=self._channel is None), caller=self._caller)

    def answer(self, *, timeout_s: float | None = None) -> tuple[bytes, Channel]:
        """The answer in words, and the channel of its bytes: the one from earlier, or another where the peer has dropped that."""
        question, self._question = self._question, None
        assert question is not None, "it was asked"
        words = question.answer(timeout_s or self._deadline_s)
        if words.startswith(_REFUSED):
            raise RuntimeError(f"it refuses the call: {words.removeprefix(_REFUSED).decode(errors='replace')}")
        if words == _DROPPED:
            if self._channel is None:
                raise RuntimeError("it is about to end")
            self.drop()
            self.ask(self._asked)
            return self.answer(timeout_s=timeout_s)
        if self._channel is None:
            self._channel = self._connect(
                self._store,
                self._caller,
                ENGINE,
                address=address_towards(self.place.address, self.place.port),
                deadline=timedelta(seconds=self._deadline_s),
            )
        return words, self._channel

    def drop(self) -> None:
        """Hang up; the next call makes another channel."""
        if self._question is not None:
            self._question.drop()
            self._question = None
        if self._channel is not None:
            self._channel.abort()
            self._channel = None

    def close(self) -> None:
        """Hang up for good; safe to repeat."""
        self.drop()
        self._client.close()

    def _call(self, ask: Ask, *, caller: str) -> Question:
        call = msgspec.json.encode(msgspec.structs.replace(ask, caller=caller))
        return self._client.begin(Operation.CALL, f"{caller}/answer", value=call)
