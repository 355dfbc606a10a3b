"""WeightSync: every engine hears of every policy, and a buffer goes back only when no engine can read it; on simulated time."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from orchestrator.observe.progress import Progress
from orchestrator.peers.engines import Engines
from orchestrator.peers.peers import Peers
from orchestrator.rules.admission import Admission, schedule_of
from orchestrator.stages.alternation import Alternation
from orchestrator.stages.weight_sync import WeightSync
from pipelinerl.config import Mode
from pipelinerl.errors import PeerRefused, PeerSilent
from pipelinerl.messages import (
    EngineReady,
    FromEngine,
    FromTrainer,
    LayoutFixed,
    Message,
    PolicyHeld,
    PolicyPublished,
    StageWeights,
    Starting,
    ToEngine,
    ToTrainer,
    TrainerReady,
    WeightBufferReleased,
    WeightsCommitted,
    WeightsRefused,
)
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.stage import Channel, Signal
from pipelinerl.runtime.watch import Watch
from tests.sim.clock import simulate
from tests.sim.memory import MemoryHub, MemoryLink


@dataclasses.dataclass(kw_only=True)
class Bench:
    """A weight_sync stage with a hand on two engines and a trainer."""

    published: Channel[TrainerReady | PolicyPublished]
    admission: Admission
    credits: Signal
    engines: list[MemoryLink]
    known: Engines
    weight_sync: WeightSync
    trainer: MemoryLink

    async def publish(self, version: int, *, rollback_epoch: int = 0, copy: str = "") -> None:
        buffer = "in place" if copy else f"buffer-{rollback_epoch}.{version}" if rollback_epoch else f"buffer-{version}"
        ages = {"version": version, "rollback_epoch": rollback_epoch}
        self.published.put_now(PolicyPublished(**ages, buffer=buffer, digest=f"d{version}", num_bytes=1, publish_s=0.1, copy=copy))
        await asyncio.sleep(0.01)

    async def commit(self, engine_id: int, version: int, *, rollback_epoch: int = 0) -> None:
        self.engines[engine_id].send(
            WeightsCommitted(
                engine_id=engine_id, version=version, pause_s=0.001 * version, stage_s=0.5, num_running=7, rollback_epoch=rollback_epoch
            )
        )
        await asyncio.sleep(0.01)

    async def refuse(self, engine_id: int, version: int, *, error: str = "WeightsError: digest") -> None:
        self.engines[engine_id].send(WeightsRefused(engine_id=engine_id, version=version, error=error))
        await asyncio.sleep(0.01)

    def ordered(self, engine_id: int) -> list[int]:
        """Versions an engine was told to fetch since the last look."""
        return [order.version for order in received(self.engines[engine_id]) if isinstance(order, StageWeights)]

    def serving(self) -> list[int]:
        """Engines that take new work."""
        return [engine.engine_id for engine in self.known.serving()]

    def released(self) -> list[str]:
        """Buffers handed back since the last look."""
        return [message.buffer for message in received(self.trainer) if isinstance(message, WeightBufferReleased)]


def received(link: MemoryLink) -> list[Message]:
    messages = []
    while (message := link.receive(0)) is not None:
        messages.append(message)
    return messages


@contextlib.asynccontextmanager
async def bench(
    folder: Path, *, mode: Mode = Mode.STREAMING, num_closed: Callable[[], int] | None = None, num_apart: int = 0
) -> AsyncIterator[Bench]:
    """With `num_closed`, engines share their devices with the trainer, but for the last `num_apart` of two."""
    turns: dict[str, Any] = {"takes_turns": lambda engine_id: engine_id < 2 - num_apart, "bound": 2 if num_apart else None}
    engine_hub, trainer_hub = MemoryHub(accepts=FromEngine), MemoryHub(accepts=FromTrainer)
    peers = Peers(engine_hub, role="engine", expected=2, ready_deadline_s=10.0, silent_after_s=1000.0)
    trainer = Peers(trainer_hub, role="trainer", expected=1, ready_deadline_s=10.0, silent_after_s=1000.0)
    watch, credits = Watch(stall_limit_s=1000.0), Signal()
    journal = Journal(folder, "orchestrator")
    published = Channel[TrainerReady | PolicyPublished]("policies", giver="training", taker="weight_sync", watch=watch, bound_bytes=10)
    schedule = schedule_of(mode, max_staleness=2)
    admission = Admission(schedule=schedule, groups_per_step=4, num_steps=100, max_running=100)
    known = Engines(peers, expected=2, watch=watch, credits=Signal())
    weight_sync = WeightSync(
        published=published,
        engines=known,
        trainer=trainer,
        admission=admission,
        credits=credits,
        progress=Progress(journal=journal, started_s=0.0),
        journal=journal,
        layout_for=lambda ready: LayoutFixed(tensors=()),
        commit_deadline_s=60.0,
        alternation=Alternation() if num_closed is None else Alternation(engines=known, journal=journal, num_closed=num_closed, **turns),
    )
    links = [engine_hub.connect(f"engine-{number}", accepts=ToEngine) for number in range(2)]
    trainer_link = trainer_hub.connect("trainer-0", accepts=ToTrainer)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(peers.run()), group.create_task(weight_sync.run())]
            for engine_id, link in enumerate(links):
                link.send(EngineReady(engine_id=engine_id, process_id=1, max_model_tokens=100, max_running=4, tensors=()))
            await asyncio.sleep(0.01)
            yield Bench(
                published=published,
                admission=admission,
                credits=credits,
                engines=links,
                known=known,
                weight_sync=weight_sync,
                trainer=trainer_link,
            )
            for task in tasks:
                task.cancel()
    finally:
        journal.close()


@pytest.mark.parametrize(("mode", "when_idle"), [(Mode.STREAMING, False), (Mode.ONE_STEP_OFF, True), (Mode.SYNC, True)])
def test_every_engine_is_told_what_to_stage_and_when(tmp_path: Path, mode: Mode, when_idle: bool):
    async def program() -> None:
        async with bench(tmp_path, mode=mode) as it:
            await it.publish(1)
            for link in it.engines:
                assert received(link) == [StageWeights(version=1, buffer="buffer-1", digest="d1", when_idle=when_idle)]
            for engine_id in range(2):
                await it.commit(engine_id, 1)

    simulate(program())


def test_buffer_is_freed_only_after_engines_hold_the_weights(tmp_path: Path):
    """Buffer 1 is read by an engine until that engine has committed policy 2; the last one to do so frees it."""

    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(1)
            await it.commit(0, 1)
            await it.commit(1, 1)
            assert it.released() == [], "both engines decode from buffer 1 now"
            await it.publish(2)
            assert it.released() == []
            await it.commit(0, 2)
            assert it.released() == [], "engine 1 still decodes from buffer 1"
            await it.commit(1, 2)
            assert it.released() == ["buffer-1"]
            await it.publish(3)
            await it.commit(1, 3)
            assert it.released() == [], "engine 0 still decodes from buffer 2"
            await it.commit(0, 3)
            assert it.released() == ["buffer-2"], "once, and not buffer 1 again"

    simulate(program())


def test_an_engine_still_busy_with_one_policy_is_then_told_of_the_newest_only(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(1)
            await it.commit(0, 1)
            for version in (2, 3):
                await it.publish(version)
            await it.commit(0, 2)
            assert (it.ordered(0), it.ordered(1)) == ([1, 2, 3], [1])
            assert it.released() == [], "engine 0 serves from 2, engine 1 fetches 1, and 3 is the newest"
            await it.commit(1, 1)
            assert it.ordered(1) == [3], "2 was overtaken"
            assert it.released() == []
            await it.commit(1, 3)
            assert it.released() == ["buffer-1"]
            await it.commit(0, 3)
            assert it.released() == ["buffer-2"]

    simulate(program())


def test_a_slow_engine_holds_up_nobody_else(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            for version in (1, 2, 3):
                await it.publish(version)
                await it.commit(0, version)
            assert it.ordered(0) == [1, 2, 3]
            assert it.released() == ["buffer-2"], "engine 1 may still read buffer 1"
            await it.commit(1, 3)

    simulate(program())


def test_a_policy_gives_credits_and_wakes_dispatch(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            before = it.admission.limit(it.admission.version)
            waiting = asyncio.create_task(it.credits.wait())
            await it.publish(1)
            await asyncio.wait_for(waiting, 1.0)
            assert it.admission.limit(it.admission.version) == before + 4
            waiting = asyncio.create_task(it.credits.wait())
            await asyncio.sleep(0.01)
            await it.commit(0, 1)
            await asyncio.wait_for(waiting, 1.0)
            await it.commit(1, 1)

    simulate(program())


def test_an_engine_that_refuses_is_fenced_with_its_words_and_refilled(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(1)
            await it.commit(0, 1)
            await it.refuse(1, 1, error="WeightsError: weight buffer buffer-1: digest of its 8 bytes is ab")
            assert it.serving() == [0]
            assert it.known[1].fault == "engine-1 refused policy 1: WeightsError: weight buffer buffer-1: digest of its 8 bytes is ab"
            assert it.known[1].version == 0, "its old version serves on"
            assert it.known.all_hold(1), "nobody waits for it"
            assert it.ordered(1) == [1, 1], "told again"
            await it.commit(1, 1)
            assert it.serving() == [0, 1]

    simulate(program())
    (line,) = [line for line in read_journals(tmp_path) if line["kind"] == "fence"]
    assert (line["engine_id"], line["version"]) == (1, 0)
    assert line["error"].endswith("digest of its 8 bytes is ab")


def test_an_engine_beyond_refilling_waits_for_the_next_policy_and_keeps_its_buffer(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(1)
            for engine_id in (0, 1):
                await it.commit(engine_id, 1)
            await it.publish(2)
            await it.commit(0, 2)
            for _ in range(3):
                await it.refuse(1, 2)
            assert it.ordered(1) == [1, 2, 2, 2], "no more of the same"
            assert it.released() == [], "it serves on from buffer 1"
            await it.publish(3)
            assert it.ordered(1) == [3]
            await it.commit(1, 3)
            await it.commit(0, 3)
            assert it.serving() == [0, 1]
            assert it.released() == ["buffer-1", "buffer-2"]

    simulate(program())


def test_the_run_ends_with_the_last_engines_own_words_once_none_can_be_refilled(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(1)
            for engine_id in (0, 1, 0, 1, 0, 1):
                await it.refuse(engine_id, 1, error=f"WeightsError: engine {engine_id} is ill")
            await asyncio.sleep(61.0)

    expected = pytest.RaisesExc(PeerRefused, match=r"^engine-1 refused policy 1: WeightsError: engine 1 is ill$")
    with pytest.RaisesGroup(expected, flatten_subgroups=True):
        simulate(program())


def test_an_engine_that_does_not_commit_in_time_is_fenced_until_it_does(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(1)
            await it.commit(0, 1)
            await asyncio.sleep(61.0)
            assert it.serving() == [0]
            assert it.known[1].fault == "waited 60 s for engine-1 (at version 0) to commit policy 1"
            await it.publish(2)
            await it.commit(0, 2)
            assert it.released() == [], "it may read buffer 1 to this day"
            await it.commit(1, 1)
            assert it.serving() == [0, 1]
            assert it.ordered(1) == [1, 2]
            await it.commit(1, 2)

    simulate(program())


def test_an_engine_in_time_is_not_fenced_by_the_deadline_of_an_earlier_policy(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            for version in range(1, 9):
                await it.publish(version)
                await asyncio.sleep(20.0)
                for engine_id in (0, 1):
                    await it.commit(engine_id, version)
            assert it.serving() == [0, 1]

    simulate(program())


def test_the_run_ends_once_no_engine_commits_in_time(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(1)
            await it.refuse(0, 1)
            await asyncio.sleep(61.0)

    expected = pytest.RaisesExc(PeerSilent, match=r"^waited 60 s for engine-[01] \(at version 0\) to commit policy 1$")
    with pytest.RaisesGroup(expected, flatten_subgroups=True):
        simulate(program())


def test_repeated_and_late_news_change_nothing(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(1)
            await it.publish(1)
            for engine_id in (0, 0, 1):
                await it.commit(engine_id, 1)
            await it.publish(2)
            for engine_id in (0, 1, 0):
                await it.commit(engine_id, 2)
            await it.commit(0, 1)
            await it.refuse(1, 1)
            assert [engine.version for engine in it.known] == [2, 2]
            assert it.serving() == [0, 1]
            assert (it.ordered(0), it.ordered(1)) == ([1, 2], [1, 2])
            assert it.released() == ["buffer-1"]

    simulate(program())
    assert len([line for line in read_journals(tmp_path) if line["kind"] == "swap"]) == 4


def test_the_trainer_hears_what_every_engine_holds_and_when_one_needs_a_whole_policy(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(1)
            for engine_id in (0, 1):
                await it.commit(engine_id, 1)
            await it.publish(2)
            await it.commit(0, 2)
            await it.refuse(1, 2)
            await it.commit(1, 2)
            heard = [message.version for message in received(it.trainer) if isinstance(message, PolicyHeld)]
            assert heard == [0, 1, None, 2]

    simulate(program())


def test_a_replaced_engine_is_told_of_the_newest_policy_at_once(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(1)
            for engine_id in (0, 1):
                await it.commit(engine_id, 1)
            it.engines[1].send(EngineReady(engine_id=1, process_id=2, max_model_tokens=100, max_running=4, tensors=()))
            await asyncio.sleep(0.01)
            assert it.ordered(1) == [1, 1]
            assert (it.known[1].version, it.known.all_hold(1)) == (0, False)
            await it.commit(1, 1)
            assert it.known.all_hold(1)

    simulate(program())


def test_a_rollback_is_announced_as_a_later_lineage_and_lowers_the_version(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            for version in (1, 2):
                await it.publish(version)
                for engine_id in (0, 1):
                    await it.commit(engine_id, version)
            received(it.engines[0])
            await it.publish(1, rollback_epoch=1)
            (order,) = received(it.engines[0])
            assert order == StageWeights(version=1, buffer="buffer-1.1", digest="d1", when_idle=False, rollback_epoch=1)
            await it.commit(0, 2)
            assert it.known[0].version == 2, "a commit of the earlier rollback epoch is no news"
            await it.commit(0, 1, rollback_epoch=1)
            assert it.known[0].version == 1
            await it.commit(1, 1, rollback_epoch=1)

    simulate(program())


# --- engines and trainers that start again ------------------------------------------------------------------------------------------


def ready(engine_id: int, process_id: int) -> EngineReady:
    return EngineReady(engine_id=engine_id, process_id=process_id, max_model_tokens=100, max_running=4, tensors=())


def test_an_engine_that_joins_late_is_brought_to_the_newest_policy_whose_buffer_was_kept(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(1)
            for engine_id in range(2):
                await it.commit(engine_id, 1)
            received(it.engines[1])
            it.engines[1].send(ready(1, process_id=2))
            await asyncio.sleep(0.01)
            assert received(it.engines[1]) == [StageWeights(version=1, buffer="buffer-1", digest="d1", when_idle=False)]
            assert it.released() == []
            await it.commit(1, 1)

    simulate(program())


def test_an_engine_that_died_owes_no_commit_and_holds_no_buffer(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(1)
            await it.commit(0, 1)
            await it.publish(2)
            await it.commit(0, 2)
            it.engines[1].send(Starting(process_id=2))
            await asyncio.sleep(0.01)
            assert it.released() == ["buffer-1"], "engine 1 was the last to read it"
            await asyncio.sleep(200.0)

    simulate(program())


def test_a_trainer_that_starts_again_is_told_the_layout_and_hands_out_buffers_of_its_own(tmp_path: Path):
    """Engines hold 2 when it starts from 1: what it publishes anew up to there they have, and their old buffers are not spoken of."""

    async def program() -> None:
        async with bench(tmp_path) as it:
            for version in (1, 2):
                await it.publish(version)
            await it.commit(0, 2)  # engine 1 has not committed, and need not any more
            received(it.trainer)
            it.published.put_now(TrainerReady(replica=0, num_replicas=1, process_id=2, version=1))
            await asyncio.sleep(0.01)
            assert received(it.trainer) == [LayoutFixed(tensors=())]
            for link in it.engines:
                received(link)
            await asyncio.sleep(200.0)
            await it.publish(1)
            assert received(it.engines[0]) == []
            assert [order.version for order in received(it.engines[1]) if isinstance(order, StageWeights)] == [1]
            await it.commit(1, 1)
            await it.publish(2)
            assert it.released() == []
            await it.commit(1, 2)
            await it.publish(3)
            for engine_id in range(2):
                await it.commit(engine_id, 3)
            assert it.released() == ["buffer-1", "buffer-2"]

    simulate(program())


def test_the_newest_buffer_is_kept_even_where_every_engine_is_past_it(tmp_path: Path):
    """A trainer does steps again that engines have long taken: one that joins now must still find something to read."""

    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(2)
            for engine_id in range(2):
                await it.commit(engine_id, 2)
            it.published.put_now(TrainerReady(replica=0, num_replicas=1, process_id=2, version=0))
            await it.publish(1)
            assert it.released() == []
            await it.publish(2)
            assert it.released() == ["buffer-1"]

    simulate(program())


def test_every_swap_is_journalled(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.publish(2)
            for engine_id in range(2):
                await it.commit(engine_id, 2)

    simulate(program())
    swaps = [line for line in read_journals(tmp_path) if line["kind"] == "swap"]
    assert [(line["engine_id"], line["version"], line["pause_s"], line["stage_s"], line["num_running"]) for line in swaps] == [
        (0, 2, 0.002, 0.5, 7),
        (1, 2, 0.002, 0.5, 7),
    ]
