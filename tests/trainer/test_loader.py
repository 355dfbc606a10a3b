"""The loop finds its next row ready; what a rank takes off the wire, the others of its replica get as it came."""

# pyright: reportPossiblyUnboundVariable=false

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.config.layout import Layout
from pipelinerl.errors import DataError
from pipelinerl.messages import FromTrainer, MicroBatch, StepClosed, Stop, TakeMicroBatch, ToTrainer, TrainerReady
from pipelinerl.transport.keys import make_keys
from pipelinerl.transport.zmq import ZmqHub, ZmqLink
from tests.keys import PEERS
from tests.trainer.ranks import run_jobs
from tests.trainer.tiny import make_batch, make_sample
from trainer.data.loader import READY_AHEAD, LoadedRow, RowLoader
from trainer.data.split import split_by_gradient
from trainer.orchestrator_client import OrchestratorClient
from trainer.parallel.replicas import Replicas
from trainer.rows.packed_row import PackedRow

NUM_ROWS = 6


def _row(index: int) -> MicroBatch:
    return make_batch([make_sample(np.random.default_rng(index), prompt=2, completion=3 + index)], index=index)


async def _serve(hub: ZmqHub, *, until: Callable[[], bool], log: list[int]) -> None:
    """Answer every pull of one step of `NUM_ROWS` rows."""
    while not until():
        for peer, message in await hub.receive():
            if isinstance(message, TakeMicroBatch):
                log.append(message.index)
                seal = StepClosed(step=0, num_micro_batches=NUM_ROWS, num_tokens=1, num_samples=1)
                hub.send(peer, _row(message.index) if message.index < NUM_ROWS else seal)


def _with_loader(
    run_folder: Path, *, lay_out: Callable[[MicroBatch], PackedRow | None], loop: Callable[[RowLoader], Any]
) -> tuple[Any, list[int]]:
    """What `loop` returns in a thread of its own, fed by a hub in this one; and the rows that were asked for."""
    make_keys(run_folder, PEERS)
    pulls: list[int] = []

    def train() -> Any:
        replicas = Replicas(ranks=1, deadline_s=20)
        ready = TrainerReady(replica=0, num_replicas=1, process_id=0, version=0)
        client = OrchestratorClient(
            lambda: ZmqLink(run_folder, "trainer", 0, accepts=ToTrainer), ready=ready, num_steps=1, silent_after_s=20
        )
        with client, RowLoader(client, replicas=replicas, lay_out=lay_out) as loader:
            return loop(loader)

    async def both() -> Any:
        hub = ZmqHub(run_folder, "trainer", accepts=FromTrainer)
        try:
            training = asyncio.create_task(asyncio.to_thread(train))
            serving = asyncio.create_task(_serve(hub, until=training.done, log=pulls))
            async with asyncio.timeout(30):
                result = await training
            serving.cancel()
        finally:
            hub.close()
        return result

    return asyncio.run(both()), pulls


def test_rows_are_laid_out_while_the_loop_computes_and_no_further_than_is_held(tmp_path: Path) -> None:
    laid_out: list[int] = []
    all_held = threading.Event()

    def lay_out(batch: MicroBatch) -> None:
        laid_out.append(batch.index)
        if len(laid_out) == 2 + READY_AHEAD:
            all_held.set()

    def loop(loader: RowLoader) -> list[int]:
        loader.take()
        assert all_held.wait(20), "the loop takes nothing meanwhile"
        loader._thread.join(0.3)  # long enough for many more
        return list(laid_out)

    ahead, pulls = _with_loader(tmp_path, lay_out=lay_out, loop=loop)
    assert ahead == [0, 1, 2], "one was taken, one is ready, one waits in the thread's hands"
    assert max(pulls) < NUM_ROWS - 1


def test_rows_come_in_order_with_their_layout_and_the_seal_last(tmp_path: Path) -> None:
    def loop(loader: RowLoader) -> list[Any]:
        return [loader.take() for _ in range(NUM_ROWS + 1)]

    taken, _ = _with_loader(tmp_path, lay_out=lambda batch: None, loop=loop)
    assert [loaded.batch.index for loaded in taken[:-1]] == list(range(NUM_ROWS))
    assert isinstance(taken[-1], StepClosed)


def test_a_row_that_cannot_be_laid_out_ends_the_loop_with_its_reason(tmp_path: Path) -> None:
    def lay_out(batch: MicroBatch) -> None:
        raise DataError(f"row {batch.index} is broken")

    def loop(loader: RowLoader) -> str:
        for _ in range(2):  # nothing comes after it
            with pytest.raises(DataError, match="row 0 is broken") as caught:
                loader.take()
        return str(caught.value)

    assert _with_loader(tmp_path, lay_out=lay_out, loop=loop)[0] == "row 0 is broken"


class _HandFedClient:
    """A client that gives what it was made with."""

    def __init__(self, items: list[MicroBatch | StepClosed | Stop]) -> None:
        self.busy_with = ""
        self._items = iter(items)

    def take(self) -> MicroBatch | StepClosed | Stop:
        return next(self._items)

    def wake(self) -> None: ...


def _take_all(replicas: Replicas) -> list[list[int]]:
    """Replica 0 has three rows, replica 1 is told to stop after one: token ids of what each rank got."""
    rows = [_row(replicas.number), _row(2), _row(3), Stop(reason="")]
    client = _HandFedClient(rows if replicas.number == 0 else [rows[0], Stop(reason="told")]) if replicas.is_leader else None
    got: list[list[int]] = []
    with RowLoader(client, replicas=replicas, lay_out=lambda batch: None) as loader:  # pyright: ignore[reportArgumentType]
        while not isinstance(loaded := loader.take(), Stop):
            assert isinstance(loaded, LoadedRow)
            got.append(loaded.batch.token_ids.tolist())
    return got


def test_ranks_of_a_replica_get_its_rows_and_all_ranks_end_after_the_same_wave(tmp_path: Path) -> None:
    (ranks,) = run_jobs([(Layout(ranks=4, tensor=2), _take_all)], tmp_path)
    first, second = _row(0).token_ids.tolist(), _row(1).token_ids.tolist()
    assert ranks == [[first], [first], [second], [second]]


def _parts(replicas: Replicas) -> list[list[tuple[int, bool]]]:
    """Sizes and kinds of what each rank computes in three rounds: in one replica 0 has an advantage, in the second none, then both."""
    rows = [_row(number) for number in range(3)]
    for index, row in enumerate(rows):
        if (index, replicas.number) in ((0, 1), (1, 0), (1, 1)):
            row.advantages[:] = 0
    client = _HandFedClient([*rows, Stop(reason="")]) if replicas.is_leader else None
    taken: list[list[tuple[int, bool]]] = []
    with RowLoader(client, replicas=replicas, lay_out=lambda batch: None, split=split_by_gradient) as loader:  # pyright: ignore[reportArgumentType]
        while not isinstance(loaded := loader.take(), Stop):
            assert isinstance(loaded, LoadedRow)
            taken.append([(len(part.batch.token_ids), part.has_gradient) for part in loaded.parts])
    return taken


def test_all_ranks_compute_the_parts_that_any_rank_has(tmp_path: Path) -> None:
    (ranks,) = run_jobs([(Layout(ranks=4, tensor=2), _parts)], tmp_path)
    first = [[(5, True), (0, False)], [(6, False)], [(7, True)]]
    second = [[(0, True), (5, False)], [(6, False)], [(7, True)]]
    assert ranks == [first, first, second, second]
