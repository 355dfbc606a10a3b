"""`pipelinerl compare --modes`: one config in every mode, a small run each, and what each came to beside what the simulator foretells."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.markup import escape
from rich.table import Table

from pipelinerl.cli.app import console
from pipelinerl.config import EngineSection, Mode, Placement
from pipelinerl.config.file import load
from pipelinerl.errors import ConfigError, DataError, PeerGone
from pipelinerl.launch.run_folder import name_now
from pipelinerl.observe.fold.followed import FollowedRun
from pipelinerl.observe.report import listings
from pipelinerl.observe.report.comparison import write_comparison
from pipelinerl.observe.report.modes import ModeFigures, ModeRun, common_reward, figures_of, num_steps_to, table_of
from pipelinerl.observe.report.page import write_whole
from pipelinerl.observe.report.reading import Tables, read_tables
from pipelinerl.observe.report.units import dashed
from pipelinerl.runtime.process import die_with_parent

MODES: Mapping[str, tuple[Mode, Placement]] = {
    "sync": (Mode.SYNC, Placement.APART),
    "colocated": (Mode.STREAMING, Placement.COLOCATED),  # not last: of the others, the last one's rollouts are taken
    "mixed": (Mode.STREAMING, Placement.COLOCATED),
    "one_step_off": (Mode.ONE_STEP_OFF, Placement.APART),
    "streaming": (Mode.STREAMING, Placement.APART),
}
"""Each mode by name, with what makes it: they are schedules of the same calls (`orchestrator.rules.admission.schedule_of`). In `mixed` some
engines take turns with the trainer, and others stand apart: as many as `engine.apart` says, else half of them.
"""
STEPS = 20
"""Steps of each mode where nothing else is said."""
LOOK_EVERY_S = 0.5
"""Pause between two looks at a run's journal."""


def compare_modes(
    config_file: Path, overrides: Sequence[str], *, steps: int | None, seconds: float | None, reward: float | None, page: Path | None
) -> None:
    """Run a config in every mode, one after the other; print one table, and write `comparison.json` and a page beside the runs.

    Each run trains `steps` steps, or for `seconds` from its first token on, whichever comes first. Raises `ConfigError` where the config
    allows fewer than two modes, `PeerGone` where a run fails, and `DataError` where one has trained no step.
    """
    if any(word.partition("=")[0].strip() == "trainer.steps" for word in overrides):
        raise ConfigError(
            f"--steps says how long each mode is trained, {STEPS} steps without a word: leave trainer.steps out, and add --steps"
        )
    own = (f"trainer.steps={steps or STEPS}",) if steps or seconds is None else ()
    words = [*overrides, *own, "tracking.to=[]"]
    config = load(config_file, overrides=overrides)
    modes = _possible(config_file, words, config.engine)
    folder = config.run.folder / name_now(config).replace(config.run.name, f"{config.run.name}-modes", 1)
    folder.mkdir(parents=True)
    console.print(f"runs: {escape(str(folder))}", soft_wrap=True)
    tables: dict[str, Tables] = {}
    for number, mode in enumerate(modes, start=1):
        told = [*words, *settings_of(mode, config.engine), f"run.name={mode}", f"run.folder={json.dumps(str(folder))}"]
        tables[mode] = _run(config_file, told, folder=folder, mode=mode, place=f"{number} of {len(modes)}", seconds=seconds)
    goal = common_reward(tables) if reward is None else reward
    runs = [_told(mode, tables, reward=goal) for mode in modes]
    found = table_of(runs, reward=goal)
    _print(found)
    record = {
        "config": str(config_file),
        "overrides": words,
        "seconds": seconds,
        "reward": goal,
        "modes": list(map(dataclasses.asdict, runs)),
    }
    write_whole(folder / "comparison.json", json.dumps(record, indent=1) + "\n")
    path = write_comparison([one.folder for one in tables.values()], path=page or folder / "comparison.html", modes=found)
    console.print(f"comparison: {escape(str(path))}, {escape(str(folder / 'comparison.json'))}", soft_wrap=True)


def settings_of(mode: str, engine: EngineSection) -> tuple[str, ...]:
    """Return the settings that make a mode of a config with these engines."""
    schedule, placement = MODES[mode]
    apart = (engine.apart or max(1, engine.count // 2)) if mode == "mixed" else 0
    return f"pipeline.mode={schedule}", f"pipeline.placement={placement}", f"engine.apart={apart}"


def _possible(config_file: Path, overrides: Sequence[str], engine: EngineSection) -> list[str]:
    """Return the modes that the config allows, and say of the others why it does not."""
    refused: dict[str, ConfigError] = {}
    for mode in MODES:
        try:
            load(config_file, overrides=[*overrides, *settings_of(mode, engine)])
        except ConfigError as error:
            refused[mode] = error
    if len(MODES) - len(refused) < 2:
        raise next(iter(refused.values()))
    for mode, error in refused.items():
        console.print(f"{mode} is left out: {escape(str(error))}", soft_wrap=True, highlight=False)
    return [mode for mode in MODES if mode not in refused]


def _run(config_file: Path, overrides: Sequence[str], *, folder: Path, mode: str, place: str, seconds: float | None) -> Tables:
    """Run one mode in a process of its own, with a line that says how far it is; its output is `<folder>/<mode>.log`."""
    log = folder / f"{mode}.log"
    command = [sys.executable, "-m", "pipelinerl", "run", str(config_file), *overrides]
    following: FollowedRun | None = None
    began = time.monotonic()
    works_since = is_told_to_end = None
    with log.open("w") as output, console.status(f"{mode} ({place}): starts") as line:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,  # a terminal's Ctrl-C would reach it, too, and a second one ends a run without saving
            preexec_fn=functools.partial(die_with_parent, os.getpid()),
        )
        try:
            while process.poll() is None:
                following = following or next(map(FollowedRun, folder.glob(f"{mode}-2*")), None)
                if following is not None:
                    following.look()
                    line.update(f"{mode} ({place}): {_words(following)}")
                    status = following.state.status
                    works_since = works_since or (time.monotonic() if status and status.generated_tokens else None)
                if seconds and works_since and not is_told_to_end and time.monotonic() - works_since >= seconds:
                    process.send_signal(signal.SIGINT)  # saves and ends, as Ctrl-C does
                    is_told_to_end = True
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_EVERY_S)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            process.wait()
    if process.returncode:
        end = "\n".join(log.read_text().splitlines()[-12:])
        raise PeerGone(f"mode {mode} ended with exit code {process.returncode}; the end of {log}:\n{end}")
    (run_folder,) = folder.glob(f"{mode}-2*")
    found = read_tables(run_folder)
    console.print(f"{mode} ({place}): {len(found.steps)} steps, {time.monotonic() - began:.0f} s", highlight=False)
    return found


def _words(following: FollowedRun) -> str:
    state = following.state
    if not state.steps:
        return "loads models" if state.status is None or not state.status.generated_tokens else "samples for its first step"
    return f"step {state.num_steps_done} of {state.num_steps or '?'}, reward {dashed(state.steps[-1].reward_mean)}"


def _told(mode: str, tables: dict[str, Tables], *, reward: float) -> ModeRun:
    """Return what a mode came to, and what is foretold of it from the runs of the others."""
    own, others = tables[mode], [other for other in reversed(tables) if other != mode]
    why = f"from {' and '.join(others)}"
    foretold = ModeFigures()
    try:
        simulated = _simulated(own, like=[tables[other] for other in others])
    except DataError as error:
        why = f"not foretold: {error}"
    else:
        num_steps = num_steps_to(mode, own, reward)
        names = ("samples_per_s", "staleness_mean", "engines_idle_fraction", "trainer_idle_fraction")
        reached_s = None if num_steps is None else num_steps * simulated["step_s"]
        foretold = ModeFigures(**{name: simulated[name] for name in names}, reached_s=reached_s)
    measured = figures_of(mode, own, reward=reward)
    return ModeRun(mode=mode, run_folder=str(own.folder), num_steps=len(own.steps), measured=measured, foretold=foretold, foretold_from=why)


def _simulated(own: Tables, *, like: Sequence[Tables]) -> dict[str, Any]:
    """Return the figures of a run as the simulator foretells them from others. Raises `DataError` where these tell too little."""
    words = (str(own.folder), f"trainer.steps={len(own.steps)}", *(f"--like={one.folder}" for one in like), "--no-journal", "--json")
    done = subprocess.run([sys.executable, "-m", "orchestrator.simulate", *words], capture_output=True, text=True, check=False)
    if done.returncode:
        raise DataError((done.stderr.strip().splitlines() or ["the simulator failed"])[-1])
    return json.loads(done.stdout)["figures"]


def _print(found: listings.Table) -> None:
    table = Table(*found.headings, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in found.rows:
        table.add_row(*("".join(cell) if isinstance(cell, tuple) else str(cell) for cell in row))
    console.print(table)
    console.print(found.note, highlight=False, markup=False, soft_wrap=True)
