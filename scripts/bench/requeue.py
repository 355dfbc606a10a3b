#!/usr/bin/env python
"""Does a run live through its allocations? The demo as a job of a real Slurm, which meets its limit again and again.

A Slurm of its own (Debian's slurm-wlm and munge, all on this machine; takes root) runs what `pipelinerl slurm` wrote: real vLLM, the real
trainer, one W&B run, offline. In an attempt, once `STEPS` more steps are trained, Slurm sends its USR1: in the first `--limits` of them
because the job's time limit was lowered and is near, in the others, to save minutes, because it is asked to. The run saves, the script
requeues it, and the next attempt goes on. The last one runs to the end. Then the run is judged from outside: journal, checkpoints, W&B's
own files, and the checker's verdict on the ledger.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.config.file import load
from pipelinerl.launch.slurm import submit
from pipelinerl.observe.lines import read_journal
from pipelinerl.observe.tracking.identity import id_in_checkpoint
from scripts.bench import harness
from scripts.bench.demo_runs import prepare, warm_start
from tests.observe.tracking.wandb_file import history
from tests.slurm import cluster as slurm

STEPS = 5
"""Trained in an attempt before its limit comes near. More only takes longer."""
SAVE_S = 60
LONG_MIN = 600
"""The limit until it is lowered."""
PATIENCE_S = 900.0


def measure(arguments: Any) -> harness.Measured:
    requeues = arguments.requeues or (2 if arguments.quick else 20)
    with tempfile.TemporaryDirectory() as folder:
        apart = ["slurm.engine_nodes=1"] if arguments.apart else []
        run_folder = _job(Path(folder) / "runs", [*apart, *arguments.overrides])
        with slurm.cluster(_made(Path(folder) / "slurm"), nodes=2 if arguments.apart else 1, is_apart=arguments.apart) as machine:
            attempts = _run(machine, run_folder, requeues=requeues, limits=arguments.limits)
        return _judge(run_folder, attempts, requeues=requeues)


def _made(folder: Path) -> Path:
    folder.mkdir()
    folder.parent.chmod(0o755)
    return folder


def _job(folder: Path, overrides: list[str]) -> Path:
    """The demo, prepared as a job; as it has no last step yet, a checkpoint comes only from a wish to save."""
    settings = prepare(folder)
    model = warm_start(settings, "sft.steps=100")
    job = ["trainer.steps=1000000", "checkpoint.every=1000000", "evaluation.every=0", "evaluation.limit=32", 'tracking.to=["wandb"]']
    job += [f"slurm.time={LONG_MIN}", f"slurm.save_s={SAVE_S}", "slurm.cpus_per_node=2", "run.name=requeued"]
    return submit.prepare(load(settings, overrides=[*job, model, *overrides])).parent


def _run(machine: slurm.Cluster, run_folder: Path, *, requeues: int, limits: int) -> list[harness.Row]:
    """Requeue so often, `limits` of them by the limit, then let it finish. One row for each attempt."""
    number = machine.run("sbatch", "--parsable", str(run_folder / "job.sbatch"))
    attempts = []
    for attempt in range(requeues + 1):
        before = len(_steps(run_folder))
        _wait(lambda: machine.state(number)["JobState"] == "RUNNING", f"attempt {attempt} to start")
        started = time.monotonic()
        if attempt == requeues:
            _end_soon(run_folder, steps=before + STEPS)
        _wait(lambda before=before: len(_steps(run_folder)) > before or _is_over(machine, number), f"a step of attempt {attempt}")
        first_step_s = time.monotonic() - started
        if attempt < requeues:
            _wait(lambda before=before: len(_steps(run_folder)) >= before + STEPS or _is_over(machine, number), "more steps")
            if not _is_over(machine, number):
                _warn(machine, number, is_at_limit=attempt < limits)
        _wait(lambda: machine.state(number)["JobState"] != "RUNNING", f"attempt {attempt} to end")
        ended = time.time()
        last = [*_lines(run_folder)][-1]
        save_s = ended - _wished(run_folder, attempt, default=ended)
        attempts.append(
            {
                "attempt": attempt,
                "steps before": before,
                "steps after": len(_steps(run_folder)),
                "checkpoint": _saved(run_folder),
                "first step s": first_step_s,
                "wish to exit s": save_s,
                "ended": last.get("reason", "?"),
            }
        )
        print(attempts[-1], flush=True)
        if attempt < requeues:
            _wait(lambda: machine.state(number)["JobState"] in ("PENDING", "RUNNING", *slurm_ends()), "the requeue")
            if machine.state(number)["JobState"] in slurm_ends():
                break
            machine.run("scontrol", "update", f"JobId={number}", f"TimeLimit={LONG_MIN}")
    _wait(lambda: machine.state(number)["JobState"] in slurm_ends(), "the end")
    state = machine.state(number)
    print(f"job {number}: {state['JobState']}, {state['Restarts']} restarts", flush=True)
    return attempts


def _warn(machine: slurm.Cluster, number: str, *, is_at_limit: bool) -> None:
    """Have Slurm send its USR1: because the limit is near, which it looks for twice a minute, or at once."""
    if is_at_limit:
        minutes = (_seconds(machine.state(number)["RunTime"]) + SAVE_S + 30) // 60 + 1
        machine.run("scontrol", "update", f"JobId={number}", f"TimeLimit={minutes}")
    else:
        machine.run("scancel", "--batch", "--signal=USR1", number)


def _judge(run_folder: Path, attempts: list[harness.Row], *, requeues: int) -> harness.Measured:
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(run_folder)], capture_output=True, text=True, check=False)
    steps = _steps(run_folder)
    rows = [row["progress/step"] for row in history(run_folder) if "reward/all/mean" in row]
    ids = {path.name.rpartition("-")[2] for path in run_folder.glob("tracking/wandb/offline-run-*")}
    ids.add(id_in_checkpoint(run_folder, "wandb") or "none in the checkpoint")
    replayed = re.search(r"(\d+) of them trained again", checked.stdout)
    requeued = attempts[:requeues]
    log = "".join(path.read_text() for path in (run_folder / "logs").glob("slurm-*.log"))
    goals = [
        harness.at_least("requeued", log.count("saved; requeue"), requeues),
        harness.at_least("checkpoint holds every step", sum(row["checkpoint"] >= row["steps after"] for row in requeued), requeues),
        harness.at_most("steps out of order or twice", len(steps) - len(set(steps) & set(range(len(steps)))), 0),
        harness.at_most("steps trained again", int(replayed[1]) if replayed else -1, 0),
        harness.at_most("W&B runs, by its files and the checkpoint", len(ids), 1),
        harness.at_most("steps missing in W&B or twice there", float(rows != steps), 0),
        harness.at_most("promises broken", float(checked.returncode), 0),
        harness.at_least("ended by itself", float(attempts[-1]["ended"] == "finished"), 1),
        harness.at_most("slowest save and exit, s", max(row["wish to exit s"] for row in requeued), SAVE_S, **harness.SECONDS),
    ]
    notes = [*checked.stdout.splitlines(), f"{len(rows)} steps in W&B's files, ids {', '.join(sorted(ids))}"]
    return harness.Measured(rows=attempts, goals=goals, notes=notes)


def _wait(is_so: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, f"waited {PATIENCE_S:g} s for {what}"
        time.sleep(0.5)


def slurm_ends() -> tuple[str, ...]:
    return ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL")


def _is_over(machine: slurm.Cluster, number: str) -> bool:
    return machine.state(number)["JobState"] != "RUNNING"


def _lines(run_folder: Path) -> list[dict[str, Any]]:
    journal = run_folder / "journal" / "orchestrator.jsonl"
    return list(read_journal(journal)) if journal.exists() else []


def _steps(run_folder: Path) -> list[int]:
    return [line["step"] for line in _lines(run_folder) if line["kind"] == "step"]


def _saved(run_folder: Path) -> int:
    """Steps in the newest checkpoint."""
    found = [int(path.name.removeprefix("step-")) for path in (run_folder / "checkpoints").glob("step-*") if "." not in path.name]
    return max(found, default=0)


def _wished(run_folder: Path, attempt: int, *, default: float) -> float:
    wish = run_folder / "logs" / f"attempt-{attempt}" / "save"
    return wish.stat().st_mtime if wish.exists() else default


def _end_soon(run_folder: Path, *, steps: int) -> None:
    """Do what `--resume trainer.steps=…` would do: settings that may change are read anew at every start."""
    path = run_folder / "config.json"
    settings = json.loads(path.read_text())
    settings["trainer"]["steps"] = steps
    path.write_text(json.dumps(settings))


def _seconds(clock: str) -> int:
    total = 0
    for part in clock.replace("-", ":").split(":"):
        total = total * 60 + int(part)
    return total


if __name__ == "__main__":
    limits = "so many requeues by the limit itself, which Slurm looks for twice a minute; the others by a USR1"
    own: dict[str, dict[str, Any]] = {
        "--requeues": {"type": int, "help": "default 20, with --quick 2"},
        "--limits": {"type": int, "default": 2, "help": limits},
        "--apart": {"action": "store_true", "help": "the engine on a machine of its own (network namespaces)"},
        "overrides": {"nargs": "*", "help": "section.key=value"},
    }
    harness.run("requeue", measure, options=own)
