"""Batching: what leaves it stands in the ledger's file before, and a step that another life began is completed, not begun anew."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import RecordedStep, commit_of
from orchestrator.observe.progress import Progress
from orchestrator.rollouts.rows import Row, StepEnd
from orchestrator.rules.admission import Admission, schedule_of
from orchestrator.rules.batch import BatchCut
from orchestrator.rules.grouping import Grouping
from orchestrator.stages.batching import Batching
from pipelinerl.config import Mode
from pipelinerl.data.packing import Packing
from pipelinerl.messages import ScoredTrajectory
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.stage import Channel, Signal
from pipelinerl.runtime.watch import Watch
from tests.orchestrator import handmade
from tests.sim.clock import simulate

GROUPS_PER_STEP = 2


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with contextlib.closing(Journal(tmp_path, "orchestrator")) as journal:
        yield journal


def stage(
    journal: Journal, ledger: Ledger, *, open_step: RecordedStep | None = None, restored: tuple[ScoredTrajectory, ...] = ()
) -> tuple[Batching, Channel[ScoredTrajectory], Channel[Row | StepEnd], Admission]:
    """Groups of one, two to a step, rows of one sample."""
    watch = Watch(stall_limit_s=600.0)
    scored = Channel[ScoredTrajectory]("scored", giver="scoring", taker="batching", watch=watch, bound_bytes=1000)
    packed = Channel[Row | StepEnd](
        "packed", giver="batching", taker="ledger", watch=watch, bound_bytes=1, size=lambda item: item.num_bytes
    )
    rows = Channel[Row | StepEnd]("rows", giver="batching", taker="training", watch=watch, bound_bytes=1)
    admission = Admission(
        schedule=schedule_of(Mode.STREAMING, max_staleness=4), groups_per_step=GROUPS_PER_STEP, num_steps=9, max_running=99
    )
    cut = BatchCut(groups_per_step=GROUPS_PER_STEP, max_staleness=4, min_group_size=1, group_advantages=handmade.centred)
    batching = Batching(
        scored=scored,
        packed=packed,
        rows=rows,
        grouping=Grouping(group_size=1),
        cut=cut,
        packing=Packing(max_tokens=5, open_rows=1),
        admission=admission,
        credits=Signal(),
        ledger=ledger,
        progress=Progress(journal=journal, started_s=0.0),
        max_dropped=100,
        restored=restored,
        open_step=open_step,
    )
    return batching, scored, rows, admission


def put(ledger: Ledger, group_id: int) -> ScoredTrajectory:
    """A scored rollout of five tokens, booked up to there."""
    handmade.admit(ledger, group_id)
    one = handmade.scored(handmade.trajectory(group_id=group_id))
    ledger.record_score(one, now_s=0.0)
    return one


def in_file(path: Path, kind: str) -> int:
    """Entries of a kind that another process would find if this one were killed now."""
    with contextlib.closing(sqlite3.connect(path)) as database:
        return database.execute("SELECT count(*) FROM events WHERE kind = ?", (kind,)).fetchone()[0]


def test_a_row_and_a_seal_stand_in_the_file_before_they_leave(tmp_path: Path, journal: Journal):
    path = tmp_path / "ledger.sqlite"

    async def program() -> None:
        ledger = Ledger(path)
        at_end.callback(ledger.close)
        batching, scored, rows, _ = stage(journal, ledger)
        running = asyncio.create_task(batching.run())
        found: list[tuple[str, int, int]] = []
        for group_id in range(GROUPS_PER_STEP):
            await scored.put(put(ledger, group_id))
        for _ in range(GROUPS_PER_STEP + 1):
            item = await rows.get()
            found.append((type(item).__name__, in_file(path, "packed"), in_file(path, "closed")))
            if isinstance(item, StepEnd):
                assert item.commit == commit_of(ledger, 0)
        assert [name for name, *_ in found] == ["Row", "Row", "StepEnd"]
        assert found[0][1] >= 1
        assert found[1][1] == 2
        assert found[2][2] == 1
        running.cancel()

    with contextlib.ExitStack() as at_end:
        simulate(program())


def sample(group_id: int):
    return handmade.sample(5, group_id=group_id)


def test_a_step_that_another_life_began_is_completed(journal: Journal):
    """One group of two is placed, its sample not packed; the next group to come closes the step."""

    async def program() -> None:
        ledger = Ledger(None)
        placed, next_one = put(ledger, 0), put(ledger, 1)
        open_step = RecordedStep(unpacked=(sample(0),), num_groups=1)
        batching, _, rows, admission = stage(journal, ledger, open_step=open_step, restored=(next_one,))
        admission.restore(accepted=1, running=1, version=0)
        running = asyncio.create_task(batching.run())
        items = [await rows.get() for _ in range(3)]
        assert [item.samples[0].trajectory.rollout_id for item in items if isinstance(item, Row)] == [placed.trajectory.rollout_id, "1/0"]
        assert isinstance(items[2], StepEnd)
        assert items[2].num_samples == 2
        assert (admission.accepted, admission.running) == (2, 0)
        running.cancel()

    simulate(program())


def test_a_step_that_had_all_its_groups_is_sealed_at_once(journal: Journal):
    """The other life ended between the last group and the seal."""

    async def program() -> None:
        ledger = Ledger(None)
        open_step = RecordedStep(rows=((sample(0),),), unpacked=(sample(1),), num_groups=2)
        batching, _, rows, _ = stage(journal, ledger, open_step=open_step)
        running = asyncio.create_task(batching.run())
        row, seal = await rows.get(), await rows.get()
        assert isinstance(row, Row)
        assert isinstance(seal, StepEnd)
        assert (seal.step, seal.num_samples, seal.num_tokens) == (0, 2, 8)
        packed = ledger.store.read("SELECT rollout_id, row, position FROM events WHERE kind = 'packed'")
        assert packed == [("1/0", 1, 0)], "row 0 stands there already"
        running.cancel()

    simulate(program())
