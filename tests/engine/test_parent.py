"""The parent of a machine's engines, with real processes of the engine without a model."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.file import parse, write_run
from pipelinerl.engine.__main__ import _run_engine
from pipelinerl.messages import EngineReady, FromEngine, Stop
from pipelinerl.transport.keys import make_keys
from pipelinerl.transport.zmq import ZmqHub
from tests import processes

pytestmark = pytest.mark.process

SETTINGS = {"model": {"path": "m", "max_tokens": 64}, "data": {"source": "d"}, "reward": [{"function": "a:b"}]}
PARENT = """
    import signal, sys
    from pipelinerl.engine import __main__ as parent
    from pipelinerl.runtime import restarts
    restarts.REJOIN_AFTER_S = 0.5
    signal.signal(signal.SIGUSR1, lambda *_: setattr(restarts, "REJOIN_AFTER_S", 60.0))
    sys.argv = ["engine", "--run-folder", folder]
    parent.main()
"""


async def ready(hub: ZmqHub, expected: set[str]) -> dict[str, int]:
    """The process ids of engines, once all of them have said that they are ready."""
    found: dict[str, int] = {}
    async with asyncio.timeout(processes.PATIENCE_S):
        while found.keys() != expected:
            found |= {peer: message.process_id for peer, message in await hub.receive() if isinstance(message, EngineReady)}
    return found


def test_an_engine_that_was_told_to_end_while_another_lives_on_is_forked_again(tmp_path: Path):
    make_keys(tmp_path, ("engine-0", "engine-1"))
    config = parse(SETTINGS | {"engine": {"kind": "fake", "count": 2}}, origin="a test")
    write_run(tmp_path, config)

    async def program(parent: subprocess.Popen[bytes]) -> None:
        hub = ZmqHub(tmp_path, "engine", accepts=FromEngine)
        first = await ready(hub, {"engine-0", "engine-1"})
        hub.send("engine-0", Stop(reason="by one that dies before it tells the other"))
        again = await ready(hub, {"engine-0"})
        assert again["engine-0"] != first["engine-0"]
        parent.send_signal(signal.SIGUSR1)  # the end of one may follow that of the other late, and neither is to come again
        for peer in first:
            hub.send(peer, Stop(reason="finished"))
        assert await asyncio.to_thread(parent.wait, processes.PATIENCE_S) == 0, "all were told: the parent ends, too"
        hub.close()

    with subprocess.Popen(processes.program(PARENT, folder=tmp_path)) as parent:
        try:
            asyncio.run(program(parent))
        finally:
            parent.kill()


class _Built(Exception):
    """An engine was about to load its model."""


@pytest.mark.parametrize(
    ("sections", "expected"),
    [
        ({"pipeline": {"placement": "colocated"}, "engine": {"count": 3, "apart": 1}}, [(True, True), (True, True), (False, True)]),
        ({"engine": {"count": 2}}, [(False, False), (False, False)]),
    ],
)
def test_only_engines_that_take_turns_share_their_device_and_all_beside_them_read_sections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sections: dict[str, Any], expected: list[tuple[bool, bool]]
):
    told: list[tuple[bool, bool]] = []

    def engine(**given: Any) -> None:
        told.append((given["is_colocated"], given["in_sections"]))
        raise _Built

    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "lo")  # else an engine on a machine with GPUs waits for an orchestrator
    monkeypatch.setitem(sys.modules, "pipelinerl.engine.vllm.engine", types.SimpleNamespace(VllmEngine=engine))
    config = parse(SETTINGS | sections, origin="a test")
    for engine_id in range(config.engine.count):
        with pytest.raises(_Built):
            _run_engine(engine_id, config, tmp_path, request_id=0, wait_s=None, is_awaited=lambda: True)
    assert told == expected


KILLED = """
    import os, sys
    from pathlib import Path
    from pipelinerl.engine import __main__ as parent
    def run(engine_id, config, run_folder, *, request_id, wait_s, is_awaited):
        if wait_s is None:
            raise SystemExit(-9)
        Path(run_folder, "again").write_text(str(os.getpid()) + chr(10))
    parent._run_engine = run
    sys.argv = ["engine", "--run-folder", folder]
    parent.main()
"""


def test_an_engine_that_lost_a_rank_to_a_signal_ends_by_it_and_is_forked_again(tmp_path: Path):
    config = parse(SETTINGS | {"engine": {"kind": "fake"}, "run": {"restart_wait_s": 0.01}}, origin="a test")
    write_run(tmp_path, config)
    ended = subprocess.run(processes.program(KILLED, folder=tmp_path), capture_output=True, text=True, check=True)
    assert "engine-0 (process " in ended.stderr
    assert "was killed by SIGKILL" in ended.stderr
    assert processes.read_when_written(tmp_path / "again")
