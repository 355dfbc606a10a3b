"""One answer from several pools, on values worked by hand."""

from __future__ import annotations

import pytest

from pipelinerl.messages import Outcome
from pipelinerl.rewards.aggregator import Aggregator
from pipelinerl.rewards.calls import CallResult

KEY = 7


def part(*components: dict[str, float], outcome: Outcome = Outcome.OK, error: str = "", duration_s: float = 1.0) -> CallResult:
    times = {"started_at": 0.0, "duration_s": duration_s, "durations_s": {}}
    return CallResult(call_id=0, outcome=outcome, components=components, error=error, **times)


def aggregator(*pools: int, must_apply: bool = True, **weights: float) -> Aggregator:
    return Aggregator(request_id=KEY, weights=weights, must_apply=must_apply, missing=set(pools))


def test_reward_is_the_weighted_sum_over_all_pools_and_components_stay_unweighted() -> None:
    both = aggregator(0, 1, rule=0.5, judge=-2.0)
    assert both.add(1, part({"judge": 3.0}, duration_s=4.0)) is None
    total = both.add(0, part({"rule": 2.0}))
    assert total is not None
    assert (total.outcome, total.rewards, total.components) == (Outcome.OK, (0.5 * 2.0 - 2.0 * 3.0,), ({"judge": 3.0, "rule": 2.0},))
    assert total.duration_s == 4.0


def test_first_failure_is_the_answer_and_the_others_are_not_waited_for() -> None:
    three = aggregator(0, 1, 2, rule=1.0)
    three.add(0, part({"rule": 1.0}))
    total = three.add(2, part(outcome=Outcome.TIMEOUT, error="judge did not return"))
    assert total is not None
    assert (total.request_id, total.outcome, total.rewards, total.error) == (KEY, Outcome.TIMEOUT, (), "judge did not return")
    assert three.missing == {1}, "from which the request is withdrawn"


def test_pool_that_answers_twice_counts_once() -> None:
    two = aggregator(0, 1, rule=1.0, judge=1.0)
    assert two.add(0, part({"rule": 1.0})) is None
    assert two.add(0, part({"rule": 9.0})) is None
    total = two.add(1, part({"judge": 1.0}))
    assert total is not None
    assert total.rewards == (2.0,)
    assert two.add(1, part({"judge": 5.0})) is None


def test_sample_to_which_no_function_applies_is_invalid_unless_others_are_to_come() -> None:
    total = aggregator(0, f0=1.0, f1=1.0).add(0, part({}))
    assert total is not None
    assert (total.outcome, total.rewards) == (Outcome.INVALID, ())
    assert total.error == "no reward function applies: f0, f1 returned None"
    total = aggregator(0, f0=1.0, must_apply=False).add(0, part({}))
    assert total is not None
    assert (total.outcome, total.rewards, total.components) == (Outcome.OK, (0,), ({},))


def test_members_of_a_group_are_summed_apart() -> None:
    total = aggregator(0, rank=2.0).add(0, part({"rank": 1.0}, {"rank": -1.0}))
    assert total is not None
    assert total.rewards == (2.0, -2.0)


@pytest.mark.parametrize("values", [{"a": 1e308, "b": 1e308}])
def test_sum_that_overflows_is_invalid(values: dict[str, float]) -> None:
    total = aggregator(0, a=1.0, b=1.0).add(0, part(values))
    assert total is not None
    assert (total.outcome, total.rewards) == (Outcome.INVALID, ())
    assert "is inf, expected a finite number" in total.error
