"""One answer from several lanes, on values worked by hand."""

from __future__ import annotations

import pytest

from pipelinerl.messages import Outcome
from pipelinerl.rewards.aggregator import Joining, Part

KEY = ("r0", 0)


def part(*components: dict[str, float], duration_s: float = 1.0) -> Part:
    return Part(outcome=Outcome.OK, components=components, duration_s=duration_s)


def joining(*lanes: int, must_apply: bool = True, **weights: float) -> Joining:
    made = Joining(weights, must_apply=must_apply)
    made.expect(KEY, lanes)
    return made


def test_reward_is_the_weighted_sum_over_all_lanes_and_components_stay_unweighted() -> None:
    both = joining(0, 1, rule=0.5, judge=-2.0)
    assert both.add(KEY, 1, part({"judge": 3.0}, duration_s=4.0)) is None
    whole = both.add(KEY, 0, part({"rule": 2.0}))
    assert whole is not None
    assert (whole.outcome, whole.rewards, whole.components) == (Outcome.OK, (0.5 * 2.0 - 2.0 * 3.0,), ({"judge": 3.0, "rule": 2.0},))
    assert whole.duration_s == 4.0


def test_first_failure_is_the_answer_and_names_the_lanes_nobody_needs_any_more() -> None:
    three = joining(0, 1, 2, rule=1.0)
    three.add(KEY, 0, part({"rule": 1.0}))
    whole = three.add(KEY, 2, Part(outcome=Outcome.TIMEOUT, error="judge did not return"))
    assert whole is not None
    assert (whole.outcome, whole.rewards, whole.error, whole.unheard) == (Outcome.TIMEOUT, (), "judge did not return", {1})
    assert three.add(KEY, 1, part({"late": 1.0})) is None


def test_lane_that_answers_twice_or_after_it_was_dropped_counts_once() -> None:
    two = joining(0, 1, rule=1.0, judge=1.0)
    assert two.add(KEY, 0, part({"rule": 1.0})) is None
    assert two.add(KEY, 0, part({"rule": 9.0})) is None
    two.drop(KEY)
    assert two.add(KEY, 1, part({"judge": 1.0})) is None


def test_request_repeated_while_under_way_keeps_what_was_answered() -> None:
    two = joining(0, 1, rule=1.0, judge=1.0)
    two.add(KEY, 0, part({"rule": 1.0}))
    two.expect(KEY, (0, 1))
    whole = two.add(KEY, 1, part({"judge": 1.0}))
    assert whole is not None
    assert whole.rewards == (2.0,)


def test_sample_to_which_no_function_applies_is_invalid_unless_others_are_to_come() -> None:
    whole = joining(0, f0=1.0, f1=1.0).add(KEY, 0, part({}))
    assert whole is not None
    assert (whole.outcome, whole.rewards) == (Outcome.INVALID, ())
    assert whole.error == "no reward function applies: f0, f1 returned None"
    whole = joining(0, f0=1.0, must_apply=False).add(KEY, 0, part({}))
    assert whole is not None
    assert (whole.outcome, whole.rewards, whole.components) == (Outcome.OK, (0,), ({},))


def test_members_of_a_group_are_summed_apart() -> None:
    whole = joining(0, rank=2.0).add(KEY, 0, part({"rank": 1.0}, {"rank": -1.0}))
    assert whole is not None
    assert whole.rewards == (2.0, -2.0)


@pytest.mark.parametrize("values", [{"a": 1e308, "b": 1e308}])
def test_sum_that_overflows_is_invalid(values: dict[str, float]) -> None:
    whole = joining(0, a=1.0, b=1.0).add(KEY, 0, part(values))
    assert whole is not None
    assert (whole.outcome, whole.rewards) == (Outcome.INVALID, ())
    assert "is inf, expected a finite number" in whole.error
