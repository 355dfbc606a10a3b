"""What a replica of the trainer did beside others, and which layouts the rule of roles makes of it.

Two replicas that train 600 tokens of rows per second each, where one alone trained 1,000, are worth 1,200; with 300 each they are worth
600, and the one alone was faster.
"""

from __future__ import annotations

import pytest

from orchestrator.rules.replica_worth import LEAST, ReplicaWorth
from orchestrator.rules.roles import EngineProfile, Layout, Pool, Roles, Window

ALONE, THERE = 0, 1


def seen(*windows: tuple[int, float, float]) -> ReplicaWorth:
    found = ReplicaWorth()
    for units, row_rate, context in windows:
        found.note(units, row_rate, context=context)
    return found


def test_nothing_is_known_before_replicas_have_changed():
    found = seen((ALONE, 1000.0, 100.0), (ALONE, 400.0, 100.0))
    assert found.over(THERE, ALONE, context=100.0) == 1.0


@pytest.mark.parametrize("windows", [((ALONE, 1000.0), (THERE, 300.0)), ((THERE, 300.0), (ALONE, 1000.0))])
def test_replicas_that_hinder_each_other_are_remembered_whichever_was_first(windows: tuple[tuple[int, float], ...]):
    found = seen(*((units, rate, 100.0) for units, rate in windows))
    assert found.over(THERE, ALONE, context=100.0) == pytest.approx(0.3)
    assert found.over(ALONE, THERE, context=100.0) == pytest.approx(1 / 0.3)
    assert found.over(3, THERE, context=100.0) == 1.0, "three are taken for no worse than two"
    assert found.over(3, ALONE, context=100.0) == pytest.approx(0.3)


def test_replicas_that_leave_each_other_most_of_their_speed_are_proportional():
    found = seen((ALONE, 1000.0, 100.0), (THERE, 1000.0 * LEAST, 100.0))
    assert found.over(THERE, ALONE, context=100.0) == 1.0
    assert seen((ALONE, 1000.0, 100.0), (THERE, 1200.0, 100.0)).over(THERE, ALONE, context=100.0) == 1.0, "none is worth more than alone"


def test_each_further_change_is_a_part_of_the_one_before():
    found = seen((0, 1000.0, 100.0), (1, 700.0, 100.0), (2, 350.0, 100.0))
    assert found.over(2, 0, context=100.0) == pytest.approx(0.35)
    assert found.over(2, 1, context=100.0) == pytest.approx(0.5)


def test_nothing_is_said_of_another_load():
    other = seen((ALONE, 1000.0, 100.0), (THERE, 300.0, 200.0))
    assert other.worth == {}, "it may be the load"
    found = seen((ALONE, 1000.0, 100.0), (THERE, 300.0, 100.0))
    assert found.over(THERE, ALONE, context=200.0) == 1.0
    found.note(THERE, 500.0, context=400.0)
    found.note(ALONE, 800.0, context=400.0)
    assert found.over(THERE, ALONE, context=400.0) == pytest.approx(0.625)
    assert found.over(THERE, ALONE, context=100.0) == 1.0, "the newest load is the one that is remembered"
    other = seen((1, 1000.0, 100.0), (3, 100.0, 100.0), (3, 100.0, 400.0), (2, 100.0, 400.0))
    assert other.worth == {3: 1.0, 2: 1.0}, "what one rank did in another load is forgotten"


def test_who_says_nothing_of_its_speed_changes_nothing():
    assert seen((ALONE, 0.0, 100.0), (THERE, 300.0, 100.0)).worth == {}
    assert seen((ALONE, 1000.0, 100.0), (THERE, 0.0, 100.0)).worth == {}


def window(rate: float) -> Window:
    """Of rows that are sampled tokens for a half."""
    return Window(tokens=30_000, num_steps=2, context=100, slowness=1.0, replica_rate=rate / 2, row_rate=rate)


def test_a_change_that_made_the_run_slower_goes_back_and_is_not_tried_again():
    """Three engines write 1,500 tokens per second, and a rank trains 1,000 of rows, of which 500 were sampled; two train 600 in all."""
    pool = Pool(
        unit_devices=1,
        unit_replicas=1,
        core_replicas=1,
        profiles={1: EngineProfile(pass_s=lambda num, context: 0.02, slots=10, room=1e9)},
        most_running=1e9,
        switch_s=1.0,
    )
    roles = Roles(pool, Layout(engines=3, width=1), window_steps=2)
    assert roles.plan(2, window(1000.0)) is None, "the first window"
    there = roles.plan(4, window(1000.0))
    assert there is not None
    assert there.after.trainers > 0
    roles.done(there.epoch)
    back = roles.plan(6, window(300.0))
    assert back is not None
    assert back.after == Layout(engines=3, width=1)
    roles.done(back.epoch)
    assert roles.plan(8, window(1000.0)) is None
    assert roles.plan(10, window(1000.0)) is None
    assert roles.weighed is not None
    assert roles.weighed.then == Layout(engines=3, width=1), "it is remembered"
