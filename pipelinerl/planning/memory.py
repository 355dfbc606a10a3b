"""The memory, shared memory and disk that a run's processes will need, from the model's files alone: nothing is loaded.

The arithmetic is the planner's (`pipelinerl.planning.formulas`); here it is summed over the processes of one machine. Weights, gradients,
optimizer state and KV caches are counted; what activations and the libraries themselves take is rough.
"""

from __future__ import annotations

import dataclasses
import json
import math
import struct
from collections.abc import Iterator
from pathlib import Path

from pipelinerl.algorithms.method import CRITICS, Method
from pipelinerl.config import Config
from pipelinerl.engine.kv import KvPlan
from pipelinerl.errors import ConfigError
from pipelinerl.planning.formulas import SHEET
from pipelinerl.planning.inputs import DTYPE_BYTES, gpu_inputs, run_inputs
from pipelinerl.planning.shape import shape_of
from pipelinerl.planning.sheet import Values

ENGINE_BYTES, TRAINER_BYTES, OTHER_BYTES = 700 << 20, 450 << 20, 100 << 20
"""Bytes of an engine with vLLM, a trainer rank with torch, and any other process before they hold a model. On a CPU 530, 350 and 82 MiB
were measured once everything is imported; the rest is for what a first pass adds."""
NUM_POLICIES = 3
"""Policies in shared memory while engines keep pace: the one they serve from, the one being fetched, the one being written."""


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
    values = _figures(config, weights, method)
    engines, ranks = config.engine.num_here, config.trainer.ranks
    weights_bytes = round(engines * values["engine_weights_bytes"] * config.engine.num_ranks)
    yield Part(f"weights of {engines} engine{'s' * (engines > 1)}", weights_bytes, on_device=True)
    if kv is not None and kv.cache_bytes is not None:
        yield Part("KV caches", engines * config.engine.num_ranks * kv.cache_bytes, on_device=True)
    yield Part(f"{NUM_POLICIES} policies in shared memory", shared_bytes(config, weights))
    yield from _of_trainer(config, values)
    if (folder := config.prm.path) is not None and (prm := read_weights(folder).num_parameters):
        yield Part("weights of the process reward model", config.prm.count * prm * DTYPE_BYTES[config.prm.dtype], on_device=True)
    processes = engines * config.engine.num_ranks * ENGINE_BYTES + ranks * TRAINER_BYTES
    yield Part(
        "the processes themselves",
        processes + (3 + config.scorer.slots + config.prm.is_used * config.prm.count) * OTHER_BYTES,
        is_sure=False,
    )


def rank_bytes(config: Config, weights: Weights, *, method: Method) -> int:
    """Count the bytes that one rank of the trainer holds at once on its device."""
    parts = _of_trainer(config, _figures(config, weights, method))
    return sum(part.num_bytes for part in parts if part.on_device) // config.trainer.ranks


def _of_trainer(config: Config, values: Values) -> Iterator[Part]:
    """All ranks of the trainer together."""

    def part(what: str, *names: str, is_sure: bool = True, on_device: bool = True) -> Part:
        return Part(what, round(config.trainer.ranks * sum(values[name] for name in names)), is_sure=is_sure, on_device=on_device)

    state = ("trainer_weights_bytes", "trainer_gradients_bytes", "trainer_optimizer_bytes")
    parts = (
        part("trainer: weights, gradients, optimizer", *state),
        part("critic: weights, gradients, optimizer", "critic_bytes"),
        part("reference", "reference_bytes"),
        part("trainer and reference: offloaded", "offloaded_bytes", on_device=False),
        part("trainer: activations of a row", "step_bytes", is_sure=False),
    )
    yield from (one for one in parts if one.num_bytes)


def adapter_parameters(config: Config, weights: Weights) -> int:
    """Count the parameters of all adapters, both factors."""
    targets = {f".{name}.weight" for name in config.lora.targets}
    matrices = [shape for name, shape in weights.shapes.items() if len(shape) == 2 and any(name.endswith(end) for end in targets)]
    return config.lora.rank * sum(rows + columns for rows, columns in matrices)


def shared_bytes(config: Config, weights: Weights) -> int:
    """Count the bytes of the policies on their way, where they travel through shared memory."""
    num = adapter_parameters(config, weights) if config.lora.rank and config.weights.adapters == "separate" else weights.num_parameters
    return NUM_POLICIES * num * DTYPE_BYTES[config.model.dtype]


def checkpoint_bytes(config: Config, weights: Weights, *, method: Method) -> int:
    """Count the bytes of one checkpoint: weights that take the updates and two moments, float32, of all that is trained."""
    trained = adapter_parameters(config, weights) if config.lora.rank else weights.num_parameters
    return 12 * (trained + (weights.num_parameters if method.needs & CRITICS else 0))


def _figures(config: Config, weights: Weights, method: Method) -> Values:
    tree = json.loads((config.model.path / "config.json").read_text())
    shape = shape_of(tree | (tree.get("text_config") or {}), origin=str(config.model.path), parameters=weights.num_parameters)
    inputs = run_inputs(config, shape, method=method, adapter_parameters=adapter_parameters(config, weights) if config.lora.rank else 0)
    return SHEET.evaluate({**gpu_inputs("h100"), **inputs})  # what is read here hangs on no GPU
