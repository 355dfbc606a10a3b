"""Live runs on this machine that were foretold: drawn by seed, forecast, committed, and only then run.

    draw       eight cases over engines, staleness, group sizes, long-tailed lengths, slow rewards, a PRM and an environment
    calibrate  two runs of other settings for each number of engines and kind of case that was drawn: what forecasts learn from
    forecast   simulate every case, and write the figures beside the hash of the code that made them
    run        the cases live, one after another; every try is kept, also one that failed
    table      forecast, live and error of every try

What keeps it honest: `draw` and `forecast` write down the hash of the simulator's code; `run` refuses where the forecasts are not committed
as they stand, or the code has changed since. The cases are drawn after the last change of that code, because a draw names its hash, too.

The model is the demo's without its warm start: it stops by chance, so its lengths are long-tailed. The machine must be quiet.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import random
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from orchestrator.simulate.calibrated import world_of_runs
from orchestrator.simulate.draws import Distribution
from orchestrator.simulate.run import simulate
from orchestrator.simulate.summary import summary_of
from pipelinerl.config.file import load, load_run
from pipelinerl.observe.report.headline import headline
from pipelinerl.observe.report.reading import read_tables
from scripts.bench import harness
from scripts.bench.demo_runs import prepare

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "runs" / "foresight"
FORECASTS = harness.RESULTS / "foresight-forecasts.json"
TRIES = harness.RESULTS / "foresight-tries.json"
CODE = ("orchestrator/simulate", "orchestrator/rules", "pipelinerl/data/packing.py")
NUM_CASES = 8
FIGURES: tuple[str, ...] = ("tokens_per_s", "staleness_mean", "engines_idle_fraction", "trainer_idle_fraction")
GOALS = (0.05, 0.10)
"""Median and largest error: relative of rates, in versions over the larger of 1 and the live value of staleness, absolute of fractions."""
STEPS = 40


def act(stage: str, *, seed: int, number: int | None) -> None:
    """Do one stage."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    match stage:
        case "draw":
            _write(
                FORECASTS, {"seed": seed, "code": code_hash(), "commit": _git("rev-parse", "HEAD"), "cases": draw(seed), "forecasts": []}
            )
        case "calibrate":
            for engines, kind in sorted({(case["engines"], case["kind"]) for case in _read(FORECASTS)["cases"]}):
                calibrate(engines, kind)
        case "forecast":
            forecast()
        case "run":
            _refuse_unless_foretold()
            for index in range(NUM_CASES) if number is None else [number]:
                run(index)
        case _:
            pass
    table()


def draw(seed: int) -> list[dict[str, Any]]:
    """Return the cases of a seed."""
    chance = random.Random(seed)
    kinds = ["plain"] * 4 + ["slow rewards"] * 2 + ["environment", "prm"]
    chance.shuffle(kinds)
    return [
        {
            "kind": kind,
            "engines": chance.choice((1, 2)),
            "staleness": chance.choice((1, 2, 4, 8)),
            "group_size": chance.choice((4, 8, 16)),
            "samples": chance.choice((128, 256)),
            "max_tokens": chance.choice((16, 32, 64)),
            "reward_s": chance.choice((0.02, 0.05)) if kind == "slow rewards" else 0.0,
        }
        for kind in kinds
    ]


def code_hash() -> str:
    """Return the hash of the code that makes forecasts."""
    digest = hashlib.sha256()
    for place in CODE:
        for path in sorted((ROOT / place).rglob("*.py")) if (ROOT / place).is_dir() else [ROOT / place]:
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def settings_of(case: dict[str, Any]) -> list[str]:
    """Return the overrides of the demo's settings that make a case."""
    plugins = Path(__file__).with_name("plugins.py")
    lines = [f'data.source="{plugins}:prompts"', "checkpoint.every=1000", f"trainer.steps={STEPS}", "trainer.learning_rate=1e-6"]
    lines += [f'reward=[{{function="{plugins}:reward", options={{seconds={case["reward_s"]}}}}}]', "model.max_tokens=96"]
    lines += [f"engine.count={case['engines']}", f"pipeline.max_staleness={case['staleness']}", f"rollout.max_tokens={case['max_tokens']}"]
    lines += [f"rollout.group_size={case['group_size']}", f"batch.groups_per_step={case['samples'] // case['group_size']}"]
    lines += ["engine.cores=[]", "trainer.cores=[]"] if case["engines"] > 1 else []
    lines += ["scorer.slots=4"] if case["reward_s"] else []
    if case["kind"] == "environment":
        lines += [f'environment.function="{plugins}:reply"', "environment.max_turns=3"]
    if case["kind"] == "prm":
        lines += [f'prm.path="{FOLDER / "prm"}"', 'prm.dtype="float32"', "prm.chunk_tokens=8", 'prm.separator="="']
    return lines


def calibrate(engines: int, kind: str) -> None:
    """Make the runs that forecasts of such cases learn from; none of them is a case.

    In the one engines are always full and the trainer is beside them. In the other answers are short, few sequences are left at the end of
    a batch, and the trainer works alone.
    """
    streaming, sync = _like(engines, kind)
    case = {"kind": _learned(kind), "engines": engines, "staleness": 3, "group_size": 8, "samples": 192, "max_tokens": 64, "reward_s": 0.0}
    if not streaming.exists():
        _live(case).rename(streaming)
    if not sync.exists():
        _live({**case, "max_tokens": 24}, "pipeline.mode=sync").rename(sync)


def forecast() -> None:
    """Simulate every case. Raises `SystemExit` where the code has changed since the draw."""
    record = _read(FORECASTS)
    if record["code"] != code_hash():
        sys.exit("the simulator's code has changed since the cases were drawn: draw again, with another seed")
    record["forecasts"] = [_forecast(case) for case in record["cases"]]
    _write(FORECASTS, record)
    print(f"now commit {FORECASTS.relative_to(ROOT)}, then --blind run")


def _forecast(case: dict[str, Any]) -> dict[str, float]:
    config = _config(case)
    world = world_of_runs(config, _like(case["engines"], case["kind"]))
    if case["reward_s"]:
        calls = Distribution(kind="uniform", low=0.5 * case["reward_s"], high=1.5 * case["reward_s"])  # see `plugins.reward`
        world = dataclasses.replace(world, scoring=dataclasses.replace(world.scoring, score_s=calls))
    runs = [summary_of(simulate(config, world, seed=seed)) for seed in range(5)]
    return {name: statistics.fmean(getattr(one, name) for one in runs) for name in FIGURES}


def run(index: int) -> None:
    """Run a case live, and keep what it showed, or how it failed."""
    record = _read(FORECASTS)
    kept: dict[str, Any] = {"case": index, "code": record["code"], "commit": _git("rev-parse", "HEAD"), "began": time.strftime("%FT%T")}
    try:
        kept["live"] = figures_of(_live(record["cases"][index]))
    except subprocess.CalledProcessError as error:
        kept["failed"] = str(error)
    tries = _read(TRIES) if TRIES.exists() else []
    _write(TRIES, [*tries, kept])


def figures_of(run_folder: Path) -> dict[str, float]:
    """Return the figures of a live run, over the stretch that its report is about."""
    found = headline(read_tables(run_folder))
    measured = found.measured
    assert measured is not None
    assert found.trained_tokens_per_s is not None
    assert found.staleness_mean is not None
    return {
        "tokens_per_s": found.trained_tokens_per_s,
        "staleness_mean": found.staleness_mean,
        "engines_idle_fraction": (measured.engine_idle_s or 0.0) / (measured.num_engines * measured.window_s),
        "trainer_idle_fraction": (measured.trainer_wait_s or 0.0) / measured.window_s,
    }


def errors_of(foretold: dict[str, float], live: dict[str, float]) -> dict[str, float]:
    """Return the error of each figure, as `GOALS` says."""
    return {
        "tokens_per_s": abs(foretold["tokens_per_s"] / live["tokens_per_s"] - 1),
        "staleness_mean": abs(foretold["staleness_mean"] - live["staleness_mean"]) / max(1.0, live["staleness_mean"]),
        **{name: abs(foretold[name] - live[name]) for name in FIGURES[2:]},
    }


def table() -> None:
    """Print every case, and every try of it."""
    if not FORECASTS.exists():
        sys.exit("no cases are drawn: --blind draw")
    record, found, errors = _read(FORECASTS), harness.Measured(), []
    tries = [one for one in (_read(TRIES) if TRIES.exists() else []) if one["code"] == record["code"]]
    for index, case in enumerate(record["cases"]):
        foretold = record["forecasts"][index] if record["forecasts"] else {}
        words = ", ".join(f"{name} {value}" for name, value in case.items())
        for name in FIGURES if foretold else ():
            found.rows.append({"case": f"{index}: {words}", "figure": name, "foretold": foretold[name], "live": "", "error": ""})
            for one in (each for each in tries if each["case"] == index):
                if "live" not in one:
                    found.rows.append({"case": "", "figure": name, "foretold": "", "live": one["failed"], "error": ""})
                    continue
                error = errors_of(foretold, one["live"])[name]
                errors.append(error)
                found.rows.append({"case": one["began"], "figure": name, "foretold": "", "live": one["live"][name], "error": error})
    harness.show(f"blind, seed {record['seed']}, code {record['code'][:12]}, commit {record['commit'][:9]}", found)
    if errors:
        print(f"errors: median {statistics.median(errors):.3f} (goal {GOALS[0]}), largest {max(errors):.3f} (goal {GOALS[1]})")


def _refuse_unless_foretold() -> None:
    record, path = _read(FORECASTS), FORECASTS.relative_to(ROOT).as_posix()
    if not record["forecasts"] or record["code"] != code_hash():
        sys.exit("there is no forecast by the code as it stands: --blind draw, calibrate, forecast")
    if _git("status", "--porcelain", "--", path) or not _git("ls-files", "--", path):
        sys.exit(f"{path} is not committed: what is foretold must be written down before it is run")


def _learned(kind: str) -> str:
    """Return the kind of run that a kind of case is learned from: how slow its rewards are is told, not learned."""
    return "plain" if kind == "slow rewards" else kind


def _like(engines: int, kind: str) -> list[Path]:
    name = f"like-{engines}-{_learned(kind)}"
    return [FOLDER / name, FOLDER / f"{name}-sync"]


def _config(case: dict[str, Any]) -> Any:
    config = load(prepare(FOLDER / "live"), overrides=[*settings_of(case), "evaluation.every=0"], for_run=False)
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"source": None})})


def _live(case: dict[str, Any], *overrides: str) -> Path:
    """Run a case, and return its folder. Raises `CalledProcessError` where it fails."""
    if case["kind"] == "prm" and not (FOLDER / "prm").exists():
        from tests.tiny_models import make_prm

        make_prm(FOLDER / "prm", context=1024)
    settings = prepare(FOLDER / "live")
    settings.write_text(settings.read_text().partition("[evaluation]")[0])
    before = set((FOLDER / "live").glob("demo-*/"))
    subprocess.run([sys.executable, "-m", "pipelinerl", "run", str(settings), *settings_of(case), *overrides], check=True, cwd=ROOT)
    (folder,) = (path for path in set((FOLDER / "live").glob("demo-*/")) - before if (path / "journal").is_dir())
    load_run(folder)
    return folder


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def _read(path: Path) -> Any:
    return json.loads(path.read_text())


def _write(path: Path, data: Any) -> None:
    path.write_text(json.dumps(data, indent=1) + "\n")
