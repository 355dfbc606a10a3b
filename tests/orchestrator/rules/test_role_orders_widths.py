"""Orders of other ranks for engines, by what passes of each width take, or are guessed to take.

Two engines of one rank share eight rollouts: a pass of four takes 40 + 4 = 44 ms, so they write 8 / 0.044 = 182 tokens per second. An
engine of two ranks has all eight: a pass of one rank would take 48 ms, and two are guessed to be 1.6 times as quick: 267 per second.
"""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import msgspec
import pytest

from orchestrator.rules.pass_profile import DOUBLED, PassSeconds
from orchestrator.rules.role_orders import Decision, Orders, RoleOrders, Seen, Word, layout_of, orders_of
from orchestrator.rules.roles import Layout, Pool, Roles, Window
from pipelinerl.config.scaling import Units
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.elastic_roles import EnginePasses, RolesRecord
from pipelinerl.runtime.membership import ScaleFolder

UNITS = Units(devices=2, core_ranks=1, ranks_per_replica=1)
ONE = EnginePasses(a=0.04, b=0.001, c=0.0)
WINDOW = Window(tokens=30_000, num_steps=2, context=100, slowness=1.0, replica_rate=1e4)
NARROW, WIDE = Orders(2, 1), Orders(1, 1, 0, 2)


def rule(wanted: Orders = NARROW, *, pool: dict[str, Any] | None = None, **given: Any) -> RoleOrders:
    whole = Pool(
        **{
            "unit_devices": 2,
            "unit_replicas": 2,
            "core_replicas": 1,
            "profiles": {},
            "most_running": 8.0,
            "switch_s": 0.0,
            **(pool or {}),
        }
    )
    layout = layout_of(wanted, UNITS)
    assert layout is not None
    found = RoleOrders(Roles(whole, layout, window_steps=2), UNITS, wanted=wanted, sizes=(1, 2), **given)
    found.seconds.started(10.0)
    found.roles.drift.contexts(WINDOW.context, number=1)
    return found


def seen(wanted: Orders = NARROW, *, step: int = 2, now_s: float = 0.0, **given: Any) -> Seen:
    return Seen(wanted=wanted, is_settled=True, is_away=False, is_whole=True, step=step, now_s=now_s, **given)


def planned(
    found: RoleOrders, wanted: Orders = NARROW, *, step: int = 2, passes: dict[int, EnginePasses] | None = None, **changed: Any
) -> Decision:
    window = dataclasses.replace(WINDOW, **changed)
    decision = found.plan(seen(wanted, step=step), window, {1: ONE} if passes is None else passes, slots=64)
    assert decision is not None
    return decision


def test_a_layout_says_how_many_engines_of_which_ranks_and_an_order_says_it_back():
    assert orders_of(Layout(engines=3, width=1, trainers=1), UNITS) == Orders(6, 3, 0, 1)
    assert orders_of(Layout(engines=3, width=2), UNITS) == Orders(3, 1, 0, 2)
    assert str(orders_of(Layout(engines=3, width=2), UNITS)) == "engines=3 tensor_parallel_size=2 trainer=1"
    assert layout_of(Orders(3, 1, 0, 2), UNITS) == Layout(engines=3, width=2)
    assert layout_of(Orders(3, 1, 0, 1), UNITS) is None, "one and a half units"
    assert layout_of(Orders(2, 1, 0, 3), UNITS) is None, "no engine of three ranks fills a unit of two devices"
    assert layout_of(Orders(2, 1, 0, 0), UNITS) is None
    staged = Units(devices=4, stages=2, core_ranks=1, ranks_per_replica=1)
    assert layout_of(Orders(2, 1, 0, 1), staged) == Layout(engines=1, width=2), "two stages of one rank each"
    assert orders_of(Layout(engines=1, width=4), staged) == Orders(1, 1, 0, 2)


def test_ranks_that_the_run_has_not_had_are_guessed_from_those_that_it_has():
    assert PassSeconds(a=1.0, b=2.0, c=3.0).over(2.0) == PassSeconds(a=1 / DOUBLED, b=2 / DOUBLED, c=3 / DOUBLED)
    assert PassSeconds(a=1.0, b=0.0, c=0.0).over(0.25).a == pytest.approx(DOUBLED**2)
    found = rule()
    begun = planned(found)
    assert (begun.word, begun.now, begun.then, begun.orders) == (Word.BEGINS, NARROW, WIDE, WIDE)
    weighed = found.roles.weighed
    assert weighed is not None
    assert (weighed.speed_now, weighed.speed_then) == (pytest.approx(8 / 0.044), pytest.approx(8 / 0.03))
    assert found.roles.pool.profiles[2].room == math.inf


def test_a_cache_that_is_full_holds_as_many_sequences_for_each_rank():
    found = rule(pool={"most_running": 1e9})
    planned(found, passes={1: msgspec.structs.replace(ONE, room=400.0)})
    assert found.roles.pool.profiles[2].room == pytest.approx(800)
    weighed = found.roles.weighed
    assert weighed is not None
    assert weighed.speed_then == pytest.approx(8 / 0.03), "eight sequences of 100 tokens in 800"


def test_once_the_run_has_had_them_it_is_known_what_they_do():
    """Passes of eight take 60 ms: 133 tokens per second."""
    found = rule()
    planned(found)
    taken = found.follow(seen(WIDE, now_s=5.0))
    assert taken is not None
    assert taken.word is Word.TAKEN
    slow = {1: ONE, 2: EnginePasses(a=0.06, b=0.0, c=0.0)}
    back = planned(found, WIDE, step=4, passes=slow)
    assert (back.word, back.orders) == (Word.BEGINS, NARROW)
    found.follow(seen(NARROW, now_s=9.0))
    again = planned(found, step=9, passes={1: ONE})
    assert (again.word, again.then) == (Word.STAYS, NARROW), "it is remembered"


def test_one_order_changes_ranks_or_roles_and_never_both():
    """Three units: the two that write as wide engines and the third that trains would be the fastest."""
    found = rule(Orders(6, 1), pool={"most_running": 24.0})
    begun = planned(found, Orders(6, 1), replica_rate=300.0)
    assert begun.orders is not None
    assert (begun.orders.tensor_parallel_size, begun.orders.trainer) in ((2, 1), (1, 3))
    free = rule(Orders(6, 1), pool={"most_running": 24.0})
    free._is_one_order = lambda layout: True  # pyright: ignore[reportAttributeAccessIssue]
    both = planned(free, Orders(6, 1), replica_rate=300.0).then
    assert (both.tensor_parallel_size, both.trainer) == (2, 3)


def test_ranks_stay_while_an_engine_is_given_up():
    """Its place is one of an engine of its own ranks."""
    found = rule(Orders(4, 1), num_given_up=2)
    found.roles.layout = Layout(engines=1, width=1)
    decision = found.plan(seen(Orders(4, 1), num_given_up=2), WINDOW, {1: ONE}, slots=64)
    assert decision is not None
    assert (decision.word, decision.then.tensor_parallel_size) == (Word.STAYS, 1)


def test_ranks_that_somebody_asks_for_are_planned_from():
    found = rule()
    by_hand = found.follow(seen(WIDE))
    assert by_hand is not None
    assert (by_hand.word, by_hand.then) == (Word.BY_HAND, WIDE)
    assert found.roles.layout == Layout(engines=1, width=2)
    assert found.may_plan


def test_another_orchestrator_knows_what_each_width_did_and_what_ranks_of_the_trainer_are_worth():
    found = rule()
    found.roles.replicas.worth, found.roles.replicas.context = {0: 1.0, 1: 0.3}, 100.0
    planned(found)
    found.follow(seen(WIDE, now_s=5.0))
    planned(found, WIDE, step=4, passes={2: EnginePasses(a=0.03, b=0.0, c=0.0, room=900.0)}, slowness=1.5)
    record = msgspec.json.decode(msgspec.json.encode(found.record), type=RolesRecord)
    assert record.ordered == (1, 1, 0, 2)
    after = rule(WIDE)
    after.restore(record)
    assert after.record.passes == record.passes
    assert (record.passes[1].slowness, record.passes[2].slowness) == (1.0, 1.5)
    assert after.roles.slowness == {1: 1.0, 2: 1.5}
    assert after.roles.replicas.over(1, 0, context=100.0) == pytest.approx(0.3)
    assert planned(after, WIDE, step=9, passes={}).now == WIDE, "what was seen before is enough to plan from"
    assert after.roles.pool.profiles[2].room == 900.0


@pytest.mark.parametrize("numbers", ["[1, 1]", "[1, 1, 0, 2, 5]"])
def test_a_damaged_record_is_refused_by_its_file(numbers: str, tmp_path: Path):
    (tmp_path / "scale").mkdir()
    (tmp_path / "scale" / "elastic.json").write_text(f'{{"ordered": {numbers}}}')
    with pytest.raises(ConfigError, match=r"elastic\.json"):
        ScaleFolder(tmp_path).roles()


def test_a_record_of_an_earlier_release_says_nothing_of_ranks_and_they_are_those_that_the_run_has():
    record = msgspec.json.decode(b'{"ordered": [1, 1, 0]}', type=RolesRecord)
    found = rule(WIDE)
    found.restore(record)
    assert found.follow(seen(WIDE)) is None
    assert found.roles.layout == Layout(engines=1, width=2)
