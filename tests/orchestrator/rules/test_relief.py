"""Who moves now, on numbers worked by hand: three engines, of which engine 0 is full."""

from __future__ import annotations

from typing import Any

from orchestrator.rules.lengths import Lengths
from orchestrator.rules.relief import MOST_AT_ONCE, Asked, Place, Relief


def asked(name: str, engine_id: int, **changes: Any) -> Asked:
    """A sequence with a prompt of 10 tokens."""
    group_id = int(name.partition("/")[0])
    fields: dict[str, Any] = {
        "attempt": 0,
        "num_given": 10,
        "num_written": 0,
        "version": 0,
        "may_move": True,
        "is_moving": False,
        "target": None,
    }
    return Asked(rollout_id=name, engine_id=engine_id, group_id=group_id, **fields | changes)


def place(engine_id: int, *, room: float = 100.0, slots: int = 4, version: int = 0, takes_work: bool = True) -> Place:
    return Place(engine_id=engine_id, version=version, slots=slots, room=room, takes_work=takes_work)


def relief(*, length: int = 40, group_size: int = 4) -> Relief:
    """All rollouts so far were of one length."""
    lengths = Lengths(group_size=group_size, max_tokens=1000)
    for group_id in range(1000, 1020):
        for _ in range(group_size):
            lengths.finished(group_id, length)
    return Relief(lengths=lengths)


def decided(rule: Relief, places: list[Place], sequences: list[Asked]) -> dict[str, int | None]:
    return {move.rollout.rollout_id: move.target for move in rule.decide(places, sequences)}


def test_what_waits_goes_to_the_engine_whose_cache_holds_it_to_its_end():
    """`0/1` has written 20 of 40 after a prompt of 10: 30 tokens, and 20 to come. The others hold 15 with 35 to come, so at their fullest,
    before `0/1` ends, 15 + 30 + 2 * 20 = 85. One has room for that.
    """
    rule = relief()
    rule.reported(0, written={"0/0": 30, "0/1": 20}, waiting={"0/1": 2.0})
    rule.reported(1, written={"1/0": 5}, waiting={})
    rule.reported(2, written={"2/0": 5}, waiting={})
    sequences = [asked("0/0", 0), asked("0/1", 0), asked("1/0", 1), asked("2/0", 2)]
    assert decided(rule, [place(0), place(1, room=84), place(2, room=90)], sequences) == {"0/1": 2}
    assert decided(rule, [place(0), place(1, room=84), place(2, room=84)], sequences) == {}


def test_an_engine_in_which_anything_waits_is_no_target():
    rule = relief()
    for unmovable in (asked("1/0", 1, may_move=False), asked("9/0", 0)):
        rule.reported(0, written={"0/0": 20}, waiting={"0/0": 1.0})
        rule.reported(1, written={"1/0": 0}, waiting={"1/0": 1.0})
        sequences = [asked("0/0", 0), unmovable]
        assert decided(rule, [place(0), place(1)], sequences) == {}, "an evaluation, or what only the engine knows of"
    rule.reported(1, written={"1/0": 0}, waiting={})
    assert decided(rule, [place(0), place(1)], [asked("0/0", 0), asked("1/0", 1, may_move=False)]) == {"0/0": 1}


def test_an_engine_that_takes_no_work_or_has_no_slot_or_an_older_version_is_no_target():
    def rule() -> Relief:
        made = relief()
        made.reported(0, written={"0/0": 20}, waiting={"0/0": 1.0})
        return made

    waiting = [asked("0/0", 0)]
    assert decided(rule(), [place(0), place(1, takes_work=False)], waiting) == {}
    assert decided(rule(), [place(0), place(1, slots=1)], [*waiting, asked("1/0", 1)]) == {}
    assert decided(rule(), [place(0, version=3), place(1, version=2)], waiting) == {}, "its last token may be of version 3"
    assert decided(rule(), [place(0, version=3), place(1, version=3)], waiting) == {"0/0": 1}


def test_what_was_never_begun_may_go_to_any_engine_that_is_no_older_than_when_it_was_asked_for():
    rule = relief()
    rule.reported(0, written={"0/0": 0}, waiting={"0/0": 1.0})
    assert decided(rule, [place(0, version=3), place(1, version=1)], [asked("0/0", 0, version=2)]) == {}
    assert decided(rule, [place(0, version=3), place(1, version=2)], [asked("0/0", 0, version=2)]) == {"0/0": 1}


def test_what_moves_already_counts_in_its_target_and_is_not_asked_for_again():
    """Engine 1 has room for one of 50 tokens at its end, not for two."""
    rule = relief()
    rule.reported(0, written={"0/0": 0, "0/1": 0}, waiting={"0/0": 1.0, "0/1": 1.0})
    places = [place(0), place(1, room=60)]
    (first,) = rule.decide(places, [asked("0/0", 0), asked("0/1", 0)])
    assert first.rollout.rollout_id == "0/0"
    assert decided(rule, places, [asked("0/0", 0, is_moving=True, target=1), asked("0/1", 0)]) == {}


def test_a_sequence_moves_once_for_each_wait():
    """It has moved to engine 1 and waits there, too: not again before engine 1 has sampled a token of it."""
    rule = relief()
    rule.reported(0, written={"0/0": 0}, waiting={"0/0": 1.0})
    assert decided(rule, [place(0), place(1)], [asked("0/0", 0)]) == {"0/0": 1}
    rule.answered("0/0", engine_id=0, group_id=0, num_tokens=None, goes_on=True)
    rule.reported(0, written={}, waiting={})
    there = [asked("0/0", 1, attempt=1)]
    rule.reported(1, written={"0/0": 0}, waiting={"0/0": 1.0})
    assert decided(rule, [place(0), place(1)], there) == {}
    rule.reported(1, written={"0/0": 1}, waiting={"0/0": 1.0})
    assert decided(rule, [place(0), place(1)], there) == {"0/0": 0}


def test_a_sequence_that_has_moved_and_ended_is_remembered_no_more():
    """Its engine failed, and the next attempt waits as any other."""
    rule = relief()
    rule.reported(0, written={"0/0": 0}, waiting={"0/0": 1.0})
    assert decided(rule, [place(0), place(1)], [asked("0/0", 0)]) == {"0/0": 1}
    rule.answered("0/0", engine_id=0, group_id=0, num_tokens=None, goes_on=True)
    rule.answered("0/0", engine_id=1, group_id=0, num_tokens=None, goes_on=False)
    rule.reported(0, written={"0/0": 0}, waiting={"0/0": 1.0})
    assert decided(rule, [place(0), place(1)], [asked("0/0", 0, attempt=2)]) == {"0/0": 1}


def test_a_sequence_that_has_ended_is_forgotten_and_its_length_counts():
    rule = relief(length=40, group_size=1)
    rule.reported(0, written={"0/0": 0}, waiting={"0/0": 1.0})
    rule.answered("0/0", engine_id=0, group_id=0, num_tokens=40, goes_on=False)
    assert decided(rule, [place(0), place(1)], [asked("0/0", 0, attempt=1)]) == {}, "the next attempt has not been reported"
    for number in range(1, 200):
        rule.answered(f"{number}/0", engine_id=0, group_id=number, num_tokens=400, goes_on=False)
    rule.reported(0, written={"0/0": 0}, waiting={"0/0": 1.0})
    assert decided(rule, [place(0), place(1, room=100)], [asked("0/0", 0, attempt=1)]) == {}, "they are longer now"
    assert decided(rule, [place(0), place(1, room=1000)], [asked("0/0", 0, attempt=1)]) == {"0/0": 1}


def test_an_engine_is_given_so_many_at_a_time():
    rule = relief()
    names = [f"0/{number}" for number in range(MOST_AT_ONCE + 3)]
    rule.reported(0, written=dict.fromkeys(names, 0), waiting=dict.fromkeys(names, 1.0))
    places = [place(0), place(1, room=10_000, slots=100)]
    assert len(decided(rule, places, [asked(name, 0) for name in names])) == MOST_AT_ONCE
    two = [*places, place(2, room=10_000, slots=100)]
    assert len(decided(rule, two, [asked(name, 0) for name in names])) == MOST_AT_ONCE + 3


def test_an_engine_that_is_gone_says_nothing_any_more():
    rule = relief()
    rule.reported(0, written={"0/0": 5}, waiting={"0/0": 1.0})
    rule.reported(1, written={"1/0": 5}, waiting={"1/0": 1.0})
    rule.lost(1)
    assert decided(rule, [place(0), place(1)], [asked("0/0", 0)]) == {"0/0": 1}
    rule.lost(0)
    assert decided(rule, [place(0), place(1)], [asked("0/0", 0)]) == {}


def test_what_has_moved_is_counted_once_it_was_given_back():
    """`0/0` had 20 tokens after its prompt of 10, `0/1` none: only the first is computed anew."""
    rule = relief()
    rule.reported(0, written={"0/0": 20, "0/1": 0, "0/2": 3}, waiting={"0/0": 2.0, "0/1": 1.0, "0/2": 4.0})
    rule.decide([place(0), place(1, room=1000)], [asked("0/0", 0), asked("0/1", 0), asked("0/2", 0)])
    assert rule.gauges() == {"num_waits": 3, "num_moved": 0, "moved_after_s": 0.0, "num_recomputed_tokens": 0}
    rule.answered("0/0", engine_id=0, group_id=0, num_tokens=None, goes_on=True)
    rule.answered("0/1", engine_id=0, group_id=0, num_tokens=None, goes_on=True)
    rule.answered("0/2", engine_id=0, group_id=0, num_tokens=4, goes_on=False)
    assert rule.gauges() == {"num_waits": 3, "num_moved": 2, "moved_after_s": 3.0, "num_recomputed_tokens": 30}
    rule.reported(0, written={"0/3": 0}, waiting={"0/3": 1.0})
    rule.reported(0, written={"0/3": 0}, waiting={"0/3": 2.0})
    assert rule.gauges()["num_waits"] == 4, "one wait, though two reports find it"


def test_what_an_engine_that_leaves_gives_back_is_no_move_of_this_rule():
    rule = relief()
    rule.answered("0/0", engine_id=0, group_id=0, num_tokens=None, goes_on=True)
    assert rule.gauges()["num_moved"] == 0
