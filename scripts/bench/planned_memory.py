"""Compare the memory that `pipelinerl plan` foresees for the demo on a CPU with what a real demo takes.

    python -m scripts.bench.planned_memory --folder runs --steps 40

Every half second the proportional set size (PSS: shared pages divided among those who share them) of each process of the run is read,
and the shared memory apart; the highest sum over the run is compared with the plan's.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config.file import load_run
from pipelinerl.engine.kv import plan_kv
from pipelinerl.planning import memory
from pipelinerl.runtime.machine import memory_bytes

ROLES = {"pipelinerl.engine": "engine", "trainer": "trainer", "pipelinerl.rewards": "scorer", "orchestrator": "orchestrator"}
INTERVAL_S = 0.5


def descendants(pid: int) -> list[int]:
    """All processes under `pid`."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def role_of(pid: int, parents: dict[int, str]) -> str:
    """What a process is, by its command line; a process without a name of its own is its parent's."""
    words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    named = next((ROLES[word] for word in words if word in ROLES), None)
    parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    return named or parents.get(parent, "launcher and view")


def sample(root: int) -> dict[str, int]:
    """Bytes by role, now."""
    found: dict[str, int] = defaultdict(int)
    roles: dict[int, str] = {}
    for pid in (root, *descendants(root)):
        with contextlib.suppress(OSError):
            roles[pid] = role_of(pid, roles)
            lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:])
            shared = int(lines["Pss_Shmem"].split()[0])
            found[roles[pid]] += (int(lines["Pss"].split()[0]) - shared) << 10
            found["shared memory"] += shared << 10
    return dict(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path("runs"))
    parser.add_argument("--steps", type=int, default=40)
    given = parser.parse_args()
    command = [sys.executable, "-m", "pipelinerl", "demo", "--folder", str(given.folder), f"trainer.steps={given.steps}"]
    demo = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    highest: dict[str, int] = {}
    while demo.poll() is None:
        now = sample(demo.pid)
        if "engine" in now and sum(now.values()) > sum(highest.values()):
            highest = now
        time.sleep(INTERVAL_S)
    run = max(given.folder.glob("demo-*/config.json"), key=lambda path: path.stat().st_mtime).parent
    config = load_run(run)
    kv = plan_kv(config.model, config.engine, config.rollout, memory_bytes=memory_bytes(), on_cpu=True)
    planned = {
        part.what: part.num_bytes for part in memory.bill(config, memory.read_weights(config.model.path), method=method_of(config), kv=kv)
    }
    foreseen, taken = sum(planned.values()), sum(highest.values())
    print(
        json.dumps(
            {"planned": planned, "measured": highest, "planned_bytes": foreseen, "measured_bytes": taken, "error": foreseen / taken - 1},
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
