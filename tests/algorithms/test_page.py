"""What the page on algorithms says about adding a method is done here, word for word."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.algorithms import methods
from pipelinerl.algorithms.listing import table_rows
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import Config
from pipelinerl.config.file import parse
from tests.algorithms import reference
from tests.algorithms.every_method import sample
from tests.algorithms.rows import loss_and_gradient

PAGE = Path(__file__).resolve().parents[2].joinpath("docs", "algorithms.md").read_text()


def block(language: str, *, holding: str) -> str:
    found = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if holding in text]
    assert len(found) == 1, f"the page has {len(found)} {language} blocks with {holding!r}"
    return found[0]


def test_a_method_is_added_by_the_lines_the_page_shows_and_trains(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = block("python", holding="_row(")
    assert len(lines.splitlines()) < 10
    monkeypatch.setattr(methods, "METHODS", dict(methods.METHODS))
    exec(lines, dict(vars(methods)))
    assert table_rows()[-1][0] == "my_method"
    method = method_of(run_with({"name": "my_method"}))
    assert (method.advantage.name, method.objective.options["clip_high"], method.proximal.name) == ("rloo", 0.28, "engine")
    sequences = sample(1)
    loss, gradient, _ = loss_and_gradient(sequences, method=method)
    draws = [[0.0] * len(seq.logprobs) for seq in sequences]
    assert loss == pytest.approx(reference.loss(method, sequences, moved={}, draws=draws))
    assert any(gradient)


def test_a_column_is_changed_by_the_lines_the_page_shows() -> None:
    section = tomllib.loads(block("toml", holding="overrides = {"))["algorithm"]
    method = method_of(run_with(section))
    assert (method.advantage.name, method.weight.options) == ("rloo", {"low": 0.5, "high": 5.0, "batch_normalize": False})


def run_with(algorithm: dict[str, Any]) -> Config:
    tree = {"model": {"path": "m"}, "data": {"source": "d"}, "reward": [{"function": "r:r"}], "algorithm": algorithm}
    return parse(tree, origin="a test")
