"""The budget of restarts and the wait before each, on numbers worked by hand."""

from __future__ import annotations

from pipelinerl.runtime.restarts import HEALTHY_S, MAX_WAIT_S, REJOIN_AFTER_S, WINDOW_S, Restarts


def wait_after(restarts: Restarts, life_s: float, *, now_s: float = 1000.0, name: str = "trainer") -> float | None:
    return restarts.next_wait(name, now_s=now_s, started_s=now_s - life_s)


def test_the_wait_doubles_while_deaths_follow_quickly_up_to_a_minute():
    restarts = Restarts(budget=100, first_wait_s=1.0)
    assert [wait_after(restarts, 1.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, MAX_WAIT_S, MAX_WAIT_S]


def test_a_process_that_lived_well_starts_the_doubling_anew():
    restarts = Restarts(budget=100, first_wait_s=1.0)
    assert [wait_after(restarts, life_s) for life_s in (1.0, 1.0, HEALTHY_S, 1.0)] == [1, 2, 1, 2]


def test_a_spent_budget_refuses_and_comes_back_as_restarts_grow_old():
    restarts = Restarts(budget=2, first_wait_s=1.0)
    assert wait_after(restarts, 100.0, now_s=0.0) == 1
    assert wait_after(restarts, 100.0, now_s=10.0) == 1
    assert wait_after(restarts, 100.0, now_s=WINDOW_S) is None
    assert wait_after(restarts, 100.0, now_s=WINDOW_S + 1) == 1
    assert restarts.count("trainer") == 3


def test_each_process_has_a_budget_and_a_wait_of_its_own():
    restarts = Restarts(budget=1, first_wait_s=1.0)
    assert [wait_after(restarts, 1.0, name=name) for name in ("trainer", "engines", "trainer")] == [1, 1, None]
    assert (restarts.count("trainer"), restarts.count("engines"), restarts.count("scorer-0")) == (1, 1, 0)


def test_without_a_budget_nothing_is_restarted():
    assert wait_after(Restarts(budget=0, first_wait_s=1.0), 100.0) is None


def test_who_ended_well_rejoins_once_where_the_run_goes_on():
    restarts = Restarts(budget=0, first_wait_s=1.0)
    restarts.ended_well("engine-0", now_s=10.0)
    restarts.ended_well("engine-1", now_s=20.0)
    assert restarts.rejoining(now_s=10.0 + REJOIN_AFTER_S) == []
    assert restarts.rejoining(now_s=11.0 + REJOIN_AFTER_S) == ["engine-0"]
    assert restarts.rejoining(now_s=100.0) == ["engine-1"]
    assert restarts.rejoining(now_s=1000.0) == []
