"""Which processes of a reward model its scorer starts, closes and ends, by hand: slots that only note what they are told."""

from __future__ import annotations

import dataclasses

from pipelinerl.rewards.pool.processes import ModelProcesses
from pipelinerl.rewards.pool.queue import Queue
from pipelinerl.runtime.membership import DealtGpu, Member, Members, StartedBy, State

MODEL = "reward.1"


@dataclasses.dataclass(slots=True)
class NotedSlots:
    """Slots whose processes load at once."""

    slots: list[int] = dataclasses.field(default_factory=list)
    given_up: dict[int, str] = dataclasses.field(default_factory=dict)
    told: list[str] = dataclasses.field(default_factory=list)

    def is_loaded(self, slot: int) -> bool:
        return slot in self.slots

    def start_slot(self, slot: int, *, gpu: str, is_spare: bool) -> None:
        self.slots.append(slot)
        self.given_up.pop(slot, None)
        self.told.append(f"start {slot} on {gpu or 'no GPU'}")

    def close_slot(self, slot: int, *, is_closed: bool) -> None:
        self.told.append(f"{'close' if is_closed else 'open'} {slot}")

    def end_slot(self, slot: int) -> None:
        self.slots.remove(slot)
        self.told.append(f"end {slot}")

    def give_up(self, slot: int, reason: str) -> None:
        self.slots.remove(slot)
        self.given_up[slot] = reason

    def news(self) -> list[str]:
        told, self.told = self.told, []
        return told


def processes(slots: NotedSlots, *, count: int = 1) -> ModelProcesses:
    return ModelProcesses(slots, Queue(num_slots=8, deadline_s=1.0, batch=4), model=MODEL, count=count)


def members(*states: tuple[State, int], count: int = 1) -> Members:
    """The processes from 0 on, by state and the request that brought each."""
    found = [
        Member(engine_id=number, state=state, started_by=StartedBy.LAUNCHER if request_id else StartedBy.RUN, request_id=request_id)
        for number, (state, request_id) in enumerate(states)
    ]
    return Members(members=tuple(found), num_wanted=len(found), count=count)


def dealt(number: int, request_id: int, gpu: str, *, kind: str = MODEL) -> DealtGpu:
    return DealtGpu(kind=kind, number=number, request_id=request_id, gpu=gpu)


FIRST = (State.LIVE, 0)


def test_one_that_joins_waits_for_the_gpu_that_it_was_dealt_by_the_same_request() -> None:
    slots = NotedSlots()
    found = processes(slots)
    found.follow(None)
    assert slots.news() == ["start 0 on no GPU"], "what the settings say, until an orchestrator has said anything"
    joining = members(FIRST, (State.JOINING, 5))
    for others in ([], [dealt(1, 4, "GPU-4")], [dealt(1, 5, "GPU-5", kind="reward.0")]):
        found.follow(joining, others)
        assert slots.news() == []
    found.follow(joining, [dealt(1, 5, "GPU-5")])
    assert slots.news() == ["start 1 on GPU-5"]


def test_a_number_that_another_request_has_brought_is_another_process() -> None:
    slots = NotedSlots()
    found = processes(slots)
    found.follow(members(FIRST, (State.JOINING, 5)), [dealt(1, 5, "GPU-5")])
    slots.news()
    found.follow(members(FIRST, (State.LIVE, 5)), [dealt(1, 5, "GPU-5")])
    assert slots.news() == []
    found.follow(members(FIRST, (State.JOINING, 7)), [dealt(1, 7, "GPU-7")])
    assert slots.news() == ["end 1", "start 1 on GPU-7"]


def test_one_that_cannot_load_is_tried_again_by_another_request_alone() -> None:
    slots = NotedSlots()
    found = processes(slots)
    found.follow(members(FIRST, (State.JOINING, 5)), [dealt(1, 5, "GPU-5")])
    slots.give_up(1, "no memory")
    slots.news()
    found.follow(members(FIRST, (State.JOINING, 5)), [dealt(1, 5, "GPU-5")])
    assert slots.news() == []
    said = found.load(busy_s=0.0).processes[1]
    assert (said.brought_by, said.is_loaded, said.failed) == ("5", False, "no memory")
    found.follow(members(FIRST, (State.JOINING, 6)), [dealt(1, 6, "GPU-6")])
    assert slots.news() == ["start 1 on GPU-6"]


def test_one_that_drains_is_closed_once_and_opened_where_it_stays() -> None:
    slots = NotedSlots()
    found = processes(slots)
    for state, told in ((State.LIVE, ["start 0 on no GPU"]), (State.DRAINING, ["close 0"]), (State.DRAINING, []), (State.LIVE, ["open 0"])):
        found.follow(members((state, 0)))
        assert slots.news() == told
    found.follow(members((State.DRAINING, 0)))
    assert found.load(busy_s=0.0).processes[0].is_closed
    found.follow(members((State.LEFT, 0)))
    assert slots.news() == ["close 0", "end 0"]


def test_processes_of_other_settings_are_not_gone_on_with() -> None:
    """The run was saved with one process, given another, and goes on with `concurrency` 2: an orchestrator begins with these two."""
    slots = NotedSlots()
    processes(slots, count=2).follow(members(FIRST, (State.LIVE, 5), (State.LIVE, 6), count=1))
    assert slots.news() == ["start 0 on no GPU", "start 1 on no GPU"]
