"""The reward functions that come with the system, on values worked by hand."""

from __future__ import annotations

import json

import jsonschema
import pytest

from pipelinerl.errors import ConfigError
from pipelinerl.rewards.functions.builtin import exact_match, length_penalty, overlong_penalty, regex_match
from pipelinerl.rewards.functions.math_answer import math_equal
from pipelinerl.rewards.functions.schema import fits_schema
from pipelinerl.rewards.reward import Shape, inspect_reward
from pipelinerl.runtime.plugin import load_plugin


def test_exact_match_ignores_white_space_around_but_not_within() -> None:
    assert exact_match(" 42\n", answer="42") == 1.0
    assert exact_match("42", answer=42) == 1.0
    assert exact_match("4 2", answer="42") == 0.0
    assert exact_match("A", answer="a") == 0.0


def test_regex_match_searches_anywhere() -> None:
    assert regex_match("so <answer>7</answer>.", pattern=r"<answer>\d</answer>") == 1.0
    assert regex_match("so 7", pattern=r"<answer>\d</answer>") == 0.0


@pytest.mark.parametrize(
    ("num_tokens", "penalty"),
    [(16384, 0.0), (1, 0.0), (16385, -1 / 4096), (18432, -0.5), (20480, -1.0)],
)
def test_overlong_penalty_with_the_bounds_of_dapo(num_tokens: int, penalty: float) -> None:
    assert overlong_penalty(num_tokens, max_tokens=20480, buffer_tokens=4096) == penalty
    assert overlong_penalty(num_tokens, max_tokens=20480, buffer_tokens=4096, factor=2.0) == 2.0 * penalty


def test_length_penalty_begins_at_four_fifths_of_the_run_s_longest_completion() -> None:
    assert [length_penalty("", num_tokens=n, max_tokens=100) for n in (80, 90, 100)] == [0.0, -0.5, -1.0]
    assert length_penalty("", num_tokens=3, max_tokens=3) == -1.0


def test_bounds_of_the_length_penalty_are_options() -> None:
    assert length_penalty("", num_tokens=95, max_tokens=100, buffer_tokens=10, factor=2.0) == -1.0


def test_every_builtin_has_our_shape_and_is_found_by_its_short_reference() -> None:
    for name in ("exact_match", "regex_match", "length_penalty", "math", "json_schema", "code", "judge"):
        reward = inspect_reward(
            load_plugin(f"pipelinerl.rewards.functions.builtin:{name}"), reference=f"pipelinerl.rewards.functions.builtin:{name}"
        )
        assert reward.shape is Shape.OURS
    with pytest.raises(ConfigError, match="has no 'mth'"):
        load_plugin("pipelinerl.rewards.functions.builtin:mth")


@pytest.mark.parametrize(
    ("completion", "answer", "reward"),
    [
        ("so the answer is $\\boxed{\\frac{1}{2}}$", "0.5", 1.0),
        ("The answer is 42.", 42, 1.0),
        ("$x = 3$", "3", 1.0),
        ("$\\boxed{\\{1, 2\\}}$", "$\\{2, 1\\}$", 1.0),
        ("$\\boxed{7}$, no, $\\boxed{8}$", "8", 1.0),
        ("$\\boxed{0.333}$", "$\\frac{1}{3}$", 0.0),
        ("I do not know", "8", 0.0),
    ],
)
def test_math_compares_values_and_not_texts(completion: str, answer: object, reward: float) -> None:
    assert math_equal(completion, answer) == reward


def test_row_whose_answer_is_no_mathematics_is_an_error_and_not_a_wrong_completion() -> None:
    with pytest.raises(ValueError, match="the answer '' is no mathematical expression"):
        math_equal("4", "")


SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 1}}, "required": ["n"], "additionalProperties": False}


@pytest.mark.parametrize(
    ("completion", "reward"),
    [
        ('{"n": 1}', 1.0),
        ('```json\n{"n": 1}\n```', 1.0),
        ('{"n": 0}', 0.0),
        ('{"n": 1, "m": 2}', 0.0),
        ('Here: {"n": 1}', 0.0),
        ('{"n": NaN}', 0.0),
        ("[" * 100_000, 0.0),
        ("", 0.0),
    ],
)
def test_json_schema_accepts_what_the_schema_accepts(completion: str, reward: float) -> None:
    assert fits_schema(completion, SCHEMA) == fits_schema(completion, json.dumps(SCHEMA)) == reward


def test_wrong_schema_is_an_error_and_not_a_wrong_completion() -> None:
    with pytest.raises(jsonschema.SchemaError):
        fits_schema("{}", {"type": "objekt"})


def test_schema_elsewhere_is_not_fetched() -> None:
    with pytest.raises(Exception, match="Unresolvable"):
        fits_schema("{}", {"$ref": "http://127.0.0.1:9/schema.json"})
