"""A flood of connections without a key, more than the process may open files: peers are served, and the process still opens its own."""

from __future__ import annotations

import contextlib
import selectors
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pipelinerl.messages import Cancel, Stop, ToEngine
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.process import allow_open_files
from pipelinerl.transport.keys import make_keys
from pipelinerl.transport.zmq import ZmqLink
from tests.contract.wires import PATIENCE_S, load
from tests.keys import PEERS

MAX_OPEN = 256
NUM_AT_ONCE, NUM_RENEWED = 400, 2000
SERVER = f"""
import asyncio, os, resource, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_NOFILE, ({MAX_OPEN}, {MAX_OPEN}))
from pipelinerl.messages import Cancel, FromEngine
from pipelinerl.observe.journal import Journal
from pipelinerl.transport.zmq import ZmqHub

async def serve(folder):
    hub, journal, failed = ZmqHub(folder, "engine", accepts=FromEngine), Journal(folder, "orchestrator", segment_bytes=1), 0
    while True:
        for peer, message in await hub.receive():
            journal.write("answer", number=message.num_tokens)  # each opens another segment; none of this kind is thinned out
            try:
                for descriptor in [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]:
                    os.close(descriptor)
            except OSError:
                failed += 1
            hub.send(peer, Cancel(rollout_id=str(message.num_tokens), attempt=failed))

asyncio.run(serve(Path(sys.argv[1])))
"""
"""Answers each of an engine's gauges with their number, and how often it could not open files of its own so far."""


class Flood:
    """Connections that say nothing, each renewed as soon as it is closed over there."""

    def __init__(self, port: int) -> None:
        self.num_made = 0
        self._port = port
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> Flood:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for _ in range(NUM_AT_ONCE):
                self._connect(selector)
            while not self._is_over.is_set():
                for key, _ in selector.select(timeout=0.05):
                    assert isinstance(key.fileobj, socket.socket)
                    with contextlib.suppress(OSError):
                        if key.fileobj.recv(1 << 16):  # the greeting, which nobody answers
                            continue
                    selector.unregister(key.fileobj)
                    key.fileobj.close()
                    self._connect(selector)
            for key in list(selector.get_map().values()):
                assert isinstance(key.fileobj, socket.socket)
                key.fileobj.close()

    def _connect(self, selector: selectors.BaseSelector) -> None:
        stranger = socket.socket()
        stranger.setblocking(False)
        stranger.connect_ex(("127.0.0.1", self._port))
        selector.register(stranger, selectors.EVENT_READ)
        self.num_made += 1


def answer(link: ZmqLink, number: int) -> Cancel:
    link.send(load(number))
    end = time.monotonic() + PATIENCE_S
    while not isinstance(message := link.receive(1.0), Cancel):
        assert not isinstance(message, Stop)
        assert time.monotonic() < end, f"{link.name} is not served"
    return message


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_strangers_take_no_descriptor_that_peers_or_files_need(tmp_path: Path):
    allow_open_files()  # of this process, which holds their other ends
    make_keys(tmp_path, PEERS)
    server = subprocess.Popen([sys.executable, "-c", SERVER, str(tmp_path)])
    try:
        inside = ZmqLink(tmp_path, "engine", 0, accepts=ToEngine)
        assert answer(inside, 0) == Cancel(rollout_id="0", attempt=0)
        port = int((tmp_path / "endpoints" / "engine.json").read_text().partition("127.0.0.1:")[2].partition('"')[0])
        number, newcomers, answered = 0, [], None
        with Flood(port) as flood:
            while flood.num_made < NUM_RENEWED or number < 100:
                number += 1
                answered = answer(inside, number)
                assert answered.rollout_id == str(number)
                if flood.num_made > NUM_AT_ONCE and not newcomers:
                    newcomers.append(ZmqLink(tmp_path, "engine", 1, accepts=ToEngine))
            assert answer(newcomers[0], 0).rollout_id == "0"
        assert answered is not None
        # Strangers that come faster than they are shut out may hold all there are for a moment, which a journal outlives.
        assert answered.attempt <= number // 4, f"{answered.attempt} of {number} times it could not open a file"
        for link in (inside, *newcomers):
            link.close()
        assert server.poll() is None
    finally:
        server.kill()
        server.wait()
    assert sorted(line["number"] for line in read_journals(tmp_path)) == sorted([0, *range(number + 1)])
