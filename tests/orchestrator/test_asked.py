"""Who was asked for what: every answer reaches whoever asked, once; answers of older attempts reach nobody."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

import numpy as np
import pytest

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.engines import Engines
from orchestrator.peers.peers import Peers
from orchestrator.peers.scorers import CALLS_PER_SLOT, Scorers
from orchestrator.rollouts.scorer_tasks import reward_task
from orchestrator.rules.quarantine import Quarantine
from orchestrator.rules.validation.violations import Kind
from pipelinerl.errors import ConfigError
from pipelinerl.messages import (
    CancelRequest,
    Completion,
    EngineLoad,
    EngineReady,
    Finish,
    FromEngine,
    FromScorer,
    Generate,
    Outcome,
    Request,
    Result,
    Sampling,
    ScorerReady,
    Starting,
    Tensor,
    ToEngine,
    ToScorer,
)
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch
from pipelinerl.transport.router import LOST_FOR_S
from tests.orchestrator import handmade
from tests.sim.clock import simulate
from tests.sim.memory import MemoryHub, MemoryLink

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


def test_what_a_scorer_had_is_asked_for_again_once_another_process_takes_its_name():
    trajectory = handmade.trajectory()

    async def program() -> None:
        hub = MemoryHub(accepts=FromScorer)
        peers = Peers(hub, role="scorer", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
        scorers = scorers_of(peers)
        link = hub.connect("scorer-0", accepts=ToScorer)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(peers.run())
            link.send(ScorerReady(scorer_id=0, process_id=1, num_slots=2))
            await asyncio.sleep(0.01)
            result = group.create_task(scorers.request(reward_task(trajectory), by="test"))
            await asyncio.sleep(0.01)
            link.send(ScorerReady(scorer_id=0, process_id=1, num_slots=2))
            await asyncio.sleep(0.01)
            requests = requests_of(link)
            assert len(requests) == 1, "it only said so twice"
            link.send(ScorerReady(scorer_id=0, process_id=2, num_slots=2))
            await asyncio.sleep(0.01)
            requests += requests_of(link)
            assert [request.task.rollout_id for request in requests] == [trajectory.rollout_id] * 2
            for request in requests:  # the first answer is that of the process before: too late
                link.send(Result(request_id=request.request_id, outcome=Outcome.OK, rewards=(request.request_id,), components=({},)))
            assert (await result).rewards == (requests[1].request_id,)
            assert (scorers.num_fenced, peers.refused) == (1, {})
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

    async def program() -> None:
        hub = MemoryHub(accepts=FromScorer)
        peers = Peers(hub, role="scorer", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
        scorers = scorers_of(peers)
        link = hub.connect("scorer-0", accepts=ToScorer)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(peers.run())]
            assert not scorers.has_room
            link.send(ScorerReady(scorer_id=0, process_id=1, num_slots=2))
            await asyncio.sleep(0.01)
            assert scorers.has_room
            results = [group.create_task(scorers.request(reward_task(trajectory), by="test")) for _ in range(2 * CALLS_PER_SLOT + 1)]
            await asyncio.sleep(0.01)
            assert not scorers.has_room
            requests = requests_of(link)
            assert len(requests) == 2 * CALLS_PER_SLOT
            seventh = requests[7].request_id
            for request_id in (10**9, seventh, seventh):
                link.send(Result(request_id=request_id, outcome=Outcome.OK, rewards=(0.5,), components=({},)))
            await asyncio.sleep(0.01)
            assert [number for number, result in enumerate(results) if result.done()] == [7]
            assert len(requests_of(link)) == 1, "there was room for the one that waited"
            assert (peers.refused, scorers.num_fenced) == ({Kind.UNASKED: 1}, 1)
            for task in (*tasks, *results):
                task.cancel()

    simulate(program())


def test_whoever_stops_waiting_withdraws_the_request_and_makes_room():
    async def program() -> None:
        hub = MemoryHub(accepts=FromScorer)
        peers = Peers(hub, role="scorer", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
        scorers = scorers_of(peers)
        link = hub.connect("scorer-0", accepts=ToScorer)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(peers.run())
            link.send(ScorerReady(scorer_id=0, process_id=1, num_slots=2))
            await asyncio.sleep(0.01)
            result = group.create_task(scorers.request(reward_task(handmade.trajectory()), by="test"))
            await asyncio.sleep(0.01)
            (request,) = requests_of(link)
            result.cancel()
            await asyncio.sleep(0.01)
            assert link.receive(0) == CancelRequest(request_id=request.request_id)
            assert [scorer.num_outstanding for scorer in scorers] == [0]
            link.send(Result(request_id=request.request_id, outcome=Outcome.ERROR, error="too late"))
            await asyncio.sleep(0.01)
            assert (scorers.num_fenced, peers.refused) == (1, {})
            task.cancel()

    simulate(program())


def test_what_is_held_out_fails_after_so_many_scorers_and_is_no_suspect():
    ledger = Ledger(None)

    async def program() -> Result:
        hub = MemoryHub(accepts=FromScorer)
        peers = Peers(hub, role="scorer", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
        scorers = Scorers(peers, expected=1, ledger=ledger, watch=Watch(stall_limit_s=1.0), quarantine=Quarantine())
        link = hub.connect("scorer-0", accepts=ToScorer)
        async with asyncio.TaskGroup() as group:
            task = group.create_task(peers.run())
            result = group.create_task(scorers.request(reward_task(handmade.trajectory()), by="test", max_lost=3))
            for process_id in range(4):
                link.send(ScorerReady(scorer_id=0, process_id=process_id, num_slots=2))
                await asyncio.sleep(0.01)
            answer = await result
            task.cancel()
        return answer

    assert simulate(program()).error == "3 scorers ended before they answered"
    assert not ledger.store.read("SELECT peer FROM events WHERE kind = 'suspected'")


def scorers_of(peers: Peers) -> Scorers:
    return Scorers(peers, expected=1, ledger=Ledger(None), watch=Watch(stall_limit_s=1.0), quarantine=Quarantine())


def requests_of(link: MemoryLink) -> list[Request]:
    """What the scorer was asked since the last look."""
    requests: list[Request] = []
    while (message := link.receive(0)) is not None:
        assert isinstance(message, Request)
        requests.append(message)
    return requests
