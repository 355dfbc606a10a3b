"""Live runs on this machine that were foretold: drawn by seed, forecast, committed, and only then run.

    draw       eight cases over engines, staleness, group sizes, long-tailed lengths, slow rewards, a PRM and an environment
    calibrate  runs of other settings for each number of engines that was drawn: what forecasts learn from (`cases`); those that are
               older than three hours are forgotten
    forecast   simulate every case at every speed of the two cores that is likely, and write the figures beside the hash of the code that
               made them
    run        the cases live, in rounds; every try is kept, also one that failed, or beside which others worked
    table      forecast, live and error of every case, of every seed that was drawn, with all tries, and how far tries of a case are apart

What keeps it honest: `draw` and `forecast` write down the hash of the simulator's code; `run` refuses where the forecasts are not committed
as they stand, or the code has changed since. The cases are drawn after the last change of that code, because a draw names its hash, too.

A try counts where others took at most `MOST_OTHERS` of the machine; it is made again where not. From seed 7 on each case is run `NUM_TRIES`
times, and held to the median of each figure: two runs of one setting with two engines on one core were 15 % apart.

From seed 12 on `probes` beside every run tell how fast each core is meanwhile. What forecasts learn from is divided by it, and what is
committed is a table of forecasts, at so many speeds of either core; a try is held to what lies between them at its own. Seeds 6 to 11 had
control runs instead, and tries count that lie between two within `MOST_DRIFT`; but the machine becomes a fifth faster or slower within
minutes, and a control run lasted as long as what it was to guard. Tries of the seeds 2 and 3 were foretold once more at the speed that the
idle processor had right before each, which made errors larger.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import multiprocessing
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.simulate.calibrated import world_of_runs
from orchestrator.simulate.draws import Distribution
from orchestrator.simulate.run import simulate
from orchestrator.simulate.summary import summary_of
from orchestrator.simulate.world import Slowness, slowed
from scripts.bench import harness
from scripts.bench.foreseen import cases
from scripts.bench.foreseen.cases import FOLDER, ROOT, draw
from scripts.bench.machine import MOST_OTHERS
from scripts.bench.pieces import hash_of

FORECASTS = harness.RESULTS / "foresight-forecasts.json"
"""One record for each seed that was drawn, in order; the last is the one that stages act on."""
TRIES = harness.RESULTS / "foresight-tries.json"
CODE = ("orchestrator/simulate", "orchestrator/rules", "pipelinerl/data/packing.py")
NUM_CASES = 8
FIGURES: tuple[str, ...] = ("tokens_per_s", "staleness_mean", "engines_idle_fraction", "trainer_idle_fraction")
GOALS = (0.05, 0.10)
"""Median and largest error: relative of rates, in versions over the larger of 1 and the live value of staleness, absolute of fractions."""
SIMULATED_SEEDS = range(5)
NUM_TRIES = 3
SPEEDS = (0.8, 0.93, 1.08, 1.25)
"""Times as long as usual that work takes on either core, for which every case is foretold."""
MOST_DRIFT = 0.05
"""By how much the tokens/s of control runs may be off the mean of those beside the runs that forecasts learn from."""


def act(stage: str, *, seed: int, number: int | None, budget_s: float) -> None:
    """Do one stage. `calibrate` and `run` begin nothing after `budget_s`, and go on with what is missing where they are called again."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    until_s = time.monotonic() + budget_s
    match stage:
        case "draw":
            drawn = {
                "seed": seed,
                "code": code_hash(),
                "commit": _git("rev-parse", "HEAD"),
                "cases": draw(seed),
                "forecasts": [],
            }
            _write(FORECASTS, [*_records(), drawn])
            cases.forget_learned()
        case "calibrate":
            cases.calibrate(_record()["cases"], until_s=until_s)
        case "forecast":
            forecast()
        case "run":
            _refuse_unless_foretold()
            while (missing := _missing(number)) and time.monotonic() < until_s:
                run(missing[0])
        case _:
            pass
    table(_records() if stage == "table" else [_record()])


def code_hash() -> str:
    """Return the hash of the code that makes forecasts."""
    return hash_of(CODE)


def forecast() -> None:
    """Simulate every case. Raises `SystemExit` where the code has changed since the draw."""
    *others, record = _records()
    if record["code"] != code_hash():
        sys.exit("the simulator's code has changed since the cases were drawn: draw again, with another seed")
    folders = sorted({folder for case in record["cases"] for folder in cases.learned_from(case)})
    if missing := [folder.name for folder in folders if not folder.exists()]:
        sys.exit(f"{len(missing)} of {len(folders)} runs to learn from are not made ({missing[0]}): --blind calibrate")
    probed = [cases.probed(folder) for folder in folders]
    record["usual"] = {part: statistics.fmean(one[part] for one in probed) for part in ("engine", "trainer")}
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), mp_context=multiprocessing.get_context("spawn")) as pool:
        record["at_speeds"] = list(pool.map(foretold, record["cases"], [record["usual"]] * len(record["cases"])))
    record["forecasts"] = [at_speed(each, Slowness()) for each in record["at_speeds"]]
    _write(FORECASTS, [*others, record])
    print(f"now commit {FORECASTS.relative_to(ROOT)}, then --blind run")


def foretold(case: dict[str, Any], usual: dict[str, float]) -> dict[str, list[list[float]]]:
    """Return the figures of a case: [slowness of the engines' core, of the trainer's] of each, both as `SPEEDS`.

    `usual` are the probes' seconds on the cores of `engine` and `trainer` where slowness is 1.
    """
    config, folders = cases.config_of(case), cases.learned_from(case)
    world = world_of_runs(config, folders, slowness=[cases.slowness_of(cases.probed(folder), usual) for folder in folders])
    if case["reward_s"]:
        own_s = world.scoring.score_s.average  # of a call that does not sleep
        calls = Distribution(kind="uniform", low=0.5 * case["reward_s"] + own_s, high=1.5 * case["reward_s"] + own_s)  # `plugins.reward`
        world = dataclasses.replace(world, scoring=dataclasses.replace(world.scoring, score_s=calls))
    found: dict[str, list[list[float]]] = {name: [] for name in FIGURES}
    for engine in SPEEDS:
        rows = [
            [summary_of(simulate(config, slowed(world, slowness), seed=seed)) for seed in SIMULATED_SEEDS]
            for trainer in SPEEDS
            for slowness in [Slowness(engine=engine, trainer=trainer, prm=trainer)]
        ]
        for name in FIGURES:
            found[name].append([statistics.fmean(getattr(one, name) for one in runs) for runs in rows])
    return found


def at_speed(figures: dict[str, list[list[float]]], slowness: Slowness) -> dict[str, float]:
    """Return what `foretold` says between the speeds that it knows."""
    return {
        name: float(np.interp(slowness.engine, SPEEDS, [np.interp(slowness.trainer, SPEEDS, row) for row in rows]))
        for name, rows in figures.items()
    }


def run(index: int) -> None:
    """Run a case live, and keep what it showed, or how it failed."""
    record = _record()
    one: dict[str, Any] = {"seed": record["seed"], "case": index, "code": record["code"]}
    one |= {"commit": _git("rev-parse", "HEAD"), "began": time.strftime("%FT%T")}
    try:
        folder, one["others"] = cases.live(record["cases"][index])
        slowness = cases.slowness_of(cases.probed(folder), record["usual"])
        one["slowness"] = {"engine": slowness.engine, "trainer": slowness.trainer}
        one["foretold"] = at_speed(record["at_speeds"][index], slowness)
        one["live"] = cases.figures_of(folder)
    except subprocess.CalledProcessError as error:
        one["failed"] = str(error)
    _write(TRIES, [*_tries(), one])


def _missing(number: int | None) -> list[int]:
    """Return the next cases to run, those with the fewest tries first: those that have too few that count, or the one with this number."""
    tries = _tries_of(_record())
    done = [one["case"] for one in tries if "failed" in one or counts(one)]
    left = [index for index in range(NUM_CASES) if done.count(index) < NUM_TRIES and number in (None, index)]
    return sorted(left, key=lambda index: sum(one["case"] == index for one in tries))


def counts(one: dict[str, Any]) -> bool:
    """Return whether a try came to its end on a machine of its own, and as fast as any that was foretold; of the first seeds nobody
    measured it, and before seed 12 it had to be as fast as before.
    """
    is_alone = one.get("others", 0.0) <= MOST_OTHERS and one.get("drift", 0.0) <= MOST_DRIFT
    return "live" in one and is_alone and all(SPEEDS[0] <= slow <= SPEEDS[-1] for slow in _slowness(one))


def errors_of(foretold: dict[str, float], live: dict[str, float]) -> dict[str, float]:
    """Return the error of each figure, as `GOALS` says."""
    return {
        "tokens_per_s": abs(foretold["tokens_per_s"] / live["tokens_per_s"] - 1),
        "staleness_mean": abs(foretold["staleness_mean"] - live["staleness_mean"]) / max(1.0, live["staleness_mean"]),
        **{name: abs(foretold[name] - live[name]) for name in FIGURES[2:]},
    }


def errors_by_seed() -> dict[int, tuple[list[dict[str, float]], list[dict[str, float]]]]:
    """Return, of every seed, the errors of the cases that were run: of what was foretold last before, and of what was committed."""
    found: dict[int, tuple[list[dict[str, float]], list[dict[str, float]]]] = {}
    for record in _records():
        lives = {index: one for index in range(len(record["cases"])) if (one := live_of(record, index)) is not None}
        committed = [errors_of(record["forecasts"][index], live) for index, live in lives.items()]
        last = [errors_of(_foretold_of(record, index), live) for index, live in lives.items()]
        if lives:
            found[record["seed"]] = last, committed
    return found


def live_of(record: dict[str, Any], index: int) -> dict[str, float] | None:
    """Return the median of each figure of a case, over its tries that count; None where there are none."""
    tries = [one["live"] for one in _tries_of(record, index) if counts(one)]
    return {name: statistics.median(one[name] for one in tries) for name in FIGURES} if tries else None


def _slowness(one: dict[str, Any]) -> list[float]:
    """Return that of the engines' core and the trainer's beside a try; before seed 12 nobody measured it."""
    return list(one["slowness"].values()) if isinstance(one.get("slowness"), dict) else []


def _foretold_of(record: dict[str, Any], index: int) -> dict[str, float]:
    """Return the median of what was foretold of a case at the speed of each try that counts."""
    tries = [one for one in _tries_of(record, index) if "foretold" in one and counts(one)]
    return {name: statistics.median(one["foretold"][name] for one in tries) for name in FIGURES} if tries else record["forecasts"][index]


def repeated_errors(record: dict[str, Any]) -> list[float]:
    """Return the errors of every try of a draw that counts, foretold by every other of its case, moved by as much as the forecasts for the
    speeds of the two differ: how far a forecast would be off that knew all about one run, and nothing of the next.
    """
    found: list[float] = []
    for index in range(len(record["cases"])):
        tries = [one for one in _tries_of(record, index) if counts(one)]
        for one, other in itertools.permutations(tries, 2):
            moved = {name: other["foretold"][name] - one["foretold"][name] if "foretold" in one else 0.0 for name in FIGURES}
            found += errors_of({name: one["live"][name] + moved[name] for name in FIGURES}, other["live"]).values()
    return found


def table(records: Sequence[dict[str, Any]]) -> None:
    """Print every case of some draws, and every try of it."""
    for record in records:
        found = harness.Measured(rows=[row for index in range(len(record["cases"])) for row in _rows(record, index)])
        harness.show(f"blind, seed {record['seed']}, code {record['code'][:12]}, commit {record['commit'][:9]}", found)
    by_seed = errors_by_seed()
    for record in records:
        if record["seed"] not in by_seed:
            continue
        last, committed = ([error for each in errors for error in each.values()] for errors in by_seed[record["seed"]])
        _tell(record, "", last)
        if last != committed:
            _tell(record, ", without the machine's speed", committed)
        if again := repeated_errors(record):
            _tell(record, ", of one live try by another", again)


def _tell(record: dict[str, Any], what: str, errors: Sequence[float]) -> None:
    median, largest, num_within = statistics.median(errors), max(errors), sum(error <= GOALS[1] for error in errors)
    told = f"median {median:.3f} (goal {GOALS[0]}), largest {largest:.3f} (goal {GOALS[1]})"
    print(f"seed {record['seed']}, errors{what}: {told}, {num_within} of {len(errors)} within {GOALS[1]}")


def _rows(record: dict[str, Any], index: int) -> Iterator[harness.Row]:
    case, forecasts = record["cases"][index], record["forecasts"]
    words = f"{index}: " + ", ".join(f"{name} {value}" for name, value in case.items())
    tries = _tries_of(record, index)
    live = live_of(record, index)
    for name in FIGURES if forecasts else ():
        row: harness.Row = {"case": words, "figure": name, "committed": forecasts[index][name], "slowness": "", "foretold": ""}
        yield row | (
            {"live": live[name], "error": errors_of(_foretold_of(record, index), live)[name]} if live else {"live": "", "error": ""}
        )
        for one in tries:
            told = one.get("foretold", forecasts[index])
            row = {
                "case": one["began"],
                "figure": name,
                "committed": "",
                "slowness": " / ".join(f"{slow:.2f}" for slow in _slowness(one)) or one.get("slowness", ""),
                "foretold": told[name],
            }
            if "live" not in one:
                yield row | {"live": one["failed"], "error": ""}
                continue
            disturbed = f"others took {one.get('others', 0.0):.2f} of the machine"
            disturbed += f", control runs were {one['drift']:.2f} off" if "drift" in one else ""
            yield row | {"live": one["live"][name], "error": "" if counts(one) else disturbed}


def _refuse_unless_foretold() -> None:
    record, path = _record(), FORECASTS.relative_to(ROOT).as_posix()
    if not record["forecasts"] or record["code"] != code_hash():
        sys.exit("there is no forecast by the code as it stands: --blind draw, calibrate, forecast")
    if _git("status", "--porcelain", "--", path) or not _git("ls-files", "--", path):
        sys.exit(f"{path} is not committed: what is foretold must be written down before it is run")


def _records() -> list[dict[str, Any]]:
    return json.loads(FORECASTS.read_text()) if FORECASTS.exists() else []


def _record() -> dict[str, Any]:
    """Return the newest draw. Raises `SystemExit` where there is none."""
    if not (records := _records()):
        sys.exit("no cases are drawn: --blind draw")
    return records[-1]


def _tries() -> list[dict[str, Any]]:
    return json.loads(TRIES.read_text()) if TRIES.exists() else []


def _tries_of(record: dict[str, Any], index: int | None = None) -> list[dict[str, Any]]:
    """Return the tries of a draw, or of one of its cases."""
    return [one for one in _tries() if one["seed"] == record["seed"] and index in (None, one["case"])]


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")
