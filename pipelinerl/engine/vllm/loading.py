"""Loading of vLLM: its options, from the settings of a run and from what is free on this machine."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import torch
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.engine.llm_engine import LLMEngine

from pipelinerl.config import EngineSection, ModelSection, RolloutSection
from pipelinerl.engine.budget import Budget, plan_on
from pipelinerl.engine.kv import LEAST_CPU_BYTES, plan_kv
from pipelinerl.engine.vllm.constraints import constraint_options
from pipelinerl.engine.vllm.experts import device_options
from pipelinerl.engine.vllm.prompts import image_options
from pipelinerl.engine.vllm.registry import register_model
from pipelinerl.engine.vllm.scheduling import choose_scheduling
from pipelinerl.engine.vllm.speculation import speculation_options
from pipelinerl.engine.vllm.weights import checkpoint_shapes
from pipelinerl.errors import ConfigError
from pipelinerl.runtime.devices import usable_gpus
from pipelinerl.runtime.machine import memory_bytes


def load_vllm(
    *, model: ModelSection, engine: EngineSection, rollout: RolloutSection, seed: int, options: dict[str, Any]
) -> tuple[LLMEngine, str]:
    """Load vLLM; with the way in which it schedules forward passes, in a sentence."""
    on_cpu = not torch.cuda.is_available()
    options = {
        "model": str(model.path),
        "dtype": model.dtype,
        "max_model_len": model.max_tokens,
        "max_num_seqs": engine.max_running,
        "kv_cache_memory_bytes": _kv_cache_bytes(model, engine, rollout, on_cpu=on_cpu),
        "enforce_eager": on_cpu,
        **attention_options(Path(model.path), on_cpu=on_cpu),
        **({} if on_cpu else device_options(replay_routing=model.replay_routing)),
        "async_scheduling": engine.async_scheduling,
        "disable_log_stats": True,
        **image_options(Path(model.path)) | constraint_options(rollout.structured_outputs) | speculation_options(engine),
        "logprobs_mode": "processed_logprobs",
        "seed": seed,
        **options,
        **engine.options,
    }
    try:
        register_model(Path(model.path))
        start_method = os.environ.get("VLLM_WORKER_MULTIPROC_METHOD")
        config = EngineArgs(**options).create_engine_config()
        if start_method is not None:  # on CPUs vLLM sets another
            os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = start_method
        scheduling = choose_scheduling(config, engine.async_scheduling)
        return LLMEngine.from_vllm_config(config, disable_log_stats=bool(options["disable_log_stats"])), scheduling
    except ConfigError:
        raise
    except Exception as error:  # vLLM raises many kinds for a model it cannot serve; each becomes one message with its cause
        raise ConfigError(f"vLLM cannot serve {model.path}: {type(error).__name__}: {error}") from error


def attention_options(folder: Path, *, on_cpu: bool) -> dict[str, str]:
    """Return vLLM's option for latent attention on a CPU: of its own accord it packs the weights of a processor with AMX, which takes no
    float32, and which no policy reaches (`derived`)."""
    config = folder / "config.json"
    has_latent = config.is_file() and "kv_lora_rank" in json.loads(config.read_text())
    return {"attention_backend": "CPU_MLA"} if on_cpu and has_latent else {}


def _kv_cache_bytes(model: ModelSection, engine: EngineSection, rollout: RolloutSection, *, on_cpu: bool) -> int | None:
    """Size the KV cache as the preflight does, which may run on another machine; a model that tells too little gets the least."""
    plan = plan_kv(model, engine, rollout, memory_bytes=memory_bytes(), on_cpu=on_cpu)
    return plan.cache_bytes if plan is not None else engine.kv_cache_bytes or (LEAST_CPU_BYTES if on_cpu else None)


def budget_of(model: ModelSection, engine: EngineSection, rollout: RolloutSection, *, stages_policies: bool) -> Budget | None:
    """Divide the memory of this engine's GPUs, of which the fullest counts; None on a CPU, and where config.json says too little."""
    gpus = usable_gpus()[: engine.num_ranks]
    if not gpus or not torch.cuda.is_available():
        return None
    num_parameters = sum(math.prod(shape) for shape in checkpoint_shapes(Path(model.path)).values())
    return plan_on(gpus, model, engine, rollout, num_parameters=num_parameters, stages_policies=stages_policies)
