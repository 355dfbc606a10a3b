"""The trainer's backends: whose code computes the policy, what each cannot do, and what it needs installed.

Imports no torch: a head node can refuse a run before anything starts.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from pipelinerl.config.layout import Layout, Schedule
from pipelinerl.config.trainer_memory import ActivationCheckpointing
from pipelinerl.errors import ConfigError


class TrainerBackend(StrEnum):
    """Whose code computes the policy's layers and cuts them over ranks."""

    FSDP2 = "fsdp2"
    """transformers' code, cut by torch's FSDP2 and tensor parallelism: every family and every layout."""
    TORCHTITAN = "torchtitan"
    """torchtitan's models and its own parallelisation of them."""
    MEGATRON = "megatron"
    """Megatron-Core's modules, cut by its tensor and pipeline parallelism."""


FAMILIES = ("llama", "qwen3")
"""Values of `model_type` in a model's config.json that other backends than fsdp2 compute; both families without experts or biases."""
_PACKAGES = {TrainerBackend.TORCHTITAN: ("torchtitan", "triton"), TrainerBackend.MEGATRON: ("megatron.core",)}
"""Packages that a backend imports."""


def check_installed(backend: TrainerBackend) -> None:
    """Raise `ConfigError` where a package that the backend imports is not there."""
    for package in _PACKAGES.get(backend, ()):
        if not _is_installed(package):
            raise ConfigError(
                f'trainer.backend is "{backend}", and {package} is not installed. Install it with `pip install "pipelinerl[{backend}]"`,'
                " or leave trainer.backend out"
            )


def _is_installed(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of the package that it is in
        return False


def problems_of_passes(
    backend: TrainerBackend, layout: Layout, checkpointing: ActivationCheckpointing, *, is_compiled: bool
) -> Iterator[str]:
    """Yield what is wrong with how layers are passed through: what of them is kept, and what is compiled."""
    if backend is TrainerBackend.MEGATRON and layout.tensor > 1 and checkpointing is ActivationCheckpointing.SELECTIVE:
        yield (
            'trainer.activation_checkpointing = "selective" keeps outputs of matrix products, and Megatron-Core\'s tensor parallelism adds'
            ' those of all ranks up in place: gradients would be wrong. Set trainer.activation_checkpointing to "full".'
        )
    if is_compiled and (against := list(_problems_of_compiling(backend, layout, checkpointing))):
        yield f"trainer.compile does not go with {'; nor with '.join(against)}. Leave one of them out."


def _problems_of_compiling(backend: TrainerBackend, layout: Layout, checkpointing: ActivationCheckpointing) -> Iterator[str]:
    """Yield what does not go with compiled parts of layers."""
    if backend is not TrainerBackend.FSDP2:
        yield f'trainer.backend = "{backend}", whose code is not compiled'
    if layout.tensor > 1:
        yield f"trainer.parallel.tensor = {layout.tensor}, whose collectives are inside those parts"
    if checkpointing is ActivationCheckpointing.SELECTIVE:
        yield 'trainer.activation_checkpointing = "selective", which does not see the products in them'


def problems_of_backend(backend: TrainerBackend, layout: Layout) -> Iterator[str]:
    """Yield what a layout asks of a backend that it cannot do."""
    if backend is TrainerBackend.FSDP2:
        return
    for kind in ("context", "expert"):
        if getattr(layout, kind) > 1:
            yield f"parallel.{kind} = {getattr(layout, kind)} is written for fsdp2 alone"
    if layout.pipeline > 1 and layout.schedule is not Schedule.ONE_FORWARD_ONE_BACKWARD:
        yield f'parallel.schedule = "{layout.schedule}" is written for fsdp2 alone'
    if backend is TrainerBackend.TORCHTITAN and layout.copies > 1 and layout.shard == 1:
        yield f"it reduces gradients in every row, so that its replicas must share weights: set parallel.shard = {layout.replicas}"
    if backend is TrainerBackend.MEGATRON and layout.shard > 1:
        yield f"parallel.shard = {layout.shard} would be its distributed optimizer, which is not used: copies, tensor and pipeline are"


def check_model(backend: TrainerBackend, layout: Layout, folder: Path) -> None:
    """Raise `ConfigError` where the model in `folder` has what the backend's code does not compute."""
    if backend is TrainerBackend.FSDP2:
        return
    settings: dict[str, Any] = json.loads((folder / "config.json").read_text())
    if found := list(_problems_of_model(backend, layout, settings)):
        raise ConfigError(f'trainer.backend is "{backend}", and model.path {folder}: {"; ".join(found)}. Set trainer.backend to "fsdp2"')


def _problems_of_model(backend: TrainerBackend, layout: Layout, settings: dict[str, Any]) -> Iterator[str]:
    if settings.get("model_type") not in FAMILIES:
        yield f"it is a {settings.get('model_type')}, expected one of {', '.join(FAMILIES)}"
    rope = settings.get("rope_parameters") or settings.get("rope_scaling") or {}
    if (kind := rope.get("rope_type", rope.get("type", "default"))) != "default":
        yield f"its rotary embeddings are scaled ({kind})"
    for key in ("attention_bias", "mlp_bias", "use_sliding_window"):
        if settings.get(key):
            yield f"{key} is set"
    if (activation := settings.get("hidden_act", "silu")) != "silu":
        yield f"hidden_act is {activation}, expected silu"
    if backend is TrainerBackend.MEGATRON and settings.get("num_hidden_layers", 0) % layout.pipeline:
        yield f"parallel.pipeline = {layout.pipeline} does not divide its {settings['num_hidden_layers']} layers"
    if layout.pipeline > 1 and settings.get("tie_word_embeddings"):
        yield "its embeddings are tied, which its pipelines do not know (parallel.pipeline)"
