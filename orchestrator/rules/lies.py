"""What a peer says that cannot be: of which kind it is, and what becomes of a peer that keeps saying such things.

A key says who speaks, a message only what that peer may say. A lie costs the attempt it is about, which is issued again, and one count by
its kind; never the run. Whether a peer means harm or is broken makes no difference: `MAX_LIES` of them and its process is replaced,
`MAX_REPLACED` replacements in an hour and it is banned, whatever its next process says.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Collection
from typing import Any

MAX_LIES = 3
"""Of one process. 1 would replace an engine for one bad kernel; many let a broken one cost as many attempts each time."""
MAX_REPLACED = 3
"""Replacements for lies within `WINDOW_S`. More repeats the same errors; fewer bans an engine for a bad hour of its device."""
WINDOW_S = 3600.0
"""Replacements older than this are forgotten."""
MAX_WORDS = 2000
"""Characters kept of what a peer says for a person to read: what goes into ledger and journal."""
MAX_REMEMBERED = 1 << 13
"""Requests remembered that a peer may still answer, or answer once more, and nobody waits for. More than are on their way at once; one that
is forgotten makes a lie of a late answer, and three of those a liar of an honest peer."""
_IDENTITIES = ("engine_id", "scorer_id", "prm_id", "replica")


class Kind(enum.StrEnum):
    """What cannot be about a message. The transport counts what it could not even read under reasons of its own."""

    IDENTITY = "identity"
    """It names another peer than the one whose key it came with, or one that the config does not have."""
    UNASKED = "unasked"
    """It answers what this peer was not asked: another's request, an attempt that nobody was given, the same one twice."""
    TOKENS = "token ids"
    """Outside the vocabulary, or other ones than the peer has told of this sequence before."""
    LOGPROBS = "log-probabilities"
    """Not finite, or above 0."""
    VERSIONS = "versions"
    """Older than what the engine held when it was asked, or newer than what it was told to fetch."""
    LENGTH = "length"
    """More tokens than were asked for."""
    FINISH = "finish"
    """An end that does not fit the tokens, or one that nobody asked for."""
    ROUTES = "routes"
    """Experts that the model does not have, or not one row for each token."""
    SCORES = "scores"
    """Not finite, of a function that the config does not name, or not the sum of their parts."""
    BOUNDS = "bounds"
    """A figure, a list or a layout that this run cannot have."""
    STEPS = "steps"
    """A trainer speaks of a step, a policy or a checkpoint that cannot be its next."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lie:
    """What cannot be about one message."""

    kind: str
    """A `Kind`, or the transport's reason."""
    words: str
    """Which message, got, expected."""

    def __str__(self) -> str:
        return f"refused: {self.kind}"


class Verdict(enum.Enum):
    """What to do with a peer that has lied once more."""

    REFUSE = enum.auto()
    """Refuse what it said, and nothing else."""
    REPLACE = enum.auto()
    """Have another process take its place; until then it gets no work."""
    BAN = enum.auto()
    """Listen to none of that name any more."""


class Trust:
    """Counts the lies of every peer."""

    def __init__(self, *, can_replace: bool, max_lives: int | None = None) -> None:
        """Where nobody can replace a process, a peer is banned at once in its place. More than `max_lives` processes of one name within
        `WINDOW_S` nobody has started: whoever says so lies; None: any number."""
        self._can_replace = can_replace
        self._max_lives = max_lives
        self._began_at: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)
        """When processes of each name began."""
        self._num_lies: collections.Counter[str] = collections.Counter()
        """Of the present process of each."""
        self._replaced_at: dict[str, collections.deque[float]] = collections.defaultdict(collections.deque)
        self._condemned: set[str] = set()
        """Peers that are being replaced, or are banned: what they say meanwhile changes nothing."""

    def lied(self, peer: str, *, now_s: float, is_hopeless: bool = False) -> Verdict:
        """A peer has said what cannot be; `is_hopeless`: nothing else its process may say is of any use."""
        if peer in self._condemned:
            return Verdict.REFUSE
        self._num_lies[peer] += MAX_LIES if is_hopeless else 1
        if self._num_lies[peer] < MAX_LIES:
            return Verdict.REFUSE
        self._condemned.add(peer)
        replaced_at = _recent(self._replaced_at[peer], now_s=now_s)
        if len(replaced_at) >= MAX_REPLACED or not self._can_replace:
            return Verdict.BAN
        replaced_at.append(now_s)
        return Verdict.REPLACE

    def failed(self, peer: str, *, now_s: float) -> bool:
        """Whether a peer is to be replaced because it says that it has failed: as often as for lies, whoever says so with its key."""
        replaced_at = _recent(self._replaced_at[peer], now_s=now_s)
        if len(replaced_at) >= MAX_REPLACED or not self._can_replace:
            return False
        replaced_at.append(now_s)
        return True

    def began_anew(self, peer: str, *, now_s: float) -> Verdict:
        """Another process has taken a peer's name: what the one before said is not held against it, unless there are too many of them."""
        began_at = _recent(self._began_at[peer], now_s=now_s)
        began_at.append(now_s)
        if self._max_lives is not None and len(began_at) > self._max_lives:
            return Verdict.BAN
        self._condemned.discard(peer)
        del self._num_lies[peer]
        return Verdict.REFUSE


def _recent(instants: collections.deque[float], *, now_s: float) -> collections.deque[float]:
    while instants and now_s - instants[0] > WINDOW_S:
        instants.popleft()
    return instants


class Fenced:
    """What a peer was asked and nobody waits for any more: it was given up, or answered already. The newest of them."""

    def __init__(self) -> None:
        self._keys: dict[tuple[object, ...], None] = {}

    def add(self, *keys: tuple[object, ...]) -> None:
        """Remember what names a request, in place of what is oldest."""
        for key in keys:
            self._keys.pop(key, None)
            self._keys[key] = None
        while len(self._keys) > MAX_REMEMBERED:
            del self._keys[next(iter(self._keys))]

    def __contains__(self, key: tuple[object, ...]) -> bool:
        return key in self._keys


def impostor(peer: str, message: Any, *, names: Collection[str]) -> Lie | None:
    """A peer that the config does not have, or that names itself otherwise than its key does; None where all is well."""
    about = type(message).__name__
    if peer not in names:
        return Lie(kind=Kind.IDENTITY, words=f"{about} from {peer}, expected one of {', '.join(sorted(names))}: the config has no other")
    number = number_of(peer)
    for field in _IDENTITIES:
        said = getattr(message, field, number)
        if said != number:
            return Lie(kind=Kind.IDENTITY, words=f"{about}.{field} is {said}, expected {number}, as the key it came with says")
    return None


def number_of(peer: str) -> int:
    """A peer's number, as its name has it: 3 of `engine-3`."""
    return int(peer.rpartition("-")[2])


def shorten(words: str) -> str:
    """What is kept of a peer's words."""
    return words if len(words) <= MAX_WORDS else f"{words[:MAX_WORDS]} ... ({len(words)} characters)"
