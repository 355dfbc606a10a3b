"""Engines and a trainer for clients: the product's own peers and engine loop; engines that hash, a trainer that says what it is told."""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.peers.engines import Engines
from orchestrator.peers.peers import Peers
from orchestrator.rules.residency import Residency
from orchestrator.rules.validation.completions import CompletionCheck
from orchestrator.serving.__main__ import is_base
from orchestrator.serving.backend import ServingBackend
from orchestrator.serving.publications import Publications
from orchestrator.serving.trainer import Trainer
from pipelinerl.engine.base import Sampled
from pipelinerl.engine.fake import FakeEngine
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.errors import VersionNotHeld
from pipelinerl.messages import (
    Completion,
    Finish,
    FromEngine,
    FromServingTrainer,
    Generate,
    LayoutFixed,
    OpenModel,
    PolicyPublished,
    PublishModel,
    RequestDone,
    RequestFailed,
    Sampling,
    ServingTrainerReady,
    StageWeights,
    ToEngine,
    ToServingTrainer,
    WeightBufferReleased,
)
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch
from pipelinerl.tinker.backend import Publication, Refusal, TrainerLost, Weights
from pipelinerl.tinker.ledger import Ledger
from tests.sim.memory import MemoryHub

PROMPT = np.array([5, 6, 7], np.int32)
SNAPSHOT, OTHER = Weights(model_id="m", folder="/saved/1", num_steps=3), Weights(model_id="n", folder="/saved/2")


class SideBySide(FakeEngine):
    """Holds the newest versions, so many of them, and samples each request under the one that it names."""

    def __init__(self, num_places: int) -> None:
        super().__init__(max_model_tokens=64, max_running=8, mean_tokens=10**9)
        self.held = [0]
        self._num_places = num_places
        self._ordered = 0
        self._named: dict[str, int] = {}

    def submit(self, request: Generate, *, version: int, rollback_epoch: int = 0) -> None:
        if request.version not in self.held:
            raise VersionNotHeld(f"version {request.version} is not here")
        super().submit(request, version=version)
        self._named[request.rollout_id] = request.version

    def step(self) -> list[Sampled]:
        (sampled,) = super().step()
        return [dataclasses.replace(sampled, versions=np.array([self._named[name] for name in sampled.rollout_ids], np.int32))]

    def stage(self, order: StageWeights) -> None:
        super().stage(order)
        self._ordered = order.version

    def commit(self, recompute: Collection[str] = ()) -> Collection[str]:
        self.held = [*self.held, self._ordered][-self._num_places :]
        return super().commit()


class Desk:
    """A backend over one engine and a trainer, in this event loop."""

    def __init__(self, folder: Path, *, num_places: int) -> None:
        self.engine_hub, self.trainer_hub = MemoryHub(accepts=FromEngine), MemoryHub(accepts=FromServingTrainer)
        self.engine = SideBySide(num_places) if num_places else FakeEngine(max_model_tokens=64, max_running=8, mean_tokens=10**9)
        self.is_held = False
        """True while the engine samples nothing."""
        self.asked: list[Any] = []
        """Requests that the trainer was sent."""
        self.says: Callable[[Any], Any] = self.answer
        self.num_lost = 0
        self.journal = Journal(folder, "orchestrator")
        engines = Peers(self.engine_hub, role="engine", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
        trainers = Peers(self.trainer_hub, role="trainer", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
        self.peers = (engines, trainers)
        self.engines = Engines(
            engines, expected=1, watch=Watch(stall_limit_s=1000.0), credits=Signal(), completion_check=CompletionCheck(vocabulary=1000)
        )
        self.trainer = Trainer(trainers, on_another=self.lost)
        steps: collections.Counter[str] = collections.Counter()
        self.published = Publications(
            engines=self.engines,
            trainer=self.trainer,
            residency=Residency(Weights(), num_places=num_places or 1, is_in_place=not num_places),
            journal=self.journal,
            commit_deadline_s=5.0,
            layout=lambda: LayoutFixed(tensors=()),
            num_steps=lambda model_id: steps[model_id],
            ledger=Ledger(None),
        )
        self.published.caught_up.set()
        self.backend = ServingBackend(
            engines=self.engines, trainer=self.trainer, published=self.published, num_steps=steps, pins=num_places > 0
        )

    def lost(self) -> None:
        self.num_lost += 1

    def answer(self, request: Any) -> Any:
        if isinstance(request, PublishModel):
            return PolicyPublished(version=request.version, buffer=f"buffer-{request.version}", digest="d", num_bytes=1, publish_s=0.0)
        return None if isinstance(request, LayoutFixed | WeightBufferReleased) else RequestDone(request_id=request.request_id)

    async def serve_engine(self) -> None:
        link = self.engine_hub.connect("engine-0", accepts=ToEngine)

        def stage(order: StageWeights) -> concurrent.futures.Future[None]:
            done: concurrent.futures.Future[None] = concurrent.futures.Future()
            try:
                self.engine.stage(order)
            except Exception as error:  # the stager's boundary
                done.set_exception(error)
            else:
                done.set_result(None)
            return done

        loop = EngineLoop(self.engine, engine_id=0, stager=stage)
        link.introduce(lambda kept: [loop.introduce(kept, process_id=1)])
        while True:
            while (message := link.receive(0)) is not None:
                loop.handle(message)
            if self.is_held:
                loop._acknowledge_if_staged()
                loop._commit_if_acknowledged()
            else:
                loop.advance()
            for answer in loop.outbox:
                link.send(answer)
            loop.outbox.clear()
            await asyncio.sleep(0)

    async def serve_trainer(self, process_id: int = 1) -> None:
        link = self.trainer_hub.connect("trainer-0", accepts=ToServingTrainer)
        link.introduce(lambda kept: [ServingTrainerReady(process_id=process_id)])
        while True:
            while (message := link.receive(0)) is not None:
                self.asked.append(message)
                if (answer := self.says(message)) is not None:
                    link.send(answer)
            await asyncio.sleep(0)

    async def sample(self, weights: Weights, name: str, *, max_tokens: int = 4) -> Completion:
        request = Generate(rollout_id=name, attempt=0, token_ids=PROMPT, sampling=Sampling(max_tokens=max_tokens))
        (completion,) = await self.backend.sample(weights, [request])
        return completion

    @property
    def num_published(self) -> int:
        return sum(isinstance(one, PublishModel) for one in self.asked)


@contextlib.asynccontextmanager
async def serving(folder: Path, *, num_places: int) -> AsyncIterator[Desk]:
    desk = Desk(folder, num_places=num_places)
    with contextlib.closing(desk.journal):
        async with asyncio.timeout(20.0), asyncio.TaskGroup() as group:
            tasks = [group.create_task(one) for one in (*(peer.run() for peer in desk.peers), desk.serve_engine(), desk.serve_trainer())]
            await desk.engines.wait_until_ready()
            await desk.trainer.wait_until_ready()
            desk.published.begin_anew()
            yield desk
            for task in tasks:
                task.cancel()


def run(test: Callable[[Desk], Awaitable[None]], folder: Path, *, num_places: int) -> None:
    async def whole() -> None:
        async with serving(folder, num_places=num_places) as desk:
            await test(desk)

    asyncio.run(whole())


async def turns(number: int = 200) -> None:
    for _ in range(number):
        await asyncio.sleep(0)


@pytest.mark.parametrize("num_places", [0, 3])
def test_weights_are_brought_once_and_every_token_says_which_they_were(tmp_path: Path, num_places: int) -> None:
    async def test(desk: Desk) -> None:
        base = await desk.sample(Weights(), "a")
        assert (set(base.versions.tolist()), desk.num_published) == ({0}, 0), "engines begin with what everything begins with"
        for name in ("b", "c"):
            said = await desk.sample(SNAPSHOT, name)
            assert set(said.versions.tolist()) == {1}
            assert said.finish is Finish.LENGTH
        assert desk.num_published == 1
        assert desk.backend.publications[1] == Publication(model_id="m", num_steps=3)

    run(test, tmp_path, num_places=num_places)


def test_adapters_are_sampled_side_by_side(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.is_held = True
        asked = [asyncio.ensure_future(desk.sample(weights, name)) for weights, name in ((SNAPSHOT, "a"), (OTHER, "b"), (Weights(), "c"))]
        await turns()
        assert desk.num_published == 2
        desk.is_held = False
        assert [set((await one).versions.tolist()) for one in asked] == [{1}, {2}, {0}]

    run(test, tmp_path, num_places=3)


def test_whole_weights_wait_until_nobody_needs_those_that_are_there(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.is_held = True
        first = asyncio.ensure_future(desk.sample(SNAPSHOT, "a"))
        await turns()
        second = asyncio.ensure_future(desk.sample(OTHER, "b"))
        await turns()
        late = asyncio.ensure_future(desk.sample(SNAPSHOT, "c"))
        await turns()
        assert desk.num_published == 1, "the other's sequence runs"
        desk.is_held = False
        assert set((await first).versions.tolist()) == {1}
        assert set((await second).versions.tolist()) == {2}
        assert set((await late).versions.tolist()) == {3}, "it came behind who waited, or nobody else would ever be served"

    run(test, tmp_path, num_places=0)


def test_what_is_sampled_in_flight_goes_on_under_what_the_same_model_publishes(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        live = Weights(model_id="m")
        desk.backend.num_steps["m"] += 1
        assert await desk.backend.publish(live) == 1
        said = asyncio.ensure_future(desk.sample(live, "a", max_tokens=40))
        await turns(12)
        assert await desk.backend.publish(live) == 2
        assert set((await said).versions.tolist()) == {1, 2}
        assert desk.backend.publications[2] == Publication(model_id="m", num_steps=1)

    run(test, tmp_path, num_places=0)


def test_a_version_that_an_engine_has_lost_is_brought_again(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        await desk.sample(SNAPSHOT, "a")
        assert isinstance(desk.engine, SideBySide)
        desk.engine.held.remove(1)
        assert set((await desk.sample(SNAPSHOT, "b")).versions.tolist()) == {2}

    run(test, tmp_path, num_places=3)


def test_weights_that_an_engine_refuses_are_an_error_and_the_next_are_taken(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.says = lambda request: (
            PolicyPublished(version=request.version, buffer="corrupt", digest="d", num_bytes=1, publish_s=0.0)
            if isinstance(request, PublishModel)
            else desk.answer(request)
        )
        with pytest.raises(Refusal, match="digest is not d") as refused:
            await desk.sample(SNAPSHOT, "a")
        assert not refused.value.is_asker_wrong
        desk.says = desk.answer
        assert set((await desk.sample(SNAPSHOT, "b")).versions.tolist()) == {3}, "they were brought twice"

    run(test, tmp_path, num_places=0)


def test_after_a_refusal_nobody_knows_what_engines_hold(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        live = Weights(model_id="m")
        await desk.backend.publish(live)
        desk.says = lambda request: (
            PolicyPublished(version=request.version, buffer="corrupt", digest="d", num_bytes=1, publish_s=0.0)
            if isinstance(request, PublishModel)
            else desk.answer(request)
        )
        with pytest.raises(Refusal):
            await desk.backend.publish(live)
        desk.says = desk.answer
        assert set((await desk.sample(live, "a")).versions.tolist()) == {4}, "some engines may have taken it, and others not"

    run(test, tmp_path, num_places=0)


def test_weights_are_brought_again_where_an_engine_is_replaced_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(desk: Desk) -> None:
        send, lost = desk.engines.peers.send, list[Any]()

        def send_but_the_first(peer: str, message: Any) -> bool:
            if isinstance(message, StageWeights) and not lost:
                lost.append(message)
                asyncio.get_running_loop().call_soon(desk.published._on_joined, next(iter(desk.engines)))
                return True
            return send(peer, message)

        monkeypatch.setattr(desk.engines.peers, "send", send_but_the_first)
        assert set((await desk.sample(SNAPSHOT, "a")).versions.tolist()) == {2}
        assert lost[0].version == 1

    run(test, tmp_path, num_places=3)


def test_the_longest_context_is_known_while_no_engine_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(desk: Desk) -> None:
        monkeypatch.setattr(Engines, "__iter__", lambda engines: iter(()))
        assert desk.backend.max_context_tokens == 64

    run(test, tmp_path, num_places=0)


def test_what_the_trainer_refuses_is_the_askers_answer(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.says = lambda request: (
            RequestFailed(request_id=request.request_id, error="no saved model", is_asker_wrong=True)
            if isinstance(request, PublishModel)
            else desk.answer(request)
        )
        with pytest.raises(Refusal, match="no saved model") as refused:
            await desk.sample(SNAPSHOT, "a")
        assert refused.value.is_asker_wrong

    run(test, tmp_path, num_places=0)


def test_a_lost_trainer_takes_what_it_was_asked_with_it(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.says = lambda request: None
        waiting = desk.backend.train(OpenModel(request_id=0, model_id="m"))
        await turns()
        again = asyncio.ensure_future(desk.serve_trainer(process_id=2))
        with pytest.raises(TrainerLost):
            await waiting
        assert desk.num_lost == 1
        again.cancel()

    run(test, tmp_path, num_places=0)


def test_a_sequence_that_nobody_waits_for_is_withdrawn(tmp_path: Path) -> None:
    async def test(desk: Desk) -> None:
        desk.is_held = True
        said = asyncio.ensure_future(desk.sample(Weights(), "a"))
        await turns()
        said.cancel()
        await turns()
        assert not len(desk.engines.requests)
        assert isinstance(desk.engine, FakeEngine)
        assert not desk.engine.running()

    run(test, tmp_path, num_places=0)


@pytest.mark.parametrize("name", ["/data/Qwen/Qwen3-8B", "Qwen/Qwen3-8B", "Qwen3-8B"])
def test_a_client_names_the_model_by_its_path_or_the_end_of_it(name: str) -> None:
    assert is_base(Path("/data/Qwen/Qwen3-8B"), name)


def test_a_model_of_the_hubs_cache_has_its_name_there() -> None:
    assert is_base(Path("/root/hub/models--Qwen--Qwen3-8B/snapshots/0123"), "Qwen/Qwen3-8B")


@pytest.mark.parametrize("name", ["Qwen/Qwen3-4B", "", "B", "data"])
def test_another_model_is_not_taken_for_it(name: str) -> None:
    assert not is_base(Path("/data/Qwen/Qwen3-8B"), name)
