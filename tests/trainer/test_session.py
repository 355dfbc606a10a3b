"""What another orchestrator is told: the steps in the weights, the checkpoint, and the policies that may be fetched; nothing else."""

from __future__ import annotations

import msgspec

from pipelinerl.messages import (
    CheckpointFailed,
    CheckpointSaved,
    PolicyPublished,
    StepClosed,
    StepDone,
    TrainerReady,
    TrainingEnded,
    WeightBufferReleased,
)
from trainer.session import TrainerSession


def published(version: int) -> PolicyPublished:
    return PolicyPublished(version=version, buffer=f"buffer-{version % 2}", digest=str(version), num_bytes=0, publish_s=0.0)


def seal(step: int) -> StepClosed:
    return StepClosed(step=step, num_micro_batches=1, num_tokens=1, num_samples=1, commit=f"c{step}")


def test_it_tells_the_steps_done_the_newest_checkpoint_and_what_lies_in_buffers():
    ready = TrainerReady(replica=0, num_replicas=1, process_id=1, version=4, commit="c3")
    session = TrainerSession(ready)
    (first,) = session.introduction()
    assert isinstance(first, TrainerReady)
    assert (first.version, first.commit, first.saved, first.saved_commit) == (4, "c3", 4, "c3")
    for step in (4, 5, 6):
        session.record_received(seal(step))
        if step < 6:
            session.record_sent(StepDone(step=step, metrics={}))
            session.record_sent(published(step + 1))
    session.record_sent(CheckpointSaved(version=5, commit="c4", num_bytes=1, save_s=0.0))
    (now,) = session.introduction()
    assert isinstance(now, TrainerReady)
    assert (now.version, now.commit, now.saved, now.saved_commit) == (6, "c5", 5, "c4"), "step 6 is sealed, and not done"
    assert session.published() == [published(5), published(6)]
    session.record_received(WeightBufferReleased(buffer="buffer-1"))
    assert session.published() == [published(6)]


def test_a_policy_that_is_trained_in_place_is_told_again_while_its_copy_is_held():
    session = TrainerSession(TrainerReady(replica=0, num_replicas=1, process_id=1, version=0))
    policies = [msgspec.structs.replace(published(version), buffer="in place", copy=f"copy-{version}") for version in (1, 2)]
    for policy in policies:
        session.record_sent(policy)
    assert session.published() == policies, "an orchestrator that takes another's place has to hand copy 1 back"
    session.record_received(WeightBufferReleased(buffer="copy-1"))
    assert session.published() == policies[1:]


def test_a_checkpoint_that_failed_is_told_until_one_was_written():
    session = TrainerSession(TrainerReady(replica=0, num_replicas=1, process_id=1, version=0))
    failed = CheckpointFailed(version=3, error="no room")
    session.record_sent(failed)
    assert list(session.introduction())[1:] == [failed]
    session.record_sent(CheckpointSaved(version=4, commit="c", num_bytes=1, save_s=0.0))
    assert len(list(session.introduction())) == 1


def test_that_it_trains_no_further_is_told_last():
    session = TrainerSession(TrainerReady(replica=0, num_replicas=1, process_id=1, version=3))
    session.record_sent(ended := TrainingEnded(version=3))
    assert list(session.introduction())[1:] == [ended]
