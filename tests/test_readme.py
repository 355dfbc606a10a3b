"""The README's settings are what a run takes, as they are printed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest

from pipelinerl.algorithms.methods import method_of
from pipelinerl.config_file import parse

BLOCKS = [
    tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", (Path(__file__).parents[1] / "README.md").read_text(), re.DOTALL)
]


def named(section: str) -> dict[str, Any]:
    """The one block that has a section."""
    (found,) = [block for block in BLOCKS if section in block]
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: "+".join(block))
def test_settings_of_the_readme_are_taken_as_they_are_printed(block: dict[str, Any]) -> None:
    config = parse(named("data") | block, origin="README.md")
    method = method_of(config)
    assert method.name in block.get("algorithm", {"name": "grpo"})["name"]
