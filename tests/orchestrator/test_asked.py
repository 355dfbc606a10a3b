"""Who was asked for what: every answer reaches whoever asked, once; answers of older attempts reach nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest

from orchestrator.peers.engines import Engines
from orchestrator.peers.peers import Peers
from orchestrator.peers.scorers import CALLS_PER_SLOT, Scorers
from orchestrator.rules.validation.violations import Kind
from orchestrator.stages.scoring import score_request
from pipelinerl.errors import ConfigError
from pipelinerl.messages import (
    Completion,
    EngineLoad,
    EngineReady,
    Finish,
    FromEngine,
    FromScorer,
    Generate,
    Outcome,
    Sampling,
    Score,
    Scored,
    ScorerReady,
    Starting,
    Tensor,
    ToEngine,
    ToScorer,
)
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch
from pipelinerl.transport.memory import MemoryHub, MemoryLink
from pipelinerl.transport.router import LOST_FOR_S
from tests.orchestrator import handmade
from tests.sim.clock import simulate

TENSOR = Tensor(name="norm", shape=(2,), dtype="float32", offset_bytes=0, num_bytes=8)


@contextlib.asynccontextmanager
async def two_engines(
    watch: Watch, *, layouts: tuple[tuple[Tensor, ...], ...] = ((TENSOR,), (TENSOR,))
) -> AsyncIterator[tuple[Engines, list[MemoryLink]]]:
    hub = MemoryHub(accepts=FromEngine)
    peers = Peers(hub, role="engine", expected=2, ready_deadline_s=10.0, silent_after_s=1000.0)
    engines = Engines(peers, expected=2, watch=watch, credits=Signal())
    links = [hub.connect(f"engine-{number}", accepts=ToEngine) for number in range(2)]
    async with asyncio.TaskGroup() as group:
        task = group.create_task(peers.run())
        ready = group.create_task(engines.wait_until_ready())
        for number, link in enumerate(links):
            assert not ready.done(), "one of two has not announced itself"
            link.send(EngineReady(engine_id=number, process_id=1, max_model_tokens=100 - number, max_running=4, tensors=layouts[number]))
            await asyncio.sleep(0.01)
        await asyncio.wait_for(ready, 1.0)
        yield engines, links
        task.cancel()


def generate(rollout_id: str, *, attempt: int = 0) -> Generate:
    return Generate(rollout_id=rollout_id, attempt=attempt, token_ids=np.array([1], np.int32), sampling=Sampling(max_tokens=1))


def completion(rollout_id: str, *, attempt: int = 0) -> Completion:
    nothing = np.zeros(0, np.int32)
    return Completion(
        rollout_id=rollout_id,
        attempt=attempt,
        token_ids=nothing,
        logprobs=np.zeros(0, np.float32),
        versions=nothing,
        finish=Finish.STOP,
    )


def load(num_tokens: int) -> EngineLoad:
    return EngineLoad(engine_id=1, version=0, num_running=1, num_waiting=0, num_tokens=num_tokens, num_steps=1, busy_s=1.0, idle_s=0.0)


def ask(engines: Engines, request: Generate, engine_id: int, answered: list[tuple[str, int]], lost: list[str] | None = None) -> None:
    """Ask, and note the answer or the loss."""
    engines.requests.ask(
        request,
        engine_id,
        sink=lambda done, engine_id: answered.append((done.rollout_id, engine_id)),
        lost=lambda engine_id: None if lost is None else lost.append(request.rollout_id),
    )


def test_a_completion_reaches_who_asked_with_its_engine_and_frees_its_place():
    async def program() -> None:
        async with two_engines(Watch(stall_limit_s=1.0)) as (engines, links):
            answered: list[tuple[str, int]] = []
            for rollout_id, engine_id in (("0/0", 0), ("0/1", 0), ("1/0", 1)):
                ask(engines, generate(rollout_id), engine_id, answered)
            assert engines.outstanding() == {0: 2, 1: 1}
            links[0].send(completion("0/1"))
            links[1].send(completion("1/0"))
            await asyncio.sleep(0.01)
            assert answered == [("0/1", 0), ("1/0", 1)]
            assert engines.outstanding() == {0: 1, 1: 0}

    simulate(program())


def test_an_answer_nobody_asked_for_is_refused():
    """One that was never asked for, and one of an attempt that this engine was not given; one that comes twice is only fenced."""

    async def program() -> None:
        async with two_engines(Watch(stall_limit_s=1.0)) as (engines, links):
            answered: list[tuple[str, int]] = []
            ask(engines, generate("0/0", attempt=1), 0, answered)
            for message in (
                completion("9/9"),
                completion("0/0", attempt=0),
                completion("0/0", attempt=1),
                completion("0/0", attempt=1),
            ):
                links[0].send(message)
            await asyncio.sleep(0.01)
            assert answered == [("0/0", 0)]
            assert engines.peers.refused == {Kind.UNASKED: 2}
            assert engines.requests.num_fenced == 1
            assert engines.outstanding() == {0: 0, 1: 0}

    simulate(program())


def test_engines_serve_what_the_smallest_serves_and_hold_what_the_slowest_holds():
    async def program() -> None:
        async with two_engines(Watch(stall_limit_s=1.0)) as (engines, _):
            assert engines.max_model_tokens == 99
            assert engines.layout() == (TENSOR,)
            engines.committed(engines[0], 3)
            assert engines.all_hold(0)
            assert not engines.all_hold(1)
            engines.committed(engines[1], 5)
            assert engines.all_hold(3)
            assert not engines.all_hold(4)
            assert (engines.oldest_version(), engines.newest_version()) == (3, 5)

    simulate(program())


def test_engines_that_ask_for_different_layouts_are_refused():
    async def program() -> None:
        async with two_engines(Watch(stall_limit_s=1.0), layouts=((TENSOR,), ())):
            await asyncio.sleep(1.0)

    with pytest.raises(ExceptionGroup) as caught:
        simulate(program())
    assert caught.group_contains(ConfigError, match="2 engines ask for 2 different weight layouts")


@pytest.mark.parametrize("how", ["starting", "ready"])
def test_what_an_engine_had_is_given_back_once_another_process_takes_its_name(how: str):
    async def program() -> None:
        async with two_engines(Watch(stall_limit_s=1.0)) as (engines, links):
            answered: list[tuple[str, int]] = []
            lost: list[str] = []
            died: list[int] = []
            engines.on_died(died.append)
            for rollout_id, engine_id in (("0/0", 0), ("0/1", 0), ("1/0", 1)):
                ask(engines, generate(rollout_id), engine_id, answered, lost)
            ready = EngineReady(engine_id=0, process_id=2, max_model_tokens=100, max_running=4, tensors=(TENSOR,))
            links[0].send(Starting(process_id=2) if how == "starting" else ready)
            await asyncio.sleep(0.01)
            assert (lost, died) == (["0/0", "0/1"], [0])
            assert engines.outstanding() == ({1: 1} if how == "starting" else {0: 0, 1: 1})
            assert engines.all_hold(0) == (how == "ready"), "an engine that is missing holds nothing"
            links[0].send(completion("0/0"))
            links[0].send(ready)
            links[0].send(ready)
            await asyncio.sleep(0.01)
            assert engines.outstanding() == {0: 0, 1: 1}
            assert (answered, lost, died) == ([], ["0/0", "0/1"], [0])
            assert (engines.requests.num_fenced, engines.peers.refused) == (1, {})

    simulate(program())


def test_what_cannot_be_sent_is_given_back_and_the_engine_is_passed_over_until_it_is_heard_of():
    async def program() -> None:
        async with two_engines(Watch(stall_limit_s=1.0)) as (engines, links):
            lost: list[str] = []
            links[1].close()
            ask(engines, generate("0/0"), 1, [], lost)
            assert lost == [], "its connection may come back"
            await asyncio.sleep(LOST_FOR_S + 1.0)
            ask(engines, generate("0/1"), 1, [], lost)
            assert lost == ["0/1"]
            assert engines.outstanding() == {0: 0}
            assert engines.least_busy(lambda version: True) == 0
            assert engines.oldest_version() == 0

    simulate(program())


def test_what_a_scorer_had_is_given_back_once_another_process_takes_its_name():
    trajectory = handmade.trajectory()

    async def program() -> None:
        hub = MemoryHub(accepts=FromScorer)
        peers = Peers(hub, role="scorer", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
        scorers = Scorers(peers, expected=1, watch=Watch(stall_limit_s=1.0))
        link = hub.connect("scorer-0", accepts=ToScorer)
        lost: list[int] = []
        async with asyncio.TaskGroup() as group:
            task = group.create_task(peers.run())
            link.send(ScorerReady(scorer_id=0, process_id=1, num_slots=2))
            await asyncio.sleep(0.01)
            scorers.ask(score_request(trajectory), sink=lambda scored: None, lost=lost.append)
            link.send(ScorerReady(scorer_id=0, process_id=1, num_slots=2))
            await asyncio.sleep(0.01)
            assert lost == [], "it only said so twice"
            link.send(ScorerReady(scorer_id=0, process_id=2, num_slots=2))
            await asyncio.sleep(0.01)
            assert lost == [0]
            assert scorers.has_room
            task.cancel()

    simulate(program())


def test_sampled_tokens_are_progress_and_a_sign_of_life_is_none():
    async def program() -> list[int]:
        watch, moves = Watch(stall_limit_s=1.0), []
        async with two_engines(watch) as (engines, links):
            for num_tokens in (5, 5, 6):
                before = watch.num_moves
                links[1].send(load(num_tokens))
                await asyncio.sleep(0.01)
                moves.append(watch.num_moves - before)
            last = engines[1].load
            assert last is not None
            assert last.num_tokens == 6
        return moves

    assert simulate(program()) == [1, 0, 1]


def test_a_scorer_is_asked_as_long_as_it_has_room_and_an_answer_makes_room():
    trajectory = handmade.trajectory()

    def score(rollout_id: str) -> Score:
        return Score(rollout_id=rollout_id, attempt=0, prompt=trajectory.prompt, token_ids=trajectory.token_ids, finish=Finish.STOP)

    async def program() -> None:
        hub = MemoryHub(accepts=FromScorer)
        peers = Peers(hub, role="scorer", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
        scorers = Scorers(peers, expected=1, watch=Watch(stall_limit_s=1.0))
        link = hub.connect("scorer-0", accepts=ToScorer)
        answered: list[Scored] = []
        async with asyncio.TaskGroup() as group:
            task = group.create_task(peers.run())
            assert not scorers.has_room
            link.send(ScorerReady(scorer_id=0, process_id=1, num_slots=2))
            await asyncio.sleep(0.01)
            for number in range(2 * CALLS_PER_SLOT):
                assert scorers.has_room
                scorers.ask(score(f"0/{number}"), sink=answered.append, lost=lambda scorer_id: None)
            assert not scorers.has_room
            waiting = asyncio.create_task(scorers.changed.wait())
            for attempt in (1, 0, 0):
                link.send(Scored(rollout_id="0/7", attempt=attempt, outcome=Outcome.OK, reward=0.5))
            await asyncio.wait_for(waiting, 1.0)
            assert scorers.has_room
            assert [scored.rollout_id for scored in answered] == ["0/7"]
            assert (peers.refused, scorers.num_fenced) == ({Kind.UNASKED: 1}, 1)
            task.cancel()

    simulate(program())
