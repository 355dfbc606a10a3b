"""Rate and circuit breaker, by hand; and how the queue heeds them."""

from __future__ import annotations

from pipelinerl.messages import Request
from pipelinerl.rewards.pool.limits import FAILURES_TO_OPEN, FIRST_PAUSE_S, MAX_PAUSE_S, BreakerState, CircuitBreaker, RateLimit
from pipelinerl.rewards.pool.queue import RETRY_AFTER_S, Queue
from tests.rewards.conftest import score


def fail(breaker: CircuitBreaker, *, times: int, now: float) -> None:
    for _ in range(times):
        breaker.began(now)
        breaker.ended(now, is_failure=True)


def test_rate_spaces_the_beginnings_of_calls_and_saves_nothing_up() -> None:
    limit = RateLimit(4.0)
    begun = []
    for now in (0.0, 0.1, 0.25, 0.4, 0.5, 9.0, 9.1, 9.25):
        if now >= limit.opens_at:
            limit.began(now)
            begun.append(now)
    assert begun == [0.0, 0.25, 0.5, 9.0, 9.25]


def test_breaker_opens_after_failures_in_a_row_and_not_before() -> None:
    breaker = CircuitBreaker()
    fail(breaker, times=FAILURES_TO_OPEN - 1, now=0.0)
    breaker.ended(0.0, is_failure=False)
    fail(breaker, times=FAILURES_TO_OPEN - 1, now=0.0)
    assert breaker.state is BreakerState.CLOSED
    fail(breaker, times=1, now=10.0)
    assert (breaker.state, breaker.opens_at) == (BreakerState.OPEN, 10.0 + FIRST_PAUSE_S)


def test_half_open_breaker_lets_one_probe_out_and_closes_when_it_succeeds() -> None:
    breaker = CircuitBreaker()
    fail(breaker, times=FAILURES_TO_OPEN, now=0.0)
    breaker.began(FIRST_PAUSE_S)
    assert breaker.state is BreakerState.HALF_OPEN
    assert breaker.opens_at > FIRST_PAUSE_S, "no second one beside it"
    breaker.ended(1.5, is_failure=False)
    assert breaker.state is BreakerState.CLOSED
    assert breaker.opens_at <= 1.5


def test_pause_doubles_with_every_probe_that_fails_up_to_a_bound_and_starts_anew_after_success() -> None:
    breaker = CircuitBreaker()
    fail(breaker, times=FAILURES_TO_OPEN, now=0.0)
    pauses = []
    now = breaker.opens_at
    for _ in range(7):
        fail(breaker, times=1, now=now)
        pauses.append(breaker.opens_at - now)
        now = breaker.opens_at
    assert pauses == [2.0, 4.0, 8.0, 16.0, MAX_PAUSE_S, MAX_PAUSE_S, MAX_PAUSE_S]
    breaker.ended(now, is_failure=False)
    fail(breaker, times=FAILURES_TO_OPEN, now=now)
    assert breaker.opens_at == now + FIRST_PAUSE_S


def test_call_that_began_before_the_breaker_opened_does_not_lengthen_the_pause() -> None:
    breaker = CircuitBreaker()
    fail(breaker, times=FAILURES_TO_OPEN, now=0.0)
    breaker.ended(0.5, is_failure=True)
    assert breaker.opens_at == FIRST_PAUSE_S


def test_probe_whose_end_is_never_heard_of_does_not_shut_the_gate_for_good() -> None:
    breaker = CircuitBreaker()
    fail(breaker, times=FAILURES_TO_OPEN, now=0.0)
    breaker.began(1.0)
    assert breaker.opens_at == 1.0 + FIRST_PAUSE_S


def limited(*, num_slots: int = 1, num_requests: int = 0, retries: int = 0, per_s: float | None = None) -> Queue:
    queue = Queue(num_slots=num_slots, deadline_s=30.0, per_s=per_s, retries=retries)
    for slot in range(num_slots):
        queue.open(slot)
    for index in range(num_requests):
        queue.add(Request(request_id=index, task=score(f"r{index}", "x")))
    return queue


def handed(queue: Queue, now: float) -> list[str]:
    return [ticket.request.task.rollout_id for tickets in queue.hand_out(now).values() for ticket in tickets]


def test_queue_hands_out_at_the_rate_however_many_slots_are_free_and_says_when_to_wake() -> None:
    queue = limited(num_slots=4, num_requests=4, per_s=2.0)
    assert handed(queue, 0.0) == ["r0"]
    assert queue.wake_at() == 0.5
    assert handed(queue, 0.4) == []
    assert handed(queue, 0.5) == ["r1"]


def test_fast_function_with_a_breaker_is_never_handed_calls_ahead() -> None:
    queue = limited(num_requests=50, retries=1)
    for index in range(20):
        (ticket,) = queue.hand_out(float(index))[0]
        queue.answered(0, ticket.call_id, float(index), duration_s=1e-6)


def test_failed_try_waits_twice_as_long_each_time_then_is_over() -> None:
    queue = limited(num_requests=1, retries=2)
    for now, due in ((0.0, RETRY_AFTER_S), (10.0, 10.0 + 2 * RETRY_AFTER_S)):
        (ticket,) = queue.hand_out(now)[0]
        assert queue.answered(0, ticket.call_id, now, duration_s=0.1) is ticket
        assert queue.ended(ticket, now, is_failure=True)
        assert queue.wake_at() == due
        assert handed(queue, due - 0.01) == []
    (ticket,) = queue.hand_out(20.0)[0]
    queue.answered(0, ticket.call_id, 20.0, duration_s=0.1)
    assert not queue.ended(ticket, 20.0, is_failure=True)
    assert queue.wake_at() is None


def test_others_go_ahead_while_a_failed_try_waits() -> None:
    queue = limited(num_requests=2, retries=1)
    (ticket,) = queue.hand_out(0.0)[0]
    queue.answered(0, ticket.call_id, 0.0, duration_s=0.1)
    queue.ended(ticket, 0.0, is_failure=True)
    assert handed(queue, 0.1) == ["r1"]


def test_request_that_waits_for_its_next_try_can_be_cancelled() -> None:
    queue = limited(num_requests=1, retries=1)
    (ticket,) = queue.hand_out(0.0)[0]
    queue.answered(0, ticket.call_id, 0.0, duration_s=0.1)
    queue.ended(ticket, 0.0, is_failure=True)
    queue.cancel(0)
    assert handed(queue, 100.0) == []
    assert queue.num_running == 0
