#!/usr/bin/env python
"""Does a run on a Ray cluster live through what is killed? The demo under `pipelinerl ray`, with real vLLM and the real trainer.

A Ray of its own, with a token: a head without room, and nodes that are `ray start` processes of this machine. One has orchestrator, scorer
and trainer, another the engine; STRICT_SPREAD keeps them apart. Every few steps something is killed: the engine's process; the engine's
node, every process of it at once; the trainer's node. Then the command itself is ended by Ctrl-C, and then by SIGKILL: nothing of the run
may stay, and `--resume` goes on. Then the run goes on to its last step, and is judged from outside: journal, logs, the checker's verdict on
the ledger, and what the cluster has left.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.observe.lines import read_journal
from scripts.bench import harness
from scripts.bench.demo_runs import prepare, warm_start
from tests.ray.cluster import RayCluster, ray_cluster

STEPS = 4
"""Between two kills."""
CPUS = 2
PATIENCE_S = 300.0
_LEFT = (
    "import ray, sys; ray.init(address=sys.argv[1], log_to_driver=False, configure_logging=False); print(ray.available_resources()['CPU'])"
)


def measure(arguments: Any) -> harness.Measured:
    with tempfile.TemporaryDirectory() as folder:
        settings = prepare(Path(folder) / "runs")
        overrides = [] if arguments.quick else [warm_start(settings, "sft.steps=100")]
        with ray_cluster() as cluster:
            for _ in range(3):
                cluster.add_node(cpus=CPUS)
            return _measure(cluster, settings, [*overrides, *arguments.overrides])


def _measure(cluster: RayCluster, settings: Path, overrides: list[str]) -> harness.Measured:
    job = [
        f"trainer.steps={6 * STEPS}",
        "checkpoint.every=4",
        "evaluation.every=0",
        "engine.cores=[]",
        "trainer.cores=[]",
        "run.name=over-ray",
    ]
    job += [f'ray.address="{cluster.address}"', 'ray.strategy="STRICT_SPREAD"', "ray.engine_nodes=1", f"ray.cpus_per_node={CPUS}"]
    log = cluster.folder / "driver.log"

    def start(*options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "pipelinerl", "ray", str(settings), *job, *overrides, *options]
        with open(log, "ab") as output:
            return subprocess.Popen(command, env=cluster.environment, stdout=output, stderr=output)

    drivers = [start()]
    try:
        return _kill_and_judge(cluster, drivers, start, settings.parent, log)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{log.read_text()}") from None
    finally:
        for driver in drivers:
            driver.kill()
            driver.wait()


def _kill_and_judge(
    cluster: RayCluster,
    drivers: list[subprocess.Popen[bytes]],
    start: Callable[..., subprocess.Popen[bytes]],
    runs: Path,
    log: Path,
) -> harness.Measured:
    rows: list[harness.Row] = []
    _wait(lambda: any(runs.glob("over-ray-*/journal/orchestrator.jsonl")), "the run to begin", drivers)
    (run_folder,) = runs.glob("over-ray-*")

    def after(what: str, strike: Callable[[], None]) -> None:
        before = len(_steps(run_folder))
        _wait(lambda: len(_steps(run_folder)) >= before + STEPS - 1, f"steps before {what}", drivers)
        before, began = _steps(run_folder)[-1], time.monotonic()
        strike()
        _wait(lambda: _steps(run_folder)[-1] > before, f"a step after {what}", drivers)
        rows.append(
            {"killed": what, "at step": before, "s to the next step": time.monotonic() - began, "attempts": len(_attempts(run_folder))}
        )
        print(rows[-1], flush=True)

    def kill_node_of(peer: str) -> None:
        cluster.kill(cluster.node_of(_process(run_folder, peer)))
        cluster.add_node(cpus=CPUS)

    def end_command(number: int, expected: int) -> None:
        drivers[-1].send_signal(number)
        code = drivers[-1].wait(PATIENCE_S)
        assert code == expected, f"`pipelinerl ray` ended with {code}, expected {expected}"
        end = time.monotonic() + PATIENCE_S
        while left := _alive(run_folder):
            assert time.monotonic() < end, f"{len(left)} processes stay: {left}"
            time.sleep(0.2)
        drivers.append(start("--resume"))

    after("the engine's process", lambda: os.kill(_process(run_folder, "engine-0"), signal.SIGKILL))
    after("the engine's node", lambda: kill_node_of("engine-0"))
    after("the trainer's node", lambda: kill_node_of("trainer-0"))
    after("the command, by Ctrl-C", lambda: end_command(signal.SIGINT, 0))
    after("the command, by SIGKILL", lambda: end_command(signal.SIGKILL, -signal.SIGKILL))
    code = drivers[-1].wait(PATIENCE_S)
    checked = subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(run_folder)], capture_output=True, text=True, check=False)
    left = subprocess.run(
        [sys.executable, "-c", _LEFT, cluster.address], env=cluster.environment, capture_output=True, text=True, check=False
    )
    told = (run_folder / "logs" / "launcher.log").read_text()
    goals = [
        harness.at_most("exit code", float(code), 0),
        harness.at_most("promises broken", float(checked.returncode), 0),
        harness.at_least("last step", max(_steps(run_folder)) + 1, 6 * STEPS),
        harness.at_least("cores given back", float(left.stdout or -1), 3.0 * CPUS),
        harness.at_most("processes left", float(len(_alive(run_folder))), 0),
        harness.at_most("attempts", len(_attempts(run_folder)), 4),
        harness.at_least("nodes named as lost", told.count(" is lost: "), 2),
    ]
    return harness.Measured(rows=rows, goals=goals, notes=[*checked.stdout.splitlines(), *told.splitlines(), log.read_text()[-600:]])


def _attempts(run_folder: Path) -> list[Path]:
    return list((run_folder / "logs").glob("attempt-*"))


def _steps(run_folder: Path) -> list[int]:
    return [line["step"] for line in read_journal(run_folder / "journal" / "orchestrator.jsonl") if line["kind"] == "step"]


def _process(run_folder: Path, peer: str) -> int:
    return int((run_folder / "processes" / peer).read_text().split()[1])


def _alive(run_folder: Path) -> list[str]:
    """Command lines of processes that name the run folder."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().decode(errors="replace")
        except OSError:
            continue
        found += [words] if str(run_folder) in words else []
    return found


def _wait(is_so: Callable[[], bool], what: str, drivers: list[subprocess.Popen[bytes]]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not is_so():
        assert time.monotonic() < end, f"waited {PATIENCE_S:g} s for {what}"
        assert drivers[-1].poll() is None, f"`pipelinerl ray` ended with {drivers[-1].returncode} before {what}"
        time.sleep(0.2)


if __name__ == "__main__":
    harness.run("ray_nodes", measure, works=(), options={"overrides": {"nargs": "*", "help": "section.key=value"}})
