"""Devices that change roles while the load changes, against the best layout that never changes, as the planner finds it.

The planner searches every split and layout at five lengths of the load; what it finds is ranked by its own arithmetic over the whole run.
The first few are simulated, and every split by whole nodes with the wider engines: the fastest of these is the best static one. On a large
cluster they are simulated on a part of it, and the fastest, so many times as large, on the whole. The run whose devices change begins as
the planner says for the first lengths, and knows nothing of those to come.

What a run showed is kept under `runs/`, by the hash of the code that it hangs on: a bench that was ended goes on where it was.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import json
import multiprocessing
import os
import sys
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any

from orchestrator.simulate.draws import Distribution, fixed
from orchestrator.simulate.planned import elastic_of_plan, world_of_plan
from orchestrator.simulate.run import Simulated, simulate
from orchestrator.simulate.summary import summary_of
from orchestrator.simulate.world import SyncWorld, World
from pipelinerl.config import Config
from pipelinerl.planning.inputs import gpu_inputs
from pipelinerl.planning.search import Candidate
from scripts.bench import harness
from scripts.bench.pieces import ROOT, hash_of
from scripts.bench.scheduled.layouts import (
    GPU,
    MODEL,
    NODE,
    Case,
    can_change,
    core_of,
    elastic_layout,
    found_by_planner,
    limit,
    of_nodes,
    said,
    settings,
    static_layouts,
    width_of,
)
from scripts.bench.scheduled.loads import LOADS

CODE = ("orchestrator", "pipelinerl/algorithms", "pipelinerl/config", "pipelinerl/data", "pipelinerl/planning", "scripts/bench/scheduled")
"""What a simulated run hangs on."""
KEPT = ROOT / "runs" / "bench-schedule-roles"
REPORT_S = 10.0
PARTS, NUM_WHOLE = {48: 1, 1024: 16}, 3
"""Static layouts are tried on one of so many parts of a cluster, with as many groups for each GPU; the fastest few are simulated whole."""
SWITCH_S = 60.0
"""Seconds from the end of one role to the beginning of another: processes, 28 GB of weights, graphs, groups. Assumed."""
OTHER_SWITCHES_S = (0.0, 180.0, 600.0)
GROUPS = {48: 64, 1024: 1365}
"""Of a step: as many for each GPU on either cluster, so engines have as much to write at once, and a step takes as long."""
STEPS = 40
QUICK_STEPS = 16


def measure(*, quick: bool, num_gpus: int = 48, load: str = "growth") -> harness.Measured:
    """Return the table of a cluster under a load."""
    found, what = harness.Measured(), LOADS[load]
    steps = QUICK_STEPS if quick else STEPS * what.step_factor
    case = Case(num_gpus=num_gpus, groups=GROUPS[num_gpus], steps=steps, load=what)
    _measure(found, case, quick=quick)
    answers = f"answers of {what.mean:,.0f} tokens in the mean{_times(what.factors)}, cv {what.cv}"
    prompts = f"prompts of {what.prompt:,.0f}{_times(what.prompt_factors)}"
    found.notes += [
        f"a change of roles takes {SWITCH_S:g} s from the end of one to the beginning of the other, where no other number stands",
        f"{MODEL} on {GPU}, K = {what.staleness}, {steps} steps of {case.groups} groups of 8; {answers}; {prompts}",
        f"a node changes at a time, and {core_of(case)} GPUs always train; in the best layout for its own lengths each, without a cost of"
        f" changes, the steps would take 1 / {limit(case):.2f} of what the best static layout takes, by the planner's formulas",
        "best static: the fastest in simulation of what `planning.search` found at five lengths of the drift, ranked by its formulas",
        "OrchestrRL (arXiv 2601.01209) reports up to 1.40x (14 B; 1.34x 32 B) on 48 H800, v2 up to 1.42x on 64; at 1,024 its network alone",
    ]
    return found


def _measure(found: harness.Measured, case: Case, *, quick: bool) -> None:
    first = elastic_layout(case)
    is_large = case.num_gpus > 48  # a run takes a quarter of an hour: only those of the goals, and what `relieve` is worth by itself
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn")) as pool:

        def begun(one: Candidate, **options: Any) -> Future[Shown]:
            run = pool.submit(_shown, case, one, **options)
            run.add_done_callback(functools.partial(_tell, said(one)))
            return run

        layouts = static_layouts(case, quick=quick) if quick or PARTS[case.num_gpus] == 1 else fastest_of_part(case, pool)
        runs = [begun(one) for one in layouts]
        ways = {"roles": {"migration": None}, "roles and relieve": {"migration": 0}}
        elastic = {f"{way}, from first lengths": begun(first, switch_s=SWITCH_S, **options) for way, options in ways.items()}
        other_switches = () if quick or is_large else OTHER_SWITCHES_S
        others = {
            f"roles and relieve, from first lengths, {switch_s:g} s a change": begun(first, switch_s=switch_s, migration=0)
            for switch_s in other_switches
        }
        turns = [] if quick or is_large else [begun(found_by_planner(case, is_colocated=True)[0])]
        static = [run.result() for run in runs]
        best = max(range(len(static)), key=lambda number: static[number].speed)
        relieved = begun(layouts[best], migration=0)
        if can_change(case, layouts[best]) and not is_large:
            elastic |= {f"{way}, from best static": begun(layouts[best], switch_s=SWITCH_S, **options) for way, options in ways.items()}

        def add(way: str, run: Shown) -> float:
            gain = run.speed / static[best].speed
            found.rows.append({"GPUs": case.num_gpus, "way": way, "layout": run.layout, "over best static": gain, **run.figures})
            return gain

        for number, run in enumerate(static):
            add(("best static" if number == best else "static") + (", the planner's first" if not number else ""), run)
        add("best static, relieve", relieved.result())
        for run in turns:
            add("in turns on all", run.result())
        gains = {way: add(way, run.result()) for way, run in elastic.items()}
        for way, run in others.items():
            add(way, run.result())
    for name, gain in gains.items():
        found.goals.append(harness.at_least(f"{case.num_gpus} GPUs: {name} over the best static layout", gain, 1.4))


def fastest_of_part(case: Case, pool: ProcessPoolExecutor) -> list[Candidate]:
    """The planner's first layout, and those that are fastest on a part of the cluster, as many times as large as the cluster is."""
    times = PARTS[case.num_gpus]
    part = dataclasses.replace(case, num_gpus=case.num_gpus // times, groups=round(case.groups / times))
    layouts = static_layouts(part, quick=False)
    runs = [pool.submit(_shown, part, one) for one in layouts]
    for one, run in zip(layouts, runs, strict=True):
        run.add_done_callback(functools.partial(_tell, f"{part.num_gpus} GPUs, {said(one)}"))
    speeds = {said(one): run.result().speed for one, run in zip(layouts, runs, strict=True)}
    fastest = sorted(layouts, key=lambda one: -speeds[said(one)])[:NUM_WHOLE]
    every = [found_by_planner(case)[0], *(of_nodes(case, one.layout.ranks * times // NODE, width_of(one)) for one in fastest)]
    return list({said(one): one for one in every}.values())


def _tell(what: str, run: Future[Shown]) -> None:
    """Print what a simulated run shows, for whoever waits for the table."""
    if not run.cancelled() and run.exception() is None:
        print(f"{what}: {run.result().speed:,.0f} tokens/s", file=sys.stderr, flush=True)


# --- runs ---


def _config_of(case: Case, one: Candidate, *, is_elastic: bool = False) -> Config:
    inputs, layout = one.inputs, one.layout
    parallel: dict[str, Any] = {kind: size for kind in ("shard", "context", "tensor", "pipeline") if (size := getattr(layout, kind)) > 1}
    options = {
        name: int(size)
        for name, size in (("tensor_parallel_size", inputs["engine_tensor"]), ("pipeline_parallel_size", inputs["engine_pipeline"]))
        if size > 1
    }
    if is_elastic:
        parallel["shard"] = "all"
    checkpointing = "none" if not inputs["is_checkpointed"] else "selective" if inputs["keeps_products"] else "full"
    return settings(
        case,
        {
            "engine": {"count": int(inputs["engines"]), "max_running": int(inputs["max_running"]), "options": options},
            "trainer": {
                "ranks": layout.ranks,
                "min_ranks": core_of(case) if is_elastic else None,
                "parallel": parallel,
                "activation_checkpointing": checkpointing,
            },
            "pipeline": {"placement": "colocated"} if inputs["mode"] >= 3 else {},
        },
    )


def _world(case: Case, config: Config, one: Candidate) -> World:
    """The planner's world, with the load's answers; a policy goes from every trainer rank to every engine rank at once."""
    world = world_of_plan(config, gpu=GPU, given=case.given)
    values, nic = one.values, gpu_inputs(GPU)["nic_bandwidth"]
    is_shared = one.inputs["mode"] >= 3
    sync = SyncWorld(
        num_bytes=values["policy_bytes"],
        sender_rate=one.layout.ranks * nic,
        receiver_rate=values["engine_ranks"] * nic,
        pause_s=values["commit_s"] + (values["switch_s"] if is_shared else 0.0),
        sleep_s=values["switch_s"] if is_shared else 0.0,
    )
    lengths = Distribution(kind="lognormal", mean=case.load.mean, cv=case.load.cv)
    load = {"lengths": lengths, "length_factors": case.load.factors, "prompt_factors": case.load.prompt_factors, "likeness": 0.5}
    return dataclasses.replace(world, sync=sync, report_every_s=REPORT_S, prompt_tokens=fixed(case.load.prompt), **load)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """What a simulated run shows."""

    layout: str
    speed: float
    """Sampled tokens trained per second."""
    figures: harness.Row


def _shown(case: Case, one: Candidate, *, switch_s: float | None = None, migration: int | None = None) -> Shown:
    """Return what `_simulated` shows, or has shown before: it is the same each time."""
    words = repr((hash_of(CODE), case, said(one), sorted(one.inputs.items()), switch_s, migration))
    kept = KEPT / f"{hashlib.sha256(words.encode()).hexdigest()}.json"
    if not kept.exists():
        shown = dataclasses.asdict(_simulated(case, one, switch_s=switch_s, migration=migration))
        KEPT.mkdir(parents=True, exist_ok=True)
        draft = kept.with_suffix(f".{os.getpid()}")
        draft.write_text(json.dumps(shown))
        draft.replace(kept)
    return Shown(**json.loads(kept.read_text()))


def _simulated(case: Case, one: Candidate, *, switch_s: float | None, migration: int | None) -> Shown:
    """Simulate a layout; nodes change roles where a change takes `switch_s`, the trainer's own restart included."""
    config = _config_of(case, one, is_elastic=switch_s is not None)
    elastic = None if switch_s is None else elastic_of_plan(config, gpu=GPU, given=case.given, switch_s=switch_s, whole=NODE)
    run = simulate(config, _world(case, config, one), migration=migration, elastic=elastic)
    speed, figures = run.totals.num_trained_tokens / run.totals.step_ends_s[-1], summary_of(run)
    return Shown(
        layout=said(one) if switch_s is None else f"from {said(one)} to {_last(run)}",
        speed=speed,
        figures={
            "tokens/s": speed,
            "trainer idle": figures.trainer_idle_fraction,
            "staleness": figures.staleness_mean,
            "changes": len(run.role_changes),
            "moved": run.num_moved,
            "evicted": run.num_evicted,
            "stale": run.rollouts.stale,
            "hours": run.totals.step_ends_s[-1] / 3600,
        },
    )


def _times(factors: tuple[float, ...]) -> str:
    told = [
        f"{factor:.3g}" + (f" ({num} times)" if num > 1 else "")
        for factor, num in ((one, len(list(same))) for one, same in itertools.groupby(factors))
    ]
    return f", times {', '.join(told)}" if len(factors) > 1 else ""


def _last(run: Simulated) -> str:
    if not run.role_changes:
        return "itself"
    after = run.role_changes[-1].after
    return f"{after.engines} nodes of engines of {after.width}, the others train"
