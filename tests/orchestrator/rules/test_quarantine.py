"""Quarantine: two deaths in a row condemn, coming through clears, and a prompt is its row in every epoch."""

from __future__ import annotations

import pytest

from orchestrator.rules.quarantine import MAX_SKIPPED, Quarantine, row_of
from pipelinerl.errors import DataError


def test_a_prompt_is_known_by_its_row():
    assert row_of("3:17") == row_of("0:17") == "17"


def test_whoever_was_there_is_a_suspect_and_at_the_second_death_is_condemned():
    quarantine = Quarantine()
    assert quarantine.died("engine", ["0:1", "0:2", "0:3"]) == []
    assert [quarantine.is_suspect("engine", prompt_id) for prompt_id in ("0:1", "0:2", "0:4")] == [True, True, False]
    assert quarantine.died("engine", ["0:2", "0:5"]) == ["2"]
    assert quarantine.holds("0:2")
    assert quarantine.holds("7:2"), "in every epoch"
    assert not quarantine.is_suspect("engine", "0:2")
    assert not quarantine.holds("0:1")
    assert quarantine.is_suspect("engine", "0:5")


def test_coming_through_clears():
    quarantine = Quarantine()
    quarantine.died("engine", ["0:1"])
    assert quarantine.came_through("engine", "0:1")
    assert not quarantine.came_through("engine", "0:1"), "it is no suspect any more"
    assert quarantine.died("engine", ["0:1"]) == []


def test_roles_are_counted_apart_but_the_condemned_of_one_is_condemned_for_all():
    quarantine = Quarantine()
    quarantine.died("engine", ["0:1"])
    assert not quarantine.is_suspect("scorer", "0:1")
    assert quarantine.died("scorer", ["0:1"]) == []
    assert not quarantine.holds("0:1")
    assert quarantine.died("scorer", ["0:1"]) == ["1"]
    assert quarantine.holds("0:1")


def test_earlier_lives_are_remembered():
    quarantine = Quarantine({"engine": {"1": 1, "2": 2}})
    assert quarantine.holds("0:2")
    assert quarantine.died("engine", ["0:1"]) == ["1"]


def test_siblings_count_once():
    assert Quarantine().died("engine", ["0:1", "0:1", "0:1"]) == []


def test_quarantined_prompts_are_passed_over_until_there_is_hardly_any_other():
    quarantine = Quarantine({"engine": {"2": 2}})
    for _ in range(2):
        assert all(quarantine.skips("0:2") for _ in range(MAX_SKIPPED - 1))
        assert not quarantine.skips("0:1"), "another prompt begins the count anew"
    assert all(quarantine.skips("0:2") for _ in range(MAX_SKIPPED - 1))
    with pytest.raises(DataError, match=f"last {MAX_SKIPPED} prompts are all quarantined"):
        quarantine.skips("0:2")
