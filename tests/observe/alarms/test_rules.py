"""Alarms of learning: each acts on the curve it is for, at the step where that began, and none on a run that learns as it should."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config.alarm_names import AlarmName
from pipelinerl.observe.alarms.names import ALARMS
from pipelinerl.observe.alarms.rules import FLAT_AFTER, WINDOW, Alarms
from pipelinerl.observe.fold.rows import Alarm, EvaluationRow, StepRow, read
from pipelinerl.observe.renamed import current

Line = dict[str, Any]
DEMO = Path(__file__).parent / "demo.jsonl"
"""Steps and evaluations of a run of the demo: held-out from 0.277 to 0.980 in 150 steps."""


def step(number: int, **changes: Any) -> Line:
    """A step of a healthy run that learns slowly: reward 0.3 + 0.002 a step."""
    trainer = {"entropy": 0.9, "ess_fraction": 0.95, "mismatch_kl_on_policy": 1e-4, "mismatch_kl_stale_kv": 1e-3} | changes.pop(
        "trainer", {}
    )
    figures = {"reward_mean": 0.3 + 0.002 * number, "length_mean": 200.0, "truncated_fraction": 0.05, "zero_variance_fraction": 0.3}
    return {"step": number, "num_groups": 32, "filtered_groups": 0, "stale_groups": 0, "trainer": trainer} | figures | changes


def raised(curve: Callable[[int], Line], *, num_steps: int, rules: Alarms | None = None) -> list[Alarm]:
    rules = rules or Alarms()
    return [alarm for number in range(num_steps) for alarm in rules.take_step(read(StepRow, curve(number)))]


def only(alarms: list[Alarm]) -> Alarm:
    (alarm,) = alarms
    return alarm


def test_the_demos_own_run_raises_nothing():
    rules, lines = Alarms(), [json.loads(raw) for raw in DEMO.read_text().splitlines()]
    assert len(lines) > 150
    for line in lines:
        rules.take_step(read(StepRow, current(line))) if line["kind"] == "step" else rules.take_evaluation(read(EvaluationRow, line))
    assert rules.raised == []


def test_a_healthy_run_with_noise_raises_nothing_in_a_thousand_steps():
    chance = random.Random(3)

    def curve(number: int) -> Line:
        reward = 0.2 + 0.7 * (1 - math.exp(-number / 200)) + chance.gauss(0, 0.04)
        length = 200 + 400 * (1 - math.exp(-number / 200)) + chance.gauss(0, 20)
        right = {"right": reward, "format": 0.9 + chance.gauss(0, 0.03)}
        trainer = {"entropy": 0.9 - 0.5 * (1 - math.exp(-number / 300)) + chance.gauss(0, 0.02)}
        return step(number, reward_mean=reward, length_mean=length, components=right, trainer=trainer, repeated_fraction=0.1)

    rules = Alarms()
    for number in range(1000):
        assert rules.take_step(read(StepRow, curve(number))) == []
        if number % 50 == 49:
            held_out = 0.18 + 0.7 * (1 - math.exp(-number / 200)) + chance.gauss(0, 0.02)
            assert rules.take_evaluation(read(EvaluationRow, {"version": number + 1, "reward_mean": held_out, "num_prompts": 256})) == []


def test_truncation_is_told_from_the_step_where_it_began():
    # 60 % from step 20 on: the mean of ten passes 50 % once nine of them are: 0.9 x 0.6 + 0.1 x 0.05 = 0.545; eight give 0.49.
    alarm = only(raised(lambda n: step(n, truncated_fraction=0.6 if n >= 20 else 0.05), num_steps=60))
    assert (alarm.name, alarm.began, alarm.step) == (AlarmName.TRUNCATION, 20, 28)
    assert str(alarm) == "truncation since step 20: 54% of samples are cut off at rollout.max_tokens"
    assert "rollout.max_tokens" in alarm.change


def test_an_alarm_ends_ten_steps_after_its_rule_held_last_and_may_come_again():
    rules = Alarms()
    told = raised(lambda n: step(n, truncated_fraction=0.9 if n < 20 or n >= 60 else 0.0), num_steps=80, rules=rules)
    assert [(alarm.is_over, alarm.began) for alarm in told] == [(False, 0), (True, 0), (False, 60)]
    # The mean of ten is 0.54 at step 23 and 0.45 at step 24: quiet from there, for ten steps.
    assert told[1].step == 33
    assert list(rules.active) == [AlarmName.TRUNCATION]


def test_groups_without_a_gradient_are_told_those_set_aside_among_them_unless_the_task_is_solved():
    alarm = only(raised(lambda n: step(n, zero_variance_fraction=0.85), num_steps=20))
    assert alarm.name is AlarmName.NO_SIGNAL
    assert "85% of groups" in alarm.figure
    # 32 placed, 0.3 of them flat, and 150 set aside: (9.6 + 150) / 182 = 88 %.
    assert "88%" in only(raised(lambda n: step(n, filtered_groups=150), num_steps=20)).figure
    assert raised(lambda n: step(n, reward_mean=0.95, zero_variance_fraction=0.95), num_steps=90) == []


def test_entropy_that_collapses_is_told_unless_the_task_is_solved():
    def curve(number: int, reward: float) -> Line:
        return step(number, reward_mean=reward + 0.001 * number, trainer={"entropy": 0.9 * math.exp(-number / 8)})

    alarm = only(raised(lambda n: curve(n, 0.1), num_steps=40))
    assert alarm.name is AlarmName.ENTROPY_COLLAPSE
    # The first ten average 0.546; 5 % of that is 0.0273, which 0.9 exp(-n / 8) is below from step 28 on: exp(-28 / 8) = 0.0302.
    assert alarm.began == 28
    assert alarm.figure == "entropy fell from 0.546 to 0.0272 nats, at a reward of 0.129"
    assert raised(lambda n: curve(n, 0.91), num_steps=40) == []


def test_held_out_that_falls_while_the_training_reward_rises_is_told_and_ends_when_it_is_back():
    rules = Alarms()
    told: list[Alarm] = []
    for number in range(90):
        assert rules.take_step(read(StepRow, step(number, reward_mean=0.3 + 0.005 * number))) == []
        if number % 30 == 29:
            told += rules.take_evaluation(
                read(EvaluationRow, {"version": number + 1, "reward_mean": {29: 0.6, 59: 0.4, 89: 0.61}[number], "num_prompts": 256})
            )
    first, over = told
    assert (first.name, first.began, first.step) == (AlarmName.REWARD_HACKING, 30, 59)
    assert first.figure == "held-out fell from 0.6 to 0.4 since version 30, training reward rose from 0.422 to 0.573"
    assert over.is_over


def test_a_held_out_reward_that_falls_within_its_noise_is_not_told():
    # Of 16 prompts at 0.5 the error of a difference is sqrt(2 x 0.25 / 16) = 0.177: a fall of 0.2 is nothing; of 1,024 prompts it is.
    for num, expected in ((16, 0), (1024, 1)):
        rules = Alarms()
        raised(lambda n: step(n, reward_mean=0.3 + 0.005 * n), num_steps=30, rules=rules)
        rules.take_evaluation(read(EvaluationRow, {"version": 30, "reward_mean": 0.5, "num_prompts": num}))
        for number in range(30, 60):
            rules.take_step(read(StepRow, step(number, reward_mean=0.3 + 0.005 * number)))
        assert len(rules.take_evaluation(read(EvaluationRow, {"version": 60, "reward_mean": 0.3, "num_prompts": num}))) == expected


def test_a_component_that_falls_while_the_sum_rises_is_told():
    def curve(number: int) -> Line:
        return step(number, reward_mean=0.3 + 0.004 * number, components={"right": 0.5 - 0.004 * number, "pretty": 0.1 + 0.008 * number})

    alarm = only(raised(curve, num_steps=80))
    assert alarm.name is AlarmName.REWARD_HACKING
    assert alarm.figure.startswith("right fell from 0.482 to 0.3")
    assert alarm.began == 9


def test_without_an_evaluation_and_with_one_component_nothing_is_said_of_reward_hacking():
    assert raised(lambda n: step(n, components={"right": 0.3 + 0.002 * n}), num_steps=300) == []


def test_lengths_that_drift_are_told_where_the_reward_does_not_rise_with_them():
    alarm = only(raised(lambda n: step(n, reward_mean=0.5, length_mean=200.0 * 1.02**n), num_steps=49))
    assert alarm.name is AlarmName.LENGTH_DRIFT
    # From the first ten to the last ten is a factor of 1.02^35 = 2.0 after 45 steps.
    assert alarm.step == 45
    assert raised(lambda n: step(n, length_mean=200.0 * 1.02**n, reward_mean=0.3 + 0.004 * n), num_steps=100) == []
    assert only(raised(lambda n: step(n, reward_mean=0.5, length_mean=200.0 * 0.98**n), num_steps=49)).name is AlarmName.LENGTH_DRIFT


def test_samples_that_repeat_themselves_are_told_but_not_those_that_always_did():
    alarm = only(raised(lambda n: step(n, repeated_fraction=min(0.9, 0.01 * n)), num_steps=60))
    assert alarm.name is AlarmName.REPETITION
    assert raised(lambda n: step(n, repeated_fraction=0.35), num_steps=60) == []


@pytest.mark.parametrize(
    ("changes", "name", "figure"),
    [
        ({"trainer": {"ess_fraction": 0.43}}, AlarmName.OFF_POLICY, "0.43"),
        ({"trainer": {"mismatch_kl_on_policy": 0.012}}, AlarmName.MISMATCH, "0.012"),
        ({"trainer": {"mismatch_kl_stale_kv": 0.05}}, AlarmName.STALE_KV, "0.05"),
        ({"stale_groups": 16}, AlarmName.STALE, "33%"),
    ],
)
def test_levels_are_told_with_their_figure(changes: Line, name: AlarmName, figure: str):
    alarm = only(raised(lambda n: step(n, **changes), num_steps=30))
    assert alarm.name is name
    assert figure in alarm.figure
    assert alarm.began == 0


def test_an_engine_that_stands_out_is_told_in_that_step_and_let_go_when_it_has_not_for_a_while():
    rules, words = Alarms(), "engine 1's log-probabilities differ: KL 0.4 over 12 sequences"
    told = raised(lambda n: step(n, **({"engine_mismatch": [words]} if n in (3, 4) else {})), num_steps=30, rules=rules)
    assert [(alarm.name, alarm.began, alarm.step, alarm.is_over) for alarm in told] == [
        (AlarmName.ENGINE_MISMATCH, 3, 3, False),
        (AlarmName.ENGINE_MISMATCH, 3, 4 + WINDOW, True),
    ]
    assert told[0].figure == words
    assert raised(lambda n: step(n, engine_mismatch="no list"), num_steps=30) == []


def test_a_reward_that_never_moves_is_told_and_one_that_begins_to_is_let_go():
    chance = random.Random(1)
    noise = [chance.gauss(0, 0.02) for _ in range(200)]
    rules = Alarms()
    told = raised(lambda n: step(n, reward_mean=0.02 + noise[n] + max(0.0, 0.01 * (n - 80))), num_steps=140, rules=rules)
    assert [(alarm.name, alarm.is_over) for alarm in told] == [(AlarmName.FLAT_REWARD, False), (AlarmName.FLAT_REWARD, True)]
    assert told[0].step == FLAT_AFTER
    assert rules.active == {}


def test_rewards_count_in_their_own_scale():
    # Right is worth 10: a rise of 0.3 is 3 % of that, within what is no news, and the length drift is told.
    rules = Alarms(correct_reward=10.0)
    told = raised(lambda n: step(n, reward_mean=5 + 0.006 * n, length_mean=200.0 * 1.02**n), num_steps=49, rules=rules)
    assert only(told).name is AlarmName.LENGTH_DRIFT


def test_a_run_that_records_nothing_raises_nothing():
    assert raised(lambda n: {"step": n}, num_steps=300) == []
    assert raised(lambda n: {"step": n, "reward_mean": None, "trainer": None, "components": [1], "num_groups": 0}, num_steps=300) == []


def test_steps_that_are_done_again_after_a_resume_count_once():
    rules = Alarms()
    for number in [*range(15), *range(8, 40)]:
        rules.take_step(read(StepRow, step(number, truncated_fraction=0.9 if number >= 12 else 0.0)))
    assert [alarm.began for alarm in rules.raised] == [12]


def test_every_alarm_says_what_to_change():
    assert set(ALARMS) == set(AlarmName)
