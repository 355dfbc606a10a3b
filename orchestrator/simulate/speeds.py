"""How fast engine and trainer were in recorded runs.

    engine     (seconds between two reports, less those without a sequence and those of swaps)
                   = (passes f(sequences) + a tokens of context + p prompt tokens) (1 + sum of s x part of the time in which another worked)
    trainer    forward_backward_s of a step, less core_wait_s
                   = (r rows + (t computed tokens + q squares of samples) (1 - (1 - v) x part without a gradient))
                   (1 + sum of u x part of the trainer's time in which another worked)
               core_wait_s = e answers + k wakings + m seconds in which a process reward model worked + n seconds of the trainer's work
    process reward model    seconds between two reports with batches
                   = (b batches + g steps + h tokens) (1 + sum of w x part of them in which another worked)

Others are the trainer, engines and process reward models, each with an s, a u and a w of its own. Where several of them are of one kind,
which is not that of what they work beside, they count once (`cores`).

The trainer waits for its core where orchestrator, scorers and rewards share it: for each answer (a score, or an environment's reply) and
each time that they wake up (`interruptions`). The n seconds, which others of the machine take, count as its work. Runs of older versions do
not say how long it waited: they are taken to have waited as those beside them, or never where none says so.

The trainer's errors are relative: what makes a step longer makes a long one so many times as long. Each run's trainer has a speed of its
own, all of them 1 in the geometric mean: between two runs the machine may differ by more than what is beside the trainer changes, and
within one, steps with and without it tell that. One speed for all foretold two engines' lead over the trainer a quarter too low.

f is linear between 0 and powers of two of sequences, as far as reports tell of them, and falls nowhere. Coefficients are least squares,
none below 0. s, u and w are searched from 0 to 3, one after another until none changes; v from 1/4, a forward pass beside a forward pass
that is computed twice and a backward pass of twice its operations, to 1.

One run may tell little apart: where an engine always has 64 sequences, a pass and its tokens cost the same whatever each of them is. So the
coefficients are fitted to all runs together.
"""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from orchestrator.rules.pass_profile import Numbers, least_squares
from orchestrator.simulate.interruptions import wakings
from orchestrator.simulate.recorded import RecordedRun, RunRollouts
from orchestrator.simulate.stretches import Stretch, Stretches
from orchestrator.simulate.world import EngineWorld, TrainerWorld
from pipelinerl.errors import DataError

_FEWEST_WITHOUT = 0.005
"""Part of the tokens that must be without a gradient to tell what they take."""
_FEWEST_REPORTS = 5
"""Reports that must tell of a pass with a number of sequences."""
_FEWEST_OF_BATCHES = 10
"""Reports that must tell of a process reward model's batches: twice as many as there are numbers to fit."""
_FORWARD_PARTS = np.linspace(0.25, 1.0, 16)
_SLOWDOWNS = np.arange(0.0, 3.01, 0.05)
_MOST_ROWS = 8192
"""Reports of engines, or of process reward models, to which one fit holds itself: more tell hardly more, and take minutes."""
_LEAST_USED = 0.05
"""Part of a KV cache that must be used to tell how much it holds."""
_LEAST_CHANGE = 0.002
"""Part by which no run's speed changes any more where a fit has come to rest."""
_MOST_TURNS = 20
"""Turns after which a fit ends anyway: slowdowns are searched in steps, between which it might go to and fro."""
_MOST_WAITED = 0.9
"""Part of the time at most for which a trainer is taken to wait beside a process reward model that works on its core."""
_LEAST_SPREAD = 0.02
"""Standard deviation that the number of others at work must have to tell what they slow down."""


def engine_of_runs(runs: Sequence[RecordedRun]) -> tuple[EngineWorld, dict[str, float]]:
    """Return an engine, and how much longer a pass lasts beside one of each other part, as `World.slowdowns`.

    Its KV cache is that of the first run whose reports tell: how much one holds hangs on a run's settings. Raises `DataError`.
    """
    most = max(1, _MOST_ROWS // max(1, sum(len(run.journal.loads) for run in runs)))
    table = np.array([row for run in runs for row in _reports(run, most=most)])
    if len(table) < 3:
        raise DataError("the engines' journals hold fewer than 3 reports with passes: run longer, so that there is something to fit")
    busy_s, num_passes, num_tokens, num_prompt_tokens, context, *beside = table.T
    points = _points(num_tokens / num_passes)
    reached = _near(num_tokens / num_passes, points)[:, ::-1].cumsum(1)[:, ::-1]  # how far each number is beyond the point before each
    parts = np.column_stack([reached * num_passes[:, None], num_prompt_tokens, context])
    _, coefficients, slowdowns = _fit(busy_s, parts, np.column_stack(beside))
    *rises, prompt_s, context_s = coefficients.tolist()
    world = EngineWorld(
        pass_s=tuple(zip(points, itertools.accumulate(rises), strict=True)),
        prefill_token_s=prompt_s,
        kv_token_s=context_s,
        kv_tokens=next((room for run in runs if (room := _room(run)) is not None), math.inf),
    )
    return world, dict(zip(("engine/trainer", "engine/engine", "engine/prm"), slowdowns, strict=True))


def _room(run: RecordedRun) -> float | None:
    """Return the tokens that an engine's KV cache holds, by what its sequences hold in a pass and the part of the cache that it says is
    used; None where no report tells. Siblings hold the whole blocks of their prompt once.
    """
    block_tokens = run.journal.block_tokens
    shared_tokens = run.given_tokens()[0] // block_tokens * block_tokens
    rooms: list[float] = []
    for engine_id, loads in run.journal.loads.items():
        groups = [group for _, group in run.rollouts.issued.get(engine_id, [])]
        again = 1 - len(set(groups)) / len(groups) if groups else 0.0  # part of the sequences whose prompt a sibling has brought
        for before, after in itertools.pairwise(loads):
            num_passes, num_tokens, context = (
                after.get(name, 0) - before.get(name, 0) for name in ("num_steps", "num_tokens", "num_context_tokens")
            )
            if num_passes >= 3 and context and (used := after["kv_used"] or 0.0) > _LEAST_USED:
                rooms.append((context - again * num_tokens * shared_tokens) / num_passes / used)
    return statistics.median(rooms) if rooms else None


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


def _reports(run: RecordedRun, *, most: int = 1 << 20) -> Iterator[tuple[float, float, float, float, float, float, float, float]]:
    """Yield what lies between two reports of an engine, or between every second or third one where it has more than `most`.

    Each is (seconds with sequences, passes, sampled tokens, prompt tokens, tokens of context that passes read, and how many trainers, other
    engines and process reward models worked beside them).
    """
    journal = run.journal
    prompt_tokens, reply_tokens = run.given_tokens()
    part = journal.block_tokens / 2  # of a block, which no cache is found for
    written = prompt_tokens + statistics.fmean(run.rollouts.lengths.values()) / 2
    resumed_tokens = reply_tokens + (written if written < journal.block_tokens else part)
    first_s = journal.steps[0]["t"]
    work, prm_work = Stretches(journal.work), Stretches(itertools.chain.from_iterable(journal.prm_work.values())).merged()
    passes = {engine_id: Stretches(each) for engine_id, each in journal.passes.items()}
    for engine_id, loads in journal.loads.items():
        asked = np.array([t for t, _ in run.rollouts.issued.get(engine_id, [])])
        groups = [group for _, group in run.rollouts.issued.get(engine_id, [])]
        resumed = np.array(run.rollouts.resumed.get(engine_id, []))
        swaps = sorted(
            (swap["t"], swap["pause_s"], swap["num_recomputed_tokens"]) for swap in journal.swaps if swap["engine_id"] == engine_id
        )
        swapped_s = [t for t, *_ in swaps]
        for before, after in itertools.pairwise(loads[:: 1 + (len(loads) - 1) // most]):
            num_passes, start, end = after["num_steps"] - before["num_steps"], before["t"], after["t"]
            if num_passes < 3 or start < first_s:
                continue
            meanwhile = swaps[bisect.bisect(swapped_s, start) : bisect.bisect(swapped_s, end)]
            busy_s = end - start - (after["idle_s"] - before["idle_s"]) - sum(pause_s for _, pause_s, _ in meanwhile)
            low, high = np.searchsorted(asked, (start, end))
            num_prompts = len(set(groups[low:high]))
            prompts = num_prompts * prompt_tokens + (high - low - num_prompts) * min(prompt_tokens, part)
            prompts += resumed_tokens * float(np.diff(np.searchsorted(resumed, (start, end)))[0])
            prompts += sum(num for *_, num in meanwhile)
            own = (passes[engine_id].within(start, end) if engine_id in passes else []) or [(start, end)]
            others = sum(_overlap(each, own) for key, each in passes.items() if key != engine_id)
            context = after.get("num_context_tokens", 0) - before.get("num_context_tokens", 0)
            beside = _overlap(work, own), others, _overlap(prm_work, own)
            yield busy_s / run.slowness.engine, num_passes, after["num_tokens"] - before["num_tokens"], float(prompts), context, *beside


def _overlap(work: Stretches, stretches: Sequence[Stretch]) -> float:
    """Return the part of some stretches that others cover."""
    return work.covered_s(stretches) / sum(end - start for start, end in stretches)


def _fit(seconds: Numbers, parts: Numbers, beside: Numbers) -> tuple[float, Numbers, tuple[float, ...]]:
    """Fit seconds = (parts @ coefficients) * (1 + beside @ slowdowns); return the error and both. A column of `beside` that never varies
    has none.
    """
    grids = [_SLOWDOWNS if column.std() > _LEAST_SPREAD else np.zeros(1) for column in beside.T]
    slowdowns, coefficients, least = np.zeros(len(grids)), np.zeros(parts.shape[1]), math.inf
    while True:
        before = slowdowns
        for one, grid in enumerate(grids):
            for much in grid:
                tried = slowdowns.copy()
                tried[one] = much
                factor = 1 + beside @ tried
                found = least_squares(parts * factor[:, None], seconds)
                error = float(np.square((parts @ found) * factor - seconds).sum()) * (1 + 1e-3 * float(tried.sum()))
                if error < least:
                    least, coefficients, slowdowns = error, found, tried
        if np.array_equal(slowdowns, before):
            return least, coefficients, tuple(slowdowns.tolist())


def _fit_within(runs: np.ndarray, parts: Numbers, beside: Numbers) -> tuple[float, Numbers, tuple[float, ...]]:
    """Fit 1 = (parts @ coefficients) * (1 + beside @ slowdowns) * speed of the row's run, as `_fit` does; `runs` are numbers of runs.

    The mean logarithm of the speeds is 0. Speeds, and all else, are fitted in turns, each to the least error that the other allows.
    """
    speeds, fit = np.ones(len(runs)), _fit(np.ones(len(runs)), parts, beside)
    for _ in range(_MOST_TURNS):
        _, coefficients, slowdowns = fit
        before, usual = speeds, (parts @ coefficients) * (1 + beside @ slowdowns)
        found = np.bincount(runs, usual) / np.bincount(runs, np.square(usual))
        speeds = (found / np.exp(np.log(found).mean()))[runs]
        if np.abs(speeds / before - 1).max() < _LEAST_CHANGE:
            break
        fit = _fit(np.ones(len(runs)), parts * speeds[:, None], beside)
    return fit


class _Step(NamedTuple):
    """What a step of a run took; or, of all steps, what each took."""

    seconds: Any
    """Of forward and backward passes."""
    waited: Any
    """Part of these in which the trainer waited for its core; NaN where the run does not say."""
    rows: Any
    computed: Any
    """Tokens that the trainer computed."""
    squares: Any
    """Of samples' tokens."""
    without: Any
    """Part of the tokens without a gradient."""
    rest_s: Any
    """Seconds of all else."""
    engines: Any
    """Part of the trainer's time in which any engine worked."""
    prm: Any
    """The same of process reward models."""
    answers: Any
    """Answers that were booked in a second of its work."""
    wakings: Any
    """Times that the orchestrator woke up, in a second of its work."""


def trainer_of_runs(runs: Sequence[RecordedRun]) -> tuple[TrainerWorld, dict[str, float]]:
    """Return the trainer, and how much longer it works beside one of each other part, as `World.slowdowns`. Raises `DataError`."""
    found = [list(_steps(run)) for run in runs]
    if not any(found):
        raise DataError("the steps of the journal say nothing of forward_backward_s: the run is older than this version can learn from")
    steps, number = _Step(*np.array([step for each in found for step in each]).T), np.repeat(np.arange(len(found)), [*map(len, found)])
    waits = np.column_stack([steps.answers, steps.wakings, steps.prm, np.ones(len(number))])
    told = np.isfinite(steps.waited)
    learned = least_squares(waits[told], steps.waited[told])
    answer_s, wake_s, prm_part, other_part = learned.tolist()
    own_part = 1 + other_part - np.where(told, steps.waited, waits @ learned)
    seconds, beside = steps.seconds * own_part, np.column_stack([steps.engines, steps.prm])
    fits: dict[float, tuple[float, Numbers, tuple[float, ...]]] = {}
    for part in _FORWARD_PARTS.tolist() if steps.without.mean() > _FEWEST_WITHOUT else [1.0]:
        computed = 1 - (1 - part) * steps.without
        parts = np.column_stack([steps.rows, steps.computed * computed, steps.squares * computed])
        fits[part] = _fit_within(number, parts / seconds[:, None], beside)
    forward_part = min(fits, key=lambda part: fits[part][0])
    _, (row_s, token_s, square_s), (engine, prm) = fits[forward_part]
    saved = [seconds for run in runs for step in run.steps if (seconds := step["trainer"].get("checkpoint_s"))]
    world = TrainerWorld(
        row_s=float(row_s),
        token_s=float(token_s),
        square_s=float(square_s),
        forward_part=forward_part,
        answer_s=answer_s,
        wake_s=wake_s,
        step_s=max(0.0, float((steps.rest_s * own_part).mean())) / (1 + float(beside.mean(0) @ (engine, prm))),
        checkpoint_s=statistics.median(saved) if saved else 0.0,
    )
    return world, {"trainer/engine": engine, "trainer/prm": (1 + prm) / (1 - min(prm_part, _MOST_WAITED)) - 1}


def _steps(run: RecordedRun) -> Iterator[_Step]:
    """Yield what each step but the first took."""
    prompt_tokens, reply_tokens = run.given_tokens()
    rollouts, slowness = run.rollouts, run.slowness.trainer
    prm_work = Stretches(itertools.chain.from_iterable(run.journal.prm_work.values())).merged()
    passes = Stretches(itertools.chain.from_iterable(run.journal.passes.values())).merged()
    work, answers, wakes = Stretches(run.journal.work), np.sort(rollouts.answered), wakings(rollouts.completed, rollouts.answered)
    for before, after in itertools.pairwise(run.journal.steps):
        seconds = after["trainer"].get("forward_backward_s")
        if not seconds or after["t"] <= before["t"]:
            continue
        own = work.within(before["t"], after["t"])
        own_s = sum(end - start for start, end in own) / slowness or math.inf
        apart = sum(after["trainer"].get(f"{name}_s") or 0.0 for name in ("forward_backward", "wait", "publish", "checkpoint"))
        yield _Step(
            seconds=seconds / slowness,
            waited=after["trainer"].get("core_wait_s", math.nan) / seconds,
            rows=rollouts.rows.get(after["step"], 1),
            computed=_num_computed(after, rollouts, reply_tokens),
            squares=_squares(after, rollouts, prompt_tokens, reply_tokens),
            without=after["trainer"].get("num_tokens_without_gradient", 0.0) / after["num_tokens"],
            rest_s=(after["t"] - before["t"] - apart) / slowness,
            engines=_overlap(passes, own) if own else 0.0,
            prm=_overlap(prm_work, own) if own else 0.0,
            answers=_num_within(answers, own) / own_s,
            wakings=_num_within(wakes, own) / own_s,
        )


def _num_within(times: Numbers, stretches: Sequence[Stretch]) -> int:
    """Return how many of some moments, in order, lie in stretches."""
    before = np.searchsorted(times, np.array(stretches, np.float64).reshape(-1, 2))
    return int((before[:, 1] - before[:, 0]).sum())


def _num_computed(step: dict[str, Any], rollouts: RunRollouts, reply_tokens: float = 0.0) -> float:
    """Return the tokens that the trainer computes in a step: a prompt once for the siblings of a row, and groups are cut by rows' ends."""
    replied = reply_tokens * rollouts.replies.get(step["step"], 0)
    given = step["num_tokens"] - step["num_trained_tokens"] - replied
    return float(step["num_trained_tokens"] + replied + given * _num_prompts(step, rollouts) / step["num_samples"])


def _squares(step: dict[str, Any], rollouts: RunRollouts, prompt_tokens: float, reply_tokens: float) -> float:
    """Return the sum of the squares of a step's samples, that of a prompt once for the siblings of a row."""
    names = rollouts.trained.get(step["step"], ())
    if not names:
        return 0.0
    sizes = [prompt_tokens + rollouts.lengths.get(name, 0) + reply_tokens * (rollouts.turns.get(name, 1) - 1) for name in names]
    return sum(size**2 for size in sizes) - (step["num_samples"] - _num_prompts(step, rollouts)) * prompt_tokens**2


def _num_prompts(step: dict[str, Any], rollouts: RunRollouts) -> int:
    """Return the prompts that the trainer computes in a step."""
    groups = 1 + (step["num_samples"] - 1) // rollouts.group_size
    return min(step["num_samples"], groups + rollouts.rows.get(step["step"], 1) - 1)


def prm_of_runs(runs: Sequence[RecordedRun]) -> tuple[dict[str, float], dict[str, float]]:
    """Return fields of `ScoringWorld` of the process reward model, and how much longer its batches last, as `World.slowdowns`.

    Where few reports tell the number of batches, and none do in runs of older versions, a token's seconds are all that is known.
    """
    asked = [run for run in runs if run.journal.prm_sum("num_trace_tokens")]
    if not asked:
        return {}, {}
    num_tokens, busy_s, num_steps = (
        sum(run.journal.prm_sum(name) for run in asked) for name in ("num_trace_tokens", "busy_s", "num_steps")
    )
    num_between = num_steps - sum(run.rollouts.num_scored for run in asked)  # the last step of a rollout ends with it
    told = {"prm_token_s": busy_s / num_tokens, "prm_step_tokens": num_tokens / num_between if num_between > 0 else 0.0}
    table = np.array([row for run in asked for row in _scored(run, most=_MOST_ROWS // len(asked))])
    if len(table) < _FEWEST_OF_BATCHES:
        return told, {}
    seconds, batches, steps, tokens, *beside = table.T
    _, coefficients, slowdowns = _fit(seconds, np.column_stack([batches, steps, tokens]), np.column_stack(beside))
    told |= dict(zip(("prm_batch_s", "prm_step_s", "prm_token_s"), coefficients.tolist(), strict=True))
    return told, dict(zip(("prm/trainer", "prm/engine"), slowdowns, strict=True))


def _scored(run: RecordedRun, *, most: int) -> Iterator[tuple[float, float, float, float, float, float]]:
    """Yield what lies between two reports of a process reward model after the first step, or between every second or third one where it
    has more than `most`: (seconds of batches, batches, steps, tokens, and how many trainers and engines worked beside them).
    """
    journal = run.journal
    names = ("busy_s", "num_batches", "num_steps", "num_trace_tokens")
    work, passes = Stretches(journal.work), Stretches(itertools.chain.from_iterable(journal.passes.values())).merged()
    for process, reports in journal.prms.items():
        scoring = Stretches(journal.prm_work.get(process, []))
        for before, after in itertools.pairwise(reports[:: 1 + (len(reports) - 1) // most]):
            seconds, batches, steps, tokens = (after.get(name, 0) - before.get(name, 0) for name in names)
            own = scoring.within(before["t"], after["t"])
            if batches > 0 and own and before["t"] > journal.steps[0]["t"]:
                yield seconds / run.slowness.prm, batches, steps, tokens, _overlap(work, own), _overlap(passes, own)
