"""The settings of several policies: each has whole ones of its own, and what cannot be is said of all of them at once, by name."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.config import Config
from pipelinerl.config.file import load, parse
from pipelinerl.config.policies import policies_of
from pipelinerl.errors import ConfigError
from pipelinerl.launch.preflight import check
from pipelinerl.runtime.findings import Level, sentences

BASE: dict[str, Any] = {
    "model": {"path": "m"},
    "data": {"source": "s"},
    "reward": [{"function": "a.py:b"}],
    "trainer": {"steps": 7, "learning_rate": 1e-3},
    "reference": {"teachers": {"wise": "w"}},
    "algorithm": {"name": "opd"},
}


def config_of(**policies: Any) -> Config:
    return parse(BASE | {"policies": policies}, origin="test")


def problems_of(**policies: Any) -> str:
    with pytest.raises(ConfigError) as error:
        policies_of(config_of(**policies))
    return str(error.value)


def test_a_policy_has_the_files_settings_with_its_own_in_their_place_key_by_key():
    bob = {"trainer": {"steps": 9}, "reference": {"teachers": {"own": "o"}}, "reward": [{"function": "c.py:d"}]}
    alice, bob, judge = policies_of(config_of(alice={}, bob=bob, judge={"frozen": True, "model": {"path": "j"}}))
    assert [(one.name, one.is_frozen, one.config.run.name) for one in (alice, bob, judge)] == [
        ("alice", False, "run-alice"),
        ("bob", False, "run-bob"),
        ("judge", True, "run-judge"),
    ]
    assert (alice.config.trainer.steps, bob.config.trainer.steps) == (7, 9)
    assert bob.config.trainer.learning_rate == 1e-3, "what it does not name stays the file's"
    assert set(bob.config.reference.teachers) == {"wise", "own"}
    assert [one.config.reward[0].function for one in (alice, bob)] == ["a.py:b", "c.py:d"]
    assert (str(alice.config.model.path), str(judge.config.model.path)) == ("m", "j")
    assert not any(one.config.policies for one in (alice, bob, judge))


def test_the_command_line_names_a_setting_of_one_policy(tmp_path: Path):
    path = tmp_path / "my.toml"
    path.write_text('[model]\npath = "m"\n[data]\nsource = "s"\n[[reward]]\nfunction = "a.py:b"\n[policies.alice]\n[policies.bob]\n')
    alice, bob = policies_of(load(path, overrides=["policies.bob.engine.count=3"]))
    assert (alice.config.engine.count, bob.config.engine.count) == (1, 3)
    path.write_text(path.read_text() + "[policies.alice]\n")
    with pytest.raises(ConfigError, match="is not valid TOML: Cannot declare"):
        load(path)


@pytest.mark.parametrize(
    ("policies", "words"),
    [
        ({}, "there is none. Name each in a section of its own, [policies.alice]"),
        ({"a": {"frozen": True}, "b": {"frozen": True}}, "a, b: all are frozen, and nothing would train"),
        ({"alice": {}, "Alice": {}}, "alice and Alice are one name where a disk knows no capitals"),
        ({"a/b": {}}, "'a/b' is no name: expected a letter, then up to 31 letters, digits, - or _"),
        ({"a": {}, "b": {"frozen": 1}}, "policies.b.frozen is 1, expected true or false"),
        ({"a": {}, "b": {"frozen": True, "trainer": {}}}, "policies.b.trainer: b is frozen: it has engines alone"),
        ({"a": {"run": {"seed": 1}}}, "policies.a.run is of the whole run: set it in [run]"),
        ({"a": {"engin": {}}}, "policies.a.engin is not a known section; did you mean engine?"),
        ({"a": {"engine": {"count": 0}}}, "policies.a: 1 problem\n  - engine.count is 0: input should be greater than 0"),
        ({"a": {"engine": {"cuont": 2}}}, "engine.cuont is not a known key; did you mean engine.count?"),
    ],
)
def test_what_cannot_be_is_refused_by_name(policies: dict[str, Any], words: str):
    assert words in problems_of(**policies)


def test_the_problems_of_all_policies_are_told_at_once():
    told = problems_of(a={"trainer": {"steps": 0}}, b={"engine": {"count": 0}}, c={})
    assert re.findall(r"policies\.(\w)", told) == ["a", "b"]


def test_a_config_with_policies_is_no_run_of_one():
    (problem,) = sentences(check(config_of(alice={}, bob={})), Level.FAIL)
    assert problem.startswith("policies: alice, bob: several policies have no loop of their own; a script trains them")
