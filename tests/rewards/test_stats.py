"""Figures per reward function, worked by hand."""

from __future__ import annotations

from pipelinerl.messages import Outcome
from pipelinerl.rewards.pool.limits import BreakerState
from pipelinerl.rewards.pool.stats import NUM_REMEMBERED, FunctionStats


def test_quantiles_are_of_each_function_apart_and_the_slowest_rollout_is_named() -> None:
    stats = FunctionStats()
    for index in range(100):
        stats.note({"rule": (index + 1) / 100, "judge": 5.0}, rollout_id=f"r{index}")
    rule, judge = (stats.report({"judge": BreakerState.OPEN})[name] for name in ("rule", "judge"))
    assert (rule.num_calls, rule.p50_s, rule.p95_s, rule.max_s, rule.slowest) == (100, 0.5, 0.95, 1.0, "r99")
    assert (judge.p50_s, judge.max_s, judge.breaker, rule.breaker) == (5.0, 5.0, "open", "closed")


def test_failure_is_counted_for_the_function_to_blame_only_and_by_outcome() -> None:
    stats = FunctionStats()
    stats.note({"rule": 0.1, "judge": 1.0}, rollout_id="r0", failed="judge", outcome=Outcome.TIMEOUT)
    stats.note({"rule": 0.1}, rollout_id="r1", failed="rule", outcome=Outcome.INVALID)
    stats.retried("judge")
    report = stats.report({})
    assert (report["rule"].num_failed, report["rule"].num_calls) == ({"invalid": 1}, 2)
    assert (report["judge"].num_failed, report["judge"].num_retries) == ({"timeout": 1}, 1)


def test_durations_are_those_of_the_last_calls_and_counts_are_of_all() -> None:
    stats = FunctionStats()
    stats.note({"rule": 99.0}, rollout_id="old")
    for _ in range(NUM_REMEMBERED):
        stats.note({"rule": 1.0}, rollout_id="new")
    report = stats.report({})["rule"]
    assert (report.max_s, report.num_calls) == (1.0, NUM_REMEMBERED + 1)
