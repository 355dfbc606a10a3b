"""Evaluation: held-out prompts answered once, scored once, outside the run's accounts; on simulated time, with hand-moved peers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from orchestrator.ledger.ledger import Ledger
from orchestrator.peers.engines import Engine, Engines
from orchestrator.peers.peers import Peers
from orchestrator.peers.scorers import Scorers
from orchestrator.rules.quarantine import Quarantine
from orchestrator.stages.evaluation import Evaluation
from pipelinerl.config import EvaluationSection
from pipelinerl.messages import (
    CancelRequest,
    Completion,
    EngineReady,
    Finish,
    FromEngine,
    FromScorer,
    Generate,
    Outcome,
    Prompt,
    Request,
    Result,
    Sampling,
    ScorerReady,
    ToEngine,
    ToScorer,
)
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.stage import Signal
from pipelinerl.runtime.watch import Watch
from tests.orchestrator import handmade
from tests.sim.clock import simulate
from tests.sim.memory import MemoryHub, MemoryLink


class Pins:
    """Who brings policies to engines, as far as an evaluation sees it."""

    def __init__(self) -> None:
        self.pinned: list[int] = []
        self.swapping: set[int] = set()

    def pin(self, engine: Engine, *, is_pinned: bool) -> None:
        (self.pinned.append if is_pinned else self.pinned.remove)(engine.engine_id)

    def is_settled(self, engine: Engine) -> bool:
        return engine.engine_id not in self.swapping


@dataclasses.dataclass(kw_only=True)
class Bench:
    """An evaluation with a hand on two engines and a scorer."""

    evaluation: Evaluation
    engines: Engines
    engine_links: list[MemoryLink]
    scorer_link: MemoryLink
    pins: Pins
    ledger: Ledger

    def commit(self, version: int, *engine_ids: int) -> None:
        """Engines sample under `version` from now on; by default all."""
        for engine_id in engine_ids or (0, 1):
            self.engines.committed(self.engines[engine_id], version)
        self.engines.changed.set()

    async def asked(self) -> list[tuple[int, Generate]]:
        """What the engines were asked since the last look, with the engine's number."""
        await asyncio.sleep(0.01)
        requests = []
        for engine_id, link in enumerate(self.engine_links):
            while (request := link.receive(0)) is not None:
                assert isinstance(request, Generate)
                requests.append((engine_id, request))
        return requests

    def answer(self, engine_id: int, request: Generate, *, versions: tuple[int, ...] = (0, 0), finish: Finish = Finish.STOP) -> None:
        count = len(versions)
        self.engine_links[engine_id].send(
            Completion(
                rollout_id=request.rollout_id,
                attempt=request.attempt,
                token_ids=np.arange(count, dtype=np.int32),
                logprobs=np.zeros(count, np.float32),
                versions=np.array(versions, np.int32),
                finish=finish,
                error="out of memory" if finish is Finish.ERROR else "",
            )
        )

    async def to_score(self) -> list[Request]:
        await asyncio.sleep(0.01)
        requests = []
        while (request := self.scorer_link.receive(0)) is not None:
            if not isinstance(request, CancelRequest):
                assert isinstance(request, Request)
                requests.append(request)
        return requests

    def score(self, request: Request, reward: float | None) -> None:
        outcome = Outcome.TIMEOUT if reward is None else Outcome.OK
        rewards = () if reward is None else (reward,)
        components = tuple({} for _ in rewards)
        self.scorer_link.send(Result(request_id=request.request_id, outcome=outcome, rewards=rewards, components=components))


@contextlib.asynccontextmanager
async def bench(
    folder: Path, *, num_prompts: int = 4, every: int = 0, samples: int = 1, done: tuple[tuple[int, float], ...] = (), **options: Any
) -> AsyncIterator[Bench]:
    engine_hub, scorer_hub = MemoryHub(accepts=FromEngine), MemoryHub(accepts=FromScorer)
    engine_peers = Peers(engine_hub, role="engine", expected=2, ready_deadline_s=10.0, silent_after_s=1000.0)
    scorer_peers = Peers(scorer_hub, role="scorer", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
    journal, watch, ledger = Journal(folder, "orchestrator"), Watch(stall_limit_s=1000.0), Ledger(None)
    engines = Engines(engine_peers, expected=2, watch=watch, credits=Signal())
    scorers = Scorers(scorer_peers, expected=1, ledger=ledger, watch=watch, quarantine=Quarantine())
    evaluation = Evaluation(
        prompts=[
            msgspec.structs.replace(handmade.prompt(3, prompt_id=f"held:{number}"), images=(b"%d" % number,))
            for number in range(num_prompts)
        ],
        section=EvaluationSection(every=every, samples=samples, deadline_s=700.0),  # pyright: ignore[reportCallIssue]
        correct_reward=1.0,
        engines=engines,
        scorers=scorers,
        pins=(pins := Pins()),
        sampling=Sampling(max_tokens=7, temperature=0.0),
        journal=journal,
        ledger=ledger,
        watch=watch,
        results=list(done),
        **options,
    )
    links = [engine_hub.connect(f"engine-{number}", accepts=ToEngine) for number in range(2)]
    scorer_link = scorer_hub.connect("scorer-0", accepts=ToScorer)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(engine_peers.run()), group.create_task(scorer_peers.run())]
            for engine_id, link in enumerate(links):
                link.send(EngineReady(engine_id=engine_id, process_id=1, max_model_tokens=100, max_running=4, tensors=()))
            scorer_link.send(ScorerReady(scorer_id=0, process_id=1, num_slots=1))
            await asyncio.sleep(0.01)
            yield Bench(evaluation=evaluation, engines=engines, engine_links=links, scorer_link=scorer_link, pins=pins, ledger=ledger)
            for task in tasks:
                task.cancel()
    finally:
        journal.close()


async def evaluate(it: Bench, rewards: list[float | None], *, version: int = 0) -> float | None:
    """Run one evaluation to its end; rewards go to the prompts in order, None is a timeout."""
    it.commit(version)
    running = asyncio.create_task(it.evaluation.evaluate(version))
    for engine_id, request in await it.asked():
        it.answer(engine_id, request)
    for request in await it.to_score():
        it.score(request, rewards[int(request.task.rollout_id.split("/")[1])])
    return await running


def lines(folder: Path) -> list[dict[str, object]]:
    return [line for line in read_journals(folder) if line["kind"] == "evaluation"]


def test_every_prompt_is_answered_once_spread_over_the_engines_and_scored_once(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            running = asyncio.create_task(it.evaluation.evaluate(0))
            asked = await it.asked()
            assert sorted(engine_id for engine_id, _ in asked) == [0, 0, 1, 1]
            assert sorted(request.rollout_id for _, request in asked) == [f"evaluation-0/{number}" for number in range(4)]
            assert all(request.sampling == Sampling(max_tokens=7, temperature=0.0) for _, request in asked)
            assert all(request.images == (request.rollout_id[-1:].encode(),) for _, request in asked), "held-out pictures are shown, too"
            for engine_id, request in reversed(asked):
                it.answer(engine_id, request)
            to_score = await it.to_score()
            assert [request.task.prompt.prompt_id for request in to_score] == [f"held:{number}" for number in range(4)]
            assert [request.task.completions[0].tolist() for request in to_score] == [[0, 1]] * 4, "the tokens after the prompt"
            for request, reward in zip(reversed(to_score), (1.0, 0.0, 0.5, 0.25), strict=True):
                it.score(request, reward)
            assert await running == 0.4375
            assert it.evaluation.results == [(0, 0.4375)]
            assert it.engines.outstanding() == {0: 0, 1: 0}

    simulate(program())


def test_failures_count_as_zero_in_the_mean_and_are_reported_apart(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            it.commit(3)
            running = asyncio.create_task(it.evaluation.evaluate(3))
            for number, (engine_id, request) in enumerate(sorted(await it.asked(), key=lambda item: item[1].rollout_id)):
                failed = number == 3
                it.answer(engine_id, request, versions=() if failed else (2, 3), finish=Finish.ERROR if failed else Finish.STOP)
            to_score = await it.to_score()
            assert len(to_score) == 3, "what an engine failed at has nothing to score"
            for request, reward in zip(to_score, (1.0, None, 1.0), strict=True):
                it.score(request, reward)
            assert await running == 0.5

    simulate(program())
    (line,) = lines(tmp_path)
    assert (line["version"], line["reward_mean"], line["num_prompts"], line["num_failed"]) == (3, 0.5, 4, 2)
    assert (line["oldest_version"], line["newest_version"]) == (2, 3)


def test_a_version_is_evaluated_once(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path, num_prompts=1) as it:
            assert await evaluate(it, [1.0], version=2) == 1.0
            assert await it.evaluation.evaluate(2) is None
            assert await it.asked() == []

    simulate(program())


def test_without_held_out_prompts_nothing_happens(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path, num_prompts=0) as it:
            assert await it.evaluation.evaluate(0) is None

    simulate(program())
    assert lines(tmp_path) == []


def test_it_follows_the_newest_version_at_every_multiple_or_the_first_after_it(tmp_path: Path):
    """Every 2: at version 3 it is due (2 was passed while nobody looked), then not before 4."""

    async def program() -> list[int]:
        version = 0
        async with bench(tmp_path, num_prompts=1, every=2) as it:
            following = asyncio.create_task(it.evaluation.follow(lambda: version))
            for published in (1, 3, 4, 5):
                version = published
                it.commit(version)
                for engine_id, request in await it.asked():
                    it.answer(engine_id, request)
                for request in await it.to_score():
                    it.score(request, 1.0)
                await asyncio.sleep(0.01)
            following.cancel()
            return [asked for asked, _ in it.evaluation.results]

    assert simulate(program()) == [3, 4]


@pytest.mark.parametrize("stopped_while", ["generating", "scoring"])
def test_answers_that_come_after_an_evaluation_was_stopped_harm_nobody(tmp_path: Path, stopped_while: str):
    """The run's end cancels `follow` in the middle; engines and scorers answer all the same."""

    async def program() -> float | None:
        async with bench(tmp_path) as it:
            it.commit(1)
            running = asyncio.create_task(it.evaluation.evaluate(1))
            asked = await it.asked()
            if stopped_while == "generating":
                running.cancel()
            for engine_id, request in asked:
                it.answer(engine_id, request)
            to_score = await it.to_score()
            if stopped_while == "scoring":
                running.cancel()
                await asyncio.sleep(0.01)
            for request in to_score:
                it.score(request, 1.0)
            await asyncio.sleep(0.01)
            assert running.cancelled()
            return await evaluate(it, [0.0, 0.5, 0.5, 1.0], version=2)

    assert simulate(program()) == 0.5


def test_a_stopped_evaluation_of_the_last_policy_is_repeated_whole(tmp_path: Path):
    async def program() -> float | None:
        async with bench(tmp_path) as it:
            it.commit(9)
            running = asyncio.create_task(it.evaluation.evaluate(9))
            asked = await it.asked()
            running.cancel()
            await asyncio.sleep(0.01)
            again = asyncio.create_task(it.evaluation.evaluate(9))
            for engine_id, request in [*asked, *(await it.asked())]:
                it.answer(engine_id, request)
            for request in await it.to_score():
                it.score(request, 1.0)
            return await asyncio.wait_for(again, 10.0)

    assert simulate(program()) == 1.0


def test_only_engines_that_hold_the_version_are_asked(tmp_path: Path):
    async def program() -> list[int]:
        async with bench(tmp_path) as it:
            it.commit(8)
            it.commit(9, 1)
            running = asyncio.create_task(it.evaluation.evaluate(9))
            asked = [engine_id for engine_id, _ in await it.asked()]
            running.cancel()
            return asked

    assert simulate(program()) == [1, 1, 1, 1]


def test_it_is_pinned_to_the_version_of_the_engines_that_answer_and_lets_them_go_afterwards(tmp_path: Path):
    """One of two engines is pinned while it swaps to version 2: that is what is evaluated, whatever the other comes to hold meanwhile."""

    async def program() -> list[tuple[int, float]]:
        async with bench(tmp_path, num_prompts=2, every=1) as it:
            it.pins.swapping = {0}
            it.commit(1)
            following = asyncio.create_task(it.evaluation.follow(it.engines.oldest_version))
            assert await it.asked() == []
            assert it.pins.pinned == [0]
            it.pins.swapping = set()
            it.commit(2, 0)
            asked = await it.asked()
            assert [engine_id for engine_id, _ in asked] == [0, 0]
            it.commit(3, 1)
            for engine_id, request in asked:
                it.answer(engine_id, request, versions=(2, 2))
            for request in await it.to_score():
                it.score(request, 1.0)
            await asyncio.sleep(0.01)
            following.cancel()
            assert it.pins.pinned == []
            return it.evaluation.results

    assert simulate(program()) == [(2, 1.0)]
    (line,) = lines(tmp_path)
    assert (line["version"], line["oldest_version"], line["newest_version"]) == (2, 2, 2)


def test_an_engine_for_which_the_trainer_would_wait_is_kept_only_where_there_is_no_other(tmp_path: Path):
    for in_turns, kept in (({0}, [1]), ({0, 1}, [0])):

        async def body(in_turns: set[int] = in_turns, kept: list[int] = kept):
            async with bench(tmp_path, every=1) as it:
                it.evaluation.takes_turns = in_turns.__contains__
                async with it.evaluation._pinned() as (_, engine_ids):
                    assert it.pins.pinned == engine_ids == kept

        simulate(body())


def test_several_answers_to_each_prompt_give_avg_at_n_and_pass_at_k(tmp_path: Path):
    """Prompts with 1 and 3 correct answers of 4: pass@1 = (1/4 + 3/4)/2, pass@2 = (1 - 3/6 + 1)/2, pass@4 = 1."""

    async def program() -> float | None:
        async with bench(tmp_path, num_prompts=2, samples=4) as it:
            return await evaluate(it, [1.0, 0.0, 0.5, 0.0, 1.0, 1.0, 0.0, 1.0])

    assert simulate(program()) == 4.5 / 8
    (line,) = lines(tmp_path)
    assert (line["num_prompts"], line["num_samples"]) == (2, 4)
    assert line["pass_at"] == {"1": 0.5, "2": 0.75, "4": 1.0}


@pytest.mark.parametrize(
    ("moves", "why"), [(False, "nothing moved any more"), (True, "it took longer than evaluation.deadline_s = 700")], ids=["stuck", "slow"]
)
def test_an_evaluation_that_gets_no_answers_is_given_up_with_the_reason_and_is_no_stall(tmp_path: Path, moves: bool, why: str):
    async def program() -> None:
        async with bench(tmp_path) as it:
            running = asyncio.create_task(it.evaluation.evaluate(0))
            while not running.done():
                await asyncio.sleep(10.0)
                if moves:
                    it.engines.watch.moved()
            assert running.result() is None
            assert it.evaluation.results == []
            assert it.ledger.store.read("SELECT count(*) FROM events WHERE kind = 'evaluated'") == [(0,)]

    simulate(program())
    (line,) = [line for line in read_journals(tmp_path) if line["kind"] == "evaluation_dropped"]
    assert (line["version"], line["error"]) == (0, why)


def test_what_goes_wrong_in_an_evaluation_costs_the_run_nothing_else(tmp_path: Path):
    """A prompt that nothing can be asked for: its tokens cannot be encoded."""

    async def program() -> None:
        async with bench(tmp_path, num_prompts=0) as it:
            it.evaluation.prompts = [Prompt(prompt_id="held:0", text="", token_ids=object())]  # type: ignore[arg-type]
            assert await it.evaluation.evaluate(0) is None

    simulate(program())
    (line,) = [line for line in read_journals(tmp_path) if line["kind"] == "evaluation_dropped"]
    assert "Error" in str(line["error"])


def test_what_an_earlier_life_has_evaluated_is_not_evaluated_again(tmp_path: Path):
    async def program() -> list[int]:
        async with bench(tmp_path, num_prompts=1, every=3, done=((0, 0.1), (3, 0.2))) as it:
            it.commit(4)
            following = asyncio.create_task(it.evaluation.follow(it.engines.oldest_version))
            assert await it.asked() == [], "3 is done, and 6 is not yet due"
            assert await evaluate(it, [1.0], version=6) == 1.0
            following.cancel()
            return [version for version, _ in it.evaluation.results]

    assert simulate(program()) == [0, 3, 6]


def test_each_reward_function_is_told_apart_over_the_answers_it_was_applied_to(tmp_path: Path):
    heard: list[dict[str, object]] = []

    async def program() -> None:
        async with bench(tmp_path, num_prompts=3, on_evaluated=heard.append) as it:
            it.commit(0)
            running = asyncio.create_task(it.evaluation.evaluate(0))
            for engine_id, request in await it.asked():
                it.answer(engine_id, request)
            components = ({"right": 1.0, "format": 0.5}, {"right": 0.0}, None)
            for request in await it.to_score():
                given = components[int(request.task.rollout_id.split("/")[1])]
                outcome = Outcome.TIMEOUT if given is None else Outcome.OK
                it.scorer_link.send(
                    Result(
                        request_id=request.request_id,
                        outcome=outcome,
                        rewards=() if given is None else (0.5,),
                        components=() if given is None else (given,),
                    )
                )
            await running

    simulate(program())
    (line,) = lines(tmp_path)
    assert line["components"] == {"right": 0.5, "format": 0.5}
    assert [fields["components"] for fields in heard] == [line["components"]]
