"""The report's figures of one run, as data: what each shows and where its numbers come from."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from pipelinerl.observe.fold import counters
from pipelinerl.observe.fold.rows import StatusRow, StepRow, SwapRow
from pipelinerl.observe.metrics.steps import DROPPED, TRAINER_METRICS
from pipelinerl.observe.report.headline import staleness_by_age
from pipelinerl.observe.report.plots import COLOURS, Figure, Line, Point, by_step, over_time
from pipelinerl.observe.report.reading import Tables
from pipelinerl.observe.report.units import milliseconds, percent, plural, quantity, whole

RATE_POINTS = 150
"""Stretches over which a rate is averaged. More follows the half second between two gauges, which is noise; fewer hides stalls."""
RATE_SHORTEST_S = 3.0
"""Least such stretch: engines tell their counters once a second, so a shorter one would zigzag between two tellings and none."""
WIDE = 20.0
"""Longest over shortest pause from which a logarithmic scale tells more than a linear one."""
MAX_BARS = 16
"""Ages drawn one by one; older ones share the last bar."""
MAX_DOTS = 600
"""Swaps drawn. More would hide each other; fewer would hide a rare long one."""


def figures(tables: Tables) -> dict[str, list[Figure]]:
    """Every figure, by the section of the page in which it stands."""
    return {
        "reward": [reward_over_time(tables), reward_over_samples(tables), *components(tables)],
        "throughput": [throughput(tables), sequences(tables)],
        "staleness": [staleness_histogram(tables), staleness_over_time(tables)],
        "swaps": [pause_per_swap(tables), staging_per_swap(tables)],
        "trainer": meters(tables),
        "length": lengths(tables),
        "queues": [queues(tables), groups(tables), *memory(tables)],
    }


def reward_over_time(tables: Tables) -> Figure:
    """Reward of every step, and of every evaluation, against the time since the run began."""
    lines = _reward(tables, x_of_step=lambda number: tables.steps[number].t, x_of_evaluation=lambda t: t)
    return over_time(tables, "Reward over time", "mean reward", *lines)


def reward_over_samples(tables: Tables) -> Figure:
    """Reward against samples trained so far, which tells what the data was worth on any machine."""
    so_far = list(itertools.accumulate(step.num_samples or 0.0 for step in tables.steps))
    ends = list(itertools.accumulate((step.t for step in tables.steps), max))  # in order, also where a clock went back

    def samples_at(t: float) -> float:
        num_done = bisect.bisect_right(ends, t)
        return so_far[num_done - 1] if num_done else 0.0

    lines = _reward(tables, x_of_step=so_far.__getitem__, x_of_evaluation=samples_at)
    return Figure(title="Reward over samples", lines=lines, x_label="samples trained", y_label="mean reward", x_from=0.0)


def components(tables: Tables) -> list[Figure]:
    """Mean of every reward function over the steps; nothing where there is only one."""
    names = list(dict.fromkeys(name for step in tables.steps for name in step.components))
    if len(names) < 2:
        return []
    series = [(name, colour, _component(name)) for name, colour in zip(names, COLOURS, strict=False)]
    left_out = f"; {len(names) - len(series)} more not drawn" if len(names) > len(series) else ""
    return [by_step(tables, "Reward by component", "before weighting" + left_out, *series)]


def throughput(tables: Tables) -> Figure:
    """Tokens per second generated and trained, over the run."""
    trained = [(step.t, step.num_trained_tokens) for step in tables.steps if step.num_trained_tokens is not None]
    so_far = list(zip((t for t, _ in trained), itertools.accumulate(tokens for _, tokens in trained), strict=True))
    return over_time(
        tables,
        "Tokens per second",
        "tokens/s",
        Line(name="generated", colour="engine", points=generated_rate(tables)),
        Line(name="trained, per step", colour="train", points=counters.rate_points(so_far, num_points=RATE_POINTS)),
        from_zero=True,
    )


def generated_rate(tables: Tables) -> list[Point]:
    """Tokens generated per second at moments in Unix seconds."""
    return counters.rate_points(_gauge(tables, lambda row: row.generated_tokens), num_points=RATE_POINTS, shortest_s=RATE_SHORTEST_S)


def sequences(tables: Tables) -> Figure:
    """Sequences decoded at once, summed over the engines."""
    points = _gauge(tables, lambda row: counters.total(engine.num_running for engine in row.engines))
    line = Line(name="decoding", colour="engine", points=points)
    return over_time(tables, "Sequences decoded at once, all engines", "sequences", line, from_zero=True)


def staleness_histogram(tables: Tables) -> Figure:
    """Trained tokens by age."""
    ages = staleness_by_age(tables)
    num_tokens = sum(ages.values())
    bars = {str(age): tokens for age, tokens in ages.items() if age < MAX_BARS - 1} if num_tokens else {}
    if older := num_tokens - sum(bars.values()):
        bars[f"≥ {MAX_BARS - 1}"] = older
    bound = tables.setting("pipeline", "max_staleness")
    note = f"{whole(num_tokens)} tokens" + (
        f"; the bound is {bound} versions for the oldest token of a sample" if bound is not None else ""
    )
    says = [percent(tokens / num_tokens) for tokens in bars.values()]
    line = Line(name="tokens", colour="engine", points=list(enumerate(bars.values())), style="bars", says=says)
    title, x_label = "Staleness of trained tokens", "age in versions when trained"
    return Figure(title=title, lines=[line], x_label=x_label, y_label="tokens", note=note, from_zero=True, names=list(bars))


def staleness_over_time(tables: Tables) -> Figure:
    """Mean and oldest age of the tokens of every step."""
    return by_step(
        tables,
        "Staleness per step",
        "versions",
        ("mean over tokens", "engine", lambda row: row.staleness_mean),
        ("of it in flight, while sampled", "score", lambda row: row.staleness_in_flight_mean),
        ("of it in queue, after it", "train", lambda row: row.staleness_in_queue_mean),
        ("oldest token", "swap", lambda row: row.staleness_max),
        ("youngest token", "wait", lambda row: row.staleness_min),
        from_zero=True,
    )


def pause_per_swap(tables: Tables) -> Figure:
    """The time that each swap kept an engine from its next forward pass, with the median and the 99th percentile."""
    swaps = [swap for swap in tables.swaps if swap.pause_s is not None]
    stride = max(1, -(-len(swaps) // MAX_DOTS))
    pauses = [1000 * (swap.pause_s or 0.0) for swap in swaps]
    is_wide = bool(pauses) and max(pauses) >= WIDE * max(min(pauses), 1e-3)
    lowest = min((pause for pause in pauses if pause > 0), default=0.0) if is_wide else 0.0  # a pause of 0 has no logarithm
    dots = _dots(swaps[::stride], lambda swap: max(lowest, 1000 * (swap.pause_s or 0.0)), lambda swap: swap.pause_s, colour="engine")
    lines = [dots]
    for name, q, colour in (("p50", 0.5, "train"), ("p99", 0.99, "swap")):
        if (pause_ms := counters.quantile(pauses, q)) is not None:
            ends = [(swap.t, max(lowest, pause_ms)) for swap in (swaps[0], swaps[-1])]
            lines.append(Line(name=f"{name} {quantity(pause_ms)} ms", colour=colour, points=ends, style="rule"))
    note = plural(len(swaps), "swap") + (f", one in {stride} drawn" if stride > 1 else "")
    if num_recomputed := sum(swap.num_recomputed_tokens or 0 for swap in swaps):
        note += f"; they dropped the KV cache of {whole(num_recomputed)} tokens, to be computed again"
    return over_time(tables, "Pause per swap", "milliseconds", *lines, note=note, from_zero=not is_wide, is_log=is_wide)


def staging_per_swap(tables: Tables) -> Figure:
    """The time that each version took to arrive while decoding went on."""
    swaps = [swap for swap in tables.swaps if swap.stage_s is not None]
    stride = max(1, -(-len(swaps) // MAX_DOTS))
    dots = _dots(swaps[::stride], lambda swap: swap.stage_s or 0.0, lambda swap: swap.stage_s, colour="score")
    return over_time(tables, "Staging per swap", "seconds", dots, note="decoding goes on meanwhile", from_zero=True)


def meters(tables: Tables) -> list[Figure]:
    """The trainer's meters, each mask's among them; a meter that no step recorded is left out."""
    found, limit = [], tables.setting("trainer", "max_mismatch_kl")
    masks = dict.fromkeys(name for step in tables.steps for name in step.trainer if name.endswith(DROPPED))
    dropped = tuple((name, f"tokens dropped by {name.removesuffix(DROPPED)}", "part of one") for name in masks)
    for name, title, unit in (*((one.field, one.title, one.unit) for one in TRAINER_METRICS if one.title), *dropped):
        points = [(float(step.step), step.trainer[name]) for step in tables.steps if name in step.trainer]
        if points:
            alarm = f"; above {limit:g} the run ends" if name == "mismatch_kl_on_policy" and isinstance(limit, float) else ""
            note = f"last {quantity(points[-1][1])}{alarm}"
            found.append(Figure(title=title, lines=[Line(name="", colour="train", points=points)], y_label=unit, note=note))
    return found


def lengths(tables: Tables) -> list[Figure]:
    """Tokens per sample, and the part of them that was cut off."""
    tokens = by_step(tables, "Length of a sample", "tokens, mean", ("", "engine", lambda row: row.length_mean), from_zero=True)
    cut = by_step(
        tables,
        "Truncated and uninformative",
        "part of one",
        ("samples cut off at the longest length", "swap", lambda row: row.truncated_fraction),
        ("groups whose rewards are all equal", "warm", lambda row: row.zero_variance_fraction),
        from_zero=True,
    )
    return [tokens, cut]


def queues(tables: Tables) -> Figure:
    """Items in every queue."""
    names = list(dict.fromkeys(name for row in tables.statuses for name in row.queues))
    lines = [
        Line(name=name, colour=colour, points=_gauge(tables, _queue_items(name)))
        for name, colour in zip(names, itertools.cycle(("score", "engine", "train", "warm", "swap")), strict=False)
    ]
    return over_time(tables, "Queues", "items waiting", *lines, from_zero=True)


def groups(tables: Tables) -> Figure:
    """Groups in engines."""
    line = Line(name="running", colour="engine", points=_gauge(tables, lambda row: row.groups_running))
    return over_time(tables, "Groups in flight", "groups", line, from_zero=True)


def memory(tables: Tables) -> list[Figure]:
    """Memory of the orchestrator, which bounded queues keep flat; nothing where it was not recorded."""
    points = [(t, resident / 2**20) for t, resident in _gauge(tables, lambda row: row.memory_bytes)]
    line = Line(name="resident", colour="warm", points=points)
    return [over_time(tables, "Memory of the orchestrator", "MiB", line, from_zero=True)] if points else []


def rolling_mean(points: Sequence[Point], *, width: int) -> list[Point]:
    """Mean over the last `width` points, fewer at the start."""
    sums = np.concatenate(([0.0], np.cumsum([y for _, y in points])))
    return [(x, float(sums[at + 1] - sums[max(0, at + 1 - width)]) / min(width, at + 1)) for at, (x, _) in enumerate(points)]


def _reward(tables: Tables, *, x_of_step: Callable[[int], float], x_of_evaluation: Callable[[float], float]) -> list[Line]:
    points = [(x_of_step(number), step.reward_mean) for number, step in enumerate(tables.steps) if step.reward_mean is not None]
    held_out = [(x_of_evaluation(row.t), row.reward_mean, row.version) for row in tables.evaluations if row.reward_mean is not None]
    width = max(1, len(points) // 20)
    lines = [Line(name="training, every step", colour="train", points=points, style="faint" if width > 1 else "line")]
    if width > 1:
        lines.append(Line(name=f"mean of the last {width} steps", colour="train", points=rolling_mean(points, width=width)))
    says = [f"version {whole(version)}: {quantity(reward)}" for _, reward, version in held_out]
    return [*lines, Line(name="held-out", colour="score", points=[(x, reward) for x, reward, _ in held_out], says=says)]


def _dots(swaps: Sequence[SwapRow], y_of: Callable[[SwapRow], float], took_s: Callable[[SwapRow], float | None], *, colour: str) -> Line:
    says = [f"engine {swap.engine_id}, version {whole(swap.version)}: {milliseconds(took_s(swap))}" for swap in swaps]
    return Line(name="swaps", colour=colour, points=[(swap.t, y_of(swap)) for swap in swaps], style="dots", says=says)


def _gauge(tables: Tables, value_of: Callable[[StatusRow], float | None]) -> list[Point]:
    return [(row.t, value) for row in tables.statuses if (value := value_of(row)) is not None]


def _component(name: str) -> Callable[[StepRow], float | None]:
    return lambda row: row.components.get(name)


def _queue_items(name: str) -> Callable[[StatusRow], float | None]:
    return lambda row: row.queues[name].items if name in row.queues else None
