"""Whether a goal is met, missed, or not to be judged, as the machine was during the run: rules on numbers, without a clock.

Speeds are parts of the reference machine's: 1.0 is as fast as it, 0.27 a machine that something else keeps busy, or that is slower. A
figure in seconds is multiplied by the speed and one per second divided by it; a ratio of two measurements stays as it is. Scaling is
trusted near the reference only: what else runs takes caches and memory, too, and a machine that changed meanwhile has no one speed. So
nothing is judged below `SLOWEST` or where the speed changed by more than `STEADY` allows, with one exception: seconds that are met
unscaled on a slow machine are met on the reference, too.
"""

from __future__ import annotations

import dataclasses
import enum
import statistics
from collections.abc import Sequence

SLOWEST = 0.5
"""Part of the reference speed below which nothing is judged. Lower would trust figures of a machine of which others have more than half."""
STEADY = 0.75
"""Slowest over fastest speed within what is compared. Higher than 0.9 would call the noise of the reference itself a disturbance."""


class Work(enum.StrEnum):
    """What a figure takes from the machine, and so which reference it is held against."""

    CPU = "cpu"
    """Computing on data in the caches."""
    MEMORY = "memory"
    """Copying what no cache holds."""
    DISK = "durable write"
    """Small writes, each made durable before the next."""


class Scale(enum.IntEnum):
    """How a figure grows with the machine's speed: it is multiplied by the speed to this power to have it at reference speed."""

    SECONDS = 1
    RATIO = 0
    RATE = -1


class Verdict(enum.StrEnum):
    MET = "met"
    MISSED = "MISSED"
    NOT_JUDGED = "not judged"


@dataclasses.dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds of the machine in one kind of work, in order of time; at least one."""

    values: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.values)

    @property
    def drift(self) -> float:
        """Slowest over fastest: 1.0 is a machine that stayed as it was."""
        return min(self.values) / max(self.values)

    @property
    def is_steady(self) -> bool:
        return self.drift >= STEADY

    @property
    def trouble(self) -> str:
        """Why figures measured at these speeds are not to be judged; empty where they are."""
        if self.median < SLOWEST:
            return f"machine at {self.median:.2f} of its speed"
        return "" if self.is_steady else f"machine between {min(self.values):.2f} and {max(self.values):.2f} of its speed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """One figure against its goal."""

    name: str
    value: float
    """As measured."""
    goal: float
    """At reference speed."""
    is_at_least: bool
    """False: the value must not exceed the goal."""
    work: Work | None
    """None: a figure that no machine's speed changes, such as bytes, rewards, counts, or what follows from a seed."""
    scale: Scale
    speeds: Speeds | None
    """Those of this figure alone; None: those of the whole run."""

    def at_reference(self, speeds: Speeds | None) -> float:
        """The value as the reference machine would have it."""
        return self.value if speeds is None else self.value * speeds.median**self.scale

    def verdict(self, speeds: Speeds | None) -> tuple[Verdict, str]:
        """The verdict, and why there is none; `speeds` are those of its work, None for a figure that depends on none."""
        if speeds is None or not (trouble := speeds.trouble):
            return (Verdict.MET if self._meets(self.at_reference(speeds)) else Verdict.MISSED), ""
        is_met_unscaled = self.scale is not Scale.RATIO and max(speeds.values) <= 1.0 and self._meets(self.value)
        return (Verdict.MET, "") if is_met_unscaled else (Verdict.NOT_JUDGED, trouble)

    def _meets(self, value: float) -> bool:
        return value >= self.goal if self.is_at_least else value <= self.goal

    def told(self, speeds: Speeds | None) -> str:
        """One line: the figure, at reference speed where that is another one, the goal and the verdict."""
        verdict, why = self.verdict(speeds)
        wish = f"{'≥' if self.is_at_least else '≤'} {self.goal:g}"
        scaled = self.scale is not Scale.RATIO and speeds is not None
        value = f"{self.value:.4g}" + (f" ({self.at_reference(speeds):.4g} at reference speed)" if scaled else "")
        return f"{self.name} {value}, goal {wish}: {verdict}{': ' + why if why else ''}"


def disturbed(rounds: Sequence[Speeds]) -> list[int]:
    """Which rounds of a comparison are to be measured again, because the machine changed within them."""
    return [number for number, speeds in enumerate(rounds) if not speeds.is_steady]


def kept(rounds: Sequence[Speeds], *, count: int) -> list[int]:
    """The first `count` rounds that were not disturbed, in order of time, and where there are too few, the least disturbed others."""
    steadiest = sorted(range(len(rounds)), key=lambda number: -min(rounds[number].drift, STEADY))
    return sorted(steadiest[:count])
