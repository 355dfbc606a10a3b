"""Stage 5: rows are handed to the trainer's replicas as they pull, and the trainer's progress is recorded."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Sequence

import msgspec

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import commit_of
from orchestrator.observe.progress import Progress
from orchestrator.peers.peers import Peers
from orchestrator.recovery.open_steps import OpenSteps
from orchestrator.recovery.quarantine import RowSuspects
from orchestrator.recovery.trainer_session import TrainerSession
from orchestrator.rollouts.micro_batch import micro_batch_of
from orchestrator.rollouts.rows import Row, StepEnd
from orchestrator.rules.kv import KvPolicy, squared_lags_of
from orchestrator.rules.quarantine import Quarantine
from orchestrator.rules.validation import trainer as validate
from orchestrator.rules.validation.announcements import AnnouncementCheck
from orchestrator.rules.validation.trainer import TrainerProgress
from orchestrator.rules.validation.violations import shorten
from pipelinerl.algorithms.mismatch import MismatchRule
from pipelinerl.messages import (
    Alive,
    CheckpointFailed,
    CheckpointSaved,
    EndTraining,
    MicroBatch,
    PolicyPublished,
    StepClosed,
    StepDone,
    Stop,
    TakeMicroBatch,
    TrainerReady,
    TrainingEnded,
)
from pipelinerl.runtime.stage import Channel
from pipelinerl.runtime.watch import Watch


@dataclasses.dataclass(slots=True, kw_only=True)
class Training:
    """The stage that answers pulls in lock-step waves: row `index * W + replica` goes to a replica. Where a closed step has no such row, a
    zero-loss row is sent.

    The rows of the step being trained are all held. Of later steps, as many bytes are held as their channel may hold, and a row: then the
    rest waits in the channel, and the stages before it wait for room. A step that is trained is held no more, so the next one's rows always
    come. `recovery.trainer_session` deals with a trainer that starts again, and `recovery.quarantine` with rows that kill it.

    takes     Row and StepEnd, from batching; TrainerReady, TakeMicroBatch, StepDone, PolicyPublished, CheckpointSaved, from the trainer
    gives     MicroBatch and StepClosed, to the trainer; TrainerReady and PolicyPublished, to weight sync
    waits for a row that was pulled; the trainer to finish a step
    woken by  batching and the trainer
    fails     PeerRefused, where the first trainer it hears starts from a checkpoint of another run; what else cannot be about a step, a
              policy, a checkpoint or a start is refused (`rules.validation.trainer`), and a trainer that keeps saying such things replaced
    ends      when the last step is done, its policy published and its checkpoint written
    """

    rows: Channel[Row | StepEnd]
    published: Channel[TrainerReady | PolicyPublished]
    trainer: Peers
    steps: OpenSteps
    num_replicas: int
    num_steps: int
    holds_batches: bool
    """True where a step's rows are offered only once it is closed."""
    ledger: Ledger
    progress: Progress
    watch: Watch
    kv_policy: KvPolicy = dataclasses.field(default_factory=KvPolicy)
    """The policy on old KV caches, which is given the trainer's measurements of them."""
    announcement_check: AnnouncementCheck | None = None
    quarantine: Quarantine = dataclasses.field(default_factory=Quarantine)
    mismatch: MismatchRule | None = None
    """The rule that names the engines whose log-probabilities differ; None names none."""
    teachers: Sequence[str] = ()
    """The names by which rows choose their teacher."""
    finished: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when every step is trained, the last policy is published and its checkpoint written."""
    trainer_ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when the trainer trains no further and has sent its last message."""
    last_version: int = 0
    """The newest policy that the trainer has published."""
    name: str = dataclasses.field(default="training", init=False)
    _is_ending: bool = dataclasses.field(default=False, init=False)
    """True where the trainer was told to train no further."""
    _pulls: dict[tuple[int, int, int], TakeMicroBatch] = dataclasses.field(default_factory=dict, init=False)
    """Unanswered pulls, by replica, step and index: asking again changes nothing."""
    _suspects: RowSuspects = dataclasses.field(init=False)
    _session: TrainerSession = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._suspects = RowSuspects(steps=self.steps, quarantine=self.quarantine, ledger=self.ledger)
        self._session = TrainerSession(
            trainer=self.trainer,
            steps=self.steps,
            suspects=self._suspects,
            published=self.published,
            num_replicas=self.num_replicas,
            announcement_check=self.announcement_check,
            ledger=self.ledger,
            progress=self.progress,
            watch=self.watch,
            on_replaced=self._on_replaced,
            on_started=self._on_started,
        )
        self.trainer.on(TakeMicroBatch, self._on_pull)
        for said, handler in (
            (StepDone, self._on_done),
            (PolicyPublished, self._on_published),
            (CheckpointSaved, self._on_saved),
            (CheckpointFailed, self._on_not_saved),
            (TrainingEnded, self._on_ended),
        ):
            self.trainer.on(said, functools.partial(self._session.once_started, handler))
        self.trainer.on(Alive, self._on_alive)
        self.watch.explain(self._explain)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._collect())
            group.create_task(self._session.run())

    async def wait_until_ready(self) -> None:
        """Wait until every replica of the config has announced itself."""
        await self._session.wait_until_ready()

    @property
    def trainer_version(self) -> int:
        """The version that the trainer started from; every replica must be ready."""
        return self._session.replicas[0].version

    def end_training(self, reason: str) -> bool:
        """Have the trainer save and publish its policy, and train no further; return False where a replica cannot be told."""
        self._is_ending = True
        return all([self.trainer.send(f"trainer-{replica}", EndTraining(reason=reason)) for replica in self._session.replicas])

    async def _collect(self) -> None:
        async for item in self.rows:
            self.steps.add(item)
            self._answer_pulls()
            if self._is_far_ahead:
                with self.watch.waiting(self.name, "the trainer to finish a step"):
                    while self._is_far_ahead:
                        await self.steps.moved_on.wait()

    @property
    def _is_far_ahead(self) -> bool:
        """True where rows of steps after the one being trained fill the bytes that may wait."""
        return self.steps.num_bytes_ahead >= self.rows.bound_bytes

    def _explain(self) -> str | None:
        """Name what the trainer owes, for the report of a stall."""
        if not self.steps.open:
            return None
        num_done, step = self.steps.num_done, self.steps.next
        num_held = 0 if step is None else len(step.rows)
        if self._pulls:
            replica = next(iter(self._pulls))[0]
            return f"trainer-{replica} waits for {len(self._pulls)} rows, step {num_done} has {num_held} so far"
        return f"training holds {num_held} rows of step {num_done}; trainer-0 neither pulls nor finishes it"

    def _on_replaced(self) -> None:
        self._pulls.clear()
        self.trainer_ended.clear()

    def _on_started(self) -> None:
        self._answer_pulls()
        self._check_finished()

    @property
    def _where(self) -> TrainerProgress:
        step = self.steps.next
        is_closed = step is not None and step.end is not None
        return TrainerProgress(num_done=self.steps.num_done, is_next_closed=is_closed, num_steps=self.num_steps)

    # --- what the trainer asks and says ---

    def _on_pull(self, peer: str, pull: TakeMicroBatch) -> None:
        key = (pull.replica, pull.step, pull.index)
        num_asked = sum(replica == pull.replica for replica, _, _ in self._pulls) if key not in self._pulls else 0
        violation = validate.pull(
            pull, self._where, num_asked=num_asked, is_starting=self._session.is_starting or self.announcement_check is None
        )
        if not self._session.is_refused(peer, violation):
            self._pulls[key] = pull
            self._answer_pulls()

    def _answer_pulls(self) -> None:
        if self._session.is_starting:
            return
        for key, pull in list(self._pulls.items()):
            answer = self._answer(pull)
            if answer is not None:
                del self._pulls[key]
                if self.trainer.send(f"trainer-{pull.replica}", answer):
                    self.watch.moved()

    def _answer(self, pull: TakeMicroBatch) -> MicroBatch | StepClosed | None:
        step = self.steps.open.get(pull.step)
        if step is None or (self.holds_batches and step.end is None):
            return None
        number = pull.index * self.num_replicas + pull.replica
        if number < len(step.rows):
            samples = () if number in step.quarantined else step.rows[number].samples
            return micro_batch_of(samples, step=pull.step, index=pull.index, teachers=self.teachers)
        if step.end is None:
            return None
        num_micro_batches = -(-len(step.rows) // self.num_replicas)
        if pull.index < num_micro_batches:
            return micro_batch_of((), step=pull.step, index=pull.index, teachers=self.teachers)
        return StepClosed(
            step=pull.step,
            num_micro_batches=num_micro_batches,
            num_tokens=step.end.num_tokens,
            num_samples=step.end.num_samples,
            commit=step.end.commit,
        )

    def _on_done(self, peer: str, done: StepDone) -> None:
        if not self._session.leads(peer, done) or self._session.is_refused(peer, validate.step_done(done, self._where)):
            return
        finite, violation = validate.figures(done)
        if self._session.is_refused(peer, violation):  # the step itself stands: its weights are what they are
            done = msgspec.structs.replace(done, metrics=finite)
        if self._session.is_refused(peer, validate.engines(done)):
            done = msgspec.structs.replace(done, engines=())
        engines = self._find_mismatches(done)
        now_s = asyncio.get_running_loop().time()
        if done.step < self.steps.num_booked:
            self.ledger.record("retrained", now_s=now_s, step=done.step)
            del self.steps.open[done.step]
        else:
            self._measure_kv(done)
            self._suspects.clear(done.step)
            self.steps.record_trained(done.step, now_s=now_s)
            self.progress.trained(done, now_s=now_s, engines=engines)
        self.steps.advance()
        self.watch.moved()
        self._check_finished()

    def _find_mismatches(self, done: StepDone) -> list[str]:
        found = [] if self.mismatch is None else self.mismatch.words(done.engines)
        for words in found:
            self.progress.journal.write("mismatch", step=done.step, words=words)
            print(f"step {done.step}: {words}", flush=True)
        return found

    def _measure_kv(self, done: StepDone) -> None:
        if not self.kv_policy.is_measured:
            return
        metrics = done.metrics
        lags = [squared_lags_of(sample.trajectory, trained=done.step) for sample in self.steps.open[done.step].samples]
        excess = metrics.get("mismatch_kl_stale_kv", 0.0) - metrics.get(
            "mismatch_kl_on_policy", 0.0
        )  # less the share that is due to arithmetic
        kl = max(0.0, excess) * metrics.get("tokens_stale_kv", 0.0)
        self.kv_policy.measured(kl=kl, square=sum(square for square, _ in lags), num_tokens=sum(num for _, num in lags))

    def _on_published(self, peer: str, published: PolicyPublished) -> None:
        if not self._session.leads(peer, published) or self._session.is_refused(peer, validate.policy_published(published, self._where)):
            return
        self.last_version = published.version
        self.published.put_now(published)  # bounded by the trainer's weight buffers: it cannot publish without a free one
        self._check_finished()

    def _on_saved(self, peer: str, saved: CheckpointSaved) -> None:
        commit = commit_of(self.ledger, saved.version - 1) if 0 < saved.version <= self.steps.num_done else None
        if not self._session.leads(peer, saved) or self._session.is_refused(
            peer, validate.checkpoint_saved(saved, self._where, commit=commit)
        ):
            return
        self.ledger.record_checkpoint(saved.version, saved.commit, oldest=saved.oldest, now_s=asyncio.get_running_loop().time())
        fields = {"version": saved.version, "num_bytes": saved.num_bytes, "save_s": saved.save_s, "error": ""}
        self.progress.journal.write("checkpoint", **fields)
        self._session.last_checkpoint = saved.version
        self._check_finished()

    def _on_not_saved(self, peer: str, failed: CheckpointFailed) -> None:
        if not self._session.leads(peer, failed) or self._session.is_refused(peer, validate.checkpoint_failed(failed, self._where)):
            return
        error = shorten(failed.error)
        self.ledger.record("unsaved", now_s=asyncio.get_running_loop().time(), version=failed.version, reason=error)
        self.progress.journal.write("checkpoint", version=failed.version, num_bytes=0, save_s=0.0, error=error)
        self._session.last_checkpoint = failed.version
        self._check_finished()

    def _on_ended(self, peer: str, ended: TrainingEnded) -> None:
        if not self._session.leads(peer, ended):
            return
        self.trainer_ended.set()
        if ended.version < self.num_steps and not self._is_ending:  # an orchestrator that is gone told it to; it is called back
            for replica in self._session.replicas:
                self.trainer.send(f"trainer-{replica}", Stop(reason="start again: the orchestrator that ended the training is gone"))

    def _on_alive(self, peer: str, alive: Alive) -> None:
        if self._is_ending:  # no other message tells that it saves, which may take longer than the stall limit
            self.watch.moved()

    def _check_finished(self) -> None:
        if self.steps.num_done == self.last_version == self._session.last_checkpoint == self.num_steps:
            self.finished.set()
