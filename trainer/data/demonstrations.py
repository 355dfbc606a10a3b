"""Demonstrations for supervised fine-tuning from a source of rows, drawn in batches, epoch after epoch."""

from __future__ import annotations

import functools
import inspect
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from pipelinerl.config import Config
from pipelinerl.data.demonstrations import DemonstrationEncoder
from pipelinerl.data.tokenizer import load_tokenizer
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.messages import Demonstration
from pipelinerl.runtime.plugin import load_plugin


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
        self._seed = config.run.seed
        self._batch_size = section.batch_size
        self._encoder = DemonstrationEncoder(config, tokenizer=load_tokenizer(config.model.path), has_images=True)
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
        return self._encoder.encode(self._rows[number], where=f"{self._source}, row {number}")


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
