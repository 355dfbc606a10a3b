"""The state of a run at some point of its history, and the promises that are broken so far."""

from __future__ import annotations

import collections
import dataclasses
import hashlib

from pipelinerl.checker.history import Entry

ENDS = ("trained", "filtered", "stale", "failed", "cancelled")


@dataclasses.dataclass(slots=True)
class Rollout:
    """A rollout at some point of the history."""

    group_id: int
    prompt_id: str
    attempt: int = -1
    is_out: bool = False
    """Its attempt was issued, and neither lost nor scored."""
    num_refused: int = 0
    """Attempts whose answers could not be true."""
    is_generated: bool = False
    num_observations: int = 0
    """Turns that the environment has replied to."""
    is_over: bool = False
    """It said that the episode is over, or failed."""
    has_environment: bool = False
    """Its environment with state stands."""
    early_stop_attempt: int | None = None
    """Its attempt about which a decision has fallen."""
    is_stopped: bool = False
    is_scored: bool = False
    is_own_score: bool = False
    """Its score is one that the script itself gave, which nothing is added to."""
    is_prm_scored: bool = False
    is_group_scored: bool = False
    has_reward: bool = False
    oldest: int | None = None
    newest: int | None = None
    num_tokens: int = 0
    step: int | None = None
    is_packed: bool = False
    row: int | None = None
    """Row of its step."""
    status: str = ""
    reason: str = ""


@dataclasses.dataclass(slots=True)
class Step:
    """A step at some point of the history."""

    assigned: set[str] = dataclasses.field(default_factory=set)
    rows: list[int] = dataclasses.field(default_factory=list)
    """Samples in each row."""
    num_packed: int = 0
    num_stopped: int = 0
    """Rollouts of its groups that were stopped early."""
    num_tokens: int = 0
    groups: set[int] = dataclasses.field(default_factory=set)
    closed_at: int | None = None
    quarantined_rows: set[int] = dataclasses.field(default_factory=set)
    """Rows that killed the trainer twice."""
    num_quarantined: int = 0
    """Samples in them."""
    digest: int = 0
    """Digest of the samples that are trained."""


class RunState:
    """The sum of the entries read so far. `problems` holds everything that breaks a promise."""

    def __init__(self, ledger_id: str) -> None:
        self.problems: list[str] = []
        self.entry: Entry
        """The entry that is being read."""
        self.settings: dict[str, int] = {}
        self.rollouts: dict[str, Rollout] = {}
        self.steps: dict[int, Step] = collections.defaultdict(Step)
        self.num_starts = 0
        """Starts of the orchestrator."""
        self.num_entries = 0
        self.num_done = 0
        self.num_retrained = 0
        self.num_reattached = 0
        self.next_done = 0
        """The step that the trainer is to finish next."""
        self.open_step = 0
        self.trainer_starts: list[int] = []
        """Versions from which the trainer started again."""
        self.saved: dict[int, str] = {}
        """Commits of the checkpoints that were written and not discarded since, by version."""
        self.num_discarded = 0
        self.has_ended = False
        self.deaths: collections.Counter[tuple[str, str]] = collections.Counter()
        """By role and suspect."""
        self.quarantined: dict[str, int] = {}
        """By suspect: number of the entry."""
        self.evaluated: set[int] = set()
        self._ledger_id = ledger_id

    def counts(self) -> dict[str, int]:
        """Return the conservation identity's right side, and `admitted`."""
        statuses = collections.Counter(rollout.status or "in_flight" for rollout in self.rollouts.values())
        return {"admitted": len(self.rollouts)} | {name: statuses[name] for name in ("in_flight", *ENDS)}

    def require(self, holds: bool, otherwise: str) -> None:
        """Write a problem of the entry that is being read down where a promise does not hold."""
        if not holds:
            self.problems.append(f"entry {self.entry.seq} ({self.entry.kind} {self.entry.rollout_id or ''}) {otherwise}")

    def refuse_quarantined(self, prompt_id: str) -> None:
        """Require that a prompt is not quarantined."""
        self.require(row_of(prompt_id) not in self.quarantined, f"asks for the quarantined prompt {prompt_id}")

    def is_greedy(self) -> bool:
        """Return whether the entry is of the sibling after those that are sampled, in a run that adds one."""
        return int((self.entry.rollout_id or "").partition("/")[2]) >= self.settings["group_size"]

    def commit_of(self, version: int) -> str | None:
        """Return the commit that a checkpoint of `version` must name."""
        closed_at = self.steps[version - 1].closed_at
        return None if closed_at is None else f"{self._ledger_id}:{closed_at}"


def digest_of(step: int, rollout_id: str) -> int:
    """Return a sample's part in a checkpoint's digest, which is their sum modulo 2^64: the order of training does not matter."""
    return int.from_bytes(hashlib.blake2b(f"{step}/{rollout_id}".encode(), digest_size=8).digest(), "little")


def row_of(prompt_id: str) -> str:
    """Return the row of the data that a prompt was made of."""
    return prompt_id.rpartition(":")[2]
