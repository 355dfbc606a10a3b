"""The live runs that are foretold: cases drawn by seed, the runs that forecasts of them learn from, and how either is run.

The model is the demo's, five times as large and without its warm start: it stops by chance, so its lengths are long-tailed. Of the demo's
own size two runs of the same settings were 15 % apart in tokens/s, of this size 1 %. The machine must be quiet.

The trainer has a core, and all engines share the other one: three processes on two cores that nothing is bound to measure the system's
scheduler. A process reward model shares the trainer's: bound to none, two runs of one setting were 45 % apart in the seconds of its
batches; on one core with engines a batch of three steps waited for up to 5.7 s.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.simulate.recorded import read_journal
from orchestrator.simulate.world import Slowness
from pipelinerl.config import Config
from pipelinerl.config.file import load, load_run
from pipelinerl.demo.sort_digits import make_model
from pipelinerl.observe.report.headline import headline
from pipelinerl.observe.report.reading import read_tables
from scripts.bench.demo_runs import prepare
from scripts.bench.foreseen.probes import Probes
from scripts.bench.machine import MOST_OTHERS, Others

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "runs" / "foresight"
STEPS, LEARNED_STEPS, LEARNED_ROUNDS = 24, 16, 2
HIDDEN_SIZE, NUM_LAYERS = 256, 6
MOST_TRIES = 3
LEARNED_REWARD_S = 0.035
"""Seconds of slow rewards in the runs that forecasts learn from."""
KEPT_S = 3 * 3600.0
"""Seconds for which the next draw's forecasts learn from the same runs: probes beside them tell how fast the machine was."""
TRAINER_POWER = 0.65
"""Of what its probes take more, by which the trainer does: between the powers that left runs of one setting nearest to each other, 0.82 for
26 pairs (7.6 % apart, 1.8 % by it) and 0.54 for 50 runs of 21 settings of another day (3.3 %, 1.35 %; 1.5 % by this one). Of engines the
best powers are 0.92 and 0.91, and hardly better than 1."""
LEARNED: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "long": ({"max_tokens": 64}, ()),
    "sync": ({"max_tokens": 40}, ("pipeline.mode=sync",)),
    "short": ({"max_tokens": 20, "group_size": 16}, ()),
    "few": ({"max_tokens": 40, "slots": 16}, ()),
    "fours": ({"max_tokens": 48, "slots": 32, "group_size": 4}, ()),
}
"""Runs that forecasts learn from, none of them a case: what differs from `_USUAL`, and overrides. Answers of several lengths tell a row
from its tokens, and these from the squares of their samples; rounds and few slots a pass from its sequences. In rounds engine and trainer
also work alone, with answers as long as those of `few`, where both always work; in groups of four many samples have no gradient. An
environment and a process reward model have four runs of their own besides, as `_USUAL`, `few`, `short` and `fours`; slow rewards have one,
as `short`: where rewards have slept, scores come one by one and wake up the orchestrator more often. Each is made
`LEARNED_ROUNDS` times, in rounds: two runs of one setting, minutes apart, were up to 22 % apart in the speed of trainer and engines, for
all that no process here took; of that `probes` tell all but some percent."""
PROBED = "probes.json"
"""In a run's folder: seconds of `probes` on the engines' core and on the trainer's, while its figures were made."""
_USUAL = {"staleness": 3, "group_size": 8, "samples": 192, "max_tokens": 64, "slots": 128}


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
            "slots": chance.choice((16, 32, 128)),
            "reward_s": chance.choice((0.02, 0.05)) if kind == "slow rewards" else 0.0,
        }
        for kind in kinds
    ]


def settings_of(case: dict[str, Any]) -> list[str]:
    """Return the overrides of the demo's settings that make a case."""
    plugins = Path(__file__).with_name("plugins.py")
    lines = [f'data.source="{plugins}:prompts"', "checkpoint.every=1000", f"trainer.steps={STEPS}", "trainer.learning_rate=1e-6"]
    lines += [f'reward=[{{function="{plugins}:reward", options={{seconds={case["reward_s"]}}}}}]', "model.max_tokens=96"]
    lines += [f'model.path="{FOLDER / "model"}"', f"engine.max_running={case['slots']}"]
    lines += [f"engine.count={case['engines']}", f"pipeline.max_staleness={case['staleness']}", f"rollout.max_tokens={case['max_tokens']}"]
    lines += [f"rollout.group_size={case['group_size']}", f"batch.groups_per_step={case['samples'] // case['group_size']}"]
    engines_core, trainer_core = _cores()
    lines += [f"engine.cores={[engines_core] * case['engines']}", f"run.cores=[{trainer_core}]"]
    lines += ["scorer.slots=4"] if case["reward_s"] else []
    if case["kind"] == "environment":
        lines += [f'environment.function="{plugins}:reply"', "environment.max_turns=3"]
    if case["kind"] == "prm":
        lines += [f'prm.path="{FOLDER / "prm"}"', 'prm.dtype="float32"', "prm.chunk_tokens=8", 'prm.separator="="']
        lines += [f"prm.cores={[trainer_core]}"]
    return lines


def config_of(case: dict[str, Any]) -> Config:
    """Return the settings of a case."""
    config = load(_prepared(), overrides=[*settings_of(case), "evaluation.every=0"], for_run=False)
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update={"source": None})})


def learned_from(case: dict[str, Any]) -> list[Path]:
    """Return the folders of the runs that a case's forecast learns from, the most like it first."""
    engines, kind = case["engines"], case["kind"]
    names = [*LEARNED]
    if kind == "slow rewards":
        names = [*names, f"{kind}-short"]  # last: how slow they are is said by the case
    elif kind != "plain":
        names = [kind, f"{kind}-few", f"{kind}-short", f"{kind}-fours", *names]
    return [FOLDER / f"like-{engines}-{name}-{turn}" for name in names for turn in range(LEARNED_ROUNDS)]


def forget_learned() -> None:
    """Remove the runs that forecasts learn from, but those of the last hours."""
    for folder in FOLDER.glob("like-*"):
        if time.time() - (folder / PROBED).stat().st_mtime > KEPT_S:
            shutil.rmtree(folder)


def calibrate(drawn: Sequence[dict[str, Any]], *, until_s: float) -> None:
    """Make the runs that forecasts of some cases learn from, where they are not there yet, round by round; none begins after `until_s` of
    the monotonic clock. One beside which others worked is made again, a few times.
    """
    wanted = {folder: case for case in drawn for folder in learned_from(case)}
    for folder in sorted(wanted, key=lambda folder: folder.name.rpartition("-")[2]):
        for _ in range(MOST_TRIES):
            if not folder.exists() and time.monotonic() < until_s:
                _learn(folder, wanted[folder])


def _learn(folder: Path, case: dict[str, Any]) -> None:
    """Make one run that forecasts learn from; `folder` is there afterwards unless others worked meanwhile."""
    _, _, name = folder.name.rpartition("-")[0].split("-", 2)
    changed, overrides = LEARNED.get(name.rpartition("-")[2], ({}, ()))
    kind = "plain" if name in LEARNED else case["kind"]
    reward_s = LEARNED_REWARD_S if kind == "slow rewards" else 0.0
    settings = {**_USUAL, "engines": case["engines"], "kind": kind, "reward_s": reward_s, **changed}
    made, others = live(settings, f"trainer.steps={LEARNED_STEPS}", *overrides)
    print(f"{folder.name}: others took {others:.3f} of the machine", flush=True)
    if others <= MOST_OTHERS:
        made.rename(folder)


def probed(folder: Path) -> dict[str, float]:
    """Return the seconds of the probes on the core of `engine` and on that of `trainer`, beside a run."""
    return json.loads((folder / PROBED).read_text())


def slowness_of(seconds: dict[str, float], usual: dict[str, float]) -> Slowness:
    """Return how slow the cores were by their probes; a process reward model has the trainer's."""
    engine, trainer = seconds["engine"] / usual["engine"], (seconds["trainer"] / usual["trainer"]) ** TRAINER_POWER
    return Slowness(engine=engine, trainer=trainer, prm=trainer)


def live(case: dict[str, Any], *overrides: str) -> tuple[Path, float]:
    """Run a case; return its folder, and the part of the machine that others took meanwhile.

    Raises `CalledProcessError` where it fails.
    """
    if case["kind"] == "prm" and not (FOLDER / "prm").exists():
        from tests.tiny_models import make_prm

        make_prm(FOLDER / "prm", context=1024)
    settings = _prepared()
    settings.write_text(settings.read_text().partition("[evaluation]")[0])
    before = set((FOLDER / "live").glob("demo-*/"))
    first, last = _cores()
    others = Others()  # first: what a process of ours took before would be taken from what others do
    with Probes((first, last)) as probes:
        subprocess.run([sys.executable, "-m", "pipelinerl", "run", str(settings), *settings_of(case), *overrides], check=True, cwd=ROOT)
        taken = others.fraction()
        (folder,) = (path for path in set((FOLDER / "live").glob("demo-*/")) - before if (path / "journal").is_dir())
        steps = read_journal(folder).steps
        seconds = probes.seconds(steps[0]["t"], steps[-1]["t"])
    (folder / PROBED).write_text(json.dumps({"engine": seconds[first], "trainer": seconds[last]}))
    load_run(folder)
    return folder, taken


def _cores() -> tuple[int, int]:
    """Return the core of all engines, and the trainer's."""
    cores = sorted(os.sched_getaffinity(0))
    return cores[0], cores[-1]


def _prepared() -> Path:
    """Return the demo's settings; the model is there afterwards."""
    if not (FOLDER / "model").exists():
        make_model(FOLDER / "model", 0, hidden_size=HIDDEN_SIZE, num_layers=NUM_LAYERS)
    return prepare(FOLDER / "live")


def figures_of(run_folder: Path) -> dict[str, float]:
    """Return the figures of a live run, over the stretch that its report is about: all but the first step."""
    found = headline(read_tables(run_folder))
    measured = found.measured
    assert measured is not None
    assert found.trained_tokens_per_s is not None
    assert found.staleness_mean is not None
    return {
        "tokens_per_s": found.trained_tokens_per_s,
        "staleness_mean": found.staleness_mean,
        "engines_idle_fraction": _engines_idle_fraction(run_folder),
        "trainer_idle_fraction": (measured.trainer_wait_s or 0.0) / measured.window_s,
    }


def _engines_idle_fraction(run_folder: Path) -> float:
    """Return the part of the engines' time without passes and pauses, from their own spans.

    The report's gauges are up to two seconds old at a run's end, where engines have nothing left to do: a tenth of so short a run.
    """
    journal = read_journal(run_folder)
    start_s, end_s = journal.steps[0]["t"], journal.steps[-1]["t"]
    spans = [span for passes in journal.passes.values() for span in passes]
    busy_s = sum(max(0.0, min(end_s, end) - max(start_s, start)) for start, end in spans)
    paused_s = sum(swap["pause_s"] for swap in journal.swaps if start_s < swap["t"] <= end_s)
    return 1 - (busy_s + paused_s) / (len(journal.passes) * (end_s - start_s))
