"""What a run's journal says of the rule's decisions: on which figures each was made, what it cost, and what was written after it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

Line = dict[str, Any]
NAMES = ("engines", "trainer", "scorers", "tensor_parallel_size")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision of the rule, or what became of one."""

    at_s: float
    """Since the first line of the journal."""
    step: int
    word: str
    before: tuple[int, ...]
    after: tuple[int, ...]
    speed_now: float | None = None
    """Sampled tokens per second by the window that ended with it; None where none did."""
    speed_then: float | None = None
    written: float | None = None
    """Sampled tokens per second that engines wrote in that window."""
    written_next: float | None = None
    """The same of the next whole window, where roles changed with this decision."""
    taken_s: float | None = None
    """Seconds until everybody had taken up their role; None where nothing was ordered, or that was not seen."""
    away_s: float | None = None
    """Of these, seconds without a trainer."""

    @property
    def is_change(self) -> bool:
        """True where roles were to change."""
        return self.word == "begins"

    @property
    def foretold_over_written(self) -> float | None:
        """The speed foretold for a change over what the next whole window wrote."""
        return self.speed_then / self.written_next if self.is_change and self.speed_then and self.written_next else None


def decisions_of(lines: Sequence[Line]) -> list[Decision]:
    """Return the decisions of a run, whose lines are in order of time."""
    began = lines[0]["t"]
    roles = [line for line in lines if line["kind"] == "roles"]
    return [
        Decision(
            at_s=line["t"] - began,
            step=line["step"],
            word=line["word"],
            before=tuple(line[name] for name in NAMES),
            after=tuple(line[f"{name}_then"] for name in NAMES),
            speed_now=line.get("speed_now"),
            speed_then=line.get("speed_then"),
            written=line.get("written_rate"),
            **(_came_of(line, roles[at + 1 :], lines) if line["word"] == "begins" else {}),
        )
        for at, line in enumerate(roles)
    ]


def _came_of(order: Line, later: Sequence[Line], lines: Sequence[Line]) -> dict[str, float | None]:
    """Return what became of an order."""
    if not later or later[0]["word"] != "taken":
        return {}
    end = later[0]["t"]
    windows = [line for line in later if "written_rate" in line]
    return {
        "taken_s": end - order["t"],
        "away_s": sum(_away_s(lines, order["t"], end)),
        "written_next": windows[0]["written_rate"] if windows else None,
    }


def _away_s(lines: Sequence[Line], begin: float, end: float) -> Iterator[float]:
    """Yield for how long no trainer was there, each time that another one started."""
    told = [line for line in lines if line["kind"] == "trainer_ranks" and begin <= line["t"] <= end]
    for line, after in pairwise([*told, {"t": end}]):
        if line["phase"] == "starting":
            yield after["t"] - line["t"]


def went_and_came_back(decisions: Sequence[Decision], *, role: str) -> tuple[bool, bool]:
    """Return whether an engine's device took up this role, and whether the run had the layout that it began with again after that."""
    at = NAMES.index(role)
    taken = [one for one in decisions if one.word == "taken"]
    went = next((number for number, one in enumerate(taken) if one.after[0] < one.before[0] and one.after[at] > one.before[at]), None)
    return went is not None, went is not None and any(one.after == taken[0].before for one in taken[went + 1 :])
