"""Which sequences move, on numbers worked by hand."""

from __future__ import annotations

from orchestrator.rules.migration import Held, Holding, relieve, repack


def held(name: str, num_tokens: float, to_come: float, *, waits: bool = False, version: int = 0) -> Held[str]:
    return Held(rollout=name, num_tokens=num_tokens, to_come=to_come, waits=waits, version=version)


def engine(engine_id: int, *sequences: Held[str], room: float = 1000.0, slots: int = 4, version: int = 0) -> Holding[str]:
    return Holding(engine_id=engine_id, version=version, slots=slots, room=room, held=list(sequences))


def moved(moves: list) -> dict[str, int]:
    return {move.rollout: move.target for move in moves}


def test_what_waits_goes_where_it_is_predicted_to_fit_to_its_end():
    """Room of 100. Engine 1 holds 40 with 10 to come, engine 2 30 with 5: with one of 20 and 30 to come they peak at 40 + 20 + 2 * 10 = 80
    and 30 + 20 + 2 * 5 = 60; both fit and have as many, so the first takes it.
    """
    full = engine(0, held("a", 90, 5), held("b", 20, 30, waits=True), room=100)
    others = [engine(1, held("c", 40, 10), room=100), engine(2, held("d", 30, 5), room=100)]
    assert moved(relieve([full, *others])) == {"b": 1}


def test_nothing_goes_where_it_would_overflow_or_where_something_waits_or_no_slot_is_free():
    waiting = held("b", 20, 60, waits=True)
    assert relieve([engine(0, waiting), engine(1, held("c", 40, 50), room=100)]) == [], "40 + 20 + 2 * 50 > 100"
    assert relieve([engine(0, waiting), engine(1, held("c", 1, 1, waits=True))]) == []
    assert relieve([engine(0, waiting), engine(1, held("c", 1, 1), slots=1)]) == []


def test_no_engine_of_an_older_version_takes_it():
    waiting = held("b", 20, 5, waits=True, version=3)
    assert moved(relieve([engine(0, waiting, version=3), engine(1, version=2), engine(2, version=4)])) == {"b": 2}


def test_the_longest_of_those_that_wait_goes_first_and_takes_the_room():
    waits = [held("short", 10, 5, waits=True), held("long", 10, 80, waits=True)]
    assert list(moved(relieve([engine(0, *waits), engine(1, room=95)]))) == ["long", "short"], "10 + 80, and 20 + 2 * 5 before"
    waits = [held("short", 10, 5, waits=True), held("long", 10, 80, waits=True)]
    assert moved(relieve([engine(0, *waits), engine(1, room=95, slots=1)])) == {"long": 1}


def test_each_goes_to_the_engine_with_the_fewest_sequences_those_that_have_moved_there_included():
    waits = [held(name, 10, to_come, waits=True) for name, to_come in (("a", 30), ("b", 20), ("c", 10))]
    others = [engine(1), engine(2, held("d", 10, 5))]
    assert moved(relieve([engine(0, *waits), *others])) == {"a": 1, "b": 1, "c": 2}, "one, one more as the lower id has one, two to one"


def test_the_emptiest_engine_is_emptied_into_the_fullest_that_takes_it():
    engines = [
        engine(0, held("a", 10, 100)),
        engine(1, held("b", 10, 90), held("c", 10, 80)),
        engine(2, held("d", 10, 70), held("e", 9, 60)),
    ]
    moves = repack(engines, most=4, prefill_passes=0.001)
    assert [(move.rollout, move.source, move.target) for move in moves] == [("a", 0, 1)], "then engine 1 has one slot left, and 2 two"


def test_nothing_is_packed_beyond_what_a_pass_takes_alike():
    engines = [engine(0, held("a", 10, 100)), engine(1, held("b", 10, 90))]
    assert repack(engines, most=1, prefill_passes=0.0) == []
    assert moved(repack([engine(0, held("a", 10, 100)), engine(1, held("b", 10, 90))], most=2, prefill_passes=0.0)) == {"a": 1}


def test_a_cache_that_costs_more_to_compute_than_the_engine_is_freed_for_stays():
    """500 tokens at 0.05 passes each are 25 passes; a fifth of 100 to come is 20."""

    def engines() -> list[Holding[str]]:
        return [engine(0, held("a", 500, 100)), engine(1, held("b", 10, 90))]

    assert repack(engines(), most=4, prefill_passes=0.05) == []
    assert moved(repack(engines(), most=4, prefill_passes=0.03)) == {"a": 1}


def test_all_or_nothing_of_an_engine_moves():
    two = engine(0, held("a", 10, 100), held("b", 10, 100))
    assert repack([two, engine(1, held("c", 1, 9), held("d", 1, 9), held("e", 1, 9))], most=4, prefill_passes=0.0) == []
    assert [one.rollout for one in two.held] == ["a", "b"]


def test_nothing_is_packed_while_anything_waits():
    assert repack([engine(0, held("a", 1, 9, waits=True)), engine(1, held("b", 1, 9))], most=4, prefill_passes=0.0) == []
