"""One engine process: messages in, forward passes, messages out.

While sequences run it looks for messages between passes and never waits; with none it sleeps on the connection. Staging runs in a
thread, so decoding goes on meanwhile.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable

from pipelinerl.engine.base import Engine
from pipelinerl.engine.loop import EngineLoop
from pipelinerl.engine.staging import StagingThread
from pipelinerl.engine.stop_strings import Finder
from pipelinerl.messages import Failed, Message, Stop
from pipelinerl.observe.journal import Journal
from pipelinerl.transport.base import Link

LOAD_EVERY_S = 1.0
"""Seconds between two reports of the gauges, which are also the sign of life."""
IDLE_WAIT_S = 0.25
"""Longest sleep on the connection with no sequence running; shorter wakes for nothing, longer delays the gauges."""
STAGING_WAIT_S = 0.001
"""Longest sleep while a version is being staged and no sequence runs: its commit may be noticed so late."""

SILENT_S = 30.0
"""Silence of the orchestrator after which an engine looks whether it is still one of the run's. Longer leaves a device in the hands of one
that is not.
"""


def serve(
    engine: Engine,
    *,
    engine_id: int,
    link: Link,
    journal: Journal,
    finder: Finder | None = None,
    tells_sequences: bool = False,
    request_id: int = 0,
    is_awaited: Callable[[], bool] = lambda: True,
) -> None:
    """Serve until told to stop. Any error is sent to the orchestrator as `Failed`, then raised.

    `tells_sequences` says in each report what the engine has, and what of it waits for room. `request_id`: see `EngineReady`. Where the
    orchestrator is silent, and `is_awaited()` is false, the run has gone on without this engine, and nobody will tell it so.
    """
    with StagingThread(engine) as stager:
        loop = EngineLoop(engine, engine_id=engine_id, stager=stager, finder=finder)
        for choice in engine.limits.choices:
            print(f"engine-{engine_id}: {choice}", flush=True)
            journal.write("choice", text=choice)
        try:
            link.introduce(lambda kept: [loop.introduce(kept, process_id=os.getpid(), request_id=request_id)])
            server = _Server(loop, stager=stager, engine_id=engine_id, link=link, journal=journal, tells_sequences=tells_sequences)
            server.run(is_awaited)
        except Exception as error:  # the process boundary: the orchestrator hears why before the process ends
            link.send(Failed(error=f"{type(error).__name__}: {error}"))
            raise
        finally:
            link.close()
            journal.close()


class _Server:
    def __init__(
        self, loop: EngineLoop, *, stager: StagingThread, engine_id: int, link: Link, journal: Journal, tells_sequences: bool
    ) -> None:
        self._loop = loop
        self._tells_sequences = tells_sequences
        self._stager = stager
        self._lane = f"engine-{engine_id}"
        self._link = link
        self._journal = journal
        self._idle_s = 0.0
        self._next_load = time.monotonic()

    def run(self, is_awaited: Callable[[], bool]) -> None:
        while self._take_messages() and (self._link.silent_s < SILENT_S or is_awaited()):
            started = time.time()
            had_work = self._loop.has_work
            self._loop.advance()
            if had_work:
                self._journal.span(self._lane, "forward", start=started, end=time.time())
            self._link.send(*self._loop.outbox)
            self._loop.outbox.clear()
            self._report()

    def _take_messages(self) -> bool:
        """Handle every message there is, waiting only when idle. False once told to stop."""
        message = self._link.receive(0.0) if self._loop.has_work else self._wait()
        while message is not None:
            if isinstance(message, Stop):
                return False
            self._loop.handle(message)
            message = self._link.receive(0.0)
        return True

    def _wait(self) -> Message | None:
        """Sleep on the connection: no sequence runs."""
        before = time.monotonic()
        with self._stager.while_decoding_rests():
            message = self._link.receive(STAGING_WAIT_S if self._loop.is_swapping else IDLE_WAIT_S)
        self._idle_s += time.monotonic() - before
        return message

    def _report(self) -> None:
        now = time.monotonic()
        if now >= self._next_load:
            self._next_load = now + LOAD_EVERY_S
            load = self._loop.load(idle_s=self._idle_s)
            self._link.send(load)
            if self._tells_sequences:
                self._link.send(self._loop.sequences())
            self._journal.write("load", **{field: getattr(load, field) for field in load.__struct_fields__})
