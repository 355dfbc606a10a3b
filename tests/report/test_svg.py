"""Scales, ticks and thinning, on numbers worked by hand."""

import re

import pytest

from pipelinerl.report.svg import Plot, Scale, bar_chart, decimate, scale_of, tag, tick_words


def test_scale_maps_its_borders_and_its_middle() -> None:
    scale = Scale(low=10.0, high=20.0, start=100.0, end=300.0)
    assert [scale(value) for value in (10.0, 15.0, 20.0)] == [100.0, 200.0, 300.0]
    assert scale(25.0) == 300.0, "outside the domain is drawn at its border"


def test_logarithmic_scale_gives_every_decade_the_same_room() -> None:
    scale = scale_of([0.02, 150.0], start=0.0, end=100.0, is_log=True)
    assert (scale.low, scale.high) == pytest.approx((0.01, 1000.0))
    assert [scale(value) for value in (0.01, 0.1, 1.0, 1000.0)] == pytest.approx([0.0, 20.0, 40.0, 100.0])
    assert scale.ticks(4) == pytest.approx([0.01, 0.1, 1.0, 10.0, 100.0, 1000.0])


def test_ticks_are_round_and_lie_within_the_scale() -> None:
    assert Scale(low=0.0, high=53.0, start=0, end=1).ticks(5) == [0, 20, 40]
    assert Scale(low=0.12, high=0.83, start=0, end=1).ticks(4) == pytest.approx([0.2, 0.4, 0.6, 0.8])
    assert Scale(low=0.0, high=2.0, start=0, end=1).ticks(8, smallest_step=1.0) == [0, 1, 2]


def test_borders_of_a_scale_are_round_numbers_around_all_values() -> None:
    scale = scale_of([0.12, 0.83], start=0, end=1)
    assert (scale.low, scale.high) == pytest.approx((0.0, 1.0))
    assert scale_of([5.0, 9.0], start=0, end=1, from_zero=True).low == 0.0


@pytest.mark.parametrize("value", [0.0, 1.0, -3.0, 1e-9, 2.5e12])
def test_values_that_are_all_equal_still_make_a_scale(value: float) -> None:
    scale = scale_of([value, value], start=0, end=100)
    assert scale.low < scale.high
    assert 0 <= scale(value) <= 100


@pytest.mark.parametrize(
    ("value", "step", "written"),
    [
        (0.0, 5.0, "0"),
        (0.25, 0.25, "0.25"),
        (12_000.0, 2_000.0, "12k"),
        (2_500.0, 2_500.0, "2.5k"),
        (400_000.0, 100_000.0, "400k"),
        (3e6, 1e6, "3M"),
        (3.5e-5, 5e-6, "3.5e-5"),
        (2.5e-6, 2.5e-6, "2.5e-6"),
    ],
)
def test_tick_words_tell_a_tick_from_its_neighbour(value: float, step: float, written: str) -> None:
    assert tick_words(value, step=step) == written


def test_thinning_keeps_spikes_and_both_ends() -> None:
    points = [(float(x), 0.0) for x in range(10_000)]
    points[1234] = (1234.0, 9.0)
    points[7777] = (7777.0, -4.0)
    thin = decimate(points, limit=100)
    assert len(thin) <= 110
    assert {(1234.0, 9.0), (7777.0, -4.0), points[0], points[-1]} <= set(thin)
    assert [x for x, _ in thin] == sorted(x for x, _ in thin)


def test_attribute_values_and_words_cannot_break_out() -> None:
    assert tag("text", x='1" onload="x', css="a<b") == '<text x="1&quot; onload=&quot;x" class="a&lt;b"></text>'


def test_a_line_goes_through_its_points() -> None:
    plot = Plot(label="a", x_values=[0, 10], y_values=[0, 1], x_label="x", y_label="y")
    plot.line([(0, 0), (5, 0.5), (10, 1)], css="c")
    # x from 50 to 520 - 12, y from 230 - 40 up to 30.
    assert 'points="50,190 279,110 508,30"' in plot.svg()


def test_labels_of_rules_close_together_do_not_overlap() -> None:
    plot = Plot(label="a", x_values=[0, 1], y_values=[0, 1], x_label="x", y_label="y", right=104)
    plot.rule(0.50, text="p50", css="c")
    plot.rule(0.51, text="p99", css="c")
    at = [float(y) for y in re.findall(r'y="([\d.]+)" class="label c"', plot.svg())]
    assert at[0] - at[1] >= 12


def test_heights_of_bars_are_their_values() -> None:
    drawn = bar_chart([("0", 100.0, "a"), ("1", 50.0, "b")], label="", x_label="", y_label="", css="c")
    heights = [float(height) for height in re.findall(r'height="([\d.]+)" class="area', drawn)]
    assert heights[0] == pytest.approx(2 * heights[1])


def test_ticks_of_tiny_values_are_told_apart() -> None:
    """A KL of 1e-13 had an axis of three zeros."""
    assert [tick_words(value, step=5e-14) for value in (0.0, 5e-14, 1e-13)] == ["0", "5e-14", "1.0e-13"]
