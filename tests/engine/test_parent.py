"""The parent of a machine's engines, with real processes of the engine without a model."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path

from pipelinerl.config_file import parse
from pipelinerl.messages import EngineReady, FromEngine, Stop
from pipelinerl.transport.curve import make_keys
from pipelinerl.transport.zmq import ZmqHub
from tests import processes

PARENT = """
    import sys
    from pipelinerl.engine import __main__ as parent
    parent.REJOIN_AFTER_S = 0.5
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
    tree = {"model": {"path": "m", "max_tokens": 64}, "data": {"source": "d"}, "reward": [{"function": "a:b"}]}
    config = parse(tree | {"engine": {"kind": "fake", "count": 2}}, origin="a test")
    (tmp_path / "config.json").write_text(config.model_dump_json())

    async def program(parent: subprocess.Popen[bytes]) -> None:
        hub = ZmqHub(tmp_path, "engine", accepts=FromEngine)
        first = await ready(hub, {"engine-0", "engine-1"})
        hub.send("engine-0", Stop(reason="by one that dies before it tells the other"))
        again = await ready(hub, {"engine-0"})
        assert again["engine-0"] != first["engine-0"]
        for peer in first:
            hub.send(peer, Stop(reason="finished"))
        assert await asyncio.to_thread(parent.wait, processes.PATIENCE_S) == 0, "all were told: the parent ends, too"
        hub.close()

    with subprocess.Popen(processes.program(PARENT, folder=tmp_path)) as parent:
        try:
            asyncio.run(program(parent))
        finally:
            parent.kill()
