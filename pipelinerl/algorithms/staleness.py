"""The age of tokens. The staleness of a token is the version being trained minus the version that sampled it; of a row, its oldest token's.

It has two parts with two remedies: in flight (versions published while the rollout was still being sampled; shorten rollouts) and in
queue (published between its last token and its training; admit less). With bound K a token may train while its staleness is at
most K; the check at the moment a batch is cut is the guarantee, admission only makes it rarely bite.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipelinerl.messages import UNSAMPLED

Versions = npt.NDArray[np.integer]
"""[T] version that sampled each token, `UNSAMPLED` where none did."""
Ages = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Age of the sampled tokens of one rollout, in versions."""

    oldest: int
    """Largest token staleness: the one the bound is held against."""
    newest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessParts:
    """The two parts of the staleness of every sampled token; they add up to it."""

    in_flight: Ages
    """[sampled tokens] versions published between the token and the last one of its rollout."""
    in_queue: Ages
    """[sampled tokens] versions published between the rollout's last token and the step that trains it; the same for all of them."""


def measure(versions: Versions, *, trained_version: int) -> Staleness | None:
    """Staleness over all sampled tokens; None where nothing was sampled.

    Raises `ValueError` for a token newer than the policy being trained.
    """
    sampled = versions[versions != UNSAMPLED]
    if not len(sampled):
        return None
    staleness = Staleness(oldest=trained_version - int(sampled.min()), newest=trained_version - int(sampled.max()))
    _check(staleness.newest, trained_version=trained_version)
    return staleness


def split(rollouts: Sequence[Versions], *, trained_version: int) -> StalenessParts:
    """Split staleness into in-flight and in-queue parts for each sampled token of rollouts, laid end to end."""
    sampled = [part for versions in rollouts if len(part := versions[versions != UNSAMPLED])]
    ages = trained_version - np.concatenate([*sampled, np.zeros(0, np.int64)]).astype(np.int64, copy=False)
    _check(int(ages.min(initial=0)), trained_version=trained_version)
    newest = np.array([trained_version - int(part.max()) for part in sampled], np.int64)
    in_queue = np.repeat(newest, [len(part) for part in sampled])
    return StalenessParts(in_flight=ages - in_queue, in_queue=in_queue)


def _check(newest: int, *, trained_version: int) -> None:
    if newest < 0:
        raise ValueError(
            f"staleness: a token carries version {trained_version - newest}, newer than version {trained_version} being trained; the"
            " trainer publishes a version before any engine can sample under it"
        )
