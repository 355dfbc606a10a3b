"""What keeps the transport from shard to shard whole: connections that stay, and peers that are refused by what they say."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest
import torch

from pipelinerl.errors import PeerGone, WeightsError
from pipelinerl.transport.rendezvous import Operation, RendezvousClient
from pipelinerl.weights import gloo
from pipelinerl.weights.point_to_point import Channel
from pipelinerl.weights.sharded import connections
from pipelinerl.weights.sharded.connections import Ask, Line, Place, Server
from pipelinerl.weights.sharded.plan import Header, plan
from pipelinerl.weights.sharded.source import Route, _Routes
from tests.weights.shards import EngineRanks, TrainerRanks
from tests.weights.test_reshard import SHARDS
from tests.weights.test_sharded import BUCKET_BYTES, FOUR, LAYOUT, TWO, boxes, version


@pytest.fixture
def trainer() -> Iterator[TrainerRanks]:
    ranks = TrainerRanks(LAYOUT, sources=SHARDS[FOUR], targets=boxes(TWO), bucket_bytes=BUCKET_BYTES, deadline_s=3.0)
    yield ranks
    ranks.close()


@pytest.fixture
def engine() -> Iterator[EngineRanks]:
    made = EngineRanks(LAYOUT, boxes(TWO), bucket_bytes=BUCKET_BYTES, deadline_s=3.0)
    yield made
    made.close()


def test_connections_stay_from_one_policy_to_the_next():
    made: list[int] = []
    numbers: list[int] = []

    def connect(store: Any, prefix: str, rank: int, /, **options: Any) -> Channel:
        made.append(rank)
        return gloo.connect(store, prefix, rank, **options)

    trainer = TrainerRanks(LAYOUT, sources=SHARDS[FOUR], targets=boxes(TWO), bucket_bytes=BUCKET_BYTES)
    engines = [EngineRanks(LAYOUT, boxes(TWO), connect=lambda: connect, who=f"engine {number}") for number in range(2)]
    try:
        for number in (1, 2, 3):
            name, digest = trainer.publish(number, version(number), number=number % 2)
            for engine in engines:
                engine.fetch(name, digest)
            numbers.append(len(made))
        assert numbers[0] == numbers[2] > 0
    finally:
        for end in (*engines, trainer):
            end.close()


def test_a_channel_that_the_trainer_dropped_is_made_anew(trainer: TrainerRanks, engine: EngineRanks):
    name, digest = trainer.publish(1, version(1))
    engine.fetch(name, digest)
    server = trainer.ranks[0]._server
    for caller in list(server._callers.values()):
        caller.questions.put(None)
    for thread in server._threads:
        thread.join()
    name, digest = trainer.publish(2, version(2), number=1)
    assert engine.fetch(name, digest) == 2
    assert engine.holds(version(2))


def test_an_engine_follows_a_trainer_that_cuts_its_shards_another_way(trainer: TrainerRanks, engine: EngineRanks):
    name, digest = trainer.publish(1, version(1))
    engine.fetch(name, digest)
    for rank, own in zip(
        trainer.ranks, plan(LAYOUT, sources=SHARDS[FOUR], targets=boxes(TWO), bucket_bytes=BUCKET_BYTES // 2), strict=True
    ):
        rank.follow(own, LAYOUT)
    name, digest = trainer.publish(2, version(2), number=1)
    assert engine.fetch(name, digest) == 2
    assert engine.holds(version(2))


def test_each_engine_takes_a_policy_from_the_one_before_and_whoever_could_not_from_the_trainer():
    routes = _Routes()
    trainer = Place(who="trainer rank 0", address="a", port=1, token="")
    first, second, third = (Place(who=f"engine {number}", address="b", port=number, token="") for number in range(3))
    routes.sources = ((trainer,),)

    def upstream(place: Place, *failed: Place, number: int = 0, layout: str = "") -> Place | None:
        answer = routes.answer(Ask(kind="route", number=number, layout=layout, place=place, failed=failed))
        route = msgspec.json.decode(answer, type=Route)
        assert route.sources == (trainer,)
        return route.upstream

    assert [upstream(first), upstream(second), upstream(third)] == [None, first, second]
    assert upstream(third, second) is None, "not from the first, which has its part of the sending already"
    assert upstream(second) == third, "as one that was started again"
    assert upstream(second, number=1) is None
    assert upstream(second, layout="of another engine") is None

    def upstream_of_changes(place: Place) -> Place | None:
        answer = routes.answer(Ask(kind="route", number=2, place=place), takes_changes=True)
        return msgspec.json.decode(answer, type=Route).upstream

    assert upstream(first, number=2) is None
    assert upstream_of_changes(second) is None, "the first has none to pass on"
    assert upstream_of_changes(third) == second
    assert upstream(first, number=2) == third, "who has changes has the whole, too"
    routes.forget(0)
    assert upstream(second) is None


def test_ranks_that_hold_different_policies_are_told_by_name(trainer: TrainerRanks, engine: EngineRanks):
    name, _ = trainer.publish(1, version(1))
    trainer.ranks[2].seal(0, 7)
    with pytest.raises(WeightsError, match=r"the trainer's ranks hold different policies: .*trainer rank 2 at .*: 7"):
        engine.ranks[0].fetch(name, engine.memory[0])


@pytest.mark.parametrize("is_more", [True, False])
def test_digests_that_are_not_those_of_the_pieces_are_refused(trainer: TrainerRanks, engine: EngineRanks, is_more: bool):
    name, _ = trainer.publish(1, version(1))
    held = trainer.ranks[1]._held[0]
    header = msgspec.msgpack.decode(held.headers[0], type=Header)
    changed = header.digests + bytes(16) if is_more else header.digests[16:]
    held.headers = (msgspec.msgpack.encode(msgspec.structs.replace(header, digests=changed)), *held.headers[1:])
    with pytest.raises(WeightsError, match=r"\d+ bytes of digests were offered for \d+ pieces; not taken"):
        engine.ranks[0].fetch(name, engine.memory[0])


def test_a_list_that_leaves_out_a_part_is_refused_by_its_name(trainer: TrainerRanks, engine: EngineRanks):
    name, _ = trainer.publish(1, version(1))
    rank = trainer.ranks[0]
    (first, *others), *rest = rank._plan.buckets
    fewer = dataclasses.replace(rank._plan, buckets=(tuple(others), *rest))
    rank.follow(fewer, LAYOUT)
    rank.seal(0, 1)
    with pytest.raises(WeightsError, match=r"\d+ of the \d+ elements that engine 0, rank 0 holds were offered; not taken"):
        engine.ranks[0].fetch(name, engine.memory[0])
    assert first.pieces


def test_more_at_once_than_there_is_room_for_is_refused(trainer: TrainerRanks):
    engine = EngineRanks(LAYOUT, boxes(TWO), bucket_bytes=BUCKET_BYTES // 8, who="engine 0")
    name, _ = trainer.publish(1, version(1))
    with pytest.raises(WeightsError, match=r"trainer rank \d at .* sends \d+ bytes at once, this rank has room for 32; not taken"):
        engine.ranks[0].fetch(name, engine.memory[0])
    engine.close()


@pytest.mark.parametrize(
    "lie",
    [Ask(kind="route", target=-1000), Ask(kind="policy", target=-1000), b"{", b"\xff"],
    ids=["no rank", "no rank to send to", "no request", "no text"],
)
def test_a_liar_that_knows_the_token_holds_up_nobody(trainer: TrainerRanks, engine: EngineRanks, lie: Ask | bytes):
    name, digest = trainer.publish(1, version(1))
    place = trainer.ranks[0].place
    client = RendezvousClient(place.address, place.port, place.token)
    question = client.begin(Operation.CALL, value=msgspec.json.encode(lie) if isinstance(lie, Ask) else lie)
    assert client.ask(Operation.CHECK, "nothing", timeout_s=3.0) == b"", "the lie was heard"
    assert engine.fetch(name, digest) == 1
    assert engine.holds(version(1))
    question.drop()
    client.close()


# --- a server's bounds --------------------------------------------------------------------------------------------------------------------


class Answering:
    """A server that sends one byte to whoever asks, once it may."""

    def __init__(self) -> None:
        self.may_send = threading.Event()
        self.may_send.set()
        self.server = Server(
            gloo.connect, who="trainer rank 0", address="127.0.0.1", deadline_s=5.0, words=lambda ask: b"here", send=self._send
        )
        self.lines: list[Line] = []

    def line(self) -> Line:
        self.lines.append(Line(self.server.place, gloo.connect, deadline_s=5.0))
        return self.lines[-1]

    def take(self, line: Line) -> bytes:
        line.ask(Ask(kind="policy"))
        words, channel = line.answer()
        channel.receive(torch.zeros(1, dtype=torch.uint8))
        return words

    def _send(self, ask: Ask, channel: Channel, said: bytes) -> None:
        assert self.may_send.wait(5.0)
        channel.send(torch.ones(1, dtype=torch.uint8))


@pytest.fixture
def answering() -> Iterator[Answering]:
    made = Answering()
    yield made
    made.may_send.set()
    for line in made.lines:
        line.close()
    made.server.close()


def test_for_one_caller_more_than_it_may_have_a_server_lets_go_of_the_one_idle_for_longest(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connections, "MAX_CALLERS", 2)
    first, second, third = (answering.line() for _ in range(3))
    for line in (first, second, first, third):
        assert answering.take(line) == b"here"
        assert len(answering.server._callers) <= 2
    assert first._caller in answering.server._callers, "the second had asked before it"
    assert answering.take(second) == b"here", "over another channel"


def test_a_caller_more_than_a_busy_server_may_have_is_refused_by_name_and_the_others_get_theirs(
    answering: Answering, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(connections, "MAX_CALLERS", 2)
    answering.may_send.clear()
    first, second, third = (answering.line() for _ in range(3))
    channels = []
    for line in (first, second):
        line.ask(Ask(kind="policy"))
        channels.append(line.answer()[1])
    third.ask(Ask(kind="policy"))
    with pytest.raises(RuntimeError, match="it refuses the call: it is answering 2 callers, as many as it may"):
        third.answer()
    answering.may_send.set()
    for channel in channels:
        channel.receive(torch.zeros(1, dtype=torch.uint8))


@pytest.mark.slow
def test_a_caller_that_asks_on_and_on_is_refused_and_another_gets_its_answer(answering: Answering):
    place = answering.server.place
    client = RendezvousClient(place.address, place.port, place.token)
    call = msgspec.json.encode(Ask(kind="policy", caller="liar"))
    questions = [client.begin(Operation.CALL, "liar/answer", value=call) for _ in range(3)]
    answers = [question.answer(5.0) for question in questions]
    assert sorted(answers) == [b"\0it has not answered this caller's questions before", b"here", b"here"]
    assert answering.take(answering.line()) == b"here"
    client.close()


def test_a_message_of_more_than_a_mebibyte_is_cut_off_and_harms_no_other(answering: Answering):
    place = answering.server.place
    client = RendezvousClient(place.address, place.port, place.token)
    client.ask(Operation.SET, "large", value=bytes((1 << 20) - 100), timeout_s=5.0)
    with pytest.raises(PeerGone, match="has hung up"):
        client.ask(Operation.SET, "larger", value=bytes((1 << 20) + 100), timeout_s=5.0)
    assert answering.take(answering.line()) == b"here"
    client.close()
