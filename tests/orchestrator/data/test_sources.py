"""Prompt sources: every kind of source, the order of rows, resumption at a recorded position, and what is said of bad data."""

from __future__ import annotations

import datetime
import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.data.sources import MAX_SKIPPED_OF_STREAM, PromptSource, fixed
from pipelinerl.config import DataSection
from pipelinerl.data.tokenizer import TextEncoder
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.messages import Prompt


class Characters:
    """A tokenizer: one token a character, 1 first where special tokens are asked for."""

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        return [1] * add_special_tokens + [ord(character) for character in text]

    def apply_chat_template(self, conversation: list[dict[str, str]], *, tokenize: bool, add_generation_prompt: bool) -> str:
        assert not tokenize
        if any(message["role"] == "forbidden" for message in conversation):
            raise ValueError("roles must alternate")
        return "".join(f"<{message['role']}>{message['content']}" for message in conversation) + "<assistant>" * add_generation_prompt


def make_source(source: str | Path | dict[str, float], *, seed: int = 0, max_prompt_tokens: int = 100, **section: Any) -> PromptSource:
    named = source if isinstance(source, dict) else str(source)
    return PromptSource(
        DataSection(source=named, **section), encoder=TextEncoder(Characters()), seed=seed, max_prompt_tokens=max_prompt_tokens
    )


def write_rows(path: Path, rows: list[Any]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def numbered(folder: Path, num_rows: int) -> Path:
    """A file whose row n has the prompt "n"."""
    return write_rows(folder / "rows.jsonl", [{"prompt": str(n), "answer": n} for n in range(num_rows)])


@pytest.fixture
def plugin(tmp_path: Path) -> Callable[[str], str]:
    """Write Python source to a file of its own; returns `path:rows`."""
    counter = itertools.count()

    def write(text: str) -> str:
        path = tmp_path / f"plugin_{next(counter)}.py"
        path.write_text(text)
        return f"{path}:rows"

    return write


def take(source: PromptSource, num_prompts: int) -> list[Prompt]:
    return [source.next() for _ in range(num_prompts)]


def texts(source: PromptSource, num_prompts: int) -> list[str]:
    return [prompt.text for prompt in take(source, num_prompts)]


# --- kinds of sources ---


def test_jsonl_row_becomes_a_prompt_with_its_other_columns(tmp_path: Path) -> None:
    columns = {"answer": 42, "tags": ["a", None], "extra": {"x": 1.5, "y": True}}
    prompt = make_source(write_rows(tmp_path / "rows.jsonl", [{"prompt": "hi", **columns}])).next()
    assert (prompt.prompt_id, prompt.text, prompt.token_ids.tolist(), prompt.columns) == ("0:0", "hi", [1, 104, 105], columns)
    assert prompt.token_ids.dtype == "int32"


def test_prompt_column_is_configurable_and_does_not_stay_among_the_columns(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "hi", "prompt": "not this"}])
    prompt = make_source(path, prompt_column="question").next()
    assert (prompt.text, prompt.columns) == ("hi", {"prompt": "not this"})


def test_chat_messages_go_through_the_chat_template_without_special_tokens_twice(tmp_path: Path) -> None:
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "hi"}]
    prompt = make_source(write_rows(tmp_path / "rows.jsonl", [{"prompt": chat}])).next()
    assert prompt.text == "<system>be brief<user>hi<assistant>"
    assert prompt.token_ids.tolist() == [ord(character) for character in prompt.text]
    assert prompt.chat == tuple(chat), "reward functions that know chats get them"


def test_parquet_rows_are_read_with_nested_columns(tmp_path: Path) -> None:
    rows = [{"prompt": str(n), "reward_model": {"ground_truth": str(n)}, "levels": [n, n + 1]} for n in range(3)]
    path = tmp_path / "rows.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    prompts = take(make_source(path, shuffle=False), 3)
    assert [prompt.text for prompt in prompts] == ["0", "1", "2"]
    assert prompts[2].columns == {"reward_model": {"ground_truth": "2"}, "levels": [2, 3]}


@pytest.mark.parametrize(
    "text",
    [
        'rows = [{"prompt": str(n)} for n in range(3)]',
        'def rows(): return [{"prompt": str(n)} for n in range(3)]',
        'def rows(seed): return [{"prompt": str(n)} for n in range(seed - 4)]',
        """class Dataset:
    def __len__(self): return 3
    def __getitem__(self, index): return {"prompt": str(range(3)[index])}
rows = Dataset()""",
        'def rows():\n    for n in range(3): yield {"prompt": str(n)}',
        'def rows(): return iter([{"prompt": str(n)} for n in range(3)])',
        """class Dataset:
    def __iter__(self): return iter([{"prompt": str(n)} for n in range(3)])
rows = Dataset()""",
    ],
    ids=["list", "function of a list", "function of a seed", "dataset", "generator function", "function of an iterator", "iterable"],
)
def test_python_source_gives_its_rows_epoch_after_epoch(plugin: Callable[[str], str], text: str) -> None:
    source = make_source(plugin(text), seed=7, shuffle=False)
    prompts = take(source, 7)
    assert [prompt.text for prompt in prompts] == ["0", "1", "2", "0", "1", "2", "0"]
    assert [prompt.prompt_id for prompt in prompts] == ["0:0", "0:1", "0:2", "1:0", "1:1", "1:2", "2:0"]
    assert source.position == (2, 1)


def test_generator_function_gets_the_seed_plus_the_epoch(plugin: Callable[[str], str]) -> None:
    source = make_source(plugin('def rows(*, seed):\n    yield {"prompt": f"{seed} a"}\n    yield {"prompt": f"{seed} b"}'), seed=40)
    assert texts(source, 5) == ["40 a", "40 b", "41 a", "41 b", "42 a"]


def test_generator_without_end_stays_in_its_first_epoch(plugin: Callable[[str], str]) -> None:
    source = make_source(plugin('import itertools\ndef rows():\n    for n in itertools.count(): yield {"prompt": str(n)}'))
    assert texts(source, 1000)[-1] == "999"
    assert source.position == (0, 1000)


def test_iterator_is_read_once_and_says_so_when_its_epoch_ends(plugin: Callable[[str], str]) -> None:
    source = make_source(plugin('rows = iter([{"prompt": "a"}, {"prompt": "b"}])'))
    assert texts(source, 2) == ["a", "b"]
    with pytest.raises(DataError, match="is an iterator, which can be read only once: name a function that makes it"):
        source.next()


@pytest.mark.parametrize(
    "text",
    [
        'rows = [{"prompt": str(n)} for n in range(9)]',
        'import itertools\ndef rows():\n    for n in itertools.count(): yield {"prompt": str(n)}',
    ],
)
def test_limit_takes_the_first_rows_and_gives_a_stream_epochs(plugin: Callable[[str], str], text: str) -> None:
    source = make_source(plugin(text), limit=3, shuffle=True)
    assert sorted(texts(source, 3)) == ["0", "1", "2"]
    assert source.position == (0, 3)
    assert sorted(texts(source, 3)) == ["0", "1", "2"]


# --- order and position ---


def test_every_epoch_has_every_row_once_in_an_order_of_its_own(tmp_path: Path) -> None:
    source = make_source(numbered(tmp_path, 50))
    epochs = [take(source, 50) for _ in range(3)]
    orders = [[prompt.text for prompt in epoch] for epoch in epochs]
    assert all(sorted(order, key=int) == [str(n) for n in range(50)] for order in orders)
    assert len({tuple(order) for order in [*orders, [str(n) for n in range(50)]]}) == 4
    assert [prompt.prompt_id for prompt in epochs[1]] == [f"1:{prompt.text}" for prompt in epochs[1]], "the id is the row's, not the draw's"


def test_order_follows_from_the_seed(tmp_path: Path) -> None:
    path = numbered(tmp_path, 50)
    assert texts(make_source(path, seed=1), 120) == texts(make_source(path, seed=1), 120)
    assert texts(make_source(path, seed=1), 50) != texts(make_source(path, seed=2), 50)
    assert len(texts(make_source(path, seed=-1), 50)) == 50


def test_without_shuffle_rows_come_in_file_order(tmp_path: Path) -> None:
    assert texts(make_source(numbered(tmp_path, 4), shuffle=False), 6) == ["0", "1", "2", "3", "0", "1"]


_KINDS: dict[str, Callable[[int, int], str]] = {
    "list": lambda num_rows, long: f"rows = [{{'prompt': str(n) * (60 if n % {long} == 1 else 1)}} for n in range({num_rows})]",
    "generator function": lambda num_rows, long: (
        "import random\n"
        "def rows(seed):\n"
        "    draws = random.Random(seed)\n"
        f"    for n in range({num_rows}): yield {{'prompt': str(draws.random())[:12] * (60 if n % {long} == 1 else 1)}}"
    ),
    "endless": lambda num_rows, long: (
        f"import itertools\ndef rows():\n    for n in itertools.count(): yield {{'prompt': str(n) * (60 if n % {long} == 1 else 1)}}"
    ),
}


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    kind=st.sampled_from(sorted(_KINDS)),
    num_rows=st.integers(3, 12),
    long=st.integers(2, 5),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    num_before=st.integers(0, 40),
)
def test_source_resumed_at_a_position_goes_on_exactly(
    tmp_path: Path, kind: str, num_rows: int, long: int, shuffle: bool, seed: int, num_before: int
) -> None:
    path = tmp_path / "plugin.py"
    path.write_text(_KINDS[kind](num_rows, long))

    def make() -> PromptSource:
        return make_source(f"{path}:rows", seed=seed, shuffle=shuffle, max_prompt_tokens=30)

    def what(prompt: Prompt) -> tuple[str, str]:
        return prompt.prompt_id, prompt.text

    whole = make()
    take(whole, num_before)
    position = json.loads(json.dumps(whole.position))
    expected = [(what(whole.next()), whole.position) for _ in range(30)]
    resumed = make()
    resumed.position = position
    assert [(what(resumed.next()), resumed.position) for _ in range(30)] == expected
    resumed.position = position
    assert [(what(resumed.next()), resumed.position) for _ in range(30)] == expected, "also where the same source is set back"


def test_position_outside_the_source_is_refused(tmp_path: Path) -> None:
    source = make_source(numbered(tmp_path, 3))
    source.position = (4, 3)
    assert take(source, 1)[0].prompt_id.startswith("5:")
    for position in ((0, 4), (-1, 0), (0, -1)):
        with pytest.raises(DataError, match=r"the source has 3 rows\. Resume with the same source"):
            source.position = position


# --- prompts that are too long ---


def test_prompts_that_are_too_long_are_skipped_and_counted(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a" * n} for n in (9, 10, 11, 3)])
    source = make_source(path, shuffle=False, max_prompt_tokens=10)
    assert [len(text) for text in texts(source, 4)] == [9, 3, 9, 3]
    assert source.num_skipped_too_long == 4
    assert source.position == (1, 4)


def test_epoch_of_prompts_that_are_all_too_long_is_an_error(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a" * n} for n in (50, 20, 30)])
    with pytest.raises(DataError, match=r"3 prompts in a row are too long: at most 10 tokens are allowed, the shortest of them has 21\."):
        make_source(path, shuffle=False, max_prompt_tokens=10).next()


def test_table_is_read_to_its_end_before_it_is_given_up(plugin: Callable[[str], str]) -> None:
    source = make_source(
        plugin(f'rows = [{{"prompt": "aaa"}}] * {MAX_SKIPPED_OF_STREAM + 1} + [{{"prompt": "a"}}]'), shuffle=False, max_prompt_tokens=3
    )
    assert source.next().text == "a"


@pytest.mark.parametrize("position", [(0, 0), (3, 2)])
def test_one_short_prompt_in_an_epoch_is_enough(tmp_path: Path, position: tuple[int, int]) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a" * n} for n in (50, 2, 30)])
    source = make_source(path, shuffle=False, max_prompt_tokens=10)
    source.position = position
    assert texts(source, 5) == ["aa"] * 5


def test_stream_of_prompts_that_are_all_too_long_ends_with_an_error(plugin: Callable[[str], str]) -> None:
    source = make_source(plugin('import itertools\ndef rows(): return itertools.repeat({"prompt": "aaa"})'), max_prompt_tokens=3)
    with pytest.raises(DataError, match="the shortest of them has 4"):
        source.next()
    assert source.num_skipped_too_long == MAX_SKIPPED_OF_STREAM


# --- bad data ---


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"', ":3: not a line of JSON: Input data was truncated"),
        ('{"prompt": "a"} x', ":3: not a line of JSON: JSON is malformed: trailing characters"),
        ('{"prompt": NaN}', ":3: not a line of JSON: JSON is malformed"),
        ('["a"]', ":3: a list, expected an object with a column for each key"),
        ('{"prompt": "\udcff"}', ":3: not a line of JSON"),
    ],
)
def test_malformed_line_is_named_with_file_and_number(tmp_path: Path, line: str, said: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "a"}\n\n' + line + '\n{"prompt": "b"}\n', errors="surrogateescape")
    with pytest.raises(DataError) as raised:
        make_source(path)
    assert str(raised.value).startswith(f"{path}{said}")


def test_blank_lines_do_not_shift_rows_or_line_numbers(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('\n{"prompt": "a"}\r\n   \n{"prompt": "b"}\n{"prompt": 3}')
    source = make_source(path, shuffle=False)
    assert [(prompt.prompt_id, prompt.text) for prompt in take(source, 2)] == [("0:0", "a"), ("0:1", "b")]
    with pytest.raises(DataError, match=r"rows.jsonl:5: column 'prompt' is a int, expected text or a list of chat messages"):
        source.next()


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.parquet"])
def test_source_without_rows_is_refused(tmp_path: Path, name: str) -> None:
    if name.endswith("jsonl"):
        (tmp_path / name).write_text("\n\n")
    else:
        pyarrow.parquet.write_table(pyarrow.table({"prompt": pyarrow.array([], pyarrow.string())}), tmp_path / name)
    with pytest.raises(DataError, match=rf"{name} has no rows"):
        make_source(tmp_path / name)


def test_generator_without_rows_is_refused(plugin: Callable[[str], str]) -> None:
    with pytest.raises(DataError, match=r"rows yields no rows"):
        make_source(plugin("def rows(): yield from ()")).next()


def test_missing_prompt_column_names_the_columns_there_are(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"question": "a", "answer": "b"}])
    with pytest.raises(DataError, match=r"rows.jsonl:1: no column 'prompt'; there are 'question', 'answer'\. Set data\.prompt_column"):
        make_source(path)


def test_columns_that_json_says_in_another_way_are_made_so(plugin: Callable[[str], str]) -> None:
    row = {"prompt": "a", "when": datetime.date(2026, 1, 1), "range": (1, 2), "metadata": {"seen": {3, 1}, 7: "x"}}
    prompt = make_source(plugin(f"import datetime\ndef rows(): return [{row!r}]")).next()
    assert prompt.columns == {"when": "2026-01-01", "range": [1, 2], "metadata": {"seen": [1, 3], "7": "x"}}


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"bytes", "row 0: column 'x' holds a bytes, which JSON cannot say"),
        (float("nan"), "column 'x' holds nan"),
        ([1, {"deep": 1j}], "column 'x' holds a complex"),
        ({"a": {(3, 4): "b"}}, r"column 'x' holds the key \(3, 4\)"),
        (2**70, "has more than 64 bits"),
    ],
)
def test_column_that_is_not_plain_json_is_named(plugin: Callable[[str], str], value: Any, said: str) -> None:
    text = f'import datetime\nnan = float("nan")\ndef rows(): return [{{"prompt": "a", "x": {value!r}}}]'
    with pytest.raises(DataError, match=said):
        make_source(plugin(text))


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([], "column 'prompt' is a list, expected text or a list of chat messages with roles"),
        ([{"content": "no role"}], "column 'prompt' is a list, expected text or a list of chat messages with roles"),
        ([{"role": "forbidden", "content": ""}], "the model's chat template refuses these messages: ValueError: roles must alternate"),
    ],
)
def test_prompt_of_a_wrong_kind_is_refused(tmp_path: Path, value: Any, said: str) -> None:
    with pytest.raises(DataError, match=said):
        make_source(write_rows(tmp_path / "rows.jsonl", [{"prompt": value}]))


def test_prompt_without_tokens_is_refused(tmp_path: Path) -> None:
    class Bare(Characters):
        def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
            return super().encode(text, add_special_tokens=False)

    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": ""}])
    with pytest.raises(DataError, match=r"rows.jsonl:1: column 'prompt' is empty"):
        PromptSource(DataSection(source=str(path)), encoder=TextEncoder(Bare()), seed=0, max_prompt_tokens=10)  # pyright: ignore[reportCallIssue]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("def rows(): raise OSError('disk')", r"rows raised OSError: disk, at .*\.py:1$"),
        ("def rows():\n    yield {'prompt': 'a'}\n    raise OSError('disk')", r"rows, after 1 rows raised OSError: disk, at .*\.py:3$"),
        ("rows = {'train': [], 'test': []}", "holds 'train', 'test', expected rows"),
        ("rows = 3", "rows is a int, expected a list, a dataset, an iterable, or a function"),
        ("rows = ['a']", "row 0: a str, expected a dictionary of columns"),
    ],
)
def test_python_source_that_fails_is_named(plugin: Callable[[str], str], text: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        take(make_source(plugin(text)), 2)


def test_source_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    known = r"a \.jsonl or \.parquet file, a data set of the Hub .*, reasoning-gym:NAME, or `path:name`"
    with pytest.raises(DataError, match=f"'rows.csv' is no source of prompts: expected {known}"):
        make_source("rows.csv")
    with pytest.raises(DataError, match=r"none.jsonl cannot be read \(from .*\): No such file"):
        make_source(tmp_path / "none.jsonl")
    with pytest.raises(DataError, match=r"none.parquet cannot be read"):
        make_source(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_text("not parquet, by far")
    with pytest.raises(DataError, match=r"bad.parquet cannot be read"):
        make_source(tmp_path / "bad.parquet")
    with pytest.raises(ConfigError, match="no Python file at"):
        make_source(tmp_path / "none.py:rows")


# --- held-out prompts ---


def test_fixed_prompts_are_the_first_rows_in_order(tmp_path: Path) -> None:
    path = numbered(tmp_path, 9)
    options: dict[str, Any] = {"prompt_column": "prompt", "encoder": TextEncoder(Characters()), "max_prompt_tokens": 10}
    prompts = fixed(str(path), limit=4, **options)
    assert [(prompt.prompt_id, prompt.text, prompt.columns) for prompt in prompts] == [(f"0:{n}", str(n), {"answer": n}) for n in range(4)]
    assert len(fixed(str(path), limit=100, **options)) == 9


def test_fixed_prompts_of_an_endless_generator_end(plugin: Callable[[str], str]) -> None:
    source = plugin('import itertools\ndef rows():\n    for n in itertools.count(): yield {"prompt": str(n)}')
    assert len(fixed(source, limit=5, prompt_column="prompt", encoder=TextEncoder(Characters()), max_prompt_tokens=10)) == 5


def test_fixed_prompt_that_is_too_long_is_an_error_not_a_smaller_set(tmp_path: Path) -> None:
    path = write_rows(tmp_path / "rows.jsonl", [{"prompt": "a"}, {"prompt": "a" * 10}])
    with pytest.raises(DataError, match=r"rows.jsonl:2: the prompt has 11 tokens, at most 10 are allowed"):
        fixed(str(path), limit=2, prompt_column="prompt", encoder=TextEncoder(Characters()), max_prompt_tokens=10)


# --- several sources --------------------------------------------------------------------------------------------------------------


def mixture(tmp_path: Path, plugin: Callable[[str], str]) -> dict[str, float]:
    """Three rows of file a for two of file b and one of a generator with epochs of two rows."""
    for name, count in (("a", 4), ("b", 3)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"prompt": f"{name}{n}"}) + "\n" for n in range(count)))
    stream = plugin('def rows():\n    yield {"prompt": "c0"}\n    yield {"prompt": "c1"}')
    return {str(tmp_path / "a.jsonl"): 3, str(tmp_path / "b.jsonl"): 2, stream: 1}


def test_of_several_sources_each_gives_its_share_through_epochs_of_its_own(tmp_path: Path, plugin: Callable[[str], str]) -> None:
    source = make_source(mixture(tmp_path, plugin), shuffle=False)
    prompts = [source.next() for _ in range(24)]
    texts = [prompt.text for prompt in prompts]
    assert texts[:12] == ["a0", "b0", "a1", "c0", "b1", "a2", "a3", "b2", "a0", "c1", "b0", "a1"]
    assert [sum(text.startswith(name) for text in texts) for name in "abc"] == [12, 8, 4]
    assert len({prompt.prompt_id for prompt in prompts}) == 24, "a row that comes again has another epoch"
    assert len({prompt.prompt_id.partition(":")[2] for prompt in prompts}) == 4 + 3 + 2, "and the same number"


def test_a_mixture_resumed_at_any_position_goes_on_exactly(tmp_path: Path, plugin: Callable[[str], str]) -> None:
    sources = mixture(tmp_path, plugin)
    whole = make_source(sources)
    seen = [(whole.position, whole.next()) for _ in range(30)]
    for start in (0, 1, 7, 20):
        resumed = make_source(sources)
        resumed.position = seen[start][0]
        again = [resumed.next() for _ in range(10)]
        assert [(one.prompt_id, one.text) for one in again] == [(one.prompt_id, one.text) for _, one in seen[start : start + 10]]
    whole.position = seen[3][0]
    assert whole.next().prompt_id == seen[3][1].prompt_id, "and backwards"


# --- difficulty ---


def test_what_is_too_easy_or_too_hard_is_passed_over_until_its_rest_ends_and_a_resumed_source_passes_over_the_same(tmp_path: Path) -> None:
    def make() -> PromptSource:
        return make_source(numbered(tmp_path, 3), difficulty=(0.0, 1.0), shuffle=True)

    measures = [("0:1", 1.0), ("0:2", 0.5)]
    source = make()
    take(source, 3)
    for prompt_id, success in measures:
        source.measured(prompt_id, success=success)
    resting = dict(source.resting)
    drawn = [prompt.prompt_id for prompt in take(source, 5)]
    assert sorted(drawn[:2]) == ["1:0", "1:2"], "1 rests for an epoch"
    assert sorted(drawn[2:]) == ["2:0", "2:1", "2:2"]
    resumed = make()
    resumed.position = (1, 0)
    resumed.resting.update(resting)
    assert [prompt.prompt_id for prompt in take(resumed, 5)] == drawn


def test_an_epoch_in_which_everything_rests_is_passed_over_whole(tmp_path: Path) -> None:
    source = make_source(numbered(tmp_path, 2), difficulty=(0.0, 1.0))
    for prompt in take(source, 2):
        source.measured(prompt.prompt_id, success=0.0)
    assert take(source, 1)[0].prompt_id.startswith("2:")


def test_rows_that_never_come_again_cannot_rest(tmp_path: Path) -> None:
    path = tmp_path / "plugin.py"
    path.write_text("def rows():\n    yield {'prompt': '1'}")
    with pytest.raises(DataError, match=r"no rows that come again, so data\.difficulty cannot rest any"):
        make_source(f"{path}:rows", difficulty=(0.0, 1.0))
