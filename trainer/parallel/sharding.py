"""Spreads a loaded Hugging Face model over the ranks of a replica and of a shard group, in place, parameter by parameter.

What is cut how is transformers' own plan for the model; the cutting is torch's (DTensor, FSDP2). Three things differ from the plan, each
because the plan's way is wrong or slow in training:

- The embeddings are cut by words, input and output alike, so that tied ones stay one tensor and no rank ever holds all logits.
- A parameter that every rank holds whole and uses for its own heads only (the norms of Qwen3's queries and keys) has its gradient summed
  once per step. The plan's way sums the gradient *collected so far* after every backward pass: the second row of a step comes out wrong.
- Gradients are summed, never averaged, and never divided: the step divides once, by the global count.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
from transformers import PreTrainedModel
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, apply_expert_parallelism, apply_tensor_parallelism

from pipelinerl.errors import ConfigError
from trainer.parallel.pipeline_stages import MissingLayer, has_tied_embeddings, keep_stage
from trainer.parallel.replicas import Replicas

_SUMMED_BY_STEP = "replicated_with_grad_allreduce"
_BY_WORDS = "embedding_rowwise"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ParameterSharding:
    """The sharding of one parameter: what the step has to do about its gradient."""

    sums: tuple[dist.ProcessGroup, ...] = ()
    """Groups over which this rank's raw sum is still to be added up."""
    num_copies: int = 1
    """Ranks that hold this very piece."""


def spread(
    module: PreTrainedModel,
    stage: torch.nn.Module,
    *,
    replicas: Replicas,
    dtype: torch.dtype,
    held_dtype: torch.dtype,
    index: int = 0,
    prefetch_layers: int = 1,
    is_offloaded: bool = False,
) -> list[ParameterSharding]:
    """Cut `module`, which `stage` runs, down to this rank's share; return how each of its trainable parameters is held.

    `index` is the stage's place in the pipeline. Where the weights are sharded, every piece is held in `held_dtype`, whatever `module` has,
    and computes in `dtype`, and `prefetch_layers` are gathered ahead of the layer that computes; with
    `is_offloaded`, it stays on the host, and is on the device while its layer computes.
    """
    layout = replicas.layout
    if replicas.size == 1:
        return [ParameterSharding() for parameter in module.parameters() if parameter.requires_grad]
    summed_by_step: set[str] = set()
    experts: tuple[str, ...] = ()
    if layout.tensor > 1:
        summed_by_step = _cut_matrices(module, replicas=replicas, cuts_experts=layout.expert == 1)
    if layout.expert > 1:
        experts = _cut_experts(module, replicas=replicas)
    at_both_ends = ""
    if layout.pipeline > 1:
        if has_tied_embeddings(module) and index in (0, layout.num_stages - 1):
            at_both_ends = next(name for name, tensor in module.named_parameters() if tensor is module.get_input_embeddings().weight)
        keep_stage(module, stage=index, num_stages=layout.num_stages)
        here = {name for name, _ in module.named_modules()}
        experts = tuple(prefix for prefix in experts if prefix.removesuffix(".") in here)
    if layout.shard > 1:
        _shard(module, stage, experts=experts, replicas=replicas, dtype=dtype, held_dtype=held_dtype, is_offloaded=is_offloaded)
        if layout.pipeline == 1:  # a pipeline's ranks gather each layer once, and keep it for the other rows
            _prefetch(module, num_layers=prefetch_layers)
    dense = group_of(replicas, "copy") if layout.shard > 1 else group_of(replicas, "copy", "shard", "context")
    partial = dense + group_of(replicas, "tensor")
    expert = ()
    if experts and layout.shard == 1 and replicas.expert_mesh["rest"].size() > 1:
        expert = (replicas.expert_mesh["rest"].get_group(),)

    def holding(name: str, parameter: torch.Tensor) -> ParameterSharding:
        sums = expert if name.startswith(experts) and experts else partial if name in summed_by_step else dense
        copies = num_copies(parameter, ranks=replicas.size // layout.pipeline)
        if name == at_both_ends:
            assert replicas.ends is not None
            return ParameterSharding(sums=(*sums, replicas.ends), num_copies=2 * copies)
        return ParameterSharding(sums=sums, num_copies=copies)

    return [holding(name, parameter) for name, parameter in module.named_parameters() if parameter.requires_grad]


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's piece of a tensor, sharing its memory; a tensor that is not spread is its own piece."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def num_copies(parameter: torch.Tensor, *, ranks: int) -> int:
    """Count those of `ranks` that hold the same piece as this one."""
    if not isinstance(parameter, DTensor):
        return ranks
    cuts = [size for size, placement in zip(parameter.device_mesh.shape, parameter.placements, strict=True) if not placement.is_replicate()]
    return ranks // math.prod(cuts)


def group_of(replicas: Replicas, *names: str) -> tuple[dist.ProcessGroup, ...]:
    """The ranks that differ from this one only in these dimensions of the mesh; empty where there is no other."""
    mesh = replicas.mesh(*names)
    return (mesh.get_group(),) if mesh.size() > 1 else ()


def reshard(stage: Any) -> None:
    """Give back the whole weights that a forward pass has gathered, after which no backward pass comes."""
    for part in stage.modules():
        if isinstance(part, FSDPModule):
            part.reshard()


def hold_gradients(stage: Any) -> None:
    """Have the gradients of sharded weights add up whole, in float32, on every rank, until `reducing`."""
    assert isinstance(stage, FSDPModule)
    stage.set_requires_gradient_sync(False)


@contextlib.contextmanager
def reducing(stage: Any) -> Iterator[None]:
    """Have a backward pass within reduce what `hold_gradients` held, layer by layer, together with its own."""
    assert isinstance(stage, FSDPModule)
    stage.set_requires_gradient_sync(True)
    try:
        yield
    finally:
        stage.set_requires_gradient_sync(False)


def forget_gradients(stage: Any) -> None:
    """Drop what `hold_gradients` holds; no rank waits for another."""
    for held in fsdp_parameters(stage):
        held.unsharded_accumulated_grad = None


def fsdp_parameters(stage: Any) -> Iterator[Any]:
    """Yield what FSDP keeps of each parameter that it has sharded."""
    for part in stage.modules():
        if isinstance(part, FSDPModule):
            for group in part._get_fsdp_state()._fsdp_param_groups:
                yield from group.fsdp_params


def whole_of(piece: torch.Tensor, *, mesh: DeviceMesh, placements: Sequence[Placement], shape: Sequence[int]) -> DTensor:
    """The tensor of which `piece` is this rank's, in the same memory, also on the host: `DTensor.from_local` would copy to the device."""
    meta = torch.empty(shape, dtype=piece.dtype, device="meta")
    spec = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(meta.shape, meta.stride(), meta.dtype))
    return DTensor(piece, spec, requires_grad=False)


def _cut_matrices(module: PreTrainedModel, *, replicas: Replicas, cuts_experts: bool) -> set[str]:
    """Tensor parallelism; return the names of parameters whose gradient each rank knows in part."""
    embedding, head = module.get_input_embeddings(), module.get_output_embeddings()
    assert isinstance(embedding, torch.nn.Embedding)
    is_tied = isinstance(head, torch.nn.Linear) and head.weight is embedding.weight
    module.init_parallel_plans()
    names = {child: name for name, child in module.named_modules()}
    plan = {name: style for name, style in module.tp_plan.items() if name != names.get(head)}
    if not plan:
        raise ConfigError(
            f"{type(module).__name__} comes with no plan for tensor parallelism. The nearest that works:"
            f" trainer.{replicas.layout.without('tensor')}"
        )
    if not cuts_experts:
        plan = {name: style for name, style in plan.items() if ".experts" not in name}
    norms = {name for name, style in plan.items() if style == _SUMMED_BY_STEP}
    plan = {name: style for name, style in plan.items() if name not in norms} | {names[embedding]: _BY_WORDS}
    mesh = replicas.mesh("tensor")
    apply_tensor_parallelism(module, mesh, plan)
    _cut_adapters(module)
    if isinstance(head, torch.nn.Linear):  # a value model has none
        ALL_PARALLEL_STYLES["colwise"].shard_param(head, "weight", mesh)  # its product is taken by `trainer.model.head`
        head.weight = embedding.weight if is_tied else head.weight
    wanted = re.compile("|".join(re.escape(name).replace(r"\*", r"\d+") + r"\.\w+" for name in norms) or r"(?!)")
    return {name for name, _ in module.named_parameters() if wanted.fullmatch(name)}


def _cut_adapters(module: torch.nn.Module) -> None:
    """Cut adapters (`lora_A`, `lora_B`) as W x and B (A x) ask for, after the plan has cut both as if they were W.

    Where W is cut by outputs, so is B, and every rank has all of A; where it is cut by inputs, so is A, and every rank has all of B.
    """
    for layer in module.modules():
        weight: Any = getattr(layer, "weight", None)
        if isinstance(weight, DTensor) and hasattr(layer, "lora_A"):
            name = "lora_A" if weight.placements[0].is_shard(0) else "lora_B"
            part: Any = getattr(layer, name)
            setattr(layer, name, torch.nn.Parameter(part.detach().redistribute(placements=[Replicate()])))


def _cut_experts(module: PreTrainedModel, *, replicas: Replicas) -> tuple[str, ...]:
    """Expert parallelism; return the prefixes of the experts' parameters."""
    module.init_parallel_plans()
    if not module.ep_plan:
        raise ConfigError(
            f"{type(module).__name__} comes with no plan for expert parallelism. The nearest that works:"
            f" trainer.{replicas.layout.without('expert')}"
        )
    apply_expert_parallelism(module, replicas.expert_mesh["expert"], replicas.mesh("tensor"), module.ep_plan)
    patterns = {re.compile(re.escape(name).replace(r"\*", r"\d+")) for name in module.ep_plan}
    return tuple(f"{name}." for name, _ in module.named_modules() if any(pattern.fullmatch(name) for pattern in patterns))


def _shard(
    module: PreTrainedModel,
    stage: torch.nn.Module,
    *,
    experts: tuple[str, ...],
    replicas: Replicas,
    dtype: torch.dtype,
    held_dtype: torch.dtype,
    is_offloaded: bool,
) -> None:
    """Fully sharded data parallelism, layer by layer, so that one alone is ever held whole; experts over the ranks of the same ones."""
    settings: dict[str, Any] = {"mp_policy": MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)}
    if is_offloaded:
        settings["offload_policy"] = CPUOffloadPolicy(pin_memory=replicas.device.type == "cuda")
    # A pipeline meets its layers again at once, with the next row.
    part_settings: dict[str, Any] = settings | {"reshard_after_forward": replicas.layout.pipeline == 1}
    mesh = replicas.mesh("shard", "context")
    for name in experts:
        part = module.get_submodule(name.removesuffix("."))
        part.forward = _without_views(part.forward)
        _cast(part, held_dtype)
        fully_shard(part, mesh=replicas.expert_mesh["rest"], **part_settings)
    layers: Any = module.base_model.layers
    for layer in layers:
        if not isinstance(layer, MissingLayer):
            _cast(layer, held_dtype)
            fully_shard(layer, mesh=mesh, **part_settings)
    _cast(stage, held_dtype)
    fully_shard(stage, mesh=mesh, **settings, reshard_after_forward=False)
    for part in stage.modules():
        if isinstance(part, FSDPModule):
            part.set_gradient_divide_factor(1.0)
            part.set_force_sum_reduction_for_comms(True)  # a factor of 1 by itself is a kind of sum that gloo does not know


def _prefetch(module: PreTrainedModel, *, num_layers: int) -> None:
    """Have so many layers gathered ahead of each, in both passes; torch by itself gathers one ahead, in the backward pass alone.

    Else a forward pass gathers a layer when it reaches it, and hides the wait only where the host runs ahead of the device.
    """
    layers: Any = module.base_model.layers
    for number, layer in enumerate(layers):
        layer.set_modules_to_forward_prefetch(_sharded_parts(layers[number : number + 1 + num_layers])[1:])
        layer.set_modules_to_backward_prefetch(_sharded_parts(reversed(layers[max(0, number - num_layers) : number + 1]))[1:])


def _sharded_parts(layers: Iterable[torch.nn.Module]) -> list[FSDPModule]:
    """Give the layers, and in each the experts that it has apart, in order."""
    return [part for layer in layers for part in layer.modules() if isinstance(part, FSDPModule)]


def _cast(part: torch.nn.Module, dtype: torch.dtype) -> None:
    """Have those parameters of a module that are not sharded yet in another dtype."""
    done = {module for sharded in part.modules() if isinstance(sharded, FSDPModule) for module in sharded.modules()}

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if isinstance(tensor, torch.nn.Parameter) and tensor.is_floating_point() else tensor

    for module in part.modules():
        if module not in done and any(parameter.dtype != dtype for parameter in module.parameters(recurse=False)):
            module._apply(cast, recurse=False)


def _without_views(forward: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Have a sharded module return a tensor of its own: FSDP hangs the start of the backward pass on it, which a view would lose."""

    def wrapped(*args: torch.Tensor) -> torch.Tensor:
        return forward(*args).clone()

    return wrapped
