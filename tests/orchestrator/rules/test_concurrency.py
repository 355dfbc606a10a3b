"""How many rollouts engines get, worked by hand: a tenth less where a cache is full, a group more where all have room."""

from __future__ import annotations

from orchestrator.rules.concurrency import Concurrency


def make() -> Concurrency:
    return Concurrency(most=100, least=8, group_size=4)


def report(rule: Concurrency, engine_id: int, *, kv_used: float, num_outstanding: int) -> None:
    """One of two engines, each of which has half of what is outstanding, says how full it is."""
    rule.reported(engine_id, kv_used=kv_used, num_held=num_outstanding // 2, num_outstanding=num_outstanding)


def test_it_begins_with_the_most_and_stays_there_while_caches_have_room() -> None:
    rule = make()
    report(rule, 0, kv_used=0.5, num_outstanding=100)
    report(rule, 1, kv_used=0.95, num_outstanding=100)
    assert rule.limit == 100


def test_a_full_cache_takes_a_tenth_of_what_is_there_and_then_waits_until_that_has_drained() -> None:
    rule = make()
    limits = []
    for outstanding in (80, 80, 75, 72, 72):  # 72 is 0.9 x 80, and 64 is 0.9 x 72
        report(rule, 0, kv_used=1.0, num_outstanding=outstanding)
        limits.append(rule.limit)
    assert limits == [72, 72, 72, 64, 64]


def test_with_room_in_every_cache_it_rises_by_a_group_where_it_is_what_holds_back() -> None:
    rule = make()
    report(rule, 0, kv_used=1.0, num_outstanding=80)
    report(rule, 0, kv_used=0.8, num_outstanding=72)
    assert rule.limit == 76
    report(rule, 0, kv_used=0.8, num_outstanding=75)
    assert rule.limit == 76, "nobody waits for it"
    report(rule, 1, kv_used=0.93, num_outstanding=76)
    report(rule, 0, kv_used=0.8, num_outstanding=76)
    assert rule.limit == 76, "the other engine has no room"
    rule.lost(1)
    report(rule, 0, kv_used=0.8, num_outstanding=76)
    assert rule.limit == 80


def test_it_stays_between_least_and_most() -> None:
    rule = Concurrency(most=10, least=8, group_size=4)
    report(rule, 0, kv_used=1.0, num_outstanding=3)
    assert rule.limit == 8
    for outstanding in (8, 12):
        report(rule, 0, kv_used=0.1, num_outstanding=outstanding)
    assert rule.limit == 10


def test_what_was_there_when_a_cache_was_full_counts_though_most_is_gone_when_it_is_heard() -> None:
    rule = make()
    rule.reported(0, kv_used=0.98, num_held=40, num_outstanding=80)
    rule.reported(1, kv_used=1.0, num_held=40, num_outstanding=27)  # a batch is whole, and nothing new is admitted
    assert rule.limit == 72
    rule.reported(0, kv_used=0.2, num_held=10, num_outstanding=20)
    assert rule.limit == 72, "the other engine was full before the limit fell, not since"
