"""A run of layers that transformers' own code computes, cut over ranks by `trainer.parallel.sharding`: every family, every layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from transformers import PreTrainedModel

from pipelinerl.config.trainer_memory import ActivationCheckpointing
from pipelinerl.errors import ConfigError
from trainer.model import varlen
from trainer.model.checkpointing import checkpoint_options
from trainer.model.compiling import compile_parts
from trainer.model.stage import StagePlan
from trainer.parallel.boxes import packed_dimensions, placed
from trainer.parallel.context import gather_outputs
from trainer.parallel.sharding import ParameterSharding, local, spread
from trainer.rows.packed_row import PackedRow, Vision


def build(module: PreTrainedModel, plan: StagePlan) -> TransformersStage:
    """Cut a loaded model down to this rank's share of a stage, in place."""
    if plan.activation_checkpointing is not ActivationCheckpointing.NONE:
        _recompute_layers(module, plan.activation_checkpointing)
    if plan.is_compiled:
        compile_parts(module.base_model.layers, device=plan.device)  # pyright: ignore[reportArgumentType]  # a list of modules
    stage = TransformersStage(module, plan)
    stage.shardings = spread(
        module,
        stage,
        replicas=plan.replicas,
        dtype=plan.dtype,
        held_dtype=plan.held_dtype,
        index=plan.index,
        prefetch_layers=plan.prefetch_layers,
        is_offloaded=plan.is_offloaded,
    )
    if plan.is_offloaded:
        for buffer in module.buffers():
            buffer.data = buffer.to(plan.device)
    elif any(tensor.device != plan.device for tensor in (*module.parameters(), *module.buffers())):
        module.to(plan.device)  # pyright: ignore[reportArgumentType]  # transformers annotates it as a function of anything
    return stage


class TransformersStage(torch.nn.Module):
    """The module that one forward pass runs: one call, so that sharded weights are there for the whole of it."""

    def __init__(self, module: PreTrainedModel, plan: StagePlan) -> None:
        super().__init__()
        self.rows: Sequence[PackedRow] = ()
        self.length = 0
        self.shardings: Sequence[ParameterSharding] = ()
        self.module = module
        self.words = plan.words
        self._is_first, self._is_last = plan.is_first, plan.is_last
        replicas = plan.replicas
        self._context = replicas.mesh("context").get_group() if replicas.layout.context > 1 else None

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {name: parameter for name, parameter in self.module.named_parameters() if parameter.requires_grad}

    def weights(self) -> Mapping[str, torch.Tensor]:
        return self.module.state_dict()

    def placed(self, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        packed, parameters = packed_dimensions(self.module), self.trainable()
        return {
            name: placed(piece, like=parameters[name].detach(), packed=packed(name)) for name, piece in pieces.items() if name in parameters
        }

    def forward(self, given: PackedRow | torch.Tensor, number: torch.Tensor | None = None) -> Any:
        """Return the outputs of the row `given` of a whole model; a stage of a pipeline computes as `trainer.parallel.pipeline` says."""
        if isinstance(given, PackedRow):
            inputs = (
                {"input_ids": given.token_ids[None]} if given.vision is None else {"inputs_embeds": self._with_images(given, given.vision)}
            )
            return self._outputs(given, self._run_layers(given, **inputs))
        assert number is not None
        row = self.rows[int(number)]
        if self._is_first:
            hidden = self._run_layers(row, input_ids=row.token_ids[None])
        else:
            hidden = self._run_layers(row, inputs_embeds=given[:, : len(row.token_ids)])
        return self._outputs(row, hidden) if self._is_last else F.pad(hidden, (0, 0, 0, self.length - hidden.shape[1]))

    def _with_images(self, row: PackedRow, vision: Vision) -> torch.Tensor:
        """[1, I, H] embeddings of the row's tokens, with the features of its images in the place of their placeholders."""
        model: Any = self.module
        if not hasattr(model, "get_image_features"):
            raise ConfigError(f"{type(model).__name__} takes no images, and a row has some: a reference has to be of the policy's family")
        found = model.get_image_features(pixel_values=vision.pixels[None], pixel_attention_mask=vision.mask[None]).pooler_output
        embeddings = model.get_input_embeddings()(row.token_ids)
        return embeddings.index_copy(0, vision.places, found.flatten(0, 1)[vision.features].to(embeddings.dtype))[None]

    def _run_layers(self, row: PackedRow, **given: torch.Tensor) -> torch.Tensor:
        """[1, I, H] hidden states."""
        first = 0 if self._context is None else self._context.rank() * len(row.positions)
        device = row.positions.device
        spans = varlen.spans_of(row.blocks, device=device, first=first) if varlen.has_kernel(device) else None
        return self.module.base_model(
            **given,
            position_ids=row.positions[None],
            use_cache=False,
            blocks=row.blocks,
            spans=spans,
            group=self._context,
            routes=row.routes,
        ).last_hidden_state

    def _outputs(self, row: PackedRow, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = hidden[0, row.sources]
        head: Any = self.module.get_output_embeddings()
        outputs = (self._values(hidden),) if self.words is None else self.words(hidden, local(head.weight), row)
        if self._context is None:
            return outputs
        columns = gather_outputs(torch.stack(outputs, 1), self._context)[row.order]
        return tuple(column.clone() for column in columns.unbind(1))  # not views: FSDP hangs the start of the backward pass on them

    def _values(self, hidden: torch.Tensor) -> torch.Tensor:
        score: Any = self.module.score
        return hidden.float() @ local(score.weight).float()[0] + local(score.bias).float()


def _recompute_layers(module: PreTrainedModel, choice: ActivationCheckpointing) -> None:
    module.gradient_checkpointing_enable(checkpoint_options(choice))
    layers: Any = module.base_model.layers
    for layer in layers:
        layer.training = True  # of the layer alone, which asks for it: the modules in it have no dropout still
