"""The budget of restarts and the wait before each, on numbers worked by hand."""

from __future__ import annotations

from pipelinerl.runtime.restarts import HEALTHY_S, MAX_WAIT_S, WINDOW_S, Restarts


def test_the_wait_doubles_while_deaths_follow_quickly_up_to_a_minute():
    restarts = Restarts(budget=100, first_wait_s=1.0)
    assert [restarts.next_wait(now_s=0.0, lived_s=1.0) for _ in range(8)] == [1, 2, 4, 8, 16, 32, MAX_WAIT_S, MAX_WAIT_S]


def test_a_process_that_lived_well_starts_the_doubling_anew():
    restarts = Restarts(budget=100, first_wait_s=1.0)
    lives = [1.0, 1.0, HEALTHY_S, 1.0]
    assert [restarts.next_wait(now_s=0.0, lived_s=lived_s) for lived_s in lives] == [1, 2, 1, 2]


def test_a_spent_budget_refuses_and_comes_back_as_restarts_grow_old():
    restarts = Restarts(budget=2, first_wait_s=1.0)
    assert restarts.next_wait(now_s=0.0, lived_s=100.0) == 1
    assert restarts.next_wait(now_s=10.0, lived_s=100.0) == 1
    assert restarts.next_wait(now_s=WINDOW_S, lived_s=100.0) is None
    assert restarts.next_wait(now_s=WINDOW_S + 1, lived_s=100.0) == 1
    assert restarts.count == 3


def test_without_a_budget_nothing_is_restarted():
    assert Restarts(budget=0, first_wait_s=1.0).next_wait(now_s=0.0, lived_s=100.0) is None
