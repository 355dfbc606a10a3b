"""`pipelinerl init` writes, for a model and rows that it looked at, a config that passes the whole dry run; models are of real shapes."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest

from orchestrator.draft.look import look_at_data, look_at_model
from orchestrator.draft.propose import Machine, propose
from pipelinerl.config import Config
from pipelinerl.config.file import load
from pipelinerl.errors import ConfigError, PipelineError
from tests.shaped_models import QWEN2_7B, QWEN3, SMOLLM2, THINKING, make_shaped

SMALL, GPUS = Machine(memory_bytes=24 << 30, num_gpus=0), Machine(memory_bytes=8 * 80 << 30, num_gpus=8)
GSM8K = [
    {"question": f"Ann has {n} pens and buys {n}. How many?", "answer": f"She has {n} + {n} = <<{n}+{n}={2 * n}>>{2 * n}.\n#### {2 * n}"}
    for n in range(40)
]
CAPITALS = [{"prompt": "Which town is the capital of France?", "answer": "Paris", "difficulty": 3}] * 8


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_shaped(tmp_path_factory.mktemp("smollm2"), SMOLLM2)


def _jsonl(name: str, rows: list[Any]) -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    return name


def _parquet(name: str, rows: list[Any]) -> str:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), name)
    return name


def _proposed(
    folder: Path,
    source: str,
    *,
    machine: Machine = SMALL,
    reward: str | None = None,
    prompt_column: str | None = None,
    answer_column: str | None = None,
) -> tuple[Config, str]:
    """The config, and its text."""
    model = look_at_model(folder)
    data = look_at_data(source, model=model, prompt_column=prompt_column, answer_column=answer_column)
    proposal = propose(model, data, machine, reward=reward, reward_path=Path("my_reward.py"), name="my")
    Path("my.toml").write_text(proposal.text)
    if proposal.reward_file is not None:
        Path("my_reward.py").write_text(proposal.reward_file)
    return load(Path("my.toml")), proposal.text


def test_worked_sums_are_compared_as_mathematics_and_have_room_to_be_worked(smollm2: Path) -> None:
    _jsonl("test.jsonl", GSM8K)
    config, text = _proposed(smollm2, _jsonl("train.jsonl", GSM8K))
    assert config.reward[0].reference.endswith("builtin:math")
    assert (config.data.prompt_column, config.data.chat) == ("question", True)
    assert config.data.system_prompt is not None
    assert "boxed" in config.data.system_prompt
    assert config.rollout.max_tokens == 512, "no answer that it saw takes more than 64 tokens of this tokenizer"
    assert config.model.max_tokens is not None
    assert config.model.max_tokens >= 512 + max(len(row["question"]) for row in GSM8K)
    assert config.evaluation.source == "test.jsonl", "it lies beside train.jsonl"
    assert "40 rows with question, answer; prompts of" in text
    assert "134,515,008 parameters, made for 8,192 tokens" in text, "as transformers counts SmolLM2"


def test_a_data_set_of_the_hub_brings_its_test_split(smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    repository, sha = tmp_path / "hub" / "datasets--openai--gsm8k", "0" * 40
    (repository / "refs").mkdir(parents=True)
    (repository / "refs" / "main").write_text(sha)
    folder = repository / "snapshots" / sha / "main"
    folder.mkdir(parents=True)
    for split in ("train", "test"):
        _parquet(str(folder / f"{split}-00000-of-00001.parquet"), GSM8K)
    config, _ = _proposed(smollm2, "openai/gsm8k:main/train")
    assert (config.data.source, config.evaluation.source) == ("openai/gsm8k:main/train", "openai/gsm8k:main/test")
    assert config.reward[0].reference.endswith("builtin:math")


def test_short_texts_are_compared_as_they_are(smollm2: Path) -> None:
    config, _ = _proposed(smollm2, _parquet("rows.parquet", CAPITALS))
    assert config.reward[0].reference.endswith("builtin:exact_match")
    assert config.data.system_prompt == "Reply with the answer alone."
    assert config.rollout.max_tokens == 16


def test_an_answer_under_another_name_gets_a_reward_of_its_own_file(smollm2: Path) -> None:
    rows = [{"problem": "What is a third of 12?", "solution": "$4$", "level": 1}] * 4
    config, _ = _proposed(smollm2, _jsonl("rows.jsonl", rows))
    assert config.reward[0].function == "my_reward.py:reward"
    names: dict[str, Any] = {}
    exec(Path("my_reward.py").read_text(), names)
    assert names["reward"](r"It is \boxed{4}", solution="$4$") == 1.0
    assert names["reward"](r"It is \boxed{5}", solution="$4$") == 0.0


def test_chats_are_taken_as_they_are(smollm2: Path) -> None:
    rows = [{"messages": [{"role": "user", "content": "What is 2 + 2?"}], "answer": 4}] * 4
    config, _ = _proposed(smollm2, _jsonl("rows.jsonl", rows))
    assert (config.data.prompt_column, config.data.chat) == ("messages", False)
    assert config.reward[0].reference.endswith("builtin:math")


def test_a_chat_template_with_a_switch_for_thoughts_is_asked_not_to_think(tmp_path: Path) -> None:
    config, text = _proposed(make_shaped(tmp_path / "qwen3", QWEN3, template=THINKING), _jsonl("rows.jsonl", CAPITALS))
    assert config.data.chat_template_kwargs == {"enable_thinking": False}
    assert "true lets it think first" in text


def test_a_model_without_a_chat_template_gets_plain_text(tmp_path: Path) -> None:
    config, _ = _proposed(make_shaped(tmp_path / "base", SMOLLM2, template=None), _jsonl("rows.jsonl", CAPITALS))
    assert (config.data.chat, config.data.system_prompt) == (False, None)


def test_what_does_not_fit_whole_trains_adapters_and_what_does_not_fit_at_all_is_refused(tmp_path: Path) -> None:
    rows = _jsonl("rows.jsonl", CAPITALS)
    large = make_shaped(tmp_path / "large", QWEN2_7B)
    whole, text = _proposed(large, rows, machine=GPUS)
    assert (whole.lora.rank, whole.model.dtype, whole.trainer.ranks, whole.engine.count) == (0, "bfloat16", 4, 4)
    assert "All weights are trained: about" in text
    adapters, text = _proposed(large, rows, machine=Machine(memory_bytes=80 << 30, num_gpus=1))
    assert adapters.lora.rank == 16
    assert "all weights would take about" in text
    with pytest.raises(ConfigError, match=r"7,615,616,512 parameters: the least that a run of it takes is about .*24\.0 GiB here"):
        _proposed(large, rows)


@pytest.mark.parametrize(
    ("rows", "columns", "words"),
    [
        ([{"a": 1, "b": 2}], {}, "no column of rows.jsonl looks like a prompt; it has a, b. Name one: --prompt-column"),
        ([{"prompt": "x"}], {}, "no column of rows.jsonl looks like an answer to compare with"),
        (CAPITALS, {"prompt_column": "promt"}, "--prompt-column: rows.jsonl has no column 'promt'; did you mean 'prompt'?"),
        (CAPITALS, {"answer_column": "anser"}, "--answer-column: rows.jsonl has no column 'anser'; did you mean 'answer'?"),
        (CAPITALS, {"prompt_column": "difficulty"}, "column 'difficulty' of rows.jsonl holds a int, expected text or a chat"),
        ([{"prompt": "x", "response": "a long tale " * 30}], {}, "holds texts of 359 tokens (median), which no rule compares. Fine-tune"),
        (
            [{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}],
            {},
            "end with the assistant's words: they are demonstrations",
        ),
    ],
)
def test_rows_that_no_config_follows_from_are_told_with_what_to_do(
    rows: list[Any], columns: dict[str, str], words: str, smollm2: Path
) -> None:
    with pytest.raises(PipelineError) as raised:
        _proposed(
            smollm2,
            _jsonl("rows.jsonl", rows),
            prompt_column=columns.get("prompt_column"),
            answer_column=columns.get("answer_column"),
        )
    assert words in str(raised.value)


def _init(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pipelinerl", "init", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.process
@pytest.mark.slow
def test_what_it_writes_passes_the_dry_run_and_is_not_overwritten(smollm2: Path) -> None:
    _jsonl("rows.jsonl", CAPITALS)
    written = _init(smollm2, "rows.jsonl")
    assert written.returncode == 0, written.stderr
    assert "next: pipelinerl try my.toml" in written.stdout
    dry = subprocess.run([sys.executable, "-m", "pipelinerl", "run", "my.toml", "--dry-run"], capture_output=True, text=True, check=False)
    assert dry.returncode == 0, dry.stderr
    assert "nothing is wrong" in dry.stdout
    mine = Path("my.toml")
    mine.write_text("mine")
    again = _init(smollm2, "rows.jsonl")
    assert again.returncode == 1
    assert again.stderr.startswith("ConfigError: my.toml exists: name another file with --out, or overwrite it with --force")
    assert mine.read_text() == "mine"
    assert _init(smollm2, "rows.jsonl", "--force").returncode == 0
    assert mine.read_text() != "mine"


@pytest.mark.process
@pytest.mark.parametrize(
    ("model", "data", "words"),
    [
        ("smolm2", "rows.jsonl", "no folder at smolm2 (looked from {here}); did you mean smollm2?"),
        ("smollm2", "row.jsonl", "no file at row.jsonl (looked from {here}); did you mean rows.jsonl?"),
        ("smollm2", "rows.csv", "'rows.csv' is no source of prompts"),
        ("rows.jsonl", "rows.jsonl", "rows.jsonl"),
    ],
)
def test_a_typing_error_is_told_with_the_nearest_that_there_is(model: str, data: str, words: str, smollm2: Path, tmp_path: Path) -> None:
    _jsonl("rows.jsonl", CAPITALS)
    Path("smollm2").symlink_to(smollm2)
    said = _init(model, data)
    assert said.returncode == 1
    assert "Traceback" not in said.stderr
    assert words.format(here=tmp_path) in said.stderr
    assert not Path("my.toml").exists()


@pytest.mark.process
@pytest.mark.skipif(importlib.util.find_spec("reasoning_gym") is None, reason="reasoning-gym is not installed")
def test_tasks_of_reasoning_gym_are_scored_by_it_and_held_out_far_from_the_trained(smollm2: Path) -> None:
    said = _init(smollm2, "reasoning-gym:chain_sum?max_terms=2&max_digits=1&size=300")
    assert said.returncode == 0, said.stderr
    config = load(Path("my.toml"))
    assert config.reward[0].reference.endswith("builtin:reasoning_gym")
    assert config.reward[0].options == {"pattern": r"-?\d+"}, "a number in a sentence is an answer, too"
    assert config.evaluation.source == "reasoning-gym:chain_sum?max_terms=2&max_digits=1&size=256&seed=1000000"
    assert config.data.prompt_column == "prompt"
    wrong = _init(smollm2, "reasoning-gym:chain_sun", "--out", "other.toml")
    assert wrong.returncode == 1
    assert "reasoning-gym has no dataset 'chain_sun' (did you mean 'chain_sum'?)" in wrong.stderr
