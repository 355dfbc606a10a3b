"""How many ranks the trainer of a live run has: one file that everybody reads, and the orchestrator writes (`<run>/scale/trainer.json`).

The trainer changes by a planned restart between two steps: it saves, ends, and another one of more or fewer ranks starts from what it has
saved. Each change has an epoch: whoever starts the trainer starts one for each epoch, and an old order is not carried out again.
"""

from __future__ import annotations

import enum

import msgspec


class Phase(enum.StrEnum):
    """How far a change of the trainer is."""

    SETTLED = "settled"
    """None is under way."""
    SAVING = "saving"
    """The trainer is to save between two steps, once engines have left that are to. Until it has, nothing of it is given up."""
    STARTING = "starting"
    """It has saved, and is to end; another one is awaited."""


class TrainerRanks(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's ranks at one moment."""

    ranks: int
    """Ranks of a trainer that is started now."""
    wanted: int
    """Ranks that were asked for; others than `ranks` while the trainer saves."""
    before: int
    """Ranks before the change that is under way, or before the last one."""
    configured: int
    """`trainer.ranks` of the settings under which it was written: a run that goes on with another number begins anew."""
    phase: Phase = Phase.SETTLED
    epoch: int = 0
    """Counts changes, those that take one back included."""
    is_back: bool = False
    """This change takes the one before it back: there is nothing left to fall back to."""
    engines_before: dict[str, int] = {}
    """Engines to go back to where the change is given up, by their kind; of a kind that is not there, none were asked for with it, or
    somebody has asked for another number since."""
    reason: str = ""
    """Why the last change was given up; empty where it was not."""


class TrainerFailed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The word of whoever starts the trainer that the one of this epoch does not start."""

    epoch: int
    reason: str
