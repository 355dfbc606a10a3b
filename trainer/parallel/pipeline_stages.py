"""Cuts a loaded model into the stages of a pipeline: runs of layers, the embeddings with the first, the head with the last.

What another rank holds is replaced by a module without weights that hands on what it is given. So every stage is still the model that
Hugging Face's code expects, each weight keeps its name, and a layer its number.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from pipelinerl.config.layout import Layout
from pipelinerl.errors import ConfigError


class MissingLayer(torch.nn.Module):
    """Stands in the place of a module that another rank holds."""

    def forward(self, hidden: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """Hand on the hidden states."""
        return hidden


def stage_of_weights(module: PreTrainedModel, *, layout: Layout) -> dict[str, int]:
    """Say which stage holds each tensor of a whole model, by its name. Raises `ConfigError` for a model that cannot be cut so."""
    parts = set(module.config.base_model_pp_plan or ())
    if parts != {"embed_tokens", "layers", "norm"}:
        raise ConfigError(
            f"{type(module).__name__} is no sequence of embeddings, layers and one norm that its code says how to cut. The nearest that"
            f" works: trainer.{layout.without('pipeline')}"
        )
    num_stages = layout.num_stages
    base: Any = module.base_model
    names = {child: name for name, child in module.named_modules()}
    stage_of_layer = {
        f"{names[base.layers]}.{number}.": stage
        for stage in range(num_stages)
        for number in layers_of(stage, num_stages=num_stages, num_layers=len(base.layers))
    }
    embeddings = f"{names[module.get_input_embeddings()]}."

    def stage_of(name: str) -> int:
        layer = next((stage for prefix, stage in stage_of_layer.items() if name.startswith(prefix)), None)
        return layer if layer is not None else 0 if name.startswith(embeddings) else num_stages - 1

    return {name: stage_of(name) for name in module.state_dict()}


def keep_stage(module: PreTrainedModel, *, stage: int, num_stages: int) -> None:
    """Leave in a whole model what one stage holds. The last keeps embeddings that are its output layer, too."""
    base: Any = module.base_model
    mine = layers_of(stage, num_stages=num_stages, num_layers=len(base.layers))
    for number in range(len(base.layers)):
        if number not in mine:
            base.layers[number] = MissingLayer()
    is_last = stage == num_stages - 1
    if stage and not (is_last and has_tied_embeddings(module)):
        module.set_input_embeddings(MissingLayer())
    if not is_last:
        base.norm = MissingLayer()
        for name, child in list(module.named_children()):
            if child is not base:  # the head, of words or of a value
                setattr(module, name, MissingLayer())


def layers_of(stage: int, *, num_stages: int, num_layers: int) -> range:
    """The layers of a stage: as many in each, and the odd ones to the earlier, because the last computes the logits as well."""
    return range(-(-num_layers * stage // num_stages), -(-num_layers * (stage + 1) // num_stages))


def has_tied_embeddings(module: PreTrainedModel) -> bool:
    """Say whether the output layer's matrix is that of the input embeddings."""
    head: Any = module.get_output_embeddings()
    return head is not None and getattr(head, "weight", None) is getattr(module.get_input_embeddings(), "weight", object())
