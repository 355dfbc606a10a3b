"""Slots that hold episodes, by hand: who gets which task, and what becomes of an episode whose slot is lost."""

from __future__ import annotations

import numpy as np
import pytest

from pipelinerl.messages import Finish, Prompt, Request, RequestKind, ScorerTask, Turns
from pipelinerl.rewards.pool.episodes import MAX_IDLE_S, EpisodeQueue


def request(number: int, rollout_id: str, *, num_turns: int = 0) -> Request:
    at = 2 * np.arange(num_turns, dtype=np.int32)
    turns = Turns(starts=at, ends=at, states=("s",) * num_turns) if num_turns else None
    prompt = Prompt(prompt_id="0:0", text="", token_ids=np.zeros(1, np.int32))
    task = ScorerTask(
        kind=RequestKind.ENVIRONMENT,
        rollout_id=rollout_id,
        attempt=0,
        prompt=prompt,
        completions=(np.zeros(2 * num_turns, np.int32),),
        finishes=(Finish.STOP,),
        turns=(turns,),
    )
    return Request(request_id=number, task=task)


def queue(num_slots: int = 2) -> EpisodeQueue:
    made = EpisodeQueue(num_slots=num_slots, deadline_s=5.0)
    for slot in range(num_slots):
        made.open(slot)
    return made


def sent(queue: EpisodeQueue, now: float = 0.0) -> dict[int, tuple[int, bool]]:
    """Request and whether it closes, by slot."""
    return {slot: (ticket.request.request_id, ticket.closes) for slot, (ticket,) in queue.hand_out(now).items()}


def answer(queue: EpisodeQueue, slot: int, now: float = 0.0) -> int | None:
    """Have a slot answer what it runs; return the request whose answer is wanted."""
    running = queue._slots[slot].running
    assert running is not None
    ticket = queue.answered(slot, running.call_id, now, duration_s=0.1)
    return None if ticket is None else ticket.request.request_id


def test_all_of_an_episode_goes_to_one_slot_and_a_reset_waits_for_a_free_one() -> None:
    slots = queue()
    for number, name in enumerate("abc"):
        slots.add(request(number, name))
    assert sent(slots) == {0: (0, False), 1: (1, False)}
    assert [answer(slots, 0), answer(slots, 1)] == [0, 1]
    slots.add(request(3, "b", num_turns=1))
    assert sent(slots) == {1: (3, False)}, "and c waits, though slot 0 runs nothing"
    slots.end("a")
    assert sent(slots) == {0: (0, True)}
    answer(slots, 0)
    assert sent(slots) == {0: (2, False)}


def test_an_episode_whose_slot_is_lost_is_lost() -> None:
    slots = queue(1)
    slots.add(request(0, "a"))
    sent(slots)
    answer(slots, 0)
    slots.add(request(1, "a", num_turns=1))
    sent(slots)
    slots.add(request(4, "a", num_turns=2))
    ticket = slots.lose(0)
    assert ticket is not None
    assert ticket.request.request_id == 1
    slots.add(request(2, "a", num_turns=1))
    assert [ticket.request.request_id for ticket in slots.take_lost()] == [4, 2], "and what waited behind it"
    assert slots.take_lost() == []
    slots.add(request(3, "a"))
    assert sent(slots) == {}, "its new process has not loaded the class"
    slots.open(0)
    assert sent(slots) == {0: (3, False)}


def test_a_reset_that_is_asked_for_again_begins_anew_and_closes_what_there_was() -> None:
    slots = queue(1)
    slots.add(request(0, "a"))
    sent(slots)
    slots.add(request(1, "a"))
    assert sent(slots) == {}
    answer(slots, 0)
    assert sent(slots) == {0: (0, True)}
    answer(slots, 0)
    assert sent(slots) == {0: (1, False)}


def test_an_episode_is_ended_once_whoever_ends_it_how_often() -> None:
    slots = queue(1)
    slots.add(request(0, "a"))
    sent(slots)
    slots.end("a")
    slots.end("a")
    assert sent(slots) == {}, "its reset is under way"
    assert answer(slots, 0) == 0
    assert sent(slots) == {0: (0, True)}
    slots.end("a")
    slots.end_all()
    answer(slots, 0)
    assert sent(slots) == {}
    slots.add(request(1, "b"))
    assert sent(slots) == {0: (1, False)}


def test_a_reset_that_nobody_wants_any_more_takes_no_slot() -> None:
    slots = queue(1)
    slots.add(request(0, "a"))
    slots.cancel(0)
    slots.add(request(1, "b"))
    assert sent(slots) == {0: (1, False)}
    slots.cancel(1)
    assert answer(slots, 0) is None
    slots.end("b")
    assert sent(slots) == {0: (1, True)}, "it was reset, so it is closed"


def test_a_call_past_its_deadline_is_overdue_and_a_forgotten_episode_is_ended() -> None:
    slots = queue(1)
    assert slots.wake_at() is None
    slots.add(request(0, "a"))
    sent(slots, 1.0)
    assert (slots.wake_at(), slots.overdue(5.9), slots.overdue(6.0), slots.running_s(0, 3.0)) == (6.0, [], [0], 2.0)
    answer(slots, 0, 4.0)
    assert slots.wake_at() == 4.0 + MAX_IDLE_S
    assert sent(slots, 4.0 + MAX_IDLE_S) == {0: (0, True)}


def test_an_answer_to_anything_but_the_call_under_way_is_refused() -> None:
    slots = queue(1)
    with pytest.raises(ValueError, match="slot 0 answered call 7, expected nothing"):
        slots.answered(0, 7, 0.0, duration_s=0.1)
