"""The process reward model's process: chunks in, step scores out, over a real connection, around the engine made by hand."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.config import PrmSection
from pipelinerl.messages import Cancel, FromScorer, Outcome, PrmLoad, PrmReady, StepsScored, Stop, ToScorer, TraceTokens
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.lines import read_journals
from pipelinerl.rewards.prm.scorer import PrmScorer
from pipelinerl.rewards.prm.server import PrmServer, convention_of
from pipelinerl.transport.base import Link
from pipelinerl.transport.keys import make_keys
from pipelinerl.transport.zmq import ZmqHub, ZmqLink
from tests.keys import PEERS
from tests.orphans import announced_and_ended
from tests.rewards.test_prm import ENDS, POLICY, ByHand, by_words, trace
from tests.sim.memory import MemoryHub

SECTION = PrmSection(convention="sigmoid-head", tag="#", max_steps=50)  # pyright: ignore[reportCallIssue]


def serving(engine: ByHand, link: Link, journal: Journal, **options: Any) -> PrmServer:
    scorer = PrmScorer(engine, convention=convention_of(SECTION), version="v1")
    return PrmServer(scorer, SECTION, decode=by_words, link=link, journal=journal, prm_id=1, **options)


def tokens(rollout_id: str, start: int, token_ids: list[int], *, is_last: bool = False, attempt: int = 1) -> TraceTokens:
    ids, prompt = np.array(token_ids, np.int32), None if start else np.array([6], np.int32)
    return TraceTokens(rollout_id=rollout_id, attempt=attempt, start=start, token_ids=ids, is_last=is_last, prompt_token_ids=prompt)


class Asked:
    """A hub, and the server in a thread at the other end."""

    def __init__(self, folder: Path, engine: ByHand) -> None:
        make_keys(folder, PEERS)
        self._hub = ZmqHub(folder, "scorer", accepts=FromScorer)
        self._arrived: list[Any] = []
        link = ZmqLink(folder, "scorer", 1, accepts=ToScorer)
        self._link = link
        self._journal = Journal(folder, "scorer-1")
        self._thread = threading.Thread(target=serving(engine, link, self._journal).run)
        self._thread.start()

    def send(self, rollout_id: str, start: int, token_ids: list[int], *, is_last: bool = False, attempt: int = 1) -> None:
        self._hub.send("scorer-1", tokens(rollout_id, start, token_ids, is_last=is_last, attempt=attempt))

    def tell(self, message: Cancel | Stop) -> None:
        self._hub.send("scorer-1", message)

    async def next(self, kind: type[Any]) -> Any:
        async with asyncio.timeout(30):
            while True:
                for index, message in enumerate(self._arrived):
                    if isinstance(message, kind):
                        return self._arrived.pop(index)
                self._arrived += [message for _, message in await self._hub.receive()]

    async def close(self) -> None:
        self.tell(Stop(reason="the test is over"))
        await asyncio.to_thread(self._thread.join, 10)
        self._link.close()
        self._journal.close()
        self._hub.close()


def with_server(folder: Path, engine: ByHand, program: Any) -> None:
    async def main() -> None:
        asked = Asked(folder, engine)
        try:
            await asked.next(PrmReady)
            await program(asked)
        finally:
            await asked.close()

    asyncio.run(main())


def whole_scores() -> list[float]:
    """From the whole trace at once, under a fresh engine; prompt "end", as the policy's token 5 says."""
    engine = ByHand()
    whole = trace(engine, prompt="end")
    whole.feed(POLICY, is_last=True)
    return [score.score or 0.0 for score in PrmScorer(engine, convention=convention_of(SECTION), version="v1").score([whole])]


def test_chunks_give_the_scores_of_the_whole_and_every_token_is_answered_for(tmp_path: Path) -> None:
    async def program(asked: Asked) -> None:
        found: list[StepsScored] = []
        for start in range(0, len(POLICY), 2):
            chunk = POLICY[start : start + 2]
            asked.send("r", start, chunk, is_last=start + 2 >= len(POLICY))
            found.append(await asked.next(StepsScored))
            assert found[-1].num_taken == start + len(chunk)
            assert found[-1].first == sum(len(one.ends) for one in found[:-1])
        assert np.concatenate([one.ends for one in found]).tolist() == ENDS
        assert np.concatenate([one.scores for one in found]) == pytest.approx(whole_scores())
        assert [one.is_last for one in found] == [False, False, False, True]
        load = await asked.next(PrmLoad)
        while load.num_trace_tokens < len(POLICY):
            load = await asked.next(PrmLoad)
        assert (load.num_traces, load.num_steps) == (0, len(ENDS))
        assert load.num_batches == sum(len(one.ends) > 0 for one in found), "chunks in which no step ends are none"
        assert load.num_computed < load.num_uncached_tokens

    with_server(tmp_path, ByHand(), program)


def test_the_last_gauges_are_written_when_it_is_told_to_stop(tmp_path: Path) -> None:
    """A run may be over within the second that lies between two of them."""

    async def program(asked: Asked) -> None:
        asked.send("r", 0, POLICY, is_last=True)
        await asked.next(StepsScored)

    with_server(tmp_path, ByHand(), program)
    loads = [line for line in read_journals(tmp_path) if line["kind"] == "load"]
    assert (loads[-1]["num_steps"], loads[-1]["num_trace_tokens"]) == (len(ENDS), len(POLICY))


def test_traces_that_came_meanwhile_go_through_the_model_as_one_batch(tmp_path: Path) -> None:
    """Over the transport in memory, where what was sent is there at once: six traces, and the end, come while the first is scored."""

    async def main() -> None:
        engine, hub = ByHand(), MemoryHub(accepts=FromScorer)
        rows = engine.rows

        def slow(requests: Any, **options: Any) -> Any:
            if not engine.batches:
                for name in "123456":
                    hub.send("scorer-1", tokens(name, 0, POLICY, is_last=True))
                hub.send("scorer-1", Stop(reason="the test is over"))
            return rows(requests, **options)

        engine.rows = slow
        link = hub.connect("scorer-1", accepts=ToScorer)
        hub.send("scorer-1", tokens("0", 0, POLICY, is_last=True))
        with contextlib.closing(Journal(tmp_path, "scorer-1")) as journal:
            serving(engine, link, journal).run()
        answers = [message for _, message in await hub.receive() if isinstance(message, StepsScored)]
        hub.close()
        assert sorted(one.rollout_id for one in answers) == list("0123456")
        assert all(one.scores == pytest.approx(whole_scores()) for one in answers)
        assert engine.batches[:2] == [1, 6]

    asyncio.run(main())


def test_a_trace_begun_anew_or_withdrawn_starts_from_nothing(tmp_path: Path) -> None:
    async def program(asked: Asked) -> None:
        asked.send("r", 0, POLICY[:4])
        await asked.next(StepsScored)
        asked.send("r", 0, POLICY, is_last=True, attempt=2)
        again = await asked.next(StepsScored)
        assert (again.attempt, again.first, again.ends.tolist()) == (2, 0, ENDS)
        asked.send("s", 0, POLICY[:4])
        assert (await asked.next(StepsScored)).ends.tolist() == ENDS[:1]
        asked.tell(Cancel(rollout_id="s", attempt=1))
        asked.send("s", 4, POLICY[4:], is_last=True)
        asked.send("t", 0, POLICY, is_last=True)
        assert (await asked.next(StepsScored)).rollout_id == "t", "nobody answers for s any more"

    with_server(tmp_path, ByHand(), program)


def test_a_trace_longer_than_the_model_takes_is_invalid_and_says_so(tmp_path: Path) -> None:
    async def program(asked: Asked) -> None:
        asked.send("r", 0, POLICY, is_last=True)
        answer = await asked.next(StepsScored)
        assert answer.outcome is Outcome.INVALID
        assert "the process reward model takes 30" in answer.error
        assert answer.ends.tolist() == ENDS[:2], "the tag of the second is its thirtieth token"

    with_server(tmp_path, ByHand(max_tokens=30), program)


def test_a_batch_that_hangs_ends_the_process_by_a_signal_so_that_it_is_started_again() -> None:
    hang = "from pipelinerl.rewards.prm.process import killed_after; import time\nwith killed_after(0.2, 'scorer-1'): time.sleep(60)"
    ended = subprocess.run([sys.executable, "-c", hang], capture_output=True, text=True, check=False, timeout=50)
    assert ended.returncode == -9
    assert "prm.deadline_s" in ended.stderr


def test_a_process_ends_where_the_orchestrator_is_silent_and_the_run_has_gone_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelinerl.rewards.prm.server.SILENT_S", 0.5)
    make_keys(tmp_path, PEERS)
    hub, link = ZmqHub(tmp_path, "scorer", accepts=FromScorer), ZmqLink(tmp_path, "scorer", 1, accepts=ToScorer)
    journal = Journal(tmp_path, "scorer-1")
    ready = announced_and_ended(hub, lambda is_awaited: serving(ByHand(), link, journal, request_id=7, is_awaited=is_awaited).run())
    link.close()
    journal.close()
    assert isinstance(ready, PrmReady)
    assert ready.request_id == 7
