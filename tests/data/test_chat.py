"""Chat templates as token-in, token-out bridging: what stands behind a sampled turn is what the template would have written there."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pipelinerl.data.chat import ChatTemplate, text_of
from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.errors import DataError
from tests.tokenizers import CHATML, MISTRAL, make_words

USER, ANSWER, MORE = ({"role": "user", "content": "x y"}, {"role": "assistant", "content": "a b"}, {"role": "user", "content": "z"})


def words(folder: Path, *, template: str | None, eos: str = "<|im_end|>", bos: str | None = None) -> Any:
    make_words(folder, template=template, eos=eos, bos=bos)
    return load_tokenizer(folder)


@pytest.mark.parametrize(("template", "eos", "bos"), [(CHATML, "<|im_end|>", None), (MISTRAL, "</s>", "<s>")])
def test_a_conversation_that_goes_on_is_what_the_template_makes_of_the_whole(
    tmp_path: Path, template: str, eos: str, bos: str | None
) -> None:
    tokenizer = words(tmp_path, template=template, eos=eos, bos=bos)
    chat = ChatTemplate(tokenizer)
    first = chat.prompt([USER])
    sampled = [*tokenizer.encode("a b", add_special_tokens=False), tokenizer.eos_token_id]
    rest = chat.continuation([MORE], sampled=sampled)
    assert rest is not None
    assert [*first, *sampled, *rest] == chat.prompt([USER, ANSWER, MORE])


def test_a_turn_that_was_cut_off_is_ended_by_the_template(tmp_path: Path) -> None:
    tokenizer = words(tmp_path, template=CHATML)
    chat = ChatTemplate(tokenizer)
    cut = tokenizer.encode("a b", add_special_tokens=False)
    rest = chat.continuation([MORE], sampled=cut)
    assert rest is not None
    assert rest[0] == tokenizer.eos_token_id
    assert [*chat.prompt([USER]), *cut, *rest] == chat.prompt([USER, ANSWER, MORE])


def test_a_model_without_a_template_reads_messages_end_to_end(tmp_path: Path) -> None:
    tokenizer = words(tmp_path, template=None)
    chat = ChatTemplate(tokenizer)
    assert chat.is_plain
    assert tokenizer.decode(chat.prompt([USER, MORE])) == "x yz" or tokenizer.decode(chat.prompt([USER, MORE])).split() == ["x", "z"]
    assert chat.continuation([MORE], sampled=[tokenizer.eos_token_id]) == tokenizer.encode("z", add_special_tokens=False)


def test_a_template_that_cannot_say_what_stands_behind_a_turn_is_known_for_it(tmp_path: Path) -> None:
    forgets = "{% for m in messages %}{{ m.role }} {% endfor %}"
    assert ChatTemplate(words(tmp_path, template=forgets)).continuation([MORE], sampled=[1]) is None
    refuses = "{{ raise_exception('no') }}"
    chat = ChatTemplate(words(tmp_path, template=refuses))
    assert chat.continuation([MORE], sampled=[1]) is None
    with pytest.raises(DataError, match="does not take these messages"):
        chat.prompt([USER])


def test_arguments_of_tool_calls_reach_a_template_as_objects(tmp_path: Path) -> None:
    template = (
        "{% for m in messages %}{% for c in m.tool_calls or [] %}{{ c.function.arguments.word }} {% endfor %}{{ m.content }}{% endfor %}"
    )
    tokenizer = words(tmp_path, template=template)
    call = {"id": "1", "type": "function", "function": {"name": "say", "arguments": '{"word": "x"}'}}
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    assert tokenizer.decode(ChatTemplate(tokenizer).prompt([message, MORE])).split() == ["x", "z"]


def test_the_text_of_parts_is_one_text_and_anything_else_is_refused() -> None:
    assert text_of([{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]) == "ab"
    assert text_of(None) == ""
    with pytest.raises(DataError, match="expected text, or parts"):
        text_of([{"type": "image_url", "image_url": {"url": "data:"}}])
