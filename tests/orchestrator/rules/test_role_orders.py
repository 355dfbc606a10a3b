"""Orders of a live run that follow from what the rule of roles plans, and what becomes of them.

Engines write 500 tokens per second each, a rank trains 1,000 or, in a window that says so, 300. Two engines and two ranks are worth
min(1,000, 2,000); three engines and one rank min(1,500, 1,000); and with 300 for a rank, 600 and 300.
"""

from __future__ import annotations

import dataclasses

import msgspec
import pytest

from orchestrator.rules.drift import Drift
from orchestrator.rules.role_orders import FIRST_WINDOW, Decision, Orders, RoleOrders, Seen, Word, layout_of, orders_of
from orchestrator.rules.roles import HOLD_WINDOWS, Layout, Pool, Roles, Window
from orchestrator.rules.switch_seconds import FIRST_S, SwitchSeconds
from pipelinerl.config.engines import EngineSection
from pipelinerl.config.layout import Layout as TrainerLayout
from pipelinerl.config.scaling import Units, scoring_of, units_of
from pipelinerl.config.scoring import PrmSection, RewardSection
from pipelinerl.runtime.elastic_roles import EnginePasses, RolesRecord

ONE = Units(devices=1, core_ranks=1, ranks_per_replica=1)
PASSES = EnginePasses(a=0.01, b=0.001, c=0.0)
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
    found.roles.drift.contexts(WINDOW.context, number=1)
    return found


def seen(
    wanted: Orders = BEGAN, *, step: int = 2, now_s: float = 0.0, changes: bool = False, away: bool = False, whole: bool = True
) -> Seen:
    is_settled = not (changes or away)
    return Seen(wanted=wanted, is_settled=is_settled, is_away=away, is_whole=whole and is_settled, step=step, now_s=now_s)


def planned(found: RoleOrders, *, step: int = 2, now_s: float = 0.0, window: Window = WINDOW, wanted: Orders = BEGAN) -> Decision | None:
    return found.plan(seen(wanted, step=step, now_s=now_s), window, {1: PASSES}, slots=10)


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


def test_a_first_window_orders_nothing_and_says_why():
    found = rule()
    found.roles.drift = Drift()
    first = planned(found)
    assert first is not None
    assert (first.word, first.then, first.orders, first.reason) == (Word.STAYS, OTHER, None, FIRST_WINDOW)
    second = planned(found, step=4)
    assert second is not None
    assert second.word is Word.BEGINS


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
        found.ended(began_s + 2 * away_s + 2, of_trainer=True)
    assert (found.switch_s, found.away_s) == (pytest.approx(12), pytest.approx(5))


def test_changes_that_leave_the_trainer_its_ranks_do_not_say_how_long_one_is_away():
    """Before: an engine that had become a scorer made the next change of the trainer free."""
    found = SwitchSeconds()
    found.started(4.0)
    found.began(100.0)
    found.ended(120.0, of_trainer=False)
    assert (found.switch_s, found.away_s) == (pytest.approx(20), pytest.approx(20)), "as long as a change, until one was seen"
    found.began(200.0)
    found.trainer_is(is_away=True, now_s=202.0)
    found.trainer_is(is_away=False, now_s=212.0)
    found.ended(230.0, of_trainer=True)
    assert (found.switch_s, found.away_s) == (pytest.approx(25), pytest.approx(10))


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
    assert units_of(wide, TrainerLayout(ranks=3)) == Units(devices=2, core_ranks=1, ranks_per_replica=1)
    sharded = units_of(wide, TrainerLayout(ranks=8, shard=4))
    assert (sharded.devices, sharded.engines(2), sharded.core_ranks, sharded.replicas) == (4, 2, 4, 4)
    tensor = units_of(EngineSection(), TrainerLayout(ranks=4, tensor=4))  # pyright: ignore[reportCallIssue]
    assert (tensor.devices, tensor.engines(1), tensor.core_ranks, tensor.replicas) == (4, 4, 4, 1)
    shared = units_of(wide, TrainerLayout(ranks=8, shard=4, context=2, shards_all=True), least_ranks=3)
    assert (shared.devices, shared.engines(2), shared.core_ranks, shared.replicas) == (2, 1, 4, 1), "a replica of one copy may join"
    assert units_of(wide, TrainerLayout(ranks=8, shard=4), whole=8).devices == 8


def test_orders_that_are_no_whole_units_have_no_layout_and_nothing_is_planned_from_them():
    two = Units(devices=2, core_ranks=2, ranks_per_replica=1)
    layout = Layout(engines=3, width=1, trainers=1)
    assert orders_of(layout, two) == Orders(6, 4)
    assert layout_of(Orders(6, 4), two) == layout
    assert {layout_of(one, two) for one in (Orders(5, 4), Orders(6, 3), Orders(6, 1), Orders(0, 2))} == {None}
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


def followed(before: RoleOrders, *, wanted: Orders, now_s: float = 0.0) -> RoleOrders:
    """The rule of the orchestrator that takes another's place."""
    after = rule(start_s=99.0)
    found = RoleOrders(after.roles, ONE, wanted=wanted, now_s=now_s)
    found.restore(msgspec.json.decode(msgspec.json.encode(before.record), type=RolesRecord))
    return found


def test_another_orchestrator_knows_what_changes_have_taken_and_until_when_nothing_is_planned():
    first = rule(start_s=12.0)
    assert followed(first, wanted=BEGAN).seconds.switch_s == 12.0
    planned(first)
    first.follow(seen(OTHER, now_s=3.0, away=True))
    first.follow(seen(OTHER, now_s=9.0, whole=False))
    first.follow(seen(OTHER, now_s=20.0))
    after = followed(first, wanted=OTHER)
    assert (after.seconds.switch_s, after.seconds.away_s) == (pytest.approx(20), pytest.approx(6))
    assert (after.roles.layout, after.roles.epoch) == (Layout(engines=2, width=1, trainers=1), 1)
    assert after.follow(seen(OTHER)) is None
    assert planned(after, step=3, wanted=OTHER) is None
    assert planned(after, step=4, wanted=OTHER) is not None
    assert RoleOrders(rule().roles, ONE, wanted=BEGAN).seconds.switch_s == FIRST_S, "nobody has seen this one begin"


def test_another_orchestrator_follows_the_change_under_way_and_does_not_count_what_it_has_not_seen():
    first = rule(deadline_s=400.0)
    planned(first)
    after = followed(first, wanted=OTHER)
    assert not after.may_plan
    assert after.follow(seen(OTHER, now_s=5.0, away=True)) is None
    taken = after.follow(seen(OTHER, now_s=6.0))
    assert taken is not None
    assert (taken.word, taken.now, taken.then) == (Word.TAKEN, BEGAN, OTHER)
    assert after.roles.layout == Layout(engines=2, width=1, trainers=1)
    assert after.seconds.num == 0
    again = followed(first, wanted=OTHER, now_s=1000.0)
    assert again.follow(seen(OTHER, now_s=1400.0, whole=False)) is None, "its deadline has begun anew"
    late = again.follow(seen(OTHER, now_s=1401.0, whole=False))
    assert late is not None
    assert (late.word, late.orders) == (Word.LATE, BEGAN)
    assert again.follow(seen(BEGAN, now_s=1402.0)) is not None
    assert again.roles.layout == Layout(engines=3, width=1)


@pytest.mark.parametrize(("wanted", "word"), [(BEGAN, Word.TAKEN_BACK), (Orders(4, 2), Word.BY_HAND)])
def test_another_orchestrator_sees_that_a_change_was_taken_back_or_overruled_meanwhile(wanted: Orders, word: Word):
    first = rule()
    planned(first)
    after = followed(first, wanted=wanted)
    found = after.follow(seen(wanted, step=3))
    assert found is not None
    assert (found.word, found.then) == (word, wanted)
    assert after.may_plan
    assert planned(after, step=3, wanted=wanted) is None


def test_a_change_back_outlives_the_orchestrator_and_is_not_taken_back_again():
    first = rule(deadline_s=400.0)
    planned(first)
    first.follow(seen(OTHER, now_s=401.0, whole=False))
    after = followed(first, wanted=BEGAN)
    again = after.follow(seen(BEGAN, now_s=500.0, whole=False))
    assert again is not None
    assert (again.word, again.orders) == (Word.LATE, None)
    assert after.roles.num_failed == 2


LOST = dataclasses.replace(seen(BEGAN), num_given_up=1, given_up="waited 60 s for engine-2 to come")


def test_what_there_is_is_shared_without_an_engine_that_is_given_up_and_with_it_once_it_is_there_again():
    found = rule()
    lost = found.follow(LOST)
    assert lost is not None
    assert (lost.word, lost.then, lost.reason) == (Word.LOST, BEGAN, "waited 60 s for engine-2 to come")
    assert found.roles.layout == Layout(engines=2, width=1)
    assert found.follow(LOST) is None, "it is said once"
    begun = found.plan(LOST, WINDOW, {1: PASSES}, slots=10)
    assert begun is not None
    assert begun.orders == OTHER, "one engine, two ranks, and the place of the one that is lost"
    assert found.follow(dataclasses.replace(LOST, wanted=OTHER)) is not None
    assert found.roles.layout == Layout(engines=1, width=1, trainers=1)
    assert found.follow(dataclasses.replace(LOST, wanted=OTHER)) is None
    again = found.follow(seen(OTHER))
    assert again is not None
    assert (again.word, again.reason) == (Word.AGAIN, "")
    assert found.roles.layout == Layout(engines=2, width=1, trainers=1)


def test_a_change_that_takes_engines_away_is_done_though_another_engine_is_lost_and_one_that_adds_some_is_not():
    found = rule()
    planned(found)
    one_lost = dataclasses.replace(seen(OTHER, now_s=5.0, whole=False), is_short=True)
    assert found.follow(dataclasses.replace(one_lost, is_settled=False)) is None
    done = found.follow(one_lost)
    assert done is not None
    assert done.word is Word.TAKEN
    adds = rule()
    adds.roles.layout = Layout(engines=2, width=1, trainers=1)
    adds.follow(seen(OTHER))
    begun = planned(adds, step=99, window=dataclasses.replace(WINDOW, replica_rate=1e4), wanted=OTHER)
    assert begun is not None
    assert begun.orders == BEGAN
    assert adds.follow(dataclasses.replace(seen(BEGAN, whole=False), is_short=True)) is None, "it may be the one that is to come"


def test_engines_that_are_given_up_may_leave_no_whole_units():
    two = Units(devices=2, core_ranks=2, ranks_per_replica=1)
    found = RoleOrders(rule().roles, two, wanted=Orders(6, 2))
    lost = found.follow(dataclasses.replace(LOST, wanted=Orders(6, 2)))
    assert lost is not None
    assert lost.reason.endswith("engines=5 trainer=2 are no whole units of 2 devices: nothing is planned until they are")
    assert not found.may_plan


def test_each_failure_in_a_row_doubles_the_rest():
    found, step = rule(), 2
    for times in (1, 2, 4):
        assert planned(found, step=step) is not None
        assert not found.may_plan
        found.follow(seen(BEGAN, step=step))
        rest = times * HOLD_WINDOWS * WINDOW.num_steps
        assert planned(found, step=step + rest - 1) is None
        step += rest
    planned(found, step=step)
    found.follow(seen(OTHER, step=step))
    assert found.roles.num_failed == 0, "one that was carried out"


def test_a_process_reward_models_engines_change_with_whole_units_and_one_unit_of_them_stays():
    """Three engines write 1,500 tokens per second, one that scores 300: two of each are worth 600."""

    def prm(**keys: object) -> PrmSection:
        return PrmSection.model_validate({"path": "p", **keys})

    engine, trainer = EngineSection(), TrainerLayout(ranks=1)  # pyright: ignore[reportCallIssue]

    def units_with(engine: EngineSection, prm: PrmSection) -> Units:
        return units_of(engine, trainer, scoring_of(prm, ()))

    units = units_with(engine, prm(count=2))
    assert units == dataclasses.replace(ONE, scored_by="prm", scorers=1, core_scorers=1)
    assert units_with(engine, prm(options={"tensor_parallel_size": 2})) == ONE, "two devices do not change here"
    assert units_with(engine, PrmSection()) == ONE, "there is none"  # pyright: ignore[reportCallIssue]
    wide = EngineSection.model_validate({"options": {"tensor_parallel_size": 2}})
    assert units_with(wide, prm(count=4)).core_scorers == 2
    assert orders_of(Layout(engines=2, width=1, scorers=1), units) == Orders(2, 1, 2, scored_by="prm")
    assert layout_of(Orders(2, 1, 2, scored_by="prm"), units) == Layout(engines=2, width=1, scorers=1)
    assert layout_of(Orders(2, 1, 3, 2, scored_by="prm"), units_with(wide, prm(count=4))) is None
    pool = dataclasses.replace(rule().roles.pool, core_scorers=1.0)
    found = RoleOrders(Roles(pool, Layout(engines=3, width=1), window_steps=2), units, wanted=Orders(3, 1, 1, scored_by="prm"))
    found.roles.drift.contexts(WINDOW.context, number=1)
    found.seconds.started(10.0)
    window = dataclasses.replace(WINDOW, replica_rate=2000, scorer_rate=300)
    begun = planned(found, window=window, wanted=Orders(3, 1, 1, scored_by="prm"))
    assert begun is not None
    assert (begun.word, begun.orders) == (Word.BEGINS, Orders(2, 1, 2, scored_by="prm"))
    assert str(begun.orders) == "engines=2 trainer=1 prm=2"
    followed = RoleOrders(Roles(pool, Layout(engines=3, width=1), window_steps=2), units, wanted=Orders(2, 1, 2, scored_by="prm"))
    followed.restore(found.record)
    for one in (found, followed):
        taken = one.follow(seen(Orders(2, 1, 2, scored_by="prm"), now_s=10.0))
        assert taken is not None
        assert taken.word is Word.TAKEN
    assert found.seconds.away_s == pytest.approx(10), "the trainer was not away, so nothing says for how long it would be"
    back = planned(found, step=8, window=dataclasses.replace(window, scorer_rate=2000), wanted=Orders(2, 1, 2, scored_by="prm"))
    assert back is not None
    assert (back.word, back.orders) == (Word.BEGINS, Orders(3, 1, 1, scored_by="prm"))


def test_a_reward_models_processes_change_where_it_is_the_only_model_that_scores():
    def rewards(*concurrency: int | None) -> tuple[RewardSection, ...]:
        models = [
            RewardSection.model_validate({"model": f"orm-{number}", "concurrency": count}) for number, count in enumerate(concurrency)
        ]
        return (RewardSection.model_validate({"function": "rules.py:reward"}), *models)

    engine, trainer, none = EngineSection(), TrainerLayout(ranks=1), PrmSection()  # pyright: ignore[reportCallIssue]
    assert scoring_of(none, rewards(3, None)) == {"reward.1": (3, 1), "reward.2": (1, 1)}
    units = units_of(engine, trainer, scoring_of(none, rewards(3)))
    assert units == dataclasses.replace(ONE, scored_by="reward.1", scorers=1, core_scorers=1)
    assert str(orders_of(Layout(engines=2, width=1, scorers=2), units)) == "engines=2 trainer=1 reward.1=3"
    wide = EngineSection.model_validate({"options": {"tensor_parallel_size": 2}})
    two = units_of(wide, trainer, scoring_of(none, rewards(4)))
    assert (two.scorers, two.core_scorers) == (2, 2), "two devices hold two processes"
    assert units_of(engine, trainer, scoring_of(none, rewards(3, 1))) == ONE, "of two models neither changes"
    with_prm = PrmSection.model_validate({"path": "p"})
    assert units_of(engine, trainer, scoring_of(with_prm, rewards(1))) == ONE
