"""What vLLM would look up in another process: a model's class."""

from __future__ import annotations

import json
from pathlib import Path

from vllm import ModelRegistry


def register_model(folder: Path) -> None:
    """Have vLLM know the model's class, which this process needs anyway.

    It would else ask a new process about a class that it has not met on this machine, which imports all of vLLM again, to keep CUDA
    uninitialised; so this must run in the process of the engine, not in one that forks.
    """
    for architecture in json.loads((folder / "config.json").read_text()).get("architectures") or ():
        if architecture in ModelRegistry.models:
            ModelRegistry.register_model(architecture, ModelRegistry.models[architecture].load_model_cls())
