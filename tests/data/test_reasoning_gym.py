"""`reasoning-gym:` sources and their reward: the spec by itself, and the real package where it is installed (extra `gym`)."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from orchestrator.data.rows import Table, open_rows
from pipelinerl.config import DataSection
from pipelinerl.data.columns import json_value
from pipelinerl.data.reasoning_gym import GymRows, dataset_of, is_spec, parse
from pipelinerl.errors import ConfigError
from pipelinerl.rewards.functions.builtin import reasoning_gym as score

with_gym = pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
SUMS = "reasoning-gym:chain_sum?min_terms=2&max_terms=2&size=20&seed=7"


def test_values_of_a_spec_are_json_where_they_are_json() -> None:
    spec = "reasoning-gym:a?size=20&share=0.5&flag=true&other=True&text=abc&list=[1,2]"
    assert parse(spec) == ("a", {"size": 20, "share": 0.5, "flag": True, "other": True, "text": "abc", "list": [1, 2]})
    assert parse("reasoning-gym:a") == ("a", {})
    assert is_spec(spec)
    assert not is_spec("my/reasoning-gym")


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("reasoning-gym:", "no name of a dataset"),
        ("reasoning-gym:a?size", "'size' is not option=value pairs"),
        ("reasoning-gym:a?size=1&size=2", "size stands twice"),
    ],
)
def test_a_spec_that_says_nothing_is_refused(spec: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        parse(spec)
    assert words in str(raised.value)
    assert spec in str(raised.value)


def test_a_missing_package_is_named_with_what_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ConfigError, match=r"needs the package reasoning-gym .*: pip install 'pipelinerl\[gym\]'"):
        dataset_of("reasoning-gym:chain_sum?size=3")


@with_gym
@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("reasoning-gym:chain_sums", "reasoning-gym has no dataset 'chain_sums' (did you mean 'chain_sum'?)"),
        (
            "reasoning-gym:chain_sum?max_term=2",
            "chain_sum has no option 'max_term' (did you mean 'max_terms'?); it has min_terms, max_terms",
        ),
        ("reasoning-gym:chain_sum?min_terms=3&max_terms=2", "AssertionError: max_terms must be >= min_terms"),
        ("reasoning-gym:chain_sum?size=0", "AssertionError: size must be positive"),
        ("reasoning-gym:chain_sum?size=many", "chain_sum refuses its options: TypeError"),
    ],
)
def test_a_wrong_name_or_option_is_told_with_the_nearest(spec: str, words: str) -> None:
    with pytest.raises(ConfigError) as raised:
        dataset_of(spec)
    assert words in str(raised.value)


@with_gym
def test_rows_are_those_of_the_package_and_the_seed() -> None:
    reasoning_gym = importlib.import_module("reasoning_gym")
    rows = open_rows(DataSection.model_validate({"source": SUMS, "prompt_column": "question", "shuffle": False}), seed=99)
    assert isinstance(rows, Table)
    assert len(rows) == 20
    theirs = reasoning_gym.create_dataset("chain_sum", min_terms=2, max_terms=2, size=20, seed=7)
    assert [(row["question"], row["answer"]) for row in map(rows.__getitem__, range(20))] == [
        (one["question"], one["answer"]) for one in theirs
    ]
    shuffled = open_rows(DataSection.model_validate({"source": SUMS}), seed=1)
    drawn = [shuffled.draw(0, number) for number in range(20)]
    assert sorted(draw[1] for draw in drawn if draw) == list(range(20))
    assert [draw[1] for draw in drawn if draw] != list(range(20)), "the run's seed orders them"


@with_gym
@pytest.mark.parametrize("name", ["chain_sum", "countdown", "rearc", "propositional_logic", "knights_knaves", "graph_color"])
def test_the_reward_is_the_generators_own_score_of_a_row_that_went_through_json(name: str) -> None:
    reasoning_gym = importlib.import_module("reasoning_gym")
    spec = f"reasoning-gym:{name}?size=4&seed=3"
    for number, entry in enumerate(reasoning_gym.create_dataset(name, size=4, seed=3)):
        row: dict[str, Any] = json.loads(json.dumps(json_value(GymRows(spec, prompt_column="prompt")[number])))
        prompt = f"<user>{row.pop('prompt')}<assistant>"
        for answer in (str(entry["answer"]), "7", ""):
            expected = reasoning_gym.create_dataset(name, size=4, seed=3).score_answer(answer, entry)
            assert score(f"I think <answer>{answer}</answer>", prompt, **row) == expected
        if entry["answer"] is not None:
            assert score(f" {entry['answer']}\n", prompt, **row) == 1.0


@with_gym
@pytest.mark.parametrize(
    ("completion", "right"),
    [("2 + 5 = {}.", 1.0), ("The answer is {}", 1.0), ("{} or 99", 0.0), ("no number", 0.0), ("<answer>{}</answer>", 1.0)],
)
def test_the_last_match_of_a_pattern_is_the_answer(completion: str, right: float) -> None:
    row = GymRows(SUMS, prompt_column="prompt")[0]
    assert score(completion.format(row["answer"]), row.pop("prompt"), **row, pattern=r"-?\d+") == right


@with_gym
def test_a_row_that_the_generator_would_not_make_again_is_scored_by_its_columns() -> None:
    row = GymRows(SUMS, prompt_column="prompt")[0]
    assert score("123456", row.pop("prompt"), **(row | {"answer": "123456"})) == 1.0


@with_gym
@pytest.mark.process
def test_options_of_the_config_travel_into_a_dry_run(tmp_path: Path) -> None:
    """A config of nothing but the spec and its reward; the model is of SmolLM2's shape."""
    from tests.shaped_models import SMOLLM2, make_shaped

    make_shaped(tmp_path / "model", SMOLLM2)
    (tmp_path / "my.toml").write_text(
        f"""
[model]
path = "model"
max_tokens = 256
[rollout]
max_tokens = 16
[data]
source = "{SUMS}"
chat = true
[evaluation]
source = "reasoning-gym:chain_sum?min_terms=2&max_terms=2&size=20&seed=9"
[[reward]]
function = "pipelinerl.rewards.functions.builtin:reasoning_gym"
"""
    )
    command = [sys.executable, "-m", "pipelinerl", "run", "my.toml", "--dry-run"]
    said = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path)
    assert said.returncode == 0, said.stdout + said.stderr
    assert "20 rows; prompts of" in said.stdout
    shown = " ".join(said.stdout.split())
    assert "18 of its 20 prompts are among those of data.source, too" in shown, "seeds of reasoning-gym count rows"
