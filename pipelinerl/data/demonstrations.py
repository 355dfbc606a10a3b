"""Demonstrations for supervised fine-tuning: the one rule by which a row of a prompt and a completion becomes tokens.

The prompt is tokenised alone and the completion alone, as in RL, where the engine sees the prompt's tokens before any completion exists;
by the same rule, `pipelinerl.data.tokenizer.TextEncoder`. A completion ends with the token that ends it in RL, too: behind a chat the
end of turn that the template writes, behind plain text the tokenizer's EOS.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelinerl.config import Config
from pipelinerl.data.images import ImageProcessor, num_images, read_images
from pipelinerl.data.stop_tokens import stop_tokens_of
from pipelinerl.data.tokenizer import ChatOptions, TextEncoder
from pipelinerl.errors import ConfigError, DataError
from pipelinerl.messages import Demonstration


class DemonstrationEncoder:
    """Makes demonstrations of rows, by the settings of `data` and `sft.completion_column`."""

    def __init__(self, config: Config, *, tokenizer: Any, has_images: bool = False) -> None:
        """`tokenizer` is what `load_tokenizer` gives for `model.path`; without `has_images`, messages with an image are refused.

        Raises `ConfigError` where the tokenizer names no token that ends a text.
        """
        self._prompt_column, self._completion_column = config.data.prompt_column, config.sft.completion_column
        self._max_tokens = min(config.batch.max_tokens, config.model.max_tokens or config.batch.max_tokens)
        processor = functools.cache(lambda: ImageProcessor(config.model.path)) if has_images else None
        self._encoder = TextEncoder(tokenizer, options=ChatOptions.of(config.data), image_processor=processor)
        self._has_images = has_images
        stop_tokens = stop_tokens_of(config.model.path, tokenizer=tokenizer)
        if stop_tokens.end_of_text is None:
            raise ConfigError(f"the tokenizer in {config.model.path} names no end-of-sequence token: a completion could not be ended")
        self._end_of_text = stop_tokens.end_of_text
        self._end_of_turn = stop_tokens.end_of_text if stop_tokens.end_of_turn is None else stop_tokens.end_of_turn

    def encode(self, row: Mapping[str, Any], *, where: str) -> Demonstration:
        """Make a demonstration of a row. Raises `DataError`, which begins with `where`, for one that lacks a text or does not fit."""
        prompt = row.get(self._prompt_column)
        prompt = prompt if isinstance(prompt, list) else _text(row, self._prompt_column, where=where)
        images = read_images(row, num=num_images(prompt), where=where) if self._has_images else ()
        is_chat = self._encoder.is_chat(prompt)
        try:
            before = self._encoder.token_ids(self._encoder.text(prompt, row, images=images), is_chat=is_chat)
        except (DataError, ConfigError) as error:
            raise DataError(f"{where}: {error}") from error
        completion = self._encoder.continuation(_text(row, self._completion_column, where=where))
        token_ids = np.array([*before, *completion, self._end_of_turn if is_chat else self._end_of_text], np.int32)
        if not before or len(token_ids) > self._max_tokens:
            raise DataError(
                f"{where}: {len(before)} tokens of prompt, {len(token_ids)} in all; expected at least one of prompt and at most"
                f" {self._max_tokens} in all (model.max_tokens, batch.max_tokens)"
            )
        return Demonstration(token_ids=token_ids, num_prompt=len(before), images=images)


def _text(row: Mapping[str, Any], column: str, *, where: str) -> str:
    text = row.get(column)
    if not isinstance(text, str):
        raise DataError(f"{where}: column {column!r} is {text!r}, expected text; it has {', '.join(row)}")
    return text
