"""Which weights engines hold side by side, and when others may take a place."""

from __future__ import annotations

from orchestrator.rules.residency import Residency


def bring(residency: Residency[str], version: int, weights: str) -> None:
    residency.reserve(weights)
    residency.published(version, weights)


def test_engines_begin_with_what_everything_begins_with():
    residency = Residency("base", num_places=2, is_in_place=False)
    assert residency.find("base") == 0
    assert residency.find("a") is None


def test_adapters_take_the_place_of_the_oldest_that_no_sequence_needs():
    residency = Residency("base", num_places=2, is_in_place=False)
    bring(residency, 1, "a")
    use = residency.begin(0)
    bring(residency, 2, "b")
    assert residency.find("base") == 0, "a sequence is sampled under it"
    assert residency.find("a") is None
    assert residency.find("b") == 2
    residency.end(use)
    bring(residency, 3, "c")
    assert residency.find("base") is None


def test_there_is_no_room_while_every_place_is_needed():
    residency = Residency("base", num_places=2, is_in_place=False)
    bring(residency, 1, "a")
    uses = [residency.begin(0), residency.begin(1)]
    assert not residency.has_room_for("b")
    residency.end(uses[0])
    assert residency.has_room_for("b")


def test_a_model_as_it_goes_is_found_as_it_was_published_last():
    residency = Residency("base", num_places=3, is_in_place=False)
    bring(residency, 1, "a")
    bring(residency, 2, "a")
    assert residency.find("a") == 2


def test_whole_weights_are_taken_in_place_by_the_sequences_of_the_same_model_alone():
    residency = Residency("base", num_places=1, is_in_place=True)
    bring(residency, 1, "a")
    use = residency.begin(1)
    assert residency.has_room_for("a")
    assert not residency.has_room_for("b")
    bring(residency, 2, "a")
    assert use.version == 2
    assert residency.find("base") is None
    residency.end(use)
    assert residency.has_room_for("b")


def test_what_an_engine_does_not_hold_is_brought_again():
    residency = Residency("base", num_places=2, is_in_place=False)
    bring(residency, 1, "a")
    residency.lost(1)
    assert residency.find("a") is None
    assert residency.find("base") == 0
    residency.lost()
    assert residency.find("base") is None
    bring(residency, 2, "a")
    assert residency.find("a") == 2


def test_nothing_begins_under_weights_whose_place_is_about_to_be_taken():
    whole = Residency("base", num_places=1, is_in_place=True)
    bring(whole, 1, "a")
    whole.reserve("b")
    assert whole.find("a") is None
    bring(whole, 2, "a")
    whole.reserve("a")
    assert whole.find("a") == 2, "it goes on under what the same model publishes"
    adapters = Residency("base", num_places=2, is_in_place=False)
    bring(adapters, 1, "a")
    adapters.reserve("b")
    assert adapters.find("base") is None
    assert adapters.find("a") == 1
