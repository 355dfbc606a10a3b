"""The arithmetic behind a diagnosis, in rows that a reader can check with a pencil."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from pipelinerl.observe.report.measures import Measures
from pipelinerl.observe.report.units import milliseconds, percent, plural, quantity, seconds, whole


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One row of arithmetic."""

    what: str
    arithmetic: str
    value: str


def findings_of(measures: Measures) -> tuple[Finding, ...]:
    """The arithmetic, row by row; a row whose numbers were not recorded is left out."""
    window, engine_time = measures.window_s, measures.num_engines * measures.window_s
    engines = f"({plural(measures.num_engines, 'engine')} × {seconds(window)})"
    slots = f"({plural(measures.num_scoring_slots or 0, 'slot')} × {seconds(window)})"
    parts = (
        ("trainer: waits for micro-batches", measures.trainer_wait_s, f"/ {seconds(window)}", window),
        ("trainer: forward, backward, optimizer", measures.trainer_compute_s, f"/ {seconds(window)}", window),
        ("trainer: of that, ready while others had its core", measures.trainer_core_wait_s, f"/ {seconds(window)}", window),
        ("trainer: held by writing policies", measures.trainer_publish_s, f"/ {seconds(window)}", window),
        ("trainer: writes policies while it trains", measures.trainer_publish_async_s, f"/ {seconds(window)}", window),
        ("engines: in forward passes", measures.engine_busy_s, f"/ {engines}", engine_time),
        ("engines: without a request", measures.engine_idle_s, f"/ {engines}", engine_time),
        ("engines: paused by swaps", measures.engine_pause_s, f"/ {engines}", engine_time),
        ("engines: between passes (scheduling, messages)", measures.engine_rest_s, f"/ {engines}", engine_time),
        ("scoring: slots inside reward calls", measures.scorer_busy_s, f"/ {slots}", (measures.num_scoring_slots or 0) * window),
        ("generation: held back (engines full, or the staleness bound)", measures.admission_wait_s, f"/ {seconds(window)}", window),
    )
    until = f"steps {measures.first_step} to {measures.last_step}, " + (
        "start-up included" if measures.has_start_up else "the pipeline full"
    )
    first = Finding(what="stretch measured", arithmetic=until, value=seconds(window))
    shares = [
        Finding(what=what, arithmetic=f"{_exact(part_s)} {whole_of}", value=percent(part_s / whole_s))
        for what, part_s, whole_of, whole_s in parts
        if part_s is not None and whole_s
    ]
    return (first, *shares, *_occupancy(measures), *_dispatching(measures.dispatch), *_capacities(measures))


def _dispatching(dispatch: dict[str, float]) -> Iterator[Finding]:
    """A row for each rule of dispatch that is on."""
    sent = dispatch.get("num_dispatched", 0.0)
    if dispatch.get("length_tokens"):
        error, tokens = dispatch["length_error_tokens"], dispatch["length_tokens"]
        arithmetic = f"{whole(error)} tokens between predicted and written / {whole(tokens)} written"
        yield Finding(what="dispatch, longest first: lengths were predicted wrong by", arithmetic=arithmetic, value=percent(error / tokens))
    if "num_at_home" in dispatch and sent:
        at_home = dispatch["num_at_home"]
        arithmetic = f"{whole(at_home)} sent to the engine of a sibling / {whole(sent)} rollouts sent"
        yield Finding(what="routing, least loaded: prompts found computed", arithmetic=arithmetic, value=percent(at_home / sent))
    if "num_held_by_kv" in dispatch and sent:
        held, room = dispatch["num_held_by_kv"], dispatch["kv_room_tokens"]
        arithmetic = f"{whole(held)} kept back / {whole(sent)} sent, with {whole(room)} tokens learned to be an engine's room"
        yield Finding(what="KV admission: rollouts that waited for room", arithmetic=arithmetic, value=percent(held / sent))
    if dispatch.get("num_waits"):
        waits, moved, recomputed = dispatch["num_waits"], dispatch["num_moved"], dispatch["num_recomputed_tokens"]
        after = f" after {seconds(dispatch['moved_after_s'] / moved)} on average, {whole(recomputed)} tokens computed anew" if moved else ""
        arithmetic = f"{whole(moved)} moved{after} / {whole(waits)} times that a sequence waited for room"
        yield Finding(what="migration: what waited for room in an engine and moved", arithmetic=arithmetic, value=percent(moved / waits))
    if dispatch.get("num_cut_decided"):
        stopped, decided, weight = dispatch["num_cut_stopped"], dispatch["num_cut_decided"], 1 / dispatch["cut_keep_probability"]
        arithmetic = f"{whole(stopped)} stopped / {whole(decided)} last siblings; those that went on weigh {quantity(weight)} each"
        yield Finding(what="groups cut without bias: last siblings stopped", arithmetic=arithmetic, value=percent(stopped / decided))


def _occupancy(measures: Measures) -> list[Finding]:
    used, slots = measures.mean_running, measures.num_sequence_slots
    if used is None or not slots:
        return []
    arithmetic = f"{quantity(used)} on average / {slots}"
    found = [Finding(what="engines: sequence slots in use", arithmetic=arithmetic, value=percent(used / slots))]
    if measures.empty_fraction is not None:
        arithmetic = "mean over the gauges at which generation was held back, else 0"
        found.append(Finding(what="engines: slots empty, admission closed", arithmetic=arithmetic, value=percent(measures.empty_fraction)))
    if measures.kv_used is not None:
        arithmetic = "mean over the gauges, of the fullest engine"
        found.append(Finding(what="engines: KV cache in use", arithmetic=arithmetic, value=percent(measures.kv_used)))
    if measures.num_drafted and measures.num_accepted is not None:
        accepted, drafted = measures.num_accepted, measures.num_drafted
        arithmetic = f"{whole(accepted)} part of completions / {whole(drafted)} drafted tokens that passes verified"
        found.append(Finding(what="engines: drafts accepted (speculation)", arithmetic=arithmetic, value=percent(accepted / drafted)))
    return found


def _capacities(measures: Measures) -> list[Finding]:
    """The speed of each half if it never waited (R and T), both in trained tokens, and the share that the faster one idles."""
    generation = _capacity(measures, waited_s=_per_engine_s(measures))
    training = _capacity(measures, waited_s=measures.trainer_wait_s)
    found = [
        Finding(what=f"{half}, if it never waited ({letter})", arithmetic=arithmetic, value=f"{quantity(rate)} tokens/s")
        for half, letter, (rate, arithmetic) in (("generation", "R", generation), ("training", "T", training))
        if rate is not None
    ]
    if generation[0] and training[0]:
        slow, fast = sorted((generation[0], training[0]))
        half = "training" if training[0] > generation[0] else "generation"
        value = percent(1 - slow / fast)
        found.append(
            Finding(what=f"{half} is the faster and idles for", arithmetic=f"1 − {quantity(slow)} / {quantity(fast)}", value=value)
        )
    return found


def _capacity(measures: Measures, *, waited_s: float | None) -> tuple[float | None, str]:
    if not measures.trained_tokens or waited_s is None or measures.window_s <= waited_s:
        return None, ""
    arithmetic = f"{whole(measures.trained_tokens)} trained tokens / ({seconds(measures.window_s)} − {seconds(waited_s)} of waiting)"
    return measures.trained_tokens / (measures.window_s - waited_s), arithmetic


def _per_engine_s(measures: Measures) -> float | None:
    return None if measures.engine_idle_s is None else measures.engine_idle_s / measures.num_engines


def share(part_s: float | None, whole_s: float, *, of: str = "") -> str:
    """`18.3 s of 46.8 s (39.2 %)`, with words after the whole."""
    if part_s is None:
        return "an unrecorded part of the time"
    return f"{_exact(part_s)} of {seconds(whole_s)}{' of ' + of if of else ''} ({percent(part_s / whole_s)})"


def _exact(value_s: float) -> str:
    return seconds(value_s) if value_s >= 1 or value_s == 0 else milliseconds(value_s)
