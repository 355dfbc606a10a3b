"""The steps of a script: what it has decided is written down, leaves for the trainer, and comes back as figures."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

import numpy as np

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import Snapshot
from orchestrator.ledger.step_losses import StepLoss
from orchestrator.recovery.checkpoints import Checkpoints
from orchestrator.rollouts.micro_batch import micro_batch_of
from orchestrator.rules.admission import Admission
from orchestrator.rules.batch import Verdict
from orchestrator.rules.script import ScriptBook
from orchestrator.rules.script_cut import ScriptCut
from orchestrator.rules.script_decisions import SCRIPT, Decision
from orchestrator.rules.validation.trainer import TrainerProgress, logprobs_computed
from orchestrator.rules.validation.violations import Violation
from orchestrator.stages.batching import Batching
from orchestrator.stages.held_policies import HeldPolicies
from orchestrator.stages.script_replay import ScriptReplay
from orchestrator.stages.script_waits import ScriptWaits
from orchestrator.stages.streams import Coming
from orchestrator.stages.training import Training
from pipelinerl.algorithms.step_loss import SFT
from pipelinerl.messages import (
    ComputeLogprobs,
    Demonstration,
    Float32,
    LogprobModel,
    LogprobsComputed,
    MicroBatch,
    Sample,
    SaveCheckpoint,
    ScoredTrajectory,
    StepDone,
    TerminalStatus,
    Trajectory,
)
from pipelinerl.runtime.stage import Stage
from pipelinerl.transport.codec import Decoder, encode

_T = TypeVar("_T")
_done: Decoder[StepDone] = Decoder(StepDone)
SCRIPT_GONE = "the script that asked for it is gone"
"""The reason given for a rollout that an earlier process of the run has asked for and not trained."""


@dataclasses.dataclass(slots=True, kw_only=True)
class ScriptSteps:
    """The calls of a script that decide about steps, or ask the trainer for something between two of them, one after the other."""

    held: HeldPolicies
    book: ScriptBook
    cut: ScriptCut = dataclasses.field(init=False)
    admission: Admission
    ledger: Ledger
    waits: ScriptWaits
    replay: ScriptReplay
    next_step: int
    """The first step that no script has decided upon."""
    past: Snapshot
    """Where the run stood when this process began."""
    max_row_tokens: int
    teachers: Sequence[str] = ()
    """The names by which rows choose their teacher."""
    batching: Batching | None = None
    """The stage that carries decisions out; None until the stages are joined."""
    left: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when the script has trained every step and needs nobody any more."""
    _done: dict[int, StepDone] = dataclasses.field(default_factory=dict)
    """What the trainer said of steps, until the script hears of it."""
    _under_way: set[int] = dataclasses.field(init=False)
    """The steps that were decided upon and that the trainer has not done."""
    _last_turn: asyncio.Event | None = None
    """Set once everything that was asked for is given to the trainer; None where nothing was."""
    _request_ids: itertools.count[int] = dataclasses.field(default_factory=itertools.count)
    _asked: ComputeLogprobs | None = None
    """The rows whose log-probabilities are under way."""
    _computed: LogprobsComputed | None = None

    def __post_init__(self) -> None:
        self.admission.next_step = self.next_step
        self._under_way = set(range(self.past.num_done, self.next_step))
        self.cut = ScriptCut(first_step=self.past.open_step)
        self.held.on_moved = self._on_moved

    def join(self, stages: Iterable[Stage]) -> None:
        """Take the stage that carries decisions out, and hear what the trainer says to the one that speaks with it."""
        for stage in stages:
            if isinstance(stage, Batching):
                self.batching = stage
            elif isinstance(stage, Training):
                stage.session.on(LogprobsComputed, self._hear_logprobs, check=self._check_logprobs)

    @property
    def num_running_groups(self) -> int:
        """Groups that the script before has asked for and this one awaits."""
        return len(self.past.running_groups & self.replay.groups)

    # --- what the script calls ---

    def train(self, rows: Sequence[Sample], *, loss: str) -> Coming[StepDone]:
        """Have rows trained as the next step, by the loss of this name. Raises as `ScriptBook.train`."""
        self.waits.check()
        decisions, scored = self.book.train(rows)
        given = ((row.trajectory.rollout_id, row.reward, row.advantages.tobytes()) for row in rows)
        call = self._begin("train", itertools.chain([loss], given))
        return self._step(call, decisions, StepLoss(name=loss), scored=scored)

    def sft(self, rows: Sequence[Demonstration]) -> Coming[StepDone]:
        """Have demonstrations trained as the next step. Raises as `ScriptBook.sft`."""
        self.waits.check()
        decisions = self.book.sft(len(rows))
        call = self._begin("sft", ((row.num_prompt, row.token_ids.tobytes()) for row in rows))
        return self._step(call, decisions, StepLoss(name=SFT, demonstrations=tuple(rows)))

    async def drop_refused(self) -> None:
        """End the groups whose advantages were refused, and wait until that is booked and what was decided before is trained."""
        decisions = self.book.drops()
        await self.waits.beside(self._in_turn(lambda: self._drop(decisions)), "batching to book what was dropped")
        await self.waits.until(lambda: None if self._under_way else True, "the trainer to finish what was decided")

    async def publish(self, version: int) -> int:
        """Bring policies up to this version to engines, and wait until the trainer has written it; return it."""
        self.held.publish(version)
        self.waits.changed.set()
        await self.waits.until(lambda: True if self.held.newest >= version else None, f"the trainer to write policy {version}")
        return version

    async def save(self, version: int, *, checkpoints: Checkpoints) -> None:
        """Have a version saved, unless it is; the step that follows waits for it."""

        async def save_it() -> None:
            if checkpoints.newest < version:
                self.held.command(SaveCheckpoint(version=version), version=version)
            await checkpoints.wait_for(version)
            self.held.answered()

        await self.waits.beside(self._in_turn(save_it), f"the trainer to save version {version}")

    async def logprobs(self, rollouts: Sequence[Trajectory], *, model: LogprobModel) -> list[Float32]:
        """Return what the newest policy, or the reference, says of each rollout, [L] float32, 0.0 where a token has no loss; the step that
        follows waits for it.
        """
        self.waits.check()
        version = self.book.step
        work = self._in_turn(lambda: self._logprobs(rollouts, model, version))
        return await self.waits.beside(work, f"the trainer to compute log-probabilities under the {model}")

    # --- what the trainer says ---

    def _on_moved(self) -> None:
        """Hear of a policy; who waits for engines that sleep until it is published hears of it, too."""
        changed = self.waits.changed
        (changed.set_all if self.held.puts_engines_to_sleep(self.book.step) else changed.set)()

    def hear_done(self, done: StepDone) -> None:
        """Hear that a step is done; the policy before it can be published no more."""
        self.held.pass_over(done.step)
        self._done[done.step] = done
        self._under_way.discard(done.step)
        self.replay.done(done.step, encode(done))
        self.waits.changed.set()

    def _check_logprobs(self, said: LogprobsComputed, progress: TrainerProgress) -> Violation | None:
        return logprobs_computed(said, asked=self._asked)

    def _hear_logprobs(self, said: LogprobsComputed) -> None:
        """Hear an answer that was checked; one that nobody waits for was asked for twice, of a trainer that started again."""
        if self._asked is not None and said.request_id == self._asked.request_id:
            self._asked, self._computed = None, said
            self.held.answered()
            self.waits.watch.moved()
            self.waits.changed.set()

    # --- inside ---

    def _in_turn(self, work: Callable[[], Coroutine[Any, Any, _T]]) -> Coroutine[Any, Any, _T]:
        """Take the next turn, and return what begins the work once all that was asked for before is given to the trainer."""
        before, self._last_turn = self._last_turn, (mine := asyncio.Event())

        async def wait() -> _T:
            if before is not None:
                await before.wait()
            try:
                return await work()
            finally:
                mine.set()

        return wait()

    async def _logprobs(self, rollouts: Sequence[Trajectory], model: LogprobModel, version: int) -> list[Float32]:
        found: list[Float32] = []
        batches = self._batches_of(rollouts, step=version)
        with self.held.computing():
            for start in range(0, len(batches), self.held.num_replicas):
                rows = tuple(batches[start : start + self.held.num_replicas])
                self._asked, self._computed = ComputeLogprobs(request_id=next(self._request_ids), model=model, rows=rows), None
                self.held.command(self._asked, version=version)
                while self._computed is None:
                    await self.waits.changed.wait()
                found += _by_rollout(rows, self._computed.logprobs)
        return found

    def _begin(self, name: str, given: Iterable[object]) -> int:
        """Record the call that makes the next step, before the ledger hears of it."""
        call = self.replay.begin(name, given, step=self.book.step - 1)
        self.replay.flush()
        return call

    def _step(
        self, call: int, decisions: Sequence[Decision], loss: StepLoss, *, scored: Sequence[ScoredTrajectory] = ()
    ) -> Coming[StepDone]:
        step = self.book.step - 1
        if step >= self.next_step:  # else it was decided upon before, and `go_on` finishes it
            self.admission.next_step = max(self.admission.next_step, step + 1)
            self._under_way.add(step)
            assert self.waits.tasks is not None, "calls come once the stages run"
            self.waits.tasks.create_task(self._in_turn(lambda: self._train(decisions, step=step, loss=loss, scored=scored)))
            if self.book.is_out_of_reach(self.book.step):
                self.waits.changed.set_all()  # who waits for what is too old now hears of it
        return Coming(lambda: self._wait_for(call, step))

    async def _wait_for(self, call: int, step: int) -> StepDone:
        done = await self.replay.wait(call, lambda: self._hear(step), encode=None, decode=_done.decode)
        self.book.trained = max(self.book.trained, step + 1)
        return done

    async def _hear(self, step: int) -> StepDone:
        if step < self.past.num_done:  # what the trainer said of it was lost with the process that heard it
            done = StepDone(step=step, metrics={})
        else:
            done = await self.waits.until(lambda: self._done.pop(step, None), f"the trainer to finish step {step}")
        self.replay.done(step, encode(done))
        return done

    async def _train(self, decisions: Sequence[Decision], *, step: int, loss: StepLoss, scored: Sequence[ScoredTrajectory]) -> None:
        with self.ledger.transaction():
            for one in scored:
                self.ledger.record_score(one, now_s=asyncio.get_running_loop().time(), by=SCRIPT)
            verdicts = self._book(decisions)
            self.ledger.decide(step, loss)
        await self._deliver(verdicts)
        await self._close(step, loss)

    async def _drop(self, decisions: Sequence[Decision]) -> None:
        await self._deliver(self._book(decisions))

    def _book(self, decisions: Sequence[Decision]) -> list[Verdict]:
        """Have batching book what was decided."""
        assert self.batching is not None, "the stages were joined"
        for decision in decisions:
            self.cut.decide(decision)
        return [self.batching.decide(decision.group) for decision in decisions]

    async def _deliver(self, verdicts: Sequence[Verdict]) -> None:
        assert self.batching is not None, "the stages were joined"
        for verdict in verdicts:
            await self.batching.deliver(verdict)

    async def _close(self, step: int, loss: StepLoss) -> None:
        assert self.batching is not None, "the stages were joined"
        counts = self.cut.close()
        await self.batching.close_step(step, *((loss.num_tokens, len(loss.demonstrations)) if loss.demonstrations else counts))

    def _batches_of(self, rollouts: Sequence[Trajectory], *, step: int) -> list[MicroBatch]:
        """Lay rollouts, in their order, into rows."""
        rows: list[list[Sample]] = []
        for rollout in rollouts:
            sample = Sample(trajectory=rollout, reward=0.0, advantages=np.zeros(rollout.num_tokens, np.float32))
            if not rows or sum(one.trajectory.num_tokens for one in rows[-1]) + rollout.num_tokens > self.max_row_tokens:
                rows.append([])
            rows[-1].append(sample)
        return [micro_batch_of(tuple(row), step=step, index=0, teachers=self.teachers) for row in rows]

    # --- a script that goes on ---

    def go_on(self) -> Coroutine[Any, Any, None]:
        """Finish the step in which the script before was interrupted, before anything that this one asks for."""
        self._forsake()

        async def finish_it() -> None:
            assert self.batching is not None, "the stages were joined"
            step = self.past.open_step
            if (open_step := self.past.steps.get(step)) is not None:
                await self.batching.restore(open_step)
            if step < self.next_step:
                await self._close(step, self.ledger.losses.of(step))

        return self._in_turn(finish_it)

    def _forsake(self) -> None:
        """Cancel what the script before has asked for and not trained, but for what this one is led to."""
        gone, now_s = self.past.running_groups - self.replay.groups, asyncio.get_running_loop().time()
        with self.ledger.transaction():
            for name, rollout in self.ledger.rollouts_in_flight().items():
                if rollout.group_id in gone:
                    self.ledger.end(name, TerminalStatus.CANCELLED, now_s=now_s, reason=SCRIPT_GONE)
            for group_id in sorted(gone):
                self.ledger.drop(group_id, step=self.next_step)


def _by_rollout(rows: Sequence[MicroBatch], logprobs: Float32) -> list[Float32]:
    """Cut the log-probabilities of all tokens with a loss into columns of the rollouts."""
    mask = np.concatenate([row.loss_mask for row in rows])
    column = np.zeros(len(mask), np.float32)
    column[mask] = logprobs
    return np.split(column, np.cumsum(np.concatenate([row.lengths for row in rows]))[:-1])
