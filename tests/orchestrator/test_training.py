"""Training: every pull is answered once its row is there, in waves over the replicas, and what is done is booked."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from orchestrator.ledger.ledger import Ledger
from orchestrator.observe.progress import Progress
from orchestrator.peers.peers import Peers
from orchestrator.recovery.open_steps import OpenSteps
from orchestrator.recovery.trainer_session import MAX_EARLY
from orchestrator.rollouts.micro_batch import micro_batch_of
from orchestrator.rollouts.rows import Row, StepEnd
from orchestrator.rules.validation.announcements import AnnouncementCheck
from orchestrator.rules.validation.penalties import MAX_VIOLATIONS
from orchestrator.rules.validation.violations import Kind
from orchestrator.stages.training import Training
from pipelinerl.errors import DataError, PeerRefused
from pipelinerl.messages import (
    CheckpointSaved,
    EndTraining,
    FromTrainer,
    Message,
    MicroBatch,
    PolicyPublished,
    Sample,
    StepClosed,
    StepDone,
    Stop,
    TakeMicroBatch,
    ToTrainer,
    TrainerReady,
    TrainingEnded,
)
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.stage import Channel
from pipelinerl.runtime.watch import Watch
from tests.orchestrator import handmade
from tests.sim.clock import simulate
from tests.sim.memory import MemoryHub, MemoryLink


@dataclasses.dataclass(kw_only=True)
class Bench:
    """A training stage with a hand on everything around it."""

    rows: Channel[Row | StepEnd]
    published: Channel[TrainerReady | PolicyPublished]
    ledger: Ledger
    training: Training
    trainer: Peers
    links: list[MemoryLink]

    async def put(self, *items: Row | StepEnd) -> None:
        for item in items:
            await self.rows.put(item)
        await asyncio.sleep(0.01)

    async def ask(self, replica: int, *, step: int, index: int) -> list[Message]:
        """Pull, and return every answer this replica has got by then."""
        self.links[replica].send(TakeMicroBatch(replica=replica, step=step, index=index))
        return await self.answers(replica)

    async def answers(self, replica: int) -> list[Message]:
        await asyncio.sleep(0.01)
        answers = []
        while (answer := self.links[replica].receive(0)) is not None:
            answers.append(answer)
        return answers


@contextlib.asynccontextmanager
async def bench(
    folder: Path,
    *,
    num_replicas: int = 1,
    num_steps: int = 3,
    holds_batches: bool = False,
    replace: Callable[[str], None] | None = None,
) -> AsyncIterator[Bench]:
    hub = MemoryHub(accepts=FromTrainer)
    trainer = Peers(hub, role="trainer", expected=num_replicas, ready_deadline_s=60.0, silent_after_s=600.0, replace=replace)
    watch, ledger = Watch(stall_limit_s=600.0), Ledger(None)
    rows = Channel[Row | StepEnd](
        "rows", giver="batching", taker="training", watch=watch, bound_bytes=1000, size=lambda item: item.num_bytes
    )
    published = Channel[TrainerReady | PolicyPublished]("policies", giver="training", taker="weight_sync", watch=watch, bound_bytes=10)
    journal = Journal(folder, "orchestrator")
    training = Training(
        rows=rows,
        published=published,
        trainer=trainer,
        num_replicas=num_replicas,
        num_steps=num_steps,
        holds_batches=holds_batches,
        ledger=ledger,
        steps=OpenSteps(ledger),
        progress=Progress(journal=journal, started_s=0.0),
        watch=watch,
        announcement_check=AnnouncementCheck(max_outstanding=1, num_steps=num_steps),
    )
    links = [hub.connect(f"trainer-{replica}", accepts=ToTrainer) for replica in range(num_replicas)]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(trainer.run()), group.create_task(training.run())]
            yield Bench(rows=rows, published=published, ledger=ledger, training=training, trainer=trainer, links=links)
            for task in tasks:
                task.cancel()
    finally:
        journal.close()


def row(step: int, *samples: Sample) -> Row:
    return Row(step=step, samples=samples)


def names(answers: list[Message]) -> list[tuple[str, ...]]:
    """The rollouts of each micro-batch among the answers; a step's seal as its counts."""
    found: list[tuple[str, ...]] = []
    for answer in answers:
        if isinstance(answer, StepClosed):
            found.append(("sealed", str(answer.num_micro_batches), str(answer.num_tokens), str(answer.num_samples)))
        else:
            assert isinstance(answer, MicroBatch)
            found.append(answer.rollout_ids)
    return found


def test_a_row_is_its_samples_end_to_end_in_every_column():
    first = handmade.trajectory((3, 4), group_id=1, sibling=0, num_prompt=2)
    second = handmade.trajectory((5,), group_id=1, sibling=1, num_prompt=1)
    samples = (
        Sample(trajectory=first, reward=1.0, advantages=np.array([0, 0, 0.5, 0.25], np.float32)),
        Sample(trajectory=second, reward=0.0, advantages=np.array([0, -1], np.float32)),
    )
    batch = micro_batch_of(samples, step=7, index=2)
    assert (batch.step, batch.index) == (7, 2)
    assert batch.token_ids.tolist() == [100, 101, 10, 11, 100, 10]
    assert batch.loss_mask.tolist() == [False, False, True, True, False, True]
    assert batch.logprobs.tolist() == [0, 0, -0.5, -0.5, 0, -0.5]
    assert batch.versions.tolist() == [-1, -1, 3, 4, -1, 5]
    assert batch.advantages.tolist() == [0, 0, 0.5, 0.25, 0, -1]
    assert batch.lengths.tolist() == [4, 2]
    assert batch.rollout_ids == ("1/0", "1/1")


def test_a_row_has_each_image_once_and_says_which_samples_prompts_have_it():
    def sample(*images: bytes) -> Sample:
        trajectory = handmade.trajectory((5,), group_id=1, sibling=0, num_prompt=1)
        prompt = msgspec.structs.replace(trajectory.prompt, images=images)
        return Sample(trajectory=msgspec.structs.replace(trajectory, prompt=prompt), reward=0.0, advantages=np.zeros(2, np.float32))

    batch = micro_batch_of((sample(b"one"), sample(b"one"), sample(), sample(b"two", b"one")), step=0, index=0)
    assert (batch.images, batch.images_of) == ((b"one", b"two"), ((0,), (0,), (), (1, 0)))
    without = micro_batch_of((sample(), sample()), step=0, index=0)
    assert (without.images, without.images_of) == ((), ())
    for wrong in (((0,),), ((0,), (0,), (), (2,))):
        with pytest.raises(ValueError, match=r"MicroBatch 0/0: images_of .*, expected numbers below 2 for 4 samples"):
            msgspec.structs.replace(batch, images_of=wrong)


def test_each_sample_of_a_row_says_which_teacher_judges_it():
    def sample(name: object) -> Sample:
        trajectory = handmade.trajectory((5,), group_id=1, sibling=0, num_prompt=1)
        prompt = msgspec.structs.replace(trajectory.prompt, columns={"teacher": name})
        trajectory = msgspec.structs.replace(trajectory, prompt=prompt)
        return Sample(trajectory=trajectory, reward=0.0, advantages=np.zeros(2, np.float32))

    batch = micro_batch_of((sample("code"), sample("math"), sample("code")), step=0, index=0, teachers=("math", "code"))
    assert batch.teacher_ids is not None
    assert batch.teacher_ids.tolist() == [1, 0, 1]
    assert micro_batch_of((sample("code"),), step=0, index=0).teacher_ids is None
    for wrong in ("maths", None, 1, ["math"]):
        with pytest.raises(DataError, match=r"column teacher is .*, expected one of math, code \(reference\.teachers\)"):
            micro_batch_of((sample(wrong),), step=0, index=0, teachers=("math", "code"))


def test_a_pull_that_comes_before_its_row_is_answered_when_the_row_comes(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            assert await it.ask(0, step=0, index=0) == []
            await it.put(row(0, handmade.sample(5)))
            assert names(await it.answers(0)) == [("0/0",)]

    simulate(program())


def test_rows_go_out_before_their_step_is_whole(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.put(row(0, handmade.sample(5)), row(0, handmade.sample(6, number=1), handmade.sample(7, number=2)))
            assert names(await it.ask(0, step=0, index=0)) == [("0/0",)]
            assert names(await it.ask(0, step=0, index=1)) == [("0/1", "0/2")]
            assert await it.ask(0, step=0, index=2) == [], "neither a row nor the seal is there yet"
            await it.put(StepEnd(step=0, num_tokens=15, num_samples=3))
            assert names(await it.answers(0)) == [("sealed", "2", "15", "3")]

    simulate(program())


def test_a_repeated_pull_is_answered_again_with_the_same_row(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.put(row(0, handmade.sample(5)), row(0, handmade.sample(6, number=1)), StepEnd(step=0, num_tokens=9, num_samples=2))
            for _ in range(3):
                assert names(await it.ask(0, step=0, index=1)) == [("0/1",)]
            assert names(await it.ask(0, step=0, index=0)) == [("0/0",)]
            for _ in range(2):
                assert names(await it.ask(0, step=0, index=2)) == [("sealed", "2", "9", "2")]

    simulate(program())


def test_a_pull_repeated_before_its_row_is_there_is_answered_once(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            for _ in range(3):
                assert await it.ask(0, step=0, index=0) == []
            await it.put(row(0, handmade.sample(5)))
            assert names(await it.answers(0)) == [("0/0",)]

    simulate(program())


def test_replicas_go_in_waves_and_one_without_a_row_gets_a_zero_loss_row(tmp_path: Path):
    """Three rows for two replicas: wave 0 is rows 0 and 1, wave 1 is row 2 and nothing."""

    async def program() -> None:
        async with bench(tmp_path, num_replicas=2) as it:
            await it.put(*(row(0, handmade.sample(5, number=number)) for number in range(3)))
            assert names(await it.ask(1, step=0, index=0)) == [("0/1",)]
            assert names(await it.ask(0, step=0, index=0)) == [("0/0",)]
            assert names(await it.ask(0, step=0, index=1)) == [("0/2",)]
            assert await it.ask(1, step=0, index=1) == [], "a fourth row may still come"
            await it.put(StepEnd(step=0, num_tokens=12, num_samples=3))
            (empty,) = await it.answers(1)
            assert isinstance(empty, MicroBatch)
            assert (len(empty.token_ids), len(empty.lengths), empty.rollout_ids) == (0, 0, ())
            for replica in range(2):
                assert names(await it.ask(replica, step=0, index=2)) == [("sealed", "2", "12", "3")]

    simulate(program())


def test_a_batch_that_is_held_goes_out_only_once_it_is_sealed(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path, holds_batches=True) as it:
            await it.put(row(0, handmade.sample(5)))
            assert await it.ask(0, step=0, index=0) == []
            await it.put(StepEnd(step=0, num_tokens=4, num_samples=1))
            assert names(await it.answers(0)) == [("0/0",)]

    simulate(program())


def test_rows_of_the_next_step_wait_for_its_own_pulls(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.put(row(1, handmade.sample(5, group_id=1)))
            assert await it.ask(0, step=0, index=0) == []
            assert names(await it.ask(0, step=1, index=0)) == [("1/0",)]

    simulate(program())


def test_a_step_that_is_done_is_booked_as_trained_with_its_facts(tmp_path: Path):
    async def program() -> Ledger:
        async with bench(tmp_path) as it:
            of = handmade.trajectory((1, 1, 2), group_id=4, sibling=3)
            handmade.admit(it.ledger, 4, group_size=4)
            await it.put(row(0, Sample(trajectory=of, reward=0.75, advantages=np.zeros(5, np.float32))))
            await it.put(StepEnd(step=0, num_tokens=3, num_samples=1))
            assert it.ledger.counts().trained == 0
            it.links[0].send(StepDone(step=0, metrics={"loss": 0.5}))
            await asyncio.sleep(0.01)
            return it.ledger

    ledger = simulate(program())
    ((rollout, _, _, fate, _, step, reward, oldest, newest, num_tokens, _, _),) = ledger.terminal_statuses()
    assert (rollout, fate, step, reward, oldest, newest, num_tokens) == ("4/3", "trained", 0, 0.75, 1, 2, 3)
    steps = [line for line in read_journals(tmp_path) if line["kind"] == "step"]
    assert [line["trainer"] for line in steps] == [{"loss": 0.5}]


def test_of_later_steps_no_more_is_taken_than_their_channel_may_hold_and_of_the_step_being_trained_everything(tmp_path: Path):
    """The channel holds 1,000 bytes; a row of 40 tokens is 680 of them."""

    async def program() -> None:
        async with bench(tmp_path) as it:
            handmade.admit(it.ledger, 0, group_size=5)
            for number in range(5):
                await it.put(row(0, handmade.sample(40, number=number)))
            await it.put(StepEnd(step=0, num_tokens=5 * 39, num_samples=5))
            for number in range(3):
                await it.put(row(1, handmade.sample(40, group_id=1, number=number)))
            assert (len(it.rows), it.rows.num_bytes) == (1, 680), "two rows are 1,360 bytes: the third waits in its channel"
            it.links[0].send(StepDone(step=0, metrics={}))
            await asyncio.sleep(0.01)
            assert len(it.rows) == 0
            assert names([*await it.ask(0, step=1, index=0), *await it.ask(0, step=1, index=2)]) == [("1/0",), ("1/2",)]

    simulate(program())


@pytest.mark.parametrize("step", [1, -1])
def test_a_done_step_that_is_not_the_next_is_refused_and_one_that_keeps_saying_so_ends_the_run_where_nobody_replaces_it(
    tmp_path: Path, step: int
):
    async def program() -> None:
        async with bench(tmp_path) as it:
            for count in range(1, MAX_VIOLATIONS + 1):
                it.links[0].send(StepDone(step=step, metrics={}))
                await asyncio.sleep(1.0)
                assert (it.trainer.refused, it.training.steps.num_booked) == ({Kind.STEPS: count}, 0)

    expected = pytest.RaisesExc(PeerRefused, match=f"trainer-0 keeps saying what cannot be.*StepDone: step {step}, expected 0")
    with pytest.RaisesGroup(expected, flatten_subgroups=True):
        simulate(program())


def test_a_step_is_not_done_before_its_last_row_is_known(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            handmade.admit(it.ledger, 0)
            await it.put(row(0, handmade.sample(5)))
            it.links[0].send(StepDone(step=0, metrics={}))
            await asyncio.sleep(0.01)
            assert (it.trainer.refused, it.training.steps.num_booked) == ({Kind.STEPS: 1}, 0)
            await it.put(StepEnd(step=0, num_tokens=4, num_samples=1))
            it.links[0].send(StepDone(step=0, metrics={"loss": 0.5, "grad_norm": float("nan")}))
            await asyncio.sleep(0.01)
            assert (it.trainer.refused, it.training.steps.num_booked) == ({Kind.STEPS: 1, Kind.BOUNDS: 1}, 1)
        (step,) = [line for line in read_journals(tmp_path) if line["kind"] == "step"]
        assert step["trainer"] == {"loss": 0.5}, "what is no figure is left out, and the step stands"

    simulate(program())


def test_a_checkpoint_that_was_never_trained_forgets_no_sample(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            handmade.admit(it.ledger, 0)
            await it.put(row(0, handmade.sample(5)), StepEnd(step=0, num_tokens=4, num_samples=1))
            it.links[0].send(CheckpointSaved(version=1, commit="", num_bytes=1, save_s=0.1))
            it.links[0].send(PolicyPublished(version=7, buffer="a", digest="", num_bytes=0, publish_s=0.0))
            await asyncio.sleep(0.01)
            assert it.trainer.refused == {Kind.STEPS: 2}
            assert it.ledger.store.read("SELECT count(*) FROM events WHERE kind = 'saved'") == [(0,)]
            assert len(it.published) == 0

    simulate(program())


def test_a_checkpoint_of_a_version_that_no_database_holds_ends_no_run(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            it.links[0].send(CheckpointSaved(version=2**64 - 1, commit="", num_bytes=1, save_s=0.1))
            await asyncio.sleep(0.01)
            assert it.trainer.refused == {Kind.STEPS: 1}

    simulate(program())


@pytest.mark.parametrize(
    ("kind", "wrong"),
    [(Kind.BOUNDS, {"num_replicas": 4}), (Kind.STEPS, {"version": 1, "commit": "another's"}), (Kind.STEPS, {"version": 0, "oldest": 1})],
)
def test_who_announces_himself_wrongly_after_one_who_did_it_right_loses_his_place_and_ends_no_run(
    tmp_path: Path, kind: Kind, wrong: dict[str, Any]
):
    replaced: list[str] = []

    async def program() -> None:
        async with bench(tmp_path, replace=replaced.append) as it:
            good = TrainerReady(replica=0, num_replicas=1, process_id=1, version=0)
            it.links[0].send(good)
            await asyncio.sleep(1.0)
            it.links[0].send(msgspec.structs.replace(good, process_id=2, **wrong))
            await asyncio.sleep(1.0)
            assert it.trainer.refused == {kind: 1}
            assert len(it.published) == 1, "nobody heard of it"
            it.links[0].send(msgspec.structs.replace(good, process_id=3))
            await asyncio.sleep(1.0)
            assert len(it.published) == 2

    simulate(program())
    assert replaced == (["trainer-0"] if "oldest" not in wrong else []), "at once, where it can be of no use"


def test_what_a_trainer_says_at_once_after_its_announcement_is_judged_by_where_it_starts(tmp_path: Path):
    """An orchestrator that takes another's place meets a trainer that is ahead of it, and says all in one breath."""

    async def program() -> None:
        async with bench(tmp_path) as it:
            handmade.admit(it.ledger, 0)
            commit = it.ledger.close_step(0, num_rows=1, num_tokens=4, num_samples=1, now_s=0.0)
            await it.put(row(0, handmade.sample(5)), StepEnd(step=0, num_tokens=4, num_samples=1, commit=commit))
            it.links[0].send(TrainerReady(replica=0, num_replicas=1, process_id=1, version=1, saved=0, commit=commit))
            it.links[0].send(CheckpointSaved(version=1, commit=commit, num_bytes=1, save_s=0.1))
            it.links[0].send(PolicyPublished(version=1, buffer="a", digest="", num_bytes=0, publish_s=0.0))
            it.links[0].send(PolicyPublished(version=3, buffer="b", digest="", num_bytes=0, publish_s=0.0))
            await asyncio.sleep(1.0)
            assert it.trainer.refused == {Kind.STEPS: 1}, "a policy of a step that nobody has trained"
            assert it.training.steps.num_booked == 1
            assert it.ledger.store.read("SELECT version FROM events WHERE kind = 'saved'") == [(1,)]
            assert len(it.published) == 2, "the trainer, and its policy"

    simulate(program())


def test_a_trainer_that_starts_without_end_fills_no_memory(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path, num_replicas=2) as it:
            it.links[0].send(TrainerReady(replica=0, num_replicas=2, process_id=1, version=0))
            for _ in range(MAX_EARLY + 1):
                it.links[0].send(PolicyPublished(version=0, buffer="a", digest="", num_bytes=0, publish_s=0.0))
            await asyncio.sleep(1.0)
            assert it.trainer.refused == {Kind.BOUNDS: 1}

    simulate(program())


def test_a_pull_of_a_step_that_is_done_is_refused(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            await it.put(row(0, handmade.sample(5)), StepEnd(step=0, num_tokens=4, num_samples=1))
            handmade.admit(it.ledger, 0)
            it.links[0].send(StepDone(step=0, metrics={}))
            await asyncio.sleep(0.01)
            assert await it.ask(0, step=0, index=0) == []
            assert it.trainer.refused == {Kind.STEPS: 1}

    simulate(program())


def test_a_trainer_of_another_size_is_refused(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path, num_replicas=2) as it:
            it.links[0].send(TrainerReady(replica=0, num_replicas=4, process_id=1, version=0))
            await asyncio.sleep(1.0)

    expected = pytest.RaisesExc(PeerRefused, match=r"trainer-0 counts 4 replicas, the run has 2 \(trainer.ranks and trainer.parallel, or")
    with pytest.RaisesGroup(expected, flatten_subgroups=True):
        simulate(program())


def test_a_trainer_that_is_to_stop_between_two_steps_gets_the_rest_of_its_step_and_nothing_of_the_next(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            it.links[0].send(TrainerReady(replica=0, num_replicas=1, process_id=1, version=0))
            await it.answers(0)
            await it.put(row(0, handmade.sample(5)), row(0, handmade.sample(5, group_id=1)))
            assert len(await it.ask(0, step=0, index=0)) == 1
            it.training.pulls.is_held = True
            await it.put(StepEnd(step=0, num_tokens=8, num_samples=2), row(1, handmade.sample(5, group_id=2)))
            assert len(await it.ask(0, step=0, index=1)) == 1
            assert len(await it.ask(0, step=0, index=2)) == 1, "the end of its step"
            assert await it.ask(0, step=1, index=0) == []
            assert it.training.pulls.newest_given == 0
            for group_id in range(2):
                handmade.admit(it.ledger, group_id)
            it.links[0].send(StepDone(step=0, metrics={}))
            await asyncio.sleep(0.01)
            assert await it.answers(0) == []
            it.training.pulls.is_held = False
            it.training.answer_pulls()
            assert len(await it.answers(0)) == 1
            assert it.training.pulls.newest_given == 1
            it.links[0].send(TrainerReady(replica=0, num_replicas=1, process_id=2, version=0))
            await asyncio.sleep(0.01)
            assert it.training.pulls.newest_given == -1, "another process was given nothing"

    simulate(program())


def test_a_pull_waits_until_every_replica_of_its_trainer_is_known(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path, num_replicas=2) as it:
            await it.put(row(0, handmade.sample(5)), row(0, handmade.sample(5, group_id=1)))
            it.links[1].send(TrainerReady(replica=1, num_replicas=2, process_id=1, version=0))
            assert await it.ask(1, step=0, index=0) == [], "where its trainer is nobody knows"
            it.links[0].send(TrainerReady(replica=0, num_replicas=2, process_id=2, version=0))
            assert names(await it.answers(1)) == [("1/0",)]

    simulate(program())


def test_a_trainer_of_the_ranks_before_is_told_to_end_while_one_of_others_is_awaited(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            it.links[0].send(TrainerReady(replica=0, num_replicas=1, process_id=1, version=0))
            await asyncio.sleep(0.01)
            it.training.session.replace(2, "start again")
            (told,) = await it.answers(0)
            assert told == Stop(reason="start again")
            it.links[0].send(TrainerReady(replica=0, num_replicas=1, process_id=1, version=0))
            (told,) = await it.answers(0)
            assert told == Stop(reason="a trainer of 2 replicas is to take its place")
            assert not it.training.session.replicas
            assert await it.ask(0, step=10, index=0) == [], "it had asked the orchestrator before this one"
            it.links[0].send(StepDone(step=10, metrics={}))
            it.links[0].send(CheckpointSaved(version=11, commit="", num_bytes=1, save_s=0.1))
            await asyncio.sleep(0.01)
            assert it.trainer.refused == {}, "it is no liar"

    simulate(program())


@pytest.mark.parametrize("order", [("done", "published"), ("published", "done")])
def test_the_run_is_finished_once_the_last_step_is_done_published_and_saved(tmp_path: Path, order: tuple[str, str]):
    def published(version: int) -> PolicyPublished:
        return PolicyPublished(version=version, buffer="a", digest="", num_bytes=0, publish_s=0.0)

    async def program() -> None:
        async with bench(tmp_path, num_steps=2) as it:
            commit = ""
            for group_id in range(2):
                handmade.admit(it.ledger, group_id)
                commit = it.ledger.close_step(group_id, num_rows=1, num_tokens=4, num_samples=1, now_s=0.0)
                await it.put(row(group_id, handmade.sample(5, group_id=group_id)), StepEnd(step=group_id, num_tokens=4, num_samples=1))
            it.links[0].send(StepDone(step=0, metrics={}))
            it.links[0].send(published(1))
            for what in order:
                await asyncio.sleep(0.01)
                assert not it.training.finished.is_set()
                it.links[0].send(StepDone(step=1, metrics={}) if what == "done" else published(2))
            await asyncio.sleep(0.01)
            assert not it.training.finished.is_set(), "its checkpoint is still being written"
            it.links[0].send(CheckpointSaved(version=2, commit=commit, num_bytes=1, save_s=0.1))
            await asyncio.sleep(0.01)
            assert it.training.finished.is_set()
            assert [news.version async for news in _first(it.published, 2)] == [1, 2]

    simulate(program())


# --- a trainer that starts again -------------------------------------------------------------------------------------------------------


def ready(process_id: int, *, version: int = 0, commit: str = "") -> TrainerReady:
    return TrainerReady(replica=0, num_replicas=1, process_id=process_id, version=version, commit=commit)


async def train_step(it: Bench, step: int) -> str:
    """Record, deliver and finish a step of one sample, as batching and the trainer would; return its commit."""
    of = handmade.sample(5, group_id=step)
    handmade.admit(it.ledger, step)
    it.ledger.record_score(handmade.scored(of.trajectory), now_s=0.0)
    it.ledger.assign(step, [of], step=step, now_s=0.0)
    it.ledger.pack([of], step=step, row=0, now_s=0.0)
    commit = it.ledger.close_step(step, num_rows=1, num_tokens=4, num_samples=1, now_s=0.0)
    await it.put(row(step, of), StepEnd(step=step, num_tokens=4, num_samples=1, commit=commit))
    await it.ask(0, step=step, index=0)
    it.links[0].send(StepDone(step=step, metrics={}))
    await asyncio.sleep(0.01)
    return commit


def test_steps_since_the_checkpoint_are_offered_again_row_by_row_and_booked_once(tmp_path: Path):
    async def program() -> Ledger:
        async with bench(tmp_path) as it:
            it.links[0].send(ready(1))
            commits = [await train_step(it, step) for step in range(3)]
            it.links[0].send(CheckpointSaved(version=1, commit=commits[0], num_bytes=1, save_s=0.1))
            await asyncio.sleep(0.01)
            it.links[0].send(ready(2, version=1, commit=commits[0]))
            for step in (1, 2):
                assert names(await it.ask(0, step=step, index=0)) == [(f"{step}/0",)]
                (seal,) = await it.ask(0, step=step, index=1)
                assert isinstance(seal, StepClosed)
                assert seal.commit == commits[step]
                it.links[0].send(StepDone(step=step, metrics={}))
            await asyncio.sleep(0.01)
            return it.ledger

    ledger = simulate(program())
    assert ledger.counts().trained == 3
    kinds = ledger.store.read(
        "SELECT kind, coalesce(step, version) FROM events WHERE kind IN ('done', 'saved', 'restarted', 'retrained') ORDER BY seq"
    )
    assert kinds == [("done", 0), ("done", 1), ("done", 2), ("saved", 1), ("restarted", 1), ("retrained", 1), ("retrained", 2)]


def test_a_checkpoint_proves_what_its_trainer_had_no_time_to_say(tmp_path: Path):
    """It trained step 1 and wrote checkpoint 2, and was killed before a word of it was heard."""

    async def program() -> Ledger:
        async with bench(tmp_path) as it:
            it.links[0].send(ready(1))
            await train_step(it, 0)
            of = handmade.sample(5, group_id=1)
            handmade.admit(it.ledger, 1)
            commit = it.ledger.close_step(1, num_rows=0, num_tokens=4, num_samples=1, now_s=0.0)
            await it.put(row(1, of), StepEnd(step=1, num_tokens=4, num_samples=1, commit=commit))
            it.links[0].send(ready(2, version=2, commit=commit))
            await asyncio.sleep(0.01)
            assert it.training.steps.num_booked == 2
            return it.ledger

    ledger = simulate(program())
    assert ledger.counts().trained == 2
    kinds = ledger.store.read("SELECT kind, coalesce(step, version) FROM events WHERE kind IN ('done', 'saved', 'restarted') ORDER BY seq")
    assert kinds == [("done", 0), ("done", 1), ("saved", 2), ("restarted", 2)]
    steps = [line for line in read_journals(tmp_path) if line["kind"] == "step"]
    assert [(line["step"], line["num_samples"]) for line in steps] == [(0, 0), (1, 1)], "no step is without its line"


def test_a_trainer_that_outlives_the_orchestrator_goes_on_where_it_is_and_its_samples_stay(tmp_path: Path):
    """It holds version 2, of which nobody heard, and checkpoint 1: nothing is offered again, and step 1 may still have to be."""

    async def program() -> Ledger:
        async with bench(tmp_path) as it:
            it.links[0].send(ready(1))
            first = await train_step(it, 0)
            of = handmade.sample(5, group_id=1)
            handmade.admit(it.ledger, 1)
            it.ledger.record_score(handmade.scored(of.trajectory), now_s=0.0)
            it.ledger.assign(1, [of], step=1, now_s=0.0)
            commit = it.ledger.close_step(1, num_rows=0, num_tokens=4, num_samples=1, now_s=0.0)
            await it.put(row(1, of), StepEnd(step=1, num_tokens=4, num_samples=1, commit=commit))
            await it.put(row(2, handmade.sample(70, group_id=2)), row(2, handmade.sample(5, group_id=3)))
            assert len(it.rows) == 1, "as far ahead as rows may be taken"
            it.links[0].send(TrainerReady(replica=0, num_replicas=1, process_id=2, version=2, commit=commit, saved=1, saved_commit=first))
            await asyncio.sleep(0.01)
            assert names([*await it.ask(0, step=2, index=0), *await it.ask(0, step=2, index=1)]) == [("2/0",), ("3/0",)]
            return it.ledger

    ledger = simulate(program())
    assert ledger.counts().trained == 2
    kinds = ledger.store.read(
        "SELECT kind, coalesce(step, version) FROM events WHERE kind IN ('done', 'saved', 'restarted', 'survived') ORDER BY seq"
    )
    assert kinds == [("done", 0), ("done", 1), ("saved", 1), ("survived", 2)]
    assert ledger.store.read("SELECT rollout_id FROM samples") == [("1/0",)]


def test_a_trainer_that_another_orchestrator_told_to_train_no_further_is_told_to_stop_and_the_next_one_trains(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            it.links[0].send(ready(1))
            it.links[0].send(TrainingEnded(version=0))
            (stop,) = await it.answers(0)
            assert isinstance(stop, Stop)
            it.links[0].send(ready(2))
            await train_step(it, 0)
            assert it.training.session.end_training("stopped by a signal")
            assert [type(answer) for answer in await it.answers(0)] == [EndTraining]
            assert not it.training.session.ended.is_set(), "the word of the one before is not this one's"
            it.links[0].send(TrainingEnded(version=1))
            assert not await it.answers(0), "it waits: whoever told it to end stops it"
            assert it.training.session.ended.is_set()

    simulate(program())


def test_a_trainer_that_is_not_there_or_not_whole_cannot_be_told_to_train_no_further(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path, num_replicas=2) as it:
            assert not it.training.session.end_training("stopped by a signal")
            it.links[0].send(TrainerReady(replica=0, num_replicas=2, process_id=1, version=0))
            await asyncio.sleep(0.01)
            assert not it.training.session.end_training("stopped by a signal"), "its other replica would go on, and it would wait for it"
            it.links[1].send(TrainerReady(replica=1, num_replicas=2, process_id=2, version=0))
            await asyncio.sleep(0.01)
            assert it.training.session.end_training("stopped by a signal")

    simulate(program())


def test_only_the_replica_that_speaks_for_all_ends_their_training(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path, num_replicas=2) as it:
            for replica in range(2):
                it.links[replica].send(TrainerReady(replica=replica, num_replicas=2, process_id=1, version=0))
            await asyncio.sleep(0.01)
            it.links[1].send(TrainingEnded(version=0))
            assert [await it.answers(replica) for replica in range(2)] == [[], []]
            assert not it.training.session.ended.is_set()

    simulate(program())


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            it.links[0].send(ready(1))
            await train_step(it, 0)
            it.links[0].send(ready(2, version=1, commit="another:7"))
            await asyncio.sleep(1.0)

    expected = pytest.RaisesExc(PeerRefused, match=r"that names the ledger's commit 'another:7', but this ledger has '.*' for step 0")
    with pytest.RaisesGroup(expected, flatten_subgroups=True):
        simulate(program())


def test_a_trainer_that_only_says_so_twice_starts_once(tmp_path: Path):
    async def program() -> None:
        async with bench(tmp_path) as it:
            it.links[0].send(ready(1))
            await train_step(it, 0)
            it.links[0].send(ready(1))
            await it.put(row(1, handmade.sample(5, group_id=1)))
            assert names(await it.ask(0, step=1, index=0)) == [("1/0",)]

    simulate(program())


async def _first(channel: Channel[TrainerReady | PolicyPublished], count: int) -> AsyncIterator[TrainerReady | PolicyPublished]:
    for _ in range(count):
        item = await channel.get()
        assert item is not None
        yield item
