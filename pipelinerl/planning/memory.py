"""The memory, shared memory and disk that a run's processes will need, from the model's files alone: nothing is loaded.

Weights, gradients, optimizer state and KV caches are counted; what activations and the libraries themselves take is rough. A row of
`batch.max_tokens` keeps about 34 bytes of 16 bits per token, layer and hidden unit for the backward pass (arXiv 2205.05198, without its
attention scores, which are not kept here), or its input alone where layers are computed again.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pipelinerl.algorithms.method import CRITICS, REFERENCE_OFFERS, Method
from pipelinerl.config import Config
from pipelinerl.engine.kv import KvPlan
from pipelinerl.errors import ConfigError

ENGINE_BYTES, TRAINER_BYTES, OTHER_BYTES = 700 << 20, 450 << 20, 100 << 20
"""Bytes of an engine with vLLM, a trainer rank with torch, and any other process before they hold a model. On a CPU 530, 350 and 82 MiB
were measured once everything is imported; the rest is for what a first pass adds."""
NUM_POLICIES = 3
"""Policies in shared memory while engines keep pace: the one they serve from, the one being fetched, the one being written."""
_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
_KEPT_PER_UNIT = 34
"""See the head of this file; of 16 bits, so 17 numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The bytes of one kind of process, all of them together."""

    what: str
    num_bytes: int
    is_sure: bool = True
    """It is counted from the model's files; else rough."""
    on_device: bool = False
    """True for what lies on the GPUs of a machine that has them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Weights:
    """The tensors of a Hugging Face folder."""

    num_parameters: int
    shapes: dict[str, tuple[int, ...]]


def read_weights(folder: Path) -> Weights:
    """Read the headers of the folder's safetensors files: those its index names, where it has one. Raises `ConfigError`."""
    index = folder / "model.safetensors.index.json"
    shapes: dict[str, tuple[int, ...]] = {}
    try:
        named = set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else set()
        files = [folder / name for name in sorted(named)] or [whole] if (whole := folder / "model.safetensors").exists() or named else []
        for path in files or sorted(folder.glob("*.safetensors")):
            shapes |= _shapes_of(path)
    except (OSError, ValueError, KeyError, struct.error) as error:
        raise ConfigError(f"model.path: the weights of {folder} cannot be read: {type(error).__name__}: {error}") from None
    return Weights(num_parameters=sum(math.prod(shape) for shape in shapes.values()), shapes=shapes)


def _shapes_of(path: Path) -> dict[str, tuple[int, ...]]:
    """Read the shape of every tensor from a file's header. Raises `ValueError` where the file is not as long as that says."""
    with open(path, "rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        size = path.stat().st_size
        if length > size:
            raise ValueError(f"{path.name} is no safetensors file")
        header = json.loads(file.read(length))
    tensors = {name: entry for name, entry in header.items() if name != "__metadata__"}
    end = 8 + length + max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
    if end > size:
        raise ValueError(f"{path.name} has {size:,} bytes, and its header speaks of {end:,}: it was not copied whole")
    return {name: tuple(entry["shape"]) for name, entry in tensors.items()}


def bill(config: Config, weights: Weights, *, method: Method, kv: KvPlan | None) -> Iterator[Part]:
    """Every kind of process of the run, with what it takes on a machine where all of them are."""
    policy = weights.num_parameters * _DTYPE_BYTES[config.model.dtype]
    engines = config.engine.count
    yield Part(f"weights of {engines} engine{'s' * (engines > 1)}", engines * policy, on_device=True)
    if kv is not None and kv.cache_bytes is not None:
        yield Part("KV caches", engines * config.engine.num_ranks * kv.cache_bytes, on_device=True)
    yield Part(f"{NUM_POLICIES} policies in shared memory", shared_bytes(config, weights))
    yield from _of_trainer(config, weights, method=method)
    processes = engines * config.engine.num_ranks * ENGINE_BYTES + config.trainer.ranks * TRAINER_BYTES
    yield Part("the processes themselves", processes + (3 + config.scorer.slots + config.prm.is_used) * OTHER_BYTES, is_sure=False)


def _of_trainer(config: Config, weights: Weights, *, method: Method) -> Iterator[Part]:
    """All ranks of the trainer together."""
    policy, layout = weights.num_parameters * _DTYPE_BYTES[config.model.dtype], config.trainer.layout
    yield Part("trainer: weights, gradients, optimizer", layout.copies * trained_bytes(config, weights), on_device=True)
    if method.needs & CRITICS:
        yield Part("critic: weights, gradients, optimizer", layout.copies * _full(weights.num_parameters, config), on_device=True)
    if config.reference.folders and method.needs & REFERENCE_OFFERS and not _is_served_by_adapters(config):
        yield Part("reference", len(config.reference.folders) * layout.copies * policy, on_device=not config.reference.offload)
    yield Part("trainer: activations of a row", config.trainer.ranks * _row_bytes(config, weights), is_sure=False, on_device=True)


def rank_bytes(config: Config, weights: Weights, *, method: Method) -> int:
    """Count the bytes that one rank of the trainer holds at once on its device."""
    return sum(part.num_bytes for part in _of_trainer(config, weights, method=method) if part.on_device) // config.trainer.ranks


def trained_bytes(config: Config, weights: Weights) -> int:
    """Count the bytes of one copy of the policy in the trainer."""
    if not config.lora.rank:
        return _full(weights.num_parameters, config)
    return weights.num_parameters * _DTYPE_BYTES[config.model.dtype] + _full(adapter_parameters(config, weights), config)


def adapter_parameters(config: Config, weights: Weights) -> int:
    """Count the parameters of all adapters, both factors."""
    targets = {f".{name}.weight" for name in config.lora.targets}
    matrices = [shape for name, shape in weights.shapes.items() if len(shape) == 2 and any(name.endswith(end) for end in targets)]
    return config.lora.rank * sum(rows + columns for rows, columns in matrices)


def shared_bytes(config: Config, weights: Weights) -> int:
    """Count the bytes of the policies on their way, where they travel through shared memory."""
    num = adapter_parameters(config, weights) if config.lora.rank and config.weights.adapters == "separate" else weights.num_parameters
    return NUM_POLICIES * num * _DTYPE_BYTES[config.model.dtype]


def checkpoint_bytes(config: Config, weights: Weights, *, method: Method) -> int:
    """Count the bytes of one checkpoint: weights that take the updates and two moments, float32, of all that is trained."""
    trained = adapter_parameters(config, weights) if config.lora.rank else weights.num_parameters
    return 12 * (trained + (weights.num_parameters if method.needs & CRITICS else 0))


def _full(num_parameters: int, config: Config) -> int:
    """Gradients and moments in float32, and, where the model computes in fewer bits, the weights that take the updates."""
    size = _DTYPE_BYTES[config.model.dtype]
    return num_parameters * (size + 4 + 8 + (4 if size < 4 else 0))


def _row_bytes(config: Config, weights: Weights) -> int:
    tree: dict[str, Any] = json.loads((config.model.path / "config.json").read_text())
    tree |= tree.get("text_config") or {}
    units = int(tree.get("num_hidden_layers") or 0) * int(tree.get("hidden_size") or 0)
    per_unit = 1 if config.trainer.activation_checkpointing else _KEPT_PER_UNIT // 2
    tokens = config.batch.max_tokens // (config.trainer.layout.context * config.trainer.layout.tensor * config.trainer.layout.pipeline)
    return tokens * units * per_unit * _DTYPE_BYTES[config.model.dtype]


def _is_served_by_adapters(config: Config) -> bool:
    """The reference is what the adapters were put on: no second copy is loaded."""
    return bool(config.lora.rank) and config.reference.path == config.model.path
