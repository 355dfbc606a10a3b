"""Every origin of a stop token is heard; where they disagree it is said, and what would cut texts in the middle is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import GenerationConfig

from pipelinerl.data.stop_tokens import StopToken, stop_tokens_of
from pipelinerl.data.tokenizer import codec_of, load_tokenizer
from pipelinerl.errors import ConfigError
from tests.tokenizers import CHATML, MISTRAL, make_words

WORDS = {"a": 3, "b": 4}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Its tokenizer says `<|im_end|>` (2), its config.json `<|endoftext|>` (0), as of a base model that somebody gave a chat template."""
    make_words(tmp_path, template=CHATML, eos="<|im_end|>")
    _write(tmp_path, config={"vocab_size": 64, "eos_token_id": 0})
    return tmp_path


def _write(folder: Path, *, config: dict[str, Any], generation: dict[str, Any] | None = None) -> None:
    (folder / "config.json").write_text(json.dumps(config))
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps(generation))


def test_an_end_that_only_the_tokenizer_knows_is_sent_and_the_disagreement_is_said(folder: Path) -> None:
    found = stop_tokens_of(folder)
    assert found.ids == (0, 2)
    assert found.tokens[1] == StopToken(token_id=2, text="<|im_end|>", origins=("tokenizer", "chat template"))
    assert (found.end_of_text, found.end_of_turn) == (2, 2)
    assert found.warnings == (
        "stop tokens disagree: 2 '<|im_end|>' (tokenizer, chat template) is not named by config.json or generation_config.json, which name"
        " 0 '<|endoftext|>' (config.json). All of them end completions here, and are in the generation_config.json of what is exported.",
    )
    assert str(found) == "stop tokens: 0 '<|endoftext|>' (config.json); 2 '<|im_end|>' (tokenizer, chat template)"


def test_the_end_of_a_turn_is_what_the_template_writes_behind_an_answer(folder: Path) -> None:
    make_words(folder, template=CHATML, eos="<|endoftext|>")  # as Qwen2.5's base models: another EOS than the template's end of turn
    found = stop_tokens_of(folder)
    assert (found.end_of_text, found.end_of_turn, found.ids) == (0, 2, (0, 2))
    make_words(folder, template=MISTRAL, eos="</s>", bos="<s>")
    assert stop_tokens_of(folder).end_of_turn == 7
    make_words(folder, template="{% for m in messages %}{{ m.role + ': ' + m.content + '\n' }}{% endfor %}", eos="</s>")
    assert stop_tokens_of(folder).end_of_turn is None


def test_origins_that_agree_are_quiet(folder: Path) -> None:
    _write(folder, config={"vocab_size": 64, "eos_token_id": 0}, generation={"eos_token_id": [0, 2]})
    assert (stop_tokens_of(folder).ids, stop_tokens_of(folder).warnings) == ((0, 2), ())


def test_a_template_that_refuses_an_assistant_is_said_and_costs_nothing_else(folder: Path) -> None:
    make_words(folder, template="{{ raise_exception('one turn only') }}", eos="<|im_end|>")
    found = stop_tokens_of(folder)
    assert (found.ids, found.end_of_turn) == ((0, 2), None)
    assert "the chat template refuses an assistant's turn, so how it ends one is not known: TemplateError: one turn only" in found.warnings


def test_a_config_that_ends_completions_at_ordinary_text_is_refused_unless_it_is_meant(folder: Path) -> None:
    _write(folder, config={"vocab_size": 64, "eos_token_id": WORDS["a"]})
    said = r"config\.json names 3 as the end of sequence, which is the text 'a' for this tokenizer, whose own is '<\|im_end\|>' \(2\)"
    with pytest.raises(ConfigError, match=said):
        stop_tokens_of(folder)
    assert stop_tokens_of(folder, extra=(3,)).ids == (2, 3)


@pytest.mark.parametrize(("extra", "said"), [((64,), "rollout.stop_token_ids names 64"), ((-1,), "rollout.stop_token_ids names -1")])
def test_a_token_that_the_model_does_not_have_is_refused(folder: Path, extra: tuple[int, ...], said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said} as a stop token, and the model has the tokens 0 to 63"):
        stop_tokens_of(folder, extra=extra)


def test_a_model_that_nothing_ends_is_said(folder: Path) -> None:
    make_words(folder, template=None, eos=None)
    _write(folder, config={"vocab_size": 64})
    assert stop_tokens_of(folder).warnings == (
        "nothing names a stop token: every completion will be as long as rollout.max_tokens allows. Set rollout.stop_token_ids.",
    )


def test_transformers_reads_the_same_ends_from_a_config_with_several(folder: Path) -> None:
    """Golden: Hugging Face's own reader of generation_config.json."""
    _write(folder, config={"vocab_size": 64, "eos_token_id": 2}, generation={"eos_token_id": [0, 2]})
    assert list(stop_tokens_of(folder).ids) == GenerationConfig.from_pretrained(str(folder)).eos_token_id


def test_an_end_that_the_tokenizer_does_not_call_special_is_no_part_of_a_scored_text(folder: Path) -> None:
    make_words(folder, template=CHATML, eos="<|endoftext|>", special=("<|endoftext|>",))
    tokenizer = load_tokenizer(folder)
    said = tokenizer.encode("a b<|im_end|>", add_special_tokens=False)
    assert said == [3, 4, 2]
    assert codec_of(tokenizer).decode(said) == "a b <|im_end|>"
    assert codec_of(tokenizer, ends=stop_tokens_of(folder).of_model).decode(said) == "a b"
    assert stop_tokens_of(folder, extra=(4,)).of_model == (0, 2), "what the user adds is text that rewards may look for"
