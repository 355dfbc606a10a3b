"""Tasks of the package `reasoning-gym` as a source of rows: `reasoning-gym:chain_sum?min_terms=2&max_terms=2&size=2000&seed=1`.

The part before `?` is the name of one of its generators, what follows are fields of that generator's own config, `size` (rows) and
`seed` among them. A row has the question in the prompt's column, `answer` and `metadata` as the generator gives them, and `dataset` and
`row`, from which the reward `pipelinerl.rewards.functions.builtin:reasoning_gym` makes the entry again: its `score_answer` then sees what
it expects, and not what JSON leaves of it.

A row is generated when it is drawn, by the sum of seed and number, so `seed=1` holds the rows of `seed=0` but one: held-out rows need a
seed further away than the training rows are many. The default seed is 0 and does not follow `run.seed`: runs that differ in that train the
same rows.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import urllib.parse
from collections.abc import Mapping
from typing import Any

from pipelinerl.errors import ConfigError
from pipelinerl.runtime.plugin import nearest

PREFIX = "reasoning-gym:"


def is_spec(source: str) -> bool:
    """Return whether a source names a generator of reasoning-gym."""
    return source.startswith(PREFIX)


class GymRows:
    """The rows of a spec, generated when they are read."""

    def __init__(self, spec: str, *, prompt_column: str) -> None:
        """Raises `ConfigError` for a spec that does not stand for a generator."""
        self._spec, self._prompt_column = spec, prompt_column
        self._dataset = dataset_of(spec)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, number: int) -> dict[str, Any]:
        entry = self._dataset[number]
        columns = {"answer": entry["answer"], "metadata": entry["metadata"], "dataset": self._spec, "row": number}
        return {self._prompt_column: entry["question"]} | columns


@functools.lru_cache(maxsize=8)
def dataset_of(spec: str) -> Any:
    """Return the `ProceduralDataset` of a spec. Raises `ConfigError`: the package, the name, an option or its value is wrong."""
    name, options = parse(spec)
    try:
        package = importlib.import_module("reasoning_gym")
        generators = importlib.import_module("reasoning_gym.factory").DATASETS
    except ImportError as error:
        raise ConfigError(f"{spec} needs the package reasoning-gym ({error}): pip install 'pipelinerl[gym]'") from None
    if name not in generators:
        hint = nearest(name, generators) or f": it has {', '.join(sorted(generators))}"
        raise ConfigError(f"{spec}: reasoning-gym has no dataset {name!r}{hint}")
    fields = [field.name for field in dataclasses.fields(generators[name][1])]
    for option in options:
        if option not in fields:
            raise ConfigError(f"{spec}: {name} has no option {option!r}{nearest(option, fields)}; it has {', '.join(fields)}")
    try:
        return package.create_dataset(name, **{"seed": 0, **options})
    except Exception as error:  # a generator checks its config by assertions, and compares whatever it was given
        raise ConfigError(f"{spec}: {name} refuses its options: {type(error).__name__}: {error}") from error


def parse(spec: str) -> tuple[str, dict[str, Any]]:
    """Return the generator's name and its options, each value as JSON where it is JSON, else as text. Raises `ConfigError`."""
    name, _, query = spec.removeprefix(PREFIX).partition("?")
    example = f"expected {PREFIX}NAME or {PREFIX}NAME?option=value&option=value, for example {PREFIX}chain_sum?max_terms=2&size=2000"
    try:
        pairs = urllib.parse.parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError:
        raise ConfigError(f"{spec}: {query!r} is not option=value pairs: {example}") from None
    if not name:
        raise ConfigError(f"{spec}: no name of a dataset: {example}")
    options: dict[str, Any] = {}
    for option, text in pairs:
        if option in options:
            raise ConfigError(f"{spec}: {option} stands twice")
        options[option] = _value(text)
    return name, options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return {"True": True, "False": False, "None": None}.get(text, text)


@functools.lru_cache(maxsize=1024)
def entry_of(spec: str, number: int) -> Mapping[str, Any]:
    """Return a row as its generator gives it: question, answer and metadata in their own types."""
    return dataset_of(spec)[number]
