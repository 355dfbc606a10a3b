"""A violation: a message that its sender cannot truthfully have sent.

A key says who speaks, a message only what that peer may say. A violation costs the attempt it is about, which is issued again, and one
count by its kind; never the run. `rules.validation.penalties` decides what becomes of a peer that keeps committing them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection
from typing import Any

MAX_WORDS = 2000
"""Characters kept of what a peer says for a person to read: what goes into ledger and journal."""
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
class Violation:
    """What cannot be about one message."""

    kind: str
    """A `Kind`, or the transport's reason."""
    words: str
    """Which message, got, expected."""

    def __str__(self) -> str:
        return f"refused: {self.kind}"


def wrong_identity(peer: str, message: Any, *, names: Collection[str]) -> Violation | None:
    """A peer that the config does not have, or that names itself otherwise than its key does; None where all is well."""
    about = type(message).__name__
    if peer not in names:
        return Violation(
            kind=Kind.IDENTITY, words=f"{about} from {peer}, expected one of {', '.join(sorted(names))}: the config has no other"
        )
    number = number_of(peer)
    for field in _IDENTITIES:
        said = getattr(message, field, number)
        if said != number:
            return Violation(kind=Kind.IDENTITY, words=f"{about}.{field} is {said}, expected {number}, as the key it came with says")
    return None


def number_of(peer: str) -> int:
    """A peer's number, as its name has it: 3 of `engine-3`."""
    return int(peer.rpartition("-")[2])


def shorten(words: str) -> str:
    """What is kept of a peer's words."""
    return words if len(words) <= MAX_WORDS else f"{words[:MAX_WORDS]} ... ({len(words)} characters)"
