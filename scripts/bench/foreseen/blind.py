"""Live runs on this machine that were foretold: drawn by seed, forecast, committed, and only then run.

    draw       eight cases over engines, staleness, group sizes, long-tailed lengths, slow rewards, a PRM and an environment
    calibrate  runs of other settings for each number of engines that was drawn: what forecasts learn from (`cases`); those of an earlier
               draw are forgotten, since the machine's speed changes within an hour
    forecast   simulate every case, and write the figures beside the hash of the code that made them
    run        the cases live, in rounds; every try is kept, also one that failed, or beside which others worked
    table      forecast, live and error of every case, of every seed that was drawn, with all tries

What keeps it honest: `draw` and `forecast` write down the hash of the simulator's code; `run` refuses where the forecasts are not committed
as they stand, or the code has changed since. The cases are drawn after the last change of that code, because a draw names its hash, too.

A try counts where others took at most `MOST_OTHERS` of the machine, and where (from seed 6 on) the control runs before and after it were as
fast as those beside the runs that forecasts learn from, within `MOST_DRIFT`; it is made again where not. From seed 7 on each case is run
`NUM_TRIES` times, and held to the median of each figure: two runs of one setting with two engines on one core were 15 % apart. Tries of the
seeds 2 and 3 were also foretold once more at the processor's speed right before each. Both forecasts are stored; it made errors larger,
and is done no more.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orchestrator.simulate.calibrated import world_of_runs
from orchestrator.simulate.draws import Distribution
from orchestrator.simulate.run import simulate
from orchestrator.simulate.summary import summary_of
from scripts.bench import harness
from scripts.bench.foreseen import cases
from scripts.bench.foreseen.cases import FOLDER, ROOT, draw
from scripts.bench.machine import MOST_OTHERS

FORECASTS = harness.RESULTS / "foresight-forecasts.json"
"""One record for each seed that was drawn, in order; the last is the one that stages act on."""
TRIES = harness.RESULTS / "foresight-tries.json"
CODE = ("orchestrator/simulate", "orchestrator/rules", "pipelinerl/data/packing.py")
NUM_CASES = 8
FIGURES: tuple[str, ...] = ("tokens_per_s", "staleness_mean", "engines_idle_fraction", "trainer_idle_fraction")
GOALS = (0.05, 0.10)
"""Median and largest error: relative of rates, in versions over the larger of 1 and the live value of staleness, absolute of fractions."""
SIMULATED_SEEDS = range(5)
NUM_TRIES, TRIES_BETWEEN_CONTROLS = 3, 4
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
                "controls": [],
                "forecasts": [],
            }
            _write(FORECASTS, [*_records(), drawn])
            cases.forget_learned()
        case "calibrate":
            calibrate(until_s)
        case "forecast":
            forecast()
        case "run":
            _refuse_unless_foretold()
            control = cases.control()
            while (missing := _missing(number)) and time.monotonic() < until_s:
                control = run(missing, control)
        case _:
            pass
    table()


def code_hash() -> str:
    """Return the hash of the code that makes forecasts."""
    digest = hashlib.sha256()
    for place in CODE:
        for path in sorted((ROOT / place).rglob("*.py")) if (ROOT / place).is_dir() else [ROOT / place]:
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def calibrate(until_s: float) -> None:
    """Make the runs that forecasts learn from, between two control runs; all are forgotten where these are too far apart."""
    *others, record = _records()
    controls = [cases.control()]
    cases.calibrate(record["cases"], until_s=until_s)
    controls.append(cases.control())
    if drift(controls, record["controls"] + controls) > MOST_DRIFT:
        cases.forget_learned()
        record["controls"], controls = [], []
        print("the machine became faster or slower meanwhile: --blind calibrate once more")
    record["controls"] += controls
    _write(FORECASTS, [*others, record])


def drift(controls: list[float], reference: list[float]) -> float:
    """Return by how much the control that is farthest from the mean of the reference is off it, as a part of that mean."""
    return max(abs(one / statistics.fmean(reference) - 1) for one in controls)


def forecast() -> None:
    """Simulate every case. Raises `SystemExit` where the code has changed since the draw."""
    *others, record = _records()
    if record["code"] != code_hash():
        sys.exit("the simulator's code has changed since the cases were drawn: draw again, with another seed")
    record["forecasts"] = [foretold(case) for case in record["cases"]]
    _write(FORECASTS, [*others, record])
    print(f"now commit {FORECASTS.relative_to(ROOT)}, then --blind run")


def foretold(case: dict[str, Any]) -> dict[str, float]:
    """Return the figures of a case."""
    config = cases.config_of(case)
    world = world_of_runs(config, cases.learned_from(case))
    if case["reward_s"]:
        own_s = world.scoring.score_s.average  # of a call that does not sleep
        calls = Distribution(kind="uniform", low=0.5 * case["reward_s"] + own_s, high=1.5 * case["reward_s"] + own_s)  # `plugins.reward`
        world = dataclasses.replace(world, scoring=dataclasses.replace(world.scoring, score_s=calls))
    runs = [summary_of(simulate(config, world, seed=seed)) for seed in SIMULATED_SEEDS]
    return {name: statistics.fmean(getattr(one, name) for one in runs) for name in FIGURES}


def run(indices: list[int], before: float) -> float:
    """Run cases live, and keep what each showed, or how it failed; `before` is the control before them. Return the control after them."""
    record, kept = _record(), list[dict[str, Any]]()
    for index in indices:
        one: dict[str, Any] = {"case": index, "code": record["code"], "commit": _git("rev-parse", "HEAD"), "began": time.strftime("%FT%T")}
        kept.append(one)
        try:
            folder, one["others"] = cases.live(record["cases"][index])
            one["live"] = cases.figures_of(folder)
        except subprocess.CalledProcessError as error:
            one["failed"] = str(error)
    controls = [before, cases.control()]
    found = {"controls": controls, "drift": drift(controls, record["controls"])}
    _write(TRIES, [*_tries(), *(one | found for one in kept)])
    return controls[-1]


def _missing(number: int | None) -> list[int]:
    """Return the next cases to run, those with the fewest tries first: those that have too few that count, or the one with this number."""
    tries = [one for one in _tries() if one["code"] == _record()["code"]]
    done = [one["case"] for one in tries if "failed" in one or counts(one)]
    left = [index for index in range(NUM_CASES) if done.count(index) < NUM_TRIES and number in (None, index)]
    return sorted(left, key=lambda index: sum(one["case"] == index for one in tries))[:TRIES_BETWEEN_CONTROLS]


def counts(one: dict[str, Any]) -> bool:
    """Return whether a try came to its end on a machine of its own, as fast as before; of the first seeds nobody measured it."""
    return "live" in one and one.get("others", 0.0) <= MOST_OTHERS and one.get("drift", 0.0) <= MOST_DRIFT


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
    tries = [one["live"] for one in _tries() if one["code"] == record["code"] and one["case"] == index and counts(one)]
    return {name: statistics.median(one[name] for one in tries) for name in FIGURES} if tries else None


def _foretold_of(record: dict[str, Any], index: int) -> dict[str, float]:
    """Return what was foretold of a case last before its tries."""
    later = [one["foretold"] for one in _tries() if one["code"] == record["code"] and one["case"] == index and "foretold" in one]
    return later[-1] if later else record["forecasts"][index]


def table() -> None:
    """Print every case of every seed, and every try of it."""
    for record in _records():
        found = harness.Measured(rows=[row for index in range(len(record["cases"])) for row in _rows(record, index)])
        harness.show(f"blind, seed {record['seed']}, code {record['code'][:12]}, commit {record['commit'][:9]}", found)
    for seed, (last, committed) in errors_by_seed().items():
        for words, errors in (("", last), *([(", without the machine's speed", committed)] if last != committed else [])):
            flat = [error for each in errors for error in each.values()]
            if flat:
                told = f"median {statistics.median(flat):.3f} (goal {GOALS[0]}), largest {max(flat):.3f} (goal {GOALS[1]})"
                print(f"seed {seed}, errors{words}: {told}, {sum(error <= GOALS[1] for error in flat)} of {len(flat)} within {GOALS[1]}")


def _rows(record: dict[str, Any], index: int) -> Iterator[harness.Row]:
    case, forecasts = record["cases"][index], record["forecasts"]
    words = f"{index}: " + ", ".join(f"{name} {value}" for name, value in case.items())
    tries = [one for one in _tries() if one["code"] == record["code"] and one["case"] == index]
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
                "slowness": one.get("slowness", ""),
                "foretold": told[name],
            }
            if "live" not in one:
                yield row | {"live": one["failed"], "error": ""}
                continue
            disturbed = f"others took {one.get('others', 0.0):.2f} of the machine, control runs were {one.get('drift', 0.0):.2f} off"
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


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")
