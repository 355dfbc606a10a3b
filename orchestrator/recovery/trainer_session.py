"""The trainer's session: which process trains, where it starts, which steps are to be trained again, what it has saved, and its end.

A trainer that starts again begins where its checkpoint ends: the steps since are offered once more, from the ledger. A trainer that
survived an orchestrator goes on where it is: the ledger holds the rows of an open step as they were given to it. Its messages about steps,
policies and checkpoints wait until its position is known.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
from collections.abc import Callable
from typing import Any

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.snapshot import commit_of, first_kept_step
from orchestrator.observe.progress import Progress
from orchestrator.peers.peers import Peers
from orchestrator.recovery.checkpoints import Checkpoints
from orchestrator.recovery.open_steps import OpenSteps
from orchestrator.recovery.quarantine import RowSuspects
from orchestrator.rules.validation.announcements import AnnouncementCheck
from orchestrator.rules.validation.trainer import TrainerProgress, checkpoint_failed
from orchestrator.rules.validation.violations import Kind, Violation, number_of
from pipelinerl.errors import PeerRefused
from pipelinerl.messages import (
    Alive,
    CheckpointFailed,
    CheckpointSaved,
    EndTraining,
    Message,
    PolicyPublished,
    Stop,
    TrainerReady,
    TrainingEnded,
)
from pipelinerl.runtime.stage import Channel, Signal
from pipelinerl.runtime.watch import Watch

MAX_EARLY = 64
"""Messages of a trainer whose start is not dealt with yet. An honest one sends three: its policy, its checkpoint, a step. A larger bound
only lets a dishonest one fill memory.
"""


@dataclasses.dataclass(slots=True, kw_only=True)
class TrainerSession:
    """The session with the process that trains, one replica or several, and the start that is being dealt with.

    Raises `PeerRefused`, and ends the run, where the first trainer that it hears starts from a checkpoint of another run.
    """

    trainer: Peers
    steps: OpenSteps
    suspects: RowSuspects
    published: Channel[TrainerReady | PolicyPublished]
    num_replicas: int
    num_steps: int
    announcement_check: AnnouncementCheck | None
    ledger: Ledger
    progress: Progress
    watch: Watch
    on_replaced: Callable[[], None]
    """The callback for another process that takes the trainer's place."""
    on_moved: Callable[[], None]
    """The callback for a trainer whose position is known, that has saved a checkpoint, or that trains no further."""
    replicas: dict[int, TrainerReady] = dataclasses.field(default_factory=dict)
    """The replicas that have announced themselves."""
    is_starting: bool = False
    """True while a trainer has announced itself, and the steps it is to begin with are being fetched."""
    ended: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)
    """Set when the trainer trains no further and has sent its last message."""
    checkpoints: Checkpoints = dataclasses.field(init=False)
    early: list[Callable[[], None]] = dataclasses.field(default_factory=list)
    """The messages that a starting trainer has sent already."""
    is_changing: bool = False
    """True while a trainer of another number of replicas is awaited."""
    announced: Signal = dataclasses.field(default_factory=Signal)
    """Set when a replica announces itself."""
    _leaving: range = range(0)
    """Replicas that the trainer before had, and this one has not."""
    _is_ending: bool = False
    """True where the trainer was told to train no further."""
    _is_rejected: bool = False
    """True where the trainer is to be replaced for its violations: no row that it was computing is to blame."""
    _starts: Channel[TrainerReady] = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self._starts = Channel("starts", giver="trainer", taker="training", watch=self.watch, bound_bytes=1)
        self.checkpoints = Checkpoints(ledger=self.ledger, journal=self.progress.journal)
        self.trainer.on(TrainerReady, self._on_ready)
        self.trainer.on(Alive, self._on_alive)
        self.trainer.on_rejected(self._on_rejected)
        self.on(CheckpointSaved, self._on_saved, check=self.checkpoints.check)
        self.on(CheckpointFailed, self._on_not_saved, check=checkpoint_failed)
        self.on(TrainingEnded, self._on_ended)

    async def wait_until_ready(self) -> None:
        """Wait until every replica of the config has announced itself."""
        while not self.is_whole:
            await self.announced.wait()

    @property
    def is_whole(self) -> bool:
        """Return whether every replica has announced itself."""
        return len(self.replicas) == self.num_replicas

    @property
    def is_unknown(self) -> bool:
        """Return whether the position of a trainer that has begun to announce itself is not known yet: replicas are missing, or the steps
        are being fetched that it is to begin with."""
        return self.is_starting or 0 < len(self.replicas) < self.num_replicas

    def is_of_before(self, peer: str) -> bool:
        """Return whether what a peer says is the word of a trainer of the layout before, which is told to end, and no liar."""
        return self.is_changing and number_of(peer) not in self.replicas

    @property
    def version(self) -> int:
        """The version that the trainer started from; every replica must be ready."""
        return self.replicas[0].version

    def is_refused(self, peer: str, violation: Violation | None) -> bool:
        """Refuse a trainer's message where there is a violation in it; return whether it was refused."""
        if violation is not None:
            self.trainer.refuse(peer, violation)
        return violation is not None

    def on(
        self,
        kind: type[Message],
        handler: Callable[[Any], None],
        *,
        check: Callable[[Any, TrainerProgress], Violation | None] = lambda said, progress: None,
    ) -> None:
        """Have `handler` called with each message about a step, a policy or a checkpoint in which `check` finds no violation.

        One replica speaks for all of these. A message waits until its trainer's position is known.
        """

        def hear(peer: str, said: Message) -> None:
            if self.is_of_before(peer):
                return
            words = f"{kind.__name__} of {peer}, expected of trainer-0, which speaks for all replicas"
            wrong = check(said, self.position) if number_of(peer) == 0 else Violation(kind=Kind.IDENTITY, words=words)
            if not self.is_refused(peer, wrong):
                handler(said)

        self.trainer.on(kind, functools.partial(self._once_started, hear))

    def num_closed(self) -> int:
        """Return how many steps the newest policy should hold: all that are closed; of a trainer that trains no further, those it has."""
        return self.steps.num_done if self.ended.is_set() else self.steps.num_closed

    @property
    def is_ending(self) -> bool:
        """Return whether the trainer was told to train no further."""
        return self._is_ending

    @property
    def position(self) -> TrainerProgress:
        """The trainer's position, by which its messages are checked."""
        step = self.steps.next
        is_closed = step is not None and step.end is not None
        return TrainerProgress(num_done=self.steps.num_done, is_next_closed=is_closed, num_steps=self.num_steps)

    def end_training(self, reason: str) -> bool:
        """Have the trainer save and publish its policy, and train no further; return False where a replica cannot be told, or is not there
        yet."""
        self._is_ending = True
        told = [self.trainer.send(f"trainer-{replica}", EndTraining(reason=reason)) for replica in self.replicas]
        return self.is_whole and all(told)

    def replace(self, num_replicas: int, reason: str) -> None:
        """End the trainer, which has saved all that it has trained, and await another one of so many replicas."""
        for replica in range(self.num_replicas):
            self.trainer.send(f"trainer-{replica}", Stop(reason=reason))
            self.trainer.forget(f"trainer-{replica}")
        self._leaving = range(num_replicas, self.num_replicas)
        self.num_replicas, self.is_changing = num_replicas, True
        self._forget_replicas()

    async def run(self) -> None:
        """Deal with each start: the steps that its trainer lacks are offered again, and the steps that its weights prove are recorded."""
        is_first = True
        loop = asyncio.get_running_loop()
        async for ready in self._starts:
            if words := self._wrong_start(ready):
                raise PeerRefused(words)
            num_booked = self.steps.num_booked
            await self.steps.reopen(ready.version)
            for step in range(num_booked, ready.version):  # its weights prove steps that the trainer before had no time to report
                self.progress.proven(step, self.steps.open[step].samples, now_s=loop.time())
                self.steps.record_trained(step, now_s=loop.time())
            if self._is_rejected:
                self._is_rejected = False
            else:
                self.suspects.record_death(ready.suspects)
            self.checkpoints.go_on_from(ready)
            if _survived(ready):
                self.ledger.record("survived", now_s=loop.time(), version=ready.version)
            elif ready.version or self.steps.num_booked or not is_first:
                self.ledger.record("restarted", now_s=loop.time(), version=ready.version)
            is_first = False
            self.steps.go_on_from(ready.version)
            self.is_starting = len(self._starts) > 0
            if not self.is_starting:
                early, self.early = self.early, []
                for handle in early:
                    handle()
            self.on_moved()

    def _once_started(self, handler: Callable[[str, Any], None], peer: str, said: Message) -> None:
        """Handle a message once its trainer's position is known: an honest trainer is ahead of what the ledger knows to be done."""
        if not self.is_unknown:
            handler(peer, said)
        elif len(self.early) < MAX_EARLY:
            self.early.append(lambda: handler(peer, said))
        else:
            words = f"{type(said).__name__}: {len(self.early)} messages while it starts, expected at most {MAX_EARLY}"
            self.trainer.refuse(peer, Violation(kind=Kind.BOUNDS, words=words))

    def _on_saved(self, saved: CheckpointSaved) -> None:
        self.checkpoints.saved(saved)
        self.on_moved()

    def _on_not_saved(self, failed: CheckpointFailed) -> None:
        self.checkpoints.failed(failed)
        self.on_moved()

    def _on_ended(self, ended: TrainingEnded) -> None:
        self.ended.set()
        self.on_moved()
        if ended.version < self.num_steps and not self._is_ending:  # an orchestrator that is gone told it to; it is called back
            for replica in self.replicas:
                self.trainer.send(f"trainer-{replica}", Stop(reason="start again: the orchestrator that ended the training is gone"))

    def _on_alive(self, peer: str, alive: Alive) -> None:
        if self._is_ending:  # no other message tells that it saves, which may take longer than the stall limit
            self.watch.moved()

    def _on_rejected(self, peer: str, is_banned: bool) -> None:
        self._is_rejected = True

    def _on_ready(self, peer: str, ready: TrainerReady) -> None:
        known = self.replicas.get(ready.replica)
        if self.is_changing and ready.num_replicas != self.num_replicas:
            self.trainer.send(peer, Stop(reason=f"a trainer of {self.num_replicas} replicas is to take its place"))
            return
        if (violation := self._miscounts(peer, ready)) is not None:
            if known is None:
                raise PeerRefused(violation.words)
            self.trainer.refuse(peer, violation, is_hopeless=True)
            return
        if self.announcement_check is not None and self.is_refused(peer, self.announcement_check.trainer(ready)):
            return
        if known is not None and known.process_id == ready.process_id:
            return
        if known is not None and self.announcement_check is not None and (words := self._wrong_start(ready)):
            self.trainer.refuse(peer, Violation(kind=Kind.STEPS, words=words), is_hopeless=True)
            return
        if known is not None:  # replicas start together: whoever else is known is gone, too
            self._forget_replicas()
        self.replicas[ready.replica] = ready
        self.announced.set()
        if self.is_whole:
            self.ended.clear()  # of the one before, which may have said so after it was told to end
            for replica in self._leaving:  # a last word of it may have come since
                self.trainer.forget(f"trainer-{replica}")
            starts = {(one.version, one.commit) for one in self.replicas.values()}
            if len(starts) > 1 and not _survived(self.replicas[0]):
                raise PeerRefused(f"the trainer's replicas start from different checkpoints: {sorted(self.replicas.items())}")
            self.is_starting = True
            self.published.put_now(self.replicas[0])  # bounded: a trainer takes seconds to start
            self._starts.put_now(self.replicas[0])  # bounded likewise

    def _forget_replicas(self) -> None:
        self.replicas.clear()
        self.early.clear()
        self.ended.clear()
        self.on_replaced()

    def _miscounts(self, peer: str, ready: TrainerReady) -> Violation | None:
        if ready.num_replicas == self.num_replicas:
            return None
        expected = f"the run has {self.num_replicas} (trainer.ranks and trainer.parallel, or `pipelinerl scale`)"
        return Violation(kind=Kind.BOUNDS, words=f"{peer} counts {ready.num_replicas} replicas, {expected}")

    def _wrong_start(self, ready: TrainerReady) -> str:
        """Say why a trainer cannot go on from where it starts: a checkpoint of another run, or one too old; return an empty string where it
        can.

        A wrong start of the first trainer that this orchestrator hears ends the run: its folders do not belong together. A wrong start of a
        later trainer costs it its place, as any other violation does: the earlier one has shown that a right start is possible.
        """
        if ready.version < (first := first_kept_step(self.ledger)):
            damage = "".join(f"\n  - {one.reason}" for one in ready.damaged)
            return (
                f"the trainer starts from version {ready.version}, but the ledger keeps rows of steps from {first} on: those before were in"
                f" every checkpoint that was kept. Restore a checkpoint of version {first} or later, or start a new run from this one's"
                f" model (checkpoint.keep says how many are kept){damage}"
            )
        if not ready.version:
            return ""
        expected = commit_of(self.ledger, ready.version - 1)
        if ready.commit != expected:
            return (
                f"the trainer starts from a version {ready.version} that names the ledger's commit {ready.commit[:100]!r}, but this"
                f" ledger has {expected!r} for step {ready.version - 1}: the two are of different runs. Resume with both as they were, or"
                " start a new run from the checkpoint's model"
            )
        if ready.saved and ready.saved_commit != (expected := commit_of(self.ledger, ready.saved - 1)):
            return (
                f"the trainer's newest checkpoint, of version {ready.saved}, names the ledger's commit {ready.saved_commit[:100]!r}, but"
                f" this ledger has {expected!r} for step {ready.saved - 1}: the two are of different runs. Resume with both as they were"
            )
        return ""


def _survived(ready: TrainerReady) -> bool:
    """Return whether a trainer goes on, under another orchestrator, with steps that no checkpoint holds."""
    return ready.saved not in (None, ready.version)
