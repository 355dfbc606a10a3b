"""The bounds of what an engine can answer: the experts that exist, according to the model's folder."""

from __future__ import annotations

from orchestrator.rules.validation.completions import Experts
from pipelinerl.config import Config
from pipelinerl.data.vocabulary import language_model_of


def experts_of(config: Config) -> Experts | None:
    """Return the size of a mixture of experts whose routes travel; None where none do. A size that the folder does not give sets no
    bound.
    """
    if not config.model.replay_routing:
        return None
    model = language_model_of(config)
    num_experts = model.get("num_experts") or model.get("num_local_experts")
    return Experts(num_layers=model.get("num_hidden_layers"), num_experts=num_experts, top_k=model.get("num_experts_per_tok"))
