"""Stage 5: rows are handed to the trainer's replicas as they pull, and the trainer's progress is recorded."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Sequence

from orchestrator.ledger.ledger import Ledger
from orchestrator.observe.progress import Progress
from orchestrator.peers.peers import Peers
from orchestrator.recovery.open_steps import OpenSteps
from orchestrator.recovery.quarantine import RowSuspects
from orchestrator.recovery.trainer_session import TrainerSession
from orchestrator.rollouts.micro_batch import micro_batch_of
from orchestrator.rollouts.rows import Row, StepEnd
from orchestrator.rules.kv import KvPolicy
from orchestrator.rules.pulls import Pulls
from orchestrator.rules.quarantine import Quarantine
from orchestrator.rules.validation import trainer as validate
from orchestrator.rules.validation.announcements import AnnouncementCheck
from orchestrator.stages.alternation import Alternation
from pipelinerl.algorithms.mismatch import MismatchRule
from pipelinerl.messages import MicroBatch, PolicyPublished, StepClosed, StepDone, TakeMicroBatch, TrainerReady
from pipelinerl.runtime.stage import Channel
from pipelinerl.runtime.watch import Watch


@dataclasses.dataclass(slots=True, kw_only=True)
class Training:
    """The stage that answers pulls in lock-step waves: row `index * W + replica` goes to a replica. Where a closed step has no such row, a
    zero-loss row is sent.

    The rows of the step being trained are all held. Of later steps, as many bytes are held as their channel may hold, and a row: then the
    rest waits in the channel, and the stages before it wait for room. A step that is trained is held no more, so the next one's rows always
    come. `recovery.trainer_session` deals with a trainer that starts again, with its checkpoints and its end; `recovery.quarantine` with
    rows that kill it.

    takes     Row and StepEnd, from batching; TrainerReady, TakeMicroBatch, StepDone, PolicyPublished, from the trainer
    gives     MicroBatch and StepClosed, to the trainer; TrainerReady and PolicyPublished, to weight sync
    waits for a row that was pulled; the trainer to finish a step; its phase, where engines share its devices
    woken by  batching and the trainer
    fails     PeerRefused, where the first trainer it hears starts from a checkpoint of another run; what else cannot be about a step, a
              policy, a checkpoint or a start is refused (`rules.validation.trainer`), and a trainer that keeps saying such things replaced
    ends      when the last step is done, its policy published and its checkpoint written
    """

    name = "training"
    rows: Channel[Row | StepEnd]
    published: Channel[TrainerReady | PolicyPublished]
    trainer: Peers
    steps: OpenSteps
    num_replicas: int
    num_steps: int
    holds_batches: bool
    """True where a step's rows are offered only once it is closed."""
    alternation: Alternation = dataclasses.field(default_factory=Alternation)
    """The phases of engines and trainer, where they share devices: in its own the trainer has its rows."""
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
    last_version: int = 0
    """The newest policy that the trainer has published."""
    pulls: Pulls = dataclasses.field(init=False)
    _suspects: RowSuspects = dataclasses.field(init=False)
    session: TrainerSession = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.pulls = Pulls(newest_given=max(self.steps.open, default=-1))  # of a trainer that outlives an orchestrator
        self._suspects = RowSuspects(steps=self.steps, quarantine=self.quarantine, ledger=self.ledger)
        self.session = TrainerSession(
            trainer=self.trainer,
            steps=self.steps,
            suspects=self._suspects,
            published=self.published,
            num_replicas=self.num_replicas,
            num_steps=self.num_steps,
            announcement_check=self.announcement_check,
            ledger=self.ledger,
            progress=self.progress,
            watch=self.watch,
            on_replaced=self.pulls.forget,
            on_moved=self._on_moved,
        )
        self.alternation.num_closed, self.alternation.begin_training = self.session.num_closed, self.answer_pulls
        self.trainer.on(TakeMicroBatch, self._on_pull)
        self.session.on(StepDone, self._on_done, check=validate.step_done)
        self.session.on(PolicyPublished, self._on_published, check=validate.policy_published)
        self.watch.explain(self._explain)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._collect())
            group.create_task(self.session.run())

    async def _collect(self) -> None:
        async for item in self.rows:
            self.steps.add(item)
            self.alternation.update()
            self.answer_pulls()
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
        if self.pulls:
            return f"trainer-{self.pulls.first_replica} waits for {len(self.pulls)} rows, step {num_done} has {num_held} so far"
        return f"training holds {num_held} rows of step {num_done}; trainer-0 neither pulls nor finishes it"

    def _on_moved(self) -> None:
        """Answer what can be answered now, and note whether all is done."""
        self.alternation.update()
        self.answer_pulls()
        if self.steps.num_done == self.last_version == self.session.checkpoints.newest == self.num_steps:
            self.finished.set()

    # --- what the trainer asks and says ---

    def _on_pull(self, peer: str, pull: TakeMicroBatch) -> None:
        is_starting = self.session.is_unknown or self.announcement_check is None
        violation = validate.pull(pull, self.session.position, num_asked=self.pulls.num_asked(pull), is_starting=is_starting)
        if not self.session.is_of_before(peer) and not self.session.is_refused(peer, violation):
            self.pulls.add(pull)
            self.answer_pulls()

    def answer_pulls(self) -> None:
        """Give what was asked for, and may be given now."""
        if self.session.is_unknown or not self.alternation.may_train:
            return
        for pull in self.pulls.answerable():
            answer = self._answer(pull) if self.alternation.may_train_step(pull.step) else None
            if answer is not None:
                self.pulls.answered(pull)
                if self.trainer.send(f"trainer-{pull.replica}", answer):
                    self.watch.moved()

    def _answer(self, pull: TakeMicroBatch) -> MicroBatch | StepClosed | None:
        if (step := self.steps.open.get(pull.step)) is None or (self.holds_batches and step.end is None):
            return None
        number = pull.index * self.session.num_replicas + pull.replica
        loss = self.ledger.losses.of(pull.step)
        if number < len(step.rows):
            samples = () if number in step.quarantined else step.rows[number].samples
            return micro_batch_of(samples, step=pull.step, index=pull.index, teachers=self.teachers, loss=loss.name)
        if step.end is None:
            return None
        if pull.index < (num_micro_batches := -(-len(step.rows) // self.session.num_replicas)):
            return micro_batch_of((), step=pull.step, index=pull.index, teachers=self.teachers, loss=loss.name)
        return StepClosed(
            step=pull.step,
            num_micro_batches=num_micro_batches,
            num_tokens=step.end.num_tokens,
            num_samples=step.end.num_samples,
            commit=step.end.commit,
            loss=loss.name,
            demonstrations=loss.demonstrations,
        )

    def _on_done(self, done: StepDone) -> None:
        done, violations = validate.figures(done)
        for violation in violations:
            self.trainer.refuse("trainer-0", violation)
        engines = [] if self.mismatch is None else self.mismatch.words(done.engines)
        self.progress.mismatched(done.step, engines)
        now_s = asyncio.get_running_loop().time()
        if done.step < self.steps.num_booked:
            self.ledger.record("retrained", now_s=now_s, step=done.step)
            del self.steps.open[done.step]
        else:
            self.kv_policy.trained(done.step, [sample.trajectory for sample in self.steps.open[done.step].samples], done.metrics)
            self._suspects.clear(done.step)
            self.steps.record_trained(done.step, now_s=now_s)
            self.progress.trained(done, now_s=now_s, engines=engines)
        self.steps.advance()
        self.watch.moved()
        self._on_moved()

    def _on_published(self, published: PolicyPublished) -> None:
        self.last_version = published.version
        self.published.put_now(published)  # bounded by the trainer's weight buffers: it cannot publish without a free one
        self._on_moved()
