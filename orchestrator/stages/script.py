"""The stage of a scripted run: it stands where a script takes part in the flow, between generation, scoring and batching.

script -> generation -> script -> scoring -> script -> batching -> training
"""

from __future__ import annotations

import asyncio
import collections
import dataclasses
import functools
from collections.abc import AsyncIterable, Callable, Iterable, Sequence
from typing import Any, TypeVar

import msgspec

from orchestrator.ledger.answers import Event, Kind
from orchestrator.rules.script import ScriptBook
from orchestrator.rules.script_decisions import check_rollouts
from orchestrator.stages.prompts import Drawn
from orchestrator.stages.script_replay import ScriptReplay
from orchestrator.stages.script_steps import ScriptSteps
from orchestrator.stages.script_streams import ScriptStreams
from orchestrator.stages.script_waits import ScriptWaits
from orchestrator.stages.streams import Intake, Room, Stream
from pipelinerl.errors import NobodySends, ScriptError
from pipelinerl.messages import EarlyStopDecision, Message, Outcome, Prompt, Score, ScoredTrajectory, TraceScores, Trajectory
from pipelinerl.runtime.stage import Channel, Signal
from pipelinerl.transport.codec import Decoder, encode

_T = TypeVar("_T")
_trajectories: Decoder[Trajectory] = Decoder(Trajectory)


class _Judged(Message, frozen=True):
    """What is recorded of a scored rollout, beside the rollout."""

    score: Score
    steps: TraceScores | None = None
    early_stop: EarlyStopDecision | None = None


_judged: Decoder[_Judged] = Decoder(_Judged)


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
    sampled: Channel[Trajectory]
    to_score: Channel[Trajectory]
    scored: Channel[ScoredTrajectory]
    book: ScriptBook
    steps: ScriptSteps
    waits: ScriptWaits
    replay: ScriptReplay
    known: dict[str, ScoredTrajectory]
    """What was scored for the script before, and that it still holds or awaits, by rollout."""
    unfinished: dict[str, Channel[ScoredTrajectory]]
    """Those of them that are to be compared, or whose steps are to be scored, with the way to the stage that does it."""
    unscored: frozenset[str]
    """The rollouts that it had read and that were not scored."""
    queue_bytes: int
    num_siblings: int
    """Rollouts of each group, without a greedy one, where the script does not say how many."""
    adds_greedy: bool
    compares_siblings: bool
    """True where rewards compare the siblings of a group."""
    group_sizes: dict[int, int]
    """See `Parts`."""
    decision_of: Callable[[Trajectory], EarlyStopDecision | None] = lambda trajectory: None
    """The callback returns what a coin has decided about a rollout that is not scored."""
    position: Callable[[], tuple[int, int]]
    """The callback returns the position of the prompt source."""
    _asked: collections.deque[tuple[int, Drawn]] = dataclasses.field(default_factory=collections.deque)
    """Prompts that wait for room towards generation, in order, each with the step that it is for."""
    _has_asked: Signal = dataclasses.field(default_factory=Signal)
    _has_room: Signal = dataclasses.field(default_factory=Signal)
    _sampling: dict[int, Intake[Trajectory]] = dataclasses.field(default_factory=dict)
    """By group."""
    _scoring: dict[str, Intake[ScoredTrajectory]] = dataclasses.field(default_factory=dict)
    """By rollout."""
    _arrived: dict[int, int] = dataclasses.field(default_factory=dict)
    """Rollouts of groups that are being sampled that are there."""
    _rollouts: Room = dataclasses.field(init=False)
    _scores: Room = dataclasses.field(init=False)
    _scored_before: dict[str, ScoredTrajectory] = dataclasses.field(default_factory=dict)
    """Recorded scores of rollouts whose turn has not come."""
    _streams: ScriptStreams = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._rollouts = Room(what="rollouts that were sampled", bound_bytes=self.queue_bytes)
        self._scores = Room(what="rollouts that were scored", bound_bytes=self.queue_bytes)
        self._streams = ScriptStreams(waits=self.waits)

    async def run(self) -> None:
        async with asyncio.TaskGroup() as self.waits.tasks:
            self.waits.tasks.create_task(self.steps.go_on())
            await self.replay.live.wait()
            for one in self.known.values():
                if one.trajectory.rollout_id not in self.replay.sampled and one.trajectory.group_id in self._sampling:
                    self._arrive(one.trajectory)
            self.waits.tasks.create_task(self._ask())
            self.waits.tasks.create_task(self._hear_rollouts())
            self.waits.tasks.create_task(self._hear_scores())

    # --- what the script calls ---

    def sample(self, prompts: Sequence[Prompt], *, num_siblings: int | None, step: int) -> Stream[Trajectory]:
        """Have prompts sampled for a step; the stream gives each rollout as it finishes. Raises `NobodySends`."""
        self.check()
        self.book.check_sample(step)
        size = (num_siblings or self.num_siblings) + self.adds_greedy
        call = self.replay.begin("sample", (*((one.prompt_id, one.token_ids.tobytes()) for one in prompts), size, step))
        what = f"sample ({len(prompts)} prompts, {len(prompts) * size} rollouts)"
        intake: Intake[Trajectory] = self._streams.begin(what, call=call, room=self._rollouts, num_bytes=_bytes_of_rollout)
        intake.num_left, intake.num_unadmitted, intake.step = len(prompts) * size, len(prompts), step
        position, then = self.position(), functools.partial(self._hear_admitted, intake, size)
        groups = self.replay.admitted(call)
        for group_id in groups:
            self._admitted(intake, size, group_id)
        for event in self.replay.results(call):
            self._count(event.number)
        waiting = list(prompts)[len(groups) :]
        self._asked += [(step, Drawn(prompt=prompt, position=position, num_siblings=num_siblings, then=then)) for prompt in waiting]
        self._has_asked.set()
        return Stream(intake, take=self._take, abandon=self._streams.abandon)

    def score(self, rollouts: Iterable[Trajectory] | AsyncIterable[Trajectory]) -> Stream[ScoredTrajectory]:
        """Have rollouts scored; the stream gives each as its score is there. Raises `TrainedTwice` and `ScriptError`, of rollouts that are
        still being sampled when their turn comes.
        """
        self.check()
        is_stream = isinstance(rollouts, AsyncIterable)
        known = [] if is_stream else list(rollouts)
        check_rollouts("score", known)
        self._check_whole(known)
        call = self.replay.begin("score", (is_stream, *(one.rollout_id for one in known)))
        intake: Intake[ScoredTrajectory] = self._streams.begin("score", call=call, room=self._scores, num_bytes=_bytes_of_scored)
        if is_stream:
            intake.is_whole = False
            feeding = self._score_each(rollouts, intake)
        else:
            feeding = self._send_all([rollout for rollout in known if self._begin_scoring(rollout, intake)])
        assert self.waits.tasks is not None, "calls come once the stages run"
        feeder = self.waits.tasks.create_task(feeding)
        self.waits.feeders.add(feeder)
        feeder.add_done_callback(self.waits.feeders.discard)
        return Stream(intake, take=self._take, abandon=self._streams.abandon)

    def check(self) -> None:
        """Raise what has ended the run; `RolloutsUnread` where a stream was let go of before its end."""
        self.waits.check()

    def check_all_read(self) -> None:
        """Raise `RolloutsUnread` where something that was asked for was not read."""
        self._streams.check_all_read()

    # --- streams ---

    async def _take(self, intake: Intake[_T]) -> list[_T]:
        """Wait until results of a stream are due, and give them to the script; none at its end."""
        intake.reader = asyncio.current_task()
        if (event := await self.replay.take(intake.call)) is not None:
            intake.num_left -= 1
            return [self._again(event)]
        if not self._may_take(intake) and (intake.is_finished or not await self._wait_for_result(intake)):
            return []
        taken = intake.take()
        for result in taken:
            self._note_read(intake, result)
        self._has_room.set()
        return taken

    def _note_read(self, intake: Intake[Any], result: Any) -> None:
        """Note that the script has a result."""
        if isinstance(result, Trajectory):
            self._read(result)
            if self.replay.is_recording:
                self.replay.note(intake.call, Kind.RESULT, words=result.rollout_id, number=result.group_id, body=encode(result))
        elif self.replay.is_recording and isinstance(result, ScoredTrajectory):
            body = encode(_Judged(score=result.score, steps=result.steps, early_stop=result.early_stop))
            self.replay.note(intake.call, Kind.RESULT, words=result.trajectory.rollout_id, body=body)

    def _may_take(self, intake: Intake[Any]) -> bool:
        """Return whether results of a stream are due; those that the record does not hold come after all that it holds."""
        return intake.is_due and self.replay.live.is_set()

    async def _wait_for_result(self, intake: Intake[Any]) -> bool:
        """Wait until a stream has a result; return whether one comes."""
        with self.waits.waiting(intake.what), self.waits.changed.reaching(intake.changed):
            while not self._may_take(intake):
                if intake.failure is not None:
                    raise intake.failure
                if intake.is_over:
                    return False
                self.check()
                self.replay.check_turn()
                if self.replay.live.is_set():
                    self._check_somebody_sends(intake)
                await intake.changed.wait()
        return True

    def _again(self, event: Event) -> Any:
        """Return a recorded result."""
        if event.number < 0:
            return self._scored_before.pop(event.words)
        trajectory = _trajectories.decode(self.replay.body(event))
        if event.words in self.unscored:  # for the ledger, an attempt that has no score ended with the process that had it
            self.steps.ledger.hold(trajectory, now_s=asyncio.get_running_loop().time())
        self._read(trajectory)
        return trajectory

    def _read(self, trajectory: Trajectory) -> None:
        known, decision = self.known.get(trajectory.rollout_id), self.decision_of(trajectory)
        is_stopped = decision is not None and decision.stops if known is None else known.score.outcome is Outcome.STOPPED
        self.book.read(trajectory, is_stopped=is_stopped)

    def _check_somebody_sends(self, intake: Intake[Any]) -> None:
        """Raise where nothing can come that a stream waits for."""
        if intake.num_unadmitted and self.book.is_out_of_reach(intake.step):
            raise NobodySends(
                f"{intake.what}: {intake.num_unadmitted} prompts wait for an engine that samples under a newer policy, since step"
                f" {max(intake.step, self.book.step)} comes next and policy {self.book.published} is the last that was published."
                " Publish first"
            )
        if self._sleeps_until_published(intake):
            raise NobodySends(
                f"{intake.what}: engines sleep since step {self.book.step - 1} was handed to the trainer, whose devices they share"
                f' (pipeline.placement is "colocated"), and go on under policy {self.book.step}. Publish first'
            )
        self._streams.check_room(intake.what, (self._rollouts, self._scores), reader=intake.reader)

    def _sleeps_until_published(self, intake: Intake[Any]) -> bool:
        """Return whether engines sleep that a stream waits for, and only the task that waits here could have them woken."""
        if not self.steps.held.puts_engines_to_sleep(self.book.step) or intake in self._scoring.values():  # a score takes no engine
            return False
        return intake.reader not in self.waits.feeders and self.waits.is_only_caller(intake.reader)

    # --- rollouts ---

    async def _ask(self) -> None:
        while True:
            while self._asked:
                step, drawn = self._asked.popleft()
                self.steps.admission.asked_steps.append(step)
                await self.prompts.put(drawn)
            await self._has_asked.wait()

    def _hear_admitted(self, intake: Intake[Trajectory], num_siblings: int, group_id: int | None) -> None:
        """Hear which group a prompt became; None: it is quarantined, and nothing comes of it."""
        self.steps.admission.asked_steps.popleft()
        group_id = -1 if group_id is None else group_id
        self.replay.note(intake.call, Kind.ADMITTED, number=group_id)
        self._admitted(intake, num_siblings, group_id)

    def _admitted(self, intake: Intake[Trajectory], num_siblings: int, group_id: int) -> None:
        intake.num_unadmitted -= 1
        if group_id < 0:
            intake.num_left -= num_siblings
            intake.changed.set()
        else:
            self._sampling[group_id] = intake
            self.group_sizes[group_id] = num_siblings
            self.book.admitted(group_id, num_siblings=num_siblings)

    async def _hear_rollouts(self) -> None:
        async for trajectory in self.sampled:
            if self._rollouts.is_full:
                await self._wait_for_room(self._rollouts)
            self._arrive(trajectory)

    def _arrive(self, trajectory: Trajectory) -> None:
        intake = self._sampling[trajectory.group_id]
        self._count(trajectory.group_id)
        if intake.then is None or intake.ready or self.to_score.is_full or trajectory.rollout_id in self.unfinished:
            intake.put(trajectory)
        else:
            intake.then(trajectory)

    def _count(self, group_id: int) -> None:
        """Count a rollout that is there; the last of its group is the last to expect."""
        self._arrived[group_id] = self._arrived.get(group_id, 0) + 1
        if self._arrived[group_id] == self.book.num_siblings(group_id):
            del self._arrived[group_id], self._sampling[group_id]

    def _begin_scoring(self, rollout: Trajectory, intake: Intake[ScoredTrajectory]) -> bool:
        """Await a score; return whether the rollout has to be sent for it: it may be known from before."""
        self.book.begin_scoring(rollout)
        intake.num_left += 1
        name = rollout.rollout_id
        known = None if name in self.unfinished else self.known.pop(name, None)
        if (event := next((one for one in self.replay.results(intake.call) if one.words == name), None)) is not None:  # read in its turn
            judged = _judged.decode(self.replay.body(event))
            self._scored_before[name] = ScoredTrajectory(trajectory=rollout, **msgspec.structs.asdict(judged))
            self.book.scored(self._scored_before[name])
            return False
        self._scoring[name] = intake
        if known is not None:
            self._take_score(msgspec.structs.replace(known, trajectory=rollout))
        return known is None

    async def _send_all(self, rollouts: Iterable[Trajectory]) -> None:
        for rollout in rollouts:
            await self._send(rollout)

    async def _send(self, rollout: Trajectory) -> None:
        """Have a rollout scored, or what is left of that where it was interrupted."""
        if (way := self.unfinished.pop(rollout.rollout_id, None)) is None:
            await self.to_score.put(rollout)
        else:
            await way.put(msgspec.structs.replace(self.known.pop(rollout.rollout_id), trajectory=rollout))

    def _check_whole(self, rollouts: Iterable[Trajectory]) -> None:
        """Raise `ScriptError` where rewards compare siblings and some of a group are missing."""
        held = [rollout.group_id for rollout in rollouts if self.compares_siblings and self.book.holds(rollout)]
        for group_id, num_given in collections.Counter(held).items():
            if num_given < (num_siblings := self.book.num_siblings(group_id)):
                raise ScriptError(
                    f"score: {num_given} of the {num_siblings} siblings of group {group_id} are given, and a reward compares all of them"
                    ' (per = "group"). Give one call of score all siblings, or what sample returned'
                )

    async def _score_each(self, rollouts: AsyncIterable[Trajectory], intake: Intake[ScoredTrajectory]) -> None:
        given: list[Trajectory] = []
        if not self.compares_siblings and isinstance(rollouts, Stream) and rollouts.intake.room is self._rollouts:
            rollouts.intake.then = functools.partial(self._score_at_once, rollouts.intake, intake)
        try:
            async for rollout in rollouts:
                if self._begin_scoring(rollout, intake):
                    await self._send(rollout)
                given += [rollout] * self.compares_siblings
            self._check_whole(given)
        except Exception as error:  # the script's own iterator, or a misuse: the call that reads the scores raises it
            intake.failure = error
        intake.is_whole = True
        if intake.is_over or intake.is_due:
            intake.changed.set()

    def _score_at_once(self, source: Intake[Trajectory], intake: Intake[ScoredTrajectory], rollout: Trajectory) -> None:
        """Have a rollout scored that has just come, of a stream that is scored as it comes: nobody is woken but by the last."""
        source.num_left -= 1
        self._note_read(source, rollout)
        if self._begin_scoring(rollout, intake):
            self.to_score.put_now(rollout)  # bounded: a full channel has it wait with the others
        if source.is_over:
            source.changed.set()

    async def _hear_scores(self) -> None:
        async for scored in self.scored:
            if self._scores.is_full:
                await self._wait_for_room(self._scores)
            self._take_score(scored)

    def _take_score(self, scored: ScoredTrajectory) -> None:
        self.book.scored(scored)
        self._scoring.pop(scored.trajectory.rollout_id).put(scored)

    async def _wait_for_room(self, room: Room) -> None:
        self.waits.changed.set_all()  # who waits for something else looks whether it is the one to read
        while room.is_full:
            with self.waits.changed.reaching(self._has_room):
                await self._has_room.wait()


def _bytes_of_rollout(trajectory: Trajectory) -> int:
    return trajectory.num_bytes


def _bytes_of_scored(scored: ScoredTrajectory) -> int:
    return scored.trajectory.num_bytes
