"""The rollouts of a run, counted: those in flight by name, those that ended by terminal status and reason."""

from __future__ import annotations

import collections
import dataclasses

from orchestrator.ledger.store import Store, changing, writing
from pipelinerl.messages import TerminalStatus, Trajectory

RUN_ENDED = "the run ended"
"""Reason of a rollout that was in flight when its run ended; it is revived when the run goes on."""


@dataclasses.dataclass(slots=True, kw_only=True)
class InFlight:
    """A rollout in flight."""

    group_id: int
    prompt_id: str
    attempt: int = -1
    """The last attempt that was issued."""
    version: int = 0
    """The newest version that an attempt of it was issued under."""
    early_stop: str | None = None
    """JSON: the attempt about which a decision fell, and the decision; see `Ledger.record_early_stop`."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSummary:
    """The facts about a rollout that ends; a field is None where it never got that far."""

    step: int | None = None
    """The step it was trained in, or, for a rollout that was stopped early, counts in."""
    reward: float | None = None
    oldest_version: int | None = None
    newest_version: int | None = None
    num_tokens: int = 0
    """Tokens sampled for it."""


def summary_of(trajectory: Trajectory, *, reward: float | None = None, step: int | None = None) -> RolloutSummary:
    """Summarize a trajectory for the ledger."""
    sampled = trajectory.versions[trajectory.loss_mask]
    return RolloutSummary(
        step=step,
        reward=reward,
        oldest_version=int(sampled.min()) if len(sampled) else None,  # branches stand end to end, so it need not be the first
        newest_version=int(sampled.max()) if len(sampled) else None,
        num_tokens=len(sampled),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """The seven counts of the conservation identity."""

    admitted: int
    in_flight: int
    trained: int
    filtered: int
    stale: int
    failed: int
    cancelled: int

    @property
    def holds(self) -> bool:
        return self.admitted == self.in_flight + self.trained + self.filtered + self.stale + self.failed + self.cancelled

    def __str__(self) -> str:
        right = f"{self.in_flight} in flight + {self.trained} trained + {self.filtered} filtered + {self.stale} stale"
        sign = "=" if self.holds else "IS NOT"
        return f"{self.admitted} admitted {sign} {right} + {self.failed} failed + {self.cancelled} cancelled"


class Rollouts:
    """Counts rollouts, and has the tables `in_flight` and `counts` say the same.

    A row of `in_flight` changes at once; `counts` are put to the store by `write_counts`, before a flush.
    """

    def __init__(self, store: Store) -> None:
        """Take over what the store holds."""
        self.in_flight: dict[str, InFlight] = {}
        """The rollouts in flight by name, in the order in which they were admitted."""
        self.reasons: collections.Counter[str] = collections.Counter()
        """Rollouts that were not trained, by `status: reason`."""
        self._store = store
        self._ended: collections.Counter[tuple[TerminalStatus, str]] = collections.Counter()
        """The rollouts that ended, by status and reason."""
        self._changed: set[tuple[TerminalStatus, str]] = set()
        """Keys of `_ended` that changed since they were written."""
        for status, reason, number in store.rows("counts"):
            self._count(TerminalStatus(status), reason, number)
        self._read_in_flight("NOT revives")

    def admit(self, rollout_id: str, *, group_id: int, prompt_id: str) -> None:
        """Add a rollout."""
        assert rollout_id not in self.in_flight, f"rollout {rollout_id} was admitted twice"
        self.in_flight[rollout_id] = InFlight(group_id=group_id, prompt_id=prompt_id)
        self._store.put(_ADDED, rollout_id, group_id, prompt_id, -1, 0, None, 0)

    def issue(self, rollout_id: str, *, attempt: int, version: int) -> None:
        """Note the attempt that is out; a decision about an earlier one no longer counts."""
        if (rollout := self.in_flight.get(rollout_id)) is not None:
            rollout.attempt, rollout.version, rollout.early_stop = attempt, max(version, rollout.version), None
            self._update(rollout_id, rollout)

    def decide(self, rollout_id: str, early_stop: str) -> None:
        """Note the early-stop decision about the attempt that is out."""
        if (rollout := self.in_flight.get(rollout_id)) is not None:
            rollout.early_stop = early_stop
            self._update(rollout_id, rollout)

    def end(self, rollout_id: str, status: TerminalStatus, reason: str) -> None:
        """Take a rollout out of flight, and count it. Raises `KeyError` where it is not in flight."""
        rollout = self.in_flight.pop(rollout_id)
        self._count(status, reason, 1)
        if status is TerminalStatus.CANCELLED and reason == RUN_ENDED:
            self._update(rollout_id, rollout, revives=True)
        else:
            self._store.put("DELETE FROM in_flight WHERE rollout_id = ?", rollout_id)

    def revive(self) -> list[str]:
        """Put rollouts that were cancelled when the run ended back in flight; return their names."""
        revived = self._read_in_flight("revives")
        for rollout_id in revived:
            self._update(rollout_id, self.in_flight[rollout_id])
        self._count(TerminalStatus.CANCELLED, RUN_ENDED, -len(revived))
        return revived

    def counts(self) -> Counts:
        """Count the rollouts of this moment."""
        ended: collections.Counter[TerminalStatus] = collections.Counter()
        for (status, _), number in self._ended.items():
            ended[status] += number
        return Counts(
            admitted=len(self.in_flight) + ended.total(),
            in_flight=len(self.in_flight),
            **{str(status): ended[status] for status in TerminalStatus},
        )

    def write_counts(self) -> None:
        """Put the counts that changed to the store."""
        changed, self._changed = self._changed, set()
        for status, reason in sorted(changed):
            self._store.put(_COUNT, str(status), reason, self._ended[status, reason])

    def _read_in_flight(self, where: str) -> list[str]:
        names = []
        for name, group_id, prompt_id, attempt, version, early_stop, _ in self._store.rows("in_flight", f"{where} ORDER BY rowid"):
            self.in_flight[name] = InFlight(group_id=group_id, prompt_id=prompt_id, attempt=attempt, version=version, early_stop=early_stop)
            names.append(name)
        return names

    def _count(self, status: TerminalStatus, reason: str, number: int) -> None:
        self._ended[status, reason] += number
        self._changed.add((status, reason))
        if status is not TerminalStatus.TRAINED:
            self.reasons[f"{status}: {reason}"] += number

    def _update(self, rollout_id: str, rollout: InFlight, *, revives: bool = False) -> None:
        """Write a rollout's changes to the table; `revives` says that it has ended, and is in flight again when the run goes on."""
        self._store.put(_CHANGED, rollout.attempt, rollout.version, rollout.early_stop, int(revives), rollout_id)


_ADDED, _COUNT = writing("in_flight"), writing("counts")
_CHANGED = changing("in_flight", "attempt", "version", "early_stop", "revives")
