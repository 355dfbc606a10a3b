"""Prompts without end, made of the rows of a file, a dataset or a Python function.

| `data.source` | rows | order |
| --- | --- | --- |
| `x.jsonl`, `x.ndjson` | one JSON object a line | shuffled anew each epoch |
| `x.parquet` | a Parquet table's rows | shuffled anew each epoch |
| `owner/name:config/split` | those of a data set of the Hub | shuffled anew each epoch |
| `reasoning-gym:chain_sum?size=2000` | tasks that are generated (`pipelinerl.data.reasoning_gym`) | shuffled anew each epoch |
| `path:name` of a list, a `datasets.Dataset`, or a function that returns one | its items | shuffled anew each epoch |
| `path:name` of a generator function or another iterable | what it yields | as it yields them, never shuffled |

Several sources with weights are one: `source = { "a.jsonl" = 2, "b.jsonl" = 1 }` draws two rows of the first for one of the second, each
source through epochs of its own, in one epoch that never ends.

A function is called without arguments, or with `seed=` if it takes that: the run's seed, plus the epoch for a function that makes an
iterator, which is called anew each epoch. An iterator that never ends is one epoch that never ends. `data.limit` takes the first rows
only, and makes a list of those an iterable yields.

The position (epoch, row) names the next row to draw; `row` counts draws within the epoch, rows skipped included. What is drawn follows
from the source, the seed and the position alone: a source set to a recorded position goes on exactly as the recorded one would have.
With `data.difficulty`, prompts between the positions are passed over by what was measured of them: told the same, it passes over the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from orchestrator.data.rows import Table, open_rows
from orchestrator.rules.curriculum import Curriculum, Rest, epoch_and_number
from pipelinerl.config import Config, DataSection
from pipelinerl.data.columns import NotJson, json_value
from pipelinerl.data.images import COLUMN, num_images, read_images
from pipelinerl.data.tokenizer import TextEncoder
from pipelinerl.engine.kv import context_of
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.messages import Images, Prompt

MAX_SKIPPED_OF_STREAM = 10_000
"""Prompts too long in a row after which an iterable, which may never end, is given up. Smaller gives up on long stretches of them."""


class PromptSource:
    """Draws prompts, epoch after epoch."""

    def __init__(self, section: DataSection, *, encoder: TextEncoder, seed: int, max_prompt_tokens: int) -> None:
        self.num_skipped_too_long = 0
        """Prompts not given out because they have more than `max_prompt_tokens` tokens."""
        self._max_prompt_tokens = max_prompt_tokens
        self._build = PromptBuilder(prompt_column=section.prompt_column, encoder=encoder)
        self._rows = open_rows(section, seed=seed)
        self._curriculum = Curriculum(low=section.difficulty[0], high=section.difficulty[1]) if section.difficulty else None
        if self._curriculum and not self._rows.comes_again:
            raise DataError(
                f"{self._rows.name} has no rows that come again, so data.difficulty cannot rest any: name a table, or set data.limit"
            )
        self._epoch, self._row = 0, 0
        self._num_skipped_since = 0
        self._shortest_skipped: int | None = None
        if isinstance(self._rows, Table):
            self._build.prompt(0, self._rows[0], epoch=0, where=self._rows.where(0))  # a missing column is found before anything runs

    @property
    def position(self) -> tuple[int, int]:
        """The pair (epoch, row) of the next draw."""
        return self._epoch, self._row

    @position.setter
    def position(self, position: tuple[int, int]) -> None:
        epoch, row = position
        num_rows = len(self._rows) if isinstance(self._rows, Table) else math.inf
        if epoch < 0 or not 0 <= row <= num_rows:
            raise DataError(
                f"{self._rows.name}: no row {row} of epoch {epoch}: the source has {num_rows} rows. Resume with the same source."
            )
        self._epoch, self._row = epoch, row
        self._num_skipped_since = 0

    @property
    def resting(self) -> dict[int, Rest]:
        """Prompts that rest, by number; a resumed run puts those here that rested before."""
        return {} if self._curriculum is None else self._curriculum.resting

    def measured(self, prompt_id: str, *, success: float) -> None:
        """Tell the curriculum which part of a prompt's scored siblings was correct."""
        if self._curriculum is not None:
            epoch, number = epoch_and_number(prompt_id)
            self._curriculum.measured(number, epoch=epoch, success=success)

    def next(self) -> Prompt:
        """Return the next prompt that is short enough, and does not rest (`rules.curriculum`).

        Raises `DataError` where the source is empty, a row is malformed, or a whole epoch (of an iterable: `MAX_SKIPPED_OF_STREAM`
        prompts in a row) is too long.
        """
        while True:
            drawn = self._rows.draw(self._epoch, self._row)
            if drawn is None:
                self._end_epoch()
                continue
            self._row += 1
            epoch, number, row = drawn
            if self._curriculum is not None and not self._curriculum.draws(number, epoch=epoch):
                continue
            prompt = self._build.prompt(number, row, epoch=epoch, where=self._rows.where(number))
            if len(prompt.token_ids) <= self._max_prompt_tokens:
                self._num_skipped_since = 0
                return prompt
            self._skip(len(prompt.token_ids))

    def _skip(self, num_tokens: int) -> None:
        self.num_skipped_too_long += 1
        self._num_skipped_since += 1
        self._shortest_skipped = min(num_tokens, self._shortest_skipped or num_tokens)
        if not isinstance(self._rows, Table) and self._num_skipped_since >= MAX_SKIPPED_OF_STREAM:
            raise self._all_too_long()

    def _end_epoch(self) -> None:
        if self._row == 0:
            raise DataError(f"{self._rows.name} yields no rows")
        if self._num_skipped_since >= self._row:
            raise self._all_too_long()
        self._epoch, self._row = self._epoch + 1, 0

    def _all_too_long(self) -> DataError:
        return DataError(
            f"{self._rows.name}: {self._num_skipped_since} prompts in a row are too long: at most {self._max_prompt_tokens} tokens are"
            f" allowed, the shortest of them has {self._shortest_skipped}. Shorten the prompts, or raise model.max_tokens."
        )


def prompts_of(config: Config, *, encoder: TextEncoder) -> tuple[PromptSource, list[Prompt]]:
    """Return the training source and the held-out prompts, both in the model's own tokens."""
    longest = longest_prompt(config)
    source = PromptSource(config.data, encoder=encoder, seed=config.run.seed, max_prompt_tokens=longest)
    if config.evaluation.source is None:
        return source, []
    held_out = fixed(
        config.evaluation.source,
        limit=config.evaluation.limit,
        prompt_column=config.data.prompt_column,
        encoder=encoder,
        max_prompt_tokens=longest,
    )
    return source, held_out


def longest_prompt(config: Config) -> int:
    """Return the longest prompt, in tokens, that leaves room for `rollout.max_tokens`; 0 where none does.

    Raises `ConfigError` where the model names no context.
    """
    context = context_of(config.model.path, max_tokens=config.model.max_tokens)
    if context is None:
        raise ConfigError(
            f"model.max_tokens is not set, and {config.model.path / 'config.json'} names no context length. Set model.max_tokens."
        )
    return max(0, min(context, config.batch.max_tokens) - config.rollout.max_tokens)


def fixed(source: str, *, limit: int, prompt_column: str, encoder: TextEncoder, max_prompt_tokens: int) -> list[Prompt]:
    """Return the first `limit` prompts of a source, in its own order: the same at every evaluation.

    Raises `DataError` as `PromptSource` does, and where one of them is too long: a held-out set never shrinks silently.
    """
    section = DataSection.model_validate({"source": source, "prompt_column": prompt_column, "shuffle": False, "limit": limit})
    rows, build = open_rows(section, seed=0), PromptBuilder(prompt_column=prompt_column, encoder=encoder)
    assert isinstance(rows, Table), "a limit makes a table of everything"
    prompts = [build.prompt(number, rows[number], epoch=0, where=rows.where(number)) for number in range(len(rows))]
    for number, prompt in enumerate(prompts):
        if len(prompt.token_ids) > max_prompt_tokens:
            raise DataError(
                f"{rows.where(number)}: the prompt has {len(prompt.token_ids)} tokens, at most {max_prompt_tokens} are allowed."
                " Leave it out of the held-out set, or raise model.max_tokens."
            )
    return prompts


class PromptBuilder:
    """The rule by which a row becomes a prompt."""

    def __init__(self, *, prompt_column: str, encoder: TextEncoder) -> None:
        self.prompt_column = prompt_column
        self._encoder = encoder

    def prompt(self, number: int, row: Any, *, epoch: int, where: str) -> Prompt:
        """Return the prompt of a row. Raises `DataError` naming `where` and what is wrong with the row."""
        columns = self.columns(row, where=where)
        value = row[self.prompt_column]
        images = read_images(row, num=num_images(value), where=where)
        text = self.text(row, where=where, images=images)
        token_ids = self.token_ids(value, text, where=where)
        messages = _plain([{"role": "user", "content": value}] if isinstance(value, str) else value, self.prompt_column, where)
        chat = tuple(messages) if self._encoder.is_chat(value) else ()
        ids = np.asarray(token_ids, np.int32)
        return Prompt(prompt_id=f"{epoch}:{number}", text=text, token_ids=ids, columns=columns, chat=chat, images=images)

    def columns(self, row: Any, *, where: str) -> dict[str, Any]:
        """Return all columns but the prompt's, and but its images where it has some. Raises `DataError`."""
        if not isinstance(row, Mapping):
            raise DataError(f"{where}: a {type(row).__name__}, expected a dictionary of columns")
        if self.prompt_column not in row:
            raise DataError(
                f"{where}: no column {self.prompt_column!r}; there are {', '.join(map(repr, row)) or 'none'}. Set data.prompt_column."
            )
        own = {self.prompt_column} | ({COLUMN} if num_images(row[self.prompt_column]) else set())
        return {_name(name, where): _plain(value, name, where) for name, value in row.items() if name not in own}

    def text(self, row: Mapping[str, Any], *, where: str, images: Images | None = None) -> str:
        """Return the prompt as the model sees it: its text, or messages rendered by the chat template. Raises `DataError`.

        `images` are the row's, which are read where they are not given.
        """
        value = row[self.prompt_column]
        if isinstance(value, str):
            return self._rendered(value, row, where=where)
        is_chat = isinstance(value, list | tuple) and all(isinstance(message, Mapping) and "role" in message for message in value)
        if not is_chat or not value:
            kind = type(value).__name__
            raise DataError(f"{where}: column {self.prompt_column!r} is a {kind}, expected text or a list of chat messages with roles")
        if images is None:
            images = read_images(row, num=num_images(value), where=where)
        return self._rendered(_plain(value, self.prompt_column, where), row, where=where, images=images)

    def _rendered(self, value: Any, row: Mapping[str, Any], *, where: str, images: Images = ()) -> str:
        try:
            return self._encoder.text(value, row, images=images)
        except DataError as error:
            raise DataError(f"{where}: {error}") from error
        except ConfigError as error:
            raise DataError(f"{where}: its messages have an image, and {error}") from error
        except Exception as error:  # a model's chat template is a program of its own
            raise DataError(f"{where}: the model's chat template refuses these messages: {type(error).__name__}: {error}") from error

    def token_ids(self, value: Any, text: str, *, where: str) -> list[int]:
        """Return the tokens of a prompt's column whose `text` is known. Raises `DataError` where there are none."""
        try:
            token_ids = self._encoder.token_ids(text, is_chat=self._encoder.is_chat(value))
        except Exception as error:  # a tokenizer may refuse a character in words of its own
            raise DataError(f"{where}: column {self.prompt_column!r} cannot be tokenised: {type(error).__name__}: {error}") from error
        if not len(token_ids):
            raise DataError(f"{where}: column {self.prompt_column!r} is empty, expected text that makes at least one token")
        return token_ids


def _name(name: Any, where: str) -> str:
    if not isinstance(name, str):
        raise DataError(f"{where}: the name of a column is {name!r}, expected text")
    return name


def _plain(value: Any, name: str, where: str) -> Any:
    """Return the value of a column in plain JSON. Raises `DataError` naming row and column."""
    try:
        return json_value(value)
    except NotJson as error:
        raise DataError(
            f"{where}: column {name!r} holds {error}, which JSON cannot say. Text, finite numbers of 64 bits, dates, lists, objects and"
            " null travel to rewards: convert it, or leave the column out."
        ) from None
