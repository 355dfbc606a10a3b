"""The layout in which a vLLM model wants a policy, so that its parameters are plain views of a policy's buffer.

At start the plan is recorded: which part of which kernel parameter each checkpoint tensor is copied to. From it follows a layout in
which the parts of a fused parameter (q, k and v; gate and up) lie side by side, so the trainer writes checkpoint tensors and the engine
reads kernel parameters, both as plain views of the same bytes, with no copy in between.

What would break this is found at start, not at the first swap: a parameter that no checkpoint tensor fills, or one that is filled in an
order of its own (`ConfigError`).
"""

from __future__ import annotations

import bisect
import json
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from pipelinerl.engine.vllm.experts import has_plain_experts, keep_plain_experts
from pipelinerl.engine.vllm.packed import is_plain
from pipelinerl.engine.vllm.rotary import rotate_every_head
from pipelinerl.errors import ConfigError
from pipelinerl.messages import Tensor
from pipelinerl.weights.base import num_bytes
from pipelinerl.weights.reshard import Box, Part, whole
from pipelinerl.weights.swap import CAN_SWAP_POINTER, Placed, SwapMode

ALIGNMENT_BYTES = 256
"""Start of every parameter in the buffer: a multiple of what vector loads and device copies like best."""
Filled = Mapping[str, Sequence[str]]
"""Checkpoint tensors by the parameter that they fill, in the order of a rank's buffer."""


def keep_plain_weights() -> None:
    """On CPU, have vLLM keep the weights of layers and experts as they are instead of packing them; must run before a model is loaded.

    Rotary positions are mended there, too (`rotary`).

    Layers are packed later, beside their plain weights, where that pays: see `pipelinerl.engine.vllm.packed`.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm.model_executor.layers.utils as layers

    if hasattr(layers.dispatch_cpu_unquantized_gemm, "packs"):
        return

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    plain.packs = layers.dispatch_cpu_unquantized_gemm  # pyright: ignore[reportFunctionMemberAccess]  # for `packed`
    layers.dispatch_cpu_unquantized_gemm = plain
    keep_plain_experts()
    rotate_every_head()


def obstacles_of(model: torch.nn.Module, *, captures_graphs: bool) -> dict[SwapMode, list[str]]:
    """Say what would break each swap mode: now, because at the first swap it would show as wrong tokens, or not at all."""
    found: dict[SwapMode, list[str]] = {mode: [] for mode in SwapMode}
    if captures_graphs:
        found[SwapMode.POINTER].append("captured graphs keep the addresses of the parameters (enforce_eager is off)")
    if _is_elsewhere(model):
        found[SwapMode.POINTER].append("the parameters are in a device's memory, and published policies in the host's")
    if not CAN_SWAP_POINTER:
        found[SwapMode.POINTER].append(f"torch {torch.__version__} cannot change the address of a storage in place")
    found[SwapMode.POINTER] += _kept_addresses(model)
    for reason in _transformed_layers(model):
        for mode in SwapMode:
            found[mode].append(reason)
    return found


def _kept_addresses(model: torch.nn.Module) -> list[str]:
    """Tensors beside the parameters that share memory with one: they would go on showing the old weights after a pointer swap."""
    owned = {parameter.untyped_storage().data_ptr(): name for name, parameter in model.named_parameters() if parameter.numel()}
    kept = [
        f"{prefix}.{name} shares memory with {owned[tensor.untyped_storage().data_ptr()]}"
        for prefix, module in model.named_modules()
        for name, tensor in (*vars(module).items(), *module._buffers.items())
        if isinstance(tensor, torch.Tensor) and tensor.numel() and tensor.untyped_storage().data_ptr() in owned
    ]
    return [f"{kept[0]}, and {len(kept) - 1} more like it"] if len(kept) > 1 else kept


def _transformed_layers(model: torch.nn.Module) -> list[str]:
    """Layers that compute with something else than the parameters they were loaded with."""
    modules = dict(model.named_modules())
    packed = [name for name, module in modules.items() if not is_plain(getattr(module, "cpu_linear", functional.linear))]
    methods = {name: getattr(module, "quant_method", None) for name, module in modules.items()}
    quantised = [name for name, method in methods.items() if method and not type(method).__name__.startswith("Unquantized")]
    repacked = [name for name, method in methods.items() if not has_plain_experts(method)]
    reasons = []
    if packed:
        reasons.append(f"{len(packed)} layers compute with a packed copy of their weight, for example {packed[0]}")
    if quantised:
        method = type(methods[quantised[0]]).__name__
        reasons.append(f"{len(quantised)} layers are quantised, for example {quantised[0]} ({method}): load an unquantised model")
    if repacked:
        kernel = type(getattr(methods[repacked[0]].moe_kernel, "fused_experts", None)).__name__  # pyright: ignore[reportOptionalMemberAccess]
        do = "leave engine.options.moe_backend at triton" if _is_elsewhere(modules[repacked[0]]) else "no such model can be served here"
        reasons.append(f"{len(repacked)} layers of experts are rearranged for their kernel, for example {repacked[0]} ({kernel}): {do}")
    return reasons


def _is_elsewhere(module: torch.nn.Module) -> bool:
    """True where a parameter is not in the host's memory."""
    return any(parameter.device.type != "cpu" for parameter in module.parameters())


def plan_of(model: torch.nn.Module, *, folder: Path, derived: Collection[str] = ()) -> tuple[list[Placed], tuple[Tensor, ...]]:
    """Plan the place of each parameter, and of each checkpoint tensor, in a policy's buffer.

    `derived` names parameters that vLLM makes of others: no checkpoint fills them (`pipelinerl.engine.vllm.derived`).

    Raises `ConfigError` for a model whose parameters are not its checkpoint's tensors laid side by side.
    """
    placed, parts, _ = plan_of_rank(model, folder=folder, derived=derived)
    shapes = checkpoint_shapes(folder)
    for name, pieces in parts.items():
        if len(pieces) > 1:
            raise ConfigError(f"vLLM splits or reorders {name} when it loads {folder}; such a model cannot yet be swapped by pointer")
        if pieces[0].box != whole(shapes[name]):
            raise ConfigError(f"vLLM takes a part of {name} alone, {pieces[0].box}; such a model cannot yet be swapped by pointer")
    return placed, tuple(sorted((pieces[0].tensor for pieces in parts.values()), key=lambda tensor: tensor.offset_bytes))


def whole_layout(ranks: Sequence[Filled], shapes: Mapping[str, tuple[int, ...]], dtypes: Mapping[str, str]) -> tuple[Tensor, ...]:
    """Return the layout that an engine of one rank asks for, from what each of several ranks fills its parameters with: so engines of one
    and of several ranks read the same policies.

    A parameter that several ranks fill has the tensors of all of them, in their order; a tensor that fills several lies in the first.
    """
    filled: dict[str, list[str]] = {}
    seen: set[str] = set()
    for rank in ranks:
        for parameter, names in rank.items():
            own = filled.setdefault(parameter, [])
            own += [name for name in names if name not in seen]
            seen.update(names)
    layout: list[Tensor] = []
    for names in filled.values():
        end = num_bytes(layout)
        offset = math.ceil(end / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
        for name in names:
            whole_tensor = _part(name, whole(shapes[name]), dtype=getattr(torch, dtypes[name]), offset_bytes=offset).tensor
            layout.append(whole_tensor)
            offset += whole_tensor.num_bytes
    return tuple(layout)


def plan_of_rank(
    model: torch.nn.Module, *, folder: Path, derived: Collection[str] = ()
) -> tuple[list[Placed], dict[str, list[Part]], Filled]:
    """Plan the place of each parameter of this rank, and of its parts of each checkpoint tensor, in a buffer of its own; with the tensors
    that fill each parameter, in their order in it.

    A rank has several parts of a tensor that the checkpoint has fused itself (q, k and v; gate and up): its own rows of each thing in it.

    Raises `ConfigError` for a model whose parameters are not boxes of its checkpoint's tensors laid side by side.
    """
    filled_by_policies = {name: one for name, one in model.named_parameters() if one.numel() and name not in derived}
    parameters, shared = _owners(filled_by_policies)
    checkpoint = _read_checkpoint(folder)
    recorder = _CopyRecorder(
        targets={parameter.untyped_storage().data_ptr(): name for name, parameter in parameters.items()},
        sources={tensor.untyped_storage().data_ptr(): name for name, tensor in checkpoint.items()},
    )
    with torch.no_grad(), recorder:
        model.load_weights(iter(checkpoint.items()))  # pyright: ignore[reportCallIssue]
    if recorder.computed:
        raise ConfigError(f"vLLM computes with {min(recorder.computed)} while it fills it; such a model cannot yet be swapped by pointer")
    offsets, placed = _place(parameters)
    parts: dict[str, list[Part]] = {}
    filled = dict.fromkeys(parameters, 0)
    for name, target, origin, source in recorder.copies:
        box = _box_of(source, checkpoint[origin])
        offset = offsets[name] + int(target.storage_offset() - parameters[name].storage_offset()) * target.element_size()
        if box is None or not target.is_contiguous():
            raise ConfigError(f"vLLM transposes or reorders {origin} when it fills {name}; such a model cannot yet be swapped")
        part, before = _part(origin, box, dtype=target.dtype, offset_bytes=offset), parts.setdefault(origin, [])
        joined = _joined(before[-1], part) if before else None
        before[-1:] = [joined] if joined is not None else [*before[-1:], part]
        filled[name] += target.numel()
    unfilled = [name for name, count in filled.items() if count != parameters[name].numel()]
    if unfilled:
        raise ConfigError(
            f"{len(unfilled)} of {len(parameters)} parameters of {folder} are not filled, or not once, by its checkpoint: {unfilled[:5]}."
            " vLLM transforms them after loading (quantised or fused experts?); such a model cannot yet be swapped by pointer"
        )
    for view, owner in shared:
        offset_bytes = offsets[owner] + view.data_ptr() - parameters[owner].data_ptr()
        placed.append(Placed(parameter=view, offset_bytes=offset_bytes, num_bytes=_span_bytes(view), is_view=True))
    in_order = sorted((part.tensor for pieces in parts.values() for part in pieces), key=lambda tensor: tensor.offset_bytes)
    return placed, parts, _filled(offsets, in_order)


def _filled(offsets: Mapping[str, int], tensors: Sequence[Tensor]) -> Filled:
    """The tensors of each parameter, both in the order of the buffer."""
    names, starts = list(offsets), list(offsets.values())
    filled: dict[str, list[str]] = {name: [] for name in names}
    for tensor in tensors:
        own = filled[names[bisect.bisect_right(starts, tensor.offset_bytes) - 1]]
        if tensor.name not in own:
            own.append(tensor.name)
    return filled


def _part(name: str, box: Box, *, dtype: torch.dtype, offset_bytes: int) -> Part:
    shape = tuple(end - first for first, end in box)
    num_bytes = math.prod(shape) * dtype.itemsize
    kind = str(dtype).removeprefix("torch.")
    return Part(box=box, tensor=Tensor(name=name, shape=shape, dtype=kind, offset_bytes=offset_bytes, num_bytes=num_bytes))


def _joined(one: Part, other: Part) -> Part | None:
    """Two pieces of one checkpoint tensor as one, where the second follows the first in the tensor and in memory; None where not.

    A tensor that the checkpoint has fused itself (q, k and v; gate and up) arrives in one piece for each of the things in it.
    """
    if not one.box or one.box[0][1] != other.box[0][0] or one.box[1:] != other.box[1:]:
        return None
    if one.tensor.offset_bytes + one.tensor.num_bytes != other.tensor.offset_bytes:
        return None
    box = ((one.box[0][0], other.box[0][1]), *one.box[1:])
    return _part(one.tensor.name, box, dtype=getattr(torch, one.tensor.dtype), offset_bytes=one.tensor.offset_bytes)


def _box_of(view: torch.Tensor, tensor: torch.Tensor) -> Box | None:
    """The box of a contiguous tensor that a view of it is; None where it is no box."""
    if view.dim() != tensor.dim() or any(
        ours != theirs for ours, theirs, size in zip(view.stride(), tensor.stride(), view.shape, strict=True) if size > 1
    ):
        return None
    box, rest = [], int(view.storage_offset() - tensor.storage_offset())
    for size, stride in zip(view.shape, tensor.stride(), strict=True):
        first, rest = divmod(rest, stride)
        box.append((first, first + size))
    return tuple(box)


def checkpoint_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of a folder's tensors, by name; no tensor is read."""
    shapes: dict[str, tuple[int, ...]] = {}
    for file in _checkpoint_files(folder):
        with safe_open(folder / file, framework="pt") as reader:
            shapes |= {name: tuple(reader.get_slice(name).get_shape()) for name in reader.keys()}  # noqa: SIM118
    return shapes


_FILLS = (torch.ops.aten.fill_.Scalar, torch.ops.aten.fill_.Tensor, torch.ops.aten.zero_.default)
"""Changes that do not hang on what was there: of the padding of a vocabulary, for example."""


class _CopyRecorder(TorchDispatchMode):
    """Notes every copy from a checkpoint tensor into a parameter. Nothing is written to parameters: they hold what loading leaves."""

    def __init__(self, *, targets: dict[int, str], sources: dict[int, str]) -> None:
        super().__init__()
        self.copies: list[tuple[str, torch.Tensor, str, torch.Tensor]] = []
        self.computed: set[str] = set()
        """Parameters that are computed with while they are filled: they do not hold what the checkpoint does."""
        self._targets = targets
        self._sources = sources

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func._schema.is_mutable and args and (name := self._target_of(args[0])) is not None:
            if func is torch.ops.aten.copy_.default:
                if (origin := self._sources.get(args[1].untyped_storage().data_ptr())) is not None:
                    self.copies.append((name, args[0], origin, args[1]))
            elif func not in _FILLS:
                self.computed.add(name)
            return args[0]
        return func(*args, **(kwargs or {}))

    def _target_of(self, value: Any) -> str | None:
        """The parameter that a tensor with anything in it is a part of; None where it is of none."""
        return self._targets.get(value.untyped_storage().data_ptr()) if isinstance(value, torch.Tensor) and value.numel() else None


def _owners(
    parameters: dict[str, torch.nn.Parameter],
) -> tuple[dict[str, torch.nn.Parameter], list[tuple[torch.nn.Parameter, str]]]:
    """The parameters that own their memory, and those that are views of another one's, with its name.

    Tied embeddings are the same tensor; W_UV and W_UK_T of latent attention are parts of kv_b_proj's weight, transposed.
    """
    sharing: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        sharing.setdefault(parameter.untyped_storage().data_ptr(), []).append(name)
    views: list[tuple[torch.nn.Parameter, str]] = []
    owners: dict[str, torch.nn.Parameter] = {}
    for names in sharing.values():
        owner = max(names, key=lambda name: parameters[name].numel())
        owners[owner] = parameters[owner]
        for name in names:
            if name != owner and not _is_within(parameters[name], parameters[owner]):
                raise ConfigError(f"the parameters {owner} and {name} share a part of their memory; such a model cannot be swapped")
            views += [(parameters[name], owner)] * (name != owner)
    return {name: owners[name] for name in parameters if name in owners}, views


def _is_within(part: torch.Tensor, owner: torch.Tensor) -> bool:
    """True where a tensor lies whole in the memory of a contiguous one, as elements of its kind."""
    first = part.data_ptr() - owner.data_ptr()
    return owner.is_contiguous() and part.dtype == owner.dtype and 0 <= first <= owner.nbytes - _span_bytes(part)


def _span_bytes(tensor: torch.Tensor) -> int:
    """From a tensor's first byte to its last, whatever lies between its elements."""
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _place(parameters: dict[str, torch.nn.Parameter]) -> tuple[dict[str, int], list[Placed]]:
    offsets: dict[str, int] = {}
    placed: list[Placed] = []
    end = 0
    for name, parameter in parameters.items():
        num_bytes = parameter.numel() * parameter.element_size()
        offsets[name] = end
        placed.append(Placed(parameter=parameter, offset_bytes=end, num_bytes=num_bytes))
        end += math.ceil(num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, placed


def _read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's tensors, each in a storage of its own, so that a copy's source can be told by its storage."""
    tensors: dict[str, torch.Tensor] = {}
    for file in _checkpoint_files(folder):
        with safe_open(folder / file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118
                tensors[name] = reader.get_tensor(name)
    pointers = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    return tensors if len(pointers) == len(tensors) else {name: tensor.clone() for name, tensor in tensors.items()}


def _checkpoint_files(folder: Path) -> list[str]:
    index = folder / "model.safetensors.index.json"
    return sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
