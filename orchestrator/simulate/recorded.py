"""What the journals and the ledger of a run hold that a world is fitted to (`calibrated`)."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import sqlite3
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.rules.pass_profile import least_squares
from orchestrator.simulate.stretches import Stretch
from orchestrator.simulate.world import USUAL, EngineWorld, Slowness, block_tokens_of
from pipelinerl.errors import DataError
from pipelinerl.observe.lines import read_journals, read_spans

_WORKING = ("forward_backward", "optimizer")


@dataclasses.dataclass(slots=True, kw_only=True)
class RunJournal:
    """What the journals hold that a fit reads."""

    loads: dict[int, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Reports of each engine's own journal, in order."""
    steps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    swaps: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    sleeps_s: list[float] = dataclasses.field(default_factory=list)
    """Seconds in which an engine fell asleep, where it shares its device with the trainer."""
    scorer: dict[str, Any] | None = None
    """The last report of the reward scorer."""
    prms: dict[str, list[dict[str, Any]]] = dataclasses.field(default_factory=dict)
    """Reports of each process reward model's own journal, in order."""
    prms_before: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    """Their last reports before what is read."""
    work: list[Stretch] = dataclasses.field(default_factory=list)
    """The trainer's work."""
    passes: dict[int, list[Stretch]] = dataclasses.field(default_factory=dict)
    """Each engine's passes without a break."""
    prm_work: dict[str, list[Stretch]] = dataclasses.field(default_factory=dict)
    """Each process reward model's batches without a break."""
    calls_s: list[float] = dataclasses.field(default_factory=list)
    """Seconds of single reward calls."""
    replies_s: list[float] = dataclasses.field(default_factory=list)
    """Seconds of single replies of the environment."""
    block_tokens: int = EngineWorld().block_tokens
    """Of the engines' KV caches."""

    def prm_sum(self, name: str) -> float:
        """Return by how much a counter of the process reward models' reports grew, all of them together; that of a process that was
        started again begins at 0.
        """
        ends = {process: reports[-1].get(name) or 0 for process, reports in self.prms.items()}
        begins = {process: report.get(name) or 0 for process, report in self.prms_before.items()}
        return float(sum(end - begin if (begin := begins.get(process, 0)) <= end else end for process, end in ends.items()))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRollouts:
    """What the ledger tells of rollouts."""

    lengths: dict[str, int]
    """Tokens of each that ended by itself or at its limit, by name."""
    truncated: frozenset[str] = frozenset()
    """Those of them that ended at their limit."""
    rewards: dict[str, float]
    issued: dict[int, list[tuple[float, int]]]
    """(Unix seconds, group) of what each engine was asked for."""
    resumed: dict[int, list[float]] = dataclasses.field(default_factory=dict)
    """Unix seconds at which each engine was asked to go on after an environment's reply."""
    rows: dict[int, int]
    """Rows of each step."""
    trained: dict[int, list[str]] = dataclasses.field(default_factory=dict)
    """Rollouts that each step trains."""
    completed: list[float] = dataclasses.field(default_factory=list)
    """Unix seconds at which rollouts came from engines."""
    answered: list[float] = dataclasses.field(default_factory=list)
    """Unix seconds at which scores and an environment's replies came."""
    waits_s: list[float]
    """From a completion until its score is booked."""
    group_size: int
    num_scored: int
    num_failed: int
    num_hopeless: int
    turns: dict[str, int]
    """Turns of each in `lengths`; empty where no environment replies."""
    replies: dict[int, int]
    """Replies of an environment in the rollouts that each step trains."""

    def unlimited(self, name: str, reply_tokens: float) -> float:
        """Return the tokens that a rollout would have had without a limit, as far as is known: one more than the limit, in which an
        environment's replies count, where it ended there.
        """
        return self.lengths[name] + (1 + reply_tokens * (self.turns.get(name, 1) - 1) if name in self.truncated else 0)


@dataclasses.dataclass(frozen=True, slots=True)
class RecordedRun:
    """What one run has recorded."""

    folder: Path
    journal: RunJournal
    rollouts: RunRollouts
    slowness: Slowness = USUAL
    """Of its devices, by which fits divide the seconds that work took."""

    @property
    def steps(self) -> list[dict[str, Any]]:
        """The steps but the first."""
        return self.journal.steps[1:]

    def given_tokens(self) -> tuple[float, float]:
        """Return the tokens of a prompt, and those of an environment's reply, from what trained samples did not sample themselves."""
        table = np.array([[step["num_samples"], self.rollouts.replies.get(step["step"], 0)] for step in self.steps], np.float64)
        others = np.array([step["num_tokens"] - step["num_trained_tokens"] for step in self.steps], np.float64)
        prompt, reply = least_squares(table, others)
        return max(1.0, float(prompt)), float(reply)


def read_run(folder: Path, until_s: float = math.inf, *, since_s: float = -math.inf, lead_s: float = 0.0) -> RecordedRun:
    """Read a run from `since_s` on, as it was at `until_s` (Unix seconds), and its rollouts from `lead_s` earlier on: steps train what was
    sampled before. Raises `DataError` where there is too little to learn from.
    """
    journal, rollouts = read_journal(folder, until_s, since_s=since_s), read_ledger(folder, until_s, since_s=since_s - lead_s)
    if len(journal.steps) < 2 or not rollouts.lengths:
        raise DataError(
            f"{folder}: {len(journal.steps)} steps and {len(rollouts.lengths)} rollouts are recorded; to learn from a run, it must have"
            " trained at least 2 steps"
        )
    return RecordedRun(folder, journal, rollouts)


def read_journal(run_folder: Path, until_s: float = math.inf, *, since_s: float = -math.inf) -> RunJournal:
    """Read the journals of a run from `since_s` on, as they were at `until_s` (Unix seconds)."""
    found = RunJournal()
    for line in read_journals(run_folder):
        if line["t"] > until_s:
            continue
        process = str(line.get("process", ""))
        match line["kind"]:
            case "run":
                found.block_tokens = block_tokens_of(line["config"]["engine"].get("options", {}))
            case kind if line["t"] < since_s:
                if kind == "load" and "num_trace_tokens" in line:
                    found.prms_before[process] = line
            case "load" if process.startswith("engine-") and "num_steps" in line:
                found.loads.setdefault(int(line["engine_id"]), []).append(line)
            case "load" if "num_scored" in line and "functions" in line:
                found.scorer = line
            case "load" if "num_trace_tokens" in line:
                found.prms.setdefault(process, []).append(line)
            case "step":
                found.steps.append(line)
            case "swap":
                found.swaps.append(line)
            case "asleep":
                found.sleeps_s.append(float(line["sleep_s"]))
            case _:
                pass
    for span in read_spans(run_folder):
        if span.end > until_s or span.start < since_s:
            continue
        if span.lane.startswith("trainer-0") and span.name in _WORKING:
            found.work.append((span.start, span.end))
        elif span.name == "forward":
            found.passes.setdefault(int(span.lane.partition("-")[2]), []).append((span.start, span.end))
        elif span.lane in found.prms:
            found.prm_work.setdefault(span.lane, []).append((span.start, span.end))
        elif span.name == "score" and span.count == 1:
            (found.replies_s if "/reply/" in span.lane else found.calls_s).append(span.end - span.start)
    return found


def read_ledger(run_folder: Path, until_s: float = math.inf, *, since_s: float = -math.inf) -> RunRollouts:
    """Read the ledger of a run from `since_s` on, as it was at `until_s`. Raises `DataError` where there is none."""
    lengths: dict[str, int] = {}
    truncated: set[str] = set()
    rewards: dict[str, float] = {}
    issued: dict[int, list[tuple[float, int]]] = {}
    resumed: dict[int, list[float]] = {}
    rows: dict[int, int] = {}
    trained: dict[int, list[str]] = {}
    ended: dict[str, float] = {}
    turns: dict[str, int] = {}
    replies: collections.Counter[int] = collections.Counter()
    completed: list[float] = []
    answered: list[float] = []
    waits_s: list[float] = []
    counts = {"failed": 0, "early_stop": 0}
    for kind, at_s, name, reason, reward, num_tokens, peer, step, num_rows in _events(run_folder, since_s, until_s):
        match kind:
            case "issued":
                issued.setdefault(int(peer.partition("-")[2]), []).append((at_s, int(name.partition("/")[0])))
            case "generated":
                ended[name] = at_s
                completed.append(at_s)
                if reason in ("stop", "length") and num_tokens:
                    lengths[name] = num_tokens
                    (truncated.add if reason == "length" else truncated.discard)(name)
            case "scored":
                answered.append(at_s)
                counts["failed"] += reward is None and not reason.startswith("stopped")
                if reward is not None:
                    rewards[name] = reward
                waits_s.append(at_s - ended.get(name, at_s))
            case "assigned":
                replies[step] += turns.get(name, 1) - 1
                trained.setdefault(step, []).append(name)
            case "closed":
                rows[step] = num_rows
            case "observed":
                answered.append(at_s)
                turns[name] = turns.get(name, 1) + (reason == "ok")
                if reason == "ok":
                    resumed.setdefault(int(peer.partition("-")[2]), []).append(at_s)
            case _:
                counts["early_stop"] += 1
    return RunRollouts(
        lengths=lengths,
        truncated=frozenset(truncated),
        rewards=rewards,
        issued=issued,
        resumed=resumed,
        rows=rows,
        trained=trained,
        completed=completed,
        answered=answered,
        waits_s=waits_s,
        group_size=max((int(name.partition("/")[2]) + 1 for name in lengths), default=1),
        num_scored=len(waits_s),
        num_failed=counts["failed"],
        num_hopeless=counts["early_stop"],
        turns={name: turns.get(name, 1) for name in lengths} if turns else {},
        replies=replies,
    )


def _events(run_folder: Path, since_s: float, until_s: float) -> list[tuple[Any, ...]]:
    """Return a ledger's events between two moments (Unix seconds), in order, as (kind, Unix seconds, and the columns selected below)."""
    path = run_folder / "ledger.sqlite"
    if not path.is_file():
        raise DataError(f"no ledger at {path}: the lengths of a run's rollouts are in it")
    with contextlib.closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as database:
        (offset_s,) = database.execute("SELECT json_extract(data, '$.unix_s') - t FROM events WHERE kind = 'began' ORDER BY seq").fetchone()
        return database.execute(
            "SELECT kind, t + ?1, rollout_id, reason, reward, num_tokens, peer, step, num_rows FROM events WHERE kind IN"
            " ('issued', 'generated', 'scored', 'assigned', 'closed', 'early_stop', 'observed') AND t + ?1 BETWEEN ?2 AND ?3 ORDER BY seq",
            (offset_s, since_s, until_s),
        ).fetchall()
