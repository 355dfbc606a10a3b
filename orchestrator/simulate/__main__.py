"""`python -m orchestrator.simulate CONFIG`: what `pipelinerl simulate` starts."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import math
import sys
import time
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from orchestrator.simulate.calibrated import world_of_runs
from orchestrator.simulate.planned import SETTABLE, Settable, changed, elastic_of_plan, world_of_plan
from orchestrator.simulate.roles import Elastic
from orchestrator.simulate.run import Simulated, simulate
from orchestrator.simulate.summary import FIGURES, Summary, hangs_on, summary_of
from orchestrator.simulate.world import Faults, World, world_as_data
from pipelinerl.config import Config
from pipelinerl.config.file import load, load_run
from pipelinerl.errors import ConfigError, PipelineError
from pipelinerl.observe.report.units import percent
from pipelinerl.planning.inputs import CHOSEN, read_settings
from pipelinerl.planning.words import say

MOST_STEPS_OF_WHAT_IFS = 30
PATIENCE_S = 3.0
"""What the figures hang on is asked by six more simulations, of at most so many steps, where the first took no more of a
core than this."""


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m orchestrator.simulate", description=__doc__)
    parser.add_argument("config", type=Path)
    parser.add_argument("overrides", nargs="*")
    parser.add_argument("--like", type=Path, action="append", default=[])
    parser.add_argument("--gpu")
    parser.add_argument("--set", dest="given", action="append", default=[])
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--no-journal", action="store_true")
    parser.add_argument("--limit-s", type=float, default=1e9)
    parser.add_argument("--elastic", type=float)
    parser.add_argument("--json", action="store_true")
    try:
        _simulate(parser.parse_args())
    except PipelineError as error:
        sys.exit(f"{type(error).__name__}: {error}")


def _simulate(arguments: argparse.Namespace) -> None:
    is_run = arguments.config.is_dir()
    config = (load_run if is_run else _load)(arguments.config, overrides=arguments.overrides)
    like = arguments.like or ([arguments.config] if is_run and not arguments.gpu else [])
    world = _world(config, like=like, gpu=arguments.gpu, given=arguments.given)
    config = _renamed(config)
    folder = None if arguments.no_journal else arguments.out or _new_folder(config)
    if folder is not None and folder.exists():
        raise ConfigError(f"{folder} exists: name another folder with --out")
    faults, seed, began_s = _faults(arguments.fault), arguments.seed, time.process_time()
    elastic = None if arguments.elastic is None else _elastic(config, arguments)
    simulated = simulate(
        config,
        world,
        seed=seed,
        faults=faults,
        folder=folder,
        limit_s=arguments.limit_s,
        migration=None if elastic is None else 0,
        elastic=elastic,
    )
    took_s = time.process_time() - began_s
    found = summary_of(simulated)
    is_asked = took_s <= PATIENCE_S and elastic is None
    hanging = _hanging(config, world, seed=seed, faults=faults, limit_s=arguments.limit_s) if is_asked else {}
    if arguments.json:
        print(json.dumps(_data(simulated, found, hanging, folder=folder), indent=1))
    else:
        _show(simulated, found, hanging, folder=folder, took_s=took_s)


def _load(path: Path, *, overrides: list[str]) -> Config:
    return load(path, overrides=overrides, for_run=False)


def _world(config: Config, *, like: list[Path], gpu: str | None, given: list[str]) -> World:
    own, of_plan = {}, []
    for setting in given:
        name, _, value = setting.partition("=")
        if name in SETTABLE:
            own[name] = _set(setting, value, SETTABLE[name])
        else:
            of_plan.append(setting)
    if like:
        if gpu is not None or of_plan:
            raise ConfigError("--like takes speeds from a run: leave out --gpu, and --set of what a plan assumes")
        return changed(world_of_runs(config, like), own)
    if gpu is None:
        raise ConfigError("nothing says how fast the parts are: name a run to learn from (--like RUN), or GPUs to plan for (--gpu h100)")
    for setting in of_plan:
        if (name := setting.partition("=")[0]) not in CHOSEN:
            near = difflib.get_close_matches(name, [*CHOSEN, *SETTABLE], 1)
            hint = f", did you mean {near[0]}" if near else ""
            raise ConfigError(f"--set {setting}: {name!r} is no input{hint}? There are {', '.join([*SETTABLE, *CHOSEN])}")
    return changed(world_of_plan(config, gpu=gpu, given=read_settings(of_plan)), own)


def _elastic(config: Config, arguments: argparse.Namespace) -> Elastic:
    if arguments.gpu is None:
        raise ConfigError("--elastic: what devices would do in other roles is known of a plan alone: name GPUs (--gpu h100)")
    if arguments.elastic < 0:
        raise ConfigError(f"--elastic {arguments.elastic:g}: expected the seconds of a change, 0 or more")
    given = read_settings([setting for setting in arguments.given if setting.partition("=")[0] not in SETTABLE])
    return elastic_of_plan(config, gpu=arguments.gpu, given=given, switch_s=arguments.elastic)


def _number(setting: str, value: str) -> float:
    try:
        return float(value)
    except ValueError:
        raise ConfigError(f"--set {setting}: {value!r} is no number") from None


def _set(setting: str, value: str, settable: Settable) -> float:
    number = _number(setting, value)
    if not settable.least <= number <= settable.most or math.isinf(number):
        bounds = f"{settable.least:g} or more" if math.isinf(settable.most) else f"a number from {settable.least:g} to {settable.most:g}"
        raise ConfigError(f"--set {setting}: expected {bounds}: {settable.what}")
    return number


def _faults(settings: list[str]) -> Faults:
    """Read `KIND=NUMBER` of `--fault`. Raises `ConfigError`."""
    kinds = [field.name for field in dataclasses.fields(Faults)]
    found: dict[str, float] = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in kinds:
            raise ConfigError(f"--fault {setting}: expected one of {', '.join(kinds)}, for example --fault engine=2")
        number = _number(setting, value)
        if number < 0 or (name not in ("lasts_s", "slowness") and number != int(number)):
            raise ConfigError(f"--fault {setting}: expected a whole number, 0 or more")
        found[name] = number if name in ("lasts_s", "slowness") else int(number)
    return Faults(**found)  # pyright: ignore[reportArgumentType] each was read as its field's kind


def _renamed(config: Config) -> Config:
    """Have every view say that nothing of this happened."""
    name = config.run.name if config.run.name.endswith("-simulated") else f"{config.run.name}-simulated"
    return config.model_copy(update={"run": config.run.model_copy(update={"name": name})})


def _new_folder(config: Config) -> Path:
    name = f"{config.run.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    number = sum(1 for _ in config.run.folder.glob(f"{name}*"))
    return config.run.folder / (f"{name}-{number + 1}" if number else name)


def _hanging(config: Config, world: World, *, seed: int, faults: Faults, limit_s: float) -> dict[str, tuple[str, float]]:
    steps = min(config.trainer.steps, MOST_STEPS_OF_WHAT_IFS)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": steps})})

    def run(world: World) -> Summary:
        return summary_of(simulate(config, world, seed=seed, faults=faults, limit_s=limit_s))

    return hangs_on(world, run(world), run=run)


def _data(simulated: Simulated, found: Summary, hanging: dict[str, tuple[str, float]], *, folder: Path | None) -> dict[str, object]:
    return {
        "figures": dataclasses.asdict(found),
        "hangs_on": {name: list(each) for name, each in hanging.items()},
        "rollouts": dataclasses.asdict(simulated.rollouts),
        "reasons": simulated.reasons,
        "evicted": simulated.num_evicted,
        "origins": dict(simulated.world.origins),
        "world": world_as_data(simulated.world),
        "run_folder": None if folder is None else str(folder),
    }


def _show(simulated: Simulated, found: Summary, hanging: dict[str, tuple[str, float]], *, folder: Path | None, took_s: float) -> None:
    console, config = Console(), simulated.config
    num_steps = config.trainer.steps
    table = Table(f"{config.run.name}: {num_steps} steps", "", "hangs most on", box=box.SIMPLE_HEAD, pad_edge=False)
    table.columns[1].justify = "right"
    for name, (unit, what) in FIGURES.items():
        value, on = getattr(found, name), hanging.get(name)
        shown = percent(value) if name.endswith("fraction") else say(value, unit)
        table.add_row(what, shown, f"{on[0]}: 10 % more make it {100 * on[1]:+.1f} %" if on else "")
    console.print(table)
    parts = [f"{part} from {origin}" for part, origin in simulated.world.origins.items()]
    console.print("assumed: " + "; ".join(parts) if parts else "assumed: defaults", highlight=False, soft_wrap=True)
    console.print(f"rollouts: {simulated.rollouts}", highlight=False, soft_wrap=True)
    if simulated.num_evicted:
        console.print(f"full KV caches made {simulated.num_evicted:,} sequences give way, to be computed again", highlight=False)
    for change in simulated.role_changes:
        saves = f"saves {change.saved_s:,.0f} s and costs {change.cost_s:,.0f} s" if change.saved_s else "takes the last one back"
        console.print(f"roles: {change.before} to {change.after}, {saves}", highlight=False, soft_wrap=True)
    if not hanging:
        console.print(f"[dim]What figures hang on is told of simulations that take less than {PATIENCE_S:g} s of a core.[/]")
    speed = simulated.seconds / max(took_s, 1e-9)
    console.print(f"[dim]{simulated.num_events:,} events in {took_s:.1f} s, {speed:,.0f} times as fast as the run[/]", highlight=False)
    if folder is not None:
        console.print(f"run folder: {folder}   (pipelinerl report {folder})", highlight=False, soft_wrap=True)


if __name__ == "__main__":
    main()
