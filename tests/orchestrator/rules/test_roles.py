"""What devices do next, on numbers worked by hand.

An engine of one device has room for 10,000 tokens and passes of 0.01 s + 1e-6 s for each token that it reads: with contexts of 1,000 it
runs 10 sequences, a pass takes 0.02 s, and it writes 500 tokens per second. A replica trains 1,000.
"""

from __future__ import annotations

import dataclasses

import pytest

from orchestrator.rules.roles import HOLD_WINDOWS, MAX_REST, EngineProfile, Layout, Pool, Role, Roles, Unit, Window, assign, speed

ONE = EngineProfile(pass_s=lambda num, context: 0.01 + num * context * 1e-6, slots=100, room=10_000)
TWO = EngineProfile(pass_s=lambda num, context: 0.005 + num * context * 0.5e-6, slots=100, room=30_000)
"""Of two devices: 30 sequences of 1,000 tokens in passes of 0.02 s, 1,500 tokens per second."""
POOL = Pool(unit_devices=1, unit_replicas=1, core_replicas=1, profiles={1: ONE}, most_running=1e9, switch_s=10.0)
WINDOW = Window(tokens=60_000, num_steps=4, context=1000, slowness=1.0, replica_rate=1000)
TRAINS_MUCH = Layout(engines=2, width=1, trainers=2)


def after_a_window(pool: Pool, layout: Layout, *, window_steps: int) -> Roles:
    """A rule that has seen a window before."""
    roles = Roles(pool, layout, window_steps=window_steps)
    roles.drift.contexts(WINDOW.context, number=1)
    return roles


def test_the_speed_is_that_of_the_slowest_part():
    assert speed(TRAINS_MUCH, POOL, WINDOW) == pytest.approx(1000), "two engines write 1,000, three replicas train 3,000"
    assert speed(Layout(engines=4, width=1), POOL, WINDOW) == pytest.approx(1000), "four write 2,000, the core trains 1,000"
    scored = dataclasses.replace(WINDOW, scorer_rate=400)
    assert speed(dataclasses.replace(TRAINS_MUCH, scorers=2), POOL, scored) == pytest.approx(800)
    assert speed(TRAINS_MUCH, POOL, dataclasses.replace(WINDOW, scored_most=700)) == pytest.approx(700), "scorers that never change"


def test_an_engine_runs_what_it_has_slots_room_and_work_for():
    assert ONE.rate(context=1000, most=1e9) == pytest.approx(10 / 0.02)
    assert ONE.rate(context=50, most=1e9) == pytest.approx(100 / 0.015), "slots, not the 200 that have room"
    assert ONE.rate(context=1000, most=4) == pytest.approx(4 / 0.014)


def test_prompts_that_engines_compute_count():
    """10 sequences sample a token each in 0.02 s, for which 3 tokens of prompts each are computed at 1 ms: 0.03 s more."""
    one = dataclasses.replace(ONE, prompt_token_s=1e-3)
    assert one.rate(context=1000, most=1e9, prompt_tokens=3.0) == pytest.approx(10 / 0.05)
    prompts = dataclasses.replace(WINDOW, prompt_tokens=3.0, slowness=2.0)
    assert speed(TRAINS_MUCH, dataclasses.replace(POOL, profiles={1: one}), prompts) == pytest.approx(200), "two of 200, twice as slow"


def test_slow_passes_count():
    slow = dataclasses.replace(WINDOW, slowness=2.0)
    assert speed(TRAINS_MUCH, POOL, slow) == pytest.approx(500)


def test_a_unit_goes_where_the_slowest_part_is():
    """Three engines and one further replica: min(1,500, 2,000). Four windows of 60,000 tokens take 160 s, not 240."""
    change = after_a_window(POOL, TRAINS_MUCH, window_steps=4).plan(4, WINDOW)
    assert change is not None
    assert change.after == Layout(engines=3, width=1, trainers=1)
    assert (change.saved_s, change.cost_s) == (pytest.approx(80), pytest.approx(0)), "what stays is as fast as before"


def test_a_unit_that_leaves_has_its_caches_computed_by_those_that_stay():
    """Four engines become three: 9,000 tokens at 1 ms each, by three engines."""
    window = dataclasses.replace(WINDOW, held_tokens=9_000, recompute_s=1e-3)
    change = after_a_window(POOL, Layout(engines=4, width=1), window_steps=4).plan(4, window)
    assert change is not None
    assert (change.after.engines, change.cost_s) == (3, pytest.approx(3))


@pytest.mark.parametrize(("tokens", "changes"), [(15_000, False), (30_000, True)])
def test_a_change_has_to_save_more_than_it_costs(tokens: float, changes: bool):
    """Two units with two engines each write 2,000; with one engine of two devices each 3,000. While all of them change, nobody writes: that
    costs 10 s. Four windows of 15,000 tokens save 30 - 20 = 10 s, of 30,000 tokens 20 s.
    """
    pool = dataclasses.replace(POOL, unit_devices=2, unit_replicas=0, core_replicas=4, profiles={1: ONE, 2: TWO})
    roles = after_a_window(pool, Layout(engines=2, width=1), window_steps=4)
    change = roles.plan(4, dataclasses.replace(WINDOW, tokens=tokens))
    assert (change is not None) is changes
    if change is not None:
        assert (change.after.width, change.cost_s, change.saved_s) == (2, pytest.approx(10), pytest.approx(20))


def test_scorers_are_added_where_scores_are_the_slowest():
    """Core trainer of 2,000; an engine 500, a scorer 500: two of five units score and three write, 1,000 tokens per second."""
    pool = dataclasses.replace(POOL, unit_replicas=0, core_replicas=2)
    window = dataclasses.replace(WINDOW, scorer_rate=500)
    change = after_a_window(pool, Layout(engines=4, width=1, scorers=1), window_steps=1).plan(1, window)
    assert change is not None
    assert change.after == Layout(engines=3, width=1, scorers=2), "of 1,000 and 1,500 the layout that keeps most units"


def test_a_gain_that_is_too_small_changes_nothing():
    """Speed 1,500 against 1,000 is a change, 1,500 against 1,450 is none, whatever it costs."""
    pool = dataclasses.replace(POOL, core_replicas=0.45)
    assert speed(Layout(engines=3, width=1, trainers=1), pool, WINDOW) == pytest.approx(1450)
    pool = dataclasses.replace(pool, profiles={1: ONE})
    assert after_a_window(pool, Layout(engines=3, width=1, trainers=1), window_steps=1).plan(1, WINDOW) is None


def test_what_is_faster_now_has_to_be_faster_in_the_windows_to_come():
    """Contexts of 1,000 grow by a tenth with each window: in those to come an engine runs 9.09, 8.26, 7.51 and 6.83 sequences in passes of
    0.02 s.
    """
    roles = after_a_window(dataclasses.replace(POOL, core_replicas=90), Layout(engines=2, width=1, trainers=1), window_steps=1)
    for context in (10_000 / 11, 1000.0):
        roles.drift.contexts(context / 1.1, number=1)
    change = roles.plan(1, WINDOW)
    assert change is not None
    rooms = [10 / 1.1**window for window in (1, 2, 3, 4)]
    assert change.saved_s == pytest.approx(sum(60_000 / (2 * room / 0.02) - 60_000 / (3 * room / 0.02) for room in rooms))


def test_nothing_changes_before_a_second_window_has_shown_how_contexts_drift():
    roles = Roles(POOL, TRAINS_MUCH, window_steps=4)
    assert roles.plan(4, WINDOW) is None
    assert roles.weighed is not None
    assert (roles.weighed.pays, roles.is_first_window) == (True, True)
    assert roles.plan(8, WINDOW) is not None


def test_engines_that_kept_the_trainer_waiting_are_as_fast_as_they_were_and_narrower_ones_no_faster():
    """Four engines of two devices would write 6,000; they wrote 2,000, and the trainer waited: three times as slow. Eight
    narrow engines would write 4,000, so 1,333.
    """
    pool = dataclasses.replace(POOL, unit_devices=2, unit_replicas=0, core_replicas=9, profiles={1: ONE, 2: TWO})
    waited = dataclasses.replace(WINDOW, written_rate=2000, trainer_wait=0.5)
    assert after_a_window(pool, Layout(engines=4, width=2), window_steps=1).plan(1, waited) is None
    narrow = after_a_window(pool, Layout(engines=4, width=1), window_steps=1)
    change = narrow.plan(1, waited)
    assert change is not None
    assert change.after.width == 2, "which nobody has seen yet: 6,000 by their profile"
    assert change.saved_s == pytest.approx(4 * (60_000 / 2000 - 60_000 / 6000))
    held_up = dataclasses.replace(waited, trainer_wait=0.05)
    change = after_a_window(pool, Layout(engines=4, width=1), window_steps=1).plan(1, held_up)
    assert change is not None
    assert change.saved_s == pytest.approx(4 * (60_000 / 4000 - 60_000 / 6000)), "they were held back: their profile counts"


def test_it_plans_at_the_end_of_a_window_and_not_without_a_measurement():
    roles = after_a_window(POOL, TRAINS_MUCH, window_steps=4)
    assert roles.plan(3, WINDOW) is None
    assert roles.plan(4, None) is None
    assert roles.plan(5, WINDOW) is not None


def test_while_a_change_is_under_way_there_is_no_other():
    roles = after_a_window(POOL, TRAINS_MUCH, window_steps=1)
    first = roles.plan(1, WINDOW)
    assert first is not None
    assert roles.plan(2, WINDOW) is None
    roles.done(first.epoch + 1)
    assert roles.layout == TRAINS_MUCH, "another epoch's end is not this one's"
    roles.done(first.epoch)
    assert (roles.layout, roles.change) == (first.after, None)


def test_a_change_that_is_late_is_taken_back_and_nothing_is_planned_for_a_while():
    roles = after_a_window(POOL, TRAINS_MUCH, window_steps=4)
    first = roles.plan(4, WINDOW)
    assert first is not None
    assert first.deadline_s == pytest.approx(3 * (10 + 15)), "a switch, and a step of 15,000 tokens at 1,000 per second"
    back = roles.late(first.epoch, 5)
    assert back is not None
    assert (back.epoch, back.before, back.after) == (first.epoch + 1, first.after, TRAINS_MUCH)
    assert roles.late(first.epoch, 6) is None, "that one is over"
    roles.done(back.epoch)
    assert roles.layout == TRAINS_MUCH
    assert roles.plan(5 + 4 * HOLD_WINDOWS - 1, WINDOW) is None
    assert roles.plan(5 + 4 * HOLD_WINDOWS, WINDOW) is not None


def test_those_units_change_that_lose_least():
    units = [
        Unit(unit_id=0, role=Role.ENGINE, width=1, held_tokens=500),
        Unit(unit_id=1, role=Role.ENGINE, width=1, held_tokens=20),
        Unit(unit_id=2, role=Role.ENGINE, width=1, held_tokens=300),
        Unit(unit_id=3, role=Role.TRAINER),
    ]
    assert assign(units, Layout(engines=2, width=1, trainers=2)) == {1: (Role.TRAINER, 0)}
    assert assign(units, Layout(engines=3, width=2, trainers=1)) == {number: (Role.ENGINE, 2) for number in (0, 2, 1)}
    assert assign(units, Layout(engines=2, width=1, trainers=1, scorers=1)) == {1: (Role.SCORER, 0)}


def test_a_core_that_starts_again_costs_the_seconds_in_which_nothing_is_trained():
    """Of 10 s all stand still for 4; in the other 6 two of three engines write, 1,000 of 1,500 tokens per second."""
    pool = dataclasses.replace(POOL, away_s=4.0, core_replicas=0.5)
    change = after_a_window(pool, Layout(engines=3, width=1), window_steps=4).plan(4, WINDOW)
    assert change is not None, "a trainer of 500 becomes one of 1,500"
    assert (change.after, change.cost_s) == (Layout(engines=2, width=1, trainers=1), pytest.approx(4)), "two engines are enough meanwhile"
    pool = dataclasses.replace(pool, core_replicas=9, away_s=4.0)
    window = dataclasses.replace(WINDOW, tokens=600_000)
    change = after_a_window(pool, Layout(engines=3, width=1, trainers=1), window_steps=4).plan(4, window)
    assert change is not None
    assert (change.after.engines, change.cost_s) == (4, pytest.approx(4)), "three engines write on as they did"


def test_a_change_may_take_as_long_as_whoever_carries_it_out_allows():
    pool = dataclasses.replace(POOL, least_deadline_s=500.0)
    change = after_a_window(pool, TRAINS_MUCH, window_steps=4).plan(4, WINDOW)
    assert change is not None
    assert change.deadline_s == 500.0


def test_a_layout_that_the_run_cannot_have_is_passed_over():
    pool = dataclasses.replace(POOL, core_replicas=0.1, may_be=lambda layout: layout.trainers != 2)
    roles = after_a_window(pool, Layout(engines=4, width=1), window_steps=4)
    change = roles.plan(4, WINDOW)
    assert change is not None
    assert change.after.trainers == 1, "two would train 2,100 beside 1,000 that are written; three write 1,500 and train 1,100"
    stays = after_a_window(dataclasses.replace(pool, may_be=lambda layout: False), Layout(engines=4, width=1), window_steps=4)
    assert stays.plan(4, WINDOW) is None
    assert stays.weighed is not None
    assert stays.weighed.then == stays.layout


def test_a_layout_that_is_not_its_own_choice_is_taken_up_and_left_alone_for_a_while():
    roles = after_a_window(POOL, TRAINS_MUCH, window_steps=4)
    roles.plan(4, WINDOW)
    asked = Layout(engines=1, width=1, trainers=4)
    roles.settle(asked, 6)
    assert (roles.layout, roles.change) == (asked, None)
    assert roles.plan(6 + 4 * HOLD_WINDOWS - 1, WINDOW) is None
    change = roles.plan(6 + 4 * HOLD_WINDOWS, WINDOW)
    assert change is not None
    assert change.after.num_units == 5


def test_a_rest_is_as_long_as_the_windows_were():
    """Windows of four steps at least, which had ten."""
    roles = after_a_window(POOL, TRAINS_MUCH, window_steps=4)
    long = dataclasses.replace(WINDOW, num_steps=10)
    assert roles.plan(4, dataclasses.replace(long, replica_rate=400)) is None, "1,000 beside 1,200 is the best there is"
    roles.settle(TRAINS_MUCH, 10)
    assert roles.plan(29, long) is None
    assert roles.plan(30, long) is not None


@pytest.mark.parametrize(("last_step", "saved_s"), [(1000, 80), (12, 40), (4, 0)])
def test_a_change_saves_nothing_after_the_end_of_the_run(last_step: int, saved_s: float):
    """A window of 4 steps saves 20 s; after step 4 there is time for four of them, for two, or for none."""
    roles = after_a_window(dataclasses.replace(POOL, last_step=last_step), TRAINS_MUCH, window_steps=4)
    change = roles.plan(4, WINDOW)
    assert roles.weighed is not None
    assert roles.weighed.saved_s == pytest.approx(saved_s, abs=1e-6)
    assert (change is None) is (saved_s == 0)


def test_failures_in_a_row_rest_longer_and_longer_up_to_a_bound():
    roles = after_a_window(POOL, TRAINS_MUCH, window_steps=4)
    rests = []
    for _ in range(12):
        roles.settle(TRAINS_MUCH, 0, has_failed=True)
        rests.append(roles.next_plan)
    assert rests[:4] == [HOLD_WINDOWS * 4 * times for times in (1, 2, 4, 8)]
    assert rests[-1] == HOLD_WINDOWS * 4 * MAX_REST
    roles.settle(TRAINS_MUCH, 0)
    assert roles.next_plan == HOLD_WINDOWS * 4, "a person's order is no failure"


def test_a_change_back_that_is_done_does_not_make_good_what_has_failed():
    roles = after_a_window(POOL, TRAINS_MUCH, window_steps=4)
    change = roles.plan(4, WINDOW)
    assert change is not None
    back = roles.late(change.epoch, 8)
    assert back is not None
    roles.done(back.epoch)
    assert roles.num_failed == 1
