"""One completion of whichever engine is least busy, for parts that keep no account of rollouts."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from orchestrator.peers.engines import Engines
from orchestrator.rules.validation.violations import Violation
from pipelinerl.messages import Completion, Generate


async def answer_of(
    engines: Engines, request: Generate, *, refused: Callable[[int, Violation], Exception | None] = lambda engine_id, violation: None
) -> Completion | None:
    """Ask an engine, once one takes work; None where it was lost before it answered, or where its answer is impossible.

    `refused` may make an error of an impossible answer, which is then raised.
    """
    while (engine_id := engines.least_busy(lambda version: True)) is None:
        await engines.changed.wait()
    answer: asyncio.Future[Completion | None] = asyncio.get_running_loop().create_future()

    def settle(completion: Completion | None) -> None:
        if not answer.done():
            answer.set_result(completion)

    def refuse(engine_id: int, violation: Violation) -> None:
        if (error := refused(engine_id, violation)) is None:
            settle(None)
        elif not answer.done():
            answer.set_exception(error)

    engines.requests.ask(request, engine_id, sink=lambda said, _: settle(said), lost=lambda _: settle(None), refused=refuse)
    return await answer
