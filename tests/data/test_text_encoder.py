"""One rule turns text into tokens: the same in RL, evaluation, fine-tuning, environments' replies and what serves the exported model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from orchestrator.data.sources import PromptSource, fixed
from pipelinerl.config import Config, DataSection
from pipelinerl.data.tokenizer import ChatOptions, TextEncoder, load_tokenizer
from pipelinerl.rewards.codec import load_codec
from tests.shaped_models import THINKING, make_chat_bytes
from tests.tokenizers import CHATML, MISTRAL, make_words
from trainer.data.demonstrations import Demonstrations

KINDS: dict[str, dict[str, Any]] = {
    "no BOS": {"template": CHATML, "eos": "<|im_end|>"},
    "a BOS": {"template": CHATML, "bos": "<s>", "eos": "</s>"},
    "a template that writes the BOS": {"template": MISTRAL, "bos": "<s>", "eos": "</s>"},
    "a tokenizer that ends texts": {"template": MISTRAL, "bos": "<s>", "eos": "</s>", "ends_texts": True},
}
CHAT = [{"role": "user", "content": "x y"}, {"role": "assistant", "content": "y"}, {"role": "user", "content": "x"}]
BOS, EOS, IM_END = 6, 7, 2


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    make_words(tmp_path, **KINDS[request.param])
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64}))
    return tmp_path


def test_all_parts_of_a_run_see_a_prompt_in_the_same_tokens(folder: Path) -> None:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "completion": "a b"}) + "\n" for prompt in ("x y", CHAT)))
    encoder = TextEncoder(load_tokenizer(folder))
    expected = [encoder.prompt(prompt) for prompt in ("x y", CHAT)]
    section = DataSection(source=str(path), shuffle=False)  # pyright: ignore[reportCallIssue]
    source = PromptSource(section, encoder=encoder, seed=0, max_prompt_tokens=99)
    assert [source.next().token_ids.tolist() for _ in expected] == expected, "RL"
    held_out = fixed(str(path), limit=2, prompt_column="prompt", encoder=encoder, max_prompt_tokens=99)
    assert [prompt.token_ids.tolist() for prompt in held_out] == expected, "evaluation"
    taught = sorted((one.token_ids.tolist() for one in Demonstrations(_sft(folder, path)).batch_at(0)), key=len)
    says = load_codec(folder).encode("a b")
    assert says == [3, 4]
    end_of_text = IM_END if expected[0][0] != BOS else EOS
    end_of_turn = EOS if EOS in expected[1] else IM_END
    assert taught == [[*expected[0], *says, end_of_text], [*expected[1], *says, end_of_turn]], "fine-tuning"


def _sft(folder: Path, source: Path) -> Config:
    sections = {"model": {"path": str(folder)}, "data": {"source": "x.jsonl"}, "reward": [{"function": "x.py:x"}]}
    return Config.model_validate(sections | {"sft": {"source": str(source), "batch_size": 2}})


def test_a_chat_is_what_transformers_makes_of_it(folder: Path) -> None:
    """Golden: the tokens of Hugging Face's own chat templates, which vLLM's chat endpoint also serves."""
    theirs = AutoTokenizer.from_pretrained(str(folder))
    expected = theirs.apply_chat_template(CHAT, tokenize=True, add_generation_prompt=True)["input_ids"]
    ours = TextEncoder(load_tokenizer(folder)).prompt(CHAT)
    assert ours == expected
    assert ours.count(BOS) == (1 if theirs.chat_template == MISTRAL else 0), "a BOS is written by the template or not at all"


def test_a_text_begins_as_transformers_has_it_begin_and_is_not_ended(tmp_path: Path) -> None:
    """Golden: the tokens of Hugging Face's own call, which vLLM's completions endpoint also makes, but for what it puts behind."""
    for begins, kind in (([], "no BOS"), ([BOS], "a BOS"), ([BOS], "a tokenizer that ends texts")):
        make_words(tmp_path, **KINDS[kind])
        encoder = TextEncoder(load_tokenizer(tmp_path))
        assert encoder.prompt("x y") == [*begins, 13, 14]
        theirs = AutoTokenizer.from_pretrained(str(tmp_path))("x y")["input_ids"]
        assert theirs == [*begins, 13, 14] + [EOS] * (kind == "a tokenizer that ends texts")


def test_a_text_that_brings_its_bos_gets_no_second_one(tmp_path: Path) -> None:
    make_words(tmp_path, **KINDS["a BOS"])
    encoder = TextEncoder(load_tokenizer(tmp_path))
    assert encoder.prompt("<s> x") == [BOS, 13]
    assert encoder.prompt("x") == [BOS, 13]


TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {}}}]
WITH_TOOLS = (
    "{% for t in tools or [] %}{{ '[INST] ' + t.function.name }}{% endfor %}{% if not thinks %}{{ ' x ' }}{% endif %}"
    "{% for m in messages %}{{ m.role + ' ' + m.content + ' ' }}{% endfor %}"
)


@pytest.mark.parametrize(
    ("section", "row", "text"),
    [
        ({}, {"prompt": "a"}, "a"),
        ({"chat": True}, {"prompt": "a"}, " x user a "),
        ({"system_prompt": "b"}, {"prompt": "a"}, " x system b user a "),
        ({"system_prompt": "b"}, {"prompt": [{"role": "system", "content": "c"}, {"role": "user", "content": "a"}]}, " x system c user a "),
        ({"chat_template_kwargs": {"thinks": True}}, {"prompt": "a"}, "user a "),
        ({"tools": TOOLS}, {"prompt": "a"}, "[INST] add x user a "),
        ({"tools": "functions"}, {"prompt": "a", "functions": TOOLS}, "[INST] add x user a "),
        ({"tools": "functions"}, {"prompt": "a", "functions": json.dumps(TOOLS)}, "[INST] add x user a "),
        ({"tools": "functions"}, {"prompt": "a", "functions": None}, " x user a "),
    ],
)
def test_what_only_a_chat_template_can_place_makes_chats(tmp_path: Path, section: dict[str, Any], row: dict[str, Any], text: str) -> None:
    make_words(tmp_path, template=WITH_TOOLS, bos="<s>", eos="</s>")
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 64}))
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps(row | {"completion": "c"}) + "\n")
    data = DataSection.model_validate({"source": str(path)} | section)
    tokenizer = load_tokenizer(tmp_path)
    encoder = TextEncoder(tokenizer, options=ChatOptions.of(data))
    prompt = PromptSource(data, encoder=encoder, seed=0, max_prompt_tokens=99).next()
    is_chat = text != "a"
    assert prompt.text == text
    assert prompt.token_ids.tolist() == ([] if is_chat else [BOS]) + tokenizer.encode(text, add_special_tokens=False)
    sft = _sft(tmp_path, path).model_copy(update={"data": data})
    (taught, *_) = Demonstrations(sft).batch_at(0)
    assert taught.token_ids.tolist() == [*prompt.token_ids.tolist(), 5, EOS], "fine-tuning, too"


def test_a_system_prompt_and_the_switch_for_thoughts_reach_a_template_as_qwen3s(tmp_path: Path) -> None:
    make_chat_bytes(tmp_path, template=THINKING)
    tokenizer = load_tokenizer(tmp_path)
    head = "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    for thinks, tail in ((False, "<think>\n\n</think>\n\n"), (True, "")):
        options = ChatOptions(system_prompt="Be brief.", chat_template_kwargs={"enable_thinking": thinks})
        encoder = TextEncoder(tokenizer, options=options)
        assert encoder.text("2+2?") == head + tail
        assert encoder.text([{"role": "user", "content": "2+2?"}]) == head + tail
        assert tokenizer.decode(encoder.prompt("2+2?")) == head + tail
