"""A run of layers that torchtitan's models compute, sharded and cut over ranks by torchtitan (0.3, `spmd_backend="partial_dtensor"`).

Its models take their parts by configuration, so three things in them are ours: attention over packed rows (`trainer.model.attention`), the
last step from hidden states to log-probabilities, and rotary embeddings in Hugging Face's order of dimensions, so that every weight is the
very one of the folder, under another name. What torchtitan brings is the modules, tensor parallelism, FSDP2 with its prefetching, HSDP, and
recomputation of layers. Its FSDP reduces gradients after every row.

Sequence parallelism is off: it takes rows of a length that tensor parallelism divides, and ours have any.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from transformers import PreTrainedModel

from pipelinerl.config.backends import TrainerBackend, check_installed
from pipelinerl.config.layout import Layout
from pipelinerl.config.trainer_memory import ActivationCheckpointing
from trainer.model import varlen
from trainer.model.attention import packed_attention
from trainer.model.stage import StagePlan
from trainer.parallel.boxes import box_of, placed
from trainer.parallel.pipeline_stages import layers_of
from trainer.parallel.sharding import ParameterSharding, local, num_copies
from trainer.rows.packed_row import PackedRow


def build(module: PreTrainedModel, plan: StagePlan) -> TorchtitanStage:
    """Build torchtitan's form of a loaded model, cut down to this rank's share of a stage; `module` then keeps names and shapes alone.

    Raises `ConfigError` where torchtitan is not installed.
    """
    titan = _Titan(plan.device)
    settings: Any = module.config
    model_config, adapter = titan.config_of(settings)
    with torch.device("meta"):
        model = model_config.build()
    _keep_stage(model, plan=plan, num_layers=settings.num_hidden_layers)
    stage = TorchtitanStage(module, model, plan=plan, names=adapter(model_config, None).from_hf_map)
    if plan.replicas.size > 1:
        titan.parallelize(model, plan=plan, is_tied=settings.tie_word_embeddings)
        stage.find_shardings()
    elif (recompute := titan.recompute(plan.activation_checkpointing)) is not None:
        recompute.build(dump_folder="").apply(model)
    model.to_empty(device=plan.device)
    model.init_states(buffer_device=plan.device)
    stage.load(module.state_dict())
    module.to("meta")  # pyright: ignore[reportArgumentType]  # transformers annotates it as a function of anything
    return stage


class TorchtitanStage(torch.nn.Module):
    """A `trainer.model.stage.Stage` around one of torchtitan's models."""

    def __init__(self, module: PreTrainedModel, model: Any, *, plan: StagePlan, names: Mapping[str, str | None]) -> None:
        super().__init__()
        self.rows: Sequence[PackedRow] = ()
        self.length = 0
        self.words = plan.words
        self.shardings: Sequence[ParameterSharding] = [ParameterSharding() for _ in model.parameters()]
        self.__dict__["module"] = module  # not a part of this one: none of its weights is used
        self.model = model
        self._plan = plan
        self._names = {theirs: ours for ours, theirs in names.items() if theirs is not None}
        self._row: PackedRow | None = None
        """The row that is computed."""
        for layer in model.layers.values():
            # Set on the instance before torchtitan wraps it, which makes local tensors of what it is given.
            layer.attention.inner_attention.forward = functools.partial(_attend, layer.attention.inner_attention)
        if plan.is_last:
            model.lm_head.forward = self._of_words

    def trainable(self) -> dict[str, torch.nn.Parameter]:
        return {self._name(name): parameter for name, parameter in self.model.named_parameters()}

    def weights(self) -> Mapping[str, torch.Tensor]:
        return {self._name(name): parameter.detach() for name, parameter in self.model.named_parameters(remove_duplicate=False)}

    def placed(self, pieces: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        parameters = self.trainable()
        return {name: placed(piece, like=parameters[name].detach()) for name, piece in pieces.items() if name in parameters}

    def find_shardings(self) -> None:
        """Learn how torchtitan has cut the weights. Its FSDP sums every gradient over all ranks that hold the same piece."""
        ranks = self._plan.replicas.size // self._plan.replicas.layout.pipeline
        self.shardings = [ParameterSharding(num_copies=num_copies(parameter, ranks=ranks)) for parameter in self.model.parameters()]

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's piece of every weight out of whole ones."""
        with torch.no_grad():
            for name, weight in self.weights().items():
                box = box_of(weight, tuple(weight.shape))
                local(weight).copy_(state[name][tuple(slice(first, end) for first, end in box)])

    def forward(self, given: PackedRow | torch.Tensor, number: torch.Tensor | None = None) -> Any:
        """Return the outputs of the row `given` of a whole model; a stage of a pipeline computes as `trainer.parallel.pipeline` says."""
        if isinstance(given, PackedRow):
            return self._run(given, given.token_ids[None])
        assert number is not None
        row = self.rows[int(number)]
        if self._plan.is_first:
            output = self._run(row, row.token_ids[None])
        else:
            output = self._run(row, self._replicated(given[:, : len(row.token_ids)]))
        return output if self._plan.is_last else F.pad(_whole(output), (0, 0, 0, self.length - output.shape[1]))

    def _run(self, row: PackedRow, given: torch.Tensor) -> Any:
        self._row = row
        return self.model(given, positions=row.positions[None], attention_masks=row)

    def _of_words(self, input: torch.Tensor) -> tuple[torch.Tensor, ...]:  # as torchtitan's plan names it
        """The last module's forward pass, within torchtitan's, so that its FSDP has the weights there."""
        assert self.words is not None
        assert self._row is not None
        return self.words(_whole(input)[0, self._row.sources], local(self.model.lm_head.weight), self._row)

    def _replicated(self, hidden: torch.Tensor) -> torch.Tensor:
        layout = self._plan.replicas.layout
        if layout.tensor == 1:
            return hidden
        return DTensor.from_local(hidden, dimensions_of(layout).get_mesh("tp"), [Replicate()], run_check=False)

    def _name(self, theirs: str) -> str:
        """A weight's name in the folder."""
        theirs = theirs.replace("_checkpoint_wrapped_module.", "")  # of a layer that is recomputed
        number = re.search(r"\d+", theirs)
        return self._names[theirs] if number is None else self._names[re.sub(r"\d+", "{}", theirs, count=1)].format(number[0])


class _Titan:
    """torchtitan's modules, imported when a run asks for them."""

    def __init__(self, device: torch.device) -> None:
        check_installed(TrainerBackend.TORCHTITAN)
        tools: Any = importlib.import_module("torchtitan.tools.utils")
        tools.device_type, tools.device_module = device.type, getattr(torch, device.type)  # it takes CUDA where it finds no accelerator
        importlib.import_module("torch.testing._internal.distributed.fake_pg")  # the backend of its meshes of one rank
        self._utils: Any = importlib.import_module("torchtitan.distributed.utils")
        self._utils.set_spmd_backend("partial_dtensor")
        self._config: Any = importlib.import_module("torchtitan.config.configs")
        self._common: Any = importlib.import_module("torchtitan.models.common")
        self._parts: Any = importlib.import_module("torchtitan.models.common.config_utils")
        self._attention: Any = importlib.import_module("torchtitan.models.common.attention")

    def config_of(self, settings: Any) -> tuple[Any, Any]:
        """(torchtitan's settings of the model that transformers' `settings` describe, the class that knows its names)."""
        family = {"qwen3": "qwen3", "llama": "llama3"}[settings.model_type]
        kind: Any = importlib.import_module(f"torchtitan.models.{family}")
        cutting: Any = importlib.import_module(f"torchtitan.models.{family}.sharding")
        title = family.capitalize()
        nothing = dict.fromkeys(("weight", "bias"), _leave)
        size, words = settings.hidden_size, settings.vocab_size
        head_size = getattr(settings, "head_dim", None) or size // settings.num_attention_heads

        def norm(length: int) -> Any:
            return self._common.RMSNorm.Config(normalized_shape=length, eps=settings.rms_norm_eps, param_init=nothing)

        def layer() -> Any:
            return getattr(kind, f"{title}TransformerBlock").Config(
                attention_norm=norm(size),
                ffn_norm=norm(size),
                attention=self._parts.make_gqa_config(
                    dim=size,
                    n_heads=settings.num_attention_heads,
                    n_kv_heads=settings.num_key_value_heads,
                    head_dim=head_size,
                    wqkv_param_init=nothing,
                    wo_param_init=nothing,
                    inner_attention=self._attention.ScaledDotProductAttention.Config(),
                    rope=self._common.CosSinRoPE.Config(
                        dim=head_size, max_seq_len=settings.max_position_embeddings, theta=settings.rope_parameters["rope_theta"]
                    ),
                    qk_norm=norm(head_size) if family == "qwen3" else None,
                ),
                feed_forward=self._parts.make_ffn_config(
                    dim=size, hidden_dim=settings.intermediate_size, w1_param_init=nothing, w2w3_param_init=nothing
                ),
            )

        config = getattr(kind, f"{title}Model").Config(
            dim=size,
            vocab_size=words,
            norm=norm(size),
            tok_embeddings=self._common.Embedding.Config(num_embeddings=words, embedding_dim=size, param_init=nothing),
            lm_head=self._common.Linear.Config(in_features=size, out_features=words, param_init=nothing),
            layers=[layer() for _ in range(settings.num_hidden_layers)],
            enable_weight_tying=settings.tie_word_embeddings,
        )
        further = {"enable_ep": False} if family == "qwen3" else {}
        getattr(cutting, f"set_{family}_sharding_config")(config, enable_sp=False, **further)
        heads = config.lm_head.sharding_config
        heads.out_src_shardings = heads.out_dst_shardings = None  # columns, the same on every rank
        return config, getattr(kind, f"{title}StateDictAdapter")

    def recompute(self, choice: ActivationCheckpointing) -> Any:
        """torchtitan's settings for computing layers again in the backward pass; None where nothing is."""
        if choice is ActivationCheckpointing.NONE:
            return None
        kinds = importlib.import_module("torchtitan.distributed.activation_checkpoint")
        return (kinds.FullAC if choice is ActivationCheckpointing.FULL else kinds.SelectiveAC).Config()

    def parallelize(self, model: Any, *, plan: StagePlan, is_tied: bool) -> None:
        """Cut a model, whose weights are not there yet, by torchtitan's own function for its family."""
        layout = plan.replicas.layout
        parallelism = self._config.ParallelismConfig(
            data_parallel_replicate_degree=layout.copies,
            data_parallel_shard_degree=layout.shard,
            tensor_parallel_degree=layout.tensor,
            pipeline_parallel_degree=layout.pipeline,
            spmd_backend="partial_dtensor",
        )
        dtype = str(plan.dtype).removeprefix("torch.")
        if is_tied:
            model.parallelize = functools.partial(_parallelize_tied, model, model.parallelize)
        family = importlib.import_module(type(model).__module__.rpartition(".")[0] + ".parallelize")
        function = next(value for name, value in vars(family).items() if name.startswith("parallelize_"))
        function(
            model,
            parallel_dims=dimensions_of(layout),
            training=self._config.TrainingConfig(mixed_precision_param=dtype),
            parallelism=parallelism,
            compile_config=self._config.CompileConfig(),
            ac_config=self.recompute(plan.activation_checkpointing),
            dump_folder="",
        )
        for part in model.modules():
            if isinstance(part, FSDPModule):
                part.set_force_sum_reduction_for_comms(True)  # a factor of 1 by itself is a kind of sum that gloo does not know


@functools.cache  # its meshes are groups of processes, which all stages share
def dimensions_of(layout: Layout) -> Any:
    """A layout as torchtitan's `ParallelDims`, with its meshes; they number the ranks as `pipelinerl.config.layout` does."""
    distributed: Any = importlib.import_module("torchtitan.distributed")
    degrees = {"dp_replicate": layout.copies, "dp_shard": layout.shard, "tp": layout.tensor, "pp": layout.pipeline}
    dimensions = distributed.ParallelDims(**degrees, cp=1, ep=1, world_size=layout.ranks, spmd_backend="partial_dtensor")
    dimensions.build_mesh()
    return dimensions


def _keep_stage(model: Any, *, plan: StagePlan, num_layers: int) -> None:
    """Leave in a whole model what one stage holds; torchtitan's models pass over what is not there."""
    mine = layers_of(plan.index, num_stages=plan.replicas.layout.num_stages, num_layers=num_layers)
    for number in range(num_layers):
        if number not in mine:
            del model.layers[str(number)]
    if not plan.is_first:
        model.tok_embeddings = None
    if not plan.is_last:
        model.norm = model.lm_head = None


def _attend(
    module: torch.nn.Module,
    q_BLNH: torch.Tensor,
    k_BLNH: torch.Tensor,
    v_BLNH: torch.Tensor,
    *,
    attention_masks: PackedRow,
    scale: float | None = None,
    **_: object,
) -> torch.Tensor:
    """Attend within a row as every other backend does, with the names that torchtitan's plan knows; [1, I, H, D]."""
    row, device = attention_masks, q_BLNH.device
    spans = varlen.spans_of(row.blocks, device=device) if varlen.has_kernel(device) else None
    query, key, value = (tensor.transpose(1, 2) for tensor in (q_BLNH, k_BLNH, v_BLNH))
    scaling = query.shape[-1] ** -0.5 if scale is None else scale
    return packed_attention(module, query, key, value, None, scaling=scaling, blocks=row.blocks, spans=spans)[0]


def _parallelize_tied(model: Any, parallelize: Any, dimensions: Any) -> None:
    """Cut a model's matrices, and have both embeddings be one again: torchtitan makes a new parameter of each."""
    parallelize(dimensions)
    model.tok_embeddings.weight = model.lm_head.weight


def _whole(hidden: torch.Tensor) -> torch.Tensor:
    """Hidden states that every rank has, and whose gradient every rank knows whole."""
    return hidden.to_local(grad_placements=[Replicate()] * hidden.device_mesh.ndim) if isinstance(hidden, DTensor) else hidden


def _leave(tensor: torch.Tensor) -> None:
    """Draw nothing: weights are copied."""
