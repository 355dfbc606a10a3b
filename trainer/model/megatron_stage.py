"""A run of layers that Megatron-Core's modules compute (0.16, its local layer spec), cut by its tensor and pipeline parallelism.

Its layers take their attention by specification, so that three things in them are ours: attention over packed rows
(`trainer.model.attention`), rotary angles at a row's own positions, and the last step from hidden states to log-probabilities. Rows go
through a pipeline by `trainer.parallel.pipeline`, and `trainer.optimizer` sums and applies gradients: of Megatron-Core it is the model and
its cutting, not its schedules, data parallelism or optimizers, and no kernel of Transformer Engine. This much computes on a CPU as it is.
"""

from __future__ import annotations

import functools
import importlib
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from pipelinerl.config.backends import TrainerBackend, check_installed
from pipelinerl.config.layout import Layout
from pipelinerl.config.trainer_memory import ActivationCheckpointing
from trainer.model import varlen
from trainer.model.attention import packed_attention
from trainer.model.checkpointing import checkpoint_options
from trainer.model.megatron_names import Heads, cut_of, packed_of, parts_of
from trainer.model.stage import StagePlan
from trainer.parallel.boxes import placed
from trainer.parallel.pipeline_stages import layers_of
from trainer.parallel.sharding import ParameterSharding, group_of, whole_of
from trainer.rows.packed_row import PackedRow


def build(module: PreTrainedModel, plan: StagePlan) -> MegatronStage:
    """Build Megatron-Core's form of a loaded model's stage; `module` then keeps names and shapes alone.

    Raises `ConfigError` where Megatron-Core is not installed.
    """
    check_installed(TrainerBackend.MEGATRON)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns of kernels that are not there, and of itself: nothing of that is asked for here
        _meet(plan)
        model = _model_of(module.config, plan).to(plan.dtype)  # its norms are float32 at first
    stage = MegatronStage(module, model, plan=plan)
    stage.load(module.state_dict())
    stage.to(plan.device)
    module.to("meta")  # pyright: ignore[reportArgumentType]  # transformers annotates it as a function of anything
    return stage


class MegatronStage(torch.nn.Module):
    """A `trainer.model.stage.Stage` around one of Megatron-Core's models."""

    def __init__(self, module: PreTrainedModel, model: Any, *, plan: StagePlan) -> None:
        super().__init__()
        self.rows: Sequence[PackedRow] = ()
        self.length = 0
        self.words = plan.words
        self.__dict__["module"] = module  # not a part of this one: none of its weights is used
        self.model = model
        self._plan = plan
        settings: Any = module.config
        self._is_tied = bool(settings.tie_word_embeddings)
        self._heads = Heads.of(settings)
        self._theta = float(settings.rope_parameters["rope_theta"])
        self._shapes = {name: tensor.shape for name, tensor in module.state_dict().items()}
        layout = plan.replicas.layout
        self._tensor, self._place = layout.tensor, plan.replicas.place("tensor")
        self._first_layer = layers_of(plan.index, num_stages=layout.num_stages, num_layers=settings.num_hidden_layers).start
        self.shardings = [self._sharding(name) for name in self.trainable()]
        if plan.activation_checkpointing is not ActivationCheckpointing.NONE:
            for layer in model.decoder.layers:
                layer.forward = functools.partial(checkpoint, layer.forward, **checkpoint_options(plan.activation_checkpointing))

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {self._name(name): parameter for name, parameter in self.model.named_parameters()}

    def weights(self) -> Mapping[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        for theirs, weight in self.trainable().items():
            names = parts_of(theirs)
            for name, part in zip(names, self._heads.split(self._real(theirs, weight.detach()), num=len(names)), strict=True):
                found[name] = self._spread(part, cut=cut_of(theirs), shape=self._shapes[name])
        if self._is_tied:
            found["lm_head.weight"] = found["model.embed_tokens.weight"]
        return found

    def placed(self, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parameters = self.trainable()
        return {name: self._placed(name, piece) for name, piece in pieces.items() if name in parameters}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's piece of every weight out of whole ones."""
        with torch.no_grad():
            for theirs, weight in self.trainable().items():
                cut, parts = cut_of(theirs), [state[name] for name in parts_of(theirs)]
                if cut is not None:
                    parts = [part.tensor_split(self._edges(part.shape[cut]), cut)[self._place] for part in parts]
                weight.zero_()
                self._real(theirs, weight).copy_(self._heads.join(parts))

    def forward(self, given: PackedRow | torch.Tensor, number: torch.Tensor | None = None) -> Any:
        """Return the outputs of the row `given` of a whole model; a stage of a pipeline computes as `trainer.parallel.pipeline` says."""
        if isinstance(given, PackedRow):
            return self._outputs(given, self._run(given, given.token_ids[None]))
        assert number is not None
        row = self.rows[int(number)]
        hidden = self._run(row, row.token_ids[None] if self._plan.is_first else given[:, : len(row.token_ids)])
        return self._outputs(row, hidden) if self._plan.is_last else F.pad(hidden.transpose(0, 1), (0, 0, 0, self.length - len(hidden)))

    def _run(self, row: PackedRow, given: torch.Tensor) -> torch.Tensor:
        """[I, 1, H] hidden states."""
        if self._plan.is_first:
            hidden = self.model.embedding(input_ids=given, position_ids=row.positions[None])
        else:
            hidden = given.transpose(0, 1).contiguous()
            self.model.decoder.set_input_tensor(hidden)
        return self.model.decoder(hidden_states=hidden, attention_mask=row, rotary_pos_emb=self._angles(row.positions))

    def _outputs(self, row: PackedRow, hidden: torch.Tensor) -> tuple[torch.Tensor, ...]:
        assert self.words is not None
        theirs = "embedding.word_embeddings.weight" if self._is_tied else "output_layer.weight"
        weight = self.model.embedding.word_embeddings.weight if self._is_tied else self.model.output_layer.weight
        return self.words(hidden[row.sources, 0], self._real(theirs, weight), row)

    def _angles(self, positions: torch.Tensor) -> torch.Tensor:
        """[I, 1, 1, D] float32, for Megatron's own rotation."""
        size = self._heads.size
        frequencies = self._theta ** -(torch.arange(0, size, 2, dtype=torch.float32, device=positions.device) / size)
        return torch.outer(positions.float(), frequencies).repeat(1, 2)[:, None, None]

    def _real(self, theirs: str, weight: torch.Tensor) -> torch.Tensor:
        """A matrix over words without the rows that make it as long on every rank."""
        if theirs not in ("embedding.word_embeddings.weight", "output_layer.weight"):
            return weight
        num_words = self._shapes[parts_of(theirs)[0]][0]
        return weight[: min(len(weight), num_words - self._place * len(weight))]

    def _spread(self, piece: torch.Tensor, *, cut: int | None, shape: Sequence[int]) -> torch.Tensor:
        if cut is None or self._tensor == 1:
            return piece
        return whole_of(piece.contiguous(), mesh=self._plan.replicas.mesh("tensor"), placements=[Shard(cut)], shape=shape)

    def _placed(self, theirs: str, piece: torch.Tensor) -> torch.Tensor:
        piece, cut, shapes = self._real(theirs, piece), cut_of(theirs), [self._shapes[name] for name in parts_of(theirs)]
        shape = [sum(shape[0] for shape in shapes), *shapes[0][1:]]
        return placed(piece, like=self._spread(piece, cut=cut, shape=shape), packed=packed_of(theirs))

    def _sharding(self, theirs: str) -> ParameterSharding:
        """A norm of queries or keys is whole on every rank, which uses it for its own heads alone."""
        replicas = self._plan.replicas
        ranks = replicas.size // replicas.layout.pipeline
        if replicas.size == 1:
            return ParameterSharding()
        sums = group_of(replicas, "copy", "shard", "context")
        if "q_layernorm" in theirs or "k_layernorm" in theirs:
            sums += group_of(replicas, "tensor")
        return ParameterSharding(sums=sums, num_copies=ranks if cut_of(theirs) is None else ranks // self._tensor)

    def _edges(self, size: int) -> list[int]:
        step = -(-size // self._tensor)
        return list(range(step, size, step))

    def _name(self, theirs: str) -> str:
        """A weight's name in the whole model, whose layers are counted from its first."""
        return re.sub(r"(?<=^decoder\.layers\.)\d+", lambda number: str(self._first_layer + int(number[0])), theirs)


class _PackedAttention(torch.nn.Module):
    """Megatron's place for attention, without weights; its `attention_mask` is the row."""

    def __init__(self, **_: object) -> None:
        super().__init__()

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, attention_mask: PackedRow, **_: object) -> torch.Tensor:
        """[I, 1, H * D] of `query` [I, 1, H, D], `key` and `value` [I, 1, G, D]."""
        row, device = attention_mask, query.device
        spans = varlen.spans_of(row.blocks, device=device) if varlen.has_kernel(device) else None
        query, key, value = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        found = packed_attention(self, query, key, value, None, scaling=query.shape[-1] ** -0.5, blocks=row.blocks, spans=spans)[0]
        return found.flatten(2).transpose(0, 1)


def _imported(name: str) -> Any:
    return importlib.import_module(f"megatron.core.{name}")


def _meet(plan: StagePlan) -> None:
    """Have Megatron make its groups of ranks, which it numbers as `pipelinerl.config.layout` does; a process has one set of them."""
    if not dist.is_initialized():  # one rank, which is a group to Megatron
        backend = "nccl" if plan.device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    state = _imported("parallel_state")
    layout = plan.replicas.layout
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    state.initialize_model_parallel(
        tensor_model_parallel_size=layout.tensor, pipeline_model_parallel_size=layout.pipeline, create_gloo_process_groups=False
    )


def _model_of(settings: Any, plan: StagePlan) -> Any:
    """Megatron's form of the stage of a model that transformers' `settings` describe."""
    transformer, gpt, specs = _imported("transformer"), _imported("models.gpt"), _imported("models.gpt.gpt_layer_specs")
    _imported("tensor_parallel.random").initialize_rng_tracker()
    layout: Layout = plan.replicas.layout
    has_qk_norm = settings.model_type == "qwen3"
    config = transformer.TransformerConfig(
        num_layers=settings.num_hidden_layers,
        hidden_size=settings.hidden_size,
        ffn_hidden_size=settings.intermediate_size,
        num_attention_heads=settings.num_attention_heads,
        num_query_groups=settings.num_key_value_heads,
        kv_channels=Heads.of(settings).size,
        normalization="RMSNorm",
        layernorm_epsilon=settings.rms_norm_eps,
        qk_layernorm=has_qk_norm,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        params_dtype=plan.dtype,
        pipeline_dtype=plan.dtype,
        use_cpu_initialization=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        persist_layer_norm=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
    )
    spec = specs.get_gpt_layer_local_spec(qk_layernorm=has_qk_norm, normalization="RMSNorm")
    spec.submodules.self_attention.submodules.core_attention = _PackedAttention
    return gpt.GPTModel(
        config,
        spec,
        vocab_size=-(-settings.vocab_size // layout.tensor) * layout.tensor,
        max_sequence_length=settings.max_position_embeddings,
        pre_process=plan.is_first,
        post_process=plan.is_last,
        share_embeddings_and_output_weights=settings.tie_word_embeddings,
        position_embedding_type="none",
    )
