"""How old tokens are. Staleness of a token is the version being trained minus the version that sampled it; of a row, its oldest token's.

It has two parts with two remedies: in flight (versions published while the rollout was still being sampled; shorten rollouts) and in
queue (published between its last token and its training; admit less). With bound K a token may train while its staleness is at
most K; the check at the moment a batch is cut is the guarantee, admission only makes it rarely bite.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from pipelinerl.messages import UNSAMPLED

Versions = npt.NDArray[np.integer]
"""[T] version that sampled each token, `UNSAMPLED` where none did."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Staleness:
    """Age of the sampled tokens of a sequence or a group, in versions."""

    num_tokens: int
    oldest: int
    """Largest token staleness: the one the bound is held against."""
    newest: int
    mean: float
    spread: int
    """Oldest minus newest: versions the rollout lived through."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalenessParts:
    """Where the staleness of the oldest token came from."""

    in_flight: int
    """Versions published between its oldest and its last token."""
    in_queue: int
    """Versions published between its last token and the step that trains it."""


def token_staleness(versions: Versions, *, trained_version: int) -> npt.NDArray[np.int64]:
    """[T] trained_version - version; 0 where nothing was sampled. Raises `ValueError` for a token newer than the policy being trained."""
    sampled = versions != UNSAMPLED
    ages = np.where(sampled, trained_version - versions.astype(np.int64), 0)
    if (ages < 0).any():
        raise ValueError(
            f"staleness: a token carries version {int(versions.max())}, newer than version {trained_version} being trained; the trainer"
            " publishes a version before any engine can sample under it"
        )
    return ages


def measure(versions: Versions, *, trained_version: int) -> Staleness | None:
    """Staleness over all sampled tokens; None where nothing was sampled."""
    ages = token_staleness(versions, trained_version=trained_version)[versions != UNSAMPLED]
    if not len(ages):
        return None
    oldest, newest = int(ages.max()), int(ages.min())
    return Staleness(num_tokens=len(ages), oldest=oldest, newest=newest, mean=float(ages.mean()), spread=oldest - newest)


def split(versions: Versions, *, trained_version: int) -> StalenessParts | None:
    """In-flight and in-queue parts of the oldest token's staleness; None where nothing was sampled."""
    whole = measure(versions, trained_version=trained_version)
    return None if whole is None else StalenessParts(in_flight=whole.spread, in_queue=whole.newest)


def fits_bound(versions: Versions, *, trained_version: int, bound: int) -> bool:
    """Whether the oldest token is at most `bound` versions old. A row without a sampled token fits."""
    whole = measure(versions, trained_version=trained_version)
    return whole is None or whole.oldest <= bound


def withhold_mask(versions: Versions, *, trained_version: int, bound: int) -> npt.NDArray[np.bool_]:
    """[T] true where a sampled token is within the bound and may train. The row's reward still counts in its group's baseline."""
    ages = token_staleness(versions, trained_version=trained_version)
    return (versions != UNSAMPLED) & (ages <= bound)


def never_falls(versions: Versions) -> bool:
    """Whether sampled versions never fall along the sequence, as they cannot where each token is tagged by the pass that computed it."""
    return not (np.diff(versions[versions != UNSAMPLED]) < 0).any()
