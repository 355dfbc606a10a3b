"""The stage of a scripted run: it stands where a script takes part in the flow, between generation, scoring and batching.

script -> generation -> script -> scoring -> script -> batching -> training
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from typing import Any, TypeVar

from orchestrator.rules.script import ScriptBook
from orchestrator.stages.prompts import Drawn
from orchestrator.stages.script_steps import ScriptSteps
from orchestrator.stages.script_waits import ScriptWaits
from orchestrator.stages.streams import Intake, Room, Stream
from pipelinerl.errors import NobodySends, RolloutsUnread
from pipelinerl.messages import Prompt, ScoredTrajectory, Trajectory
from pipelinerl.runtime.stage import Channel

_T = TypeVar("_T")


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
    book: ScriptBook
    steps: ScriptSteps
    waits: ScriptWaits
    queue_bytes: int
    num_siblings: int
    """Rollouts of each group, without a greedy one, where the script does not say how many."""
    adds_greedy: bool
    position: Callable[[], tuple[int, int]]
    """The callback returns the position of the prompt source."""
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
    _num_calls: int = 0

    def __post_init__(self) -> None:
        self._rollouts = Room(what="rollouts that were sampled", bound_bytes=self.queue_bytes)
        self._scores = Room(what="rollouts that were scored", bound_bytes=self.queue_bytes)
        self.waits.check_streams = self._check_streams

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self.waits.tasks:
            self.waits.tasks.create_task(self.steps.go_on(self.steps.forsake()))
            self.waits.tasks.create_task(self._ask())
            self.waits.tasks.create_task(self._hear_rollouts())
            self.waits.tasks.create_task(self._hear_scores())

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
        self.waits.changed.set()
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
        assert self.waits.tasks is not None, "calls come once the stages run"
        feeder = self.waits.tasks.create_task(feeding)
        self.waits.feeders.add(feeder)
        feeder.add_done_callback(self.waits.feeders.discard)
        return Stream(intake, take=self._take, abandon=self._abandon)

    def check(self) -> None:
        """Raise what has ended the run; `RolloutsUnread` where a stream was let go of before its end."""
        self.waits.check()

    def _check_streams(self) -> None:
        if abandoned := [intake for intake in self._intakes if intake.is_abandoned]:
            self._intakes = [intake for intake in self._intakes if not intake.is_abandoned]
            raise RolloutsUnread(f"{_words(abandoned)}: the stream was let go of before its end. Read it to the end, or ask for less")

    def check_all_read(self) -> None:
        """Raise `RolloutsUnread` where something that was asked for was not read."""
        self.check()
        if unread := [intake for intake in self._intakes if not intake.is_over]:
            raise RolloutsUnread(f"{_words(unread)}: the script ends, and nobody can read it any more. Read every stream to its end")

    # --- streams ---

    def _begin(self, what: str, *, room: Room, num_bytes: Callable[[Any], int]) -> Intake[Any]:
        self._num_calls += 1
        intake: Intake[Any] = Intake(what=f"call {self._num_calls}, {what}", room=room, num_bytes=num_bytes)
        self._intakes = [*(one for one in self._intakes if not one.is_over), intake]
        return intake

    async def _take(self, intake: Intake[_T]) -> _T | None:
        """Wait for the next result of a stream; None at its end."""
        intake.reader = asyncio.current_task()
        with self.waits.waiting(intake.what):
            while not intake.ready:
                if intake.failure is not None:
                    raise intake.failure
                if intake.is_over:
                    return None
                self.check()
                self._check_somebody_sends(intake)
                await self.waits.changed.wait()
        result = intake.take()
        if isinstance(result, Trajectory):
            self.book.read(result)
        self.waits.changed.set()  # there is room
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

    # --- rollouts ---

    async def _ask(self) -> None:
        while True:
            while self._asked:
                await self.prompts.put(self._asked.pop(0))
            await self.waits.changed.wait()

    def _admitted(self, intake: Intake[Trajectory], num_siblings: int, group_id: int | None) -> None:
        """Hear which group a prompt became; None: it is quarantined, and nothing comes of it."""
        intake.num_unadmitted -= 1
        if group_id is None:
            intake.num_left -= num_siblings
        else:
            self._sampling[group_id] = intake
            self.book.admitted(group_id, num_siblings=num_siblings)
        self.waits.changed.set()

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
            self.waits.changed.set()

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
        self.waits.changed.set()

    async def _hear_scores(self) -> None:
        async for scored in self.scored:
            await self._wait_for_room(self._scores)
            self.book.scored(scored)
            self._scoring.pop(scored.trajectory.rollout_id).put(scored)
            self.waits.changed.set()

    async def _wait_for_room(self, room: Room) -> None:
        if room.is_full:
            self.waits.changed.set()  # who waits for something else looks whether it is the one to read
        while room.is_full:
            await self.waits.changed.wait()


def _words(intakes: Sequence[Intake[Any]]) -> str:
    return "; ".join(f"{intake.what}: {intake.num_left or 'some'} results not read" for intake in intakes)


def _bytes_of_rollout(trajectory: Trajectory) -> int:
    return trajectory.num_bytes


def _bytes_of_scored(scored: ScoredTrajectory) -> int:
    return scored.trajectory.num_bytes
