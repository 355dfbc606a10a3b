"""What a server of clients does about a request that trainers die of, and about a ledger that is full; no process, no model."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.messages import ForwardBackward, SaveModel
from pipelinerl.tinker.dispatch import MAX_LOSSES
from tests.tinker.test_exactly_once import CountingTrainer, World, gradient
from tests.tinker.wiring import MODEL

DEADLY = 19
"""A datum of this token ends the trainer that it is handed to."""


class FatedTrainer(CountingTrainer):
    """Dies of one datum, and saves nothing while it is told to wait."""

    def __init__(self, chance: random.Random) -> None:
        super().__init__(chance)
        self.died = asyncio.Event()
        self.may_save = asyncio.Event()
        self.may_save.set()
        self.num_saves = 0

    async def _work(self) -> None:
        while True:
            request, answer = await self._asked.get()
            if isinstance(request, ForwardBackward) and DEADLY in request.token_ids:
                self.died.set()
                await asyncio.Event().wait()
            if isinstance(request, SaveModel):
                await self.may_save.wait()
                self.num_saves += 1
            if not answer.done():
                answer.set_result(self._carry_out(request))


async def open_model(world: World, number: int) -> str:
    session = await world.post("create_session", json={})
    assert session is not None
    said = {"session_id": session.json()["session_id"], "model_seq_id": number, "base_model": MODEL}
    return (await world.asked("create_model", json=said))["model_id"]


def played(test: Callable[[World], Awaitable[None]], folder: Path, monkeypatch: pytest.MonkeyPatch, **options: int) -> None:
    async def whole() -> None:
        monkeypatch.setattr("tests.tinker.test_exactly_once.CountingTrainer", FatedTrainer)
        world = World(folder, random.Random(0), **options)
        await test(world)
        world.server.kill()
        world.trainer.kill()

    asyncio.run(asyncio.wait_for(whole(), 30.0))


def test_a_request_that_trainers_die_of_is_answered_so_and_handed_to_none_any_more(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(world: World) -> None:
        deadly, other = await open_model(world, 0), await open_model(world, 0)
        first = await world.asked("forward_backward", content=gradient(other, 1, 3))
        assert first.metrics["loss:sum"] == 3
        condemned = asyncio.ensure_future(world.asked("forward_backward", content=gradient(deadly, 1, DEADLY)))
        num_died = 0
        while not condemned.done():
            died = asyncio.ensure_future(_died(world))
            await asyncio.wait({died, condemned}, return_when=asyncio.FIRST_COMPLETED)
            if died.done() and not condemned.done():
                num_died += 1
                world.kill("trainer")
            died.cancel()
        answer: Any = await condemned
        assert (num_died, answer["category"]) == (MAX_LOSSES, "server")
        assert answer["error"] == f"not carried out: {MAX_LOSSES} trainers were lost with this request, and answered nothing"
        for what in ("trainer", "server"):
            world.kill(what)
            for model_id, expected in ((deadly, 5), (other, 8)):
                seq_id = 2 if what == "trainer" else 3
                said = await world.asked("forward_backward", content=gradient(model_id, seq_id, 5))
                assert said.metrics["loss:sum"] == expected + (5 if what == "server" else 0), "what it gave before is there once"
        assert not _trainer(world).died.is_set()

    played(test, tmp_path, monkeypatch, checkpoint_every=1000, max_held_bytes=1 << 20)


def test_a_ledger_that_is_half_full_is_covered_by_checkpoints_and_a_full_one_takes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    size, limit = len(gradient("m" * 8, 1, 3)), 20

    async def test(world: World) -> None:
        model_id = await open_model(world, 0)
        _trainer(world).may_save.clear()
        taken, refused = 0, None
        while refused is None:
            reply = await world.post("forward_backward", content=gradient(model_id, taken + 1, 3))
            assert reply is not None
            if reply.status_code == 429:
                refused = reply
            else:
                taken += 1
        held, room = world.server.ledger.num_held_bytes, limit * size
        assert room <= held < room + 2 * size
        words = (
            f"{held:,} bytes of requests are held until a checkpoint covers them, as many as may (tinker.max_held_bytes): try again later"
        )
        assert words in refused.text
        assert refused.headers["retry-after"] == "1"
        assert _trainer(world).num_saves == 0, "it is being asked for one"
        _trainer(world).may_save.set()
        said = await world.asked("forward_backward", content=gradient(model_id, taken + 1, 3))
        assert said.metrics["loss:sum"] == 3 * (taken + 1), "each that was taken is in the weights, and none twice"
        assert world.server.ledger.num_held_bytes < room / 2
        assert _trainer(world).num_saves > 0

    played(test, tmp_path, monkeypatch, checkpoint_every=1000, max_held_bytes=limit * size)


async def _died(world: World) -> None:
    await _trainer(world).died.wait()


def _trainer(world: World) -> FatedTrainer:
    assert isinstance(world.trainer, FatedTrainer)
    return world.trainer
