"""The README's settings are what a run takes, and its Python is what a run calls, as they are printed."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.data.rows import open_rows
from pipelinerl.algorithms.methods import method_of
from pipelinerl.config import DataSection
from pipelinerl.config.file import parse
from pipelinerl.messages import Finish
from pipelinerl.rewards.pool.calls import Call
from pipelinerl.rewards.reward import inspect_reward
from pipelinerl.runtime.plugin import load_plugin

README = (Path(__file__).parents[1] / "README.md").read_text()
BLOCKS = [tomllib.loads(text) for text in re.findall(r"```toml\n(.*?)```", README, re.DOTALL)]


def named(section: str) -> dict[str, Any]:
    """The one block that has a section."""
    (found,) = [block for block in BLOCKS if section in block]
    return found


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: "+".join(block))
def test_settings_of_the_readme_are_taken_as_they_are_printed(
    block: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (rules,) = [text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if "half_life" in text]
    (tmp_path / "rules.py").write_text(rules)
    monkeypatch.chdir(tmp_path)
    config = parse(named("data") | block, origin="README.md")
    method = method_of(config)
    assert method.name in block.get("algorithm", {"name": "grpo"})["name"]


def written(tmp_path: Path, *, holding: str) -> Path:
    """A file of the one Python block that holds these words; a new user pastes no more than ten lines."""
    (found,) = [text for text in re.findall(r"```python\n(.*?)```", README, re.DOTALL) if holding in text]
    assert len(found.splitlines()) < 10
    (tmp_path / "pasted.py").write_text(found)
    return tmp_path / "pasted.py"


def test_the_reward_and_the_prompts_of_the_readme_fit_together(tmp_path: Path) -> None:
    rows = open_rows(DataSection(source=f"{written(tmp_path, holding='def prompts')}:prompts"), seed=3)  # pyright: ignore[reportCallIssue]
    drawn = rows.draw(0, 0)
    assert drawn is not None
    _, _, row = drawn
    reference = f"{written(tmp_path, holding='def my_reward')}:my_reward"
    reward = inspect_reward(load_plugin(reference), reference=reference)
    columns = {name: value for name, value in row.items() if name != "prompt"}
    nothing = np.zeros(1, np.int32)
    call = Call(ticket_id=0, prompt=row["prompt"], completions=(nothing,), finishes=(Finish.STOP,), columns=columns)
    for completion, value in ((f" {row['answer']}\n", 1.0), ("5", 0.0)):
        assert reward.function(**reward.arguments(call, completions=[completion], max_tokens=8, decode=str)) == value


def test_a_judge_and_a_process_reward_model_take_less_than_ten_lines() -> None:
    texts = re.findall(r"```toml\n(.*?)```", README, re.DOTALL)
    for words in ("[prm]", ":judge"):
        (found,) = [text for text in texts if words in text]
        assert len(found.splitlines()) < 10
