"""Admission decides whether another group may be generated. This module holds the only formula that bounds staleness.

With bound K and batches of B groups, admit a group to an engine that samples under `version` while

    accepted + running < (K + version + 1) * B     and     generating < max_running

`accepted` counts groups assigned to a step since the run began, `running` those admitted and neither assigned nor dropped yet; `generating`
counts rollouts that engines still work on: a group that waits for its last sibling, for its scores or for its environment occupies no
engine.

The formula bounds staleness for this reason. When a group is admitted to an engine at version v, fewer than (K + v + 1) * B groups are
assigned or on their way before it. Taken in order it falls into step K + v at the latest, and step s trains version s. Its oldest token was
sampled under v or later, so it is at most K versions old. `version` must be the version the engine *holds*: a policy that is published but
not yet committed samples nothing. A group overtaken by later ones can still exceed K; `rules.batch` checks that again, per oldest token,
when the batch is cut.

Source: AReaL (arXiv 2505.24298, eq. 3), in groups, with the credit returned on every exit path.

A script (`orchestrator.controller`) says itself what is generated and what a step is made of, so no count of groups can foresee the step
that a group falls into. There a group is admitted to an engine that is at most K versions behind the step that comes next, or behind the
later one that the script says it is for,

    max(next step, its step) - version <= K

since what an older engine samples could not be trained in it; the batch cut checks what is trained, as everywhere.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable

from pipelinerl.config import Mode

STALENESS_BOUND = "an admission credit"
"""The bound is reached: only the trainer can end this wait, so the engines are ahead."""
ENGINES_FULL = "a free engine slot"
"""The engines have as many rollouts as they may: they are busy."""
ROUND_UNDER_WAY = "the round to end"
"""In rounds: the batch is admitted, or the engines do not hold the newest policy yet."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A schedule says how generation and training share time."""

    max_staleness: int
    """The staleness bound K, in versions."""
    in_rounds: bool
    """Admit whole batches, each when the last is generated and every engine holds the newest policy."""
    holds_batches: bool
    """Train on a batch only once it is whole."""
    swaps_when_idle: bool
    """An engine changes its version only while no sequence runs."""
    in_script: bool = False
    """A script says what is generated, and which groups are a step."""


def schedule_of(mode: Mode, *, max_staleness: int, in_script: bool = False, is_colocated: bool = False) -> Schedule:
    """Return the schedule of a mode; `max_staleness` is the configured K, which only streaming uses. A script has no rounds.

    Where engines and trainer are colocated, engines generate until a batch is whole (`rules.phases`).
    """
    if is_colocated:
        return dataclasses.replace(schedule_of(mode, max_staleness=max_staleness, in_script=in_script), holds_batches=True)
    if in_script:
        return dataclasses.replace(schedule_of(mode, max_staleness=max_staleness), in_rounds=False, in_script=True)
    match mode:
        case Mode.STREAMING:
            return Schedule(max_staleness=max_staleness, in_rounds=False, holds_batches=False, swaps_when_idle=False)
        case Mode.ONE_STEP_OFF:
            return Schedule(max_staleness=1, in_rounds=True, holds_batches=True, swaps_when_idle=True)
        case Mode.SYNC:
            return Schedule(max_staleness=0, in_rounds=True, holds_batches=True, swaps_when_idle=True)


def num_kept_free(max_running: int, *, num_engines: int, held: Iterable[int]) -> int:
    """Return how many of `max_running` rollouts engines that are asleep would have besides those `held`, one number for each of them:
    others do not get these, so that who wakes finds work.
    """
    share = max_running // max(1, num_engines)
    return sum(max(0, share - one) for one in held)


class Admission:
    """Admission counts groups and answers `holds_back`. Every admitted group comes back exactly once, by `assigned` or `dropped`."""

    def __init__(self, *, schedule: Schedule, groups_per_step: int, num_steps: int, max_running: int) -> None:
        """`max_running` bounds the rollouts that engines work on or hold in their queues."""
        self.schedule = schedule
        self.version = 0
        """Policies published so far."""
        self.accepted = 0
        self.running = 0
        self.next_step = 0
        """The step that a script fills next; meaningless without one."""
        self.asked_steps: collections.deque[int] = collections.deque()
        """The steps that a script's prompts are for, of those that generation has, in order; empty without a script."""
        self._groups_per_step = groups_per_step
        self._num_steps = num_steps
        self.max_running = max_running
        self._round_left = 0

    def restore(self, *, accepted: int, running: int, version: int) -> None:
        """Take over the counts of an earlier process of the run."""
        self.accepted, self.running, self.version = accepted, running, version

    def limit(self, version: int) -> int:
        """Return how many groups may be accepted or running: (K + version + 1) * B, and never more than the run trains on."""
        return min(self.schedule.max_staleness + version + 1, self._num_steps) * self._groups_per_step

    def num_closable(self, version: int) -> int:
        """Return how many steps can be closed before a policy after `version` is published."""
        return self.limit(version) // self._groups_per_step

    def holds_back(self, *, version: int, num_generating: int, engines_are_current: bool) -> str | None:
        """Name what another group would have to wait for; return None where an engine that samples under `version` may generate it now.

        `num_generating` counts the rollouts that engines have not answered; `engines_are_current` says that every engine holds the newest
        policy.
        """
        if self.schedule.in_script:
            step = max(self.next_step, *itertools.islice(self.asked_steps, 1), 0)
            is_bound = step - version > self.schedule.max_staleness
        else:
            is_bound = self.accepted + self.running >= self.limit(version)
        if is_bound:
            return STALENESS_BOUND
        if not self.schedule.in_rounds:
            return ENGINES_FULL if num_generating >= self.max_running else None
        if self.running == 0 and self._round_left == 0 and engines_are_current:
            self._round_left = self._groups_per_step - self.accepted % self._groups_per_step
        return None if self._round_left > 0 else ROUND_UNDER_WAY

    def admitted(self) -> None:
        """Note that a group was sent to engines: it takes a credit."""
        self.running += 1
        self._round_left = max(0, self._round_left - 1)

    def assigned(self) -> None:
        """Note that a group was assigned to a step."""
        self.running -= 1
        self.accepted += 1

    def dropped(self) -> None:
        """Note that a group was filtered, stale, failed or cancelled: its credit returns."""
        self.running -= 1

    def published(self, version: int) -> None:
        """Note that the trainer published a policy. Repeated and reordered messages are harmless."""
        self.version = max(self.version, version)
