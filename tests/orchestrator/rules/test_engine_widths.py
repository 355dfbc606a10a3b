"""Engines of another width take the place of those that a run has, on numbers worked by hand."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.rules.engine_widths import EngineWidths
from orchestrator.rules.membership import Membership
from orchestrator.rules.weight_transport import why_not_ranks
from pipelinerl.runtime.membership import EnginesBefore, ScaleRequest, StartedBy, State
from tests.orchestrator.rules.test_membership import states


def of(count: int, *, most: int = 6, why: str | None = None) -> tuple[Membership, EngineWidths]:
    """A run of so many engines of one rank, which have all announced themselves."""
    found = Membership(count=count, most=most, tensor_parallel_size=1, why_not_width=lambda size: why)
    for number in range(count):
        found.joined(number)
    return found, EngineWidths(found)


def request(number: int, engines: int | None, size: int | None, *, drain_s: float = 7.0) -> ScaleRequest:
    return ScaleRequest(request_id=number, engines=engines, tensor_parallel_size=size, drain_s=drain_s)


def widths(engines: Membership) -> dict[int, int | None]:
    return {one.engine_id: one.tensor_parallel_size for one in engines.record().members}


def test_those_of_another_width_come_first_and_the_others_leave_once_all_of_them_serve() -> None:
    engines, change = of(2)
    assert engines.scale(request(1, 2, 2)) == []
    assert (states(engines), widths(engines)) == ("LLJJ", {0: 1, 1: 1, 2: 2, 3: 2})
    assert (engines.before, engines.drain_s, change.awaited()) == (EnginesBefore(num_wanted=2, tensor_parallel_size=1), 7.0, {2, 3})
    engines.joined(2)
    assert (change.replace(), change.is_changing) == ([], True)
    engines.joined(3)
    assert change.replace() == [1, 0]
    assert (states(engines), engines.before, change.is_changing) == ("DDLL", None, False)
    engines.left(0, "done")
    engines.left(1, "done")
    assert engines.scale(request(2, None, 1)) == [], "a width alone keeps the number"
    assert (states(engines), widths(engines)) == ("JJLL", {0: 1, 1: 1, 2: 2, 3: 2})


def test_the_width_that_there_is_changes_nothing_and_a_number_alone_keeps_it() -> None:
    engines, change = of(2)
    assert engines.scale(request(1, None, 1)) == []
    assert (states(engines), engines.before) == ("LL", None)
    engines.scale(request(2, 1, 2))
    engines.joined(2)
    for number in change.replace():
        engines.left(number, "done")
    engines.scale(request(3, 2, None))
    assert (states(engines), widths(engines)) == ("JxL", {0: 2, 1: 1, 2: 2})
    assert engines.scale(request(4, 1, None)) == []
    assert states(engines) == "xxL"


def test_as_many_leave_before_as_have_the_gpus_that_one_needs() -> None:
    engines, change = of(4, most=8)
    engines.scale(request(1, 2, 2))
    assert change.make_room(4) == [3, 2]
    assert change.make_room(4) == change.make_room(5) == [], "two are leaving, and nobody knows yet what that frees"
    for number in (2, 3):
        engines.left(number, "done")
    assert change.make_room(5) == [], "nobody would serve while 4 loads"
    engines.joined(4)
    assert (change.replace(), change.make_room(4)) == ([], []), "5 has not come, and 4 has"
    assert change.make_room(5) == [1, 0]
    for number in (0, 1):
        engines.left(number, "done")
    engines.joined(5)
    assert (change.replace(), engines.before, states(engines)) == ([], None, "xxxxLL")
    engines.scale(request(2, 4, 1))
    assert change.make_room(0) == [5], "one of two ranks has more than enough for one of one"


def test_where_none_of_them_comes_to_serve_the_run_has_those_of_before_again() -> None:
    engines, change = of(2)
    engines.scale(request(5, 1, 2))
    assert change.make_room(2) == [1, 0]
    engines.left(1, "done")
    assert not change.has_failed
    engines.lost(2, "it does not start")
    assert change.has_failed
    assert not engines.is_last(2), "there are others to go back to"
    back = change.go_back()
    assert (back.request_id, back.engines, back.tensor_parallel_size, back.drain_s) == (6, 2, 1, 7.0)
    engines.scale(back)
    assert (states(engines), engines.before, engines.record().refused) == ("LJ?", None, "")
    assert not engines.may_join(2), "it has another width than the run"
    assert engines.may_join(1)
    engines.lost(0, "killed")
    assert [engines.may_join(number) for number in range(3)] == [True, True, False]
    assert not engines.is_last(0)
    engines.lost(1, "it does not start")
    assert engines.is_last(1)


def test_a_third_width_goes_back_to_the_one_that_has_served_and_back_by_hand_is_no_change() -> None:
    engines, change = of(1)
    engines.scale(request(1, 1, 2))
    engines.scale(request(2, 1, 4))
    assert (states(engines), engines.before) == ("LJ", EnginesBefore(num_wanted=1, tensor_parallel_size=1))
    engines.scale(request(3, 1, 1))
    assert (states(engines), engines.before, change.is_changing) == ("Lx", None, False)
    engines.scale(request(4, 1, 2))
    engines.joined(1)
    assert engines.scale(request(5, 1, 1)) == [], "0 has never left"
    assert change.replace() == [1]


def test_an_engine_of_a_width_that_is_not_wanted_any_more_leaves_in_place_of_waiting_for_room() -> None:
    engines, change = of(2)
    engines.scale(request(1, 1, 2))
    engines.ended(0)
    assert states(engines) == "JLJ"
    assert (change.make_room(0), states(engines)) == ([], "xLJ")


def test_an_engine_that_announces_itself_with_another_width_is_none_of_the_runs() -> None:
    engines, _ = of(1)
    engines.scale(request(1, 1, 2))
    assert [engines.is_meant(number, request_id=min(number, 1), size=2) for number in (0, 1, 5)] == [False, True, True]
    assert Membership(count=1).is_meant(0, request_id=0, size=2), "where nobody has said which one"


def test_the_orchestrator_that_follows_goes_on_with_the_change_unless_the_settings_name_another_width() -> None:
    engines, _ = of(2)
    engines.scale(request(1, 1, 2))
    earlier = engines.record()
    after, change = Membership(count=2, most=6, tensor_parallel_size=1), None
    after.restore(earlier)
    change = EngineWidths(after)
    assert (states(after), widths(after), after.before, after.drain_s) == ("JJJ", widths(engines), engines.before, 7.0)
    assert not change.has_failed
    for number in range(3):
        after.joined(number)
    assert change.replace() == [1, 0]
    other = Membership(count=2, most=6, tensor_parallel_size=2)
    other.restore(earlier)
    assert (states(other), other.tensor_parallel_size, other.before) == ("JJ", 2, None)
    old = msgspec.structs.replace(earlier, tensor_parallel_size=None, configured=None, before=None)
    old = msgspec.structs.replace(old, members=tuple(msgspec.structs.replace(one, tensor_parallel_size=None) for one in old.members))
    other.restore(old)
    assert set(widths(other).values()) == {2}, "one that knew of no widths had those of the settings"


def test_what_cannot_be_is_refused_with_the_reason_and_changes_nothing() -> None:
    engines, _ = of(4)
    assert engines.scale(request(1, 3, 2)) == []
    assert "3 beside 4, and there are 6 (engine.max_count)" in engines.record().refused
    none, _ = of(1, why="policies travel by nccl")
    none.scale(request(1, 1, 2))
    assert none.record().refused == "tensor_parallel_size=2: policies travel by nccl"
    for one in (engines, none):
        assert (one.tensor_parallel_size, one.before, "J" in states(one)) == (1, None, False)


def test_only_the_launchers_own_have_a_deadline() -> None:
    engines, change = of(1)
    engines.scale(msgspec.structs.replace(request(1, 1, 2), started_by=StartedBy.JOB))
    assert (states(engines), change.awaited()) == ("LJ", set())
    assert engines.state(1) is State.JOINING


@pytest.mark.parametrize("transport", ["cuda_ipc", "nccl"])
def test_transports_between_devices_reach_no_engine_of_several_ranks(transport: str) -> None:
    assert why_not_ranks(transport, 1) is None
    assert f"policies travel by {transport}" in (why_not_ranks(transport, 2) or "")
    assert [why_not_ranks(other, 2) for other in ("shared_memory", "gloo", "files")] == [None] * 3


def test_engines_that_leave_are_counted_by_their_ranks_and_more_leave_where_they_were_not_enough() -> None:
    engines, change = of(3)
    engines.scale(request(1, 3, 2))
    for number in (3, 4, 5):
        engines.joined(number)
    for number in change.replace():
        engines.left(number, "done")
    engines.scale(request(2, 1, 4))
    assert change.make_room(0) == [5, 4], "they have the four GPUs that it needs"
    for number in (4, 5):
        engines.left(number, "done")
    assert change.make_room(0) == [3], "somebody else has some of them"


def test_a_number_that_is_asked_for_meanwhile_is_one_of_the_width_that_comes() -> None:
    engines, change = of(2)
    engines.scale(request(1, 2, 2))
    engines.ended(1)
    engines.joined(2)
    assert engines.scale(request(2, 1, None)) == []
    assert states(engines) == "LJLx", "3 has not come; 1 is awaited until others serve"
    assert change.replace() == [0]
    engines.scale(request(3, 2, None))
    assert (states(engines), widths(engines)[1]) == ("DJLx", 2), "0 drains, and has another width"


def test_engines_of_before_that_still_serve_need_no_numbers_of_their_own() -> None:
    engines, _ = of(4)
    engines.scale(request(1, 1, 2))
    assert engines.scale(request(2, 4, 1)) == []
    assert (engines.record().refused, states(engines)) == ("", "LLLLx")


def test_fewer_that_are_asked_for_meanwhile_are_fewer_of_those_that_come() -> None:
    engines, change = of(2)
    engines.scale(request(1, 2, 2))
    for number in (2, 3):
        engines.joined(number)
    for number in change.replace():
        engines.left(number, "done")
    engines.scale(request(2, 2, 1))
    engines.joined(0)
    engines.ended(3)
    assert states(engines) == "LJLJ"
    assert engines.scale(request(3, 1, None)) == []
    assert states(engines) == "LxLJ", "2 and 3 have another width, and leave once 0 serves alone"
    assert (change.replace(), states(engines)) == ([2], "LxDx")
