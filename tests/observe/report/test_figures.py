"""Single figures: what a reader takes off them is what the journal says."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelinerl.observe.fold.rows import RunRow, StepRow, SwapRow
from pipelinerl.observe.report import figures
from pipelinerl.observe.report.plots import time_unit
from pipelinerl.observe.report.reading import Tables, read_tables
from tests.observe.report.synthetic import Plan, write_run


def test_samples_on_the_axis_add_up_over_the_steps(tmp_path: Path) -> None:
    write_run(tmp_path / "run", Plan(num_steps=16))
    figure = figures.reward_over_samples(read_tables(tmp_path / "run"))
    assert figure.data()["lines"][0]["x"] == [64 * number for number in range(1, 17)]
    assert figure.x_from == 0.0


def test_rolling_mean_is_over_the_last_points_only() -> None:
    assert figures.rolling_mean([(0, 4.0), (1, 2.0), (2, 6.0), (3, 10.0)], width=2) == [(0, 4.0), (1, 3.0), (2, 4.0), (3, 8.0)]


def test_percentiles_of_the_pauses_are_drawn_and_labelled() -> None:
    pauses_ms = [float(pause) for pause in range(1, 12)]
    swaps = tuple(SwapRow(t=float(number), engine_id=0, version=number, pause_s=pause / 1000) for number, pause in enumerate(pauses_ms))
    dots, p50, p99 = figures.pause_per_swap(Tables(folder=Path(), began=0.0, ended=20.0, swaps=swaps)).lines
    assert [y for _, y in dots.points] == pytest.approx(pauses_ms)
    assert dots.says[4].replace("\N{NO-BREAK SPACE}", " ") == "engine 0, version 4: 5.00 ms"
    assert (p50.name, p99.name) == ("p50 6.00 ms", f"p99 {np.quantile(pauses_ms, 0.99):.1f} ms")
    assert {y for _, y in p50.points} == {6.0}


def test_pauses_of_very_different_length_get_a_logarithmic_scale() -> None:
    swaps = tuple(SwapRow(t=float(number), engine_id=0, pause_s=pause) for number, pause in enumerate((0.00005, 0.2)))
    assert figures.pause_per_swap(Tables(folder=Path(), began=0.0, ended=2.0, swaps=swaps)).is_log
    assert not figures.pause_per_swap(Tables(folder=Path(), began=0.0, ended=2.0, swaps=swaps[:1])).is_log


def test_a_pause_of_zero_lies_on_the_border_of_a_logarithmic_scale_and_says_what_it_is() -> None:
    swaps = tuple(SwapRow(t=float(number), engine_id=0, pause_s=pause) for number, pause in enumerate((0.0, 0.001, 0.2)))
    figure = figures.pause_per_swap(Tables(folder=Path(), began=0.0, ended=3.0, swaps=swaps))
    assert figure.is_log
    assert [y for _, y in figure.lines[0].points] == pytest.approx([1.0, 1.0, 200.0])
    assert figure.lines[0].says[0].replace("\N{NO-BREAK SPACE}", " ").endswith(": 0 ms")


def test_many_swaps_are_thinned_and_the_figure_says_so() -> None:
    swaps = tuple(SwapRow(t=float(number), engine_id=0, pause_s=0.001) for number in range(1500))
    figure = figures.pause_per_swap(Tables(folder=Path(), began=0.0, ended=1500.0, swaps=swaps))
    assert len(figure.data()["lines"][0]["x"]) == 500
    assert figure.note == "1,500 swaps, one in 3 drawn", "every sequence kept its own KV cache"


def test_swaps_of_one_instant_are_all_drawn() -> None:
    swaps = tuple(SwapRow(t=5.0, engine_id=engine, pause_s=0.001 * (engine + 1)) for engine in range(4))
    dots = figures.pause_per_swap(Tables(folder=Path(), began=0.0, ended=9.0, swaps=swaps)).data()["lines"][0]
    assert len(set(dots["x"])) == 4
    assert dots["x"] == pytest.approx([5.0] * 4, rel=1e-4)
    assert [words[: len("engine 0")] for words in dots["says"]] == [f"engine {engine}" for engine in range(4)]


def test_what_a_kv_policy_costs_is_said_beside_the_pauses() -> None:
    swaps = tuple(SwapRow(t=float(number), engine_id=0, pause_s=0.001, num_recomputed_tokens=600.0) for number in range(2))
    figure = figures.pause_per_swap(Tables(folder=Path(), began=0.0, ended=2.0, swaps=swaps))
    assert "they dropped the KV cache of 1,200 tokens, to be computed again" in figure.note


def test_very_old_tokens_share_the_last_bar() -> None:
    step = StepRow(t=1.0, step=0, staleness={0: 70.0, 3: 10.0, 20: 15.0, 40: 5.0})
    bars = [(name, said.replace("\N{NO-BREAK SPACE}", " ")) for name, _, said in histogram_rows(step)]
    assert bars == [("0", "70.0 %"), ("3", "10.0 %"), ("≥ 15", "20.0 %")]


def histogram_rows(step: StepRow) -> list[tuple[str, ...]]:
    return figures.staleness_histogram(Tables(folder=Path(), steps=(step,))).summary()


def test_staleness_is_drawn_with_its_parts_and_its_extremes() -> None:
    ages: dict[str, Any] = {"mean": 1.5, "min": 0.0, "max": 3.0, "in_flight_mean": 1.2, "in_queue_mean": 0.3}
    steps = tuple(StepRow(t=1.0 + number, step=number, **{f"staleness_{name}": age for name, age in ages.items()}) for number in range(2))
    rows = figures.staleness_over_time(Tables(folder=Path(), steps=steps)).summary()
    assert [row[0].split(",")[0] for row in rows] == [
        "mean over tokens",
        "of it in flight",
        "of it in queue",
        "oldest token",
        "youngest token",
    ]
    assert [float(row[-1]) for row in rows] == [1.5, 1.2, 0.3, 3.0, 0.0]


def test_every_mask_has_a_meter_and_the_mismatch_says_when_it_ends_the_run() -> None:
    trainer = {"geo_rs_dropped_fraction": 0.2, "mismatch_kl_on_policy": 0.001, "ratio_min": 0.5, "weight_zero_fraction": 0.1}
    tables = Tables(
        folder=Path(),
        run=RunRow(config={"trainer": {"max_mismatch_kl": 0.03}}),
        steps=(StepRow(t=1.0, step=0, trainer=trainer),),
    )
    notes = {figure.title: figure.note for figure in figures.meters(tables)}
    assert notes["KL between engine and trainer, same version"] == "last 0.00100; above 0.03 the run ends"
    assert {"tokens dropped by geo_rs", "importance ratio, smallest", "tokens of importance weight 0"} < set(notes)


def test_time_axis_has_the_unit_that_suits_its_length() -> None:
    assert [time_unit(duration)[1] for duration in (None, 59.0, 3600.0, 86400.0)] == ["seconds", "seconds", "minutes", "hours"]
