"""A server whose orchestrator falls silent: it goes on while the run still has it, and ends where it has not."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

from pipelinerl.messages import Message
from pipelinerl.transport.zmq import ZmqHub


def announced_and_ended(hub: ZmqHub, serve: Callable[[Callable[[], bool]], None]) -> Message:
    """Run `serve(is_awaited)` in a thread; return what it announced, once it has ended because nobody awaits it any more."""
    looked, is_own = threading.Event(), threading.Event()
    is_own.set()

    def is_awaited() -> bool:
        looked.set()
        return is_own.is_set()

    thread = threading.Thread(target=serve, args=(is_awaited,))
    thread.start()
    try:
        (_, ready), *_ = asyncio.run(asyncio.wait_for(hub.receive(), 30))
        assert not looked.is_set(), "an orchestrator that speaks is asked instead"
        hub.close()
        assert looked.wait(30)
        thread.join(1.5)
        assert thread.is_alive(), "the run still has it, and its orchestrator may come again"
        is_own.clear()
        thread.join(30)
        assert not thread.is_alive()
    finally:
        is_own.clear()
        hub.close()
        thread.join(30)
    return ready
