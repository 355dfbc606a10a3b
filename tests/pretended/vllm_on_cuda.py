"""`python -m tests.pretended.vllm_on_cuda NVML_FOLDER MODEL_FOLDER ...`: vLLM's CUDA classes on a machine without a GPU; JSON.

NVML is a stand-in that tells of GPUs of capability 9.0, modules compiled for CUDA are empty, and torch says that it has a device; no more
is pretended. What runs is our engine until vLLM would make its own, vLLM's platform, its choice of classes for our options, and a model of
the layers that a GPU would have, in the host's memory. No kernel runs, so no forward pass does.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import sys
import tempfile
import types
from pathlib import Path
from typing import Any
from unittest import mock

import torch

COMPILED = (
    "_C_stable_libtorch",
    "_moe_C",
    "_moe_C_stable_libtorch",
    "_qutlass_C",
    "cumem_allocator",
    "vllm_flash_attn._vllm_fa2_C",
    "vllm_flash_attn._vllm_fa3_C",
)
"""vLLM's modules that its wheel for CPUs has not."""
NAMESPACES = ("_C", "_C_cache_ops", "_moe_C")
"""Of kernels that those modules would register."""
RUNNERS = {"first": "vllm.v1.worker.gpu_model_runner", "second": "vllm.v1.worker.gpu.model_runner"}


class Reached(BaseException):
    """vLLM's engine is about to be made of its config. No `Exception`: our engine would take one for vLLM's refusal."""


def main() -> None:
    nvml, *folders = map(Path, sys.argv[1:])
    pretend(nvml)
    with tempfile.TemporaryDirectory() as temporary:
        models = [served(folder, rendezvous=Path(temporary) / "rendezvous") for folder in folders]
    print(json.dumps(platform() | {"models": models}))


def pretend(nvml: Path) -> None:
    from pipelinerl.engine.environment import set_environment
    from tests.pretended import load_nvml

    os.environ["TORCH_COMPILE_DISABLE"] = "0"  # as where NVIDIA's driver is; ours sets it elsewhere, and vLLM then captures less
    set_environment()
    load_nvml(nvml)
    os.environ["PRETENDED_GPUS"] = "2"
    for name in COMPILED:
        sys.modules[f"vllm.{name}"] = types.ModuleType(f"vllm.{name}")
    namespace: Any = torch._ops._OpNamespace
    namespace.__getattr__ = _or_a_kernel(namespace.__getattr__)
    library: Any = torch.library
    library.register_fake = _where_there_is_a_kernel(library.register_fake)
    cuda: Any = torch.cuda
    cuda.is_available = lambda: True
    for name in ("Stream", "Event"):  # shared experts have some
        setattr(cuda, name, type(name, (), {"__init__": lambda self, *_, **__: None}))
    platforms: Any = importlib.import_module("vllm.platforms")
    platforms.vllm_version_matches_substr = lambda part: False  # the wheel says that it is for CPUs
    triton: Any = importlib.import_module("vllm.triton_utils").triton
    triton.Config = lambda *_, **__: types.SimpleNamespace(num_stages=1, num_warps=4)
    settings: Any = importlib.import_module("vllm.config.vllm")
    settings.HAS_TRITON = True  # a GPU's compiler, without which vLLM takes its first model runner
    devices: Any = importlib.import_module("pipelinerl.runtime.devices")
    devices.version = lambda name: torch.__version__.partition("+")[0]


class _Kernel:
    """A kernel that is not there, and each of its overloads."""

    def __init__(self, name: str) -> None:
        self._name = name
        self.default = self.out = self

    def __call__(self, *arguments: Any, **options: Any) -> bool:
        if "support" not in self._name:
            raise RuntimeError(f"{self._name} is a kernel, and there is no GPU")
        return True


def _or_a_kernel(found: Any) -> Any:
    """Kernels that are not there: whether they serve this capability is answered by yes, and to call one is an error."""

    def attribute(self: Any, name: str) -> Any:
        try:
            return found(self, name)
        except AttributeError:
            if self.name not in NAMESPACES:
                raise

        return _Kernel(f"{self.name}.{name}")

    return attribute


def _where_there_is_a_kernel(register: Any) -> Any:
    def registered(name: Any, function: Any = None, /, **options: Any) -> Any:
        namespace, _, operation = str(name).partition("::")
        if namespace in NAMESPACES and not torch._C._dispatch_has_kernel(f"{namespace}::{operation}"):
            return lambda function: function
        return register(name, function, **options)

    return registered


def platform() -> dict[str, Any]:
    """What vLLM takes this machine for, and the model runners that it would start there."""
    from vllm.platforms import current_platform

    return {
        "platform": type(current_platform).__name__,
        "capability": list(current_platform.get_device_capability() or ()),
        "uuid": current_platform.get_device_uuid(1),
        "runners": {name: sorted(dir(importlib.import_module(module).GPUModelRunner)) for name, module in RUNNERS.items()},
    }


def served(folder: Path, *, rendezvous: Path) -> dict[str, Any]:
    """What our engine asks of vLLM for a model, and what vLLM makes of it."""
    from vllm.v1.engine.llm_engine import LLMEngine

    from pipelinerl.config import EngineSection, ModelSection, RolloutSection
    from pipelinerl.engine.budget import plan_on
    from pipelinerl.engine.vllm import engine as ours
    from pipelinerl.engine.vllm import loading

    configs: list[Any] = []
    budgets: list[Any] = []

    def reach(config: Any, **_: Any) -> None:
        configs.append(config)
        raise Reached

    def divide(*given: Any, **named: Any) -> Any:
        budgets.append(plan_on(*given, **named))
        return budgets[-1]

    planned = mock.patch.object(loading, "plan_on", divide)
    with contextlib.suppress(Reached), mock.patch.object(LLMEngine, "from_vllm_config", reach), planned:
        ours.VllmEngine(
            model=ModelSection(path=folder, dtype="bfloat16", max_tokens=128),  # pyright: ignore[reportCallIssue]
            engine=EngineSection(max_running=256),  # pyright: ignore[reportCallIssue]
            rollout=RolloutSection(max_tokens=64),  # pyright: ignore[reportCallIssue]
            seed=0,
        )
    (config,) = configs
    told = {
        "worker": config.parallel_config.worker_cls,
        "is_v2": bool(config.use_v2_model_runner),
        "graphs": config.compilation_config.cudagraph_mode.name,
        "async_scheduling": bool(config.scheduler_config.async_scheduling),
        "cache_bytes": config.cache_config.kv_cache_memory_bytes,
        "budget": str(budgets[-1]),
        "utilization": config.cache_config.gpu_memory_utilization,
    }
    return told | taken(config, folder, rendezvous=rendezvous)


def taken(config: Any, folder: Path, *, rendezvous: Path) -> dict[str, Any]:
    """A model of the layers that a GPU would have: what its policies look like, what stands against them, and one copied into it."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import destroy_model_parallel, init_distributed_environment, initialize_model_parallel
    from vllm.model_executor.model_loader.utils import initialize_model, process_weights_after_loading
    from vllm.utils.torch_utils import set_default_torch_dtype

    from pipelinerl.engine.vllm.derived import Derived
    from pipelinerl.engine.vllm.weights import obstacles_of, plan_of
    from pipelinerl.weights.base import num_bytes, views
    from pipelinerl.weights.swap import choose_swap_mode, make_swap

    with set_current_vllm_config(config):
        if not torch.distributed.is_initialized():
            init_distributed_environment(1, 0, f"file://{rendezvous}", 0, "gloo")
        initialize_model_parallel()
        with set_default_torch_dtype(torch.bfloat16), torch.no_grad():
            model: Any = initialize_model(vllm_config=config)
            process_weights_after_loading(model, config.model_config, torch.device("cpu"))
            derived = Derived(model, dtype=torch.bfloat16)
            parameters, layout = plan_of(model, folder=folder, derived=derived.names)
            mode, why = choose_swap_mode("auto", obstacles_of(model, captures_graphs=True))
            swap = make_swap(mode, parameters, gathers=False)
            addresses = [one.parameter.data_ptr() for one in parameters]
            buffer = torch.zeros(num_bytes(layout), dtype=torch.uint8)
            for tensor in views(buffer, layout).values():
                tensor.copy_(torch.randn(tensor.shape))
            swap.stage(buffer)
            swap.commit()
            derived.make_anew()
        destroy_model_parallel()  # a mixture of experts has groups of its own
    return {
        "attention": sorted({type(layer.impl).__name__ for layer in model.modules() if hasattr(layer, "impl")}),
        "experts": sorted({type(layer.quant_method.moe_kernel.fused_experts).__name__ for layer in model.modules() if _has_experts(layer)}),
        "swap": why,
        "tensors": sorted(tensor.name for tensor in layout),
        "are_in_place": addresses == [one.parameter.data_ptr() for one in parameters],
        "are_taken": all(one.view(buffer).equal(one.parameter) for one in parameters),
    }


def _has_experts(layer: Any) -> bool:
    return getattr(getattr(layer, "quant_method", None), "moe_kernel", None) is not None


if __name__ == "__main__":
    main()
