"""A world learned from runs: how fast engine and trainer were (`speeds`), how long everything else took there, from their journals, and
what rollouts were like, from the first one's ledger.

    policies   stage_s and pause_s of each swap, publish_s and publish_async_s of each step
    scores     seconds of each reward call (spans), else busy seconds over calls
    rollouts   tokens of each, likeness of siblings, rewards and turns, by the ledger

One run may tell little apart, so engine and trainer are fitted to all runs together, and an idle engine's staging is drawn from all of
them. What else is said of policies, scores and rollouts is the first one's. The first step is left out: a fresh process compiles.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.rules.pass_profile import Numbers
from orchestrator.simulate.draws import fixed, recorded
from orchestrator.simulate.recorded import RecordedRun, RunJournal, RunRollouts, read_run
from orchestrator.simulate.speeds import engine_of_runs, prm_of_runs, trainer_of_runs
from orchestrator.simulate.stretches import Stretches
from orchestrator.simulate.world import USUAL, ScoringWorld, Slowness, SyncWorld, World, block_tokens_of
from pipelinerl.config import Config

_ONE_BURST_S = 0.01
"""Groups begun within so many seconds waited for nothing but each other."""
_SPAN_GAP_S = 0.005
"""Two spans of passes may lie so many seconds apart though the engine was never idle."""
_FEWEST_REWARDS = 20
"""Completions that must have ended at their limit, and by themselves, to tell their rewards apart."""


def world_of_runs(
    config: Config,
    run_folders: Sequence[Path],
    *,
    until_s: float = math.inf,
    since_s: float = -math.inf,
    lead_s: float = 0.0,
    slowness: Sequence[Slowness] = (),
) -> World:
    """Return the world of one or several runs for a config, as `read_run` reads them.

    The first run tells what rollouts and scores are like, all of them how fast engine, trainer and process reward model are. `slowness`
    says of each run how slow its devices were; without it all were as fast as usual. Raises `DataError` where the journal or the ledger of
    one has too little to learn from.
    """
    runs = [
        dataclasses.replace(read_run(folder, until_s, since_s=since_s, lead_s=lead_s), slowness=slow)
        for folder, slow in zip(run_folders, slowness or [USUAL] * len(run_folders), strict=True)
    ]
    first, *_ = runs
    prompt_tokens, reply_tokens = first.given_tokens()
    engine, of_engine = engine_of_runs(runs)
    trainer, of_trainer = trainer_of_runs(runs)
    prm, of_prm = prm_of_runs(runs)
    mean, truncated_mean, spread = _rewards(first.rollouts)
    origin, speeds = f"run {first.folder.name}", " and ".join(f"run {run.folder.name}" for run in runs)
    return World(
        engine=dataclasses.replace(engine, block_tokens=block_tokens_of(config.engine.options)),
        trainer=trainer,
        sync=_sync(runs),
        scoring=dataclasses.replace(_scoring(first.journal, first.rollouts), reply_tokens=round(reply_tokens), **prm),
        admit_s=_admit_s(first.rollouts),
        prompt_tokens=fixed(prompt_tokens),
        lengths=recorded([first.rollouts.unlimited(name, reply_tokens) for name in first.rollouts.lengths]),
        likeness=_likeness(first.rollouts.lengths),
        reward_mean=mean,
        truncated_reward_mean=truncated_mean,
        reward_spread=spread,
        slowdowns={key: value for key, value in (of_engine | of_trainer | of_prm).items() if value > 0},
        origins={**dict.fromkeys(("engine", "trainer"), speeds), **dict.fromkeys(("sync", "scoring", "lengths", "rewards"), origin)},
    )


def _sync(runs: Sequence[RecordedRun]) -> SyncWorld:
    first, *_ = runs
    beside = [seconds for step in first.steps if (seconds := step["trainer"].get("publish_async_s")) is not None]
    swaps, was_idle = _swaps(first), _Idle(first)
    busy, idle = ([swap["stage_s"] for swap in swaps if was_idle(swap) is is_idle] for is_idle in (False, True))
    idle += [swap["stage_s"] for run in runs[1:] for swap in filter(_Idle(run), _swaps(run))]
    return SyncWorld(
        publish_s=0.0 if beside else statistics.median(step["trainer"].get("publish_s", 0.0) for step in first.steps),
        publish_beside_s=statistics.median(beside) if beside else 0.0,
        stage_s=recorded(busy or idle) if swaps else fixed(0.0),
        idle_stage_s=recorded(idle) if idle else None,
        pause_s=statistics.median(swap["pause_s"] for swap in swaps) if swaps else 0.0,
        sleep_s=statistics.median(first.journal.sleeps_s) if first.journal.sleeps_s else 0.0,
    )


def _swaps(run: RecordedRun) -> list[dict[str, Any]]:
    """Return the swaps after the first step; all of them where none came after it."""
    first_s = run.journal.steps[0]["t"]
    return [swap for swap in run.journal.swaps if swap["t"] > first_s and swap["stage_s"]] or run.journal.swaps


class _Idle:
    """Whether an engine had nothing to write when the staging of a swap began; without spans, whether it had nothing at the swap."""

    def __init__(self, run: RecordedRun) -> None:
        self._passes = {engine_id: Stretches(passes) for engine_id, passes in run.journal.passes.items()}

    def __call__(self, swap: dict[str, Any]) -> bool:
        if not (passes := self._passes.get(swap["engine_id"])):
            return not swap["num_running"]
        began_s = swap["t"] - swap["pause_s"] - swap["stage_s"]
        return not passes.within(began_s - _SPAN_GAP_S, began_s)


def _admit_s(rollouts: RunRollouts) -> float:
    """Return the mean seconds between the beginnings of two groups that were sent one right after the other."""
    began: dict[int, float] = {}
    for t, group in sorted(itertools.chain.from_iterable(rollouts.issued.values())):
        began.setdefault(group, t)
    between = [after - before for before, after in itertools.pairwise(began.values()) if after - before < _ONE_BURST_S]
    return statistics.fmean(between) if between else 0.0


def _scoring(journal: RunJournal, rollouts: RunRollouts) -> ScoringWorld:
    scorer = journal.scorer or {}
    mean_s = scorer["busy_s"] / scorer["num_scored"] if scorer.get("num_scored") else 0.0
    score_s = recorded(journal.calls_s) if len(journal.calls_s) >= 20 else fixed(mean_s)
    least_s = float(np.quantile(rollouts.waits_s, 0.1)) if rollouts.waits_s else 0.0
    typical_s = float(np.median(journal.calls_s)) if len(journal.calls_s) >= 20 else mean_s
    return ScoringWorld(
        score_s=score_s,
        group_score_s=fixed(mean_s),
        overhead_s=max(0.0, least_s - typical_s),
        failed_fraction=rollouts.num_failed / max(1, rollouts.num_scored),
        reply_s=recorded(journal.replies_s) if journal.replies_s else ScoringWorld().reply_s,
        turns=recorded(list(rollouts.turns.values())) if rollouts.turns else fixed(1.0),
        hopeless_fraction=rollouts.num_hopeless / max(1, rollouts.num_scored),
    )


def _rewards(rollouts: RunRollouts) -> tuple[float, float | None, float]:
    """Return the mean reward, between 0 and 1, of completions that end by themselves, and of those that end at their limit where both are
    known; and the spread of a Beta distribution with the variance that groups' means of the former have.
    """
    rewards = {name: min(1.0, max(0.0, reward)) for name, reward in rollouts.rewards.items()} or {"": 0.5}
    truncated = [reward for name, reward in rewards.items() if name in rollouts.truncated]
    truncated_mean = None
    if _FEWEST_REWARDS <= len(truncated) <= len(rewards) - _FEWEST_REWARDS:
        truncated_mean = statistics.fmean(truncated)
        rewards = {name: reward for name, reward in rewards.items() if name not in rollouts.truncated}
    mean, groups = statistics.fmean(rewards.values()), [group for group in _by_group(rewards) if len(group) > 1]
    whole = mean * (1 - mean)
    if whole < 1e-6 or len(groups) < 2:
        return mean, truncated_mean, 0.0
    part = statistics.fmean(1 / len(group) for group in groups)
    between = float(np.var([group.mean() for group in groups]))
    return mean, truncated_mean, float(np.clip((between / whole - part) / (1 - part), 0.0, 0.99))


def _likeness(lengths: dict[str, int]) -> float:
    """Return the correlation of siblings, by normal scores of their ranks."""
    names = list(lengths)
    if len(names) < 8:
        return 0.0
    ranks = np.argsort(np.argsort([lengths[name] for name in names], kind="stable"), kind="stable")
    normal = statistics.NormalDist()
    scores = {name: normal.inv_cdf((rank + 0.5) / len(names)) for name, rank in zip(names, ranks.tolist(), strict=True)}
    pairs = [(group.sum() ** 2 - np.square(group).sum(), len(group) * (len(group) - 1)) for group in _by_group(scores) if len(group) > 1]
    total = sum(num for _, num in pairs)
    return float(np.clip(sum(product for product, _ in pairs) / total, 0.0, 0.99)) if total else 0.0


def _by_group(values: dict[str, float] | dict[str, int]) -> list[Numbers]:
    groups: dict[str, list[float]] = {}
    for name, value in values.items():
        groups.setdefault(name.partition("/")[0], []).append(float(value))
    return [np.array(group) for group in groups.values()]
