"""Waits have names and deadlines, and a run that stands still ends with the reason; on simulated time."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from pipelinerl.errors import PeerSilent, Stalled
from pipelinerl.runtime.watch import Watch, wait_for, wait_for_file
from tests.sim.clock import simulate


def test_a_wait_within_its_deadline_returns_what_was_awaited():
    async def program() -> str:
        return await wait_for(asyncio.sleep(4.9, "here"), peer="engine 3", what="to answer", deadline_s=5.0)

    assert simulate(program()) == "here"


def test_a_wait_past_its_deadline_names_peer_purpose_and_seconds():
    async def program() -> None:
        await wait_for(asyncio.sleep(7.6), peer="engine 3", what="to acknowledge policy 18", deadline_s=7.5)

    with pytest.raises(PeerSilent, match=r"^waited 7.5 s for engine 3 to acknowledge policy 18$"):
        simulate(program())


def test_cancellation_passes_through_a_wait():
    async def program() -> None:
        waiting = asyncio.create_task(wait_for(asyncio.sleep(100), peer="engine 3", what="to answer", deadline_s=50.0))
        await asyncio.sleep(1.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert asyncio.get_running_loop().time() == pytest.approx(1.0)

    simulate(program())


def test_nothing_moved_for_the_limit_is_stalled_and_every_wait_is_named():
    async def program() -> None:
        watch = Watch(stall_limit_s=8.0)
        with watch.waiting("scoring", "room in a scorer"):
            await asyncio.sleep(1.0)
            with watch.waiting("generation", "an admission credit"):
                await watch.run()

    with pytest.raises(Stalled) as stalled:
        simulate(program())
    lines = str(stalled.value).splitlines()
    assert lines[0] == "nothing moved for 8 s"
    assert lines[1:3] == ["  scoring waits for room in a scorer since 9 s", "  generation waits for an admission credit since 8 s"]
    assert "test_watch.py" in str(stalled.value), "the stacks are part of the verdict"


def test_the_verdict_includes_what_stages_have_to_say_for_themselves():
    """For those that wait for a peer without a wait of their own; who has nothing to say says None."""

    async def program() -> None:
        watch = Watch(stall_limit_s=8.0)
        watch.explain(lambda: None)
        watch.explain(lambda: "delivery holds 3 rows of step 7")
        await watch.run()

    with pytest.raises(Stalled, match=r"^nothing moved for 8 s\n  delivery holds 3 rows of step 7\n"):
        simulate(program())


def test_progress_postpones_the_verdict():
    async def program() -> float:
        watch = Watch(stall_limit_s=8.0)

        async def work() -> None:
            for _ in range(5):
                await asyncio.sleep(7.0)
                watch.moved()

        working = asyncio.create_task(work())
        with pytest.raises(Stalled):
            await watch.run()
        await working
        return asyncio.get_running_loop().time()

    assert 35.0 + 8.0 <= simulate(program()) <= 35.0 + 8.0 + 2 * 8.0 / 4


def test_nobody_is_to_blame_while_a_script_does_work_of_its_own():
    async def program() -> float:
        watch = Watch(stall_limit_s=8.0)
        watch.is_idle = lambda: asyncio.get_running_loop().time() < 100.0
        with pytest.raises(Stalled):
            await watch.run()
        return asyncio.get_running_loop().time()

    assert 108.0 - 8.0 / 16 <= simulate(program()) <= 108.0 + 8.0 / 8


def test_a_stall_with_nobody_waiting_says_so():
    with pytest.raises(Stalled, match="no stage is waiting"):
        simulate(Watch(stall_limit_s=1.0).run())


def test_a_file_that_is_there_is_read(tmp_path: Path):
    (tmp_path / "endpoint").write_text("tcp://here")
    assert wait_for_file(tmp_path / "endpoint", peer="orchestrator", deadline_s=0.0) == "tcp://here"


def test_a_file_that_never_comes_names_its_writer_and_its_path(tmp_path: Path):
    started = time.monotonic()
    with pytest.raises(PeerSilent, match=r"waited 0.1 s for orchestrator to write .*endpoint: is it running"):
        wait_for_file(tmp_path / "endpoint", peer="orchestrator", deadline_s=0.1)
    assert time.monotonic() - started >= 0.1
