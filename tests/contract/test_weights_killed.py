"""SIGKILL of either side at every phase of the transaction, on every transport: the other side goes on, and whoever comes after is served.

The side that is killed is a process of its own. It kills itself at the phase, so that each is met exactly.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import msgspec
import pytest
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.messages import StageWeights
from pipelinerl.weights import buffer_pool, cuda_ipc, files, manifest, point_to_point, receiver, shared_memory
from pipelinerl.weights.base import views
from pipelinerl.weights.swap import PointerSwap
from tests.contract.weight_transports import LAYOUT, RECEIVERS, TRANSPORTS, Engine

pytestmark = [pytest.mark.process, pytest.mark.timeout(120)]
CALLS = ("gloo", "nccl")
"""Transports on which the bytes are gone with the trainer."""


class Child:
    """A fork that does `work(hear, say)`, where both are lines of JSON."""

    def __init__(self, work: Callable[[Callable[[], Any], Callable[[Any], None]], None]) -> None:
        to_child, from_parent = os.pipe()
        to_parent, from_child = os.pipe()
        self.process_id = os.fork()
        if not self.process_id:
            try:
                os.close(from_parent)
                os.close(to_parent)
                with os.fdopen(to_child) as heard, os.fdopen(from_child, "w") as said:
                    work(lambda: json.loads(heard.readline()), functools.partial(_write, said))
            except BaseException:
                import traceback

                traceback.print_exc()
            finally:
                os._exit(1)
        os.close(to_child)
        os.close(from_child)
        self._said, self._heard = os.fdopen(to_parent), os.fdopen(from_parent, "w")
        self._is_over = False

    def tell(self, what: Any) -> None:
        _write(self._heard, what)

    def hear(self) -> Any:
        return json.loads(self._said.readline())

    def wait_until_killed(self) -> None:
        self._is_over = True
        _, status = os.waitpid(self.process_id, 0)
        assert os.waitstatus_to_exitcode(status) == -signal.SIGKILL

    def kill(self) -> None:
        os.kill(self.process_id, signal.SIGKILL)
        self.wait_until_killed()

    def close(self) -> None:
        if not self._is_over:
            self.kill()
        self._said.close()
        self._heard.close()


def _write(stream: IO[str], what: Any) -> None:
    stream.write(json.dumps(what) + "\n")
    stream.flush()


def die(*_: object, **__: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def told(order: StageWeights) -> dict[str, Any]:
    return msgspec.to_builtins(order)


def order_of(what: dict[str, Any]) -> StageWeights:
    return msgspec.convert(what, StageWeights)


@pytest.fixture(params=list(RECEIVERS))  # ranks that send shards are killed in `tests/weights/test_sharded.py`
def name(request: pytest.FixtureRequest) -> str:
    return request.param


# --- an engine dies ------------------------------------------------------------------------------------------------------------------

ENGINE_PHASES: dict[str, Callable[[], object]] = {
    "told": lambda: setattr(receiver.WeightReceiver, "stage", die),
    "opening": lambda: [setattr(module, "open_manifest", die) for module in (shared_memory, files, point_to_point, cuda_ipc)],
    "fetching": lambda: setattr(receiver, "check", die),
    "verifying": lambda: setattr(receiver, "verify", die),
    "staging": lambda: setattr(PointerSwap, "stage", die),
    "staged": lambda: setattr(receiver.WeightReceiver, "commit", die),
    "committing": lambda: setattr(PointerSwap, "commit", die),
    "committed": lambda: None,
}


def engine(folder: Path, name: str, phase: str, hear: Callable[[], Any], say: Callable[[Any], None]) -> None:
    one = Engine(RECEIVERS[name](folder, 20.0))
    one.take(order_of(hear()))
    say(one.holds(1))
    second = order_of(hear())
    ENGINE_PHASES[phase]()
    one.take(second)
    die()


@pytest.mark.parametrize("phase", ENGINE_PHASES)
def test_an_engine_killed_at_any_phase_holds_up_nobody_and_the_one_that_follows_is_served(name: str, phase: str, tmp_path: Path):
    child = Child(functools.partial(engine, tmp_path, name, phase))
    transport = TRANSPORTS[name](tmp_path, LAYOUT)
    other = Engine(transport.receive())
    try:
        orders = [transport.publish(1)]
        child.tell(told(orders[0]))
        assert child.hear(), "it has taken the first policy"
        other.take(orders[0])
        orders.append(transport.publish(2))
        child.tell(told(orders[1]))
        child.wait_until_killed()
        other.take(orders[1])
        assert other.holds(2)
        for order in orders:  # as the orchestrator says once an engine is lost
            transport.pool.release(order.buffer)
        for version in (3, 4, 5):
            order = transport.publish(version)
            other.take(order)
            assert other.holds(version)
            successor = Engine(transport.receive())
            successor.take(order)
            assert successor.holds(version)
            successor.close()
            transport.pool.release(order.buffer)
    finally:
        child.close()
        other.close()
        transport.pool.close()


# --- the trainer dies ----------------------------------------------------------------------------------------------------------------

TRAINER_PHASES: dict[str, Callable[[], object]] = {
    "acquiring": lambda: setattr(buffer_pool.WeightBufferPool, "acquire", die),
    "sealing": lambda: setattr(manifest, "digest_of", die),
    "offering": lambda: (
        [
            setattr(owner, "offer", die)
            for owner in (files.FilesSender, point_to_point.PointToPointSender, shared_memory.SharedMemorySender, cuda_ipc.CudaIpcSender)
        ]
        and None
    ),
    "naming": lambda: setattr(Path, "replace", die),
    "published": lambda: None,
}


def trainer(folder: Path, name: str, phase: str, hear: Callable[[], Any], say: Callable[[Any], None]) -> None:
    transport = TRANSPORTS[name](folder, LAYOUT)
    first = hear()
    say(told(transport.publish(first)))
    assert hear() == "go on"
    TRAINER_PHASES[phase]()
    order = transport.publish(first + 1)
    say(told(order))
    hear()


@contextlib.contextmanager
def trainer_and_engine(name: str, phase: str, folder: Path) -> Iterator[tuple[Child, Engine]]:
    """A trainer that has published a policy, and an engine that holds it."""
    child = Child(functools.partial(trainer, folder, name, phase))
    one = Engine(RECEIVERS[name](folder, 20.0))
    try:
        child.tell(1)
        one.take(order_of(child.hear()))
        yield child, one
    finally:
        child.close()
        one.close()


def check_successor(name: str, folder: Path, one: Engine, *, held: int) -> None:
    """A trainer that starts again in the same run folder publishes, and the engine takes it."""
    assert one.holds(held), "the old version serves on"
    with trainer_and_engine(name, "published", folder) as (child, other):
        assert other.holds(1)
        child.tell("go on")
        order = order_of(child.hear())
        for taker in (one, other):
            taker.take(order)
            assert taker.holds(2)


@pytest.mark.parametrize("phase", [phase for phase in TRAINER_PHASES if phase != "published"])
def test_a_trainer_killed_before_it_has_published_leaves_the_old_version_serving(name: str, phase: str, tmp_path: Path):
    if name in CALLS and phase == "naming":
        pytest.skip("this transport gives no names in a file system")
    with trainer_and_engine(name, phase, tmp_path) as (child, one):
        child.tell("go on")
        child.wait_until_killed()
        check_successor(name, tmp_path, one, held=1)


def test_a_trainer_killed_between_announcement_and_fetch_is_refused_or_its_policy_taken_whole(name: str, tmp_path: Path):
    with trainer_and_engine(name, "published", tmp_path) as (child, one):
        child.tell("go on")
        order = order_of(child.hear())
        child.kill()
        patient, one.weight_receiver._receiver = one.weight_receiver._receiver, RECEIVERS[name](tmp_path, 1.0)
        with contextlib.suppress(WeightsError):
            one.take(order)
        one.weight_receiver._receiver = patient
        assert one.holds(2) == (name not in CALLS), "what lies in memory or on the disk outlives who wrote it"
        check_successor(name, tmp_path, one, held=1 if name in CALLS else 2)


@pytest.mark.parametrize("phase", ["fetching", "verifying", "staged"])
def test_a_trainer_killed_while_an_engine_stages_harms_nothing(name: str, phase: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with trainer_and_engine(name, "published", tmp_path) as (child, one):
        child.tell("go on")
        order = order_of(child.hear())
        real: Any = getattr(receiver, "check" if phase == "fetching" else "verify")

        def kill_and_go_on(*arguments: Any, **options: Any) -> None:
            if not child._is_over:
                child.kill()
            real(*arguments, **options)

        monkeypatch.setattr(receiver, real.__name__, kill_and_go_on) if phase != "staged" else None
        is_refused = name in CALLS and phase == "fetching"
        with pytest.raises(WeightsError, match="cannot fetch a policy from the trainer") if is_refused else contextlib.nullcontext():
            one.weight_receiver.stage(order)
        if phase == "staged":
            child.kill()
        assert one.holds(1), "staging changes nothing"
        if not is_refused:
            one.weight_receiver.commit()
        monkeypatch.undo()
        check_successor(name, tmp_path, one, held=1 if is_refused else 2)


def test_a_buffer_half_written_by_a_killed_trainer_is_never_read(tmp_path: Path):
    """Shared memory: the engine reads the very bytes a trainer may have been writing when it was killed."""

    def half(hear: Callable[[], Any], say: Callable[[Any], None]) -> None:
        transport = TRANSPORTS["shared_memory"](tmp_path, LAYOUT)
        first = transport.publish(1)
        say(told(first))
        assert hear() == "go on"
        transport.pool.release(first.buffer)
        transport.publish(2)
        buffer = transport.pool.acquire(1.0)  # the first one again, which its manifest says is whole
        assert buffer is not None
        assert buffer.name == first.buffer
        for view in list(views(buffer.memory, LAYOUT).values())[:2]:
            view.view(-1).view(torch.uint8).fill_(7)
        die()

    child = Child(half)
    one = Engine(RECEIVERS["shared_memory"](tmp_path, 20.0))
    try:
        order = order_of(child.hear())
        child.tell("go on")
        child.wait_until_killed()
        with pytest.raises(WeightsError, match=r"2 of 5 tensors of policy 1: embed .*; not taken"):
            one.weight_receiver.stage(order)
        assert one.holds(0)
    finally:
        child.close()
        one.close()
        TRANSPORTS["shared_memory"](tmp_path, LAYOUT).pool.close()
