"""Stage 5: hands rows to the trainer's replicas as they pull, and books what the trainer says it has done."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.rollouts import summary_of
from orchestrator.ledger.snapshot import RecordedStep, commit_of, first_kept_step, read_steps, saved_versions
from orchestrator.observe.progress import Progress
from orchestrator.peers.peers import Peers
from orchestrator.rules.kv import KvPolicy, squared_lags
from orchestrator.rules.quarantine import Quarantine
from orchestrator.rules.validation import trainer as validate
from orchestrator.rules.validation.announcements import AnnouncementCheck
from orchestrator.rules.validation.trainer import TrainerProgress
from orchestrator.rules.validation.violations import Kind, Violation, number_of, shorten
from orchestrator.stages.batching import Row, StepEnd
from pipelinerl.algorithms.mismatch import MismatchRule
from pipelinerl.data.expert_routes import joined
from pipelinerl.errors import DataError, PeerRefused
from pipelinerl.messages import (
    UNSAMPLED,
    Alive,
    CheckpointFailed,
    CheckpointSaved,
    EndTraining,
    Finish,
    Message,
    MicroBatch,
    PolicyPublished,
    Prompt,
    Sample,
    StepClosed,
    StepDone,
    Stop,
    TakeMicroBatch,
    TerminalStatus,
    TrainerReady,
    TrainingEnded,
    Trajectory,
)
from pipelinerl.runtime.stage import Channel, Signal
from pipelinerl.runtime.watch import Watch

MAX_EARLY = 64
"""Messages of a trainer whose start is not dealt with yet. Ours says three: its policy, its checkpoint, a step. More only lets one that
violations fill memory.
"""


@dataclasses.dataclass(slots=True, kw_only=True)
class _Step:
    rows: list[Row] = dataclasses.field(default_factory=list)
    refused: frozenset[int] = frozenset()
    """Numbers of the rows that are sent no more: a zero-loss row takes the place of each."""
    seal: StepEnd | None = None
    num_bytes: int = 0
    """Of the rows."""

    def add(self, row: Row) -> None:
        self.rows.append(row)
        self.num_bytes += row.num_bytes

    @property
    def samples(self) -> list[Sample]:
        """Those that train."""
        return [sample for number, row in enumerate(self.rows) if number not in self.refused for sample in row.samples]


class Training:
    """Answers pulls in lock-step waves: row `index * W + replica` goes to a replica; where a sealed step has none, a zero-loss row.

    A trainer that starts again begins where its checkpoint ends: the steps since are offered once more, as the ledger has them. One that
    outlived the orchestrator goes on where it is: what it had of an open step lies in the ledger as it was given it. One that had been told
    to train no further by an orchestrator that was killed then is told to stop, whereupon the launcher starts it again.

    The rows of the step being trained are all held, and of steps after it as many bytes as their channel may hold, and a row: then the
    rest waits there, and those before it wait for room. A step that is trained is held no more, so the next one's rows always come.

    takes     Row and StepEnd, from batching; TrainerReady, TakeMicroBatch, StepDone, PolicyPublished, CheckpointSaved, from the trainer
    gives     MicroBatch and StepClosed, to the trainer; TrainerReady and PolicyPublished, to weight sync
    waits for a row that was pulled; the trainer to finish a step
    woken by  batching and the trainer
    fails     PeerRefused, where the first trainer it hears starts from a checkpoint of another run; what else cannot be about a step, a
              policy, a checkpoint or a start is refused (`rules.validation.trainer`), and a trainer that keeps saying such things replaced
    ends      when the last step is done, its policy published and its checkpoint written
    """

    name = "training"

    def __init__(
        self,
        *,
        rows: Channel[Row | StepEnd],
        published: Channel[TrainerReady | PolicyPublished],
        trainer: Peers,
        num_replicas: int,
        num_steps: int,
        holds_batches: bool,
        ledger: Ledger,
        progress: Progress,
        watch: Watch,
        num_booked: int = 0,
        recorded: Mapping[int, RecordedStep] | None = None,
        kv_policy: KvPolicy | None = None,
        announcement_check: AnnouncementCheck | None = None,
        quarantine: Quarantine | None = None,
        mismatch: MismatchRule | None = None,
        teachers: Sequence[str] = (),
    ) -> None:
        """`num_booked` steps were done in an earlier life of the run; `recorded` holds what it had packed of the steps after them.

        `kv_policy` is told what the trainer measures of old KV caches; `announced` says what cannot be about who announces itself,
        `mismatch` which engine's log-probabilities differ. `teachers` are the names by which rows choose theirs.
        """
        self._teachers = tuple(teachers)
        self._mismatch = mismatch
        self._kv_policy = kv_policy or KvPolicy()
        self._announcement_check = announcement_check
        self._quarantine = quarantine or Quarantine()
        self.finished = asyncio.Event()
        """Set when every step is trained, the last policy is published and its checkpoint written."""
        self.trainer_ended = asyncio.Event()
        """Set when the trainer trains no further and has said all there is to say."""
        self._is_ending = False
        """The trainer was told to train no further."""
        self._ready = Signal()
        """Set when a replica announces itself."""
        self._replicas: dict[int, TrainerReady] = {}
        self._starts: Channel[TrainerReady] = Channel("starts", giver="trainer", taker=self.name, watch=watch, bound_bytes=1)
        self._rows = rows
        self._published = published
        self._trainer = trainer
        self._num_replicas = num_replicas
        self._num_steps = num_steps
        self._holds_batches = holds_batches
        self._ledger = ledger
        self._progress = progress
        self._watch = watch
        self._steps: dict[int, _Step] = {number: _step_of(number, step) for number, step in (recorded or {}).items()}
        self._pulls: dict[tuple[int, int, int], TakeMicroBatch] = {}
        """Unanswered pulls, by replica, step and index: asking again changes nothing."""
        self._is_condemned = False
        """The trainer was to be replaced for what it said: no row that it had in hand is to blame."""
        self._early: list[Callable[[], None]] = []
        """What a trainer that starts has said already, to be dealt with once it is known where it stands."""
        self._is_starting = False
        """A trainer has announced itself, and what it is to begin with is being fetched."""
        self.num_booked = num_booked
        """Steps that the ledger has as done."""
        self._num_done = 0
        """Steps that are in the trainer's weights; fewer than booked while it does some again."""
        self._moved_on = Signal()
        """Set when `_num_done` has changed."""
        self._last_version = 0
        self._last_checkpoint = 0
        trainer.on(TrainerReady, self._on_ready)
        trainer.on(TakeMicroBatch, self._on_pull)
        for said, handler in (
            (StepDone, self._on_done),
            (PolicyPublished, self._on_published),
            (CheckpointSaved, self._on_saved),
            (CheckpointFailed, self._on_not_saved),
            (TrainingEnded, self._on_ended),
        ):
            trainer.on(said, functools.partial(self._once_started, handler))
        trainer.on(Alive, self._on_alive)
        trainer.on_condemned(self._on_condemned)
        watch.explain(self._explain)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as group:
            group.create_task(self._collect())
            group.create_task(self._follow_starts())

    async def wait_until_ready(self) -> None:
        """Wait until every replica of the config has announced itself."""
        while len(self._replicas) < self._num_replicas:
            await self._ready.wait()

    @property
    def trainer_version(self) -> int:
        """The version that the trainer started from; needs every replica to be ready."""
        return self._replicas[0].version

    def end_training(self, reason: str) -> bool:
        """Have the trainer save and publish what it has, and train no further; False where a replica cannot be told."""
        self._is_ending = True
        return all([self._trainer.send(f"trainer-{replica}", EndTraining(reason=reason)) for replica in self._replicas])

    @property
    def last_version(self) -> int:
        """The newest policy that the trainer has published."""
        return self._last_version

    async def _collect(self) -> None:
        async for item in self._rows:
            step = self._steps.setdefault(item.step, _Step())
            if isinstance(item, StepEnd):
                step.seal = item
            else:
                step.add(item)
            self._answer_pulls()
            if self._is_far_ahead:
                with self._watch.waiting(self.name, "the trainer to finish a step"):
                    while self._is_far_ahead:
                        await self._moved_on.wait()

    @property
    def _is_far_ahead(self) -> bool:
        """True where rows of steps after the one being trained take as much as may wait."""
        ahead = sum(step.num_bytes for number, step in self._steps.items() if number > self._num_done)
        return ahead >= self._rows.bound_bytes

    def _explain(self) -> str | None:
        """What the trainer owes: for the verdict on a stall."""
        if not self._steps:
            return None
        held = self._steps[self._num_done].rows if self._num_done in self._steps else []
        if self._pulls:
            replica = next(iter(self._pulls))[0]
            return f"trainer-{replica} waits for {len(self._pulls)} rows, step {self._num_done} has {len(held)} so far"
        return f"training holds {len(held)} rows of step {self._num_done}; trainer-0 neither pulls nor finishes it"

    # --- a trainer starts, or starts again ---

    @property
    def _trainer_progress(self) -> TrainerProgress:
        step = self._steps.get(self._num_done)
        is_sealed = step is not None and step.seal is not None
        return TrainerProgress(num_done=self._num_done, is_next_closed=is_sealed, num_steps=self._num_steps)

    def _is_refused(self, peer: str, violation: Violation | None) -> bool:
        """Refuse what a trainer says, where something cannot be about it."""
        if violation is not None:
            self._trainer.refuse(peer, violation)
        return violation is not None

    def _leads(self, peer: str, said: Message) -> bool:
        """True for the replica that speaks for all of steps, policies and checkpoints."""
        words = f"{type(said).__name__} of {peer}, expected of trainer-0, which speaks for all replicas"
        return not self._is_refused(peer, None if number_of(peer) == 0 else Violation(kind=Kind.IDENTITY, words=words))

    def _once_started(self, handler: Callable[[str, Any], None], peer: str, said: Message) -> None:
        """Deal with what a trainer says of steps, policies and checkpoints once it is known where it stands: an honest one is ahead of what
        the one before, or nobody yet, had done."""
        if not (self._is_starting or 0 < len(self._replicas) < self._num_replicas):
            handler(peer, said)
        elif len(self._early) < MAX_EARLY:
            self._early.append(lambda: handler(peer, said))
        else:
            words = f"{type(said).__name__}: {len(self._early)} messages while it starts, expected at most {MAX_EARLY}"
            self._trainer.refuse(peer, Violation(kind=Kind.BOUNDS, words=words))

    def _on_ready(self, peer: str, ready: TrainerReady) -> None:
        known = self._replicas.get(ready.replica)
        if (violation := self._miscounts(peer, ready)) is not None:
            if known is None:
                raise PeerRefused(violation.words)
            self._trainer.refuse(peer, violation, is_hopeless=True)
            return
        if self._announcement_check is not None and self._is_refused(peer, self._announcement_check.trainer(ready)):
            return
        if known is not None and known.process_id == ready.process_id:
            return
        if known is not None and self._announcement_check is not None and (words := self._wrong_start(ready)):
            self._trainer.refuse(peer, Violation(kind=Kind.STEPS, words=words), is_hopeless=True)
            return
        if known is not None:  # replicas start together: whoever else is known is gone, too
            self._replicas.clear()
            self._pulls.clear()
            self._early.clear()
            self.trainer_ended.clear()
        self._replicas[ready.replica] = ready
        self._ready.set()
        if len(self._replicas) == self._num_replicas:
            starts = {(one.version, one.commit) for one in self._replicas.values()}
            if len(starts) > 1 and not _outlived(self._replicas[0]):
                raise PeerRefused(f"the trainer's replicas start from different checkpoints: {sorted(self._replicas.items())}")
            self._is_starting = True
            self._published.put_now(self._replicas[0])  # bounded: a trainer takes seconds to start
            self._starts.put_now(self._replicas[0])  # bounded likewise

    async def _follow_starts(self) -> None:
        is_first = True
        loop = asyncio.get_running_loop()
        async for ready in self._starts:
            if words := self._wrong_start(ready):
                raise PeerRefused(words)
            if ready.version < self.num_booked:
                end = min(self.num_booked, min(self._steps, default=self.num_booked))
                recorded = await loop.run_in_executor(None, functools.partial(read_steps, self._ledger, first=ready.version, end=end))
                self._steps |= {number: _step_of(number, step) for number, step in recorded.items()}
            for step in range(self.num_booked, ready.version):  # its weights prove what their trainer had no time to say
                self._progress.proven(step, self._steps[step].samples, now_s=loop.time())
                self._book(step, now_s=loop.time())
            self._suspect(ready.suspects)
            self._last_checkpoint = ready.version if ready.saved is None else ready.saved
            self._book_checkpoints(ready)
            if _outlived(ready):
                self._ledger.record("survived", now_s=loop.time(), version=ready.version)
            elif ready.version or self.num_booked or not is_first:
                self._ledger.record("restarted", now_s=loop.time(), version=ready.version)
            is_first = False
            for step in [step for step in self._steps if step < ready.version]:
                del self._steps[step]
            self._num_done = ready.version
            self._moved_on.set()
            self._is_starting = len(self._starts) > 0
            if not self._is_starting:
                early, self._early = self._early, []
                for handle in early:
                    handle()
            self._answer_pulls()
            self._check_finished()

    def _book_checkpoints(self, ready: TrainerReady) -> None:
        """Have the ledger count on the very checkpoints that the trainer can still use."""
        version, now_s = self._last_checkpoint, asyncio.get_running_loop().time()
        known = saved_versions(self._ledger)
        reasons = {damage.version: damage.reason for damage in ready.damaged}
        for newer in sorted((one for one in known if one > version), reverse=True):
            reason = reasons.get(newer, "it is not there any more")
            self._ledger.discard_checkpoint(newer, reason, now_s=now_s)
            self._progress.journal.write("checkpoint", version=newer, num_bytes=0, save_s=0.0, error=f"discarded: {reason}")
            print(f"checkpoint {newer} is discarded: {reason}; version {version} is used, and what came after is trained again", flush=True)
        if version and version not in known:
            self._ledger.record_checkpoint(version, ready.saved_commit or ready.commit, oldest=ready.oldest, now_s=now_s)

    def _suspect(self, rows: Sequence[str]) -> None:
        """The trainer before died with these rows in hand. One that was there twice is sent no more; one that was trained once is none."""
        is_condemned, self._is_condemned = self._is_condemned, False
        if is_condemned:
            return
        known = {f"{number}/{row}" for number, step in self._steps.items() for row in range(len(step.rows)) if number >= self.num_booked}
        keys = sorted(known.intersection(rows))
        now_s = asyncio.get_running_loop().time()
        for key in keys:
            self._ledger.record("suspected", now_s=now_s, peer="trainer", suspect=key)
        for key in self._quarantine.died("trainer", keys):
            step, row = map(int, key.split("/"))
            samples = self._steps[step].rows[row].samples
            self._ledger.quarantine_row(step, row, samples, now_s=now_s)
            self._steps[step].refused |= {row}
            named = ", ".join(f"{one.trajectory.rollout_id} (prompt {one.trajectory.prompt.prompt_id})" for one in samples)
            print(f"row {row} of step {step} killed the trainer twice: it is sent no more, its samples failed: {named}", flush=True)
        if keys:
            self._ledger.flush()  # it must outlive this process, too

    def _clear(self, step: int) -> None:
        """A step is done: what was suspected in it has come through."""
        for row in range(len(self._steps[step].rows)):
            if self._quarantine.came_through("trainer", key := f"{step}/{row}"):
                self._ledger.record("cleared", now_s=asyncio.get_running_loop().time(), peer="trainer", suspect=key)

    def _miscounts(self, peer: str, ready: TrainerReady) -> Violation | None:
        if ready.num_replicas == self._num_replicas:
            return None
        expected = f"the config makes {self._num_replicas} (trainer.ranks and trainer.parallel)"
        return Violation(kind=Kind.BOUNDS, words=f"{peer} counts {ready.num_replicas} replicas, {expected}")

    def _wrong_start(self, ready: TrainerReady) -> str:
        """Why a trainer cannot go on from where it starts: a checkpoint of another run, or one too old; empty where it can.

        Said by the first trainer that this orchestrator hears, it ends the run: its folders do not belong together. Of a later one it costs
        its place, as any other violation does: that it can be done right, the one before has shown.
        """
        if ready.version < (first := first_kept_step(self._ledger)):
            damage = "".join(f"\n  - {one.reason}" for one in ready.damaged)
            return (
                f"the trainer starts from version {ready.version}, but the ledger keeps rows of steps from {first} on: those before were in"
                f" every checkpoint that was kept. Restore a checkpoint of version {first} or later, or start a new run from this one's"
                f" model (checkpoint.keep says how many are kept){damage}"
            )
        if not ready.version:
            return ""
        expected = commit_of(self._ledger, ready.version - 1)
        if ready.commit != expected:
            return (
                f"the trainer starts from a version {ready.version} that names the ledger's commit {ready.commit[:100]!r}, but this"
                f" ledger has {expected!r} for step {ready.version - 1}: the two are of different runs. Resume with both as they were, or"
                " start a new run from the checkpoint's model"
            )
        if ready.saved and ready.saved_commit != (expected := commit_of(self._ledger, ready.saved - 1)):
            return (
                f"the trainer's newest checkpoint, of version {ready.saved}, names the ledger's commit {ready.saved_commit[:100]!r}, but"
                f" this ledger has {expected!r} for step {ready.saved - 1}: the two are of different runs. Resume with both as they were"
            )
        return ""

    # --- what it asks and says ---

    def _on_pull(self, peer: str, pull: TakeMicroBatch) -> None:
        key = (pull.replica, pull.step, pull.index)
        num_asked = sum(replica == pull.replica for replica, _, _ in self._pulls) if key not in self._pulls else 0
        violation = validate.pull(
            pull, self._trainer_progress, num_asked=num_asked, is_starting=self._is_starting or self._announcement_check is None
        )
        if not self._is_refused(peer, violation):
            self._pulls[key] = pull
            self._answer_pulls()

    def _answer_pulls(self) -> None:
        if self._is_starting:
            return
        for key, pull in list(self._pulls.items()):
            answer = self._answer(pull)
            if answer is not None:
                del self._pulls[key]
                if self._trainer.send(f"trainer-{pull.replica}", answer):
                    self._watch.moved()

    def _answer(self, pull: TakeMicroBatch) -> MicroBatch | StepClosed | None:
        step = self._steps.get(pull.step)
        if step is None or (self._holds_batches and step.seal is None):
            return None
        number = pull.index * self._num_replicas + pull.replica
        if number < len(step.rows):
            samples = () if number in step.refused else step.rows[number].samples
            return micro_batch_of(samples, step=pull.step, index=pull.index, teachers=self._teachers)
        if step.seal is None:
            return None
        num_micro_batches = -(-len(step.rows) // self._num_replicas)
        if pull.index < num_micro_batches:
            return micro_batch_of((), step=pull.step, index=pull.index, teachers=self._teachers)
        return StepClosed(
            step=pull.step,
            num_micro_batches=num_micro_batches,
            num_tokens=step.seal.num_tokens,
            num_samples=step.seal.num_samples,
            commit=step.seal.commit,
        )

    def _on_done(self, peer: str, done: StepDone) -> None:
        if not self._leads(peer, done) or self._is_refused(peer, validate.step_done(done, self._trainer_progress)):
            return
        finite, violation = validate.figures(done)
        if self._is_refused(peer, violation):  # the step itself stands: its weights are what they are
            done = msgspec.structs.replace(done, metrics=finite)
        if self._is_refused(peer, validate.engines(done)):
            done = msgspec.structs.replace(done, engines=())
        engines = self._name_who_differs(done)
        now_s = asyncio.get_running_loop().time()
        if done.step < self.num_booked:
            self._ledger.record("retrained", now_s=now_s, step=done.step)
            del self._steps[done.step]
        else:
            self._learn_of_kv(done)
            self._clear(done.step)
            self._book(done.step, now_s=now_s)
            self._progress.trained(done, now_s=now_s, engines=engines)
        self._num_done += 1
        self._moved_on.set()
        self._watch.moved()
        self._check_finished()

    def _name_who_differs(self, done: StepDone) -> list[str]:
        found = [] if self._mismatch is None else self._mismatch.words(done.engines)
        for words in found:
            self._progress.journal.write("mismatch", step=done.step, words=words)
            print(f"step {done.step}: {words}", flush=True)
        return found

    def _learn_of_kv(self, done: StepDone) -> None:
        if not self._kv_policy.is_measured:
            return
        metrics = done.metrics
        lags = [_squared_lags(sample.trajectory, trained=done.step) for sample in self._steps[done.step].samples]
        excess = metrics.get("mismatch_kl_stale_kv", 0.0) - metrics.get("mismatch_kl_on_policy", 0.0)  # without what arithmetic does
        kl = max(0.0, excess) * metrics.get("tokens_stale_kv", 0.0)
        self._kv_policy.measured(kl=kl, square=sum(square for square, _ in lags), num_tokens=sum(num for _, num in lags))

    def _book(self, step: int, *, now_s: float) -> None:
        """Have a step's samples end as trained."""
        with self._ledger.transaction():
            for sample in self._steps.pop(step).samples:
                summary = summary_of(sample.trajectory, reward=sample.reward, step=step)
                self._ledger.end(sample.trajectory.rollout_id, TerminalStatus.TRAINED, now_s=now_s, summary=summary)
            self._ledger.record("done", now_s=now_s, step=step)
        self.num_booked += 1

    def _on_published(self, peer: str, published: PolicyPublished) -> None:
        if not self._leads(peer, published) or self._is_refused(peer, validate.policy_published(published, self._trainer_progress)):
            return
        self._last_version = published.version
        self._published.put_now(published)  # bounded by the trainer's weight buffers: it cannot publish without a free one
        self._check_finished()

    def _on_saved(self, peer: str, saved: CheckpointSaved) -> None:
        commit = commit_of(self._ledger, saved.version - 1) if 0 < saved.version <= self._num_done else None
        if not self._leads(peer, saved) or self._is_refused(peer, validate.checkpoint_saved(saved, self._trainer_progress, commit=commit)):
            return
        self._ledger.record_checkpoint(saved.version, saved.commit, oldest=saved.oldest, now_s=asyncio.get_running_loop().time())
        fields = {"version": saved.version, "num_bytes": saved.num_bytes, "save_s": saved.save_s, "error": ""}
        self._progress.journal.write("checkpoint", **fields)
        self._last_checkpoint = saved.version
        self._check_finished()

    def _on_not_saved(self, peer: str, failed: CheckpointFailed) -> None:
        if not self._leads(peer, failed) or self._is_refused(peer, validate.checkpoint_failed(failed, self._trainer_progress)):
            return
        error = shorten(failed.error)
        self._ledger.record("unsaved", now_s=asyncio.get_running_loop().time(), version=failed.version, reason=error)
        self._progress.journal.write("checkpoint", version=failed.version, num_bytes=0, save_s=0.0, error=error)
        self._last_checkpoint = failed.version
        self._check_finished()

    def _on_ended(self, peer: str, ended: TrainingEnded) -> None:
        if not self._leads(peer, ended):
            return
        self.trainer_ended.set()
        if ended.version < self._num_steps and not self._is_ending:  # an orchestrator that is gone told it to; it is called back
            for replica in self._replicas:
                self._trainer.send(f"trainer-{replica}", Stop(reason="start again: the orchestrator that ended the training is gone"))

    def _on_condemned(self, peer: str, is_banned: bool) -> None:
        self._is_condemned = True

    def _on_alive(self, peer: str, alive: Alive) -> None:
        if self._is_ending:  # nothing else tells that it saves, which may take longer than anything may stand still
            self._watch.moved()

    def _check_finished(self) -> None:
        if self._num_done == self._last_version == self._last_checkpoint == self._num_steps:
            self.finished.set()


def _outlived(ready: TrainerReady) -> bool:
    """True where a trainer goes on, under another orchestrator, with steps that no checkpoint holds."""
    return ready.saved not in (None, ready.version)


def _step_of(number: int, recorded: RecordedStep) -> _Step:
    seal = None
    if recorded.closed is not None:
        num_tokens, num_samples, commit = recorded.closed
        seal = StepEnd(step=number, num_tokens=num_tokens, num_samples=num_samples, commit=commit)
    step = _Step(refused=recorded.quarantined_rows, seal=seal)
    for samples in recorded.rows:
        step.add(Row(step=number, samples=samples))
    return step


def micro_batch_of(samples: tuple[Sample, ...], *, step: int, index: int, teachers: Sequence[str] = ()) -> MicroBatch:
    """Lay samples end to end; without samples this is the zero-loss row. Raises `DataError` where a row names none of `teachers`."""
    trajectories = [sample.trajectory for sample in samples]
    return MicroBatch(
        step=step,
        index=index,
        token_ids=_join([trajectory.token_ids for trajectory in trajectories], np.int32),
        loss_mask=_join([trajectory.loss_mask for trajectory in trajectories], np.bool_),
        logprobs=_join([trajectory.logprobs for trajectory in trajectories], np.float32),
        versions=_join([trajectory.versions for trajectory in trajectories], np.int32),
        advantages=_join([sample.advantages for sample in samples], np.float32),
        lengths=np.array([trajectory.num_tokens for trajectory in trajectories], np.int32),
        rollout_ids=tuple(trajectory.rollout_id for trajectory in trajectories),
        rewards=np.array([sample.reward for sample in samples], np.float32),
        truncated=np.array([trajectory.finish is Finish.LENGTH for trajectory in trajectories], np.bool_),
        group_ids=np.array([trajectory.group_id for trajectory in trajectories], np.int32),
        engine_ids=np.array([trajectory.engine_id for trajectory in trajectories], np.int32),
        weights=np.array([sample.weight for sample in samples], np.float32) if any(sample.weight != 1.0 for sample in samples) else None,
        teacher_ids=np.array([teacher_of(trajectory.prompt, teachers) for trajectory in trajectories], np.int32) if teachers else None,
        routes=joined([trajectory.routes for trajectory in trajectories], lengths=[trajectory.num_tokens for trajectory in trajectories]),
    )


def teacher_of(prompt: Prompt, teachers: Sequence[str]) -> int:
    """Which of the teachers judges what is said to a prompt. Raises `DataError`."""
    if (name := prompt.columns.get("teacher")) not in teachers:
        raise DataError(
            f"prompt {prompt.prompt_id}: the row's column teacher is {name!r}, expected one of {', '.join(teachers)} (reference.teachers)"
        )
    return tuple(teachers).index(str(name))


def _squared_lags(trajectory: Trajectory, *, trained: int) -> tuple[float, int]:
    """Of each turn by itself: what was before it is computed anew where the version has changed since."""
    edges = np.flatnonzero(np.diff(trajectory.versions != UNSAMPLED, prepend=False, append=False)).reshape(-1, 2).tolist()
    num_prompt = edges[0][0] if edges else 0
    found = [
        squared_lags(
            trajectory.versions[start:end],
            num_prompt=start,
            recomputed=[at for place in trajectory.recomputed if (at := place + num_prompt - start) >= 0],
            trained=trained,
        )
        for start, end in edges
    ]
    return sum(square for square, _ in found), sum(count for _, count in found)


def _join(columns: list[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate(columns) if columns else np.zeros(0, dtype)
