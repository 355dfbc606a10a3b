"""A stage around scoring with two engines of the process reward model: who has which trace, message by message."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np

from orchestrator.replay.harness import Harness, records
from orchestrator.stages.prm import MAX_DEATHS, PrmScoring
from pipelinerl.errors import PeerGone
from pipelinerl.messages import Cancel, Generate, Message, PrmLoad, PrmReady, Sampling, StepsScored, Stop, Tokens, TraceTokens
from tests.sim.clock import simulate
from tests.sim.run import config


class Model:
    """The stage and its model's engines, which say what a test has them say."""

    def __init__(self, harness: Harness) -> None:
        self.stage = harness.stage(PrmScoring)
        self.prm = harness.parts.prm
        assert self.prm is not None
        self.told: list[tuple[str, Message]] = []
        self.unreachable: set[str] = set()
        self._hub = harness.scorer_hub
        self._hub.told = self._hear

    def _hear(self, peer: str, message: Message) -> None:
        if peer in self.unreachable:
            raise PeerGone(peer)
        self.told.append((peer, message))

    async def say(self, number: int, message: Message) -> None:
        self._hub.say(f"scorer-{number}", message)
        await asyncio.sleep(0.001)

    async def begin(self, number: int, process_id: int) -> None:
        await self.say(number, PrmReady(prm_id=number, process_id=process_id, version="v"))

    def write(self, rollout_id: str, start: int, *token_ids: int) -> None:
        request = Generate(rollout_id=rollout_id, attempt=0, token_ids=np.array([7], np.int32), sampling=Sampling(max_tokens=99))
        self.stage.take(request, Tokens(rollout_id=rollout_id, attempt=0, start=start, token_ids=np.array(token_ids, np.int32)))

    def given(self) -> list[tuple[str, str, int, list[int]]]:
        """Who was told of which tokens, from where on, since the last call."""
        told, self.told = self.told, []
        tokens = [(peer, one) for peer, one in told if isinstance(one, TraceTokens)]
        return [(peer, one.rollout_id, one.start, one.token_ids.tolist()) for peer, one in tokens]

    async def score(self, number: int, rollout_id: str, *, taken: int, ends: tuple[int, ...] = (), first: int = 0) -> None:
        scores = np.full(len(ends), 0.5, np.float32)
        said = StepsScored(
            rollout_id=rollout_id,
            attempt=0,
            num_taken=taken,
            first=first,
            ends=np.array(ends, np.int32),
            scores=scores,
            is_last=False,
            version="v",
        )
        await self.say(number, said)


@contextlib.asynccontextmanager
async def two(folder: Path) -> AsyncIterator[Model]:
    settings = config(prm={"path": "unused", "chunk_tokens": 2, "count": 2})
    with records(folder) as (ledger, journal):
        harness = Harness(settings, ledger=ledger, journal=journal)
        model = Model(harness)
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(peers.run()) for peers in harness.parts.peers]
            for number in (1, 2):
                await model.begin(number, process_id=number)
            yield model
            for task in tasks:
                task.cancel()


def test_a_trace_stays_where_it_has_begun_and_the_next_one_goes_where_fewest_are(tmp_path: Path) -> None:
    async def program() -> None:
        async with two(tmp_path) as model:
            for name in ("a", "b", "c"):
                model.write(name, 0, 1, 2)
            model.write("a", 2, 3)
            assert model.given() == [
                ("scorer-1", "a", 0, [1, 2]),
                ("scorer-2", "b", 0, [1, 2]),
                ("scorer-1", "c", 0, [1, 2]),
                ("scorer-1", "a", 2, [3]),
            ]
            model.stage.forget("a")
            model.stage.forget("c")
            assert model.told == [("scorer-1", Cancel(rollout_id=name, attempt=0)) for name in ("a", "c")]
            model.write("d", 0, 1)
            assert model.given() == [("scorer-1", "d", 0, [1])]

    simulate(program())


def test_only_the_engine_that_has_a_trace_is_heard_about_it(tmp_path: Path) -> None:
    async def program() -> None:
        async with two(tmp_path) as model:
            model.write("a", 0, 1, 2, 3)
            await model.score(2, "a", taken=3, ends=(0,))
            assert (model.stage.num_fenced, model.stage.num_waiting_tokens) == (1, 3)
            await model.score(1, "a", taken=3, ends=(1,))
            assert (model.stage.num_fenced, model.stage.num_waiting_tokens) == (1, 0)
            assert model.stage._traces["a"].ends == [1]

    simulate(program())


def test_traces_of_an_engine_whose_process_dies_begin_anew_and_name_one_that_it_keeps_dying_of(tmp_path: Path) -> None:
    async def program() -> None:
        async with two(tmp_path) as model:
            model.write("a", 0, 1, 2, 3)
            await model.score(1, "a", taken=2, ends=(1,))
            model.write("b", 0, 1)
            model.given()
            await model.begin(1, process_id=11)
            assert model.given() == [("scorer-1", "a", 0, [1, 2, 3])]
            assert (model.stage.num_waiting_tokens, model.stage._traces["a"].ends) == (4, [])
            await model.begin(2, process_id=12)
            assert model.given() == [("scorer-2", "b", 0, [1])]
            for process_id in range(20, 20 + MAX_DEATHS - 1):
                assert not model.stage._traces["a"].is_done
                await model.begin(1, process_id=process_id)
            assert model.stage._traces["a"].is_done
            assert model.stage._traces["a"].error == "the process reward model died 3 times with tokens of this trace"
            assert not model.stage._traces["b"].is_done

    simulate(program())


def test_an_engine_that_cannot_be_sent_to_loses_its_traces_at_once_and_the_last_one_once_it_is_heard_again(tmp_path: Path) -> None:
    def load(number: int) -> PrmLoad:
        return PrmLoad(prm_id=number, num_traces=0, num_steps=0, num_trace_tokens=0, num_computed=0, num_uncached_tokens=0, busy_s=0.0)

    async def program() -> None:
        async with two(tmp_path) as model:
            model.write("a", 0, 1, 2)
            model.given()
            model.unreachable = {"scorer-1"}
            model.write("a", 2, 3)
            assert model.given() == [("scorer-2", "a", 0, [1, 2, 3])]
            model.write("b", 0, 1)
            assert model.given() == [("scorer-2", "b", 0, [1])], "it is given nothing until it is heard from"
            model.unreachable = {"scorer-1", "scorer-2"}
            model.write("a", 3, 4)
            model.write("c", 0, 1)
            assert model.given() == [], "there is nobody"
            model.unreachable = set()
            await model.say(2, load(2))
            assert model.given() == [("scorer-2", "a", 0, [1, 2, 3, 4]), ("scorer-2", "b", 0, [1]), ("scorer-2", "c", 0, [1])]
            await model.say(1, load(1))
            model.write("d", 0, 1)
            assert model.given() == [("scorer-1", "d", 0, [1])]
            assert model.stage.num_waiting_tokens == 4 + 1 + 1 + 1

    simulate(program())


def test_a_trace_that_no_engine_has_begins_where_another_process_announces_itself(tmp_path: Path) -> None:
    async def program() -> None:
        async with two(tmp_path) as model:
            model.unreachable = {"scorer-1", "scorer-2"}
            for name in ("a", "b", "c"):
                model.write(name, 0, 1)
            model.unreachable = set()
            await model.begin(1, process_id=9)
            assert model.given() == [("scorer-1", name, 0, [1]) for name in ("a", "b", "c")]
            await model.begin(2, process_id=10)
            assert model.given() == [], "they stay"

    simulate(program())


def test_leaving_is_no_death_and_who_leaves_gets_nothing_new(tmp_path: Path) -> None:
    async def program() -> None:
        async with two(tmp_path) as model:
            assert model.prm is not None
            model.write("a", 0, 1)
            for turn in range(2 * MAX_DEATHS):
                leaves, stays = (1, 2) if turn % 2 == 0 else (2, 1)
                model.given()
                model.prm.leave(leaves, "a test")
                for name in ("x", "y"):
                    model.write(f"{name}{turn}", 0, 1)
                assert {peer for peer, *_ in model.given()} == {f"scorer-{stays}"}
                model.prm.dismiss(leaves, "it has left")
                assert (f"scorer-{leaves}", Stop(reason="it has left")) in model.told
                assert (f"scorer-{stays}", "a", 0, [1]) in model.given()
                for name in ("x", "y"):
                    model.stage.forget(f"{name}{turn}")
                await model.begin(leaves, process_id=100 + turn)
            assert not model.stage._traces["a"].is_done

    simulate(program())


def test_who_waits_for_an_engine_to_leave_hears_when_it_has_ended_all_that_it_had(tmp_path: Path) -> None:
    async def program() -> None:
        async with two(tmp_path) as model:
            assert model.prm is not None
            model.write("a", 0, 1)
            model.prm.leave(1, "a test")
            heard = asyncio.create_task(model.stage.credits.wait())
            await asyncio.sleep(0.001)
            model.stage.forget("a")
            await asyncio.wait_for(heard, 1.0)
            engine = model.prm.find(1)
            assert engine is not None
            assert engine.num_outstanding == 0

    simulate(program())


def test_gauges_are_those_of_all_engines_and_what_those_that_are_gone_have_done_stays_counted(tmp_path: Path) -> None:
    def load(number: int, *, traces: int, steps: int) -> PrmLoad:
        return PrmLoad(
            prm_id=number, num_traces=traces, num_steps=steps, num_trace_tokens=10, num_computed=0, num_uncached_tokens=0, busy_s=1.5
        )

    async def program() -> None:
        async with two(tmp_path) as model:
            assert model.prm is not None
            await model.say(1, load(1, traces=2, steps=5))
            await model.say(2, load(2, traces=3, steps=7))
            gauges = model.stage.gauges()
            assert gauges is not None
            assert (gauges["num_traces"], gauges["num_steps"], gauges["busy_s"]) == (5, 12, 3.0)
            model.prm.dismiss(2, "it has left")
            gauges = model.stage.gauges()
            assert gauges is not None
            assert (gauges["num_traces"], gauges["num_steps"], gauges["busy_s"]) == (2, 12, 3.0)

    simulate(program())
