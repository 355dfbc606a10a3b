"""Names and axes: what a tracker is told, worked out by hand from a few lines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelinerl.observe.tracking.names import AXES, GAUGES_EVERY_S, SECONDS, STEP, VERSION, Namer, Point
from tests.observe.report.synthetic import write_run

Line = dict[str, Any]


def points_of(*lines: Line) -> list[Point]:
    namer = Namer()
    return [point for number, line in enumerate(lines) for point in namer.points(number, line)]


def run(t: float = 100.0) -> Line:
    return {"t": t, "kind": "run", "config": {"trainer": {"steps": 9}}}


def step(number: int, *, t: float = 101.0, **fields: Any) -> Line:
    return {"t": t, "kind": "step", "step": number, "reward_mean": 0.5, "num_samples": 4, "num_trained_tokens": 30} | fields


def status(t: float, **fields: Any) -> Line:
    return {"t": t, "kind": "status", "version": 3} | fields


def test_a_step_stands_over_its_number_under_the_names_people_know() -> None:
    trainer = {"grad_norm": 0.7, "learning_rate": 1e-5, "wait_s": 0.25, "odd": 2.0}
    trainer |= {"ess_fraction": 0.9, "ratio_min": 0.1, "ratio_max": 7.0, "clip_fraction": 0.02, "mismatch_kl_on_policy": 1e-6}
    trainer |= {"weight_zero_fraction": 0.03, "geo_rs_dropped_fraction": 0.04}
    ages = {"mean": 1.5, "min": 0, "max": 3, "in_flight_mean": 1.2, "in_flight_max": 2, "in_queue_mean": 0.3, "in_queue_max": 1}
    stale = {f"staleness_{name}": age for name, age in ages.items()}
    line = step(
        0, reward_std=0.1, greedy_reward_mean=0.75, components={"exact": 0.4}, length_mean=7.5, turns_mean=2.5, trainer=trainer, **stale
    )
    _, second = points_of(run(), line, step(1, t=102.0))
    first = points_of(run(), line)[0]
    assert (first.axis, first.at, first.line) == (STEP, 0, 1)
    assert first.values == {
        "progress/samples": 4,
        "progress/tokens": 30,
        "reward/all/mean": 0.5,
        "reward/all/std": 0.1,
        "reward/greedy/mean": 0.75,
        "reward/exact/mean": 0.4,
        "seq_len/all/mean": 7.5,
        "num_turns/all/mean": 2.5,
        "batch/samples": 4,
        "batch/trained_tokens": 30,
        "off_policy/mean": 1.5,
        "off_policy/min": 0,
        "off_policy/max": 3,
        "off_policy/in_flight/mean": 1.2,
        "off_policy/in_flight/max": 2,
        "off_policy/in_queue/mean": 0.3,
        "off_policy/in_queue/max": 1,
        "off_policy/ess": 0.9,
        "off_policy/ratio/min": 0.1,
        "off_policy/ratio/max": 7.0,
        "off_policy/clip_fraction": 0.02,
        "off_policy/weight_zero_fraction": 0.03,
        "off_policy/dropped/geo_rs": 0.04,
        "mismatch_kl/on_policy/mean": 1e-6,
        "optim/grad_norm": 0.7,
        "optim/lr": 1e-5,
        "time/wait_for_batch": 0.25,
        "trainer/odd": 2.0,
    }
    assert second.values["progress/samples"] == 8


def test_steps_that_are_done_again_after_a_resume_do_not_send_the_axis_back() -> None:
    again = [step(1, t=150.0, reward_mean=0.9), step(2, t=151.0)]
    points = points_of(run(), step(0), step(1, t=102.0), run(140.0), *again)
    assert [(point.at, point.values["reward/all/mean"]) for point in points] == [(0, 0.5), (1, 0.5), (2, 0.5)]


def test_gauges_are_thinned_by_the_clock_of_the_journal() -> None:
    points = points_of(run(), *(status(100.0 + 0.5 * number) for number in range(50)))
    assert [point.at for point in points] == [0.0, GAUGES_EVERY_S, 2 * GAUGES_EVERY_S]
    assert {point.axis for point in points} == {SECONDS}


def test_an_ill_engine_shows_beside_the_mean() -> None:
    engines = [{"engine_id": number, "num_running": running} for number, running in enumerate((60, 60, 3))]
    (point,) = points_of(run(), status(100.0, engines=engines))
    assert {name: value for name, value in point.values.items() if "running" in name} == {
        "inference/agg/num_running/mean": 41.0,
        "inference/agg/num_running/min": 3,
        "inference/agg/num_running/max": 60,
    }


def test_pauses_of_all_swaps_since_the_last_gauges_are_told_once() -> None:
    swaps = [{"t": 101.0, "kind": "swap", "engine_id": 0, "version": number, "pause_s": pause} for number, pause in enumerate((0.1, 0.3))]
    first, second, third = points_of(run(), status(100.0), *swaps, status(111.0), status(122.0))
    assert "weights/pause_s/max" not in first.values
    assert second.values["weights/pause_s/mean"] == pytest.approx(0.2)
    assert second.values["weights/pause_s/max"] == 0.3
    assert "weights/pause_s/max" not in third.values


def test_an_evaluation_stands_over_the_version_it_asked() -> None:
    (point,) = points_of(run(), {"t": 105.0, "kind": "evaluation", "version": 30, "reward_mean": 0.8, "num_prompts": 256})
    assert (point.axis, point.at, point.values) == (VERSION, 30, {"eval/all/avg@1": 0.8, "eval/num_prompts": 256})


def test_every_name_belongs_to_the_axis_it_stands_over(tmp_path: Path) -> None:
    for point in points_of(*(line for line in write_run(tmp_path) if line["process"] == "orchestrator")):
        strangers = {name for name in point.values if name.split("/")[0] not in (*AXES[point.axis], "progress")}
        assert not strangers


def failed(t: float, count: int, *, cause: str = 'ValueError("broke")', where: str = "a/rewards.py:12", outcome: str = "error") -> Line:
    return {"t": t, "kind": "function_error", "function": "verify", "cause": cause, "where": where, "outcome": outcome, "count": count}


def test_failures_of_functions_stand_by_cause_at_once_and_among_the_gauges() -> None:
    lines = run(), failed(101.0, 1), failed(102.0, 8), failed(103.0, 2, cause="no answer within 3 s", outcome="timeout"), status(104.0)
    points = [
        (point.axis, point.at, {name: value for name, value in point.values.items() if "errors" in name}) for point in points_of(*lines)
    ]
    broke, hung = "errors/verify/ValueError rewards.py:12", "errors/verify/timeout rewards.py:12"
    assert points == [
        (SECONDS, 1.0, {broke: 1}),
        (SECONDS, 2.0, {broke: 8}),
        (SECONDS, 3.0, {hung: 2}),
        (SECONDS, 4.0, {broke: 8, hung: 2}),
    ]


def test_an_alarm_stands_over_the_steps_from_the_next_one_on_and_is_zero_once_it_is_over() -> None:
    alarm = {"t": 101.5, "kind": "alarm", "name": "truncation", "began": 0, "step": 0}
    over = alarm | {"t": 103.5, "is_over": True}
    points = points_of(run(), step(0), alarm, step(1, t=102.0), step(2, t=103.0), over, step(3, t=104.0))
    assert [point.values.get("alarm/truncation") for point in points] == [None, 1.0, 1.0, 0.0]


def test_trained_tokens_per_second_are_those_sampled_and_what_the_trainer_computes_has_a_name_of_its_own() -> None:
    trainer = {"tokens_per_s": 7000.0}
    points = points_of(
        run(), *(step(number, t=100.0 + 2 * number, num_tokens=900, num_useful_tokens=12, trainer=trainer) for number in range(5))
    )
    assert points[-1].values["perf/throughput"] == 30 / 2.0
    assert points[-1].values["perf/throughput_useful"] == 12 / 2.0
    assert points[-1].values["perf/throughput_computed"] == 7000.0


def test_held_out_has_a_name_for_each_reward_function() -> None:
    (point,) = points_of(run(), {"t": 105.0, "kind": "evaluation", "version": 3, "reward_mean": 0.5, "components": {"right": 0.25}})
    assert point.values["eval/right/mean"] == 0.25
