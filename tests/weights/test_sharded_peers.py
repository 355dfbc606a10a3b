"""What keeps the transport from shard to shard whole: connections that stay, and peers that are refused by what they say."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from pipelinerl.errors import WeightsError
from pipelinerl.transport.rendezvous import Operation, RendezvousClient
from pipelinerl.weights import gloo
from pipelinerl.weights.point_to_point import Channel
from pipelinerl.weights.sharded.connections import Ask, Place
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
    for waiting in list(server._callers.values()):
        waiting.put(None)
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
