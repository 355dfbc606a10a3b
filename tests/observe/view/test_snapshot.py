"""What the page is told, from journals whose numbers are known."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pipelinerl.observe.view.snapshot import POINTS, Snapshot
from tests.observe.report.synthetic import START_UP_S, Plan, write_run


def told(folder: Path) -> dict:
    snapshot = Snapshot(folder)
    snapshot.look()
    return json.loads(json.dumps(snapshot.as_json()))


def test_a_finished_run_is_told_whole(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(num_steps=12))
    state = told(tmp_path)
    assert (state["ended"], state["steps_done"], state["steps"]) == ("all steps done", 12, 12)
    assert [step for step, _ in state["curves"]["reward"]] == list(range(12))
    assert state["curves"]["held_out"] == [[0, 0.125], [6, 0.5], [12, 0.8125]]
    assert state["imbalance"] == 0
    assert state["left_s"] is None


def test_who_waits_and_how_full_queues_are_is_what_the_last_gauges_say(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(num_steps=13, is_held=True))
    state = told(tmp_path)
    assert state["waits"][0] == ["generation: an admission credit", 0.9]
    assert state["queues"]["micro-batches"]["fill"] == pytest.approx(state["queues"]["micro-batches"]["items"] * 65536 / (1 << 20))
    assert [engine["id"] for engine in state["engines"]] == [0, 1]
    assert state["engines"][0]["slots"] == 64


def test_rates_are_of_the_last_seconds_and_once_a_run_has_ended_of_all_of_it(tmp_path: Path) -> None:
    # 64 trajectories in each period of 1.2004 s; start-up, in which nothing passes, counts only over the whole run.
    write_run(tmp_path / "on", Plan(num_steps=60), without=frozenset({"end"}))
    assert told(tmp_path / "on")["queues"]["trajectories"]["per_s"] == pytest.approx(64 / 1.2004, rel=0.02)
    write_run(tmp_path / "over", Plan(num_steps=60))
    over = told(tmp_path / "over")
    assert over["queues"]["trajectories"]["per_s"] == pytest.approx(60 * 64 / (60 * 1.2004 + START_UP_S), rel=0.03)
    assert over["queues"]["micro-batches"]["per_s"] is None, "this journal does not say"


def test_what_was_waited_for_is_told_as_parts_of_the_run_longest_first(tmp_path: Path) -> None:
    # The trainer waits 0.4704 s of each period of 1.2004 s, scoring 0.3 s of it; generation never.
    write_run(tmp_path, Plan(num_steps=60))
    waited = told(tmp_path)["waited"]
    assert [name for name, _ in waited] == ["trainer: a micro-batch"], "a stage that had nothing to do says nothing of who is slow"
    whole_s = 60 * 1.2004 + START_UP_S
    assert [part for _, part in waited] == pytest.approx([60 * 0.4704 / whole_s], rel=0.02)


def test_what_the_journals_gain_is_folded_and_nothing_twice(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(num_steps=4), without=frozenset({"end"}))
    snapshot = Snapshot(tmp_path)
    snapshot.look()
    with open(tmp_path / "journal" / "orchestrator.jsonl", "a") as file:
        file.write(json.dumps({"t": 2e9, "kind": "step", "step": 4, "reward_mean": 0.75}) + "\n")
    snapshot.look()
    snapshot.look()
    assert snapshot.as_json()["curves"]["reward"][-1] == [4, 0.75]
    assert len(snapshot.as_json()["curves"]["reward"]) == 5


def test_a_long_run_stays_small(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(num_steps=3000, generate_s=0.2, train_s=0.1, score_s=0.1))
    state = told(tmp_path)
    assert all(len(points) <= POINTS + 1 for points in state["curves"].values())
    assert state["curves"]["reward"][-1][0] == 2999
    assert len(json.dumps(state)) < 150_000


def journal_gains(folder: Path, *lines: dict) -> None:
    with open(folder / "journal" / "orchestrator.jsonl", "a") as file:
        file.writelines(json.dumps({"t": 2e9 + number, **line}) + "\n" for number, line in enumerate(lines))


def test_alarms_are_told_with_the_step_where_each_began_and_ended(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(num_steps=4), without=frozenset({"end"}))
    alarm = {"kind": "alarm", "change": "Raise rollout.max_tokens."}
    journal_gains(
        tmp_path,
        {**alarm, "name": "truncation", "began": 20, "step": 29, "figure": "54% cut"},
        {**alarm, "name": "entropy_collapse", "began": 31, "step": 40, "figure": "0.01 nats"},
        {**alarm, "name": "truncation", "began": 20, "step": 55, "figure": "now well", "is_over": True},
    )
    words = "Raise rollout.max_tokens."
    assert told(tmp_path)["alarms"] == [
        {"name": "entropy_collapse", "began": 31, "over": None, "figure": "0.01 nats", "change": words},
        {"name": "truncation", "began": 20, "over": 55, "figure": "54% cut", "change": words},
    ]
    journal_gains(tmp_path, {"t": 3e9, "kind": "run", "config": {}})
    assert told(tmp_path)["alarms"] == [], "a resumed run begins anew"


def test_failures_of_functions_are_told_by_cause_with_the_step_of_the_first(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(num_steps=4), without=frozenset({"end"}))
    error = {"kind": "function_error", "function": "exact", "function_kind": "reward", "cause": "ValueError: x", "where": "rewards.py:7"}
    journal_gains(
        tmp_path,
        {**error, "count": 1, "num_calls": 2},
        {**error, "count": 3, "cause": "y" * 10_000},
        {"kind": "step", "step": 9},
        {**error, "count": 40, "num_calls": 64},
    )
    first, second = told(tmp_path)["function_errors"]
    assert first == {
        "function": "exact",
        "kind": "reward",
        "cause": "ValueError: x",
        "where": "rewards.py:7",
        "count": 40,
        "num_calls": 64,
        "began": 4,
    }
    assert (second["count"], len(second["cause"])) == (3, 500)


def test_held_out_and_training_rewards_are_told_by_component(tmp_path: Path) -> None:
    write_run(tmp_path, Plan(num_steps=4))
    for version in (0, 2):
        journal_gains(tmp_path, {"kind": "evaluation", "version": version, "reward_mean": 0.5, "components": {"a": version / 4, "b": 1.0}})
    parts = told(tmp_path)["components"]
    assert parts["held_out"] == {"a": [[0, 0.0], [2, 0.5]], "b": [[0, 1.0], [2, 1.0]]}
    assert list(parts["training"]) == ["exact", "format"]
    assert [step for step, _ in parts["training"]["exact"]] == [0, 1, 2, 3]


def test_curves_over_time_begin_with_the_run(tmp_path: Path) -> None:
    write_run(tmp_path)
    snapshot = Snapshot(tmp_path)
    snapshot.look()
    curves = snapshot.as_json()["curves"]
    assert 0 <= curves["generated"][0][0] < 60
    assert 0 <= curves["running"][0][0] < 60
