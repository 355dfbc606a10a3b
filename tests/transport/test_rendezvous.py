"""The store by which ranks and transports meet: it answers as torch's TCPStore does, and only those who know its token."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any, cast

import pytest
import torch.distributed as dist
import zmq

from pipelinerl.errors import PeerGone, PeerSilent
from pipelinerl.transport import rendezvous
from pipelinerl.transport.rendezvous import MAX_BYTES, Operation, RendezvousClient, RendezvousServer
from pipelinerl.weights.rendezvous_store import RendezvousStore

TOKEN = "5ec2e7" * 6


@pytest.fixture
def server() -> Iterator[RendezvousServer]:
    server = RendezvousServer("127.0.0.1", TOKEN)
    yield server
    server.close()


def client_of(server: RendezvousServer, token: str = TOKEN) -> RendezvousClient:
    return RendezvousClient("127.0.0.1", server.port, token)


def store_of(server: RendezvousServer) -> RendezvousStore:
    return RendezvousStore(client_of(server), timeout=timedelta(seconds=20))


def everything(store: dist.Store) -> list[Any]:
    """What a store says to each question that it may be asked."""
    said: list[Any] = [store.check(["a"]), store.set("a", "text"), store.get("a"), store.set("b", cast("str", b"\0\xff")), store.get("b")]
    said += [store.check(["a", "b"]), store.check(["a", "c"]), store.wait(["a", "b"]), store.wait(["a"], timedelta(seconds=5))]
    said += [store.add("n", 3), store.add("n", -5), store.get("n"), store.delete_key("n"), store.delete_key("n"), store.add("n", 1)]
    said += [store.compare_set("a", "text", "new"), store.compare_set("a", "text", "newer"), store.get("a")]
    said += [store.compare_set("d", "", "first"), store.get("d"), store.compare_set("e", "some", "thing"), store.check(["e"])]
    inner = dist.PrefixStore("inside", store)
    said += [inner.set("a", "own"), inner.get("a"), store.get("a"), store.check(["inside/a"])]
    return said


def test_it_answers_as_the_store_of_torch_does(server: RendezvousServer):
    torchs = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert everything(store_of(server)) == everything(torchs)


def test_who_waits_is_answered_once_all_is_there(server: RendezvousServer):
    waits, sets = store_of(server), store_of(server)
    found: list[bytes] = []
    waiting = threading.Thread(target=lambda: (waits.wait(["a", "b"]), found.append(waits.get("b"))))
    waiting.start()
    sets.set("a", "1")
    assert not sets.check(["b"])
    sets.set("b", "2")
    waiting.join(20)
    assert found == [b"2"]


def test_a_wait_ends_at_its_deadline_and_the_next_question_gets_its_own_answer(server: RendezvousServer):
    client = client_of(server)
    with pytest.raises(PeerSilent, match=r"waited 0\.05 s for the rendezvous store at 127\.0\.0\.1:\d+ to get call/late"):
        client.ask(Operation.GET, "call/late", timeout_s=0.05)
    client.ask(Operation.SET, "call/late", value=b"too late", timeout_s=20)
    assert client.ask(Operation.GET, "call/late", timeout_s=20) == b"too late"
    with pytest.raises(dist.DistStoreError, match="waited"):
        store_of(server).wait(["never"], timedelta(seconds=0.05))


def test_a_server_that_ends_is_heard_of_at_once(server: RendezvousServer):
    store = store_of(server)
    store.set("a", "1")
    threading.Timer(0.05, server.close).start()
    started = time.monotonic()
    with pytest.raises(dist.DistStoreError, match="has hung up, or is not there"):
        store.wait(["never"], timedelta(seconds=60))
    with pytest.raises(dist.DistStoreError, match="has hung up, or is not there"):
        store.get("a")
    assert time.monotonic() - started < 30


def test_keys_of_a_meeting_that_is_over_are_forgotten(server: RendezvousServer):
    store = store_of(server)
    for key in ("call/1", "call/2", "other/1"):
        store.set(key, "x")
    server.forget("call/")
    assert [store.check([key]) for key in ("call/1", "call/2", "other/1")] == [False, False, True]


def ask_with_torchs_own_client(server: RendezvousServer) -> object:
    return dist.TCPStore("127.0.0.1", server.port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=1)).list_keys()


def ask_with_another_token(server: RendezvousServer) -> object:
    return client_of(server, "another").ask(Operation.GET, "slot", timeout_s=5)


def ask_with_the_servers_public_key_and_a_key_of_ones_own(server: RendezvousServer) -> object:
    client, own = client_of(server), rendezvous._key_pair("a stranger's", "client")
    pairs: Callable[[str, str], Any] = rendezvous._key_pair
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rendezvous, "_key_pair", lambda token, end: own if end == "client" else pairs(token, end))
        return client.ask(Operation.GET, "slot", timeout_s=5)


def ask_without_any_key(server: RendezvousServer) -> object:
    with zmq.Context() as context, context.socket(zmq.DEALER) as line:
        line.linger, line.rcvtimeo = 0, 300
        line.connect(f"tcp://127.0.0.1:{server.port}")
        line.send(b"\x82\xa9operation\xa3get\xa4keys\x91\xa4slot")
        return line.recv()


@pytest.mark.parametrize(
    "ask",
    [ask_with_torchs_own_client, ask_with_another_token, ask_with_the_servers_public_key_and_a_key_of_ones_own, ask_without_any_key],
)
def test_a_stranger_gets_nothing(server: RendezvousServer, ask: Callable[[RendezvousServer], object]):
    store = store_of(server)
    store.set("slot", "what only its own may read")
    with pytest.raises((RuntimeError, PeerGone, zmq.Again)):
        ask(server)
    assert store.get("slot") == b"what only its own may read"


@pytest.mark.parametrize("sent", [b"\xc1", b"", b"\x80", b"x" * 1000], ids=["no message", "nothing", "no question", "text"])
def test_nonsense_of_a_peer_ends_nothing(server: RendezvousServer, sent: bytes):
    client = client_of(server)
    client.ask(Operation.SET, "a", value=b"1", timeout_s=20)
    (line,) = client._idle
    line._socket.send(sent)
    line._socket.send_multipart([b"two", b"parts"])
    assert client.ask(Operation.GET, "a", timeout_s=20) == b"1"


def test_a_message_larger_than_any_address_is_cut_off(server: RendezvousServer):
    with pytest.raises(PeerGone):
        client_of(server).ask(Operation.SET, "a", value=bytes(MAX_BYTES), timeout_s=20)
    assert not store_of(server).check(["a"])


def test_it_listens_on_its_own_address_alone_and_says_where_it_cannot(server: RendezvousServer):
    with pytest.raises(OSError, match="Cannot assign requested address"):
        RendezvousServer("192.0.2.1", TOKEN)
    with pytest.raises(ConnectionRefusedError), socket.create_connection(("127.0.0.2", server.port), timeout=5):
        pass
