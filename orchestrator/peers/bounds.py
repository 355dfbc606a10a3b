"""The bounds of what an engine can answer: the tokens and the experts that exist, according to the model's folder."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.rules.validation.completions import Experts
from pipelinerl.config import Config

FAKE_VOCABULARY = 1000
"""The vocabulary size of `pipelinerl.engine.fake`, which has no model."""


def vocabulary_of(config: Config) -> int | None:
    """Return the rows of the model's embedding, which often exceed its tokenizer's tokens; None where the folder does not say."""
    if config.engine.kind == "fake":
        return FAKE_VOCABULARY
    size = _model(config).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def experts_of(config: Config) -> Experts | None:
    """Return the size of a mixture of experts whose routes travel; None where none do. A size that the folder does not give sets no
    bound.
    """
    if not config.model.replay_routing:
        return None
    model = _model(config)
    num_experts = model.get("num_experts") or model.get("num_local_experts")
    return Experts(num_layers=model.get("num_hidden_layers"), num_experts=num_experts, top_k=model.get("num_experts_per_tok"))


def _model(config: Config) -> dict[str, Any]:
    """Read the description of the language model; return an empty one where it cannot be read, since loading the model will report that."""
    try:
        tree = json.loads((config.model.path / "config.json").read_text())
        return {**tree, **(tree.get("text_config") or {})}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
