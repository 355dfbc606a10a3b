"""One long rollout through everything, in real processes: does what it costs grow with its tokens, or faster?

A random model of one layer writes two completions that end at `rollout.max_tokens` alone. A real vLLM engine tells of them in chunks of 32
tokens, a process reward model scores their steps meanwhile, a reward their text; once both are in the ledger every process of the run is
killed at once, and `--resume` goes on from what was recorded: nothing is generated again. Two trainer ranks share each row (context
parallelism), and one step is trained. Counted are the tokens that engine, process reward model and trainer computed, and the bytes of
ledger and journals; the bytes on the wires by the same run among simulated peers, whose messages go through the real codec.

A goal is the growth of a token's cost from the shortest rollout to the longest: 1 is linear, and what is quadratic grows as the rollout.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from pipelinerl.observe.lines import read_journals
from pipelinerl.runtime.process import ancestors
from scripts.bench import harness
from tests.sim.long_context import bytes_of
from tests.tiny_models import make_endless, make_prm

MOST_GROWTH = 1.1
GAUGES_S = 1.5
"""After the completions, so that every process has written its gauges once more."""
DEADLINE_S = 900.0
"""Longest wait for the completions of the longest rollouts."""
REWARD = """def share(completion: str) -> float:
    return completion.count("a") / (1 + len(completion))
"""


def measure(arguments: Any) -> harness.Measured:
    sizes = (256, 1024) if arguments.quick else (2048, 32768)
    found = harness.Measured(notes=["two rollouts of one group; one layer, 40 k parameters, float32; trainer: context = 2"])
    with tempfile.TemporaryDirectory() as folder:
        for size in sizes:
            found.rows.append({"tokens": size} | _real(size, Path(folder, f"run-{size}")) | _simulated(size, Path(folder, f"sim-{size}")))
    short, long = found.rows
    for name in list(short)[1:]:
        if name.endswith(("MB", "computed")):
            if not short[name]:
                found.notes.append(f"{name}: nothing was counted in the short run, so its growth is not known")
                continue
            growth = long[name] / short[name] / (long["tokens"] / short["tokens"])
            found.goals.append(harness.at_most(f"growth of a token's {name}", growth, MOST_GROWTH))
    found.goals.append(harness.at_most("rollouts generated again after the kill", sum(row["again"] for row in found.rows), 0))
    return found


def _simulated(num_tokens: int, folder: Path) -> harness.Row:
    """Bytes on the wires between the orchestrator and its peers."""
    found = bytes_of(num_tokens, folder)
    names = {"engine": "engine", "scorer-0": "scorer", "scorer-1": "PRM", "trainer": "trainer"}
    return {f"{name} MB": sum(size for pair, size in found.items() if who in pair) / 1e6 for who, name in names.items()}


def _real(num_tokens: int, folder: Path) -> harness.Row:
    """A run that is killed and resumed."""
    settings = _prepare(num_tokens, folder)
    begin = time.monotonic()
    run_folder = _kill_once_generated(settings, folder)
    killed_s = time.monotonic() - begin
    subprocess.run([sys.executable, "-m", "pipelinerl", "run", str(settings), "--resume"], check=True, cwd=folder)
    subprocess.run([sys.executable, "-m", "pipelinerl.checker", str(run_folder)], check=True)
    lines = list(read_journals(run_folder))
    trained = max(line["num_trained_tokens"] for line in lines if line["kind"] == "step")  # 0 where it was done before the kill
    assert trained == 2 * num_tokens, f"{trained} tokens trained, expected both rollouts whole"
    return {
        "generated s": killed_s,
        "resumed s": time.monotonic() - begin - killed_s,
        "engine computed": _of_ledger(run_folder, "sum(num_tokens)", "generated"),
        "PRM computed": _sum_of_lives(lines, "num_computed", of="prm_id"),
        "trainer computed": trained,
        "ledger MB": (run_folder / "ledger.sqlite").stat().st_size / 1e6,
        "journal MB": sum(path.stat().st_size for path in (run_folder / "journal").glob("*")) / 1e6,
        "again": _of_ledger(run_folder, "count(*)", "issued") - 2,
    }


def _prepare(num_tokens: int, folder: Path) -> Path:
    folder.mkdir()
    context = num_tokens + 64
    make_endless(folder / "model", context=context)
    make_prm(folder / "prm", context=2 * context)
    (folder / "rewards.py").write_text(REWARD)
    (folder / "rows.jsonl").write_text(json.dumps({"prompt": "write: "}) + "\n")
    settings = folder / "run.toml"
    settings.write_text(f"""
[run]
name = "long"
folder = "{folder}"
[model]
path = "{folder / "model"}"
dtype = "float32"
[data]
source = "{folder / "rows.jsonl"}"
[rollout]
group_size = 2
max_tokens = {num_tokens}
[[reward]]
function = "{folder / "rewards.py"}:share"
[prm]
path = "{folder / "prm"}"
dtype = "float32"
tag = "#"
separator = "e"
max_steps = 64
[algorithm]
name = "process_grpo"
[engine]
max_running = 2
[batch]
groups_per_step = 1
max_tokens = {context}
[pipeline]
mode = "sync"
[evaluation]
every = 0
[trainer]
steps = 1
ranks = 2
parallel = {{ context = 2 }}
""")
    return settings


def _kill_once_generated(settings: Path, folder: Path) -> Path:
    """Start the run, and kill all of it once both completions are in the ledger; return its folder."""
    command = [sys.executable, "-m", "pipelinerl", "run", str(settings)]
    run = subprocess.Popen(command, cwd=folder, start_new_session=True)
    deadline = time.monotonic() + DEADLINE_S
    while not (found := [path.parent for path in folder.glob("long*/ledger.sqlite")]) or _of_ledger(found[0], "count(*)", "scored") < 2:
        if run.poll() is not None or time.monotonic() > deadline:
            run.kill()
            raise SystemExit(f"the run of {settings} generated nothing; its output stands above")
        time.sleep(0.02)
    time.sleep(GAUGES_S)
    for process_id in [run.pid, *_of_run(run.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process_id, signal.SIGKILL)
    run.wait()
    return found[0]


def _of_run(launcher: int) -> list[int]:
    """Return the processes that descend from the launcher."""
    everybody = [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]
    return [process_id for process_id in everybody if launcher in ancestors(process_id)]


def _of_ledger(run_folder: Path, what: str, kind: str) -> int:
    """Return an aggregate over the ledger's entries of a kind; 0 while it is being made."""
    with contextlib.closing(sqlite3.connect(f"file:{run_folder / 'ledger.sqlite'}?mode=ro", uri=True)) as database:
        try:
            return database.execute(f"SELECT {what} FROM events WHERE kind = ?", (kind,)).fetchone()[0] or 0
        except sqlite3.OperationalError:
            return 0


def _sum_of_lives(lines: list[dict[str, Any]], name: str, *, of: str) -> int:
    """Return what a peer counted, over all its processes: each begins at 0."""
    total = last = 0
    for line in lines:
        if line["kind"] == "load" and of in line and name in line:
            total, last = total + (last if line[name] < last else 0), line[name]
    return total + last


if __name__ == "__main__":
    harness.run("long_context", measure)
