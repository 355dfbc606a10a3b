"""Stage 5: hands rows to the trainer's replicas as they pull, and books what the trainer says it has done."""

from __future__ import annotations

import asyncio
import dataclasses

import numpy as np

from orchestrator.progress import Progress
from orchestrator.stages.batching import Row, Seal, facts_of
from orchestrator.state.ledger import Ledger
from orchestrator.state.peers import Peers
from pipelinerl.errors import PeerRefused
from pipelinerl.messages import (
    Alive,
    Fate,
    MicroBatch,
    PolicyPublished,
    Sample,
    StepDone,
    StepSealed,
    TakeMicroBatch,
    TrainerReady,
)
from pipelinerl.stages import Channel, Signal
from pipelinerl.watch import Watch


@dataclasses.dataclass(slots=True, kw_only=True)
class _Step:
    rows: list[Row] = dataclasses.field(default_factory=list)
    seal: Seal | None = None


class Delivery:
    """Answers pulls in lock-step waves: row `index * W + replica` goes to a replica; where a sealed step has none, a zero-loss row.

    takes     Row and Seal, from batching; TakeMicroBatch, StepDone, PolicyPublished, from the trainer
    gives     MicroBatch and StepSealed, to the trainer; PolicyPublished, to refresh
    waits for a row that was pulled
    woken by  batching and the trainer
    fails     PeerRefused, where the trainer speaks of a step that is not its next
    ends      when the last step is done and its policy published
    """

    name = "delivery"

    def __init__(
        self,
        *,
        rows: Channel[Row | Seal],
        published: Channel[PolicyPublished],
        trainer: Peers,
        num_replicas: int,
        num_steps: int,
        holds_batches: bool,
        ledger: Ledger,
        progress: Progress,
        watch: Watch,
    ) -> None:
        self.finished = asyncio.Event()
        """Set when every step is trained and the last policy is published."""
        self._ready = Signal()
        """Set when a replica announces itself."""
        self._num_ready = 0
        self._rows = rows
        self._published = published
        self._trainer = trainer
        self._num_replicas = num_replicas
        self._num_steps = num_steps
        self._holds_batches = holds_batches
        self._ledger = ledger
        self._progress = progress
        self._watch = watch
        self._steps: dict[int, _Step] = {}
        self._pulls: dict[tuple[int, int, int], TakeMicroBatch] = {}
        """Unanswered pulls, by replica, step and index: asking again changes nothing."""
        self._num_done = 0
        self._last_version = 0
        trainer.on(TrainerReady, self._on_ready)
        trainer.on(TakeMicroBatch, self._on_pull)
        trainer.on(StepDone, self._on_done)
        trainer.on(PolicyPublished, self._on_published)
        trainer.on(Alive, lambda peer, alive: None)
        watch.explain(self._explain)

    async def run(self) -> None:
        async for item in self._rows:
            step = self._steps.setdefault(item.step, _Step())
            if isinstance(item, Seal):
                step.seal = item
            else:
                step.rows.append(item)
            self._answer_pulls()

    async def wait_until_ready(self) -> None:
        """Wait until every replica of the config has announced itself."""
        while self._num_ready < self._num_replicas:
            await self._ready.wait()

    def _explain(self) -> str | None:
        """What the trainer owes: for the verdict on a stall."""
        if not self._steps:
            return None
        held = self._steps[self._num_done].rows if self._num_done in self._steps else []
        if self._pulls:
            return f"trainer waits for {len(self._pulls)} rows, step {self._num_done} has {len(held)} so far"
        return f"delivery holds {len(held)} rows of step {self._num_done}; the trainer neither pulls nor finishes it"

    def _on_ready(self, peer: str, ready: TrainerReady) -> None:
        if ready.num_replicas != self._num_replicas:
            raise PeerRefused(
                f"{peer} counts {ready.num_replicas} replicas, the config makes {self._num_replicas} (trainer.ranks and trainer.parallel)"
            )
        self._num_ready += 1
        self._ready.set()

    def _on_pull(self, peer: str, pull: TakeMicroBatch) -> None:
        if pull.step < self._num_done:
            raise PeerRefused(
                f"{peer} asks for row {pull.index} of step {pull.step}, which is done; the next to finish is {self._num_done}"
            )
        self._pulls[pull.replica, pull.step, pull.index] = pull
        self._answer_pulls()

    def _answer_pulls(self) -> None:
        for key, pull in list(self._pulls.items()):
            answer = self._answer(pull)
            if answer is not None:
                del self._pulls[key]
                self._trainer.hub.send(f"trainer-{pull.replica}", answer)
                self._watch.moved()

    def _answer(self, pull: TakeMicroBatch) -> MicroBatch | StepSealed | None:
        step = self._steps.get(pull.step)
        if step is None or (self._holds_batches and step.seal is None):
            return None
        number = pull.index * self._num_replicas + pull.replica
        if number < len(step.rows):
            return micro_batch_of(step.rows[number].samples, step=pull.step, index=pull.index)
        if step.seal is None:
            return None
        num_micro_batches = -(-len(step.rows) // self._num_replicas)
        if pull.index < num_micro_batches:
            return micro_batch_of((), step=pull.step, index=pull.index)
        return StepSealed(
            step=pull.step,
            num_micro_batches=num_micro_batches,
            num_tokens=step.seal.num_tokens,
            num_samples=step.seal.num_samples,
        )

    def _on_done(self, peer: str, done: StepDone) -> None:
        if done.step != self._num_done:
            raise PeerRefused(f"{peer} says step {done.step} is done; the next to finish is {self._num_done}")
        now = asyncio.get_running_loop().time()
        for row in self._steps.pop(done.step).rows:
            for sample in row.samples:
                self._ledger.end(
                    sample.trajectory.rollout_id,
                    Fate.TRAINED,
                    now_s=now,
                    facts=facts_of(sample.trajectory, reward=sample.reward, step=done.step),
                )
        self._num_done += 1
        self._progress.trained(done, now_s=now)
        self._watch.moved()
        self._check_finished()

    def _on_published(self, peer: str, published: PolicyPublished) -> None:
        self._last_version = published.version
        self._published.put_now(published)  # bounded by the trainer's slots: it cannot publish without a free one
        self._check_finished()

    def _check_finished(self) -> None:
        if self._num_done == self._num_steps and self._last_version == self._num_steps:
            self.finished.set()


def micro_batch_of(samples: tuple[Sample, ...], *, step: int, index: int) -> MicroBatch:
    """Lay samples end to end; without samples this is the zero-loss row."""
    trajectories = [sample.trajectory for sample in samples]
    return MicroBatch(
        step=step,
        index=index,
        token_ids=_join([trajectory.token_ids for trajectory in trajectories], np.int32),
        trains=_join([trajectory.trains for trajectory in trajectories], np.bool_),
        logprobs=_join([trajectory.logprobs for trajectory in trajectories], np.float32),
        versions=_join([trajectory.versions for trajectory in trajectories], np.int32),
        advantages=_join([sample.advantages for sample in samples], np.float32),
        lengths=np.array([trajectory.num_tokens for trajectory in trajectories], np.int32),
        rollout_ids=tuple(trajectory.rollout_id for trajectory in trajectories),
    )


def _join(columns: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(columns) if columns else np.zeros(0, dtype)
