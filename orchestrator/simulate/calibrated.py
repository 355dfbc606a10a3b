"""A world fitted to runs: how long everything took there, from their journals, and how long rollouts were, from the first one's ledger.

    engine     (seconds between two reports, less those without a sequence and those of swaps)
                   = (passes f(sequences) + a tokens of context + p prompt tokens) (1 + s x part of the time in which the trainer worked)
    trainer    forward_backward_s of a step = (r rows + (t computed tokens + q squares of samples) (1 - (1 - v) x part without a gradient))
                   (1 + u x part of the trainer's time in which an engine worked)
    policies   stage_s and pause_s of each swap, publish_s and publish_async_s of each step
    scores     seconds of each reward call (spans), else busy seconds over calls
    rollouts   tokens of each, likeness of siblings, rewards and turns, by the ledger

Coefficients are least squares, none below 0; s and u are searched from 0 to 3, v from 0.2 to 1. f is linear between powers of two of
sequences, as far as reports tell of them. The first step is left out: a fresh process compiles.

One run may tell little apart: where an engine always has 64 sequences, a pass and its tokens cost the same whatever each of them is. So the
coefficients of engine and trainer are fitted to all runs together, and an idle engine's staging is drawn from all of them. What else is
said of policies, scores and rollouts is the first one's.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.rules.pass_profile import Numbers, least_squares
from orchestrator.simulate.draws import fixed, recorded
from orchestrator.simulate.recorded import RunJournal, RunRollouts, read_journal, read_ledger
from orchestrator.simulate.world import EngineWorld, ScoringWorld, SyncWorld, TrainerWorld, World, block_tokens_of
from pipelinerl.config import Config
from pipelinerl.errors import DataError

_ONE_BURST_S = 0.01
"""Groups begun within so many seconds waited for nothing but each other."""
_SPAN_GAP_S = 0.005
"""Two spans of passes may lie so many seconds apart though the engine was never idle."""
_FEWEST_WITHOUT = 0.005
"""Part of the tokens that must be without a gradient to tell what they take."""
_FEWEST_REWARDS = 20
"""Completions that must have ended at their limit, and by themselves, to tell their rewards apart."""
_FORWARD_PARTS = np.arange(0.2, 1.01, 0.05)
_FEWEST_REPORTS = 5
"""Reports that must tell of a pass with a number of sequences."""
_SLOWDOWNS = np.arange(0.0, 3.01, 0.05)


@dataclasses.dataclass(frozen=True, slots=True)
class _Run:
    """What one run has recorded."""

    folder: Path
    journal: RunJournal
    rollouts: RunRollouts

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


def world_of_runs(config: Config, run_folders: Sequence[Path], *, until_s: float = math.inf) -> World:
    """Return the world of one or several runs for a config, as it was known at `until_s` (Unix seconds).

    The first run tells what rollouts and scores are like, all of them how fast engine and trainer are. Raises `DataError` where the journal
    or the ledger of one has too little to learn from.
    """
    runs = [_read(folder, until_s) for folder in run_folders]
    first, *_ = runs
    prompt_tokens, reply_tokens = first.given_tokens()
    engine, beside_trainer, beside_engine = _engine(runs, block_tokens=block_tokens_of(config))
    trainer, slowed = _trainer(runs)
    slowdowns = {"engine/trainer": beside_trainer, "engine/engine": beside_engine, "trainer/engine": slowed}
    mean, truncated_mean, spread = _rewards(first.rollouts)
    origin, speeds = f"run {first.folder.name}", " and ".join(f"run {run.folder.name}" for run in runs)
    return World(
        engine=engine,
        trainer=trainer,
        sync=_sync(runs),
        scoring=dataclasses.replace(_scoring(first.journal, first.rollouts), reply_tokens=round(reply_tokens)),
        admit_s=_admit_s(first.rollouts),
        prompt_tokens=fixed(prompt_tokens),
        lengths=recorded([first.rollouts.unlimited(name, reply_tokens) for name in first.rollouts.lengths]),
        likeness=_likeness(first.rollouts.lengths),
        reward_mean=mean,
        truncated_reward_mean=truncated_mean,
        reward_spread=spread,
        slowdowns={key: value for key, value in slowdowns.items() if value > 0},
        origins={**dict.fromkeys(("engine", "trainer"), speeds), **dict.fromkeys(("sync", "scoring", "lengths", "rewards"), origin)},
    )


def _read(folder: Path, until_s: float) -> _Run:
    journal, rollouts = read_journal(folder, until_s), read_ledger(folder, until_s)
    if len(journal.steps) < 2 or not rollouts.lengths:
        raise DataError(
            f"{folder}: {len(journal.steps)} steps and {len(rollouts.lengths)} rollouts are recorded; to learn from a run, it must have"
            " trained at least 2 steps"
        )
    return _Run(folder, journal, rollouts)


# --- engines ---


def _engine(runs: Sequence[_Run], *, block_tokens: int) -> tuple[EngineWorld, float, float]:
    """Return an engine, and how much longer a pass lasts beside the trainer and beside one other engine."""
    table = np.array([row for run in runs for row in _reports(run, block_tokens=block_tokens)])
    if len(table) < 3:
        raise DataError("the engines' journals hold fewer than 3 reports with passes: run longer, so that there is something to fit")
    num_passes, num_sequences = table[:, 1], table[:, 2] / table[:, 1]
    points = _points(num_sequences)
    parts = np.column_stack([_near(num_sequences, points) * num_passes[:, None], table[:, 3:5]])
    _, coefficients, (beside_trainer, beside_engine) = _fit(table[:, 0], parts, table[:, 5:7])
    *pass_s, prompt_s, context_s = coefficients.tolist()
    kv = [
        load["num_running"] * (run.given_tokens()[0] + statistics.fmean(run.rollouts.lengths.values()) / 2) / load["kv_used"]
        for run in runs
        for loads in run.journal.loads.values()
        for load in loads
        if (load.get("kv_used") or 0) > 0.05 and load["num_running"]
    ]
    world = EngineWorld(
        pass_s=tuple(zip(points, pass_s, strict=True)),
        prefill_token_s=prompt_s,
        kv_token_s=context_s,
        block_tokens=block_tokens,
        kv_tokens=statistics.median(kv) if kv else float("inf"),
    )
    return world, beside_trainer, beside_engine


def _points(num_sequences: Numbers) -> list[float]:
    """Return the numbers of sequences between which a pass's seconds are linear: 0 and those powers of two of which enough reports tell."""
    points = [0.0, *(2.0**power for power in range(math.ceil(math.log2(max(2.0, num_sequences.max()))) + 1))]
    while len(points) > 2:
        told = _near(num_sequences, points).sum(0)[1:-1]
        if told.min() >= _FEWEST_REPORTS:
            break
        del points[1 + int(told.argmin())]
    return points


def _near(num_sequences: Numbers, points: list[float]) -> Numbers:
    """Return the weight of each point in the value at each number, where it is linear between two points: [numbers, points]."""
    return np.column_stack([np.interp(num_sequences, points, one) for one in np.eye(len(points))])


def _reports(run: _Run, *, block_tokens: int) -> Iterator[tuple[float, float, float, float, float, float, float]]:
    """Yield what lies between two reports of an engine.

    Each is (seconds with sequences, passes, sampled tokens, prompt tokens, tokens of context that passes read, part of the seconds beside
    the trainer, other engines beside them).
    """
    journal = run.journal
    prompt_tokens, reply_tokens = run.given_tokens()
    part = block_tokens / 2  # of a block, which no cache is found for
    written = prompt_tokens + statistics.fmean(run.rollouts.lengths.values()) / 2
    resumed_tokens = reply_tokens + (written if written < block_tokens else part)
    first_s = journal.steps[0]["t"]
    for engine_id, loads in journal.loads.items():
        asked = np.array([t for t, _ in run.rollouts.issued.get(engine_id, [])])
        groups = [group for _, group in run.rollouts.issued.get(engine_id, [])]
        swaps = [swap for swap in journal.swaps if swap["engine_id"] == engine_id]
        for before, after in itertools.pairwise(loads):
            num_passes, start, end = after["num_steps"] - before["num_steps"], before["t"], after["t"]
            if num_passes < 3 or start < first_s:
                continue
            busy_s = end - start - (after["idle_s"] - before["idle_s"]) - sum(swap["pause_s"] for swap in swaps if start < swap["t"] <= end)
            low, high = np.searchsorted(asked, (start, end))
            num_prompts = len(set(groups[low:high]))
            prompts = num_prompts * prompt_tokens + (high - low - num_prompts) * min(prompt_tokens, part)
            prompts += resumed_tokens * sum(start < t <= end for t in run.rollouts.resumed.get(engine_id, ()))
            prompts += sum(swap["num_recomputed_tokens"] for swap in swaps if start < swap["t"] <= end)
            own = _within(journal.passes.get(engine_id, ()), start, end) or [(start, end)]
            beside = _overlap(journal.work, own)
            others = sum(_overlap(passes, own) for key, passes in journal.passes.items() if key != engine_id)
            context = after.get("num_context_tokens", 0) - before.get("num_context_tokens", 0)
            yield busy_s, num_passes, after["num_tokens"] - before["num_tokens"], float(prompts), context, beside, others


def _within(spans: Sequence[tuple[float, float]], start: float, end: float) -> list[tuple[float, float]]:
    return [(max(start, since), min(end, until)) for since, until in spans if since < end and until > start]


def _overlap(work: Sequence[tuple[float, float]], stretches: Sequence[tuple[float, float]]) -> float:
    """Return the part of some stretches that spans cover."""
    covered_s = sum(max(0.0, min(end, until) - max(start, since)) for start, end in stretches for since, until in work)
    return covered_s / sum(end - start for start, end in stretches)


def _fit(seconds: Numbers, parts: Numbers, beside: Numbers) -> tuple[float, Numbers, tuple[float, ...]]:
    """Fit seconds = (parts @ coefficients) * (1 + beside @ slowdowns); return the error and both. A column of `beside` that never varies
    has none.
    """
    varies = [column.std() > 0.02 for column in beside.T]
    grids = [_SLOWDOWNS if one else np.zeros(1) for one in varies]
    best: tuple[float, Numbers, tuple[float, ...]] | None = None
    for slowdowns in itertools.product(*grids):
        factor = 1 + beside @ np.array(slowdowns)
        coefficients = least_squares(parts * factor[:, None], seconds)
        error = float(np.square((parts @ coefficients) * factor - seconds).sum()) * (1 + 1e-3 * float(sum(slowdowns)))
        if best is None or error < best[0]:
            best = error, coefficients, tuple(float(one) for one in slowdowns)
    assert best is not None
    return best


# --- the others ---


def _trainer(runs: Sequence[_Run]) -> tuple[TrainerWorld, float]:
    """Return the trainer, and how much longer it works beside one engine."""
    table = np.array([row for run in runs for row in _steps(run)])
    if not len(table):
        raise DataError("the steps of the journal say nothing of forward_backward_s: the run is older than this version can learn from")
    seconds, num_rows, computed, without, beside, rest_s = (
        table[:, 0],
        table[:, 1:2],
        table[:, 2:4],
        table[:, 4:5],
        table[:, 5:6],
        table[:, 6],
    )
    fits = {
        part: _fit(seconds, np.hstack([num_rows, computed * (1 - (1 - part) * without)]), beside)
        for part in (_FORWARD_PARTS.tolist() if without.mean() > _FEWEST_WITHOUT else [1.0])
    }
    forward_part = min(fits, key=lambda part: fits[part][0])
    _, (row_s, token_s, square_s), (slowed,) = fits[forward_part]
    saved = [seconds for run in runs for step in run.steps if (seconds := step["trainer"].get("checkpoint_s"))]
    world = TrainerWorld(
        row_s=float(row_s),
        token_s=float(token_s),
        square_s=float(square_s),
        forward_part=forward_part,
        step_s=max(0.0, float(rest_s.mean())) / (1 + slowed * float(beside.mean())),
        checkpoint_s=statistics.median(saved) if saved else 0.0,
    )
    return world, slowed


def _steps(run: _Run) -> Iterator[tuple[float, float, float, float, float, float, float]]:
    """Yield what each step but the first took.

    Each is (forward and backward seconds, rows, computed tokens, squares of samples, part without a gradient, engines that worked beside
    the trainer, seconds of the rest).
    """
    prompt_tokens, reply_tokens = run.given_tokens()
    for before, after in itertools.pairwise(run.journal.steps):
        seconds = after["trainer"].get("forward_backward_s")
        if seconds is None or after["t"] <= before["t"]:
            continue
        work = _within(run.journal.work, before["t"], after["t"])
        beside = sum(_overlap(passes, work) for passes in run.journal.passes.values()) if work else 0.0
        apart = sum(after["trainer"].get(f"{name}_s") or 0.0 for name in ("forward_backward", "wait", "publish", "checkpoint"))
        without = after["trainer"].get("num_tokens_without_gradient", 0.0) / after["num_tokens"]
        num_rows, rollouts = run.rollouts.rows.get(after["step"], 1), run.rollouts
        num_computed = _num_computed(after, rollouts, reply_tokens)
        squares = _squares(after, rollouts, prompt_tokens, reply_tokens)
        yield seconds, num_rows, num_computed, squares, without, beside, after["t"] - before["t"] - apart


def _num_computed(step: dict[str, Any], rollouts: RunRollouts, reply_tokens: float = 0.0) -> float:
    """Return the tokens that the trainer computes in a step: a prompt once for the siblings of a row, and groups are cut by rows' ends."""
    replied = reply_tokens * rollouts.replies.get(step["step"], 0)
    given = step["num_tokens"] - step["num_trained_tokens"] - replied
    return float(step["num_trained_tokens"] + replied + given * _num_prompts(step, rollouts) / step["num_samples"])


def _squares(step: dict[str, Any], rollouts: RunRollouts, prompt_tokens: float, reply_tokens: float) -> float:
    """Return the sum of the squares of a step's samples, that of a prompt once for the siblings of a row."""
    names = rollouts.trained.get(step["step"], ())
    sizes = [prompt_tokens + rollouts.lengths.get(name, 0) + reply_tokens * (rollouts.turns.get(name, 1) - 1) for name in names]
    return sum(size**2 for size in sizes) - (step["num_samples"] - _num_prompts(step, rollouts)) * prompt_tokens**2


def _num_prompts(step: dict[str, Any], rollouts: RunRollouts) -> int:
    """Return the prompts that the trainer computes in a step."""
    groups = 1 + (step["num_samples"] - 1) // rollouts.group_size
    return min(step["num_samples"], groups + rollouts.rows.get(step["step"], 1) - 1)


def _sync(runs: Sequence[_Run]) -> SyncWorld:
    first, *_ = runs
    beside = [seconds for step in first.steps if (seconds := step["trainer"].get("publish_async_s")) is not None]
    swaps = _swaps(first)
    busy, idle = ([swap["stage_s"] for swap in swaps if _was_idle(first, swap) is is_idle] for is_idle in (False, True))
    idle += [swap["stage_s"] for run in runs[1:] for swap in _swaps(run) if _was_idle(run, swap)]
    return SyncWorld(
        publish_s=0.0 if beside else statistics.median(step["trainer"].get("publish_s", 0.0) for step in first.steps),
        publish_beside_s=statistics.median(beside) if beside else 0.0,
        stage_s=recorded(busy or idle) if swaps else fixed(0.0),
        idle_stage_s=recorded(idle) if idle else None,
        pause_s=statistics.median(swap["pause_s"] for swap in swaps) if swaps else 0.0,
        sleep_s=statistics.median(first.journal.sleeps_s) if first.journal.sleeps_s else 0.0,
    )


def _swaps(run: _Run) -> list[dict[str, Any]]:
    """Return the swaps after the first step; all of them where none came after it."""
    first_s = run.journal.steps[0]["t"]
    return [swap for swap in run.journal.swaps if swap["t"] > first_s and swap["stage_s"]] or run.journal.swaps


def _was_idle(run: _Run, swap: dict[str, Any]) -> bool:
    """Return whether the engine had nothing to write when staging began; without spans, whether it had nothing at the swap."""
    if not (passes := run.journal.passes.get(swap["engine_id"])):
        return not swap["num_running"]
    began_s = swap["t"] - swap["pause_s"] - swap["stage_s"]
    return not _within(passes, began_s - _SPAN_GAP_S, began_s)


def _admit_s(rollouts: RunRollouts) -> float:
    """Return the mean seconds between the beginnings of two groups that were sent one right after the other."""
    began: dict[int, float] = {}
    for t, group in sorted(itertools.chain.from_iterable(rollouts.issued.values())):
        began.setdefault(group, t)
    between = [after - before for before, after in itertools.pairwise(began.values()) if after - before < _ONE_BURST_S]
    return statistics.fmean(between) if between else 0.0


def _scoring(journal: RunJournal, rollouts: RunRollouts) -> ScoringWorld:
    scorer, prm = journal.scorer or {}, journal.prm or {}
    mean_s = scorer["busy_s"] / scorer["num_scored"] if scorer.get("num_scored") else 0.0
    score_s = recorded(journal.calls_s) if len(journal.calls_s) >= 20 else fixed(mean_s)
    least_s = float(np.quantile(rollouts.waits_s, 0.1)) if rollouts.waits_s else 0.0
    typical_s = float(np.median(journal.calls_s)) if len(journal.calls_s) >= 20 else mean_s
    num_prm_tokens = prm.get("num_trace_tokens") or 0
    return ScoringWorld(
        score_s=score_s,
        group_score_s=fixed(mean_s),
        overhead_s=max(0.0, least_s - typical_s),
        failed_fraction=rollouts.num_failed / max(1, rollouts.num_scored),
        reply_s=recorded(journal.replies_s) if journal.replies_s else ScoringWorld().reply_s,
        turns=recorded(list(rollouts.turns.values())) if rollouts.turns else fixed(1.0),
        prm_token_s=prm.get("busy_s", 0.0) / num_prm_tokens if num_prm_tokens else 0.0,
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
