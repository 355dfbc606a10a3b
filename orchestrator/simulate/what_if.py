"""`python -m orchestrator.simulate.what_if RUN`: how long a run would have taken with other settings, for its report.

The world is fitted to the run (`calibrated`), and the run is simulated as it was and with one setting changed at a time, on the same draws.
What is told is measured seconds times simulated seconds with the change over simulated seconds without it, so that what the models leave
out of both cancels. Beside it stands how far the simulation is off: fitted to the first half of the run's steps, it foretells the second.

Of a long run this is about its last steps alone, which say best what the next ones will be like.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import msgspec

from orchestrator.simulate.calibrated import world_of_runs
from orchestrator.simulate.run import simulate
from orchestrator.simulate.world import World
from pipelinerl.config import Config, Mode
from pipelinerl.config.file import load_run
from pipelinerl.errors import ConfigError, PipelineError, Stalled
from pipelinerl.observe.lines import read_journals
from pipelinerl.observe.report.page import write_whole
from pipelinerl.observe.report.what_ifs import FILE, WhatIf, WhatIfs

BUDGET_S = 30.0
"""Seconds of a core after which no further change is tried; those tried first are the ones that most often help."""
_OWN_DEVICES = "what is added has devices, or cores, of its own"
_ONE_ENGINE = ": one engine tells nothing of how two share a machine"
MIN_STEPS = 8
"""Steps of a run whose halves are compared; of fewer, one slow step would be half of the error."""
MOST_ROLLOUTS = 32_768
"""Rollouts of which a run has more are not all simulated: that many take a few seconds."""
LEAST_STEPS = 24
"""Steps that are simulated of a long run in any case: learned from 10 of a real run's, they took a quarter too long, from 15 or 20 not."""


class Window(TypedDict, total=False):
    """What of a run is read (`recorded.read_run`); nothing: all of it."""

    since_s: float
    lead_s: float


def foretell(run_folder: Path, *, budget_s: float = BUDGET_S) -> WhatIfs:
    """Return what single changes would have made of a run. Raises `DataError` where the run tells too little to learn from."""
    every_s, config = _step_ends_s(run_folder), load_run(run_folder)
    num_steps = max(LEAST_STEPS, MOST_ROLLOUTS // (config.batch.groups_per_step * config.rollout.group_size))
    first = max(0, len(every_s) - 1 - num_steps)
    ends_s, config = every_s[first:], _as_far(config, num_steps=len(every_s) - first)
    window: Window = {}
    if first:
        sampled_from = max(0, first - 1 - (config.pipeline.max_staleness if config.pipeline.mode is Mode.STREAMING else 1))
        window = {"since_s": ends_s[0], "lead_s": ends_s[0] - every_s[sampled_from]}
    world = world_of_runs(config, [run_folder], **window)
    until_s = time.process_time() + budget_s
    usual_s = _seconds(config, world)
    tried: list[WhatIf] = []
    for words, overrides in _changes(config):
        if time.process_time() > until_s:
            break
        try:
            changed = _as_far(load_run(run_folder, overrides=list(overrides)), num_steps=len(ends_s))
            factor = _seconds(changed, world) / usual_s
        except (ConfigError, Stalled):  # it cannot be run like that
            continue
        tried.append(WhatIf(change=words, overrides=overrides, seconds=factor * (ends_s[-1] - ends_s[0])))
    return WhatIfs(
        first_step=first + 1,
        last_step=len(every_s) - 1,
        measured_s=ends_s[-1] - ends_s[0],
        simulated_s=usual_s,
        held_out_error=_held_out_error(config, run_folder, ends_s, window),
        what_ifs=tuple(sorted(tried, key=lambda one: one.seconds)),
        assumes=_OWN_DEVICES + (_ONE_ENGINE if config.engine.count == 1 else ""),
    )


def _changes(config: Config) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Name each change in the words of a report, with the overrides that make it."""
    engines, ranks, replicas, slots = config.engine.count, config.trainer.ranks, config.trainer.layout.replicas, config.scorer.slots
    bound, pipeline = config.pipeline.max_staleness, config.pipeline
    free = ("engine.cores=[]", "engine.gpus=[]")
    yield f"{engines + 1} engines in place of {engines}", (f"engine.count={engines + 1}", *free)
    if pipeline.mode is not Mode.STREAMING:
        yield f"streaming in place of {pipeline.mode}", ("pipeline.mode=streaming",)
    else:
        yield f"a staleness bound of {bound + 1} in place of {bound}", (f"pipeline.max_staleness={bound + 1}",)
    more = ranks + ranks // replicas
    yield f"{more} trainer ranks in place of {ranks}", (f"trainer.ranks={more}",)
    yield f"{2 * slots} scoring slots in place of {slots}", (f"scorer.slots={2 * slots}",)
    if pipeline.dispatch == "in_order":
        yield "the longest rollouts first", ("pipeline.dispatch=longest_first",)
    if not pipeline.adaptive_concurrency and not pipeline.kv_admission:
        yield "engines sent only what their KV caches hold", ("pipeline.kv_admission=true",)
    if engines > 1 and pipeline.migration == "off":
        yield "sequences that wait for room moved to engines that have it", ('pipeline.migration="waiting"',)
    if engines > 1:
        yield f"{engines - 1} of {engines} engines", (f"engine.count={engines - 1}", *free)


def _step_ends_s(run_folder: Path) -> list[float]:
    """Return when each step was trained, in Unix seconds; of a step that was done again, the later time."""
    ends = {int(line["step"]): float(line["t"]) for line in read_journals(run_folder) if line["kind"] == "step"}
    return [ends[step] for step in sorted(ends)]


def _as_far(config: Config, *, num_steps: int) -> Config:
    """Return a config of as many steps as the run has trained so far."""
    return config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": max(1, num_steps)})})


def _seconds(config: Config, world: World) -> float:
    """Simulated seconds from the end of the first step to that of the last."""
    ends_s = simulate(config, world).totals.step_ends_s
    return ends_s[-1] - ends_s[0]


def _held_out_error(config: Config, run_folder: Path, ends_s: list[float], window: Window) -> float | None:
    """Return how much longer the second half of the steps lasts in a simulation that knows the first, in parts of the measured time."""
    if len(ends_s) < MIN_STEPS:
        return None
    half = len(ends_s) // 2
    try:
        world = world_of_runs(config, [run_folder], until_s=ends_s[half - 1], **window)
    except PipelineError:
        return None
    simulated = simulate(config, world).totals.step_ends_s
    return (simulated[-1] - simulated[half - 1]) / (ends_s[-1] - ends_s[half - 1]) - 1


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.simulate.what_if", description=__doc__)
    parser.add_argument("run_folder", type=Path)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    try:
        found = foretell(arguments.run_folder)
    except PipelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")
    write_whole(arguments.run_folder / FILE, json.dumps(msgspec.to_builtins(found), indent=1) + "\n")
    print(json.dumps(msgspec.to_builtins(found), indent=1) if arguments.json else "\n".join(found.sentences()))


if __name__ == "__main__":
    main()
