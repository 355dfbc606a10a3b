"""What a reward model reads, what becomes of what it cannot score, and which folders are refused; the engine is a fake."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Outcome
from pipelinerl.rewards.calls import Call, CallResult, RewardModel, component_names
from pipelinerl.rewards.reward_model.folder import problem_of
from pipelinerl.rewards.reward_model.runner import RewardModelRunner
from tests.rewards.conftest import score

TEMPLATE = "{% for message in messages %}[{{ message['role'] }}] {{ message['content'] }} {% endfor %}"


class LastToken:
    """An engine whose logit is the last token's id; it notes its batches."""

    max_tokens = 40

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        self.batches: list[list[list[int]]] = []
        self.fails = False

    def rows(self, requests: Sequence[Sequence[int]], *, salt: str) -> list[np.ndarray]:
        assert requests, "vLLM raises for none"
        self.batches.append([list(one) for one in requests])
        if self.fails:
            raise RuntimeError("out of memory")
        return [np.array([np.nan if 3 + ord("!") - 32 == one[-1] else one[-1]], np.float32) for one in requests]


def runner_of(folder: Path, *, form: str = "text") -> tuple[RewardModelRunner, LastToken]:
    tokenizer = load_tokenizer(folder)
    tokenizer.chat_template = TEMPLATE if form == "chat" else None
    engine = LastToken(tokenizer)
    model = RewardModel(path=str(folder), format=form, dtype="float32", max_tokens=None)  # pyright: ignore[reportArgumentType]
    return RewardModelRunner("orm", engine, model=model, decode=lambda ids: "".join(chr(one + 29) for one in ids)), engine


def run(runner: RewardModelRunner, *completions: str) -> list[CallResult]:
    return list(runner.run([Call(call_id=index, task=score(f"r{index}", text)) for index, text in enumerate(completions)]))


def test_a_chat_model_reads_the_prompt_s_messages_and_the_completion_as_the_assistant_s(tokenizer_folder: Path) -> None:
    runner, engine = runner_of(tokenizer_folder, form="chat")
    bare = score("r", "four")
    assert engine.tokenizer.decode(runner.token_ids(bare)) == "[user] what? [assistant] four "
    chat = ({"role": "system", "content": "be brief"}, {"role": "user", "content": "2+2"})
    asked = msgspec.structs.replace(bare, prompt=msgspec.structs.replace(bare.prompt, chat=chat))
    assert engine.tokenizer.decode(runner.token_ids(asked)) == "[system] be brief [user] 2+2 [assistant] four "


def test_a_text_model_reads_the_bare_text_of_both(tokenizer_folder: Path) -> None:
    runner, engine = runner_of(tokenizer_folder)
    assert engine.tokenizer.decode(runner.token_ids(score("r", " four"))) == "what? four"


def test_a_batch_is_one_call_of_the_engine_and_its_time_is_shared(tokenizer_folder: Path) -> None:
    runner, engine = runner_of(tokenizer_folder)
    found = run(runner, "a", "b", "c")
    assert [one.components for one in found] == [({"orm": 3.0 + ord(text) - 32},) for text in "abc"]
    assert len(engine.batches) == 1
    assert sum(one.duration_s for one in found) == pytest.approx(found[0].durations_s["orm"])


def test_what_is_too_long_or_has_no_finite_logit_is_invalid_and_its_neighbours_are_scored(tokenizer_folder: Path) -> None:
    runner, engine = runner_of(tokenizer_folder)
    good, long, bad = run(runner, "a", "b" * 40, "!")
    assert [one.outcome for one in (good, long, bad)] == [Outcome.OK, Outcome.INVALID, Outcome.INVALID]
    assert long.error == "orm: prompt and completion are 45 of its own tokens, and it takes 40"
    assert bad.error == "orm: its logit is nan, expected a finite number"
    assert (long.components, bad.components) == ((), ()), "no failure becomes 0.0"
    assert [len(batch) for batch in engine.batches] == [2]
    (alone,) = run(runner, "b" * 40)
    assert alone.outcome is Outcome.INVALID


def test_an_engine_that_raises_ends_a_batch_and_fails_a_call_alone(tokenizer_folder: Path) -> None:
    runner, engine = runner_of(tokenizer_folder)
    engine.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        run(runner, "a", "b")
    (alone,) = run(runner, "a")
    assert (alone.outcome, alone.components) == (Outcome.ERROR, ())
    assert "out of memory" in alone.error


def test_a_chat_model_without_a_template_is_refused(tokenizer_folder: Path) -> None:
    tokenizer = load_tokenizer(tokenizer_folder)
    model = RewardModel(path="m", format="chat", dtype="float32", max_tokens=None)
    with pytest.raises(ConfigError, match="m has no chat template, which reward"):
        RewardModelRunner("orm", LastToken(tokenizer), model=model, decode=lambda ids: "")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        ({"architectures": ["Qwen2ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}, None),
        ({"architectures": ["Qwen2ForSequenceClassification"], "num_labels": 1}, None),
        ({"architectures": ["Qwen2ForSequenceClassification"]}, "has 2 labels, expected 1"),
        ({"architectures": ["Qwen2ForCausalLM"]}, "has the architecture Qwen2ForCausalLM, expected a sequence classifier"),
    ],
)
def test_only_a_sequence_classifier_with_one_label_is_a_reward_model(tmp_path: Path, config: dict[str, Any], problem: str | None) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = problem_of(tmp_path)
    assert found is None if problem is None else problem in (found or "")


def test_a_model_is_named_by_its_folder_and_one_of_the_hub_s_cache_by_its_name_there() -> None:
    hub = "/hub/models--Skywork--Skywork-Reward-V2-Qwen3-0.6B/snapshots/0123abc"
    assert component_names(["rules.py:right", "models/orm", hub]) == ("right", "orm", "Skywork-Reward-V2-Qwen3-0.6B")
    assert component_names(["a/orm", "b/orm"]) == ("a/orm", "b/orm")
