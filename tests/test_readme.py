"""The README is short, its own run works as it is printed, and its figures are those that the benches stored."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from orchestrator.data.rows import open_rows
from pipelinerl.config import DataSection
from pipelinerl.messages import Finish, Prompt, RequestKind, ScorerTask
from pipelinerl.rewards.reward import inspect_reward
from pipelinerl.runtime.plugin import load_plugin

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
RESULTS = ROOT / "scripts" / "bench" / "results"


def test_the_readme_is_short_and_tells_its_limits_first() -> None:
    lines = README.splitlines()
    assert len(lines) < 150
    limits = next(number for number, line in enumerate(lines) if line.startswith("**Limits first.**"))
    assert limits < 30
    assert len(rows()) <= 12


# --- its figures ---------------------------------------------------------------------------------------------------------------------


def rows() -> dict[str, str]:
    """What -> figure, of the table of results."""
    table = README.split("\n## Results\n")[1]
    found = re.findall(r"^\| (.+?) \| (.+?) \| `(.+?)` \|$", table, re.MULTILINE)
    return {f"{bench}: {what}": figure for what, figure, bench in found}


def stored(bench: str) -> dict[str, Any]:
    return json.loads((RESULTS / f"{bench}.json").read_text())


def goal(bench: str, name: str) -> float:
    (found,) = [one["value"] for one in stored(bench)["goals"] if one["name"] == name]
    return found


def column(bench: str, name: str, **where: Any) -> list[Any]:
    return [row[name] for row in stored(bench)["rows"] if all(row.get(key) == value for key, value in where.items())]


def figure(words: str) -> list[float]:
    """Numbers of the one row of the table that has these words."""
    (found,) = [text for what, text in rows().items() if words in what]
    return [float(number.replace(",", "")) for number in re.findall(r"\d[\d,]*(?:\.\d+)?", found)]


def rounded(values: list[float], digits: int) -> list[float]:
    return [round(value, digits) for value in values]


def test_figures_of_the_demo_are_stored() -> None:
    before, after = column("demo", "held-out before"), column("demo", "held-out after")
    assert figure("held-out accuracy") == rounded([*before, *after], 2)
    assert f"from {before[0]:.2f} to {after[0]:.2f} in 150 steps and {column('demo', 'RL s')[0]:.0f} s" in README.replace("\n", " ")


def test_figures_of_speed_are_stored() -> None:
    assert figure("samples/s over sync")[0] == round(goal("overlap", "streaming samples/s over sync"), 2)
    assert f"one step off: {column('overlap', 'x sync', mode='one_step_off')[0]:.2f}x" in README
    alone = goal("overlap", "engine speed while training over alone")
    beside = goal("overlap", "engine speed while training over beside a busy core")
    assert [figure("engine speed while training")[0], figure("engine speed while training")[2]] == rounded([alone, beside], 2)
    over = [goal("peers", f"streaming over {other}, samples/s") for other in ("TRL", "plain loop", "sync")]
    assert figure("long-tailed answers")[:3] == rounded(over, 1)
    through = goal("transport", "trajectories/s through one core")
    assert figure("trajectories/s through one core")[0] == round(through, -1)
    inline = column("scoring", "of reward at once", what="processes", scoring="inline", **{"reward / generation time": 5.0})
    as_stage = goal("scoring", "processes: engine tokens/s with a reward of 5x as a stage over none")
    assert figure("a reward of five times") == rounded([as_stage, *inline], 2)


def test_figures_of_swaps_are_stored() -> None:
    pauses = [row["pause p50 ms"] for row in stored("swap")["rows"] if row.get("commit") in ("flip", "pointer")]
    assert figure("pause of a swap by pointer")[:2] == rounded([min(pauses), max(pauses)], 3)
    assert figure("sequences aborted")[:2] == [column("swap", "aborted")[0], column("swap", "sequences meanwhile")[0]]


def test_figures_of_learning_and_step_scores_are_stored() -> None:
    worst = [min(column("smollm2", "after", method=method)) for method in ("LoRA", "full")]
    assert figure("SmolLM2-135M on sums") == rounded([*set(column("smollm2", "before")), *worst], 2)
    in_flight = {
        row["objective"]: row["over on-policy"] for row in stored("staleness")["rows"] if row["old in"] != "queue" and row["K"] == 4
    }
    assert figure("area under the learning curve") == rounded([in_flight["ppo"], in_flight["uncorrected"]], 2)
    over = {row["scored"]: row["over one prefill"] for row in stored("prm")["rows"] if (row["tokens"], row["steps"]) == (1536, 16)}
    assert figure("step scores while a trace is written") == [round(over["meanwhile"], 2), round(over["meanwhile, from scratch"], 1)]


# --- its own run ---------------------------------------------------------------------------------------------------------------------


def written(page: str, tmp_path: Path, *, holding: str) -> Path:
    """A file of the one Python block of a page that holds these words; a new user pastes no more than ten lines."""
    (found,) = [text for text in re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL) if holding in text]
    assert len(found.splitlines()) < 10
    (tmp_path / "pasted.py").write_text(found)
    return tmp_path / "pasted.py"


@pytest.mark.parametrize("page", ["README.md", "docs/rewards.md"])
def test_the_reward_and_the_prompts_that_are_printed_fit_together(page: str, tmp_path: Path) -> None:
    source = written("docs/data.md", tmp_path, holding="def prompts")
    drawn = open_rows(DataSection(source=f"{source}:prompts"), seed=3).draw(0, 0)  # pyright: ignore[reportCallIssue]
    assert drawn is not None
    _, _, row = drawn
    reference = f"{written(page, tmp_path, holding='def my_reward')}:my_reward"
    reward = inspect_reward(load_plugin(reference), reference=reference)
    columns = {name: value for name, value in row.items() if name != "prompt"}
    nothing = np.zeros(1, np.int32)
    task = ScorerTask(
        kind=RequestKind.REWARD,
        rollout_id="0/0",
        attempt=0,
        prompt=Prompt(prompt_id="0:0", text=row["prompt"], token_ids=nothing, columns=columns),
        completions=(nothing,),
        finishes=(Finish.STOP,),
        turns=(None,),
    )
    for completion, value in ((f" {row['answer']}\n", 1.0), ("5", 0.0)):
        assert reward.function(**reward.arguments(task, completions=[completion], max_tokens=8, decode=str)) == value


def test_a_judge_and_a_process_reward_model_take_less_than_ten_lines() -> None:
    for page, words in (("docs/prms.md", 'path = "models'), ("docs/rewards.md", ":judge")):
        texts = re.findall(r"```toml\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)
        found = [text for text in texts if words in text]
        assert found
        assert all(len(text.splitlines()) < 10 for text in found)
