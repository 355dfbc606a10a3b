"""What the model's folder says of the tokens and the experts that there are: bounds of what an engine can answer."""

from __future__ import annotations

import json
from typing import Any

from orchestrator.rules.validation.completions import Experts
from pipelinerl.config import Config

FAKE_VOCABULARY = 1000
"""Of `pipelinerl.engine.fake`, which has no model."""


def vocabulary_of(config: Config) -> int | None:
    """Rows of the model's embedding, more than its tokenizer has tokens in many a folder; None where the folder does not say."""
    if config.engine.kind == "fake":
        return FAKE_VOCABULARY
    size = _model(config).get("vocab_size")
    return size if isinstance(size, int) and size > 0 else None


def experts_of(config: Config) -> Experts | None:
    """Of a mixture whose routes travel; None where none do. What the folder does not say bounds nothing."""
    if not config.model.replay_routing:
        return None
    model = _model(config)
    num_experts = model.get("num_experts") or model.get("num_local_experts")
    return Experts(num_layers=model.get("num_hidden_layers"), num_experts=num_experts, top_k=model.get("num_experts_per_tok"))


def _model(config: Config) -> dict[str, Any]:
    """What describes the language model; nothing where it cannot be read, which whoever loads the model will say."""
    try:
        tree = json.loads((config.model.path / "config.json").read_text())
        return {**tree, **(tree.get("text_config") or {})}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}
