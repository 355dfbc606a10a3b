"""What elastic roles have decided, in the report: a row for each window, and a sentence under the diagnosis."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from pipelinerl.observe.fold.rows import RolesRow
from pipelinerl.observe.journal import Journal
from pipelinerl.observe.report.diagnosis import diagnose
from pipelinerl.observe.report.listings import roles
from pipelinerl.observe.report.page import page
from pipelinerl.observe.report.reading import read_tables
from tests.observe.report.synthetic import Plan, write_run

NOW = {"engines": 3, "trainer": 1, "engines_then": 2, "trainer_then": 2}
WEIGHED = {"speed_now": 280.0, "speed_then": 520.0, "saved_s": 12.0, "cost_s": 3.0}


def decide(folder: Path) -> None:
    journal = Journal(folder, "orchestrator")
    journal.write("roles", word="stays", **NOW | {"engines_then": 3, "trainer_then": 1}, **WEIGHED)
    journal.write("roles", word="begins", **NOW, **WEIGHED)
    journal.write("roles", word="taken", **NOW)
    journal.close()


def test_every_decision_has_a_row_with_what_it_was_made_on_and_the_diagnosis_says_what_came_of_them(tmp_path: Path) -> None:
    write_run(tmp_path, Plan())
    assert roles(read_tables(tmp_path)).rows == [], "of a run without them nothing is said"
    assert "Elastic roles" not in diagnose(read_tables(tmp_path)).advice
    decide(tmp_path)
    tables = read_tables(tmp_path)
    assert [tuple(row[1:]) for row in roles(tables).rows] == [
        ("roles stay engines=3 trainer=1", "280", "520", "12.0", "3.00"),
        ("roles change to engines=2 trainer=2: 520 tokens/s in place of 280, 12 s saved for 3 s", "280", "520", "12.0", "3.00"),
        ("roles are engines=2 trainer=2", "", "", "", ""),
    ]
    assert diagnose(tables).advice.endswith("Elastic roles (pipeline.elastic) have begun 1 change; last: roles are engines=2 trainer=2.")
    assert "Roles of devices" in page(tables)


def test_a_change_is_under_way_until_it_has_ended() -> None:
    assert RolesRow(word="begins").is_under_way
    assert RolesRow(word="late").is_under_way, "it is ordered back"
    assert not any(RolesRow(word=word).is_under_way for word in ("stays", "taken", "taken back", "by hand"))


def test_engines_that_are_given_up_and_come_again_are_told_of() -> None:
    lost = RolesRow(word="lost", engines_then=3, trainer_then=1, reason="waited 60 s for engine-2 to come")
    assert lost.words == "roles are shared without engines that are lost: waited 60 s for engine-2 to come"
    assert RolesRow(word="again", engines_then=3, trainer_then=1).words == "roles are shared with engines that have come again"
    assert not lost.is_under_way


def test_other_ranks_are_told_where_a_run_has_any() -> None:
    begins = RolesRow(word="begins", engines=2, engines_then=1, trainer=1, trainer_then=1, tensor_parallel_size_then=2)
    assert begins.words == "roles change to engines=1 tensor_parallel_size=2 trainer=1"
    stays = dataclasses.replace(begins, word="stays", speed_now=100.0, speed_then=110.0)
    assert stays.words == "roles stay engines=2 tensor_parallel_size=1 trainer=1: 110 tokens/s in place of 100"
