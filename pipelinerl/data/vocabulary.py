"""The tokens that a model knows, according to its folder: whoever takes token ids from outside checks them against it."""

from __future__ import annotations

import json
from typing import Any

from pipelinerl.config import Config

FAKE_VOCABULARY = 1000
"""The vocabulary size of `pipelinerl.engine.fake`, which has no model."""


def vocabulary_of(config: Config) -> int | None:
    """Return the rows of the model's embedding, which often exceed its tokenizer's tokens; None where the folder does not say."""
    if config.engine.kind == "fake":
        return FAKE_VOCABULARY
    size = language_model_of(config).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def language_model_of(config: Config) -> dict[str, Any]:
    """Read the description of the language model; return an empty one where it cannot be read, since loading the model will report that."""
    try:
        tree = json.loads((config.model.path / "config.json").read_text())
        return {**tree, **(tree.get("text_config") or {})}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
