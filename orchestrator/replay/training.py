"""This module replays the training stage: recorded rows go to replicas once more, also to another number of them."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from orchestrator.replay.clock import simulate
from orchestrator.replay.differences import SHOWN, write_lines
from orchestrator.replay.harness import Harness, as_scored, changed, records
from orchestrator.replay.recorded import RecordedRun, Recording, read_closed_steps
from orchestrator.rollouts.rows import Row, StepEnd
from orchestrator.stages.training import Training
from pipelinerl.config import Config, Mode
from pipelinerl.errors import LedgerError
from pipelinerl.messages import Message, MicroBatch, Sample, StepClosed, TakeMicroBatch, TrainerReady


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """The micro-batches that a replica receives of a step, and the message that closes it."""

    batches: list[MicroBatch]
    closed: StepClosed


Pulled = dict[tuple[int, int], Received]
"""By step and replica."""


def run(recorded: RecordedRun) -> Iterator[str]:
    """Yield, line by line, what the replicas of `config` receive of the closed steps that are recorded complete. Raises `LedgerError`."""
    config, recording, folder = recorded.config, recorded.recording, recorded.folder
    closed_steps = read_closed_steps(recorded.ledger_path)
    rows = {step: samples for step, samples in _rows_of(recording).items() if step in closed_steps}
    if not rows:
        raise LedgerError(f"no closed step of {recorded.ledger_path} is recorded whole: see run.record_groups")
    received: Pulled = simulate(_train(rows, config=config, closed_steps=closed_steps, folder=folder))
    write_lines(folder / "training.jsonl", (_line(*key, batch) for key, one in received.items() for batch in one.batches))
    stopped = collections.Counter(result.stopped_step for group in recording.groups for result in group.results.values())
    num_replicas, num_rows = config.trainer.layout.replicas, sum(map(len, rows.values()))
    wrong = [
        problem
        for step in rows
        for problem in _problems(step, rows[step], closed_steps[step], received, num_stopped=stopped[step], num_replicas=num_replicas)
    ]
    yield (
        f"training: steps {min(rows)} to {max(rows)}, {num_rows:,} rows to {num_replicas} replicas;"
        f" {len(wrong):,} differ from what batching recorded"
    )
    yield from (f"  {problem}" for problem in wrong[:SHOWN])
    yield from _balance(received, num_replicas=num_replicas)


def _rows_of(recording: Recording) -> dict[int, list[list[Sample]]]:
    """Return the rows of each step, in the order in which they were packed."""
    found: dict[int, dict[int, dict[int, Sample]]] = collections.defaultdict(lambda: collections.defaultdict(dict))
    for group in recording.from_a_step_on():
        for member in group.members:
            result = group.results[member.trajectory.rollout_id]
            if result.step is None or result.row is None or result.advantages is None or member.score.reward is None:
                continue
            row, place = result.row
            found[result.step][row][place] = Sample(
                trajectory=member.trajectory, reward=member.score.reward, advantages=result.advantages, weight=member.weight
            )
    return {
        step: [[rows[number][place] for place in sorted(rows[number])] for number in sorted(rows)] for step, rows in sorted(found.items())
    }


async def _train(rows: dict[int, list[list[Sample]]], *, config: Config, closed_steps: dict[int, StepEnd], folder: Path) -> Pulled:
    """Have replicas pull every step, one after the other, as fast as they may."""
    first, num_replicas = min(rows), config.trainer.layout.replicas
    config = changed(as_scored(config), pipeline={"mode": Mode.STREAMING}, trainer={"steps": max(rows) + 1})  # no batch waits for a policy
    with records(folder) as (ledger, journal):
        ledger.record("done", now_s=0.0, step=first - 1)
        commit = ledger.close_step(first - 1, num_rows=0, num_tokens=0, num_samples=0, now_s=0.0)
        harness = Harness(config, ledger=ledger, journal=journal)
        training = harness.stage(Training)
        hub, answers = harness.trainer_hub, collections.defaultdict[str, asyncio.Queue[Message]](asyncio.Queue)
        hub.told = lambda peer, message: answers[peer].put_nowait(message)
        for replica in range(num_replicas):
            ready = TrainerReady(replica=replica, num_replicas=num_replicas, process_id=1, version=first, commit=commit)
            hub.say(f"trainer-{replica}", ready)

        async def feed() -> None:
            for step, packed in rows.items():
                for samples in packed:
                    await training.rows.put(Row(step=step, samples=tuple(samples)))
                await training.rows.put(closed_steps[step])

        async def pull(step: int, replica: int) -> Received:
            batches: list[MicroBatch] = []
            while True:
                hub.say(f"trainer-{replica}", TakeMicroBatch(replica=replica, step=step, index=len(batches)))
                answer = await answers[f"trainer-{replica}"].get()
                if isinstance(answer, StepClosed):
                    return Received(batches=batches, closed=answer)
                assert isinstance(answer, MicroBatch), "a pull has two answers"
                batches.append(answer)

        async def script() -> Pulled:
            async with asyncio.TaskGroup() as group:
                group.create_task(feed())
                return {(step, replica): await pull(step, replica) for step in rows for replica in range(num_replicas)}

        return await harness.run(training, script=script())


def _problems(
    step: int,
    rows: list[list[Sample]],
    end: StepEnd,
    received: Pulled,
    *,
    num_stopped: int,
    num_replicas: int,
) -> Iterator[str]:
    """Yield where replicas receive something else than batching packed, or are told other counts than those of what they receive.

    Rollouts that were stopped early count as samples.
    """
    for number, samples in enumerate(rows):
        batch = received[step, number % num_replicas].batches[number // num_replicas]
        packed = tuple(sample.trajectory.rollout_id for sample in samples)
        if batch.rollout_ids != packed:
            yield f"step {step}, row {number}: rollouts {packed} -> {batch.rollout_ids}"
        elif not np.array_equal(batch.advantages, np.concatenate([sample.advantages for sample in samples])):
            yield f"step {step}, row {number}: other advantages"
    batches = [batch for replica in range(num_replicas) for batch in received[step, replica].batches]
    num_samples = num_stopped + sum(len(batch.rollout_ids) for batch in batches)
    counted = (sum(int(batch.loss_mask.sum()) for batch in batches), num_samples, end.commit)
    for replica in range(num_replicas):
        told = received[step, replica].closed
        for what, one, other in zip(
            ("tokens", "samples", "commit"), (told.num_tokens, told.num_samples, told.commit), counted, strict=True
        ):
            if one != other:
                yield f"step {step}: its end says {what} {one} to replica {replica}, its rows hold {other}"


def _balance(received: Pulled, *, num_replicas: int) -> Iterator[str]:
    """Yield how even the replicas' work is: they go in waves, so each wave is as long as its longest row."""
    tokens = collections.defaultdict(lambda: np.zeros(num_replicas, np.int64))
    for (step, replica), one in received.items():
        for batch in one.batches:
            tokens[step, batch.index][replica] = len(batch.token_ids)
    waves = np.array(list(tokens.values()))
    yield (
        f"  {len(waves):,} waves, {len(waves) / len({step for step, _ in received}):.3g} a step; {np.count_nonzero(waves == 0):,} of"
        f" {waves.size:,} micro-batches without a sample; {waves.sum() / max(1, num_replicas * waves.max(axis=1).sum()):.1%} of the"
        " replicas' time is for tokens, where a row takes as long as it has tokens"
    )


def _line(step: int, replica: int, batch: MicroBatch) -> dict[str, object]:
    return {"step": step, "replica": replica, "index": batch.index, "tokens": len(batch.token_ids), "rollouts": batch.rollout_ids}
