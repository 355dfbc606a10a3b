"""Orders of a live run that follow from what the rule of roles plans, and what becomes of them.

Engines write 500 tokens per second each, a rank trains 1,000 or, in a window that says so, 300. Two engines and two ranks are worth
min(1,000, 2,000); three engines and one rank min(1,500, 1,000); and with 300 for a rank, 600 and 300.
"""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.rules.pass_profile import PassSeconds
from orchestrator.rules.role_orders import Decision, Orders, RoleOrders, Seen, Word, layout_of, orders_of
from orchestrator.rules.roles import HOLD_WINDOWS, Layout, Pool, Roles, Window
from orchestrator.rules.switch_seconds import FIRST_S, SwitchSeconds
from pipelinerl.config.layout import Layout as TrainerLayout
from pipelinerl.config.scaling import Units, units_of
from pipelinerl.config.scoring import PrmSection
from pipelinerl.config.sections import EngineSection

ONE = Units(devices=1, engines=1, core_ranks=1, ranks_per_replica=1)
PASSES = PassSeconds(a=0.01, b=0.001, c=0.0)
"""Ten sequences in 20 ms."""
WINDOW = Window(tokens=30_000, num_steps=2, context=1000, slowness=1.0, replica_rate=300)
BEGAN, OTHER = Orders(3, 1), Orders(2, 2)


def rule(*, start_s: float = 10.0, deadline_s: float = 100.0, may_be: bool = True) -> RoleOrders:
    pool = Pool(
        unit_devices=1,
        unit_replicas=1,
        core_replicas=1,
        profiles={},
        most_running=1e9,
        switch_s=0.0,
        least_deadline_s=deadline_s,
        may_be=lambda layout: may_be,
    )
    found = RoleOrders(Roles(pool, Layout(engines=3, width=1), window_steps=2), ONE, wanted=BEGAN)
    found.seconds.started(start_s)
    return found


def seen(
    wanted: Orders = BEGAN, *, step: int = 2, now_s: float = 0.0, changes: bool = False, away: bool = False, whole: bool = True
) -> Seen:
    is_settled = not (changes or away)
    return Seen(wanted=wanted, is_settled=is_settled, is_away=away, is_whole=whole and is_settled, step=step, now_s=now_s)


def planned(found: RoleOrders, *, step: int = 2, now_s: float = 0.0, window: Window = WINDOW, wanted: Orders = BEGAN) -> Decision | None:
    return found.plan(seen(wanted, step=step, now_s=now_s), window, PASSES, slots=10, room=1e9)


def test_a_layout_that_pays_is_ordered_and_taken_once_everybody_is_there():
    """300 tokens per second become 600: four windows of 30,000 take 200 s in place of 400."""
    found = rule()
    begun = planned(found)
    assert begun is not None
    assert (begun.word, begun.now, begun.then, begun.orders) == (Word.BEGINS, BEGAN, OTHER, OTHER)
    weighed = found.roles.weighed
    assert weighed is not None
    assert (weighed.speed_now, weighed.speed_then, weighed.saved_s) == (pytest.approx(300), pytest.approx(600), pytest.approx(200))
    assert weighed.cost_s == pytest.approx(10), "the trainer is away for all of the seconds of a start"
    assert not found.may_plan
    assert found.follow(seen(OTHER, now_s=1.0, changes=True)) is None
    assert found.follow(seen(OTHER, now_s=9.0, whole=False)) is None, "the trainer is there, an engine is not"
    taken = found.follow(seen(OTHER, now_s=12.0))
    assert taken is not None
    assert (taken.word, taken.orders) == (Word.TAKEN, None)
    assert found.roles.layout == Layout(engines=2, width=1, trainers=1)
    assert found.may_plan


def test_a_layout_that_does_not_pay_or_cannot_be_stays_and_says_what_it_weighed():
    dear = planned(rule(start_s=200.0))
    assert dear is not None
    assert (dear.word, dear.now, dear.then, dear.orders) == (Word.STAYS, BEGAN, OTHER, None), "200 s are not 1.5 times 200"
    cannot = planned(rule(may_be=False))
    assert cannot is not None
    assert (cannot.word, cannot.then) == (Word.STAYS, BEGAN)


def test_what_a_change_costs_is_what_those_before_it_took():
    found = rule()
    planned(found)
    found.follow(seen(OTHER, now_s=3.0, changes=True))
    found.follow(seen(OTHER, now_s=4.0, away=True))
    found.follow(seen(OTHER, now_s=9.0, whole=False))
    found.follow(seen(OTHER, now_s=20.0))
    assert (found.seconds.switch_s, found.seconds.away_s) == (pytest.approx(20), pytest.approx(5))
    slow = dataclasses.replace(WINDOW, replica_rate=1e4)
    planned(found, step=4, now_s=100.0, window=slow, wanted=OTHER)
    assert (found.roles.pool.switch_s, found.roles.pool.away_s) == (pytest.approx(20), pytest.approx(5))


def test_seconds_of_a_change_are_a_guess_until_one_was_measured_and_then_the_mean():
    found = SwitchSeconds()
    assert (found.switch_s, found.away_s) == (FIRST_S, FIRST_S)
    found.started(12.0)
    assert (found.switch_s, found.away_s) == (12.0, 12.0)
    for began_s, away_s in ((100.0, 4.0), (200.0, 6.0)):
        found.began(began_s)
        found.trainer_is(is_away=True, now_s=began_s + 1)
        found.trainer_is(is_away=True, now_s=began_s + 2)
        found.trainer_is(is_away=False, now_s=began_s + 1 + away_s)
        found.ended(began_s + 2 * away_s + 2)
    assert (found.switch_s, found.away_s) == (pytest.approx(12), pytest.approx(5))


def test_a_change_that_is_taken_back_leaves_the_layout_before_and_nothing_is_planned_for_a_while():
    found = rule()
    planned(found)
    assert found.follow(seen(BEGAN, now_s=5.0, away=True)) is None, "the trainer of before is still to start"
    back = found.follow(seen(BEGAN, now_s=9.0, whole=False, step=5))
    assert back is not None
    assert (back.word, back.then, back.orders) == (Word.TAKEN_BACK, BEGAN, None)
    assert (found.roles.layout, found.roles.change) == (Layout(engines=3, width=1), None)
    assert planned(found, step=5 + 2 * HOLD_WINDOWS - 1) is None
    assert planned(found, step=5 + 2 * HOLD_WINDOWS) is not None
    assert found.seconds.switch_s == 10.0, "it says nothing of what a change takes"


def test_orders_that_are_refused_are_taken_back_with_the_reason():
    found = rule()
    planned(found)
    back = found.follow(dataclasses.replace(seen(BEGAN), reason="trainer=2: no room"))
    assert back is not None
    assert (back.word, back.then, back.reason) == (Word.TAKEN_BACK, BEGAN, "trainer=2: no room")
    assert planned(found, step=3) is None


def test_a_change_that_is_late_is_ordered_back_once():
    found = rule(deadline_s=400.0)
    planned(found)
    assert found.follow(seen(OTHER, now_s=400.0, whole=False)) is None
    assert found.follow(seen(OTHER, now_s=401.0, changes=True)) is None, "a trainer that changes has deadlines of its own"
    late = found.follow(seen(OTHER, now_s=401.0, whole=False, step=3))
    assert late is not None
    assert (late.word, late.now, late.orders) == (Word.LATE, OTHER, BEGAN)
    again = found.follow(seen(BEGAN, now_s=2000.0, whole=False, step=4))
    assert again is not None
    assert (again.word, again.orders) == (Word.LATE, None), "there is nothing else to go back to"
    assert found.roles.layout == Layout(engines=3, width=1)


def test_an_order_by_hand_wins_and_is_the_pool_from_then_on():
    found = rule()
    by_hand = found.follow(seen(Orders(5, 2), step=3))
    assert by_hand is not None
    assert (by_hand.word, by_hand.then, by_hand.orders) == (Word.BY_HAND, Orders(5, 2), None)
    assert found.roles.layout == Layout(engines=5, width=1, trainers=1)
    assert planned(found, step=3 + 2 * HOLD_WINDOWS - 1, wanted=Orders(5, 2)) is None
    begun = planned(found, step=3 + 2 * HOLD_WINDOWS, wanted=Orders(5, 2))
    assert begun is not None
    assert begun.then.engines + begun.then.trainer == 7, "as many devices as were asked for"


def test_an_order_by_hand_in_the_middle_of_a_change_ends_it():
    found = rule()
    planned(found)
    assert found.follow(seen(Orders(1, 2), away=True)) is None
    by_hand = found.follow(seen(Orders(1, 2), now_s=20.0, whole=False))
    assert by_hand is not None
    assert by_hand.word is Word.BY_HAND
    assert (found.roles.layout, found.roles.change) == (Layout(engines=1, width=1, trainers=1), None)


def test_units_are_as_few_devices_as_hold_whole_engines_and_whole_copies_of_the_model():
    wide = EngineSection.model_validate({"options": {"tensor_parallel_size": 2}})
    assert units_of(EngineSection(), TrainerLayout(ranks=1)) == ONE  # pyright: ignore[reportCallIssue]
    assert units_of(wide, TrainerLayout(ranks=3)) == Units(devices=2, engines=1, core_ranks=1, ranks_per_replica=1)
    sharded = units_of(wide, TrainerLayout(ranks=8, shard=4))
    assert (sharded.devices, sharded.engines, sharded.core_ranks, sharded.replicas) == (4, 2, 4, 4)
    tensor = units_of(EngineSection(), TrainerLayout(ranks=4, tensor=4))  # pyright: ignore[reportCallIssue]
    assert (tensor.devices, tensor.engines, tensor.core_ranks, tensor.replicas) == (4, 4, 4, 1)


def test_orders_that_are_no_whole_units_have_no_layout_and_nothing_is_planned_from_them():
    two = Units(devices=2, engines=2, core_ranks=2, ranks_per_replica=1)
    layout = Layout(engines=3, width=1, trainers=1)
    assert orders_of(layout, two) == Orders(6, 4)
    assert layout_of(Orders(6, 4), two, width=1) == layout
    assert [layout_of(one, two, width=1) for one in (Orders(5, 4), Orders(6, 3), Orders(6, 1))] == [None, None, None]
    found = RoleOrders(rule().roles, two, wanted=Orders(6, 2))
    odd = found.follow(seen(Orders(5, 2)))
    assert odd is not None
    assert (odd.word, odd.reason) == (
        Word.BY_HAND,
        "engines=5 trainer=2 are no whole units of 2 devices: nothing is planned until they are",
    )
    assert not found.may_plan
    assert found.follow(seen(Orders(4, 2))) is not None
    assert found.may_plan


def test_a_process_reward_models_engines_change_with_whole_units_and_one_unit_of_them_stays():
    """Three engines write 1,500 tokens per second, one that scores 300: two of each are worth 600."""

    def prm(**keys: object) -> PrmSection:
        return PrmSection.model_validate({"path": "p", **keys})

    engine, trainer = EngineSection(), TrainerLayout(ranks=1)  # pyright: ignore[reportCallIssue]
    units = units_of(engine, trainer, prm(count=2))
    assert units == dataclasses.replace(ONE, prms=1, core_prms=1)
    assert units_of(engine, trainer, prm(options={"tensor_parallel_size": 2})) == ONE, "two devices do not change here"
    assert units_of(engine, trainer, PrmSection()) == ONE, "there is none"  # pyright: ignore[reportCallIssue]
    wide = EngineSection.model_validate({"options": {"tensor_parallel_size": 2}})
    assert units_of(wide, trainer, prm(count=4)).core_prms == 2
    assert orders_of(Layout(engines=2, width=1, scorers=1), units) == Orders(2, 1, 2)
    assert layout_of(Orders(2, 1, 2), units, width=1) == Layout(engines=2, width=1, scorers=1)
    assert layout_of(Orders(2, 1, 3), units_of(wide, trainer, prm(count=4)), width=2) is None
    pool = dataclasses.replace(rule().roles.pool, core_scorers=1.0)
    found = RoleOrders(Roles(pool, Layout(engines=3, width=1), window_steps=2), units, wanted=Orders(3, 1, 1))
    found.seconds.started(10.0)
    window = dataclasses.replace(WINDOW, replica_rate=2000, scorer_rate=300)
    begun = planned(found, window=window, wanted=Orders(3, 1, 1))
    assert begun is not None
    assert (begun.word, begun.orders) == (Word.BEGINS, Orders(2, 1, 2))
    assert str(begun.orders) == "engines=2 trainer=1 prm=2"
    assert found.follow(seen(Orders(2, 1, 2), now_s=10.0)) is not None
    back = planned(found, step=8, window=dataclasses.replace(window, scorer_rate=2000), wanted=Orders(2, 1, 2))
    assert back is not None
    assert (back.word, back.orders) == (Word.BEGINS, Orders(3, 1, 1))
