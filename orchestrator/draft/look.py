"""Looks at a model's folder and at the first rows of a source, and keeps what decides a config: nothing is loaded but the tokenizer."""

from __future__ import annotations

import dataclasses
import difflib
import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from orchestrator.data.rows import Table, open_rows
from pipelinerl.config import DataSection
from pipelinerl.data.hub import dataset_files, is_dataset, model_folder
from pipelinerl.data.reasoning_gym import is_spec
from pipelinerl.data.stop_tokens import stop_tokens_of
from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.engine.kv import context_of
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.planning.memory import Weights, read_weights

NUM_ROWS = 256
"""First rows that are looked at. More would find rarer long prompts, and take longer where rows are generated or far away."""
PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input", "messages", "conversation", "text")
ANSWERS = ("answer", "ground_truth", "solution", "final_answer", "target", "expected_answer", "label", "output", "response", "completion")
"""Usual names of columns, the likeliest first."""
_MATHEMATICAL = re.compile(r"\\boxed|\\d?frac|####|^\$.*\$$|^[-+]?[\d,]*\.?\d+([/^][-+]?\d+)?\s*%?$")
"""A number, a fraction, LaTeX, or GSM8K's mark before the last number."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """A model, as its files say."""

    given: Path
    """The folder or the Hub's name, as it was typed."""
    folder: Path
    tokenizer: Any
    context: int
    """Longest sequence it was made for, in tokens."""
    weights: Weights
    has_chat: bool
    can_think: bool
    """Its chat template has the switch `enable_thinking`."""
    stop_tokens: str
    warnings: tuple[str, ...]

    def num_tokens(self, text: str) -> int:
        """Count the tokens of a text."""
        return len(self.tokenizer.encode(text, add_special_tokens=False))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataFacts:
    """The first rows of a source."""

    source: str
    is_gym: bool
    num_rows: int | None
    """All of them; None for a source that may not end."""
    columns: tuple[str, ...]
    prompt_column: str
    is_chat: bool
    """The prompts are lists of messages."""
    prompt_tokens: tuple[int, ...]
    """Of each prompt that was looked at, without the chat template."""
    answer_column: str | None
    answer_tokens: tuple[int, ...]
    is_math: bool
    """The answers are numbers or LaTeX."""
    are_integers: bool
    """The answers are whole numbers."""
    held_out: str | None
    """A source of the same kind that looks like its held-out rows."""


def look_at_model(given: Path) -> ModelFacts:
    """Read a model's files. Raises `ConfigError` for what is no model, with the nearest folder there is."""
    if not given.exists() and (near := _near_path(given)):
        raise ConfigError(f"model: no folder at {given} (looked from {Path.cwd()}); did you mean {near}?")
    folder = model_folder(given, key="model")
    tokenizer = load_tokenizer(folder)
    context = context_of(folder, max_tokens=None)
    if context is None:
        raise ConfigError(f"model: {folder / 'config.json'} names no context length (max_position_embeddings): is it a language model's?")
    weights = read_weights(folder)
    if not weights.num_parameters:
        raise ConfigError(f"model: {folder} has no *.safetensors: a Hugging Face folder with safetensors weights is expected")
    stop = stop_tokens_of(folder, tokenizer=tokenizer)
    return ModelFacts(
        given=given,
        folder=folder,
        tokenizer=tokenizer,
        context=context,
        weights=weights,
        has_chat=bool(tokenizer.chat_template),
        can_think="enable_thinking" in str(tokenizer.chat_template or ""),
        stop_tokens=str(stop),
        warnings=stop.warnings,
    )


def look_at_data(source: str, *, model: ModelFacts, prompt_column: str | None, answer_column: str | None) -> DataFacts:
    """Read the first rows of a source, and guess which columns hold prompts and answers, where none is named.

    Raises `ConfigError` or `DataError` where there are no rows, no such column, or none that could be one.
    """
    if Path(source).suffix in (".jsonl", ".ndjson", ".parquet") and not Path(source).exists() and (near := _near_path(Path(source))):
        raise ConfigError(f"data: no file at {source} (looked from {Path.cwd()}); did you mean {near}?")
    section = DataSection.model_validate({"source": source, "shuffle": False})
    rows = open_rows(section, seed=0)
    if isinstance(rows, Table):
        first = [rows[number] for number in range(min(NUM_ROWS, len(rows)))]
    else:
        first = [drawn[2] for drawn in map(rows.draw, itertools.repeat(0), range(NUM_ROWS)) if drawn is not None]
    if not first or not isinstance(first[0], Mapping):
        raise DataError(f"{source}: expected rows that are objects of columns, got {type(first[0]).__name__ if first else 'none'}")
    columns = tuple(map(str, first[0]))
    prompts = prompt_column or _first_of(PROMPTS, columns, lambda name: _is_prompt(first[0][name]))
    if prompts is None:
        raise ConfigError(f"data: no column of {source} looks like a prompt; it has {', '.join(columns)}. Name one: --prompt-column")
    answers = answer_column or _first_of(ANSWERS, columns, lambda name: name != prompts and isinstance(first[0][name], str | int | float))
    for option, name in (("--prompt-column", prompts), ("--answer-column", answers)):
        if name is not None and name not in columns:
            near = difflib.get_close_matches(name, columns, n=1)
            raise ConfigError(
                f"{option}: {source} has no column {name!r}{f'; did you mean {near[0]!r}?' if near else ''}; it has {', '.join(columns)}"
            )
    if not _is_prompt(first[0][prompts]):
        raise ConfigError(
            f"--prompt-column: column {prompts!r} of {source} holds a {type(first[0][prompts]).__name__}, expected text or a chat"
        )
    if isinstance(first[0][prompts], Sequence) and not isinstance(first[0][prompts], str) and first[0][prompts][-1]["role"] == "assistant":
        raise ConfigError(
            f"data: the chats in column {prompts!r} of {source} end with the assistant's words: they are demonstrations, and would be shown"
            " to the model whole. Fine-tune on them (`pipelinerl sft`), or name a column of prompts: --prompt-column"
        )
    said = [] if answers is None else [str(row[answers]).strip() for row in first if row.get(answers) is not None]
    return DataFacts(
        source=source,
        is_gym=is_spec(source),
        num_rows=len(rows) if isinstance(rows, Table) else None,
        columns=columns,
        prompt_column=prompts,
        is_chat=not isinstance(first[0][prompts], str),
        prompt_tokens=tuple(model.num_tokens(_text(row[prompts])) for row in first),
        answer_column=answers if said else None,
        answer_tokens=tuple(map(model.num_tokens, said)),
        is_math=bool(said) and float(np.mean([bool(_MATHEMATICAL.search(text)) for text in said])) >= 0.9,
        are_integers=bool(said) and all(re.fullmatch(r"-?\d+", text) for text in said),
        held_out=_held_out(source),
    )


def _first_of(names: Sequence[str], columns: Sequence[str], fits: Any) -> str | None:
    """Return the likeliest column by name, else the only one that fits."""
    fitting = [name for name in columns if fits(name)]
    lowered = {name.lower(): name for name in fitting}
    return next((lowered[name] for name in names if name in lowered), fitting[0] if names is PROMPTS and len(fitting) == 1 else None)


def _is_prompt(value: Any) -> bool:
    if isinstance(value, str):
        return bool(value.strip())
    return isinstance(value, list | tuple) and bool(value) and all(isinstance(one, Mapping) and "role" in one for one in value)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else "\n".join(str(message.get("content")) for message in value)


def _held_out(source: str) -> str | None:
    """Return the source beside it that is named as held-out rows are, where there is one."""
    if is_spec(source):
        return (
            f"{source}{'&' if '?' in source else '?'}size=256&seed=1000000"
            if not re.search(r"[?&](size|seed)=", source)
            else _respun(source)
        )
    if is_dataset(source):
        head, _, split = source.rpartition("train")
        other = f"{head}test" if head and not split else f"{source}:test"
        try:
            return other if dataset_files(other) else None
        except ConfigError:  # it has no such split
            return None
    path = Path(source)
    names = (path.name.replace("train", other) for other in ("test", "validation", "valid", "val", "dev", "eval", "held_out"))
    return next((str(path.with_name(name)) for name in names if name != path.name and path.with_name(name).is_file()), None)


def _respun(spec: str) -> str:
    """Return a spec of other rows: 256 of them, of a seed that is further away than rows are many."""
    name, _, query = spec.partition("?")
    rest = [pair for pair in query.split("&") if pair and not pair.startswith(("size=", "seed="))]
    return f"{name}?{'&'.join([*rest, 'size=256', 'seed=1000000'])}"


def _near_path(path: Path) -> Path | None:
    """Return the path beside a missing one that is most like it."""
    if not path.parent.is_dir():
        return None
    found = difflib.get_close_matches(path.name, [one.name for one in path.parent.iterdir()], n=1)
    return path.with_name(found[0]) if found else None
