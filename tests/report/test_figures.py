"""Single figures: what a reader takes off them is what the journal says."""

import re
from pathlib import Path

import numpy as np
import pytest

from pipelinerl.report import figures
from pipelinerl.report.reading import Tables, read_tables
from pipelinerl.report.rows import StepRow, SwapRow
from tests.report.synthetic import Plan, write_run


def _x_of_last_point(drawn: str, *, nth_line: int) -> tuple[float, float]:
    """First and last x coordinate of a figure's line."""
    points = re.findall(r'polyline points="([^"]*)"', drawn)[nth_line].split()
    return float(points[0].split(",")[0]), float(points[-1].split(",")[0])


def test_samples_on_the_axis_add_up_over_the_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(num_steps=16))
    first, last = _x_of_last_point(figures.reward_over_samples(read_tables(tmp_path / "run")), nth_line=0)
    # From 64 of 1,024 samples to all of them, on an axis from 50 to 508.
    assert first == pytest.approx(50 + 458 / 16, abs=0.1)
    assert last == pytest.approx(508)


def test_rolling_mean_is_over_the_last_points_only() -> None:
    assert figures.rolling_mean([(0, 4.0), (1, 2.0), (2, 6.0), (3, 10.0)], width=2) == [(0, 4.0), (1, 3.0), (2, 4.0), (3, 8.0)]


def test_percentiles_of_the_pauses_are_drawn_and_labelled() -> None:
    pauses_ms = [float(pause) for pause in range(1, 12)]
    swaps = tuple(SwapRow(t=float(number), engine_id=0, version=number, pause_s=pause / 1000) for number, pause in enumerate(pauses_ms))
    drawn = figures.pause_per_swap(Tables(folder=Path(), began=0.0, ended=20.0, swaps=swaps))
    assert "p50 6.00 ms" in drawn
    assert f"p99 {np.quantile(pauses_ms, 0.99):.1f} ms" in drawn
    assert drawn.count("<circle") == 11


def test_pauses_of_very_different_length_get_a_logarithmic_scale() -> None:
    swaps = tuple(SwapRow(t=float(number), engine_id=0, pause_s=pause) for number, pause in enumerate((0.00005, 0.2)))
    drawn = figures.pause_per_swap(Tables(folder=Path(), began=0.0, ended=2.0, swaps=swaps))
    assert all(f">{tick}<" in drawn for tick in ("0.01", "0.1", "1", "10", "100", "1000"))


def test_many_swaps_are_thinned_and_the_figure_says_so() -> None:
    swaps = tuple(SwapRow(t=float(number), engine_id=0, pause_s=0.001) for number in range(1500))
    drawn = figures.pause_per_swap(Tables(folder=Path(), began=0.0, ended=1500.0, swaps=swaps))
    assert drawn.count("<circle") == 500
    assert "1,500 swaps, one in 3 drawn" in drawn
    assert "KV cache" not in drawn, "every sequence kept its own"


def test_what_a_kv_policy_costs_is_said_beside_the_pauses() -> None:
    swaps = tuple(SwapRow(t=float(number), engine_id=0, pause_s=0.001, num_recomputed_tokens=600.0) for number in range(2))
    drawn = figures.pause_per_swap(Tables(folder=Path(), began=0.0, ended=2.0, swaps=swaps))
    assert "they dropped the KV cache of 1,200 tokens, to be computed again" in drawn.replace("\N{NO-BREAK SPACE}", " ")


def test_very_old_tokens_share_the_last_bar() -> None:
    step = StepRow(t=1.0, step=0, staleness={0: 70.0, 3: 10.0, 20: 15.0, 40: 5.0})
    drawn = figures.staleness_histogram(Tables(folder=Path(), steps=(step,)))
    assert re.findall(r"<title>([^<]*)</title>", drawn.replace("\N{NO-BREAK SPACE}", " ")) == ["0: 70.0 %", "3: 10.0 %", "≥ 15: 20.0 %"]


def test_staleness_is_drawn_with_its_parts_and_its_extremes() -> None:
    ages = {"mean": 1.5, "min": 0.0, "max": 3.0, "in_flight_mean": 1.2, "in_queue_mean": 0.3}
    steps = tuple(StepRow(t=1.0 + number, step=number, **{f"staleness_{name}": age for name, age in ages.items()}) for number in range(2))
    drawn = figures.staleness_over_time(Tables(folder=Path(), steps=steps))
    assert all(part in drawn for part in ("mean over tokens", "in flight", "in queue", "oldest token", "youngest token"))


def test_every_mask_has_a_meter_and_the_mismatch_says_when_it_ends_the_run() -> None:
    trainer = {"geo_rs_dropped_fraction": 0.2, "mismatch_kl_fresh": 0.001, "ratio_min": 0.5, "weight_zero_fraction": 0.1}
    tables = Tables(folder=Path(), config={"trainer": {"max_mismatch_kl": 0.03}}, steps=(StepRow(t=1.0, step=0, trainer=trainer),))
    drawn = figures.meters(tables)
    assert "tokens dropped by geo_rs" in drawn
    assert "above 0.03 the run ends" in drawn.replace("\N{NO-BREAK SPACE}", " ")
    assert all(title in drawn for title in ("importance ratio, smallest", "tokens of importance weight 0"))


def test_time_axis_has_the_unit_that_suits_its_length() -> None:
    assert [figures.time_unit(duration)[1] for duration in (None, 59.0, 3600.0, 86400.0)] == ["seconds", "seconds", "minutes", "hours"]
