"""What a run would have been with other settings, as `orchestrator.simulate.what_if` foretells it: a file in the run's folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec

from pipelinerl.observe.report.units import duration, percent

FILE = "what_ifs.json"
CLEARLY = 0.03
"""Part of a run's time by which a change must shorten it to be told; less is within what the simulation is off by at its best."""


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """One change."""

    change: str
    overrides: tuple[str, ...]
    """The settings that make it, as a command line has them."""
    seconds: float
    """Of the same steps."""


class WhatIfs(msgspec.Struct, frozen=True, kw_only=True):
    """All that were tried, shortest first."""

    last_step: int
    first_step: int = 1
    """The first one that was simulated: 1, but in a long run."""
    measured_s: float
    """From the end of the step before `first_step` to that of `last_step`."""
    simulated_s: float
    """The same, simulated as the run was."""
    held_out_error: float | None
    """Parts by which the second half of the steps lasts longer in a simulation fitted to the first; None in a short run."""
    what_ifs: tuple[WhatIf, ...]
    assumes: str = ""

    def sentences(self) -> Iterator[str]:
        """Say what would have shortened the run, what would not, and how far the simulation is off."""
        took, steps = duration(self.measured_s), f"steps {self.first_step:,} to {self.last_step:,}"
        shorter = [one for one in self.what_ifs if one.seconds < (1 - CLEARLY) * self.measured_s]
        for one in shorter:
            yield f"With {one.change}, {steps} would have taken {duration(one.seconds)} instead of {took}."
        others = [one for one in self.what_ifs if one not in shorter]
        if others:
            told = "; ".join(f"{one.change}: {duration(one.seconds)}" for one in others)
            yield f"{'Of little use, or slower' if shorter else f'Nothing tried would have shortened the {took}'}: {told}."
        yield f"Simulated as they were, {steps} take {duration(self.simulated_s)}: {_off(self.simulated_s / self.measured_s - 1)}."
        if self.held_out_error is not None:
            yield f"Fitted to the first half of these steps, the simulation foretells the second half {_off(self.held_out_error)}."
        if self.assumes:
            yield f"It assumes that {self.assumes}."


def _off(error: float) -> str:
    return f"{percent(abs(error))} too {'long' if error > 0 else 'short'}"


def read_what_ifs(run_folder: Path) -> WhatIfs | None:
    """Return what was foretold of a run; None where nothing was, or a file of another version lies there."""
    try:
        return msgspec.json.decode((run_folder / FILE).read_bytes(), type=WhatIfs)
    except (OSError, msgspec.DecodeError):
        return None
