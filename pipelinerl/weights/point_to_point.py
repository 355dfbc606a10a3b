"""Transports on which an engine calls the trainer and the two of them then talk alone: what `gloo` and `nccl` have in common.

The trainer listens on one address; an engine that is told to fetch calls there and gets the policy over a `Channel` that only the two of
them are in. So no engine, dead or slow, can hold up another or the trainer, and every wait on either side has a deadline. A weight buffer's
name holds the address and a token that was never sent in the clear by this project: who knows it may call, and find the channel's other
end. What carries the bytes encrypts nothing: keep it on a private network.
"""

from __future__ import annotations

import contextlib
import re
import secrets
import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Protocol

import torch
import torch.distributed as dist

from pipelinerl.errors import WeightsError
from pipelinerl.runtime.network import address_towards
from pipelinerl.transport.rendezvous import RendezvousClient, RendezvousServer
from pipelinerl.weights.manifest import Manifest, open_manifest
from pipelinerl.weights.rendezvous_store import RendezvousStore
from pipelinerl.weights.transport import Payload, WeightBuffer

NAME = re.compile(r"(gloo|nccl)://([^\s/]+):([0-9]+)/([0-9a-f]{32})/([0-9]+)")
DEADLINE_S = 60.0
"""Longest wait for a peer to call, answer, or take the next chunk. Longer hides a dead peer; shorter gives up on a busy one."""
TRAINER, ENGINE = 0, 1


class Channel(Protocol):
    """Trainer and one engine. Every wait ends at a deadline; what goes wrong is a `RuntimeError`.

    What was begun is waited for in the same order.
    """

    def begin_send(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to send a contiguous tensor of the host; what is returned waits until it may be written again."""
        ...

    def begin_receive(self, tensor: torch.Tensor) -> Callable[[], None]:
        """Begin to fill a contiguous tensor of the host with what the other end sends; what is returned waits for it."""
        ...

    def send(self, tensor: torch.Tensor) -> None:
        """Send a contiguous tensor of the host; return once it may be written again."""
        ...

    def receive(self, tensor: torch.Tensor) -> None:
        """Fill a contiguous tensor of the host with what the other end sends."""
        ...

    def abort(self) -> None:
        """Hang up at once, so that the other end notices and does not wait for its deadline."""
        ...


class Connect(Protocol):
    def __call__(self, store: dist.Store, prefix: str, rank: int, /, *, address: str, deadline: timedelta) -> Channel:
        """Meet the other end of a call. `address` is this end's own, on which alone it may listen."""
        ...


class PointToPointSender:
    """Weight buffers in the trainer's memory, sent to whoever calls: a `Sender`."""

    def __init__(
        self,
        scheme: str,
        connect: Connect,
        *,
        address: str = "127.0.0.1",
        deadline_s: float = DEADLINE_S,
        reserve: Callable[[int], torch.Tensor] = lambda num_bytes: torch.zeros(num_bytes, dtype=torch.uint8),
    ) -> None:
        """`scheme` is how names of these weight buffers begin; `reserve` gives memory of the host for one, [bytes] uint8."""
        self._reserve = reserve
        self._scheme = scheme
        self._connect = connect
        self._deadline = timedelta(seconds=deadline_s)
        self._address = address
        self._token = secrets.token_hex(16)
        try:
            self._server = RendezvousServer(address, self._token, on_call=self._take)
        except OSError as error:
            raise WeightsError(f"cannot offer weights on weights.address = {address!r}: {error.strerror}") from None
        self._client = RendezvousClient(address, self._server.port, self._token)
        self._offered: dict[int, tuple[bytes, torch.Tensor]] = {}
        self._is_closed = threading.Event()
        self._threads: list[threading.Thread] = []
        """Who answers engines. Each wait of theirs ends at the deadline, so each can be joined."""

    def make(self, number: int, num_bytes: int) -> WeightBuffer:
        name = f"{self._scheme}://{self._address}:{self._server.port}/{self._token}/{number}"
        return WeightBuffer(name=name, memory=self._reserve(num_bytes))

    def offer(self, buffer: WeightBuffer, manifest: Manifest, encoded: bytes) -> None:
        self._offered[int(buffer.name.rpartition("/")[2])] = encoded, buffer.memory[: manifest.num_bytes]

    def close(self) -> None:
        if not self._is_closed.is_set():
            self._is_closed.set()
            self._offered.clear()
            for thread in self._threads:
                thread.join()
            self._client.close()
            self._server.close()

    def _take(self, call: bytes) -> None:
        """Answer a call. Raises `ValueError` where it is none."""
        caller, wanted = call.decode().split()
        if self._is_closed.is_set():
            return
        # Not as daemons: a thread that is inside a collective library when the interpreter ends would abort the process.
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=self._answer, args=(caller, int(wanted)), name=self._scheme))
        self._threads[-1].start()

    def _answer(self, caller: str, wanted: int) -> None:
        """Send what was asked for; an engine that is gone or does not listen costs this thread its deadline, and nobody else anything."""
        with contextlib.suppress(RuntimeError):  # the engine says what went wrong
            store = RendezvousStore(self._client, timeout=self._deadline)
            channel = self._connect(store, caller, TRAINER, address=self._address, deadline=self._deadline)
            encoded, payload = self._offered.get(wanted, (b"", torch.zeros(0, dtype=torch.uint8)))
            try:
                for part in (_sizes(len(encoded), len(payload)), torch.frombuffer(bytearray(encoded or b" "), dtype=torch.uint8), payload):
                    channel.send(part)  # the payload whole, so that the channel can have several parts of it under way
                channel.receive(_sizes(0, 0))  # all of it has arrived: the connection may go
            except BaseException:
                channel.abort()
                raise
            self._server.forget(f"{caller}/")


class PointToPointReceiver:
    """Calls the trainer and takes what it sends: a `Receiver`. Each fetch is a channel of its own, so none inherits a failure."""

    def __init__(self, scheme: str, connect: Connect, *, deadline_s: float = DEADLINE_S) -> None:
        self._scheme = scheme
        self._connect = connect
        self._deadline = timedelta(seconds=deadline_s)
        self._client: RendezvousClient | None = None
        """The connection to the trainer that was called last."""

    def fetch(self, name: str, digest: str, spare: Callable[[Manifest], torch.Tensor]) -> Payload:
        match = NAME.fullmatch(name)
        if match is None or match[1] != self._scheme:
            raise WeightsError(f"{name!r} is not the name of a weight buffer: expected {self._scheme}://<address>:<port>/<token>/<number>")
        _, address, port, token, number = match.groups()
        place = f"{address}:{port}, weight buffer {number}"  # the token stays out of logs
        try:
            return self._take(address, int(port), token=token, number=number, name=name, digest=digest, spare=spare)
        except WeightsError as error:
            raise WeightsError(str(error).replace(name, place)) from None
        except (RuntimeError, OSError) as error:
            reason = str(error).partition("\n")[0].replace(token, "...")
            raise WeightsError(f"cannot fetch a policy from the trainer at {place}: {reason}; not taken") from error

    def close(self) -> None:
        if self._client is not None:
            self._client.close()

    def _take(
        self, address: str, port: int, *, token: str, number: str, name: str, digest: str, spare: Callable[[Manifest], torch.Tensor]
    ) -> Payload:
        store = RendezvousStore(self._client_of(address, port, token), timeout=self._deadline)
        caller = secrets.token_hex(8)
        store.call(f"{caller} {number}")  # one message: an engine that dies around it leaves nothing half said
        channel = self._connect(store, caller, ENGINE, address=address_towards(address, port), deadline=self._deadline)
        try:
            return _receive(channel, digest=digest, name=name, spare=spare)
        except BaseException:
            channel.abort()
            raise

    def _client_of(self, address: str, port: int, token: str) -> RendezvousClient:
        """The connections to a trainer are used again; those to a trainer before are closed."""
        if self._client is None or self._client.place != f"{address}:{port}":
            self.close()
            self._client = RendezvousClient(address, port, token)
        return self._client


def _receive(channel: Channel, *, digest: str, name: str, spare: Callable[[Manifest], torch.Tensor]) -> Payload:
    def receive(tensor: torch.Tensor) -> torch.Tensor:
        channel.receive(tensor)
        return tensor

    sizes = receive(_sizes(0, 0)).tolist()
    encoded = receive(torch.zeros(max(1, sizes[0]), dtype=torch.uint8)).numpy().tobytes()[: sizes[0]]
    manifest = open_manifest(encoded, digest=digest, name=name)
    if manifest.num_bytes != sizes[1]:
        raise WeightsError(f"weight buffer {name}: the trainer sends {sizes[1]} bytes, the manifest says {manifest.num_bytes}; not taken")
    payload = spare(manifest) if manifest.base_version is None else torch.zeros(manifest.num_bytes, dtype=torch.uint8)
    payload = payload[: manifest.num_bytes]
    receive(payload)
    channel.send(_sizes(0, 0))
    return Payload(manifest=manifest, data=payload)


def _sizes(first: int, second: int) -> torch.Tensor:
    return torch.tensor([first, second], dtype=torch.int64)
