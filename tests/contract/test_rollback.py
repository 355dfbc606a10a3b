"""A rollback, from the trainer's publisher over the orchestrator's rule to engines that take real bytes: what comes late is harmless."""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import random
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.rules.swaps import Policy, Swaps
from pipelinerl.engine.fake import FakeEngine
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.errors import WeightsError
from pipelinerl.messages import Message, PolicyPublished, StageWeights, WeightsCommitted, WeightsRefused, WeightsStaged
from pipelinerl.weights.shared_memory import SharedMemoryReceiver
from tests.contract.weight_transports import LAYOUT, Engine, same_bits, tensors
from trainer.weights.publisher import Publisher


class Taking(FakeEngine):
    """Samples by hashing, and takes policies of real bytes."""

    def __init__(self) -> None:
        super().__init__(max_model_tokens=64, max_running=4)
        self.weights = Engine(SharedMemoryReceiver())

    def stage(self, order: StageWeights) -> None:
        self.weights.weight_receiver.stage(order)

    def commit(self, recompute: Collection[str] = ()) -> Collection[str]:
        self.weights.weight_receiver.commit()
        return []


@dataclasses.dataclass(kw_only=True)
class Run:
    """A trainer's publisher, the orchestrator's rule and two engines; every message that was ever sent stays."""

    publisher: Publisher
    weights: dict[str, torch.Tensor]
    swaps: Swaps
    engines: list[Taking]
    loops: list[EngineLoop]
    told: list[StageWeights] = dataclasses.field(default_factory=list)
    announced: list[PolicyPublished] = dataclasses.field(default_factory=list)
    heard: list[tuple[int, Message]] = dataclasses.field(default_factory=list)

    def train(self) -> None:
        """A step: a few bits of every tensor change."""
        for tensor in self.weights.values():
            bits = tensor.view(-1).view(torch.uint8)
            bits[:3] += 1

    def publish(self, version: int) -> PolicyPublished:
        policy = self.publisher.publish(version)
        assert policy is not None
        self.announced.append(policy)
        self.swaps.published(Policy(age=(policy.rollback_epoch, version), buffer=policy.buffer, digest=policy.digest))
        for number in range(len(self.loops)):
            self.order(number)
        for buffer in self.swaps.take_free_buffers():
            self.publisher.release(buffer)
        self.publisher.held(self.swaps.held_by_all(), rollback_epoch=self.swaps.rollback_epoch)
        return policy

    def order(self, number: int) -> None:
        policy = self.swaps.next_order(number)
        assert policy is not None
        order = StageWeights(version=policy.age[1], rollback_epoch=policy.age[0], buffer=policy.buffer, digest=policy.digest)
        self.told.append(order)
        self.loops[number].handle(order)
        self.loops[number].advance()
        for message in self.said(number):
            self.heard.append((number, message))
            self.hear(number, message)

    def hear(self, number: int, message: Message) -> None:
        match message:
            case WeightsCommitted():
                self.swaps.committed(number, (message.rollback_epoch, message.version))
            case WeightsRefused():
                self.swaps.refused(number, (message.rollback_epoch, message.version), message.error)
            case WeightsStaged():
                pass
            case _:
                raise AssertionError(message)

    def said(self, number: int) -> list[Message]:
        said, self.loops[number].outbox[:] = list(self.loops[number].outbox), []
        return said

    def held(self) -> list[tuple[int, int]]:
        return [(loop.rollback_epoch, loop.version) for loop in self.loops]

    def all_hold_what_the_trainer_has(self) -> bool:
        return all(
            same_bits(engine.weights.parameters[name].data, tensor) for engine in self.engines for name, tensor in self.weights.items()
        )


def staged_at_once(engine: Taking) -> EngineLoop:
    def stage(order: StageWeights) -> concurrent.futures.Future[None]:
        future: concurrent.futures.Future[None] = concurrent.futures.Future()
        try:
            future.set_result(engine.stage(order))
        except WeightsError as error:
            future.set_exception(error)
        return future

    return EngineLoop(engine, engine_id=0, stager=stage)


@pytest.fixture(params=[False, True], ids=["whole", "changes"])
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Run]:
    weights = {name: tensor.clone() for name, tensor in tensors(0).items()}
    publisher = Publisher(lambda: weights, tied_names=frozenset(), run_folder=tmp_path, deadline_s=1.0, sends_deltas=request.param)
    publisher.fix_layout(LAYOUT, num_engines=2)
    engines = [Taking(), Taking()]
    swaps = Swaps()
    for number in range(2):
        swaps.joined(number)
    with contextlib.closing(publisher):
        yield Run(publisher=publisher, weights=weights, swaps=swaps, engines=engines, loops=[staged_at_once(engine) for engine in engines])


def test_after_a_rollback_everything_of_the_lineage_before_is_harmless_however_late(run: Run):
    for version in range(1, 6):
        run.train()
        run.publish(version)
        if version == 2:
            saved = {name: tensor.clone() for name, tensor in run.weights.items()}
    assert run.held() == [(0, 5), (0, 5)]
    before = list(run.told), list(run.announced), list(run.heard)
    for name, tensor in saved.items():
        run.weights[name] = tensor
    with pytest.raises(WeightsError, match="policy 2 was to be published after policy 5: versions go back only by a rollback"):
        run.publisher.publish(2)
    run.publisher.roll_back()
    run.publish(2)
    assert run.held() == [(1, 2), (1, 2)]
    assert run.all_hold_what_the_trainer_has()
    chance = random.Random(1)
    for version in (3, 4, 5, 6):
        repeat_late(run, *before, chance=chance)
        assert run.held() == [(1, version - 1)] * 2
        assert run.all_hold_what_the_trainer_has()
        run.train()
        run.publish(version)
        assert run.held() == [(1, version)] * 2, "each is taken at once, by both"
        assert run.all_hold_what_the_trainer_has()
    assert [run.swaps[number].fault for number in range(2)] == ["", ""]


def repeat_late(
    run: Run, told: list[StageWeights], announced: list[PolicyPublished], heard: list[tuple[int, Message]], *, chance: random.Random
) -> None:
    """Deliver every message from before the rollback once more, in another order."""
    held, buffers = run.swaps.held_by_all(), run.swaps.take_free_buffers()
    late: list[tuple[str, Any]] = [("told", one) for one in told]
    late += [("announced", one) for one in announced] + [("heard", one) for one in heard] + [("held", version) for version in (None, 3, 5)]
    chance.shuffle(late)
    for kind, one in late:
        match kind, one:
            case "told", StageWeights():
                for number, loop in enumerate(run.loops):
                    loop.handle(one)
                    loop.advance()
                    assert run.said(number) == []
            case "announced", PolicyPublished():
                run.swaps.published(Policy(age=(one.rollback_epoch, one.version), buffer=one.buffer, digest=one.digest))
            case "heard", (int(number), Message() as message):
                run.hear(number, message)
            case _:
                run.publisher.held(one, rollback_epoch=0)
    assert (run.swaps.held_by_all(), run.swaps.take_free_buffers()) == (held, [])
    assert not buffers
    assert [run.swaps.next_order(number) for number in range(2)] == [None, None]


def test_a_trainer_that_starts_again_goes_on_in_the_lineage_that_engines_know(run: Run, tmp_path: Path):
    run.publish(1)
    run.publisher.roll_back()
    run.publish(1)
    run.swaps.forget_buffers()
    run.publisher.close()
    successor = Publisher(lambda: run.weights, tied_names=frozenset(), run_folder=tmp_path / "again", deadline_s=1.0)
    successor.fix_layout(LAYOUT, num_engines=2, rollback_epoch=run.swaps.rollback_epoch)
    with contextlib.closing(successor):
        run.publisher = successor
        run.train()
        assert run.publish(2).rollback_epoch == 1
        assert run.held() == [(1, 2), (1, 2)]
        assert run.all_hold_what_the_trainer_has()


def test_a_rule_that_knows_an_engine_of_a_later_lineage_outlives_the_trainer_that_began_it():
    swaps = Swaps()
    for number, held in enumerate([(0, 5), (2, 3)]):
        swaps.joined(number, held)
    swaps.forget_buffers()
    assert swaps.rollback_epoch == 2
    assert swaps.held_by_all() is None, "one is of an earlier rollback epoch"
