"""An engine process that nobody tells to end: it looks for itself whether the run still has it."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipelinerl.engine import server
from pipelinerl.engine.fake import FakeEngine
from pipelinerl.messages import EngineReady, FromEngine, ToEngine
from pipelinerl.observe.journal import Journal
from pipelinerl.transport.keys import make_keys
from pipelinerl.transport.zmq import ZmqHub, ZmqLink
from tests.keys import PEERS
from tests.orphans import announced_and_ended


def test_an_engine_ends_where_the_orchestrator_is_silent_and_the_run_has_gone_on_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "SILENT_S", 0.5)
    make_keys(tmp_path, PEERS)
    hub, link = ZmqHub(tmp_path, "engine", accepts=FromEngine), ZmqLink(tmp_path, "engine", 0, accepts=ToEngine)
    engine, journal = FakeEngine(max_model_tokens=64, max_running=4), Journal(tmp_path, "engine-0")
    ready = announced_and_ended(
        hub,
        lambda is_awaited: server.serve(engine, engine_id=0, link=link, journal=journal, request_id=7, is_awaited=is_awaited),
    )
    assert isinstance(ready, EngineReady)
    assert ready.request_id == 7
