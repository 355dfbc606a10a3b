"""A violation is a message that its sender cannot truthfully have sent.

The key says who speaks, a message only what that peer may say. A violation costs the attempt it is about, which is issued again, and one
count by its kind; never the run. `rules.validation.penalties` decides what becomes of a peer that keeps committing them.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Collection
from typing import Any

MAX_WORDS = 2000
"""Characters kept of a peer's text for a person to read, which goes into ledger and journal."""
_IDENTITIES = ("engine_id", "scorer_id", "prm_id", "replica")


class Kind(enum.StrEnum):
    """The kind of a violation. The transport counts messages that it could not even read under reasons of its own."""

    IDENTITY = "identity"
    """It names another peer than the one whose key it came with, or a peer that the config does not have."""
    UNASKED = "unasked"
    """It answers something that this peer was not asked: another's request, an attempt that nobody was given, the same one twice."""
    TOKENS = "token ids"
    """Its token ids are outside the vocabulary, or differ from those the peer has told of this sequence before."""
    LOGPROBS = "log-probabilities"
    """Its log-probabilities are not finite, or above 0."""
    VERSIONS = "versions"
    """Its versions are older than what the engine held when it was asked, or newer than what it was told to fetch."""
    LENGTH = "length"
    """It has more tokens than were asked for."""
    FINISH = "finish"
    """It has an end that does not fit the tokens, or one that nobody asked for."""
    ROUTES = "routes"
    """It names experts that the model does not have, or has not one row for each token."""
    SCORES = "scores"
    """Its scores are not finite, are of a function that the config does not name, or are not the sum of their parts."""
    BOUNDS = "bounds"
    """It has a figure, a list or a layout that this run cannot have."""
    STEPS = "steps"
    """It names a step, a policy or a checkpoint that cannot be the trainer's next."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """The violation in one message."""

    kind: str
    """A `Kind`, or the transport's reason."""
    words: str
    """The description: which message, what it has, what was expected."""

    def __str__(self) -> str:
        return f"refused: {self.kind}"


def wrong_identity(peer: str, message: Any, *, names: Collection[str]) -> Violation | None:
    """Return the violation of a peer that the config does not have, or that names itself otherwise than its key does; None where all is
    well.
    """
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
    """Return a peer's number from its name: 3 of `engine-3`."""
    return int(peer.rpartition("-")[2])


def shorten(words: str) -> str:
    """Cut a peer's text to the length that is kept."""
    return words if len(words) <= MAX_WORDS else f"{words[:MAX_WORDS]} ... ({len(words)} characters)"
