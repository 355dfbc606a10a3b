"""Staging keeps to a share of a core that decoding needs, and has the core for itself while no sequence runs."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pipelinerl.engine import server, staging
from pipelinerl.engine.fake import FakeEngine
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.engine.staging import StagingThread
from pipelinerl.messages import Message, StageWeights, Stop
from pipelinerl.observe.journal import Journal
from pipelinerl.weights.throttle import throttle

ORDER = StageWeights(version=1, buffer="buffer-1", digest="digest")


class Slow(FakeEngine):
    """Staging that rests whenever it may have to."""

    def stage(self, order: StageWeights) -> None:
        for _ in range(20):
            sum(range(20_000))
            throttle()
        super().stage(order)


@pytest.fixture(autouse=True)
def one_core(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Decoding has no other core, and a share of next to nothing would have staging rest for hours."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(cores)})
    monkeypatch.setattr(staging, "SHARE", 1e-7)
    yield
    os.sched_setaffinity(0, cores)


def _engine() -> Slow:
    return Slow(max_model_tokens=64, max_running=4)


def test_staging_rests_while_decoding_may_want_the_core_and_not_while_that_rests():
    with StagingThread(_engine()) as stager:
        staged = stager(ORDER)
        assert not staged.done()
        with stager.while_decoding_rests():
            staged.result(60)


def test_an_engine_that_waits_for_messages_lets_staging_have_the_core(tmp_path: Path):
    engine = _engine()
    with StagingThread(engine) as stager:
        staged = stager(ORDER)

        class Link:
            """Nothing arrives until the policy is staged."""

            def receive(self, timeout_s: float) -> Message:
                staged.result(60)
                return Stop(reason="")

        loop = EngineLoop(engine, engine_id=0, stager=stager)
        journal = Journal(tmp_path, "engine-0")
        waiting = server._Server(loop, stager=stager, engine_id=0, link=Link(), journal=journal, tells_sequences=False)  # pyright: ignore[reportArgumentType]
        assert not waiting._take_messages()
        journal.close()
