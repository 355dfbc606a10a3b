"""`python -m scripts.chaos.trainer --run-folder RUN`: a trainer without a model, for rehearsals.

It speaks the real trainer's protocol over the real transport, notes the digest of what it is given, and writes checkpoints of the manifest
and a few bytes, in the same order of steps as the real one: draft, manifest, rename, word to the orchestrator.
"""

from __future__ import annotations

import argparse
import collections
import hashlib
import math
import os
import shutil
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from pipelinerl.config.file import load_run
from pipelinerl.data.vocabulary import FAKE_VOCABULARY
from pipelinerl.errors import CheckpointDamaged
from pipelinerl.messages import (
    Alive,
    CheckpointFailed,
    CheckpointSaved,
    EndTraining,
    EngineMismatch,
    LayoutFixed,
    Message,
    MicroBatch,
    PolicyPublished,
    SaveCheckpoint,
    StepClosed,
    StepDone,
    Stop,
    TakeMicroBatch,
    ToTrainer,
    TrainerReady,
    TrainingEnded,
    WeightBufferReleased,
)
from pipelinerl.runtime.process import crash_report, die_with_parent
from pipelinerl.storage import checkpoint_folder, checksum
from pipelinerl.transport.zmq import ZmqLink
from trainer.session import TrainerSession

NUM_BUFFERS = 3
LOGPROB = -math.log(FAKE_VOCABULARY)
"""Of every token, for the engines' stand-in and so for this trainer, too."""


class Rehearsal:
    """One life of the trainer, or of one of its replicas (`scripts.chaos.ranks`)."""

    def __init__(self, run_folder: Path, *, replica: int = 0, num_replicas: int = 1) -> None:
        self.replica = replica
        self._config = load_run(run_folder)
        self._folder = run_folder / "checkpoints"
        self._folder.mkdir(exist_ok=True)
        for draft in self._folder.glob("*.draft"):
            shutil.rmtree(draft)
        self._version, self._commit, self._num_samples, self._digest = 0, "", 0, 0
        self._restore()
        self._free = [f"buffer-{number}" for number in range(NUM_BUFFERS)]
        self._knows_layout = False
        self._is_stopped = self._is_ending = False
        self._next_sign = 0.0
        self._link = ZmqLink(run_folder, "trainer", replica, accepts=ToTrainer)
        ready = TrainerReady(
            replica=replica,
            num_replicas=num_replicas,
            process_id=os.getpid(),
            version=self._version,
            commit=self._commit,
            oldest=checkpoint_folder.oldest_kept(self._folder, keep=self._config.checkpoint.keep),
            damaged=tuple(one for one in checkpoint_folder.set_aside_before(self._folder) if one.version > self._version),
        )
        self._session = TrainerSession(ready)
        self._asked: TakeMicroBatch | None = None
        """Not answered."""

    def run(self) -> None:
        """Train to the last step, then wait to be told to stop."""
        self._link.introduce(self._introduce)
        if self._version and self.replica == 0:
            self._publish()
        while self._version < self._config.trainer.steps and not (self._is_stopped or self._is_ending):
            self._train_step()
        if self._is_ending and self._commit and self._version % self._config.checkpoint.every:
            self._save()
        if self.replica == 0:
            self._say(TrainingEnded(version=self._version))
        while not self._is_stopped:
            self._receive()
        self._link.close()

    def _restore(self) -> None:
        """Take over the newest checkpoint that is whole; set newer ones aside."""
        for folder in reversed(checkpoint_folder.complete(self._folder)):
            try:
                manifest = checkpoint_folder.read_manifest(folder)
                checkpoint_folder.check_files(folder, manifest)
            except CheckpointDamaged as error:
                checkpoint_folder.set_aside(folder, str(error))
                continue
            self._version, self._commit = manifest.version, manifest.commit
            self._num_samples, self._digest = manifest.num_samples, int(manifest.samples, 16)
            return

    def _train_step(self) -> None:
        index = num_samples = digest = 0
        engines: dict[int, collections.Counter[str]] = collections.defaultdict(collections.Counter)
        while True:
            self._asked = TakeMicroBatch(replica=self.replica, step=self._version, index=index)
            self._link.send(self._asked)
            answer = None
            while not isinstance(answer, MicroBatch | StepClosed):
                answer = self._receive()
                if self._is_stopped or self._is_ending:
                    return
                if isinstance(answer, SaveCheckpoint):
                    self._save()
            self._asked = None
            if isinstance(answer, StepClosed):
                break
            parts = (hashlib.blake2b(f"{answer.step}/{name}".encode(), digest_size=8).digest() for name in answer.rollout_ids)
            digest += sum(int.from_bytes(part, "little") for part in parts)
            num_samples += len(answer.rollout_ids)
            _compare(answer, engines)
            self._compute(answer)
            index += 1
        num_samples, digest = self._joined(num_samples, digest)
        self._version, self._commit = self._version + 1, answer.commit
        self._num_samples, self._digest = self._num_samples + num_samples, self._digest + digest
        if self.replica == 0:
            self._publish()
            found = tuple(EngineMismatch(engine_id=engine_id, **counts) for engine_id, counts in sorted(engines.items()))
            self._say(StepDone(step=self._version - 1, metrics=self._figures(answer), engines=found))
        if self._version % self._config.checkpoint.every == 0 or self._version == self._config.trainer.steps:
            self._save()

    def _compute(self, row: MicroBatch) -> None:
        """Take as long as a row takes."""

    def _joined(self, num_samples: int, digest: int) -> tuple[int, int]:
        """Return the samples of a step and their digest, over all replicas."""
        return num_samples, digest

    def _figures(self, closed: StepClosed) -> dict[str, float]:
        """What is told of a step."""
        return {}

    def _publish(self) -> None:
        while not (self._knows_layout and self._free) and not self._is_stopped:
            self._receive()
        if not self._is_stopped:
            self._say(PolicyPublished(version=self._version, buffer=self._free.pop(0), digest="", num_bytes=0, publish_s=0.0))

    def _save(self) -> None:
        draft = self._folder / f"step-{self._version:06}.draft"
        try:
            self._write(draft)
        except OSError as error:  # a full disk
            shutil.rmtree(draft)
            self._say(CheckpointFailed(version=self._version, error=str(error)))
            return
        draft.rename(draft.with_suffix(""))
        oldest = checkpoint_folder.remove_older(self._folder, keep=self._config.checkpoint.keep)
        self._say(CheckpointSaved(version=self._version, commit=self._commit, num_bytes=0, save_s=0.0, oldest=oldest))

    def _write(self, draft: Path) -> None:
        draft.mkdir()
        (draft / "weights").write_bytes(content := os.urandom(64))
        manifest = checkpoint_folder.Manifest(
            version=self._version,
            commit=self._commit,
            num_samples=self._num_samples,
            samples=f"{self._digest % 2**64:016x}",
            files={"weights": checkpoint_folder.File(bytes=len(content), xxh3=checksum.of_bytes(content))},
        )
        checkpoint_folder.write_manifest(draft, manifest)
        time.sleep(0.02)  # long enough to be killed in

    def _introduce(self, kept: Sequence[bytes]) -> list[Message]:
        return [*self._session.introduction(), *([self._asked] if self._asked else [])]

    def _say(self, message: Message) -> None:
        self._session.record_sent(message)
        self._link.send(message)

    def _receive(self) -> object:
        if time.monotonic() >= self._next_sign:
            self._next_sign = time.monotonic() + 1.0
            self._link.send(Alive())
        message = self._link.receive(0.5)
        self._session.record_received(message)
        match message:
            case LayoutFixed():
                self._knows_layout = True
                for published in self._session.published():
                    self._link.send(published)
            case WeightBufferReleased() if self._knows_layout:
                self._free.append(message.buffer)
            case EndTraining():
                self._is_ending = True
            case Stop():
                self._is_stopped = True
        return message


def _compare(batch: MicroBatch, engines: dict[int, collections.Counter[str]]) -> None:
    """Add up how far each engine's log-probabilities are from `LOGPROB` (k3), as the real trainer does."""
    if batch.engine_ids is None:
        return
    of_token = np.repeat(batch.engine_ids, batch.lengths)[batch.loss_mask]
    gaps = LOGPROB - batch.logprobs[batch.loss_mask].astype(np.float64)
    for engine_id in np.unique(batch.engine_ids).tolist():
        of_it = gaps[of_token == engine_id]
        counts = {"num_sequences": int((batch.engine_ids == engine_id).sum()), "num_tokens": len(of_it)}
        engines[engine_id].update(counts | {"kl_sum": float((np.exp(of_it) - 1 - of_it).sum())})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m scripts.chaos.trainer", description=__doc__)
    parser.add_argument("--run-folder", type=Path, required=True)
    run_folder = parser.parse_args().run_folder
    die_with_parent()
    with crash_report(run_folder, "trainer-0"):
        Rehearsal(run_folder).run()


if __name__ == "__main__":
    main()
