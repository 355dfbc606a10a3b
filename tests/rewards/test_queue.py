"""The rule that hands calls to slots: by hand for each case, and against a model of workers for every order of events."""

from __future__ import annotations

import collections

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.messages import Request
from pipelinerl.rewards.pool.queue import AHEAD_S, MAX_AHEAD, OVERRUN_S, Queue
from tests.rewards.conftest import score

pytestmark = pytest.mark.process

FAST_S = AHEAD_S / 4.5
"""At this speed four calls are handed ahead."""


def make_queue(
    *, num_slots: int, num_requests: int = 0, mean_s: float | None = None, deadline_s: float = 30.0, batch: int | None = None
) -> Queue:
    """A queue whose workers have loaded, after a first answer that took `mean_s`."""
    queue = Queue(num_slots=num_slots, deadline_s=deadline_s, batch=batch)
    for slot in range(num_slots):
        queue.open(slot)
    if mean_s is not None:
        queue.add(request("first"))
        (ticket,) = queue.hand_out(0.0)[0]
        queue.answered(0, ticket.call_id, 0.0, duration_s=mean_s)
    for index in range(num_requests):
        queue.add(request(f"r{index}"))
    return queue


def request(name: str) -> Request:
    return Request(request_id=number_of(name), task=score(name, "x"))


def number_of(name: str) -> int:
    """The request's number: 3 of `r3`."""
    return int(name.removeprefix("r")) if name.startswith("r") else -1


def names(handed: dict[int, list]) -> dict[int, list[str]]:
    return {slot: [ticket.request.task.rollout_id for ticket in tickets] for slot, tickets in handed.items()}


def test_one_call_per_slot_until_the_speed_is_known() -> None:
    queue = make_queue(num_slots=2, num_requests=5)
    assert names(queue.hand_out(0.0)) == {0: ["r0"], 1: ["r1"]}
    assert queue.hand_out(0.0) == {}


def test_a_slot_that_is_closed_keeps_what_it_has_and_what_is_released_waits_again_unsuspected() -> None:
    queue = make_queue(num_slots=2, num_requests=6, batch=2)
    assert names(queue.hand_out(0.0)) == {0: ["r0", "r2"], 1: ["r1", "r3"]}
    queue.close(1)
    ticket = queue.answered(1, 1, 0.1, duration_s=0.1)
    assert ticket is not None
    assert (ticket.request.request_id, queue.num_held(1)) == (1, 1)
    assert queue.cancel(3) == {}, "it runs"
    queue.release(1)
    queue.release(0)
    assert [queue.num_held(slot) for slot in (0, 1)] == [0, 0]
    assert queue.hand_out(0.2) == {}, "who is released is not open"
    queue.open(0)
    assert names(queue.hand_out(0.2)) == {0: ["r0", "r2"]}, "at the front, and together: none was there when anybody died"
    queue.open(1)
    assert names(queue.hand_out(0.2)) == {1: ["r4", "r5"]}, "nobody wants r3 any more"


def test_slow_calls_are_never_handed_ahead() -> None:
    queue = make_queue(num_slots=2, num_requests=5, mean_s=AHEAD_S * 1.01)
    assert names(queue.hand_out(0.0)) == {0: ["r0"], 1: ["r1"]}


def test_fast_calls_are_handed_ahead_in_turn_to_the_slot_that_holds_least() -> None:
    queue = make_queue(num_slots=2, num_requests=20, mean_s=FAST_S)
    assert names(queue.hand_out(0.0)) == {0: ["r0", "r2", "r4", "r6", "r8"], 1: ["r1", "r3", "r5", "r7", "r9"]}


def test_number_handed_ahead_is_bounded() -> None:
    queue = make_queue(num_slots=1, num_requests=100, mean_s=1e-9)
    assert len(queue.hand_out(0.0)[0]) == 1 + MAX_AHEAD


def test_slot_that_has_not_loaded_gets_nothing() -> None:
    queue = Queue(num_slots=2, deadline_s=1.0)
    queue.open(1)
    queue.add(request("r0"))
    queue.add(request("r1"))
    assert names(queue.hand_out(0.0)) == {1: ["r0"]}


def test_deadline_counts_from_the_begin_of_each_call_not_from_its_hand_out() -> None:
    queue = make_queue(num_slots=1, num_requests=2, mean_s=FAST_S, deadline_s=30.0)
    first, _second = queue.hand_out(100.0)[0]
    queue.take_back(100.0)
    assert queue.overdue(129.9) == []
    assert queue.overdue(130.0) == [0]
    queue.answered(0, first.call_id, 110.0, duration_s=10.0)
    assert queue.overdue(139.9) == []
    assert queue.wake_at() == 140.0
    assert queue.overdue(140.0) == [0]
    assert queue.running_s(0, 115.0) == 5.0


def test_a_batch_is_what_waits_and_the_next_waits_for_its_end() -> None:
    queue = make_queue(num_slots=1, num_requests=6, batch=4)
    handed = queue.hand_out(0.0)
    assert names(handed) == {0: ["r0", "r1", "r2", "r3"]}
    assert queue.hand_out(OVERRUN_S * 2) == queue.take_back(OVERRUN_S * 2) == {}, "a batch is as slow as it is"
    assert queue.wake_at() == 30.0, "its deadline"
    for ticket in handed[0][:3]:
        queue.answered(0, ticket.call_id, 1.0, duration_s=FAST_S)
        assert queue.hand_out(1.0) == {}
    queue.answered(0, handed[0][3].call_id, 1.0, duration_s=FAST_S)
    assert names(queue.hand_out(1.0)) == {0: ["r4", "r5"]}


def test_a_lost_batch_charges_nobody_and_each_of_it_is_repeated_alone() -> None:
    queue = make_queue(num_slots=1, num_requests=3, batch=4)
    first = queue.hand_out(0.0)[0]
    queue.cancel(number_of("r1"))
    assert queue.lose(0) is None
    queue.add(request("new"))
    queue.open(0)
    (alone,) = queue.hand_out(1.0)[0]
    assert alone is first[0]
    assert queue.hand_out(1.0) == {}, "nothing joins it"
    charged = queue.lose(0)
    assert charged is first[0], "it was alone, so it is its own fault"
    queue.open(0)
    (alone,) = queue.hand_out(2.0)[0]
    assert alone is first[2]
    queue.answered(0, alone.call_id, 2.0, duration_s=FAST_S)
    assert names(queue.hand_out(2.0)) == {0: ["new"]}


def test_lost_slot_charges_the_call_it_ran_and_the_others_run_elsewhere_each_first_in_its_slot() -> None:
    queue = make_queue(num_slots=2, num_requests=6, mean_s=FAST_S)
    handed = queue.hand_out(0.0)
    assert names(handed) == {0: ["r0", "r2", "r4"], 1: ["r1", "r3", "r5"]}
    queue.add(request("new"))
    charged = queue.lose(0)
    assert charged is not None
    assert charged.request.task.rollout_id == "r0"
    assert queue.hand_out(0.0) == {}, "slot 1 is busy, slot 0 has no worker"
    for ticket in handed[1]:
        assert queue.answered(1, ticket.call_id, 0.0, duration_s=FAST_S) is ticket
    again = queue.hand_out(0.0)
    assert names(again) == {1: ["r2"]}, "repeated calls go before others, and one to a slot"
    queue.open(0)
    assert names(queue.hand_out(0.0)) == {0: ["r4", "new"]}


def test_calls_behind_one_that_overruns_are_taken_back_and_answered_once() -> None:
    queue = make_queue(num_slots=2, num_requests=2, mean_s=FAST_S)
    queue.lose(1)
    slow, behind = queue.hand_out(0.0)[0]
    assert queue.wake_at() == OVERRUN_S
    assert queue.take_back(OVERRUN_S * 0.9) == {}
    assert queue.take_back(OVERRUN_S) == {0: (behind.call_id,)}
    assert queue.take_back(OVERRUN_S) == {}
    assert queue.wake_at() == 30.0
    assert queue.hand_out(0.2) == {}, "not to the slot that overruns"
    for name in ("n0", "n1", "n2"):
        queue.add(request(name))
    queue.open(1)
    assert names(queue.hand_out(0.2)) == {1: ["r1", "n0", "n1", "n2"]}, "nor anything new"
    assert queue.answered(0, slow.call_id, 0.3, duration_s=0.3) is slow
    assert queue.answered(0, behind.call_id, 0.3, duration_s=0.0) is behind, "it had begun before it heard"
    assert queue.answered(1, behind.call_id, 0.3, duration_s=0.0) is None, "the second answer is not wanted"


def test_skipped_call_is_answered_by_the_slot_that_has_it_now() -> None:
    queue = make_queue(num_slots=2, num_requests=2, mean_s=FAST_S)
    queue.lose(1)
    slow, behind = queue.hand_out(0.0)[0]
    queue.take_back(1.0)
    queue.open(1)
    queue.hand_out(1.0)
    queue.answered(0, slow.call_id, 1.1, duration_s=1.1)
    assert queue.answered(0, behind.call_id, 1.1, duration_s=None) is None
    assert queue.lose(0) is None, "nothing runs there"
    assert queue.answered(1, behind.call_id, 1.2, duration_s=0.1) is behind


def test_waiting_request_that_is_cancelled_is_never_handed_out() -> None:
    queue = make_queue(num_slots=1, num_requests=3)
    (running,) = queue.hand_out(0.0)[0]
    assert queue.cancel(number_of("r1")) == {}
    assert queue.answered(0, running.call_id, 0.0, duration_s=1.0) is running
    assert names(queue.hand_out(0.0)) == {0: ["r2"]}


def test_cancelled_request_that_is_queued_in_a_worker_is_skipped_and_one_that_runs_runs_on_unanswered() -> None:
    queue = make_queue(num_slots=1, num_requests=3, mean_s=FAST_S)
    first, second, third = queue.hand_out(0.0)[0]
    assert queue.cancel(number_of("r0")) == {}
    assert queue.cancel(number_of("r1")) == {0: (second.call_id,)}
    assert queue.cancel(number_of("r1")) == {}
    assert queue.cancel(number_of("unknown")) == {}
    assert queue.answered(0, first.call_id, 0.0, duration_s=0.1) is None
    assert queue.answered(0, second.call_id, 0.0, duration_s=None) is None
    assert queue.answered(0, third.call_id, 0.0, duration_s=0.1) is third


def test_cancelled_call_that_hangs_is_killed_but_not_charged() -> None:
    queue = make_queue(num_slots=1, num_requests=1, deadline_s=5.0)
    queue.hand_out(0.0)
    queue.cancel(number_of("r0"))
    assert queue.overdue(5.0) == [0]
    assert queue.lose(0) is None


def test_answer_out_of_order_is_refused() -> None:
    queue = make_queue(num_slots=1, num_requests=2, mean_s=FAST_S)
    first, second = queue.hand_out(0.0)[0]
    with pytest.raises(ValueError, match=f"slot 0 answered call {second.call_id}, expected {first.call_id}"):
        queue.answered(0, second.call_id, 0.0, duration_s=0.1)


@given(st.data())
def test_every_request_is_answered_exactly_once_and_handed_out_at_most_twice(data: st.DataObject) -> None:
    num_slots = data.draw(st.integers(1, 3), label="slots")
    queue = make_queue(num_slots=num_slots, mean_s=FAST_S, deadline_s=10.0)
    workers: list[collections.deque[int]] = [collections.deque() for _ in range(num_slots)]
    withdrawn: list[set[int]] = [set() for _ in range(num_slots)]
    is_open = [True] * num_slots
    tickets: dict[int, str] = {}
    handed: collections.Counter[str] = collections.Counter()
    answered: collections.Counter[str] = collections.Counter()
    cancelled: set[str] = set()
    now, num_added = 0.0, 0

    def hand_out() -> None:
        for slot, batch in queue.hand_out(now).items():
            assert is_open[slot]
            for ticket in batch:
                tickets[ticket.call_id] = ticket.request.task.rollout_id
                handed[ticket.request.task.rollout_id] += 1
                workers[slot].append(ticket.call_id)

    def reply(slot: int) -> None:
        call_id = workers[slot].popleft()
        is_skipped = call_id in withdrawn[slot]
        withdrawn[slot].discard(call_id)
        done = queue.answered(slot, call_id, now, duration_s=None if is_skipped else 0.001)
        assert not (done is not None and is_skipped)
        if done is not None:
            answered[done.request.task.rollout_id] += 1

    def lose(slot: int) -> None:
        running = workers[slot][0] if workers[slot] else None
        charged = queue.lose(slot)
        if charged is not None:
            assert charged.call_id == running, "only the call that ran is charged"
            answered[charged.request.task.rollout_id] += 1
        workers[slot].clear()
        withdrawn[slot].clear()
        is_open[slot] = False

    for _ in range(data.draw(st.integers(1, 60), label="events")):
        event = data.draw(st.sampled_from(["add", "add", "reply", "reply", "lose", "open", "later", "cancel"]))
        slot = data.draw(st.integers(0, num_slots - 1))
        if event == "add":
            for _ in range(4):
                queue.add(request(f"r{num_added}"))
                num_added += 1
        elif event == "reply" and workers[slot]:
            reply(slot)
        elif event == "lose" and is_open[slot]:
            lose(slot)
        elif event == "open":
            is_open[slot] = True
            queue.open(slot)
        elif event == "later":
            now += OVERRUN_S * 1.1
        elif event == "cancel" and num_added:
            name = f"r{data.draw(st.integers(0, num_added - 1))}"
            if not answered[name]:
                cancelled.add(name)
            for owner, call_ids in queue.cancel(number_of(name)).items():
                withdrawn[owner].update(set(call_ids) if data.draw(st.booleans(), label="heard in time") else ())
        for owner, call_ids in queue.take_back(now).items():
            withdrawn[owner].update(call_ids)
        hand_out()

    for slot in range(num_slots):
        is_open[slot] = True
        queue.open(slot)
    for _ in range(10 * num_added + 100):
        hand_out()
        for slot in range(num_slots):
            if workers[slot]:
                reply(slot)
    everyone = {f"r{index}" for index in range(num_added)}
    assert {name for name in everyone if answered[name]} == everyone - cancelled
    assert max(answered.values(), default=0) <= 1
    assert max(handed.values(), default=0) <= 2
    assert queue.num_running == 0
