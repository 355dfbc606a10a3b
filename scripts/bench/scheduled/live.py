"""Each rule of dispatch on real vLLM engines, beside what the simulator says of the same: two engines, the long-tailed task.

The task's lengths are its prompts' (`beside/countdown.py`), so siblings are alike, and a policy that learns does not change them. Rollouts
of a step are four times the engines' slots, so that who comes next matters; little KV: caches that hold about half of the slots. Every way
is run with each seed right before or after a run without the rule, over which its figure is: the machine's speed changes within minutes.
Engines and trainer share two cores, as the simulated ones do, which are fitted to the runs without a rule, in rounds and streaming. None is
bound to a core: in rounds each engine has one for itself, while the trainer waits, and on a single core no rule has anything to balance.

Cutting groups needs a method that stands it (`rloo_early_stop`), so it is held against its kin that does not cut (`rloo`).
"""

from __future__ import annotations

import dataclasses
import math
import shutil
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from orchestrator.simulate.calibrated import world_of_runs
from orchestrator.simulate.run import simulate
from orchestrator.simulate.summary import summary_of
from pipelinerl.config.file import load_run
from scripts.bench import harness, peers
from scripts.bench.beside import systems
from scripts.bench.foreseen.cases import figures_of
from scripts.bench.machine import MOST_OTHERS, Others
from scripts.bench.pieces import Pieces
from scripts.bench.scheduled.rules import RULES

Key = tuple[str, str, int, int]
"""Case, way, seed, and the number of the turn: of the ways of a turn, one is what the others are held against."""
FOLDER = Path("runs/bench-schedule-live")
ENGINES, SLOTS, GROUPS, GROUP_SIZE = 2, 16, 16, 8
STEPS, QUICK_STEPS = 10, 3
SEEDS = (0, 1)
BLOCK_TOKENS, LITTLE_BLOCKS, TOKEN_BYTES = 32, 15, 5120
"""Tokens of a block of the KV cache (vLLM's CPU kernels take multiples of 32), blocks of a little one, bytes of a token: 5 layers, 4 heads
of 32, keys and values in float32."""
LITTLE = {"engine.kv_cache_bytes": LITTLE_BLOCKS * BLOCK_TOKENS * TOKEN_BYTES}
SYNC, STREAMING = {"pipeline.mode": "sync"}, {"pipeline.mode": "streaming"}
CASES: dict[str, dict[str, Any]] = {
    "sync": SYNC,
    "streaming": STREAMING,
    "sync, little KV": SYNC | LITTLE,
}
LEARNED = ("sync", "streaming")
"""Cases whose runs without a rule the simulator learns from."""
WHOLE: dict[str, Any] = {"algorithm.name": "rloo", "algorithm.overrides": {"aggregation": "seq-mean-token-sum-norm"}}
CHOSEN = ("none", "longest first", "least loaded", "KV admission", "all three")
WAYS: dict[str, dict[str, Any]] = {
    **{name: {f"pipeline.{key}": value for key, value in RULES[name].items()} for name in CHOSEN},
    "migration": {"pipeline.migration": "waiting"},
    "rloo": WHOLE,
    "cut after 6": WHOLE | {"algorithm.name": "rloo_early_stop", "rollout.cut_after": 6},
}
USUAL = {"cut after 6": "rloo"}
"""What a way is held against, where it is not `none`."""
SIMULATED_SEEDS = range(8)
GOAL_ERROR = 0.05
"""Of a gain foretold, in the median over ways and cases: set before the first run."""


def wanted(*, quick: bool) -> list[Key]:
    """Return the runs; those that cut groups in rounds alone, and where caches hold all slots."""
    cases, ways = (("sync",), ("none", "all three")) if quick else (tuple(CASES), tuple(WAYS))
    return [
        (case, way, seed, number)
        for seed in (SEEDS[:1] if quick else SEEDS)
        for case in cases
        for number, turn in enumerate(_turns([way for way in ways if case == "sync" or way in (*CHOSEN, "migration")]))
        for way in (turn if seed % 2 == 0 else reversed(turn))
    ]


def _turns(ways: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the ways in turns of at most two, with what they are held against between them."""
    by_usual: dict[str, list[str]] = {}
    for way in ways:
        if way != "none" and way not in USUAL.values():
            by_usual.setdefault(USUAL.get(way, "none"), []).append(way)
    return [
        (first, usual, *second)
        for usual, ruled in by_usual.items()
        for first, *second in (ruled[at : at + 2] for at in range(0, len(ruled), 2))
    ]


def measure(*, quick: bool, budget_s: float) -> harness.Measured | None:
    """Make the runs that are missing; return the table once all are made."""
    folder = FOLDER / ("quick" if quick else f"{STEPS}-steps")  # runs of another number are none of these pieces
    if quick:
        shutil.rmtree(folder, ignore_errors=True)
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    pieces = Pieces(folder / "figures", wanted(quick=quick), budget_s=budget_s)
    task = dataclasses.replace(
        peers.task_of(peers.LONG_TAIL), steps=QUICK_STEPS if quick else STEPS, groups_per_step=GROUPS, group_size=GROUP_SIZE
    )
    while (missing := pieces.missing) and pieces.may_start:
        key = missing[0]
        print(f"schedule: {', '.join(map(str, key))}; {len(missing)} runs left", flush=True)
        others, figures = Others(), _run(key, task, folder)
        if (taken := others.fraction()) <= MOST_OTHERS:
            pieces.keep(key, figures)
        else:
            print(f"schedule: others took {taken:.2f} of the machine: again", flush=True)
    if missing:
        print(f"schedule: {len(pieces.made)} of {len(pieces.wanted)} runs made; call again for the others", flush=True)
        return None
    return _table(pieces.made, folder)


def _run(key: Key, task: systems.Task, folder: Path) -> dict[str, float]:
    """Make one run; return its figures. Raises `RuntimeError` where it fails."""
    case, way, seed, _ = key
    home = _home(folder, key)
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir(parents=True)
    own: dict[str, Any] = {
        "engine.count": ENGINES,
        "engine.max_running": SLOTS,
        "engine.cores": [],
        "trainer.cores": [],
        "engine.options": {"block_size": BLOCK_TOKENS},
        "checkpoint.every": 1000,
    }
    told = [f"{name}={_toml(value)}" for name, value in (own | CASES[case] | WAYS[way]).items()]
    systems.call([*systems.ours("streaming", task, seed=seed, folder=home), *told], home / "log")
    return figures_of(_folder(home))


def _home(folder: Path, key: Key) -> Path:
    return folder / "runs" / "-".join(map(str, key))


def _folder(home: Path) -> Path:
    (found,) = home.glob("run-2*")
    return found


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{name}={_toml(each)}" for name, each in value.items()) + "}"
    return str(value).lower() if isinstance(value, bool) else f'"{value}"' if isinstance(value, str) else str(value)


# --- figures ---


def _table(made: dict[Key, dict[str, Any]], folder: Path) -> harness.Measured:
    found, errors = harness.Measured(), list[float]()
    seeds = sorted({seed for _, _, seed, _ in made})
    foretold: dict[tuple[str, str], dict[str, float]] = {}
    for key in made:
        if key[2] == seeds[0] and key[:2] not in foretold:
            foretold[key[:2]] = _foretold(key, folder, made)
    for case, way in foretold:
        is_usual = way in ("none", *USUAL.values())
        usual = way if is_usual else USUAL.get(way, "none")
        keys = [key for key in made if key[:2] == (case, way)]
        gains = [made[key]["tokens_per_s"] / made[case, usual, *key[2:]]["tokens_per_s"] for key in keys]
        gain, simulated = statistics.fmean(gains), foretold[case, way]["tokens_per_s"] / foretold[case, usual]["tokens_per_s"]
        if not is_usual:
            errors.append(abs(simulated - gain))
        found.rows.append(
            {
                "case": case,
                "rule": way,
                "tokens/s": statistics.fmean(made[key]["tokens_per_s"] for key in keys),
                "simulated": foretold[case, way]["tokens_per_s"],
                "over none": "" if is_usual else gain,
                "by seed": "" if is_usual else " / ".join(f"{one:.3f}" for one in gains),
                "over none, simulated": "" if is_usual else simulated,
                "engines idle": statistics.fmean(made[key]["engines_idle_fraction"] for key in keys),
                "idle, simulated": foretold[case, way]["engines_idle_fraction"],
                "staleness": statistics.fmean(made[key]["staleness_mean"] for key in keys),
            }
        )
    found.goals.append(harness.at_most("gain simulated less the measured one, median", statistics.median(errors), GOAL_ERROR))
    found.notes.append(
        f"{ENGINES} engines of {SLOTS} slots, {GROUPS} groups of {GROUP_SIZE} a step, {len(seeds)} seeds; KV caches of"
        f" {LITTLE_BLOCKS * BLOCK_TOKENS} tokens where little; tokens/s: sampled tokens trained, without the first step"
    )
    found.notes.append(
        "over none: each way over the run without it right before or after, of the same case and seed; cut after 6: over rloo"
    )
    return found


def _foretold(key: Key, folder: Path, made: Mapping[Key, Any]) -> dict[str, float]:
    """Return what the simulator says of a way, fitted to the runs without a rule."""
    config = load_run(_folder(_home(folder, key)))
    known = sorted((one for one in made if one[0] in LEARNED and one[1] == "none"), key=lambda one: LEARNED.index(one[0]))
    world = world_of_runs(config, [_folder(_home(folder, one)) for one in known])
    room = LITTLE_BLOCKS * BLOCK_TOKENS if "little" in key[0] else math.inf
    world = dataclasses.replace(world, engine=dataclasses.replace(world.engine, kv_tokens=room))
    runs = [summary_of(simulate(config, world, seed=each)) for each in SIMULATED_SEEDS]
    return {name: statistics.fmean(getattr(one, name) for one in runs) for name in ("tokens_per_s", "engines_idle_fraction")}
