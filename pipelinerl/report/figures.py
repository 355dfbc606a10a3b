"""The report's plots, each from the tables to markup. A plot whose numbers were not recorded becomes a sentence that says so."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Sequence

import numpy as np

from pipelinerl.report import counters
from pipelinerl.report.headline import staleness_by_age
from pipelinerl.report.panels import by_step, figure, missing, over_time, start_of_axis, time_unit
from pipelinerl.report.reading import Tables
from pipelinerl.report.rows import StatusRow, StepRow
from pipelinerl.report.svg import Plot, Point, bar_chart
from pipelinerl.report.units import milliseconds, percent, plural, quantity, whole

RATE_POINTS = 150
"""Stretches over which a rate is averaged. More follows the half second between two gauges, which is noise; fewer hides stalls."""
RATE_SHORTEST_S = 3.0
"""Least such stretch: engines tell their counters once a second, so a shorter one would zigzag between two tellings and none."""
WIDE = 20.0
"""Longest over shortest pause from which a logarithmic scale tells more than a linear one."""
MAX_BARS = 16
"""Ages drawn one by one; older ones share the last bar."""

METERS = (
    ("mismatch_kl_fresh", "KL between engine and trainer, same version", "nats"),
    ("logprob_gap_mean", "|engine − trainer| log-probability, mean", "nats"),
    ("ess", "effective sample size", "part of one"),
    ("kl", "KL to the sampling policy", "nats"),
    ("clip_fraction", "tokens clipped", "part of one"),
    ("weight_zero_fraction", "tokens of importance weight 0", "part of one"),
    ("entropy", "entropy per token", "nats"),
    ("grad_norm", "gradient norm, before clipping", ""),
    ("loss", "loss", ""),
    ("ratio_mean", "importance ratio, mean", ""),
    ("ratio_min", "importance ratio, smallest", ""),
    ("ratio_max", "importance ratio, largest", ""),
    ("learning_rate", "learning rate", ""),
    ("kl_penalty", "KL to the reference, as its penalty measures it", "nats"),
    ("divergence", "divergence from the teacher, over all words", "nats"),
    ("kl_coef", "coefficient of the KL, which follows it", ""),
    ("entropy_coef", "coefficient of the entropy, which follows it", ""),
    ("sft_loss", "negative log-likelihood of the demonstrations beside RL", "nats per token"),
    ("weight_batch_mean", "mean importance weight of the step, which all were divided by", ""),
)
"""Metric of the trainer, title, unit; the first eight first, because they are what goes wrong first."""
DROPPED = "_dropped_fraction"
"""End of the name of a metric that says which part of the tokens one mask dropped."""


def reward_over_time(tables: Tables) -> str:
    """Reward of every step, and of every evaluation, against the time since the run began."""
    unit_s, unit = time_unit(tables.duration_s)
    return _reward(
        tables,
        title="Reward over time",
        x_of_step=lambda number: tables.since_start(tables.steps[number].t) / unit_s,
        x_of_evaluation=lambda t: tables.since_start(t) / unit_s,
        x_label=f"{unit} since the run began",
        x_from=start_of_axis(tables),
    )


def reward_over_samples(tables: Tables) -> str:
    """The same against samples trained so far: what the data was worth, whatever the machine."""
    so_far: list[float] = []
    for step in tables.steps:
        so_far.append((so_far[-1] if so_far else 0.0) + (step.num_samples or 0.0))

    ends = list(itertools.accumulate((step.t for step in tables.steps), max))  # in order, also where a clock went back

    def samples_at(t: float) -> float:
        num_done = bisect.bisect_right(ends, t)
        return so_far[num_done - 1] if num_done else 0.0

    return _reward(
        tables, title="Reward over samples", x_of_step=so_far.__getitem__, x_of_evaluation=samples_at, x_label="samples trained", x_from=0.0
    )


def staleness_histogram(tables: Tables) -> str:
    """Trained tokens by age."""
    ages = staleness_by_age(tables)
    num_tokens = sum(ages.values())
    if not num_tokens:
        return figure("Staleness of trained tokens", missing("Ages of tokens"))
    shown = {age: tokens for age, tokens in ages.items() if age < MAX_BARS - 1}
    older = num_tokens - sum(shown.values())
    bars = [(str(age), tokens, percent(tokens / num_tokens)) for age, tokens in shown.items()]
    if older:
        bars.append((f"≥ {MAX_BARS - 1}", older, percent(older / num_tokens)))
    bound = tables.setting("pipeline", "max_staleness")
    note = f"{whole(num_tokens)} tokens" + (
        f"; the bound is {bound} versions for the oldest token of a sample" if bound is not None else ""
    )
    drawn = bar_chart(bars, label="Tokens by age in versions", x_label="age in versions when trained", y_label="tokens", css="c-engine")
    return figure("Staleness of trained tokens", drawn, note=note)


def staleness_over_time(tables: Tables) -> str:
    """Mean and oldest age of the tokens of every step."""
    return by_step(
        tables,
        title="Staleness per step",
        y_label="versions",
        series=(
            ("mean over tokens", "c-engine", lambda row: row.staleness_mean),
            ("of it in flight, while sampled", "c-score", lambda row: row.staleness_in_flight_mean),
            ("of it in queue, after it", "c-train", lambda row: row.staleness_in_queue_mean),
            ("oldest token", "c-swap", lambda row: row.staleness_max),
            ("youngest token", "c-wait", lambda row: row.staleness_min),
        ),
        y_from_zero=True,
    )


def pause_per_swap(tables: Tables) -> str:
    """How long each swap kept an engine from its next forward pass, with the median and the 99th percentile."""
    swaps = [(tables.since_start(swap.t), 1000 * swap.pause_s, swap) for swap in tables.swaps if swap.pause_s is not None]
    if not swaps:
        return figure("Pause per swap", missing("Swaps"))
    unit_s, unit = time_unit(tables.duration_s)
    points = [(t / unit_s, pause_ms) for t, pause_ms, _ in swaps]
    pauses = [pause_ms for _, pause_ms in points]
    p50, p99 = counters.quantile(pauses, 0.5) or 0.0, counters.quantile(pauses, 0.99) or 0.0
    is_wide = max(pauses) >= WIDE * max(min(pauses), 1e-3)
    plot = Plot(
        label="Pause of each swap",
        x_values=[start_of_axis(tables), *(x for x, _ in points)],
        y_values=pauses,
        x_label=f"{unit} since the run began",
        y_label="milliseconds",
        y_from_zero=not is_wide,
        y_is_log=is_wide,
        right=104,
    )
    stride = -(-len(points) // 600)
    names = [f"engine {swap.engine_id}, version {whole(swap.version)}: {milliseconds(swap.pause_s)}" for _, _, swap in swaps]
    plot.dots(points[::stride], css="c-engine", titles=names[::stride], radius=2.6)
    plot.rule(p50, text=f"p50 {quantity(p50)} ms", css="c-train")
    plot.rule(p99, text=f"p99 {quantity(p99)} ms", css="c-swap")
    note = f"{plural(len(points), 'swap')}" + (f", one in {stride} drawn" if stride > 1 else "")
    if num_recomputed := sum(swap.num_recomputed_tokens or 0 for _, _, swap in swaps):
        note += f"; they dropped the KV cache of {whole(num_recomputed)} tokens, to be computed again"
    return figure("Pause per swap", plot.svg(), note=note)


def staging_per_swap(tables: Tables) -> str:
    """How long each version took to arrive while decoding went on."""
    points = [(tables.since_start(swap.t), swap.stage_s) for swap in tables.swaps if swap.stage_s is not None]
    if not points:
        return figure("Staging per swap", missing("Staging times"))
    unit_s, unit = time_unit(tables.duration_s)
    plot = Plot(
        label="Staging time of each swap",
        x_values=[start_of_axis(tables), *(t / unit_s for t, _ in points)],
        y_values=[stage_s for _, stage_s in points],
        x_label=f"{unit} since the run began",
        y_label="seconds",
        y_from_zero=True,
    )
    plot.dots([(t / unit_s, stage_s) for t, stage_s in points[:: -(-len(points) // 600)]], css="c-score", radius=2.6)
    return figure("Staging per swap", plot.svg(), note="decoding goes on meanwhile")


def meters(tables: Tables) -> str:
    """The trainer's meters as small multiples, each mask's among them; a meter that no step recorded is left out."""
    drawn, limit = [], tables.setting("trainer", "max_mismatch_kl")
    masks = dict.fromkeys(name for step in tables.steps for name in step.trainer if name.endswith(DROPPED))
    dropped = tuple((name, f"tokens dropped by {name.removesuffix(DROPPED)}", "part of one") for name in masks)
    for name, title, unit in (*METERS, *dropped):
        points = [(float(step.step), step.trainer[name]) for step in tables.steps if name in step.trainer]
        if points:
            plot = Plot(
                label=title,
                x_values=[x for x, _ in points],
                y_values=[y for _, y in points],
                x_label="step",
                x_is_whole=True,
                y_label=unit,
                width=350,
                height=170,
            )
            plot.line(points, css="c-train")
            alarm = f"; above {limit:g} the run ends" if name == "mismatch_kl_fresh" and isinstance(limit, float) else ""
            drawn.append(figure(title, plot.svg(), note=f"last {quantity(points[-1][1])}{alarm}"))
    return "".join(drawn) or missing("Trainer metrics")


def lengths(tables: Tables) -> str:
    """Tokens per sample, and the part of them that was cut off."""
    tokens = by_step(
        tables,
        title="Length of a sample",
        y_label="tokens, mean",
        series=(("", "c-engine", lambda row: row.length_mean),),
        y_from_zero=True,
    )
    cut = by_step(
        tables,
        title="Truncated and uninformative",
        y_label="part of one",
        series=(
            ("samples cut off at the longest length", "c-swap", lambda row: row.truncated_fraction),
            ("groups whose rewards are all equal", "c-warm", lambda row: row.zero_variance_fraction),
        ),
        y_from_zero=True,
    )
    return tokens + cut


def components(tables: Tables) -> str:
    """Mean of every reward function over the steps; nothing where there is only one."""
    names = list(dict.fromkeys(name for step in tables.steps for name in step.components))
    if len(names) < 2:
        return ""
    colours = ("c-engine", "c-score", "c-train", "c-warm", "c-swap")
    series = tuple((name, colours[at % len(colours)], _component(name)) for at, name in enumerate(names[: len(colours)]))
    left_out = f"; {len(names) - len(series)} more not drawn" if len(names) > len(series) else ""
    return by_step(tables, title="Reward by component", y_label="before weighting" + left_out, series=series)


def throughput(tables: Tables) -> str:
    """Tokens per second generated and trained, over the run."""
    generated = [(row.t, row.generated_tokens) for row in tables.statuses if row.generated_tokens is not None]
    trained = [(step.t, step.num_trained_tokens) for step in tables.steps if step.num_trained_tokens is not None]
    so_far = list(zip((t for t, _ in trained), itertools.accumulate(tokens for _, tokens in trained), strict=True))
    series = (
        ("generated", "c-engine", counters.rate_points(generated, num_points=RATE_POINTS, shortest_s=RATE_SHORTEST_S)),
        ("trained, per step", "c-train", counters.rate_points(so_far, num_points=RATE_POINTS)),
    )
    return over_time(tables, title="Tokens per second", y_label="tokens/s", series=series)


def groups(tables: Tables) -> str:
    """Groups in engines."""
    series = (("running", "c-engine", [(row.t, row.groups_running) for row in tables.statuses if row.groups_running is not None]),)
    return over_time(tables, title="Groups in flight", y_label="groups", series=series)


def queues(tables: Tables) -> str:
    """How full every queue was."""
    names = list(dict.fromkeys(name for row in tables.statuses for name in row.queues))
    colours = ("c-score", "c-engine", "c-train", "c-warm", "c-swap")
    series = tuple((name, colours[at % len(colours)], _queue_items(tables, name)) for at, name in enumerate(names))
    return over_time(tables, title="Queues", y_label="items waiting", series=series)


def memory(tables: Tables) -> str:
    """Memory of the orchestrator, which bounded queues keep flat."""
    points = [(row.t, row.memory_bytes / 2**20) for row in tables.statuses if row.memory_bytes is not None]
    if not points:
        return ""
    return over_time(tables, title="Memory of the orchestrator", y_label="MiB", series=(("resident", "c-warm", points),))


def sequences(tables: Tables) -> str:
    """Sequences decoded at once, summed over the engines."""

    def running(row: StatusRow) -> float | None:
        return counters.total(engine.num_running for engine in row.engines)

    series = (("decoding", "c-engine", [(row.t, value) for row in tables.statuses if (value := running(row)) is not None]),)
    return over_time(tables, title="Sequences decoded at once, all engines", y_label="sequences", series=series)


def rolling_mean(points: Sequence[Point], *, width: int) -> list[Point]:
    """Mean over the last `width` points, fewer at the start."""
    sums = np.concatenate(([0.0], np.cumsum([y for _, y in points])))
    return [(x, float(sums[at + 1] - sums[max(0, at + 1 - width)]) / min(width, at + 1)) for at, (x, _) in enumerate(points)]


def _reward(
    tables: Tables, *, title: str, x_of_step: Callable[[int], float], x_of_evaluation: Callable[[float], float], x_label: str, x_from: float
) -> str:
    points = [(x_of_step(number), step.reward_mean) for number, step in enumerate(tables.steps) if step.reward_mean is not None]
    held_out = [(x_of_evaluation(row.t), row.reward_mean, row) for row in tables.evaluations if row.reward_mean is not None]
    if not points and not held_out:
        return figure(title, missing("Rewards"))
    width = max(1, len(points) // 20)
    plot = Plot(
        label=title,
        x_values=[x_from, *(x for x, _ in points), *(x for x, _, _ in held_out)],
        y_values=[*(y for _, y in points), *(y for _, y, _ in held_out)],
        x_label=x_label,
        y_label="mean reward",
        height=270,
    )
    plot.line(points, css="c-train faint" if width > 1 else "c-train")
    legend = [("training, every step", "c-train faint" if width > 1 else "c-train")]
    if width > 1:
        plot.line(rolling_mean(points, width=width), css="c-train")
        legend.append((f"mean of the last {width} steps", "c-train"))
    if held_out:
        names = [f"held-out, version {whole(row.version)}: {quantity(value)}" for _, value, row in held_out]
        plot.line([(x, y) for x, y, _ in held_out], css="c-score")
        plot.dots([(x, y) for x, y, _ in held_out], css="c-score", titles=names, radius=4.5)
        legend.append(("held-out", "c-score"))
    return figure(title, plot.svg(), legend=legend)


def _component(name: str) -> Callable[[StepRow], float | None]:
    return lambda row: row.components.get(name)


def _queue_items(tables: Tables, name: str) -> list[Point]:
    found = [(row.t, row.queues[name].items) for row in tables.statuses if name in row.queues]
    return [(t, items) for t, items in found if items is not None]
