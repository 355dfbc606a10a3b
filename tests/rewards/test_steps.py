"""Step boundaries in a growing trace, by hand and for every way to cut it into chunks."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.rewards.prm import steps as module
from pipelinerl.rewards.prm.steps import Splitter, Step

TEXT = "First we add.\n\nThen:\n```python\nx = 1\n\ny = 2\n```\ndone.\n \n\n$$a\n\n= b$$ and\n\\[c\n\nd\\]\n\n\nTail \N{ROCKET} end"
STEPS = ["First we add.", "Then:\n```python\nx = 1\n\ny = 2\n```\ndone.", "$$a\n\n= b$$ and\n\\[c\n\nd\\]", "Tail \N{ROCKET} end"]


def by_bytes(token_ids: Sequence[int]) -> str:
    """A tokenizer whose tokens are single bytes: a character may take four."""
    return bytes(token_ids).decode(errors="replace")


def split(text: str, *, sizes: Sequence[int] = (1,), max_steps: int = 100, separator: str | None = None) -> list[Step]:
    token_ids = list(text.encode())
    splitter, steps, start, turn = Splitter(by_bytes, max_steps=max_steps, separator=separator), [], 0, 0
    while start < len(token_ids):
        size = sizes[turn % len(sizes)]
        steps += splitter.feed(token_ids[start : start + size])
        start, turn = start + size, turn + 1
    return steps + splitter.finish()


def test_a_fence_that_is_never_closed_is_read_once_however_many_blank_lines_follow(monkeypatch: pytest.MonkeyPatch) -> None:
    class Marks:
        num_scanned = 0

        def finditer(self, text: str, start: int) -> Iterator[re.Match[str]]:
            self.num_scanned += len(text) - start
            return pattern.finditer(text, start)

    pattern, marks = module._MARKS, Marks()
    monkeypatch.setattr(module, "_MARKS", marks)
    text = "```\n" + "x = 1\n\n" * 200
    assert len(split(text)) == 1
    assert len(text) - 10 <= marks.num_scanned <= 2 * len(text), "with the few characters in which a mark may have begun"


def test_a_chunk_without_the_end_of_a_step_is_decoded_once_however_many_tokens_it_has() -> None:
    num_decoded = 0

    def decode(token_ids: Sequence[int]) -> str:
        nonlocal num_decoded
        num_decoded += len(token_ids)
        return by_bytes(token_ids)

    splitter = Splitter(decode, max_steps=100)
    for _ in range(10):
        splitter.feed(b"abcdefgh" * 16)
    assert num_decoded <= 10 * (128 + 2 * 8), "of those before, eight are decoded, with the chunk and alone"
    assert [step.end for step in splitter.finish()] == [1279]


def test_blank_lines_separate_steps_but_not_in_code_or_display_mathematics() -> None:
    steps = split(TEXT)
    assert [step.text for step in steps] == STEPS
    assert [step.index for step in steps] == [0, 1, 2, 3]


def test_step_ends_with_the_last_token_before_the_next_one_s_first() -> None:
    steps = split(TEXT)
    data = TEXT.encode()
    cuts = [0, *(step.end + 1 for step in steps)]
    pieces = [data[a:b].decode() for a, b in itertools.pairwise(cuts)]
    assert "".join(pieces) == TEXT, "every token belongs to exactly one step, and no character is cut"
    assert [piece.strip() for piece in pieces] == STEPS


@given(st.lists(st.integers(1, 40), min_size=1, max_size=10))
def test_chunks_of_any_size_give_the_same_steps(sizes: list[int]) -> None:
    assert split(TEXT, sizes=sizes) == split(TEXT)


@given(st.text(alphabet="ab \n`$\\[]é", max_size=40), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_any_text_gives_the_same_steps_in_any_chunks_with_rising_ends_and_nothing_lost(text: str, sizes: list[int]) -> None:
    steps = split(text, sizes=sizes)
    assert steps == split(text)
    ends = [step.end for step in steps]
    assert ends == sorted(set(ends))
    assert "".join("".join(step.text.split()) for step in steps) == "".join(text.split())


@given(st.text(alphabet="ab<|>", max_size=40), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_any_separator_is_found_wherever_chunks_end(text: str, sizes: list[int]) -> None:
    steps = split(text, sizes=sizes, separator="<|>")
    assert steps == split(text, sizes=(1000,), separator="<|>")
    assert [step.text for step in steps] == [piece for piece in text.split("<|>") if piece]


@pytest.mark.parametrize(("text", "expected"), [("a<|>", ["a"]), ("<|>", []), ("a<|><|>", ["a"]), ("a<|", ["a<|"])])
def test_a_separator_at_the_very_end_is_part_of_no_step(text: str, expected: list[str]) -> None:
    assert [step.text for step in split(text, separator="<|>")] == expected


def test_step_is_known_as_soon_as_the_next_one_begins_and_not_before() -> None:
    splitter = Splitter(by_bytes, max_steps=10)
    assert splitter.feed(list(b"one\n\n")) == []
    assert splitter.feed(list(b" \n")) == []
    assert [step.text for step in splitter.feed(list(b"t"))] == ["one"]
    assert [step.text for step in splitter.finish()] == ["t"]


def test_first_character_of_a_step_that_takes_several_tokens_belongs_to_it_whole() -> None:
    splitter = Splitter(by_bytes, max_steps=10)
    rocket = "\N{ROCKET}".encode()
    assert splitter.feed([*b"one\n\n", *rocket[:3]]) == []
    assert [(step.text, step.end) for step in splitter.feed([rocket[3]])] == [("one", 4)]


def test_a_chunk_that_ends_within_a_character_is_read_up_to_it() -> None:
    splitter = Splitter(by_bytes, max_steps=10)
    assert [step.text for step in splitter.feed([*b"one\n\nt", *"\N{ROCKET}".encode()[:3]])] == ["one"]


def test_a_character_of_several_tokens_is_one_though_its_parts_are_decoded_as_several() -> None:
    """As tokenizers decode that give a sign for each byte of a character that is not whole."""

    def decode(token_ids: Sequence[int]) -> str:
        whole = bytes(token_ids).decode(errors="ignore")
        return whole + "\N{REPLACEMENT CHARACTER}" * (len(token_ids) - len(whole.encode()))

    token_ids = "a\N{ROCKET}=two".encode()
    ends: dict[int, list[int]] = {1: [], len(token_ids): []}
    for size, found in ends.items():
        splitter = Splitter(decode, max_steps=10, separator="=")
        for start in range(0, len(token_ids), size):
            found += [step.end for step in splitter.feed(token_ids[start : start + size])]
    assert set(map(tuple, ends.values())) == {(5,)}


@pytest.mark.parametrize("text", ["", "   ", "\n\n\n\n"])
def test_trace_of_white_space_has_no_step(text: str) -> None:
    assert split(text) == []


def test_token_that_holds_several_steps_is_one_step() -> None:
    vocabulary = ["a\n\nb\n\nc", " d", "\n\ne"]
    splitter = Splitter(lambda ids: "".join(vocabulary[i] for i in ids), max_steps=10)
    steps = splitter.feed([0, 1, 2]) + splitter.finish()
    assert [(step.text, step.end) for step in steps] == [("a\n\nb\n\nc d", 1), ("e", 2)]


def test_more_steps_than_allowed_are_one_last_step() -> None:
    steps = split("a\n\nb\n\nc\n\nd", max_steps=2)
    assert [step.text for step in steps] == ["a", "b\n\nc\n\nd"]


def test_code_block_that_never_ends_is_one_step() -> None:
    assert [step.text for step in split("```\na\n\nb\n\nc")] == ["```\na\n\nb\n\nc"]
