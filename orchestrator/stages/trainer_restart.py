"""A planned restart of a live run's trainer with another number of ranks, as `rules.trainer_ranks` decides it."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Mapping
from typing import Any

from orchestrator.ledger.snapshot import saved_versions
from orchestrator.peers.engines import Engines
from orchestrator.rules.trainer_ranks import TrainerChange
from orchestrator.stages.training import Training
from pipelinerl.data.packing import Packing
from pipelinerl.errors import PeerRefused, PeerSilent
from pipelinerl.messages import Failed, SaveCheckpoint
from pipelinerl.observe.journal import Journal
from pipelinerl.runtime.membership import ScaleFolder
from pipelinerl.runtime.trainer_ranks import Phase
from pipelinerl.runtime.watch import Watch

SWAP_S = 30.0
"""Longest wait for engines to take the last policy before its buffer goes with the trainer. Those that are later take the next one."""


class _NotSaved(Exception):
    """The trainer stays as it is; the words say why."""


@dataclasses.dataclass(slots=True, kw_only=True)
class TrainerRestart:
    """Carries out one change of the trainer's ranks at a time. Engines go on generating meanwhile, as far as the staleness bound allows.

    The trainer is given no row of a further step, saves what it has trained, and is told to end once engines have its policy. Whoever
    starts it then starts one in the new layout, which resumes from that checkpoint as after any other end. Nothing is trained twice.
    """

    folder: ScaleFolder
    change: TrainerChange
    training: Training
    engines: Engines
    packing: Packing[Any]
    """Fills rows for as many replicas as there are."""
    journal: Journal
    watch: Watch
    deadline_s: float
    """Seconds in which the trainer has to save, and in which another one has to announce itself."""
    _failed: str = dataclasses.field(default="", init=False)
    """Why the trainer that is awaited does not start; empty where nobody has said so."""
    _epoch_failed: int = dataclasses.field(default=-1, init=False)
    """The last change whose trainer was said not to start."""

    def __post_init__(self) -> None:
        session = self.training.session
        session.trainer.on(Failed, self._on_failed)
        session.is_changing = self.change.record.phase is Phase.STARTING

    def look(self) -> None:
        """Take the word of whoever starts the trainer."""
        said = self.folder.trainer_failed()
        if said is not None and said.epoch > self._epoch_failed:
            self._epoch_failed = said.epoch
            if said.epoch == self.change.record.epoch:
                self._give_up_waiting(said.reason)

    def begin(self, ranks: int, *, engines_before: Mapping[str, int]) -> None:
        """Have the trainer go on with so many ranks, once `carry_out` is called: from now on no other change is. Where it is given up, the
        run is to have so many engines of each kind again; of a kind that is not there it keeps those that it has."""
        self.change.begin(ranks, engines_before=engines_before)
        self.tell()

    def keep_engines(self, kinds: Collection[str]) -> None:
        """Have engines of some kinds stay as they are, whatever becomes of the change."""
        if self.change.keep_engines(kinds):
            self.folder.publish_trainer(self.change.record)

    async def carry_out(self) -> bool:
        """Carry out the change that has begun; return False where the trainer goes on as before.

        Raises `PeerSilent` where no trainer starts any more, in the layout before neither.
        """
        training, ranks = self.training, self.change.record.wanted
        training.pulls.is_held = True
        try:
            with self.watch.waiting("scaling", f"the trainer to save, to go on with {ranks} ranks"):
                async with asyncio.timeout(self.deadline_s):
                    version = await self._until_saved()
        except (TimeoutError, _NotSaved) as error:
            why = str(error) or f"waited {self.deadline_s:g} s for the trainer to save between two steps"
            self.change.give_up(why)
            training.pulls.is_held = False
            training.answer_pulls()
            self.tell()
            return False
        await self._until_held(version)
        self.change.saved()
        self._start()
        return await self.until_started()

    async def until_started(self) -> bool:
        """Wait until the trainer that is awaited has announced itself; where it does not, take the change back. As `carry_out`."""
        change, session = self.change, self.training.session
        while True:
            ranks = change.record.ranks
            try:
                with self.watch.waiting("scaling", f"a trainer of {ranks} ranks to start"):
                    async with asyncio.timeout(self.deadline_s):
                        while not (session.is_whole or self._failed):
                            await session.announced.wait()
            except TimeoutError:
                self._failed = f"waited {self.deadline_s:g} s for a trainer of {ranks} ranks to announce itself"
            if session.is_whole:
                change.done()
                session.is_changing = False
                self.tell()
                return not change.record.is_back
            if not change.give_up(self._failed):
                raise PeerSilent(f"no trainer starts, with the {ranks} ranks that it had before neither: {self._failed}")
            self._start()

    def tell(self) -> None:
        """Say in the folder and in the journal how many ranks the trainer has."""
        record = self.change.record
        self.folder.publish_trainer(record)
        self.journal.write(
            "trainer_ranks",
            ranks=record.ranks,
            wanted=record.wanted,
            before=record.before,
            phase=record.phase,
            epoch=record.epoch,
            reason=record.reason,
        )

    def _start(self) -> None:
        """Have a trainer of the ranks that the change says take the place of the one that is there, in this order: who ends is not started
        again in the layout that it had."""
        self._failed = ""
        self.tell()
        record = self.change.record
        self.packing.num_replicas = self.change.num_replicas
        self.training.session.replace(self.change.num_replicas, f"start again: the trainer goes on with {record.ranks} ranks")
        self.training.pulls.is_held = False

    async def _until_saved(self) -> int:
        """Wait until the trainer has no row of an open step, and a checkpoint of all that it has trained; return its version.

        Raises `_NotSaved` where there is nothing left to train, or it could not be written.
        """
        training, session = self.training, self.training.session
        steps, checkpoints = training.steps, session.checkpoints
        while True:
            while not self._is_between_steps:
                await steps.moved_on.wait()
            version = steps.num_done
            if session.is_ending:
                raise _NotSaved("the run ends")
            if version >= session.num_steps:
                raise _NotSaved(f"all {session.num_steps} steps are trained")
            if checkpoints.newest < version:
                for replica in session.replicas:
                    session.trainer.send(f"trainer-{replica}", SaveCheckpoint(version=version))
            while checkpoints.newest < version and steps.num_done == version:
                await checkpoints.changed.wait()
            if steps.num_done != version or not self._is_between_steps:  # another process has taken the trainer's place
                continue
            if version and version not in saved_versions(training.ledger):
                raise _NotSaved(f"its checkpoint of version {version} could not be written: see the journal, or the trainer's log")
            return version

    @property
    def _is_between_steps(self) -> bool:
        """True where the trainer has no row of a step that is not done."""
        training = self.training
        is_there = training.session.is_whole and not training.session.is_starting
        return is_there and training.pulls.newest_given < training.steps.num_done

    async def _until_held(self, version: int) -> None:
        """Wait until engines have what the trainer is about to take with it, a while."""
        try:
            async with asyncio.timeout(SWAP_S):
                while self.training.last_version < version or not self.engines.all_hold(version):
                    await self.engines.changed.wait()
        except TimeoutError:
            pass

    def _on_failed(self, peer: str, failed: Failed) -> None:
        if not self.training.session.is_changing:
            raise PeerRefused(f"{peer} failed: {failed.error}")
        self._give_up_waiting(f"{peer} failed: {failed.error}")

    def _give_up_waiting(self, reason: str) -> None:
        self._failed = reason
        self.training.session.announced.set()
