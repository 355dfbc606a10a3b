"""How a vLLM model takes new weights: its parameters point into a shared buffer, and a swap points them into another.

At start the plan is recorded: which part of which kernel parameter each checkpoint tensor is copied to. From it follows a layout in
which the parts of a fused parameter (q, k and v; gate and up) lie side by side, so the trainer writes checkpoint tensors and the engine
reads kernel parameters, both as plain views of the same bytes, with no copy in between.

What would break this is found at start, not at the first swap: a parameter that no checkpoint tensor fills, or one that is filled in an
order of its own (`ConfigError`).
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as functional
from safetensors import safe_open
from torch.utils._python_dispatch import TorchDispatchMode

from pipelinerl.errors import ConfigError, WeightsError
from pipelinerl.messages import Tensor
from pipelinerl.weights.base import digest as digest_of
from pipelinerl.weights.shared_memory import attach
from pipelinerl.weights.slots import FOLDER

ALIGNMENT_BYTES = 256
"""Start of every parameter in the buffer: a multiple of what vector loads and device copies like best."""


def keep_plain_weights() -> None:
    """On CPU, have vLLM keep linear weights as they are instead of packing them; must run before a model is loaded.

    The packed kernels are faster on larger models, so this costs throughput there; how much is not measured in this project.
    """
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        return
    import vllm.model_executor.layers.utils as layers

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = functional.linear

    layers.dispatch_cpu_unquantized_gemm = plain


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Parameter:
    """A kernel parameter and its place in the buffer."""

    parameter: torch.nn.Parameter
    offset_bytes: int
    num_bytes: int

    def view(self, buffer: torch.Tensor) -> torch.Tensor:
        part = buffer[self.offset_bytes : self.offset_bytes + self.num_bytes]
        return part.view(self.parameter.dtype).view(self.parameter.shape)


class FlippableWeights:
    """The parameters of a loaded model, which can be pointed into any published slot.

    A slot stays mapped once attached (the trainer uses a few in turn), and the parameters' first storage is kept: dropping the last
    reference to it would unmap it inside the pause.
    """

    def __init__(self, model: torch.nn.Module, *, folder: Path) -> None:
        self._parameters, self.tensors = _plan(model, folder)
        last = max(self._parameters, key=lambda parameter: parameter.offset_bytes)
        self._num_bytes = last.offset_bytes + last.num_bytes
        self._first = [parameter.parameter.data for parameter in self._parameters]
        self._attached: dict[str, tuple[torch.Tensor, list[tuple[torch.nn.Parameter, torch.Tensor]]]] = {}
        self._staged: list[tuple[torch.nn.Parameter, torch.Tensor]] | None = None

    def stage(self, slot: str, digest: str) -> None:
        """Map the slot if it is new, and verify its bytes, which also brings its pages in. Raises `WeightsError`."""
        if slot not in self._attached:
            self._attached = {name: kept for name, kept in self._attached.items() if (FOLDER / name).exists()}  # of a trainer that died
            buffer = attach(slot, self._num_bytes)
            self._attached[slot] = buffer, [(parameter.parameter, parameter.view(buffer)) for parameter in self._parameters]
        buffer, views = self._attached[slot]
        found = digest_of(buffer)
        if found != digest:
            raise WeightsError(f"slot {slot}: digest of its {self._num_bytes} bytes is {found}, published was {digest}; not taken")
        self._staged = views

    def commit(self) -> None:
        """Point every parameter into the staged slot: about 1 microsecond for each parameter, whatever its size."""
        if self._staged is None:
            raise WeightsError("nothing is staged: commit follows stage")
        for parameter, view in self._staged:
            parameter.data = view
        self._staged = None


class _CopyRecorder(TorchDispatchMode):
    """Notes every copy from a checkpoint tensor into a parameter."""

    def __init__(self, *, targets: dict[int, str], sources: dict[int, str]) -> None:
        super().__init__()
        self.copies: list[tuple[str, torch.Tensor, str, torch.Tensor]] = []
        self._targets = targets
        self._sources = sources

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            name = self._targets.get(target.untyped_storage().data_ptr())
            origin = self._sources.get(source.untyped_storage().data_ptr())
            if name is not None and origin is not None:
                self.copies.append((name, target, origin, source))
        return func(*args, **(kwargs or {}))


def _plan(model: torch.nn.Module, folder: Path) -> tuple[list[_Parameter], tuple[Tensor, ...]]:
    parameters = {name: parameter for name, parameter in model.named_parameters() if parameter.numel()}
    checkpoint = _read_checkpoint(folder)
    recorder = _CopyRecorder(
        targets={parameter.untyped_storage().data_ptr(): name for name, parameter in parameters.items()},
        sources={tensor.untyped_storage().data_ptr(): name for name, tensor in checkpoint.items()},
    )
    with torch.no_grad(), recorder:
        model.load_weights(iter(checkpoint.items()))  # pyright: ignore[reportCallIssue]
    offsets, placed = _place(parameters)
    tensors: list[Tensor] = []
    filled = dict.fromkeys(parameters, 0)
    for name, target, origin, source in recorder.copies:
        if not (target.is_contiguous() and source.is_contiguous() and source.shape == checkpoint[origin].shape):
            raise ConfigError(f"vLLM splits or reorders {origin} when it fills {name}; such a model cannot yet be swapped by pointer")
        size = target.element_size()
        tensors.append(
            Tensor(
                name=origin,
                shape=tuple(source.shape),
                dtype=str(target.dtype).removeprefix("torch."),
                offset_bytes=offsets[name] + int(target.storage_offset() - parameters[name].storage_offset()) * size,
                num_bytes=target.numel() * size,
            )
        )
        filled[name] += target.numel()
    unfilled = [name for name, count in filled.items() if count != parameters[name].numel()]
    if unfilled:
        raise ConfigError(
            f"{len(unfilled)} of {len(parameters)} parameters of {folder} are not filled, or not once, by its checkpoint: {unfilled[:5]}."
            " vLLM transforms them after loading (quantised or fused experts?); such a model cannot yet be swapped by pointer"
        )
    return placed, tuple(tensors)


def _place(parameters: dict[str, torch.nn.Parameter]) -> tuple[dict[str, int], list[_Parameter]]:
    offsets: dict[str, int] = {}
    placed: list[_Parameter] = []
    end = 0
    for name, parameter in parameters.items():
        num_bytes = parameter.numel() * parameter.element_size()
        offsets[name] = end
        placed.append(_Parameter(parameter=parameter, offset_bytes=end, num_bytes=num_bytes))
        end += math.ceil(num_bytes / ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    return offsets, placed


def _read_checkpoint(folder: Path) -> dict[str, torch.Tensor]:
    """The folder's tensors, each in a storage of its own, so that a copy's source can be told by its storage."""
    index = folder / "model.safetensors.index.json"
    files = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else ["model.safetensors"]
    tensors: dict[str, torch.Tensor] = {}
    for file in files:
        with safe_open(folder / file, framework="pt") as reader:
            for name in reader.keys():  # noqa: SIM118
                tensors[name] = reader.get_tensor(name)
    pointers = {tensor.untyped_storage().data_ptr() for tensor in tensors.values()}
    return tensors if len(pointers) == len(tensors) else {name: tensor.clone() for name, tensor in tensors.items()}
