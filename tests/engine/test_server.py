"""An engine process that nobody tells to end: it looks for itself whether the run still has it."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from pipelinerl.engine import server
from pipelinerl.engine.fake import FakeEngine
from pipelinerl.messages import EngineReady, FromEngine, ToEngine
from pipelinerl.observe.journal import Journal
from pipelinerl.transport.keys import make_keys
from pipelinerl.transport.zmq import ZmqHub, ZmqLink
from tests.keys import PEERS


def test_an_engine_ends_where_the_orchestrator_is_silent_and_the_run_has_gone_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SILENT_S", 0.5)
    make_keys(tmp_path, PEERS)
    hub = ZmqHub(tmp_path, "engine", accepts=FromEngine)
    link, is_own, looked = ZmqLink(tmp_path, "engine", 0, accepts=ToEngine), threading.Event(), threading.Event()
    is_own.set()

    def is_awaited() -> bool:
        looked.set()
        return is_own.is_set()

    engine, journal = FakeEngine(max_model_tokens=64, max_running=4), Journal(tmp_path, "engine-0")
    given = {"engine_id": 0, "link": link, "journal": journal, "request_id": 7, "is_awaited": is_awaited}
    thread = threading.Thread(target=server.serve, args=(engine,), kwargs=given)
    thread.start()
    try:
        ((peer, ready),) = asyncio.run(asyncio.wait_for(hub.receive(), 30))
        assert isinstance(ready, EngineReady)
        assert (peer, ready.request_id) == ("engine-0", 7)
        assert not looked.is_set(), "an orchestrator that speaks is asked instead"
        hub.close()
        assert looked.wait(30)
        thread.join(1.0)
        assert thread.is_alive(), "the run still has it, and its orchestrator may come again"
        is_own.clear()
        thread.join(30)
        assert not thread.is_alive()
    finally:
        is_own.clear()
        hub.close()
        thread.join(30)
