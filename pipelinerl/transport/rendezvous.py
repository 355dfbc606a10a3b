"""A key-value store by which ranks, or a trainer and an engine, find each other: torch's TCPStore, for those alone who know its token.

Torch's own store asks nobody who they are and lists its keys to all. This one is a ROUTER of ZeroMQ with CURVE: both ends derive their key
pairs from the token, so who does not know it is refused before a byte of theirs is decoded, and nothing travels in the clear. The token
itself never travels here: who meets has it from the run's folder, or from the orchestrator over a connection that is authenticated.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import math
import os
import threading
import weakref
from collections.abc import Callable, Iterator

import msgspec
import zmq
import zmq.utils.z85
from zmq.utils.monitor import recv_monitor_message

from pipelinerl.errors import PeerGone, PeerSilent
from pipelinerl.transport.curve import authenticator, bind, configure
from pipelinerl.transport.keys import AllowList, KeyPair

MAX_BYTES = 1 << 20
"""Largest message to a store, and by default from one. Ranks tell each other addresses and ids of a few hundred bytes here."""
_CUT = zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
_CUT |= zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_AUTH


class Operation(enum.StrEnum):
    """The operations of the store."""

    SET = "set"
    """Keep `value` under the key."""
    GET = "get"
    """Answer the first key's value once all keys are there."""
    ADD = "add"
    """Add the number in `value` to the one under the key, from 0; answer the sum."""
    CHECK = "check"
    """Answer whether all keys are there: a byte, or none."""
    DELETE = "delete"
    """Forget the key; answer whether it was there: a byte, or none."""
    COMPARE_SET = "compare_set"
    """Where the key holds `expected`, or is missing and that is empty, keep `value`; answer what it then holds, or `expected`."""
    CALL = "call"
    """Hand `value` to the server's own process; where keys are named, answer what that says of it, or the first one's value once all are
    there, and forget them."""


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One request of a client."""

    operation: Operation
    keys: tuple[str, ...] = ()
    value: bytes = b""
    expected: bytes = b""


class KeyValues:
    """The values of a store, and the clients that wait for some. No socket, no clock."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self._waiting: dict[bytes, Request] = {}
        """A client's last request, while a key is missing, by client; each asks one thing at a time."""

    def ask(self, client: bytes, request: Request) -> Iterator[tuple[bytes, bytes]]:
        """Do what a client asks, and give the answers that are due now: its own, and those of clients that waited for what it set."""
        self._waiting.pop(client, None)
        if request.operation is Operation.GET or (request.operation is Operation.CALL and request.keys):
            self._waiting[client] = request
        else:
            yield client, self._done(request)
        yield from self.due()

    def due(self) -> Iterator[tuple[bytes, bytes]]:
        """Give the answers to clients that waited for what is there now."""
        for waiting, wanted in list(self._waiting.items()):
            if all(key in self.values for key in wanted.keys):
                del self._waiting[waiting]
                yield waiting, self.values[wanted.keys[0]] if wanted.keys else b""
                for key in wanted.keys if wanted.operation is Operation.CALL else ():
                    self.values.pop(key, None)

    def _done(self, request: Request) -> bytes:
        key, found = request.keys[0] if request.keys else "", self.values.get(request.keys[0]) if request.keys else None
        match request.operation:
            case Operation.SET:
                self.values[key] = request.value
            case Operation.ADD:
                self.values[key] = str(int(found or 0) + int(request.value)).encode()
                return self.values[key]
            case Operation.CHECK:
                return b"1" if all(one in self.values for one in request.keys) else b""
            case Operation.DELETE:
                return b"" if self.values.pop(key, None) is None else b"1"
            case Operation.COMPARE_SET:
                if (found or b"") == request.expected:
                    self.values[key] = request.value
                return self.values.get(key, request.expected)
            case _:
                pass
        return b""


class RendezvousServer:
    """The store, served by a thread of its own on one address, on a port that the system picks."""

    def __init__(self, address: str, token: str, *, on_call: Callable[[bytes], bytes | None] = lambda value: None) -> None:
        """`on_call` takes the values of `CALL`, in order, in the store's own thread: it must not wait. Where it returns words, they are the
        answer to a call that names keys. What it raises of what a caller may have said wrong (`ValueError`, `msgspec.DecodeError`) is that
        caller's loss alone.

        Raises `OSError` where nobody may listen on `address`.
        """
        self._on_call = on_call
        self._store = KeyValues()
        self._lock = threading.Lock()
        """Held while the table is read or changed."""
        self._context = zmq.Context()
        self._authenticator = authenticator(self._context, AllowList({_key_pair(token, "client").public: "client"}))
        self._socket = self._context.socket(zmq.ROUTER)
        configure(self._socket, _key_pair(token, "server"), max_bytes=MAX_BYTES)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._is_closing = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="rendezvous", daemon=True)
        try:
            self.port = int(bind(self._socket, address).rpartition(":")[2])
        except zmq.ZMQError as error:
            self._release()
            raise OSError(error.errno, error.strerror) from None
        self._thread.start()

    def set(self, key: str, value: bytes) -> None:
        """Keep a value under a key, as a client's `SET` does."""
        with self._lock:
            self._store.values[key] = value
        os.eventfd_write(self._wake, 1)

    def forget(self, prefix: str) -> None:
        """Remove the keys that begin so: their meeting is over."""
        with self._lock:
            for key in [key for key in self._store.values if key.startswith(prefix)]:
                del self._store.values[key]

    def close(self) -> None:
        """Hang up on everybody; safe to repeat."""
        if not self._socket.closed:
            self._is_closing.set()
            os.eventfd_write(self._wake, 1)
            self._thread.join()
            self._release()

    def _release(self) -> None:
        self._socket.close(linger=0)
        self._authenticator.stop()
        self._context.term()
        os.close(self._wake)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._socket, zmq.POLLIN)
        poller.register(self._wake, zmq.POLLIN)
        decoder = msgspec.msgpack.Decoder(Request)
        while ready := dict(poller.poll()):
            if self._wake in ready:
                os.eventfd_read(self._wake)
                if self._is_closing.is_set():
                    return
                self._answer(self._store.due)
            if self._socket in ready:
                client, *parts = self._socket.recv_multipart()
                with contextlib.suppress(msgspec.DecodeError, ValueError):  # who knows the token says nothing else; nothing is answered
                    self._take(client, decoder.decode(parts[0] if len(parts) == 1 else b""))

    def _take(self, client: bytes, request: Request) -> None:
        said = self._on_call(request.value) if request.operation is Operation.CALL else None
        if said is not None and request.keys:
            self._socket.send_multipart([client, said])
            return
        self._answer(lambda: self._store.ask(client, request))

    def _answer(self, find: Callable[[], Iterator[tuple[bytes, bytes]]]) -> None:
        with self._lock:
            due = list(find())
        for to, answer in due:
            self._socket.send_multipart([to, answer])


class RendezvousClient:
    """Asks a store. Any thread may: a connection belongs to one question at a time, and is used again."""

    def __init__(self, address: str, port: int, token: str, *, max_bytes: int = MAX_BYTES) -> None:
        self.place = f"{address}:{port}"
        self._token = token
        self._max_bytes = max_bytes
        self._idle: list[_Connection] = []
        self._lock = threading.Lock()
        weakref.finalize(self, _close_all, self._idle)

    def ask(self, operation: Operation, *keys: str, value: bytes = b"", expected: bytes = b"", timeout_s: float) -> bytes:
        """The store's answer; see `Operation`. Raises `PeerSilent` after `timeout_s`, `PeerGone` where it hangs up or is not there."""
        return self.begin(operation, *keys, value=value, expected=expected).answer(timeout_s)

    def begin(self, operation: Operation, *keys: str, value: bytes = b"", expected: bytes = b"") -> Question:
        """Ask, and wait for the answer later."""
        connection = self._idle_or_new()
        connection.ask(Request(operation=operation, keys=keys, value=value, expected=expected))
        return Question(connection, keep=self._keep)

    def close(self) -> None:
        """Hang up where nobody waits; safe to repeat."""
        with self._lock:
            _close_all(self._idle)

    def _keep(self, connection: _Connection) -> None:
        with self._lock:
            self._idle.append(connection)

    def _idle_or_new(self) -> _Connection:
        while True:
            with self._lock:
                connection = self._idle.pop() if self._idle else None
            if connection is None:
                return _Connection(self.place, self._token, max_bytes=self._max_bytes)
            if not connection.is_cut():
                return connection
            connection.close()


class Question:
    """A question that a store was asked."""

    def __init__(self, connection: _Connection, *, keep: Callable[[_Connection], None]) -> None:
        self._connection, self._keep = connection, keep

    def answer(self, timeout_s: float) -> bytes:
        """Wait for the answer; raises as `RendezvousClient.ask` does."""
        try:
            answer = self._connection.answer(timeout_s)
        except BaseException:
            self._connection.close()
            raise
        self._keep(self._connection)
        return answer

    def drop(self) -> None:
        """Wait for no answer."""
        self._connection.close()


class _Connection:
    """One connection to a store. Where a question failed it is closed, so that the next answer is the next question's."""

    def __init__(self, place: str, token: str, *, max_bytes: int) -> None:
        self._place = place
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.DEALER)
        configure(self._socket, _key_pair(token, "client"), max_bytes=max_bytes)
        self._socket.curve_serverkey = _key_pair(token, "server").public
        self._reports = self._socket.get_monitor_socket(_CUT)
        self._socket.connect(f"tcp://{place}")
        self._asked = Request(operation=Operation.GET)
        self._poller = zmq.Poller()
        self._poller.register(self._socket, zmq.POLLIN)
        self._poller.register(self._reports, zmq.POLLIN)

    def is_cut(self) -> bool:
        return bool(self._reports.poll(0))

    def ask(self, request: Request) -> None:
        self._asked = request
        self._socket.send(msgspec.msgpack.encode(request))

    def answer(self, timeout_s: float) -> bytes:
        what = f"{self._asked.operation} {', '.join(self._asked.keys)}"
        if ready := dict(self._poller.poll(math.ceil(timeout_s * 1000))):
            if self._socket in ready:
                return self._socket.recv()
            report = recv_monitor_message(self._reports)
            why = "refuses this process's key" if report["event"] == zmq.EVENT_HANDSHAKE_FAILED_AUTH else "has hung up, or is not there"
            raise PeerGone(f"the rendezvous store at {self._place} {why}; asked to {what}")
        raise PeerSilent(f"waited {timeout_s:g} s for the rendezvous store at {self._place} to {what}")

    def close(self) -> None:
        self._socket.disable_monitor()
        self._reports.close(linger=0)
        self._socket.close(linger=0)
        self._context.term()


def _close_all(connections: list[_Connection]) -> None:
    while connections:
        connections.pop().close()


def _key_pair(token: str, end: str) -> KeyPair:
    """One end's keys; whoever knows the token knows both."""
    secret = zmq.utils.z85.encode(hashlib.blake2b(token.encode(), digest_size=32, person=end.encode()).digest())
    return KeyPair(public=zmq.curve_public(secret), secret=secret)
