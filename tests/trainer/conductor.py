"""A small orchestrator with an engine of its own, for tests of the whole trainer over the real transport.

It answers pulls, and takes every published policy: attaches the buffer, verifies its digest, and computes the next step's log-probabilities
with exactly those weights. So the gaps that the trainer reports judge the whole path of the weights.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch

from pipelinerl.config import Config
from pipelinerl.errors import PeerGone
from pipelinerl.messages import (
    CheckpointSaved,
    EndTraining,
    Failed,
    LayoutFixed,
    Message,
    MicroBatch,
    PolicyPublished,
    StepClosed,
    StepDone,
    Stop,
    TakeMicroBatch,
    Tensor,
    TrainerReady,
    TrainingEnded,
    WeightBufferReleased,
)
from pipelinerl.transport.zmq import ZmqHub
from pipelinerl.weights.base import num_bytes, plan_layout, views
from pipelinerl.weights.manifest import Manifest, check, verify
from pipelinerl.weights.shared_memory import SharedMemoryReceiver
from tests.trainer.tiny import make_batch, make_model, make_sample, packed_logprobs

ROWS_PER_STEP = 3


def make_config(folder: Path, *, steps: int = 3, **trainer: Any) -> Config:
    return Config.model_validate(
        {
            "model": {"path": str(folder), "dtype": "float32"},
            "data": {"source": "none.jsonl"},
            "reward": [{"function": "none.py:none"}],
            "rollout": {"temperature": 0.8, "group_size": 4, "max_tokens": 16},
            "trainer": {"steps": steps, "learning_rate": 1e-2, "silent_after_s": 60, **trainer},
        }
    )


def _no_spare(manifest: Manifest) -> torch.Tensor:
    raise AssertionError("shared memory is read where it is")


@dataclasses.dataclass
class Conductor:
    """Runs a trainer through its steps."""

    hub: ZmqHub
    folder: Path
    num_steps: int
    num_replicas: int = 1
    stop_after: int | None = None
    """Say `Stop` once this step is done, however many are left."""
    ends_first: bool = False
    """Then say `EndTraining`, and `Stop` once that is answered."""
    logprob_error: float = 0.0
    """Added to every log-probability the engine reports."""
    says_stop: bool = True
    starved: int | None = None
    """Replica that gets nothing more after `stop_after`; the others get their next step whole, and are told to stop after it."""
    silent_from_step: int | None = None
    """Send nothing of this step or a later one."""
    layout: tuple[Tensor, ...] = ()
    """What the engine asks for; by default what its model needs."""
    done: list[StepDone] = dataclasses.field(default_factory=list)
    published: list[PolicyPublished] = dataclasses.field(default_factory=list)
    pulls: list[TakeMicroBatch] = dataclasses.field(default_factory=list)
    saved: list[CheckpointSaved] = dataclasses.field(default_factory=list)
    ended: TrainingEnded | None = None
    failed: str = ""

    def __post_init__(self) -> None:
        self.engine = make_model(self.folder, temperature=0.8)
        tied_names = self.engine.tied_names
        needed = {name: tensor for name, tensor in self.engine.tensors().items() if name not in tied_names}
        self.layout = self.layout or plan_layout(needed)
        self._rows = {0: self._make_rows(0)}
        self._waiting: list[tuple[str, TakeMicroBatch]] = []
        self._sealed: set[int] = set()

    async def run(self) -> None:
        """Serve until the last step is done and its policy published, or the trainer has failed; then tell it to stop."""
        last = self.num_steps if self.stop_after is None else self.stop_after + 1
        while not self.failed and (
            len(self.done) < last or len(self.published) < last or (self.starved is not None and last not in self._sealed)
        ):
            for peer, message in await self.hub.receive():
                self._handle(peer, message)
        if self.ends_first and not self.failed:
            for replica in range(self.num_replicas):
                self.hub.send(f"trainer-{replica}", EndTraining(reason="somebody pressed Ctrl-C"))
            while self.ended is None:
                for peer, message in await self.hub.receive():
                    self._handle(peer, message)
        if not self.failed and self.says_stop:
            for replica in sorted(range(self.num_replicas), key=lambda replica: replica != self.starved):
                self.hub.send(f"trainer-{replica}", Stop(reason="the test is over"))
                if replica == self.starved:
                    await asyncio.sleep(0.5)  # the others go as far as they can before they hear of it

    def _handle(self, peer: str, message: Message) -> None:
        match message:
            case TrainerReady():
                assert (f"trainer-{message.replica}", message.num_replicas) == (peer, self.num_replicas)
                if peer == "trainer-0":
                    self.hub.send(peer, LayoutFixed(tensors=self.layout))
            case TakeMicroBatch():
                self.pulls.append(message)
                self._waiting.append((peer, message))
            case StepDone():
                self.done.append(message)
            case PolicyPublished():
                self._take(peer, message)
            case CheckpointSaved():
                self.saved.append(message)
            case TrainingEnded():
                self.ended = message
            case Failed():
                self.failed = message.error
        self._waiting = [(peer, pull) for peer, pull in self._waiting if not self._answer(peer, pull)]

    def _answer(self, peer: str, pull: TakeMicroBatch) -> bool:
        rows = self._rows.get(pull.step)
        if rows is None or (self.silent_from_step is not None and pull.step >= self.silent_from_step):
            return False
        if pull.replica == self.starved and self.stop_after is not None and pull.step > self.stop_after:
            return False
        number, num_micro_batches = pull.index * self.num_replicas + pull.replica, -(-len(rows) // self.num_replicas)
        if pull.index < num_micro_batches:
            row = rows[number] if number < len(rows) else make_batch([], step=pull.step)
            self._send(peer, msgspec.structs.replace(row, index=pull.index))
        else:
            num_tokens = sum(int(row.loss_mask.sum()) for row in rows)
            num_samples = sum(len(row.lengths) for row in rows)
            seal = StepClosed(
                step=pull.step,
                num_micro_batches=num_micro_batches,
                num_tokens=num_tokens,
                num_samples=num_samples,
                commit=f"commit {pull.step}",
            )
            self._send(peer, seal)
            self._sealed.add(pull.step)
        return True

    def _send(self, peer: str, message: MicroBatch | StepClosed) -> None:
        """A trainer that has failed may be gone before its last words are read; they are read next."""
        with contextlib.suppress(PeerGone):
            self.hub.send(peer, message)

    def _take(self, peer: str, policy: PolicyPublished) -> None:
        """Load a policy as an engine would, release the one before, and sample the next step with it."""
        payload = SharedMemoryReceiver().fetch(policy.buffer, policy.digest, _no_spare)
        assert policy.num_bytes == len(payload.data) == num_bytes(self.layout)
        check(payload.manifest, version=policy.version, layout=self.layout, name=policy.buffer)
        verify(payload.manifest, payload.data, name=policy.buffer)
        with torch.no_grad():
            for name, tensor in views(payload.data, self.layout).items():
                self.engine.tensors()[name].copy_(tensor)
        if self.published:
            self.hub.send(peer, WeightBufferReleased(buffer=self.published[-1].buffer))
        self.published.append(policy)
        if policy.version < self.num_steps:
            self._rows[policy.version] = self._make_rows(policy.version)

    def _make_rows(self, step: int) -> list[MicroBatch]:
        generator = np.random.default_rng(step)
        rows: list[MicroBatch] = []
        for index in range(ROWS_PER_STEP - 1):
            samples = [make_sample(generator, prompt=5, completion=int(generator.integers(1, 8))) for _ in range(6)]
            with torch.no_grad():
                logprobs = packed_logprobs(self.engine, samples).numpy() + self.logprob_error
            for sample in samples:
                count = int(sample["loss_mask"].sum())
                sample["logprobs"][sample["loss_mask"]], logprobs = logprobs[:count], logprobs[count:]
                sample["versions"][sample["loss_mask"]] = step
            rows.append(make_batch(samples, step=step, index=index, first_id=100 * index))
        return [*rows, make_batch([], step=step, index=ROWS_PER_STEP - 1)]
