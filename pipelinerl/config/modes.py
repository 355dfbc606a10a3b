"""The ways in which generation and training share time and devices."""

from __future__ import annotations

import enum


class Mode(enum.StrEnum):
    """The ways in which generation and training share time; each is a schedule of `orchestrator.rules.admission.schedule_of`."""

    STREAMING = "streaming"
    """Generation never waits for training but for the staleness bound; weights are swapped between forward passes."""
    ONE_STEP_OFF = "one_step_off"
    """Batch n+1 is generated while batch n is trained; both wait for each other at the batch boundary."""
    SYNC = "sync"
    """Generate a batch, train on it, swap, repeat: one side always idles. The reference to measure against."""


class Placement(enum.StrEnum):
    """Where generation and training run."""

    APART = "apart"
    """Each on devices of its own, side by side."""
    COLOCATED = "colocated"
    """On the same devices, in turns: engines sleep while a batch is trained, and go on with their sequences under its policy."""
