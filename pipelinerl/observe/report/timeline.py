"""The work of each process over time: every engine, scoring slot and trainer rank on a lane of its own, over a stretch of a few steps.

Above it the whole run in thin bands, with the stretch marked. What the picture is for: lanes of engines and trainer filled at the same
time are the overlap the pipeline exists for, and a swap (a tick) that leaves no gap in its lane is a swap without a pause.

The plot library has no lanes, so `templates/parts.html` sets them as SVG, as wide as the window: x in percent, y in pixels.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from pipelinerl.observe.lines import Span, read_spans
from pipelinerl.observe.report.plots import time_unit
from pipelinerl.observe.report.reading import Tables
from pipelinerl.observe.report.units import percent

SHORTEST_S = 10.0
LONGEST_S = 20.0
"""A stretch shows about three steps, but no less and no more than these, so that single forward passes stay visible."""
STEPS_SHOWN = 3
MAX_SLOTS = 6
"""Scoring lanes drawn one by one; the rest is named in a note."""
NUM_BINS = 240
"""Bins of the overview: about four pixels each."""
LANE, PITCH, BAND = 16, 24, 26
"""Pixels of a lane, from one lane to the next, and of a band of the overview."""

WIDTHS = {"first": 260.0, "wide": 920.0}
"""Pixels of a picture on a phone and on a page of full width."""

WORKING = {"engine": ("forward",), "scorer": ("score",), "trainer": ("forward_backward", "optimizer", "publish")}
"""Span names that count as work, by kind of lane."""
COLOURS = {
    "forward": "engine",
    "score": "score",
    "forward_backward": "train",
    "optimizer": "train-dark",
    "publish": "warm",
    "wait": "wait",
    "swap": "swap",
}
LEGEND = (
    ("engine in forward passes", "engine"),
    ("reward call", "score"),
    ("forward and backward", "train"),
    ("optimizer", "train-dark"),
    ("writes the policy", "warm"),
    ("trainer waits", "wait"),
    ("swap of an engine's weights", "swap"),
)

Interval = tuple[float, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lane:
    """One bar of a picture."""

    name: str
    y: int
    height: int
    shapes: Sequence[tuple[str, str]]
    """(colour, SVG path), x from 0 to 1000 over the width, y from 0 to 1 over the height."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Mark:
    """An upright line and the words beside it."""

    x: float
    """Percent of the width."""
    y: tuple[int, int]
    """Pixels."""
    css: str
    title: str = ""
    """Words that show when the pointer rests on the line."""
    words: str = ""
    place: str = "first"
    """`first` to show the words on every screen, `wide` on a wide one only, where a narrow one has no room; empty: nowhere."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Picture:
    """Lanes below each other over one time axis."""

    title: str
    note: str
    lanes: list[Lane]
    marks: list[Mark]
    base: int
    """Pixels from the top to the axis."""
    x_label: str
    legend: Sequence[tuple[str, str]] = ()
    frame: tuple[float, float] | None = None
    """Start and width of the stretch drawn elsewhere, percent."""


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


def timeline(tables: Tables) -> list[Picture]:
    """The stretch and the overview; nothing where no span was recorded."""
    shown = choose_stretch(tables)
    if shown is None:
        return []
    activity = read_activity(tables, shown)
    return [_lanes(tables, activity), _overview(tables, activity)] if activity.known else []


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
    """Return the same moments as disjoint intervals in order."""
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


def _lanes(tables: Tables, activity: Activity) -> Picture:
    low, high = activity.shown
    slots = _in_order(activity.known.get("scorer", ()))
    names = [*_in_order(activity.known.get("engine", ())), *slots[:MAX_SLOTS], *_in_order(activity.known.get("trainer", ()))]
    lanes, marks = [], []
    for number, (name, words) in enumerate(zip(names, _lane_words(names), strict=True)):
        y = 20 + PITCH * number + 8
        spans = activity.lanes.get(name, ())
        lanes.append(Lane(name=words, y=y, height=LANE, shapes=_span_shapes(spans, low=low, high=high)))
        marks += _swap_marks(tables, name, low=low, high=high, y=y)
    base = 20 + PITCH * len(names) + 8
    done = [(100 * (step.t - low) / (high - low), f"step {step.step} done") for step in tables.steps if low <= step.t <= high]
    marks = [Mark(x=x, y=(16, base), css="step", words=words, place=place) for x, words, place in _with_room(done, pixels=92)] + marks
    note = _overlap_note(activity)
    if len(slots) > MAX_SLOTS:
        note += f"{'; ' if note else ''}{len(slots) - MAX_SLOTS} more scoring slots not drawn"
    length_s = high - low
    is_part = length_s < activity.end - activity.start
    return Picture(
        title=f"{length_s:.0f} seconds from the {_place(tables, activity.shown)} of the run" if is_part else "The whole run",
        note=note,
        lanes=lanes,
        marks=[*marks, *_ticks(tables, low, high, base=base)],
        base=base,
        x_label="seconds since the run began",
        legend=LEGEND,
    )


def _overview(tables: Tables, activity: Activity) -> Picture:
    bin_s = (activity.end - activity.start) / NUM_BINS
    lanes = []
    for number, kind in enumerate(kind for kind in WORKING if kind in activity.bins):
        parts = np.minimum(1.0, activity.bins[kind] / (bin_s * max(1, len(activity.known[kind]))))
        edges = "".join(f"L{1000 * (at + 0.5) / NUM_BINS:.1f} {1 - part:.3f}" for at, part in enumerate(parts))
        name = {"engine": "engines", "scorer": "scoring", "trainer": "trainer"}[kind]
        shape = (COLOURS[WORKING[kind][0]], f"M0 1{edges}L1000 1z")
        lanes.append(Lane(name=f"{name} {percent(float(parts.mean()))}", y=8 + 34 * number, height=BAND, shapes=[shape]))
    base = 8 + 34 * len(lanes)
    unit_s, unit = time_unit(tables.duration_s)
    length_s = activity.end - activity.start
    low, high = ((moment - activity.start) / length_s for moment in activity.shown)
    return Picture(
        title="The whole run",
        note="from the first token on: part of the time at work, by kind; the frame marks the seconds drawn above",
        lanes=lanes,
        marks=_ticks(tables, activity.start, activity.end, base=base, unit_s=unit_s),
        base=base,
        x_label=f"{unit} since the run began",
        frame=(100 * low, max(0.2, 100 * (high - low))),
    )


def _span_shapes(spans: Sequence[Span], *, low: float, high: float) -> list[tuple[str, str]]:
    """One path per colour; spans less than half a thousandth of the width apart are drawn as one."""
    gap_s, shapes = 0.0005 * (high - low), []
    for name, colour in COLOURS.items():
        intervals = union((max(span.start, low), min(span.end, high) + gap_s) for span in spans if span.name == name)
        edges = [(1000 * (start - low) / (high - low), 1000 * (end - gap_s - low) / (high - low)) for start, end in intervals]
        if edges:
            shapes.append((colour, "".join(f"M{start:.1f} 0H{max(end, start + 0.5):.1f}V1H{start:.1f}z" for start, end in edges)))
    return shapes


def _swap_marks(tables: Tables, lane: str, *, low: float, high: float, y: int) -> list[Mark]:
    swaps = [swap for swap in tables.swaps if lane == f"engine-{swap.engine_id}" and low <= swap.t <= high]
    versions = [(100 * (swap.t - low) / (high - low), "" if swap.version is None else f"v{swap.version:.0f}") for swap in swaps]
    return [
        Mark(x=x, y=(y - 4, y + LANE + 3), css="swap", title=f"{lane} changed to {version}", words=version, place=place)
        for x, version, place in _with_room(versions, pixels=30)
    ]


def _with_room(labels: Iterable[tuple[float, str]], *, pixels: float) -> list[tuple[float, str, str]]:
    """(percent, words, place) for labels of about `pixels` each: which of them fit beside each other on a wide and on a narrow screen."""
    placed, free_from = [], dict.fromkeys(WIDTHS, 0.0)
    for x, words in labels:
        room = {screen: 100 * pixels / width for screen, width in WIDTHS.items()}
        fits = [screen for screen in WIDTHS if free_from[screen] <= x <= 100 - room[screen] / 2]
        place = "" if "wide" not in fits else fits[0]
        free_from |= {screen: x + room[screen] for screen in fits if place}
        placed.append((x, words, place))
    return placed


def _ticks(tables: Tables, low: float, high: float, *, base: int, unit_s: float = 1.0) -> list[Mark]:
    first, last = (tables.since_start(moment) / unit_s for moment in (low, high))
    at = [(100 * (value - first) / (last - first), f"{value:g}") for value in round_values(first, last, count=10)]
    return [Mark(x=x, y=(base, base + 4), css="tick", words=words, place=place) for x, words, place in _with_room(at, pixels=50)]


def round_values(low: float, high: float, *, count: int) -> list[float]:
    """At most about `count` round numbers from `low` to `high`, evenly spaced."""
    raw = (high - low) / count or 1.0
    magnitude = 10.0 ** math.floor(math.log10(raw))
    step = next(magnitude * factor for factor in (1, 2, 2.5, 5, 10) if magnitude * factor >= raw * (1 - 1e-9))
    return [number * step for number in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


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


def _lane_words(lanes: Sequence[str]) -> list[str]:
    """`scorer 0, slot 1`; with what stands between where that does not tell two lanes apart."""
    parts = [lane.replace("-", " ").split("/") for lane in lanes]
    short = [", ".join(dict.fromkeys((each[0], each[-1]))) for each in parts]
    return short if len(set(short)) == len(short) else [", ".join(each) for each in parts]
