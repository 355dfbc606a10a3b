"""Which trainer the run's launcher starts: one of as many ranks as the orchestrator says, one for each change of their number."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from pathlib import Path

from pipelinerl.config import Config
from pipelinerl.config.file import with_ranks
from pipelinerl.launch.gpus import place_trainer
from pipelinerl.launch.roles import TRAINER, Role, trainer_of
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.runtime.membership import DealtGpu, ScaleFolder, State
from pipelinerl.runtime.process import note
from pipelinerl.runtime.trainer_ranks import Phase, TrainerRanks

END_S = 60.0
"""Seconds in which a trainer that has saved has to end, before it is killed. Shorter cuts off large models being written."""


def gone_engines(run_folder: Path) -> frozenset[tuple[str, int]]:
    """The engines that have left or are lost: what they had is free, whichever process they belonged to."""
    return ScaleFolder(run_folder).with_state(State.LEFT, State.LOST)


def dealt_gpus(run_folder: Path) -> dict[DealtGpu, str]:
    """The GPUs of processes of reward models that have joined and are still there, or about to be."""
    folder = ScaleFolder(run_folder)
    found = folder.members()
    there = {
        (kind, one.engine_id, one.request_id)
        for kind, record in (found.rewards.items() if found is not None else ())
        for one in record.members
        if one.state not in (State.LEFT, State.LOST)
    }
    return {one: one.gpu for one in folder.dealt().dealt if (one.kind, one.number, one.request_id) in there}


class TrainerStarts:
    """The starts of one run's trainer on this machine. Raises `ConfigError` where the orchestrator's word is damaged."""

    def __init__(self, config: Config, run_folder: Path, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._config, self._run_folder, self._clock = config, run_folder, clock
        self._folder = ScaleFolder(run_folder)
        self._epoch: int | None = None
        """The change of which a trainer was started last, or could not be; None before the first start."""
        self._due_since: float | None = None

    def role(self, given: Role, others: Iterable[Role]) -> Role:
        """Return the trainer to be started now: `given`, or one of as many ranks as were asked for since, on what the `others` leave.

        Raises `ConfigError` where they have no GPUs.
        """
        record = self._record()
        is_first, self._due_since = self._epoch is None, None
        self._epoch = 0 if record is None else record.epoch - (record.phase is Phase.SAVING)  # whose trainer is still to be started
        if record is None or (is_first and record.ranks == record.configured):
            return given
        role = trainer_of(with_ranks(self._config, record.ranks), self._run_folder)
        leave = {"gone": gone_engines(self._run_folder), "dealt": dealt_gpus(self._run_folder).values()}
        return place_trainer(self._config, role, others, usable_gpus(), ranks=record.ranks, **leave)

    def is_due(self) -> bool:
        """Return whether another trainer is to be started once the present one has ended."""
        record = self._record()
        return record is not None and record.phase is Phase.STARTING and record.epoch > (self._epoch or 0)

    def is_overdue(self) -> bool:
        """Return whether the present trainer is to be killed for the next one: it had its time to end, or never started."""
        record, now_s = self._record(), self._clock()
        self._due_since = now_s if self._due_since is None else self._due_since
        return record is not None and (record.is_back or now_s - self._due_since > END_S)

    def is_on_trial(self) -> bool:
        """Return whether the run goes on without the trainer that was started last: there is a layout to fall back to."""
        record = self._record()
        return record is not None and record.phase is Phase.STARTING and record.epoch == self._epoch and not record.is_back

    def tell_failed(self, reason: str) -> None:
        """Leave word that the trainer that was started last, or was to be, does not start."""
        note(self._run_folder, f"the trainer of another number of ranks does not start: {reason}")
        self._folder.tell_trainer_failed(self._epoch or 0, reason)

    def _record(self) -> TrainerRanks | None:
        """Return what the orchestrator has said under these settings; None where it has not."""
        record = self._folder.trainer()
        return record if record is not None and record.configured == self._config.trainer.ranks else None


def starts_of(config: Config, run_folder: Path, roles: Iterable[Role]) -> TrainerStarts | None:
    """Return the starts of the trainer where all of it is on this machine; None where it is not, or a script's."""
    names = {role.name for role in roles}
    return TrainerStarts(config, run_folder) if {TRAINER, "orchestrator"} <= names else None
