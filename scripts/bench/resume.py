"""Measures what a resumed run pays for all that happened before: seconds from opening its ledger to all that the orchestrator starts from.

Ledgers are written through the product's own ledger, as by runs of the demo's shape: groups of 8, steps of 32 groups, a checkpoint every 20
steps of which two are kept, 3 groups in flight when the run was killed. Bytes are those of the file, without and with the bodies of the
groups that stay recorded. The checker reads everything, and may take as long as there is to read. One core.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np

from orchestrator.ledger.ledger import Ledger
from orchestrator.ledger.rollouts import summary_of
from orchestrator.ledger.snapshot import Snapshot, commit_of, read_snapshot
from pipelinerl.messages import UNSAMPLED, Finish, Outcome, Prompt, Sample, Score, ScoredTrajectory, TerminalStatus, Trajectory
from pipelinerl.storage.checkpoint_folder import Manifest, name_of, write_manifest
from scripts.bench import harness

GROUP_SIZE, GROUPS_PER_STEP, SAVE_EVERY, RECORDED = 8, 32, 20, 1024
NUM_TOKENS = 32
"""Of a trajectory. More would weigh down the bodies alone, whose number is bounded."""
SETTINGS = {"group_size": GROUP_SIZE, "groups_per_step": GROUPS_PER_STEP, "max_staleness": 3, "num_steps": 10**6, "max_row_tokens": 10**6}


def measure(arguments: Any) -> harness.Measured:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    small, large = rows = [
        harness.steadily(lambda size=size: _measure(size)) for size in ((10_000, 100_000) if arguments.quick else (100_000, 1_000_000))
    ]
    after = f"after {large['rollouts']:,} rollouts"
    return harness.Measured(
        rows=rows,
        goals=[
            harness.at_most(
                f"resume {after} over {small['rollouts']:,}", large["resume s"] / small["resume s"], 1.5, work=harness.Work.CPU
            ),
            harness.at_most(f"seconds to resume {after}", large["resume s"], 2.0, **harness.SECONDS),
        ],
        notes=["resume: the median of five openings, each with `read_snapshot`; what is in flight and recorded is the same in every row"],
    )


def _measure(num_rollouts: int) -> harness.Row:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "ledger.sqlite")
        num_steps = write(path, num_rollouts)
        _write_checkpoint(Path(folder), path, version=num_steps // SAVE_EVERY * SAVE_EVERY)
        num_bytes = path.stat().st_size
        resume_s, snapshot = harness.median_s(lambda: resume(path), repetitions=5)
        assert snapshot.num_done == num_steps
        check = functools.partial(subprocess.run, capture_output=True, text=True, check=False)
        check_s, checked = harness.median_s(lambda: check([sys.executable, "-m", "pipelinerl.checker", folder]), repetitions=1)
        assert "every promise was kept" in checked.stdout, checked.stdout + checked.stderr
        bodies = _bodies(path)
    return {
        "rollouts": num_rollouts,
        "steps": num_steps,
        "file MB": num_bytes / 1e6,
        "bytes a rollout": num_bytes / num_rollouts,
        "without bodies": (num_bytes - bodies) / num_rollouts,
        "resume s": resume_s,
        "check s": check_s,
        "check us a rollout": 1e6 * check_s / num_rollouts,
    }


def resume(path: Path) -> Snapshot:
    """Read what an orchestrator reads when it starts."""
    with contextlib.closing(Ledger(path, keep_groups=RECORDED)) as ledger:
        return read_snapshot(ledger)


def write(path: Path, num_rollouts: int) -> int:
    """Fill a ledger; return how many steps are done, of which the last few stand in no checkpoint."""
    num_steps = num_rollouts // _PER_STEP
    ledger, commits = Ledger(path, keep_groups=RECORDED), dict[int, str]()
    ledger.begin(SETTINGS, now_s=0.0, unix_s=0.0)
    for step in range(num_steps):
        commits[step + 1] = _train(ledger, step)
        if (step + 1) % SAVE_EVERY == 0:
            ledger.record_checkpoint(step + 1, commits[step + 1], now_s=float(step), oldest=step + 1 - SAVE_EVERY)
        ledger.flush()
    for group_id in range(num_steps * GROUPS_PER_STEP, num_steps * GROUPS_PER_STEP + 3):
        _admit(ledger, group_id, version=num_steps)
    ledger.close()
    return num_steps


def _write_checkpoint(run_folder: Path, path: Path, *, version: int) -> None:
    """The manifest of the newest, without which the checker would miss it."""
    names = [f"{number // _PER_STEP}/{number // GROUP_SIZE}/{number % GROUP_SIZE}" for number in range(version * _PER_STEP)]
    digest = sum(int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") for name in names) % 2**64
    with contextlib.closing(Ledger(path)) as ledger:
        commit = commit_of(ledger, version - 1) or ""
    folder = run_folder / "checkpoints" / name_of(version)
    folder.mkdir(parents=True)
    manifest = Manifest(version=version, commit=commit, num_samples=len(names), samples=f"{digest:016x}", files={})
    write_manifest(folder, manifest)


def _train(ledger: Ledger, step: int) -> str:
    now_s, groups = float(step), []
    for group_id in range(step * GROUPS_PER_STEP, (step + 1) * GROUPS_PER_STEP):
        members = _admit(ledger, group_id, version=step)
        for member in members:
            ledger.record_completion(member.trajectory, now_s=now_s)
            ledger.record_score(member, now_s=now_s)
        samples = [Sample(trajectory=one.trajectory, reward=1.0, advantages=_ADVANTAGES) for one in members]
        ledger.assign(group_id, samples, step=step, now_s=now_s)
        ledger.pack(samples, step=step, row=len(groups), now_s=now_s)
        groups.append(samples)
    num_samples = _PER_STEP
    num_tokens = num_samples * int(_TRAINS.sum())
    commit = ledger.close_step(step, num_rows=len(groups), num_tokens=num_tokens, num_samples=num_samples, now_s=now_s)
    with ledger.transaction():
        for sample in (sample for samples in groups for sample in samples):
            summary = summary_of(sample.trajectory, reward=1.0, step=step)
            ledger.end(sample.trajectory.rollout_id, TerminalStatus.TRAINED, now_s=now_s, summary=summary)
        ledger.record("done", now_s=now_s, step=step)
    return commit


def _admit(ledger: Ledger, group_id: int, *, version: int) -> list[ScoredTrajectory]:
    prompt = Prompt(prompt_id=f"0:{group_id}", text="123456=", token_ids=np.arange(8, dtype=np.int32))
    names = ledger.admit(group_id, prompt, group_size=GROUP_SIZE, position=(0, group_id + 1), now_s=float(version))
    versions = np.where(_TRAINS, version, UNSAMPLED).astype(np.int32)
    members = []
    for sibling, name in enumerate(names):
        ledger.issue(name, attempt=0, engine_id=0, version=version, now_s=float(version))
        trajectory = Trajectory(
            rollout_id=name,
            group_id=group_id,
            sibling=sibling,
            attempt=0,
            prompt=prompt,
            token_ids=_IDS,
            loss_mask=_TRAINS,
            logprobs=_ADVANTAGES,
            versions=versions,
            finish=Finish.STOP,
            admitted_at=0.0,
            finished_at=0.0,
        )
        score = Score(rollout_id=name, attempt=0, outcome=Outcome.OK, reward=1.0, components={})
        members.append(ScoredTrajectory(trajectory=trajectory, score=score))
    return members


def _bodies(path: Path) -> int:
    """Bytes of what stays recorded of the newest groups, however long the run."""
    with contextlib.closing(Ledger(path)) as ledger:
        lengths = ("length(scored)", "trajectories"), ("length(advantages)", "samples"), ("length(prompt)", "groups")
        return sum(ledger.store.read(f"SELECT coalesce(sum({what}), 0) FROM {table}")[0][0] for what, table in lengths)


_PER_STEP = GROUP_SIZE * GROUPS_PER_STEP
_IDS = np.arange(NUM_TOKENS, dtype=np.int32)
_TRAINS = np.arange(NUM_TOKENS) >= 8
_ADVANTAGES = np.zeros(NUM_TOKENS, np.float32)

if __name__ == "__main__":
    harness.run("resume", measure)
