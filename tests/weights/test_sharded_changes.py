"""Changes from shard to shard: less travels, every engine has the same bits, and whoever changes do not lead there takes all of it."""

from __future__ import annotations

import concurrent.futures
import logging
from collections.abc import Iterator

import msgspec
import pytest
import torch

from pipelinerl.weights.base import plan_layout
from pipelinerl.weights.sharded.plan import Header
from pipelinerl.weights.sharded.relay import Arriving
from tests.weights.shards import EngineRanks, TrainerRanks
from tests.weights.test_reshard import SHARDS
from tests.weights.test_sharded import BUCKET_BYTES, FOUR, LAYOUT, TENSORS, TWO, boxes

POLICY_BYTES = sum(tensor.num_bytes for tensor in LAYOUT)


def drifting(num_versions: int) -> list[dict[str, torch.Tensor]]:
    """Policies of which each changes one element of every tensor of the one before, and some of them back."""
    found = [TENSORS]
    for version in range(1, num_versions + 1):
        bits = {name: tensor.view(torch.int16).clone() for name, tensor in found[-1].items()}
        for flat in (one.view(-1) for one in bits.values()):
            flat[(7 * version) % min(len(flat), 21)] ^= 64
        found.append({name: one.view(torch.bfloat16) for name, one in bits.items()})
    return found


VERSIONS = drifting(8)


@pytest.fixture
def trainer() -> Iterator[TrainerRanks]:
    made = TrainerRanks(LAYOUT, sources=SHARDS[FOUR], targets=boxes(TWO), bucket_bytes=4 * BUCKET_BYTES, sends_changes=True)
    yield made
    made.close()


@pytest.fixture
def engines() -> Iterator[list[EngineRanks]]:
    made = [
        EngineRanks(LAYOUT, boxes(TWO), bucket_bytes=4 * BUCKET_BYTES, who=f"engine {number}", takes_changes=True) for number in range(3)
    ]
    yield made
    for engine in made:
        engine.close()


def take(trainer: TrainerRanks, engines: list[EngineRanks], number: int, *, base: int | None) -> int:
    """Publish a version, and have engines take it; bytes that left the trainer."""
    before = sum(rank.num_sent for rank in trainer.ranks)
    name, digest = trainer.publish(number, VERSIONS[number], number=number % 2, base=base)
    for engine in engines:
        assert engine.fetch(name, digest) == number
        assert engine.holds(VERSIONS[number])
    return sum(rank.num_sent for rank in trainer.ranks) - before


def passing_on(engine: EngineRanks) -> list[Arriving]:
    """What each rank of an engine passes on."""
    return [rank._relay._arriving for rank in engine.ranks if rank._relay is not None and rank._relay._arriving is not None]


def relayed_by(engine: EngineRanks) -> int:
    return sum(rank.num_relayed for rank in engine.ranks)


def test_changes_lead_every_engine_to_the_same_bits_however_it_lags(trainer: TrainerRanks, engines: list[EngineRanks]):
    """The first takes every version, the second every other one: the base is what the slower one holds."""
    first, second, _ = engines
    assert take(trainer, [first, second], 1, base=None) > 0.9 * POLICY_BYTES
    for number, base in ((2, 1), (3, 1), (4, 1), (5, 3)):
        both = [first, second] if number % 2 else [first]
        assert take(trainer, both, number, base=base) < 0.7 * POLICY_BYTES


def test_changes_leave_the_trainer_once_and_go_from_engine_to_engine(trainer: TrainerRanks, engines: list[EngineRanks]):
    """All three ask at once: the third has its buckets while the first still takes them."""
    take(trainer, engines, 1, base=None)
    alone = take(trainer, engines, 2, base=1)
    relayed = [relayed_by(engine) for engine in engines]
    name, digest = trainer.publish(3, VERSIONS[3], number=1, base=2)
    before = sum(rank.num_sent for rank in trainer.ranks)
    with concurrent.futures.ThreadPoolExecutor(3) as threads:
        assert list(threads.map(lambda engine: engine.fetch(name, digest), engines)) == [3, 3, 3]
    assert all(engine.holds(VERSIONS[3]) for engine in engines)
    assert sum(rank.num_sent for rank in trainer.ranks) - before < 1.2 * alone
    grown = sum(relayed_by(engine) - had for engine, had in zip(engines, relayed, strict=True))
    assert 1.6 * alone < grown < 2.4 * alone, "twice, and what is passed on are the changes"
    headers = [msgspec.msgpack.decode(one, type=Header) for rank in trainer.ranks for one in rank._held[1].headers_of_changes]
    sizes = [size for header in headers for size in header.changes]
    assert 0 in sizes, "a bucket that is sent whole is passed on beside those that are not"
    assert any(sizes)


def test_changes_that_were_damaged_on_the_way_through_an_engine_are_found_and_the_whole_is_taken(
    trainer: TrainerRanks, engines: list[EngineRanks], caplog: pytest.LogCaptureFixture
):
    first, second, _ = engines
    take(trainer, [first, second], 1, base=None)
    name, digest = trainer.publish(2, VERSIONS[2], number=0, base=1)
    first.fetch(name, digest)
    for arriving in passing_on(first):
        assert arriving.changes
        for encoded in arriving.changes.values():
            encoded.fill_(0xC1)
    with caplog.at_level(logging.WARNING):
        assert second.fetch(name, digest) == 2
    assert second.holds(VERSIONS[2])
    assert "engine 1, rank 0 takes a policy whole, because changes did not lead to it: " in caplog.text


def test_changes_that_are_passed_on_do_not_lie_where_the_next_buckets_arrive(
    trainer: TrainerRanks, engines: list[EngineRanks], caplog: pytest.LogCaptureFixture
):
    first, second, _ = engines
    take(trainer, [first, second], 1, base=None)
    name, digest = trainer.publish(2, VERSIONS[2], number=0, base=1)
    first.fetch(name, digest)
    for rank in first.ranks:
        assert rank._room is not None
        rank._room.memory.fill_(0xC1)
    assert second.fetch(name, digest) == 2
    assert second.holds(VERSIONS[2])
    assert not caplog.records


def test_an_engine_that_cannot_pass_changes_on_is_passed_over(
    trainer: TrainerRanks, engines: list[EngineRanks], caplog: pytest.LogCaptureFixture
):
    first, second, _ = engines
    take(trainer, [first, second], 1, base=None)
    name, digest = trainer.publish(2, VERSIONS[2], number=0, base=1)
    first.fetch(name, digest)
    first.close()
    before = sum(rank.num_sent for rank in trainer.ranks)
    with caplog.at_level(logging.WARNING):
        assert second.fetch(name, digest) == 2
    assert second.holds(VERSIONS[2])
    assert "takes a policy from the trainer, because another engine did not pass it on" in caplog.text
    assert sum(rank.num_sent for rank in trainer.ranks) - before < 0.7 * POLICY_BYTES, "as changes, all the same"


def test_an_engine_that_had_to_take_the_whole_passes_no_changes_on(trainer: TrainerRanks, engines: list[EngineRanks]):
    first, second, _ = engines
    take(trainer, [first, second], 1, base=None)
    for memory in first.memory:
        memory[5] ^= 1
    name, digest = trainer.publish(2, VERSIONS[2], number=0, base=1)
    assert first.fetch(name, digest) == 2
    before = sum(rank.num_sent for rank in trainer.ranks), relayed_by(first)
    assert second.fetch(name, digest) == 2
    assert second.holds(VERSIONS[2])
    assert sum(rank.num_sent for rank in trainer.ranks) - before[0] < 0.7 * POLICY_BYTES, "changes, from the trainer"
    assert relayed_by(first) == before[1]


def test_what_an_engine_passes_on_of_another_number_of_trainer_ranks_is_refused(
    trainer: TrainerRanks, engines: list[EngineRanks], caplog: pytest.LogCaptureFixture
):
    first, second, _ = engines
    take(trainer, [first, second], 1, base=None)
    name, digest = trainer.publish(2, VERSIONS[2], number=0, base=1)
    first.fetch(name, digest)
    for arriving in passing_on(first):
        arriving.headers = arriving.headers[1:]
    with caplog.at_level(logging.WARNING):
        assert second.fetch(name, digest) == 2
    assert second.holds(VERSIONS[2])
    assert "engine 0, rank 0 at " in caplog.text
    assert "passes on what 3 trainer ranks sent, expected 4; not taken" in caplog.text


def test_an_engine_that_missed_the_base_or_is_new_is_served_whole_and_the_others_changes(trainer: TrainerRanks, engines: list[EngineRanks]):
    first, late, new = engines
    take(trainer, [first, late], 1, base=None)
    for number in (2, 3):
        take(trainer, [first], number, base=number - 1)
    changes = take(trainer, [first], 4, base=3)
    name, digest = trainer.publish(5, VERSIONS[5], number=1, base=4)
    before = sum(rank.num_sent for rank in trainer.ranks)
    for engine in (late, new, first):
        assert engine.fetch(name, digest) == 5
        assert engine.holds(VERSIONS[5])
    sent = sum(rank.num_sent for rank in trainer.ranks) - before
    assert sent < POLICY_BYTES * 1.4 + 1.5 * changes, "the new one has it from the late one, and the first only what changed"
    assert sum(rank.num_relayed for rank in late.ranks) > 0.9 * POLICY_BYTES
    assert not any(rank.num_relayed for rank in new.ranks), "what is passed on is whole"


def test_after_a_rollback_policies_go_whole_until_all_engines_hold_one_of_the_new_epoch(trainer: TrainerRanks, engines: list[EngineRanks]):
    take(trainer, engines[:1], 5, base=None)
    take(trainer, engines[:1], 6, base=5)
    for rank in trainer.ranks:
        rank.forget_changes()
    assert take(trainer, engines[:1], 3, base=None) > 0.9 * POLICY_BYTES
    assert take(trainer, engines[:1], 4, base=3) < 0.7 * POLICY_BYTES


def test_weights_that_were_damaged_are_found_out_and_healed_by_a_whole_policy(
    trainer: TrainerRanks, engines: list[EngineRanks], caplog: pytest.LogCaptureFixture
):
    take(trainer, engines[:1], 1, base=None)
    engines[0].memory[1][5] ^= 1
    with caplog.at_level(logging.WARNING):
        take(trainer, engines[:1], 2, base=1)
    assert "engine 0, rank 1 takes a policy whole, because changes did not lead to it: " in caplog.text
    assert "digest is" in caplog.text


def test_changes_that_are_none_are_refused_and_the_whole_is_taken(
    trainer: TrainerRanks, engines: list[EngineRanks], caplog: pytest.LogCaptureFixture
):
    take(trainer, engines[:1], 1, base=None)
    name, digest = trainer.publish(2, VERSIONS[2], number=0, base=1)
    for rank in trainer.ranks:
        for encoded in rank._held[0].changes.values():
            encoded.fill_(0xC1)
    with caplog.at_level(logging.WARNING):
        assert engines[0].fetch(name, digest) == 2
    assert engines[0].holds(VERSIONS[2])
    assert "are not the changes of a policy" in caplog.text


def test_a_policy_of_which_nothing_changed_is_a_few_bytes(trainer: TrainerRanks, engines: list[EngineRanks]):
    take(trainer, engines[:1], 1, base=None)
    name, digest = trainer.publish(2, VERSIONS[1], number=0, base=1)
    before = sum(rank.num_sent for rank in trainer.ranks)
    assert engines[0].fetch(name, digest) == 2
    assert engines[0].holds(VERSIONS[1])
    assert sum(rank.num_sent for rank in trainer.ranks) - before == sum(len(buckets) for own in trainer.plans for buckets in own.buckets)


def test_what_changed_in_everything_goes_whole(trainer: TrainerRanks, engines: list[EngineRanks]):
    take(trainer, engines[:1], 1, base=None)
    other = {name: (tensor.view(torch.int16) + 3).view(torch.bfloat16) for name, tensor in TENSORS.items()}
    name, digest = trainer.publish(2, other, number=0, base=1)
    assert engines[0].fetch(name, digest) == 2
    assert engines[0].holds(other)
    assert plan_layout(other) == LAYOUT
