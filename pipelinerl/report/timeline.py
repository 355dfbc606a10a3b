"""Who worked when: every engine, scoring slot and trainer rank on a lane of its own, over a stretch long enough to hold a few steps.

Above it the whole run in thin bands, with the stretch marked. What the picture is for: lanes of engines and trainer filled at the same
time are the overlap the pipeline exists for, and a swap (a tick) that leaves no gap in its lane is a swap without a pause.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Callable, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pipelinerl.report.panels import figure, missing, time_unit
from pipelinerl.report.reading import Tables, read_spans
from pipelinerl.report.rows import Span
from pipelinerl.report.svg import Scale, canvas, pixels, scale_of, tag, tick_words, words
from pipelinerl.report.units import percent

SHORTEST_S = 10.0
LONGEST_S = 20.0
"""A stretch shows about three steps, but no less and no more than these, so that single forward passes stay visible."""
STEPS_SHOWN = 3
MAX_SLOTS = 6
"""Scoring lanes drawn one by one; the rest is named in a note."""
NUM_BINS = 240
"""Bins of the overview: about four pixels each."""
WIDTH, LEFT, RIGHT = 1060, 108, 14
NARROW = 380
"""Width of the same pictures on a phone, where the wide ones would be cut off or too small to read."""
LABEL = 26
"""Pixels that a version's label takes."""

WORKING = {"engine": ("forward",), "scorer": ("score",), "trainer": ("forward_backward", "optimizer", "publish")}
"""Span names that count as work, by kind of lane."""
COLOURS = {
    "forward": "c-engine",
    "score": "c-score",
    "forward_backward": "c-train",
    "optimizer": "c-train-dark",
    "publish": "c-warm",
    "wait": "c-wait",
    "swap": "c-swap",
}
LEGEND = (
    ("engine in forward passes", "c-engine"),
    ("reward call", "c-score"),
    ("forward and backward", "c-train"),
    ("optimizer", "c-train-dark"),
    ("writes the policy", "c-warm"),
    ("trainer waits", "c-wait"),
    ("swap of an engine's weights", "c-swap"),
)

Interval = tuple[float, float]


@dataclasses.dataclass(slots=True, kw_only=True)
class Activity:
    """The spans of a run: all of them as busy seconds per bin, those of the stretch one by one."""

    start: float
    """Unix seconds: first bin's start."""
    end: float
    shown: Interval
    """The stretch, Unix seconds."""
    bins: dict[str, npt.NDArray[np.float64]] = dataclasses.field(default_factory=dict)
    """[NUM_BINS] float64, seconds of work summed over the lanes of a kind."""
    lanes: dict[str, list[Span]] = dataclasses.field(default_factory=dict)
    """Spans that touch the stretch, by lane."""
    known: dict[str, set[str]] = dataclasses.field(default_factory=dict)
    """Every lane of the run, by kind."""


def timeline(tables: Tables) -> str:
    """The overview and the stretch, as figures."""
    shown = choose_stretch(tables)
    if shown is None:
        return figure("Timeline", missing("Spans"))
    activity = read_activity(tables, shown)
    if not activity.known:
        return figure("Timeline", missing("Spans"))
    length_s = shown[1] - shown[0]
    zoom = figure(
        f"{length_s:.0f} seconds from the {_place(tables, shown)} of the run"
        if length_s < activity.end - activity.start
        else "The whole run",
        _both(lambda width: _lanes(tables, activity, width=width)),
        note=_overlap_note(activity),
        legend=LEGEND,
    )
    overview = figure(
        "The whole run",
        _both(lambda width: _overview(tables, activity, width=width)),
        note="from the first token on: part of the time at work, by kind; the frame marks the seconds drawn above",
    )
    return zoom + overview


def choose_stretch(tables: Tables) -> Interval | None:
    """A few steps around the step in the middle of the run, or, where spans of that time are summed up, the first ones that are not; None
    for an empty journal."""
    if tables.began is None or tables.ended is None or tables.ended <= tables.began:
        return None
    ends = [step.t for step in tables.steps]
    gaps = sorted(after - before for before, after in itertools.pairwise(ends))
    step_s = gaps[len(gaps) // 2] if gaps else 0.0
    length_s = min(max(STEPS_SHOWN * step_s, SHORTEST_S), max(LONGEST_S, 1.5 * step_s))
    middle = ends[len(ends) // 2] if ends else (tables.began + tables.ended) / 2
    start = max(tables.worked_from or tables.began, tables.whole_from, middle - length_s / 2)
    start = max(tables.worked_from or tables.began, min(start, tables.ended - length_s))
    return start, min(start + length_s, tables.ended)


def _both(draw: Callable[[int], str]) -> str:
    """A picture as wide as the page, and one as wide as a phone; the style sheet shows the one that fits."""
    return tag("div", draw(WIDTH), css="wide") + tag("div", draw(NARROW), css="narrow", aria_hidden="true")


def _place(tables: Tables, shown: Interval) -> str:
    return "middle" if shown[0] > tables.whole_from else "last part"


def read_activity(tables: Tables, shown: Interval) -> Activity:
    """Read every span once: into bins, and those of the stretch as they are."""
    start, end = tables.worked_from or shown[0], tables.ended or shown[1]
    activity = Activity(start=start, end=end, shown=shown)
    for span in read_spans(tables.folder):
        kind = span.lane.split("-")[0]
        activity.known.setdefault(kind, set()).add(span.lane)
        if span.name in WORKING.get(kind, ()):
            _fill(activity.bins.setdefault(kind, np.zeros(NUM_BINS)), span, start=activity.start, end=activity.end)
        if span.busy_s is None and span.end > shown[0] and span.start < shown[1]:
            activity.lanes.setdefault(span.lane, []).append(span)
    return activity


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same moments as disjoint intervals in order."""
    joined: list[Interval] = []
    for start, end in sorted(intervals):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined


def common_s(first: Sequence[Interval], second: Sequence[Interval]) -> float:
    """Seconds that lie in both; each given as disjoint intervals in order."""
    total_s, at, other = 0.0, 0, 0
    while at < len(first) and other < len(second):
        total_s += max(0.0, min(first[at][1], second[other][1]) - max(first[at][0], second[other][0]))
        if first[at][1] < second[other][1]:
            at += 1
        else:
            other += 1
    return total_s


def _overlap_note(activity: Activity) -> str:
    low, high = activity.shown
    length_s = high - low

    def working(kind: str) -> list[Interval]:
        spans = [span for lane, spans in activity.lanes.items() if lane.startswith(kind) for span in spans if span.name in WORKING[kind]]
        return union((max(span.start, low), min(span.end, high)) for span in spans)

    engines, trainer = working("engine"), working("trainer")
    if not engines or not trainer:
        return ""
    parts = (common_s(engines, [activity.shown]), common_s(trainer, [activity.shown]), common_s(engines, trainer))
    names = ("some engine decodes", "the trainer works", "both at once")
    return ", ".join(f"{name} {percent(part / length_s)}" for name, part in zip(names, parts, strict=True)) + " of these seconds"


def _lanes(tables: Tables, activity: Activity, *, width: int) -> str:
    low, high = activity.shown
    slots = _in_order(activity.known.get("scorer", ()))
    names = [*_in_order(activity.known.get("engine", ())), *slots[:MAX_SLOTS], *_in_order(activity.known.get("trainer", ()))]
    top, thick = 20, 16
    x = Scale(low=low, high=high, start=LEFT, end=width - RIGHT)
    body, y = [], float(top)
    for name in names:
        y += 10 if name.startswith("engine") else 6  # above an engine's lane stand the versions it changes to
        body.append(tag("rect", x=x.start, y=y, width=x.end - x.start, height=thick, css="lane"))
        body.append(tag("text", words(_lane_words(name)), x=LEFT - 8, y=y + 12, css="tick end"))
        body.append(_spans(activity.lanes.get(name, ()), x, y=y, thick=thick))
        body.append(_swap_ticks(tables, name, x, y=y, thick=thick))
        y += thick
    base = round(y) + 7
    body.insert(0, _step_marks(tables, x, top=top, base=base))
    body.append(_time_axis(tables, x, base=base))
    if len(slots) > MAX_SLOTS:
        body.append(tag("text", words(f"{len(slots) - MAX_SLOTS} more scoring slots not drawn"), x=LEFT, y=base + 34, css="label"))
    return canvas("".join(body), width=width, height=base + 40, label="Lanes of engines, scoring and trainer over a stretch of the run")


def _spans(spans: Sequence[Span], x: Scale, *, y: float, thick: float) -> str:
    """One path per colour; spans less than half a pixel apart are drawn as one."""
    half_pixel_s = 0.5 * (x.high - x.low) / (x.end - x.start)
    drawn = []
    for name, colour in COLOURS.items():
        intervals = [(max(span.start, x.low), min(span.end, x.high) + half_pixel_s) for span in spans if span.name == name]
        boxes = [
            f"M{pixels(x(start))} {pixels(y)}H{pixels(max(x(end - half_pixel_s), x(start) + 0.5))}v{pixels(thick)}H{pixels(x(start))}z"
            for start, end in union(intervals)
        ]
        if boxes:
            drawn.append(tag("path", d="".join(boxes), css=f"area {colour}"))
    return "".join(drawn)


def _swap_ticks(tables: Tables, lane: str, x: Scale, *, y: float, thick: float) -> str:
    ticks, free_from = [], 0.0
    for swap in tables.swaps:
        if lane == f"engine-{swap.engine_id}" and x.low <= swap.t <= x.high:
            at = x(swap.t)
            version = "" if swap.version is None else f"v{swap.version:.0f}"
            title = tag("title", words(f"{lane} changed to {version}"))
            ticks.append(tag("line", x1=at, x2=at, y1=y, y2=y + thick, css="halo"))
            ticks.append(tag("line", title, x1=at, x2=at, y1=y - 4, y2=y + thick + 3, css="swap c-swap"))
            is_near_end = at > x.end - 24
            label_x = at + (-3 if is_near_end else 3)
            if label_x - LABEL * is_near_end < free_from:
                continue
            free_from = label_x + LABEL * (not is_near_end)
            ticks.append(tag("text", words(version), x=label_x, y=y - 1, css=f"tiny c-swap{' end' if is_near_end else ''}"))
    return "".join(ticks)


def _step_marks(tables: Tables, x: Scale, *, top: float, base: float) -> str:
    marks, free_from = [], 0.0
    for step in tables.steps:
        if x.low <= step.t <= x.high:
            at = x(step.t)
            marks.append(tag("line", x1=at, x2=at, y1=top - 4, y2=base, css="mark"))
            if at >= free_from and at < x.end - 46:
                marks.append(tag("text", words(f"step {step.step} done"), x=at, y=12, css="tick middle"))
                free_from = at + 84
    return "".join(marks)


def _overview(tables: Tables, activity: Activity, *, width: int) -> str:
    x = Scale(low=activity.start, high=activity.end, start=LEFT, end=width - RIGHT)
    bin_s = (activity.end - activity.start) / NUM_BINS
    body, top, thick, pitch = [], 8, 26, 34
    kinds = [kind for kind in WORKING if kind in activity.bins]
    for number, kind in enumerate(kinds):
        y = top + pitch * number
        parts = np.minimum(1.0, activity.bins[kind] / (bin_s * max(1, len(activity.known[kind]))))
        edges = [pixels(x(activity.start + (at + 0.5) * bin_s)) + "," + pixels(y + thick * (1 - part)) for at, part in enumerate(parts)]
        corners = f"{pixels(x.start)},{y + thick} {' '.join(edges)} {pixels(x.end)},{y + thick}"
        body.append(tag("rect", x=x.start, y=y, width=x.end - x.start, height=thick, css="lane"))
        body.append(tag("polygon", points=corners, css=f"area {COLOURS[WORKING[kind][0]]}"))
        name = {"engine": "engines", "scorer": "scoring", "trainer": "trainer"}[kind]
        body.append(tag("text", words(f"{name} {percent(float(parts.mean()))}"), x=LEFT - 8, y=y + 17, css="tick end"))
    base = top + pitch * len(kinds)
    low, high = (x(moment) for moment in activity.shown)
    body.append(tag("rect", x=low, y=top - 4, width=max(2.0, high - low), height=base - top + 2, css="frame"))
    body.append(_time_axis(tables, x, base=base, unit=time_unit(tables.duration_s)))
    return canvas("".join(body), width=width, height=base + 40, label="Work of engines, scoring and trainer over the whole run")


def _time_axis(tables: Tables, x: Scale, *, base: float, unit: tuple[float, str] = (1.0, "seconds")) -> str:
    axis = scale_of([tables.since_start(moment) / unit[0] for moment in (x.low, x.high)], start=x.start, end=x.end, is_tight=True)
    ticks = axis.ticks(max(3, round((x.end - x.start) / 95)))
    step = ticks[1] - ticks[0] if len(ticks) > 1 else 1.0
    body = [tag("line", x1=x.start, x2=x.end, y1=base, y2=base, css="axis")]
    for value in ticks:
        body.append(tag("line", x1=axis(value), x2=axis(value), y1=base, y2=base + 4, css="axis"))
        body.append(tag("text", words(tick_words(value, step=step)), x=axis(value), y=base + 17, css="tick middle"))
    body.append(tag("text", f"{unit[1]} since the run began", x=x.end, y=base + 34, css="label end"))
    return "".join(body)


def _fill(bins: npt.NDArray[np.float64], span: Span, *, start: float, end: float) -> None:
    """Add a span's seconds to the bins it covers; of many summed up, evenly."""
    bin_s = (end - start) / NUM_BINS
    share = 1.0 if span.busy_s is None or span.end <= span.start else span.busy_s / (span.end - span.start)
    first = max(0, int((span.start - start) / bin_s))
    last = min(NUM_BINS - 1, int((span.end - start) / bin_s))
    for at in range(first, last + 1):
        left = start + at * bin_s
        bins[at] += share * max(0.0, min(span.end, left + bin_s) - max(span.start, left))


def _in_order(lanes: Iterable[str]) -> list[str]:
    return sorted(lanes, key=lambda lane: [int(part) for part in re.findall(r"\d+", lane)])


def _lane_words(lane: str) -> str:
    return lane.replace("-", " ").replace("/", ", ")
