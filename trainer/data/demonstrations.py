"""Demonstrations for supervised fine-tuning: rows of a prompt and a completion, as packed batches of tokens, epoch after epoch.

The prompt is tokenised alone and the completion alone, as in RL, where the engine sees the prompt's tokens before any completion exists;
by the same rule, `pipelinerl.data.tokenizer.TextEncoder`. A completion ends with the token that ends it in RL, too: behind a chat the
end of turn that the template writes, behind plain text the tokenizer's EOS.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from pipelinerl.config import Config
from pipelinerl.data.stop_tokens import stop_tokens_of
from pipelinerl.data.tokenizer import ChatOptions, TextEncoder, load_tokenizer
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.messages import Int32
from pipelinerl.runtime.plugin import load_plugin


class Demonstration(NamedTuple):
    """One sample to train on."""

    token_ids: Int32
    """[L] of prompt, completion and the token that ends it."""
    num_prompt: int
    """Tokens of the prompt, which have no loss."""

    @property
    def num_tokens(self) -> int:
        """L."""
        return len(self.token_ids)

    @property
    def num_trained(self) -> int:
        """Tokens with a loss: the completion's, and the one that ends it."""
        return self.num_tokens - self.num_prompt


class Demonstrations:
    """The rows of `sft.source`, drawn in batches: each epoch in a new order, given by the seed; those of an iterable as it yields them.

    Seed and step alone say which rows a step has, so a resumed run, and a step done again, have the same.
    """

    def __init__(self, config: Config, *, beside_rl: bool = False) -> None:
        """Read the rows of `sft.source`, or of `sft_stream.source` where they are trained `beside_rl`.

        Raises `ConfigError` where the source or the tokenizer cannot be used, `DataError` where the source has no rows.
        """
        section, steps = (config.sft_stream, config.trainer.steps) if beside_rl else (config.sft, config.sft.steps)
        key = "sft_stream.source" if beside_rl else "sft.source"
        if section.source is None:
            raise ConfigError(f"{key} is not set: name a JSONL file, or `path:name` of a Python function that yields rows")
        self._source = section.source
        self._prompt_column, self._completion_column = config.data.prompt_column, config.sft.completion_column
        self._max_tokens = min(config.batch.max_tokens, config.model.max_tokens or config.batch.max_tokens)
        self._seed = config.run.seed
        self._batch_size = section.batch_size
        tokenizer = load_tokenizer(config.model.path)
        self._encoder = TextEncoder(tokenizer, options=ChatOptions.of(config.data))
        stop_tokens = stop_tokens_of(config.model.path, tokenizer=tokenizer)
        if stop_tokens.end_of_text is None:
            raise ConfigError(f"the tokenizer in {config.model.path} names no end-of-sequence token: a completion could not be ended")
        self._end_of_text = stop_tokens.end_of_text
        self._end_of_turn = stop_tokens.end_of_text if stop_tokens.end_of_turn is None else stop_tokens.end_of_turn
        self._rows, self._is_ordered = read_rows(self._source, key=key, seed=config.run.seed, at_most=steps * section.batch_size)
        if not len(self._rows):
            raise DataError(f"{key} {self._source} has no rows")
        self._order = functools.lru_cache(maxsize=1)(self._order_of)

    def __len__(self) -> int:
        """Rows; of an iterable, those that the steps can come to."""
        return len(self._rows)

    def batch_at(self, step: int) -> list[Demonstration]:
        """The rows of step 0, 1, ...; epochs follow each other without a gap. Raises `DataError` as `at` does."""
        first = step * self._batch_size
        places = (divmod(place, len(self)) for place in range(first, first + self._batch_size))
        return [self.at(int(self._order(epoch)[index])) for epoch, index in places]

    def _order_of(self, epoch: int) -> np.ndarray:
        """[rows] int64, numbers of rows."""
        return np.arange(len(self)) if self._is_ordered else np.random.default_rng((self._seed, epoch)).permutation(len(self))

    def at(self, number: int) -> Demonstration:
        """A row of the source. Raises `DataError` where it lacks a text or does not fit."""
        prompt = self._rows[number].get(self._prompt_column)
        prompt = prompt if isinstance(prompt, list) else self._text(number, self._prompt_column)
        before, is_chat = self._encoder.prompt(prompt, self._rows[number]), self._encoder.is_chat(prompt)
        completion = self._encoder.continuation(self._text(number, self._completion_column))
        token_ids = np.array([*before, *completion, self._end_of_turn if is_chat else self._end_of_text], np.int32)
        if not before or len(token_ids) > self._max_tokens:
            raise DataError(
                f"{self._source}, row {number}: {len(before)} tokens of prompt, {len(token_ids)} in all; expected at least one of"
                f" prompt and at most {self._max_tokens} in all (model.max_tokens, batch.max_tokens)"
            )
        return Demonstration(token_ids, len(before))

    def _text(self, number: int, column: str) -> str:
        text = self._rows[number].get(column)
        if not isinstance(text, str):
            raise DataError(
                f"{self._source}, row {number}: column {column!r} is {text!r}, expected text; it has {', '.join(self._rows[number])}"
            )
        return text


def read_rows(source: str, *, key: str, seed: int, at_most: int) -> tuple[Sequence[dict[str, Any]], bool]:
    """The rows of a JSONL file, or of what `path:name` names: rows, or a function that gives them, without arguments or with `seed`.

    Of rows that can only be read one after the other, and may never end, the first `at_most`; True then says that their order is meant.
    `key` is the setting that names the source.
    """
    if source.endswith(".jsonl"):
        return _read_jsonl(Path(source), key=key), False
    found = load_plugin(source)
    if callable(found):
        found = found(seed=seed) if "seed" in inspect.signature(found).parameters else found()
    if hasattr(found, "__len__"):
        return found, False  # pyright: ignore[reportReturnType]
    return list(itertools.islice(found, at_most)), True  # pyright: ignore[reportArgumentType]


def _read_jsonl(path: Path, *, key: str) -> list[dict[str, Any]]:
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"{key} {path} cannot be read: {error.strerror} (looked from {Path.cwd()})") from None
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
