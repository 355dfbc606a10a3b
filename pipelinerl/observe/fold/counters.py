"""Counters that only grow, except that a process which is started again starts from zero."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from pipelinerl.observe.fold.rows import ADMISSION_WAIT, StatusRow


def growth(values: Iterable[float | None]) -> float | None:
    """The growth of a counter over its readings; a fall is a restart from zero. None with fewer than two readings."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return None
    return float(sum(later - earlier if later >= earlier else later for earlier, later in itertools.pairwise(known)))


def growth_of_all(statuses: Sequence[StatusRow], gauges: Callable[[StatusRow], dict[int, float | None]]) -> float | None:
    """Sum of the growth of a counter that each of several peers keeps; `gauges` gives it by peer. None where nobody has one."""
    readings: dict[int, list[float | None]] = {}
    for status in statuses:
        for peer, value in gauges(status).items():
            readings.setdefault(peer, []).append(value)
    grown = [amount for values in readings.values() if (amount := growth(values)) is not None]
    return sum(grown) if grown else None


def rate_points(readings: Sequence[tuple[float, float]], *, num_points: int, shortest_s: float = 0.0) -> list[tuple[float, float]]:
    """A counter's growth per second, over at most `num_points` stretches of its readings (Unix seconds, value), equal in length.

    `shortest_s` is the least length of a stretch: several times the interval at which the counter itself is brought up to date. Each
    rate stands at the end of its stretch. What is left of a stretch at the end is too short to tell a rate and is left out.
    """
    if len(readings) < 2:
        return []
    shortest_s = max(shortest_s, (readings[-1][0] - readings[0][0]) / num_points) * (1 - 1e-9)
    rates: list[tuple[float, float]] = []
    t_before, before = readings[0]
    for t, value in readings[1:]:
        if t > t_before and t - t_before >= shortest_s:
            rates.append((t, (value - before if value >= before else value) / (t - t_before)))
            t_before, before = t, value
    return rates


def quantile(values: Sequence[float], q: float) -> float | None:
    """The `q` quantile, linear between neighbours; None of nothing."""
    return float(np.quantile(values, q)) if values else None


def mean(values: Iterable[float | None]) -> float | None:
    """Mean of the values that are there; None of nothing."""
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def total(values: Iterable[float | None]) -> float | None:
    """Sum of the values that are there; None of nothing."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


def empty_fraction(statuses: Sequence[StatusRow], *, slots_per_engine: int | None) -> float | None:
    """Part of the engines' sequence slots that stood empty while generation was held back by admission: engines waiting for admission.

    Generation is held back also while engines are full, so its own wait does not tell this. None where slots or gauges are not recorded.
    """
    empty = []
    for status in statuses:
        slots = (slots_per_engine or 0) * len(status.engines)
        if slots:
            is_held = any(name == ADMISSION_WAIT for name, _ in status.waits)
            running = sum(engine.num_running or 0.0 for engine in status.engines)
            empty.append(max(0.0, 1 - running / slots) if is_held else 0.0)
    return mean(empty)
