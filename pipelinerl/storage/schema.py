"""The number of the form in which a run folder is written: its ledger, its checkpoints' manifests and its settings all carry it.

A folder of an earlier number is brought to the present one by `pipelinerl migrate RUN`; one of a later number is refused. Raise the
number with every change that an older program would misread, and teach `orchestrator.ledger.migration` the way from the number before.
"""

from __future__ import annotations

SCHEMA = 4
OLDEST_MIGRATED = 2
"""Written by version 0.1.0 until November 2026: no checksums, no number in manifests and settings.

Schema 3 had checksums and numbers, and other names for the ledger's columns, its kinds of entries and the config keys.
"""


def refusal(found: object, *, what: str) -> str | None:
    """Return why `what`, whose number is `found`, cannot be used; None where it can."""
    if found == SCHEMA:
        return None
    if not isinstance(found, int) or found > SCHEMA:
        return (
            f"{what} was written by a later version of pipelinerl: its schema is {found}, this version ({_version()}) reads {SCHEMA}."
            " Use the version that wrote it"
        )
    if found >= OLDEST_MIGRATED:
        return (
            f"{what} was written by an earlier version of pipelinerl: its schema is {found}, this one reads {SCHEMA}. Bring the run"
            " folder up to date: `pipelinerl migrate RUN`"
        )
    return (
        f"{what} was begun by another version of pipelinerl: its schema is {found}, and `pipelinerl migrate` knows the way from"
        f" {OLDEST_MIGRATED} on. Finish the run with the version of 0.1.0 that began it, or begin another from its last checkpoint's model"
    )


def _version() -> str:
    from pipelinerl import __version__

    return __version__
