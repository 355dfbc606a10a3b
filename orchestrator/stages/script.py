"""The stage of a scripted run: it stands where a script takes part in the flow, between generation, scoring and batching.

script -> generation -> script -> scoring -> script -> batching -> training
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterable, Callable, Coroutine, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeVar

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import IntendedStep, Snapshot
from orchestrator.recovery.checkpoints import Checkpoints
from orchestrator.rules.admission import Admission
from orchestrator.rules.script import Decision, ScriptBook, ScriptCut, finish
from orchestrator.stages.batching import Batching
from orchestrator.stages.held_policies import HeldPolicies
from orchestrator.stages.prompts import Drawn
from orchestrator.stages.streams import Intake, Room, Stream
from pipelinerl.errors import NobodySends, RolloutsUnread
from pipelinerl.messages import Prompt, Sample, ScoredTrajectory, StepDone, TerminalStatus, Trajectory
from pipelinerl.runtime.stage import Channel, Signal, Stage
from pipelinerl.runtime.watch import Watch

_T = TypeVar("_T")
SCRIPT_GONE = "the script that asked for it is gone"
"""The reason given for a rollout that an earlier process of the run has asked for and not trained."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Script:
    """Asks for what a script asks for, and hands it the results. What it may ask is decided by `rules.script`.

    Results that the script does not read stay here, up to `queue_bytes` of each kind: then generation and scoring wait, as for any slow
    stage.

    takes     the script's calls; Trajectory, from generation; ScoredTrajectory, from scoring; StepDone, from training
    gives     Drawn, to generation; Trajectory, to scoring; groups with what was decided about them, to batching; results, to the script
    waits for the script; room in the channels
    woken by  the script reading; generation, scoring and training
    fails     never: what a script may not ask is an error of its call
    ends      cancelled, when the script leaves its block
    """

    name = "script"
    prompts: Channel[Drawn]
    generated: Channel[Trajectory]
    to_score: Channel[Trajectory]
    scored: Channel[ScoredTrajectory]
    held: HeldPolicies
    book: ScriptBook
    cut: ScriptCut
    admission: Admission
    ledger: Ledger
    watch: Watch
    queue_bytes: int
    num_siblings: int
    """Rollouts of each group, without a greedy one, where the script does not say how many."""
    adds_greedy: bool
    past: Snapshot
    """Where the run stood when this process began."""
    intended: IntendedStep | None
    """The step that the script before has decided upon, where it was not closed."""
    position: Callable[[], tuple[int, int]]
    """The callback returns the position of the prompt source."""
    left: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when the script has trained every step and needs nobody any more."""
    changed: Signal = dataclasses.field(default_factory=Signal)
    """Set whenever something may be there that a call waits for."""
    _done: dict[int, StepDone] = dataclasses.field(default_factory=dict)
    """What the trainer said of steps, until the script hears of it."""
    _asked: list[Drawn] = dataclasses.field(default_factory=list)
    """Prompts that wait for room towards generation, in order."""
    _sampling: dict[int, Intake[Trajectory]] = dataclasses.field(default_factory=dict)
    """By group."""
    _scoring: dict[str, Intake[ScoredTrajectory]] = dataclasses.field(default_factory=dict)
    """By rollout."""
    _intakes: list[Intake[Any]] = dataclasses.field(default_factory=list)
    """Those of the streams that are not over."""
    _rollouts: Room = dataclasses.field(init=False)
    _scores: Room = dataclasses.field(init=False)
    _batching: Batching | None = None
    _choosing: asyncio.Lock = dataclasses.field(default_factory=asyncio.Lock)
    """Held while the groups of a step are given, so that steps leave one after the other."""
    _num_waiting: int = 0
    """Calls of the script that wait for something."""
    _num_calls: int = 0
    _failure: BaseException | None = None
    """Why the run is over."""
    _tasks: asyncio.TaskGroup | None = None
    _feeders: set[asyncio.Task[None]] = dataclasses.field(default_factory=set)
    """Tasks that have rollouts scored as they are sampled."""

    def __post_init__(self) -> None:
        self._rollouts = Room(what="rollouts that were sampled", bound_bytes=self.queue_bytes)
        self._scores = Room(what="rollouts that were scored", bound_bytes=self.queue_bytes)
        self.watch.is_idle = lambda: not self._num_waiting
        self.admission.next_step = self.book.step
        self.held.on_moved = self.changed.set

    def join(self, stages: Iterable[Stage]) -> None:
        """Take the stage that carries decisions out."""
        self._batching = next(stage for stage in stages if isinstance(stage, Batching))

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._go_on(self._forsake()))
            self._tasks.create_task(self._ask())
            self._tasks.create_task(self._hear_rollouts())
            self._tasks.create_task(self._hear_scores())

    @property
    def num_intended_groups(self) -> int:
        """Groups of the interrupted step that are not assigned to it yet."""
        return 0 if self.intended is None else len({sample.trajectory.group_id for sample in self.intended.samples})

    # --- what the script calls ---

    def sample(self, prompts: Sequence[Prompt], *, num_siblings: int | None) -> Stream[Trajectory]:
        """Have prompts sampled; the stream gives each rollout as it finishes. Raises `NobodySends`."""
        self.check()
        self.book.check_sample()
        size = (num_siblings or self.num_siblings) + self.adds_greedy
        intake: Intake[Trajectory] = self._begin(
            f"sample ({len(prompts)} prompts, {len(prompts) * size} rollouts)", room=self._rollouts, num_bytes=_bytes_of_rollout
        )
        intake.num_left, intake.num_unadmitted = len(prompts) * size, len(prompts)
        position, then = self.position(), functools.partial(self._admitted, intake, size)
        self._asked += [Drawn(prompt=prompt, position=position, num_siblings=num_siblings, then=then) for prompt in prompts]
        self.changed.set()
        return Stream(intake, take=self._take, abandon=self._abandon)

    def score(self, rollouts: Iterable[Trajectory] | AsyncIterable[Trajectory]) -> Stream[ScoredTrajectory]:
        """Have rollouts scored; the stream gives each as its score is there. Raises `TrainedTwice` and `ScriptError`, of rollouts that are
        still being sampled when their turn comes.
        """
        self.check()
        intake: Intake[ScoredTrajectory] = self._begin("score", room=self._scores, num_bytes=_bytes_of_scored)
        if isinstance(rollouts, AsyncIterable):
            intake.is_whole = False
            feeding = self._score_each(rollouts, intake)
        else:
            known = list(rollouts)
            for rollout in known:
                self._begin_scoring(rollout, intake)
            feeding = self._send(known)
        assert self._tasks is not None, "calls come once the stages run"
        feeder = self._tasks.create_task(feeding)
        self._feeders.add(feeder)
        feeder.add_done_callback(self._feeders.discard)
        return Stream(intake, take=self._take, abandon=self._abandon)

    async def train(self, rows: Sequence[Sample]) -> StepDone:
        """Have rows trained as the next step; return what the trainer says of it. Raises as `ScriptBook.train`."""
        self.check()
        step = self.book.step
        decisions, given = self.book.train(rows)
        for scored in given:
            self.ledger.record_score(scored, now_s=asyncio.get_running_loop().time())
        self.admission.next_step = self.book.step
        self.changed.set()  # who waits for what is too old now hears of it
        await self.beside(self._choose(decisions, closes=step), f"batching to close step {step}")
        return await self.wait_for(lambda: self._done.pop(step, None), f"the trainer to finish step {step}")

    async def drop_refused(self) -> None:
        """End the groups whose advantages were refused, and wait until that is booked."""
        await self.beside(self._choose(self.book.drops()), "batching to book what was dropped")

    async def beside(self, work: Coroutine[Any, Any, _T], what: str) -> _T:
        """Wait for work of the run's own. Raises what has ended the run."""
        assert self._tasks is not None, "calls come once the stages run"
        task = self._tasks.create_task(work)
        task.add_done_callback(lambda _: self.changed.set())
        # Work that was cancelled says that the run is over, and why is told in a moment.
        return (await self.wait_for(lambda: task if task.done() and not task.cancelled() else None, what)).result()

    async def wait_for(self, look: Callable[[], _T | None], what: str) -> _T:
        """Wait until `look` gives something. Raises what has ended the run."""
        with self._waiting(what):
            while (found := look()) is None:
                self.check()
                await self.changed.wait()
        return found

    async def publish(self, version: int) -> None:
        """Bring policies up to this version to engines, and wait until the trainer has written it."""
        self.book.published = version
        self.held.publish(version)
        self.changed.set()
        await self.wait_for(lambda: True if self.held.newest >= version else None, f"the trainer to write policy {version}")

    def check(self) -> None:
        """Raise what has ended the run; `RolloutsUnread` where a stream was let go of before its end."""
        if self._failure is not None:
            raise self._failure
        if abandoned := [intake for intake in self._intakes if intake.is_abandoned]:
            self._intakes = [intake for intake in self._intakes if not intake.is_abandoned]
            raise RolloutsUnread(f"{_words(abandoned)}: the stream was let go of before its end. Read it to the end, or ask for less")

    def check_all_read(self) -> None:
        """Raise `RolloutsUnread` where something that was asked for was not read."""
        self.check()
        if unread := [intake for intake in self._intakes if not intake.is_over]:
            raise RolloutsUnread(f"{_words(unread)}: the script ends, and nobody can read it any more. Read every stream to its end")

    def fail(self, error: BaseException) -> None:
        """End every wait of the script with this error."""
        self._failure = self._failure or error
        self.changed.set()

    # --- streams ---

    def _begin(self, what: str, *, room: Room, num_bytes: Callable[[Any], int]) -> Intake[Any]:
        self._num_calls += 1
        intake: Intake[Any] = Intake(what=f"call {self._num_calls}, {what}", room=room, num_bytes=num_bytes)
        self._intakes = [*(one for one in self._intakes if not one.is_over), intake]
        return intake

    async def _take(self, intake: Intake[_T]) -> _T | None:
        """Wait for the next result of a stream; None at its end."""
        intake.reader = asyncio.current_task()
        with self._waiting(intake.what):
            while not intake.ready:
                if intake.failure is not None:
                    raise intake.failure
                if intake.is_over:
                    return None
                self.check()
                self._check_somebody_sends(intake)
                await self.changed.wait()
        result = intake.take()
        if isinstance(result, Trajectory):
            self.book.read(result)
        self.changed.set()  # there is room
        return result

    def _check_somebody_sends(self, intake: Intake[Any]) -> None:
        """Raise where nothing can come that a stream waits for."""
        if intake.num_unadmitted and self.book.is_out_of_reach:
            raise NobodySends(
                f"{intake.what}: {intake.num_unadmitted} prompts wait for an engine that samples under a newer policy, since step"
                f" {self.book.step} comes next and policy {self.book.published} is the last that was published. Publish first"
            )
        full = next((room for room in (self._rollouts, self._scores) if room.is_full), None)
        unread = [one for one in self._intakes if one.ready and one.room is full and one.reader is intake.reader]
        if unread and full is not None:
            raise RolloutsUnread(
                f"{intake.what}: {full.what} and not read fill their room ({full.bound_bytes} bytes, pipeline.queue_bytes), and the task"
                f" that waits here is the one that reads them: {_words(unread)}. Read those first, or in a task of their own"
            )

    def _abandon(self, intake: Intake[Any]) -> None:
        intake.abandon()

    @contextmanager
    def _waiting(self, what: str) -> Iterator[None]:
        """Mark a wait of the script; a task of this stage waits on nobody's behalf."""
        is_script = asyncio.current_task() not in self._feeders
        self._num_waiting += is_script
        try:
            with self.watch.waiting(self.name, what):
                yield
        finally:
            self._num_waiting -= is_script

    # --- rollouts ---

    async def _ask(self) -> None:
        while True:
            while self._asked:
                await self.prompts.put(self._asked.pop(0))
            await self.changed.wait()

    def _admitted(self, intake: Intake[Trajectory], num_siblings: int, group_id: int | None) -> None:
        """Hear which group a prompt became; None: it is quarantined, and nothing comes of it."""
        intake.num_unadmitted -= 1
        if group_id is None:
            intake.num_left -= num_siblings
        else:
            self._sampling[group_id] = intake
            self.book.admitted(group_id, num_siblings=num_siblings)
        self.changed.set()

    async def _hear_rollouts(self) -> None:
        arrived: dict[int, int] = {}
        async for trajectory in self.generated:
            await self._wait_for_room(self._rollouts)
            group_id = trajectory.group_id
            intake = self._sampling[group_id]
            intake.put(trajectory)
            arrived[group_id] = arrived.get(group_id, 0) + 1
            if arrived[group_id] == self.book.num_siblings(group_id):
                del arrived[group_id], self._sampling[group_id]
            self.changed.set()

    def _begin_scoring(self, rollout: Trajectory, intake: Intake[ScoredTrajectory]) -> None:
        self.book.begin_scoring(rollout)
        intake.num_left += 1
        self._scoring[rollout.rollout_id] = intake

    async def _send(self, rollouts: Iterable[Trajectory]) -> None:
        for rollout in rollouts:
            await self.to_score.put(rollout)

    async def _score_each(self, rollouts: AsyncIterable[Trajectory], intake: Intake[ScoredTrajectory]) -> None:
        try:
            async for rollout in rollouts:
                self._begin_scoring(rollout, intake)
                await self.to_score.put(rollout)
        except Exception as error:  # the script's own iterator, or a misuse: the call that reads the scores raises it
            intake.failure = error
        intake.is_whole = True
        self.changed.set()

    async def _hear_scores(self) -> None:
        async for scored in self.scored:
            await self._wait_for_room(self._scores)
            self.book.scored(scored)
            self._scoring.pop(scored.trajectory.rollout_id).put(scored)
            self.changed.set()

    async def _wait_for_room(self, room: Room) -> None:
        if room.is_full:
            self.changed.set()  # who waits for something else looks whether it is the one to read
        while room.is_full:
            await self.changed.wait()

    # --- steps ---

    def hear_done(self, done: StepDone) -> None:
        """Hear that a step is done; the policy before it can be published no more."""
        self.held.pass_over(done.step)
        self._done[done.step] = done
        self.changed.set()

    async def _choose(self, decisions: Sequence[Decision], *, closes: int | None = None) -> None:
        """Have batching carry out what was decided, and close the step `closes`; one step after the other."""
        async with self._choosing:
            await self._carry_out(decisions, closes=closes)

    async def _carry_out(self, decisions: Sequence[Decision], *, closes: int | None) -> None:
        assert self._batching is not None, "the stages were joined"
        if closes is not None:
            self.ledger.intend([sample for decision in decisions for sample in decision.samples], step=closes)
        for decision in decisions:
            self.cut.decide(decision)
            await self._batching.decide(decision.group)
        if closes is not None:
            await self._batching.close_step(closes, *self.cut.close())

    async def save(self, version: int, *, checkpoints: Checkpoints) -> None:
        """Have a version saved, unless it is; the step that follows waits for it."""
        async with self._choosing:
            if checkpoints.newest < version:
                self.held.save(version)
            await self.beside(checkpoints.wait_for(version), f"the trainer to save version {version}")

    # --- a script that goes on ---

    async def _go_on(self, decisions: Sequence[Decision]) -> None:
        """Finish the step in which the script before was interrupted."""
        assert self._batching is not None, "the stages were joined"
        async with self._choosing:
            if (open_step := self.past.steps.get(self.past.open_step)) is not None:
                await self._batching.restore(open_step)
            if self.intended is not None:
                await self._carry_out(decisions, closes=self.intended.step)

    def _forsake(self) -> list[Decision]:
        """Cancel what the script before has asked for and not trained; return what it had decided about the step that it was interrupted
        in.
        """
        decisions = finish(self.intended.samples, self.past.scored) if self.intended is not None else []
        kept = {decision.group.group_id for decision in decisions}
        scored = {one.trajectory.rollout_id for one in self.past.scored}
        now_s = asyncio.get_running_loop().time()
        with self.ledger.transaction():
            for name, rollout in self.ledger.rollouts_in_flight().items():
                is_left = rollout.group_id in self.past.running_groups and (rollout.group_id not in kept or name not in scored)
                if is_left:
                    self.ledger.end(name, TerminalStatus.CANCELLED, now_s=now_s, reason=SCRIPT_GONE)
            for group_id in sorted(self.past.running_groups - kept):
                self.ledger.drop(group_id, step=self.book.step)
        return decisions


def _words(intakes: Sequence[Intake[Any]]) -> str:
    return "; ".join(f"{intake.what}: {intake.num_left or 'some'} results not read" for intake in intakes)


def _bytes_of_rollout(trajectory: Trajectory) -> int:
    return trajectory.num_bytes


def _bytes_of_scored(scored: ScoredTrajectory) -> int:
    return scored.trajectory.num_bytes
