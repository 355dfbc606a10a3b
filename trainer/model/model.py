"""A model of the trainer: loaded from a Hugging Face folder, run on packed rows, named as Hugging Face names it.

Log-probabilities come out as the engine defines them, so that the two can be compared token by token: logits divided by the sampling
temperature, softmax in float32 over the whole vocabulary, natural logarithm. Logits exist only for the tokens that predict a trained one,
and never all at once. A value model is the same without an output embedding: one number per hidden state instead.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from pipelinerl.config.backends import TrainerBackend
from pipelinerl.config.trainer_memory import ActivationCheckpointing
from pipelinerl.errors import ConfigError
from pipelinerl.weights.adapters import published_name
from pipelinerl.weights.device_memory import free_bytes
from trainer.model import megatron_stage, torchtitan_stage, transformers_stage
from trainer.model.columns import words_of
from trainer.model.loading import dtype_on_disk, has_values, language_model, value_model
from trainer.model.logits import LogitRule, logit_rule_of
from trainer.model.lora import Adapters, Merger, adapted, add_adapters, is_adapter
from trainer.model.routing_replay import RoutingReplay
from trainer.model.stage import Stage, StagePlan
from trainer.parallel.pipeline import Pipeline
from trainer.parallel.pipeline_stages import stage_of_weights
from trainer.parallel.replicas import Replicas
from trainer.parallel.sharding import ParameterSharding, forget_gradients, fsdp_parameters, hold_gradients, local, reducing, reshard
from trainer.rows.packed_row import PackedRow, TeacherStates

_BUILD = {
    TrainerBackend.FSDP2: transformers_stage.build,
    TrainerBackend.TORCHTITAN: torchtitan_stage.build,
    TrainerBackend.MEGATRON: megatron_stage.build,
}


class Model:
    """This rank's share of a language model. What computes or gathers is called by all ranks of a replica, in the same order."""

    def __init__(
        self,
        folder: Path,
        *,
        dtype: str,
        temperature: float,
        device: torch.device,
        replicas: Replicas | None = None,
        activation_checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE,
        is_compiled: bool = False,
        prefetch_layers: int = 1,
        has_float32_head: bool = False,
        is_offloaded: bool = False,
        gives_values: bool = False,
        is_frozen: bool = False,
        adapters: Adapters | None = None,
        replay_routing: bool = False,
        gives_square_sums: bool = False,
        divergence_mix: float | None = None,
        holds_gradients: bool | None = None,
        backend: TrainerBackend = TrainerBackend.FSDP2,
    ) -> None:
        """Load the weights. Raises `ConfigError` where the folder cannot be loaded or the dtype cannot be trained in.

        `activation_checkpointing` says what of a layer is computed again in the backward pass in place of being kept for it. With
        `is_compiled` norms and feed-forward layers are compiled. Of sharded layers, `prefetch_layers` are gathered ahead of the one that
        computes; with `is_offloaded`, the weights stay on the host but for these. With `gives_values` this is a value model,
        of values 0 where the folder holds a language model only. With `adapters` those are trained, and nothing else. `replay_routing`
        sends tokens to the experts that their row names. `gives_square_sums` adds up squared probabilities over all
        words, too; with `divergence_mix` rows with teachers have divergences from them. `holds_gradients`: see the attribute; by default
        where the device has room for that. `backend` is whose code computes; `pipelinerl.config.backends` knows what each cannot do.
        """
        if dtype == "float16":
            raise ConfigError("model.dtype float16 cannot be trained: sums of gradients leave its range; use bfloat16 or float32")
        replicas = replicas or Replicas(ranks=1, deadline_s=0.0)
        layout = replicas.layout
        self.dtype = getattr(torch, dtype)
        self.device = device
        self.temperature = temperature
        self.is_sharded = layout.ranks > layout.copies
        """True where no rank holds all the weights."""
        self.writes = replicas.rank == 0
        """True on the rank that writes the model down."""
        self.shardings: list[ParameterSharding] = []
        """The sharding of each of `parameters` over the ranks."""
        self._replicas = replicas
        self._stages: list[Stage] = []
        of_words: dict[str, Any] = {"gives_square_sums": gives_square_sums, "divergence_mix": divergence_mix}
        of_words["has_float32_head"] = has_float32_head
        for index in replicas.stages:
            held_dtype = torch.float32 if layout.shard > 1 and not is_frozen else self.dtype
            # As the files have them, whose memory all ranks of a machine share: `spread` makes pieces of another dtype, layer by layer.
            read_dtype = (dtype_on_disk(folder) if layout.shard > 1 else None) or held_dtype
            module = value_model(folder, dtype=read_dtype) if gives_values else language_model(folder, dtype=read_dtype)
            module.requires_grad_(not is_frozen)
            if adapters is not None:
                add_adapters(module, adapters, dtype=held_dtype)
            rule = LogitRule() if gives_values else logit_rule_of(module)
            if rule.softcap is not None and divergence_mix is not None:
                raise ConfigError(
                    f"{type(module).__name__} caps its logits (final_logit_softcapping), and divergences from a teacher's whole"
                    " distribution are not written for that: choose another model, or a method that reads the sampled tokens alone (opd)"
                )
            # No dropout and no router noise: the log-probabilities must be those of the engine. Gradients flow all the same.
            module.eval()
            self.tied_names = _tied_names(module) if has_values() else frozenset[str]()
            """Names that are another name for a parameter already named: a published policy may leave them out."""
            self._stage_of = stage_of_weights(module, layout=layout) if layout.pipeline > 1 else {}
            self._adapted = frozenset(adapted(module))
            shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
            self.adapter_shapes = {name: shape for name, shape in shapes.items() if is_adapter(name)}
            """The shapes of the adapters, by the name that the module has for them; none where all weights are trained."""
            self.shapes = {name: shape for name, shape in shapes.items() if not is_adapter(name)}
            """The shapes of all weights of the model, by the name transformers' module has for them."""
            if replay_routing:
                RoutingReplay(module)
            plan = StagePlan(
                replicas=replicas,
                index=index,
                words=None if gives_values else words_of(module, rule=rule, temperature=temperature, replicas=replicas, **of_words),
                dtype=self.dtype,
                held_dtype=held_dtype,
                device=device,
                activation_checkpointing=activation_checkpointing,
                is_compiled=is_compiled,
                prefetch_layers=prefetch_layers,
                is_offloaded=is_offloaded,
            )
            stage = _BUILD[backend](module, plan)
            self.shardings += stage.shardings
            self._stages.append(stage)
        self.extras = ("square_sums",) * gives_square_sums + ("divergence",) * (divergence_mix is not None)
        """Names of what `outputs` gives of a language model beside log-probabilities and entropies, as in `trainer.backend.Outputs`."""
        self.module = self._stages[0].module
        """The model of transformers, or, of a pipeline, this rank's first stage of it."""
        may_hold_gradients = self._may_hold_gradients and backend is TrainerBackend.FSDP2
        self.holds_gradients = may_hold_gradients and (
            self._has_room_for_gradients(replicas) if holds_gradients is None else holds_gradients
        )
        """Gradients of whole weights stay here, in float32, from row to row, and are reduced once a step, by `sum_gradients`."""
        for stage in self._stages if self.holds_gradients else ():
            hold_gradients(stage)
        self.pipeline: Pipeline | None = None
        """The pipeline through the ranks that share the layers; None where none do."""
        if layout.pipeline > 1:
            hidden_size = int(self.module.config.hidden_size)
            num_columns = 1 if gives_values else 3 if gives_square_sums else 2
            self.pipeline = Pipeline(self._stages, num_columns=num_columns, hidden_size=hidden_size, dtype=self.dtype, replicas=replicas)

    def logprobs(self, row: PackedRow) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ([K] float32 log-probability of every trained token, [K] float32 entropy in nats), both with gradient.

        Where a pipeline shares the layers, only without: gradients are those of `Pipeline.train`.
        """
        logprobs, entropy, *_ = self.outputs(row)
        return logprobs, entropy

    def states(self, row: PackedRow) -> tuple[torch.Tensor, TeacherStates]:
        """Return ([K] float32 log-probabilities, what the distributions at `row.sources` are made of), both without gradient.

        Of a model whose layers no pipeline shares. The states stay as they are whatever becomes of the model's memory meanwhile.
        """
        words = self._stages[0].words
        assert words is not None, "a value model has no distributions"
        words.keeps_states = True
        try:
            with torch.no_grad():
                logprobs, _ = self.logprobs(row)
            assert words.states is not None
            return logprobs, words.states
        finally:
            words.keeps_states, words.states = False, None

    @property
    def num_words(self) -> int:
        """Rows of the output embedding, on all ranks."""
        words = self._stages[-1].words
        return 0 if words is None else words.num_words

    def outputs(self, row: PackedRow) -> tuple[torch.Tensor, ...]:
        """Return these as they come: (values,), or (log-probabilities, entropies) and `extras`, divergences of rows with teachers only."""
        if row.parts:
            found = [self.outputs(part) for part in row.parts]
            return tuple(torch.cat(columns)[row.order] for columns in zip(*found, strict=True))
        if self.pipeline is not None:
            assert not torch.is_grad_enabled(), "a row by itself is no work for a pipeline"
            outputs = self.pipeline.outputs(row)
        else:
            outputs = self._stages[0](row)
        if not torch.is_grad_enabled():
            for stage in self._stages:
                reshard(stage)  # no backward pass will
        return outputs

    def sum_gradients(self, row: PackedRow) -> None:
        """Reduce the gradients held since the last time, by the passes of `row`, from which nothing is learned."""
        (stage,) = self._stages
        with reducing(stage):
            torch.stack([column.sum() for column in self.outputs(row)]).sum().backward()

    def forget_gradients(self) -> None:
        """Drop the gradients that are held."""
        for stage in self._stages if self.holds_gradients else ():
            forget_gradients(stage)

    @property
    def _may_hold_gradients(self) -> bool:
        """A pipeline reduces once for each of its passes by itself; frozen weights have none."""
        layout = self._replicas.layout
        return layout.shard > 1 and layout.pipeline == 1 and bool(self.parameters())

    def _has_room_for_gradients(self, replicas: Replicas) -> bool:
        """Say whether float32 gradients of whole weights take at most a quarter of what gradients and moments of the pieces leave free."""
        num_held = sum(local(parameter.detach()).numel() for parameter in self.parameters())
        claim = False
        if self.device.type == "cuda":
            left = free_bytes(self.device) - 3 * 4 * num_held
            claim = 4 * num_held * replicas.layout.shard * replicas.layout.context <= left // 4
        return replicas.all_agree(claim, what="to settle whether gradients are reduced once a step")

    def parameters(self) -> list[torch.nn.Parameter]:
        """This rank's piece of every parameter once, tied ones too."""
        return list(self.named_parameters().values())

    def named_parameters(self) -> dict[str, torch.nn.Parameter]:
        """The same by transformers' name."""
        return {name: parameter for stage in self._stages for name, parameter in stage.trainable().items()}

    def placed(self, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Give `pieces` that are spread like the parameters of these names: the same memory, each at its place in the whole, as a box."""
        return {name: piece for stage in self._stages for name, piece in stage.placed(pieces).items()}

    def tensors(self) -> dict[str, torch.Tensor]:
        """The present weights by Hugging Face name, tied ones under each of their names; whole ones, gathered where they are spread.

        Mostly the weights themselves, not copies, where they are not spread.
        """
        return {
            published: part
            for name, tensor in self.state()
            for published, part in revert_weight_conversion(self.module, {name: tensor}).items()
        }

    def state(self, names: Collection[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        """The present weights by the name transformers' module has for them (by default all `shapes`), whole, adapters merged into them.

        In the dtype the model computes in. All ranks gather them together.
        """
        held = self.pieces()
        for name in self.shapes if names is None else names:
            yield name, self._whole(name, held)

    def pieces(self) -> dict[str, torch.Tensor]:
        """Give what this rank holds of the present weights and of the adapters, by the module's names; the two are not merged."""
        return {name: tensor.detach() for stage in self._stages for name, tensor in stage.weights().items()}

    def fsdp_parameters(self) -> list[Any]:
        """Return what FSDP keeps of each parameter that it has sharded."""
        return [held for stage in self._stages for held in fsdp_parameters(stage)]

    def mergers(self) -> dict[str, Merger]:
        """By name of each weight with an adapter of which this rank has a part: what merges it. Ranks gather the adapters together."""
        pieces = self.pieces()
        return {
            f"{name}.weight": Merger(layer=layer, first=_whole(pieces[f"{name}.lora_A"]), second=_whole(pieces[f"{name}.lora_B"]))
            for stage in self._stages
            for name, layer in adapted(stage.module).items()
        }

    def _whole(self, name: str, held: Mapping[str, torch.Tensor]) -> torch.Tensor:
        owner = self._stage_of.get(name, 0) % self._replicas.layout.pipeline
        if owner == self._replicas.place("pipeline"):
            weight = _whole(held[name])
            if self.is_adapted(name):
                prefix = name.removesuffix("weight")
                layer = {name: layer for stage in self._stages for name, layer in adapted(stage.module).items()}[prefix.removesuffix(".")]
                weight = layer.merged(weight, _whole(held[prefix + "lora_A"]), _whole(held[prefix + "lora_B"]))
            weight = weight.to(self.dtype) if weight.is_floating_point() else weight
        else:
            weight = torch.empty((self.shapes | self.adapter_shapes)[name], dtype=self.dtype, device=self.device)
        if self.pipeline is not None:
            self.pipeline.send_to_all(weight, owner=owner)
        return weight

    def is_adapted(self, name: str) -> bool:
        """Say whether an adapter is merged into this weight."""
        return name.endswith(".weight") and name.removesuffix(".weight") in self._adapted

    def adapter_state(self) -> dict[str, torch.Tensor]:
        """The adapters alone, whole; empty where all weights are trained."""
        held = self.pieces()
        return {name: self._whole(name, held) for name in self.adapter_shapes}

    def adapters(self) -> dict[str, torch.Tensor]:
        """The same by the names they are published under. All ranks gather them together."""
        return {published_name(name): tensor for name, tensor in self.adapter_state().items()}

    def described_adapters(self) -> dict[str, torch.Tensor]:
        """The same without memory, for their shapes; nothing is gathered."""
        return {published_name(name): torch.empty(shape, device="meta") for name, shape in self.adapter_shapes.items()}


def _whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _tied_names(module: PreTrainedModel) -> frozenset[str]:
    owners = {name for name, _ in module.named_parameters()}
    named = {parameter.data_ptr() for parameter in module.parameters()}
    tensors = revert_weight_conversion(module, {name: tensor.detach() for name, tensor in module.state_dict().items()})
    return frozenset(name for name, tensor in tensors.items() if name not in owners and tensor.data_ptr() in named)
