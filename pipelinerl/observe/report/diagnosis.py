"""The part that limits the run, by how much, and what to change; with the arithmetic a reader can check.

Exactly one part is named. The rule, from top to bottom, on the steady stretch of the run (`measures`):

1. The trainer hardly waits: it is the limit. Where most of its own work is writing policies, that writing is (`SWAP`).
2. The trainer waits, and the scoring slots are busy nearly all the time: `SCORING`.
3. The trainer waits, and pauses of the engines explain at least half of that wait: `SWAP`.
4. The trainer waits, and engines stand without a request too, or half empty because admission is closed: neither half is slow, they
   may not overlap: `ADMISSION`.
5. The trainer waits, and engines work all the time: `GENERATION`.

The faster half idles by 1 - min(R, T) / max(R, T), where R and T are the tokens per second that each half could do if it never waited.
"""

from __future__ import annotations

import dataclasses
import enum
import math

from pipelinerl.observe.fold.rows import Alarm
from pipelinerl.observe.report.arithmetic import Finding, findings_of, share
from pipelinerl.observe.report.measures import Measures, measure
from pipelinerl.observe.report.reading import Tables
from pipelinerl.observe.report.units import milliseconds, percent, plural, quantity

HARDLY = 0.1
"""A half that waits for less than this part of the time counts as working. Smaller names noise; larger hides a tenth of a run."""
SATURATED = 0.85
"""Scoring slots busy for more than this part of the time are the limit; the rest is the way to and from them."""
PAUSES_EXPLAIN = 0.5
"""Part of the trainer's wait that the engines' pauses must account for before swapping is named instead of generation."""
HALF_EMPTY = 0.5
"""Part of the sequence slots that admission must keep empty before it is named. Engines decode nearly as fast with a few slots free."""

CACHE_IS_FULL, CACHE_HAS_ROOM = 0.9, 0.6
"""Part of a KV cache in use from which on more sequences do not fit, and up to which raising the number of slots is worth a try."""


class Limiter(enum.StrEnum):
    """The part that limits the run."""

    GENERATION = "generation"
    """Engines work all the time and the trainer waits for them."""
    SCORING = "scoring"
    """Reward calls are made as fast as the slots allow, and the trainer waits for them."""
    TRAINING = "training"
    """The trainer works all the time; engines could give more."""
    SWAP = "swap"
    """Writing policies or changing to them takes the time."""
    ADMISSION = "admission"
    """Both halves wait for each other: the mode or the staleness bound keeps them from overlapping."""
    UNKNOWN = "unknown"
    """The journals do not say."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Diagnosis:
    """The verdict and what it rests on."""

    limiter: Limiter
    verdict: str
    """The limit and its size, in one or two sentences."""
    advice: str
    """The change to make."""
    findings: tuple[Finding, ...]
    trainer_wait_fraction: float | None = None
    engine_wait_fraction: float | None = None
    learning: tuple[Alarm, ...] = ()
    """The causes that stop learning: the alarms that hold at the end, each with its figure and what to change."""
    factor: float | None = None
    """The speed-up if the limiting part were not there; None where that cannot be told."""


def diagnose(tables: Tables) -> Diagnosis:
    """Name the limiting part of a run."""
    measures = measure(tables)
    if measures is None:
        verdict = "No optimizer step was completed, so there is nothing to compare."
        return Diagnosis(limiter=Limiter.UNKNOWN, verdict=verdict, advice="", findings=(), learning=tables.alarms)
    limiter = _limiter(measures)
    factor = _factor(measures, limiter)
    return Diagnosis(
        limiter=limiter,
        verdict=_verdict(measures, limiter, factor),
        advice=" ".join(filter(None, (_advice(measures, limiter, factor, tables), _roles(tables)))),
        findings=findings_of(measures),
        trainer_wait_fraction=measures.trainer_fraction(measures.trainer_wait_s),
        engine_wait_fraction=measures.engine_fraction(measures.engine_idle_s),
        learning=tables.alarms,
        factor=factor,
    )


def _limiter(measures: Measures) -> Limiter:
    trainer_waits = measures.trainer_fraction(measures.trainer_wait_s)
    if trainer_waits is None:
        return Limiter.UNKNOWN
    if trainer_waits < HARDLY:
        publish_s, compute_s = measures.trainer_publish_s or 0.0, measures.trainer_compute_s or 0.0
        return Limiter.SWAP if publish_s > compute_s else Limiter.TRAINING
    if (measures.scoring_fraction or 0.0) >= SATURATED:
        return Limiter.SCORING
    if (measures.engine_fraction(measures.engine_pause_s) or 0.0) >= PAUSES_EXPLAIN * trainer_waits:
        return Limiter.SWAP
    is_held = (measures.empty_fraction or 0.0) >= HALF_EMPTY
    if is_held or (measures.engine_fraction(measures.engine_idle_s) or 0.0) >= HARDLY:
        return Limiter.ADMISSION
    return Limiter.GENERATION


def _factor(measures: Measures, limiter: Limiter) -> float | None:
    """Speed-up at most, were the limiting part free: until the next part works without waiting."""
    trainer_waits = measures.trainer_fraction(measures.trainer_wait_s) or 0.0
    engines_wait = measures.engine_fraction(measures.engine_idle_s)
    match limiter:
        case Limiter.GENERATION:
            working = 1 - trainer_waits
        case Limiter.TRAINING:
            working = None if engines_wait is None else 1 - engines_wait
        case Limiter.SCORING | Limiter.ADMISSION:
            working = max(1 - trainer_waits, 1 - (engines_wait or 0.0))
        case Limiter.SWAP:
            paused, wrote = measures.engine_fraction(measures.engine_pause_s), measures.trainer_fraction(measures.trainer_publish_s)
            free = max(paused or 0.0, wrote or 0.0)
            working = max(1 - free, 1 - trainer_waits) if trainer_waits >= HARDLY else 1 - free
        case Limiter.UNKNOWN:
            working = None
    return 1 / max(working, 0.01) if working is not None else None


def _verdict(measures: Measures, limiter: Limiter, factor: float | None) -> str:
    engine_time = measures.num_engines * measures.window_s
    trainer = f"the trainer waited {share(measures.trainer_wait_s, measures.window_s)} for micro-batches"
    engines = f"engines stood without a request for {share(measures.engine_idle_s, engine_time, of='engine time')}"
    gain = f", at most {factor:.2f} times the present speed" if factor is not None and factor >= 1.05 else ""
    match limiter:
        case Limiter.GENERATION:
            return f"Generation is the limit: {trainer}, while {engines}. The trainer could take more{gain}."
        case Limiter.TRAINING:
            room = _room_of_engines(measures, gain)
            return f"{'Training is the limit' if room else 'The halves are nearly in balance'}: {trainer}, while {engines}. {room}".rstrip()
        case Limiter.SCORING:
            busy = percent(measures.scoring_fraction)
            slots = f"its slots were inside reward calls for {busy} of the time"
            return f"Scoring is the limit: {slots}, and {trainer}. Both halves could do more{gain}."
        case Limiter.SWAP:
            paused = f"engines stood still in swaps for {share(measures.engine_pause_s, engine_time, of='engine time')}"
            wrote = f"the trainer spent {share(measures.trainer_publish_s, measures.window_s)} writing policies"
            return f"Changing weights is the limit: {paused}, {wrote}, and {trainer}. Without that time the run could go faster{gain}."
        case Limiter.ADMISSION:
            empty = f", their slots {percent(measures.empty_fraction)} empty while admission was closed" if measures.empty_fraction else ""
            return (
                f"Neither half is slow; they wait for each other: {trainer}, and {engines}{empty}. Overlapped they could go faster{gain}."
            )
        case Limiter.UNKNOWN:
            return "The journals do not say how long the trainer waited, so no part can be named."


def _room_of_engines(measures: Measures, gain: str) -> str:
    """The speed that engines could add beside a trainer that hardly waits; empty where they have nothing to spare either."""
    if measures.engine_idle_s is None:
        return "What the engines could give is not recorded."
    if gain:
        return f"Engines could give more{gain}."
    used, slots = measures.mean_running, measures.num_sequence_slots
    if used is not None and slots and used < 0.7 * slots:
        return f"They had room left: on average they decoded {quantity(used)} of {slots} sequences."
    return ""


def _advice(measures: Measures, limiter: Limiter, factor: float | None, tables: Tables) -> str:
    match limiter:
        case Limiter.GENERATION:
            return _advice_for_generation(measures, factor or 1.0, tables)
        case Limiter.TRAINING:
            if advice := _advice_on_cores(measures, tables):
                return advice
            if full := _full_machine(measures, tables):
                return f"{full}: a larger machine, a smaller model or fewer tokens a step would help, another rank would not."
            if factor is None:
                return "More or faster trainer ranks (trainer.ranks)."
            if factor < 1.05:
                return "Nothing to move: a faster run needs more of both halves."
            fewer = max(1, math.floor(measures.num_engines / factor))
            less = f", or fewer engines: {fewer} would do" if fewer < measures.num_engines else ""
            return f"More or faster trainer ranks: {_scaled(measures.num_ranks, factor)} (trainer.ranks){less}."
        case Limiter.SCORING:
            slots = measures.num_scoring_slots or 1
            return f"More scoring slots: {_scaled(slots, factor or 1.0)} (scorer.slots), or faster reward functions."
        case Limiter.SWAP:
            mean_s = (measures.engine_pause_s or 0.0) / max(1, measures.num_swaps)
            return (
                f"A swap paused an engine for {milliseconds(mean_s)} on average over {plural(measures.num_swaps, 'swap')}. Publish less"
                " often (more groups in batch.groups_per_step), or find what holds up the commit or the writing: memory bandwidth, a"
                " shared core, a slow disk."
            )
        case Limiter.ADMISSION if measures.mode != "streaming":
            return f'The mode {measures.mode} makes the halves take turns. Set pipeline.mode = "streaming".'
        case Limiter.ADMISSION:
            bound = tables.setting("pipeline", "max_staleness")
            return (
                f"The staleness bound (pipeline.max_staleness = {bound}) admits too few groups to keep both halves busy: raise it by one"
                " and compare the reward curve, or look for slow single answers (reward calls, long completions) that hold a batch back."
            )
        case Limiter.UNKNOWN:
            return ""


def _advice_on_cores(measures: Measures, tables: Tables) -> str:
    """What to do about a trainer whose core others have for long; empty where they do not, or where no core is left."""
    if (measures.trainer_fraction(measures.trainer_core_wait_s) or 0.0) < HARDLY:
        return ""
    if _full_machine(measures, tables) and not tables.run.machine.get("devices"):
        return ""
    return (
        "Leave the trainer a core of its own (trainer.cores, and run.cores for the orchestrator and the scorers): it was ready for"
        f" {share(measures.trainer_core_wait_s, measures.window_s)} while others had its core."
    )


def _roles(tables: Tables) -> str:
    """What elastic roles have done about it; empty in a run without them."""
    if not tables.roles:
        return ""
    num = sum(one.word == "begins" for one in tables.roles)
    return f"Elastic roles (pipeline.elastic) have begun {plural(num, 'change')}; last: {tables.roles[-1].words}."


def _full_machine(measures: Measures, tables: Tables) -> str:
    """The reason why another engine or rank would only take from the others; empty where it would not, or nobody knows."""
    if not tables.run.machine or (tables.setting("slurm", "nodes") or 1) != 1:
        return ""
    options = tables.setting("engine", "options")
    parallel = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1) if isinstance(options, dict) else 1
    used = measures.num_engines * parallel + measures.num_ranks
    cores, devices = tables.run.machine.get("cores", 0), tables.run.machine.get("devices", 0)
    if used < (devices or cores):
        return ""
    parts = f"{plural(measures.num_engines, 'engine')} and {plural(measures.num_ranks, 'trainer rank')}"
    return f"The machine's {plural(devices, 'device') if devices else plural(cores, 'core')} are taken by {parts}"


def _advice_for_generation(measures: Measures, factor: float, tables: Tables) -> str:
    advice = f"More or faster engines: {_scaled(measures.num_engines, factor)} (engine.count)"
    if full := _full_machine(measures, tables):
        advice = f"{full}: another engine needs a larger machine"
    if (measures.empty_fraction or 0.0) >= HARDLY:
        loosen = (
            f'set pipeline.mode = "streaming" ({measures.mode} now)'
            if measures.mode != "streaming"
            else f"raise pipeline.max_staleness ({tables.setting('pipeline', 'max_staleness')} now) by one and compare the reward curve"
        )
        return f"{advice}; before that, {loosen}: {percent(measures.empty_fraction)} of the slots there are stood empty, admission closed."
    slots = measures.num_sequence_slots
    if measures.mean_running is not None and slots and measures.mean_running < 0.7 * slots:
        used = f"{quantity(measures.mean_running)} of {slots} sequence slots"
        return (
            f"{advice}; before that, fill those there are: on average they decoded {used} (pipeline.max_running, pipeline.max_staleness)."
        )
    if room := _room_of_caches(measures):
        return f"{advice}; before that, {room}."
    return f"{advice}, or fewer trainer ranks if machines are to move from one half to the other."


def _room_of_caches(measures: Measures) -> str:
    """The room for more sequences at once in the KV caches of engines whose slots are in use; empty where caches do not decide."""
    if measures.kv_used is None or not measures.num_sequence_slots:
        return ""
    slots, used = measures.num_sequence_slots // measures.num_engines, percent(measures.kv_used)
    moves = '; pipeline.migration = "waiting" fills those with room' if measures.num_engines > 1 else ""
    if measures.kv_used >= CACHE_IS_FULL:
        return (
            f"more KV cache for each (engine.kv_cache_bytes): it is {used} full, so that more sequences would push each other out"
            f" (pipeline.adaptive_concurrency keeps to what fits{moves})"
        )
    if measures.kv_used <= CACHE_HAS_ROOM:
        more = math.floor(slots * CACHE_IS_FULL / measures.kv_used + 0.05)
        fit = f"{slots} × {percent(CACHE_IS_FULL)} / {used} = {more}"
        return (
            f"more sequences at once in each: all slots are in use and the KV cache is {used} full, so {fit} would fit (engine.max_running)"
        )
    return ""


def _scaled(num: int, factor: float) -> str:
    return f"{num} × {factor:.2f} = {num * factor:.1f}, so {math.ceil(num * factor - 0.05)}"
