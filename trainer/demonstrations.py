"""Demonstrations for supervised fine-tuning: rows of a prompt and a completion, as packed batches of tokens, epoch after epoch.

The prompt is tokenised alone and the completion alone, as in RL, where the engine sees the prompt's tokens before any completion exists.
"""

from __future__ import annotations

import inspect
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from pipelinerl.config import Config
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.messages import Int32
from pipelinerl.plugin import load_plugin


class Demonstration(NamedTuple):
    """One sample to train on."""

    token_ids: Int32
    """[L] of prompt, completion and end of sequence."""
    num_prompt: int
    """Tokens of the prompt, which have no loss."""

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)


class Demonstrations:
    """The rows of `sft.source`, drawn in batches: each epoch in a new order, given by the seed; those of an iterable as it yields them."""

    def __init__(self, config: Config) -> None:
        """Raises `ConfigError` where `sft.source` or the tokenizer cannot be used, `DataError` where the source has no rows."""
        if config.sft.source is None:
            raise ConfigError("sft.source is not set: name a JSONL file, or `path:name` of a Python function that yields rows")
        self._source = config.sft.source
        self._prompt_column, self._completion_column = config.data.prompt_column, config.sft.completion_column
        self._max_tokens = min(config.batch.max_tokens, config.model.max_tokens or config.batch.max_tokens)
        self._seed = config.run.seed
        self._batch_size = config.sft.batch_size
        self._tokenizer = _load_tokenizer(config.model.path)
        self._rows, self._is_ordered = read_rows(self._source, seed=config.run.seed, at_most=config.sft.steps * config.sft.batch_size)
        if not len(self._rows):
            raise DataError(f"sft.source {self._source} has no rows")

    def batches(self) -> Iterator[list[Demonstration]]:
        """Endless batches of `sft.batch_size` rows."""
        epoch = 0
        waiting: list[int] = []
        while True:
            while len(waiting) < self._batch_size:
                waiting += self._order(epoch)
                epoch += 1
            yield self._encode(waiting[: self._batch_size])
            del waiting[: self._batch_size]

    def _order(self, epoch: int) -> list[int]:
        if self._is_ordered:
            return list(range(len(self._rows)))
        return np.random.default_rng((self._seed, epoch)).permutation(len(self._rows)).tolist()

    def _encode(self, numbers: list[int]) -> list[Demonstration]:
        prompts = self._tokenizer([self._prompt(number) for number in numbers], add_special_tokens=False)["input_ids"]
        completions = self._tokenizer([self._text(number, self._completion_column) for number in numbers], add_special_tokens=False)[
            "input_ids"
        ]
        encoded: list[Demonstration] = []
        for number, prompt, completion in zip(numbers, prompts, completions, strict=True):
            token_ids = np.array([*prompt, *completion, self._tokenizer.eos_token_id], np.int32)
            if not prompt or len(token_ids) > self._max_tokens:
                raise DataError(
                    f"{self._source}, row {number}: {len(prompt)} tokens of prompt, {len(token_ids)} in all; expected at least one of"
                    f" prompt and at most {self._max_tokens} in all (model.max_tokens, batch.max_tokens)"
                )
            encoded.append(Demonstration(token_ids, len(prompt)))
        return encoded

    def _prompt(self, number: int) -> str:
        prompt = self._rows[number].get(self._prompt_column)
        if isinstance(prompt, list):
            return str(self._tokenizer.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True))
        return self._text(number, self._prompt_column)

    def _text(self, number: int, column: str) -> str:
        text = self._rows[number].get(column)
        if not isinstance(text, str):
            raise DataError(
                f"{self._source}, row {number}: column {column!r} is {text!r}, expected text; it has {', '.join(self._rows[number])}"
            )
        return text


def read_rows(source: str, *, seed: int, at_most: int) -> tuple[Sequence[dict[str, Any]], bool]:
    """The rows of a JSONL file, or of what `path:name` names: rows, or a function that gives them, without arguments or with `seed`.

    Of rows that can only be read one after the other, and may never end, the first `at_most`; True then says that their order is meant.
    """
    if source.endswith(".jsonl"):
        return _read_jsonl(Path(source)), False
    found = load_plugin(source)
    if callable(found):
        found = found(seed=seed) if "seed" in inspect.signature(found).parameters else found()
    if hasattr(found, "__len__"):
        return found, False  # pyright: ignore[reportReturnType]
    return list(itertools.islice(found, at_most)), True  # pyright: ignore[reportArgumentType]


def _read_jsonl(path: Path) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"sft.source {path} cannot be read: {error.strerror} (looked from {Path.cwd()})") from None
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        try:
            row = json.loads(line) if line.strip() else {}
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{path}, line {number}: a {type(row).__name__}, expected one JSON object a line")
        rows += [row] if row else []
    return rows


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError) as error:
        raise ConfigError(f"model.path {folder} has no tokenizer that can be loaded: {error}") from error
    if tokenizer.eos_token_id is None:
        raise ConfigError(f"the tokenizer in {folder} names no end-of-sequence token: a completion could not be ended")
    return tokenizer
