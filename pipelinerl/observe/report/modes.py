"""Modes of one config side by side: what the same few steps came to in each, and beside it what the simulator foretells of it.

Rates and waits are of the steady stretch (`measures`); seconds to a reward count from the first token on, as in every comparison.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence

from pipelinerl.errors import DataError
from pipelinerl.observe.fold import counters
from pipelinerl.observe.report.comparison import per_second
from pipelinerl.observe.report.diagnosis import diagnose
from pipelinerl.observe.report.headline import headline
from pipelinerl.observe.report.listings import Cell, Table
from pipelinerl.observe.report.measures import measure
from pipelinerl.observe.report.reading import Tables
from pipelinerl.observe.report.units import dashed, duration, percent, quantity

SMOOTHED_STEPS = 5
"""Steps whose mean reward has to reach what seconds are counted to. Fewer take one lucky step for learning; more come late."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModeFigures:
    """What a mode made of the config. None: not recorded, never reached, or not foretold."""

    samples_per_s: float | None = None
    reached_s: float | None = None
    """Seconds from the first token until the mean reward of five steps reached the one that is compared."""
    reward_per_sample: float | None = None
    """Mean reward over all samples that were trained."""
    staleness_mean: float | None = None
    """Over trained tokens, in versions."""
    engines_idle_fraction: float | None = None
    """Part of the engines' time without a request."""
    trainer_idle_fraction: float | None = None
    """Part of the trainer's time in which it waited for rows."""


WORDS: Mapping[str, tuple[str, Callable[[float | None], str]]] = {
    "samples_per_s": ("samples/s", quantity),
    "reached_s": ("to reward {reward:g}", duration),
    "reward_per_sample": ("reward per sample", quantity),
    "staleness_mean": ("staleness", quantity),
    "engines_idle_fraction": ("engines idle", percent),
    "trainer_idle_fraction": ("trainer idle", percent),
}
"""Heading of each figure, and how it is written."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModeRun:
    """One mode, run and foretold."""

    mode: str
    run_folder: str
    num_steps: int
    measured: ModeFigures
    foretold: ModeFigures
    foretold_from: str
    """The modes whose runs the simulator has learned from; or why it foretells nothing."""


def common_reward(all_tables: Mapping[str, Tables]) -> float:
    """Return the highest reward, of two digits, that every mode has reached. Raises `DataError` for a mode that has trained no step."""
    return min(math.floor(100 * max(reward for _, reward in _smoothed(mode, tables))) / 100 for mode, tables in all_tables.items())


def num_steps_to(mode: str, tables: Tables, reward: float) -> int | None:
    """Return how many steps it took to reach a mean reward; None where it never was."""
    return next((number for number, (_, mean) in enumerate(_smoothed(mode, tables), start=1) if mean >= reward), None)


def figures_of(mode: str, tables: Tables, *, reward: float) -> ModeFigures:
    """Return the figures of a mode's run. Raises `DataError` where no step was trained."""
    measured, diagnosis = measure(tables), diagnose(tables)
    ends_s = [t for t, _ in _smoothed(mode, tables)]
    num_steps = num_steps_to(mode, tables, reward)
    return ModeFigures(
        samples_per_s=per_second(tables, measured),
        reached_s=None if num_steps is None else ends_s[num_steps - 1] - (tables.worked_from or ends_s[0]),
        reward_per_sample=_reward_per_sample(tables),
        staleness_mean=headline(tables).staleness_mean,
        engines_idle_fraction=diagnosis.engine_wait_fraction,
        trainer_idle_fraction=diagnosis.trainer_wait_fraction,
    )


def table_of(runs: Sequence[ModeRun], *, reward: float) -> Table:
    """Return a column for each mode; what was foretold is the note of a cell."""
    rows: list[list[Cell]] = [["steps", *(str(run.num_steps) for run in runs)]]
    for name, (words, write) in WORDS.items():
        rows.append([words.format(reward=reward), *(_cell(run, name, write) for run in runs)])
    why = "; ".join(f"{run.mode} {run.foretold_from}" for run in runs)
    note = f"In brackets: what the simulator foretells of it, fitted to the runs of the others ({why})."
    return Table(name="modes", headings=("", *(run.mode for run in runs)), kinds=("name",), rows=rows, note=note)


def _cell(run: ModeRun, name: str, write: Callable[[float | None], str]) -> Cell:
    foretold = getattr(run.foretold, name)
    return dashed(getattr(run.measured, name), write), "" if foretold is None else f" ({write(foretold)})"


def _smoothed(mode: str, tables: Tables) -> list[tuple[float, float]]:
    """Return the end of each step, Unix seconds, with the mean reward of the last steps."""
    known = [(step.t, step.reward_mean) for step in tables.steps if step.reward_mean is not None]
    if not known:
        raise DataError(f"mode {mode} has trained no step, so there is nothing to compare: give it more time, see {tables.folder}")
    rewards = [reward for _, reward in known]
    last = [rewards[max(0, at + 1 - SMOOTHED_STEPS) : at + 1] for at in range(len(known))]
    return [(t, sum(few) / len(few)) for (t, _), few in zip(known, last, strict=True)]


def _reward_per_sample(tables: Tables) -> float | None:
    num_samples = counters.total(step.num_samples for step in tables.steps)
    rewards = counters.total(
        step.num_samples * step.reward_mean for step in tables.steps if step.num_samples is not None and step.reward_mean is not None
    )
    return rewards / num_samples if num_samples and rewards is not None else None
