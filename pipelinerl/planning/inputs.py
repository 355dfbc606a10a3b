"""What the formulas read: the model's shape, the GPU, the run's settings, and constants that had to be assumed.

Every input says where its value comes from. An assumed one says so, with how far off it may be; `pipelinerl plan --set NAME=VALUE` puts a
measured value in its place.
"""

from __future__ import annotations

import dataclasses
import difflib
import functools
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pipelinerl.algorithms.method import CRITICS, REFERENCE_OFFERS, Method
from pipelinerl.config import Config
from pipelinerl.config.sections import Mode
from pipelinerl.config.trainer_memory import ActivationCheckpointing, Offload
from pipelinerl.engine.budget import LIBRARY_BYTES, MARGIN_FRACTION, MAX_BATCHED_TOKENS, batched_tokens
from pipelinerl.errors import ConfigError
from pipelinerl.planning.shape import Shape
from pipelinerl.planning.sheet import Values

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
TRANSPORTS = ("cuda_ipc", "shared_memory", "nccl", "gloo", "files")
"""By the number that the formulas know each by; -1: what `auto` would take; `DIRECT`: one that nothing here is."""
DIRECT = len(TRANSPORTS)
LOGIT_NUMBERS = 1 << 23
"""Numbers of one table of logits: `trainer.model.room.LEAST_BYTES`, which a head node cannot import. Larger ones take what is free."""
COLOCATED = 3
"""The mode, as the formulas know it, in which the same GPUs generate a batch and train on it in turns; from here on they are shared."""
CARRYING = 4
"""The mode in which they do, and sequences that are not finished go on in the next phase."""


@dataclasses.dataclass(frozen=True, slots=True)
class Input:
    """One number that the formulas read."""

    unit: str
    what: str
    assumed: float | None = None
    """The value where nothing else gives one."""
    spread: float = 0.0
    """How far off that may be, in parts of itself."""
    source: str = ""
    """Where an assumed value comes from."""


def _model(**whats: str) -> dict[str, Input]:
    return {name: Input("", what) for name, what in whats.items()}


_MODEL = _model(
    parameters="of the model",
    expert_parameters="of all routed experts",
    embedding_parameters="of one table of embeddings",
    embedding_tables="1 where input and output embeddings are one",
    matmul_parameters="parameters that multiply each token",
    layers="of the model",
    hidden="width of the model",
    vocabulary="words",
    key_heads="heads of keys",
    is_latent="1: multi-head latent attention",
    query_width="numbers of a layer's queries",
    value_width="numbers of a layer's attention output",
    normed_width="numbers of a layer's attention that are normalised",
    cache_width="numbers that a layer's KV cache keeps of a token",
    inner_width="inner numbers of a feed-forward layer that a token computes",
    intermediate="inner size of a dense feed-forward layer",
    expert_size="inner size of one expert",
    experts="of a layer",
    experts_per_token="experts that a token chooses",
)
_GPU = {
    "gpu_bytes": Input("B", "memory of a GPU, as the driver reports it"),
    "peak_flops": Input("FLOP/s", "dense tensor-core peak in 16 bits"),
    "bandwidth": Input("B/s", "of a GPU's memory"),
    "nvlink_bandwidth": Input("B/s", "between GPUs of a node, one direction"),
    "nic_bandwidth": Input("B/s", "of a GPU's network card"),
    "host_bandwidth": Input("B/s", "between a GPU and its host"),
    "gpus_per_node": Input("GPUs", "of a node"),
}
_RUN = {
    "engines": Input("", "engine.count"),
    "engines_apart": Input("", "engine.apart"),
    "engine_tensor": Input("ranks", "engine.options.tensor_parallel_size"),
    "engine_pipeline": Input("ranks", "engine.options.pipeline_parallel_size"),
    "max_running": Input("sequences", "engine.max_running"),
    "ranks": Input("", "trainer.ranks"),
    "shard": Input("ranks", "trainer.parallel.shard"),
    "context": Input("ranks", "trainer.parallel.context"),
    "tensor": Input("ranks", "trainer.parallel.tensor"),
    "pipeline": Input("ranks", "trainer.parallel.pipeline"),
    "expert": Input("ranks", "trainer.parallel.expert"),
    "is_checkpointed": Input("", "1: trainer.activation_checkpointing is selective or full"),
    "keeps_products": Input("", "1: trainer.activation_checkpointing is selective, which keeps matrix products and attention"),
    "prefetch_layers": Input("layers", "trainer.prefetch_layers"),
    "offloads_optimizer": Input("", "1: trainer.offload is optimizer or weights"),
    "offloads_weights": Input("", "1: trainer.offload is weights"),
    "offloads_reference": Input("", "1: reference.offload"),
    "row_tokens": Input("tokens", "batch.max_tokens"),
    "groups_per_step": Input("groups", "batch.groups_per_step"),
    "group_size": Input("rollouts", "rollout.group_size"),
    "max_tokens": Input("tokens", "rollout.max_tokens"),
    "context_tokens": Input("tokens", "longest prompt plus completion: model.max_tokens, or the model's own"),
    "max_staleness": Input("versions", "pipeline.max_staleness"),
    "epochs": Input("", "trainer.epochs"),
    "steps": Input("steps", "trainer.steps"),
    "dtype_bytes": Input("B", "of a number of model.dtype"),
    "engine_dtype_bytes": Input("B", "of a weight in the engine"),
    "kv_dtype_bytes": Input("B", "of a number in the KV cache"),
    "trained_parameters": Input("parameters", "all, or those of the adapters (lora.rank)"),
    "policy_parameters": Input("parameters", "that travel with each version"),
    "references": Input("", "frozen models the method reads"),
    "critics": Input("", "1: the method trains a second model"),
    "transport": Input("", "weights.transport, as its place in the list; -1: auto"),
    "mode": Input("", "pipeline.mode: 0 streaming, 1 one_step_off, 2 sync; on the same GPUs in turns 3: sync, 4: streaming"),
    "prm_gpus": Input("GPUs", "of a process reward model"),
    "prm_parameters": Input("parameters", "of the process reward model (prm.path)"),
    "prm_dtype_bytes": Input("B", "of a number of prm.dtype"),
}
_ASSUMED = {
    "prompt_tokens": Input("tokens", "mean length of a prompt", 256, 0.5, "nothing is read from the data here"),
    "mean_tokens": Input("tokens", "mean length of a completion", None, 0.5, "half of rollout.max_tokens: lengths spread evenly"),
    "length_cv": Input("", "spread of lengths: standard deviation over mean", 0.577, 0.5, "lengths spread evenly from 0 to the longest"),
    "usable_fraction": Input("", "part of a GPU's memory that the trainer can use", 0.95, 0.03, "fragments of the caching allocator"),
    "engine_margin_fraction": Input("", "part of it that no engine is given", MARGIN_FRACTION, 0.0, "pipelinerl.engine.budget"),
    "trainer_process_bytes": Input("B", "CUDA context, NCCL and libraries of a rank", 1.5e9, 0.5, "usual figures"),
    "engine_process_bytes": Input("B", "the same of an engine's, with captured graphs", LIBRARY_BYTES, 0.5, "pipelinerl.engine.budget"),
    "batched_tokens": Input("tokens", "of the largest forward pass of an engine", MAX_BATCHED_TOKENS, 0.0, "pipelinerl.engine.budget"),
    "logit_numbers": Input("", "numbers of one table of logits in the trainer", LOGIT_NUMBERS, 0.0, "trainer.model.room.LEAST_BYTES"),
    "read_efficiency": Input("", "part of the memory bandwidth that decoding reaches", 0.7, 0.25, "usual figures"),
    "decode_efficiency": Input("", "part of the peak that decoding reaches where arithmetic bounds it", 0.5, 0.3, "usual figures"),
    "prefill_efficiency": Input("", "part of the peak that reading prompts reaches", 0.5, 0.3, "usual figures"),
    "training_efficiency": Input(
        "",
        "part of the peak that the trainer's arithmetic reaches",
        0.3,
        0.4,
        "estimated from its kernels; torchtitan reaches 0.40 to 0.45",
    ),
    "step_overhead_s": Input("s", "of an engine's pass, beside its arithmetic", 2e-3, 0.5, "usual figures"),
    "sequence_overhead_s": Input("s", "of that, for each sequence", 5e-6, 0.4, "Python's part, estimated: 2.0 ms at 512, 6.1 ms at 1,024"),
    "reduce_latency_s": Input("s", "of one sum over the ranks of a node", 1e-5, 0.5, "usual figures"),
    "gloo_bandwidth": Input("B/s", "of gloo from one host", 5e9, 0.5, "published broadcasts by TCP and NCCL: 5 to 10 GB/s"),
    "files_bandwidth": Input("B/s", "of a shared file system", 2e9, 0.7, "usual figures"),
    "changed_fraction": Input("", "part of the 16-bit weights that a step changes", 0.012, 0.7, "NeMo-RL: 0.006 to 0.012; others to 0.045"),
    "switch_s": Input("s", "between the phases of what takes turns on the same GPUs", 5.0, 0.7, "usual figures"),
}
INPUTS: dict[str, Input] = {**_MODEL, **_GPU, **_RUN, **_ASSUMED}
ASSUMED = tuple(_ASSUMED)
"""Names of inputs that nobody gave: what a plan hangs on, and a run can measure."""

CHOSEN = (*(name for name in _GPU if name != "gpus_per_node"), *ASSUMED)
"""Names of inputs that `--set` may give: what neither the config nor the model tells."""


@functools.cache
def gpus() -> dict[str, dict[str, Any]]:
    """The table of GPUs, by short name."""
    return tomllib.loads(Path(__file__).with_name("gpus.toml").read_text())


def gpu_inputs(name: str) -> Values:
    """The numbers of one GPU of the table. Raises `ConfigError` for another."""
    if name.lower() not in gpus():
        near = difflib.get_close_matches(name.lower(), gpus(), 1)
        raise ConfigError(
            f"--gpu {name}: not in the table, which has {', '.join(gpus())}"
            + (f" (did you mean {near[0]}?)" if near else "")
            + ". For another one take the nearest, with --set gpu_bytes=... --set bandwidth=... --set peak_flops=..."
        )
    row = gpus()[name.lower()]
    links = {key: float(row[key]) for key in ("bandwidth", "nvlink_bandwidth", "nic_bandwidth", "host_bandwidth", "gpus_per_node")}
    return {"gpu_bytes": float(row["memory_mib"]) * 2**20, "peak_flops": float(row["peak_bf16"]), **links}


def run_inputs(config: Config, shape: Shape, *, method: Method, adapter_parameters: int = 0, prm_parameters: int = 0) -> Values:
    """The numbers of a run's settings and of its model; what has to be assumed is."""
    layout, engine, trainer = config.trainer.layout, config.engine, config.trainer
    size, longest = DTYPE_BYTES[config.model.dtype], float(config.rollout.max_tokens)
    cache_dtype = str(engine.options.get("kv_cache_dtype", "auto"))
    trained = adapter_parameters or shape.parameters
    is_separate = bool(adapter_parameters) and config.weights.adapters == "separate"
    uses_reference = bool(config.reference.folders and method.needs & REFERENCE_OFFERS)
    is_by_adapters = bool(config.lora.rank) and config.reference.path == config.model.path
    prompt = _ASSUMED["prompt_tokens"].assumed or 0.0
    assumed = {name: one.assumed for name, one in _ASSUMED.items() if one.assumed is not None}
    return {
        **assumed,
        **shape.inputs(),
        "mean_tokens": longest / 2,
        "engines": engine.count,
        "engines_apart": engine.apart,
        "engine_tensor": engine.tensor_parallel_size,
        "engine_pipeline": engine.num_stages,
        "max_running": engine.max_running,
        "ranks": layout.ranks,
        "shard": layout.shard,
        "context": layout.context,
        "tensor": layout.tensor,
        "pipeline": layout.pipeline,
        "expert": layout.expert,
        "is_checkpointed": float(trainer.activation_checkpointing is not ActivationCheckpointing.NONE),
        "keeps_products": float(trainer.activation_checkpointing is ActivationCheckpointing.SELECTIVE),
        "prefetch_layers": trainer.prefetch_layers,
        "offloads_optimizer": float(trainer.offload is not Offload.NOTHING),
        "offloads_weights": float(trainer.offload is Offload.WEIGHTS),
        "offloads_reference": float(config.reference.offload),
        "row_tokens": config.batch.max_tokens,
        "groups_per_step": config.batch.groups_per_step,
        "group_size": config.rollout.group_size,
        "max_tokens": longest,
        "context_tokens": float(config.model.max_tokens or shape.positions or prompt + longest),
        "max_staleness": config.pipeline.max_staleness,
        "epochs": trainer.epochs,
        "steps": trainer.steps,
        "dtype_bytes": size,
        "engine_dtype_bytes": 1 if engine.options.get("quantization") == "fp8" else size,
        "kv_dtype_bytes": size if cache_dtype == "auto" else 1 if cache_dtype.startswith("fp8") else DTYPE_BYTES.get(cache_dtype, size),
        "trained_parameters": trained,
        "policy_parameters": trained if is_separate else shape.parameters,
        "references": len(config.reference.folders) if uses_reference and not is_by_adapters else 0,
        "critics": float(bool(method.needs & CRITICS)),
        "transport": TRANSPORTS.index(config.weights.transport) if config.weights.transport in TRANSPORTS else -1,
        "mode": mode_of(config.pipeline.mode, is_colocated=config.is_colocated),
        "prm_parameters": config.prm.count * prm_parameters,
        "prm_dtype_bytes": DTYPE_BYTES[config.prm.dtype],
        "prm_gpus": config.prm.count * config.prm.num_ranks if config.prm.path is not None else 0,
        "batched_tokens": float(batched_tokens(engine.options)),
    }


def mode_of(mode: Mode, *, is_colocated: bool) -> int:
    """The number of a mode, as the formulas know it."""
    if is_colocated:
        return CARRYING if mode is Mode.STREAMING else COLOCATED
    return list(Mode).index(mode)


def read_settings(settings: Sequence[str]) -> Values:
    """Read `NAME=VALUE` of `--set`. Raises `ConfigError`, naming the nearest input."""
    found: Values = {}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name in _RUN:
            raise ConfigError(f"--set {setting}: that is {_RUN[name].what}; change it as on the command line of pipelinerl run")
        if name not in CHOSEN:
            near = difflib.get_close_matches(name, CHOSEN, 1)
            hint = f", did you mean {near[0]}" if near else ""
            raise ConfigError(f"--set {setting}: {name!r} is no input that can be set{hint}? There are {', '.join(CHOSEN)}")
        try:
            found[name] = float(value)
        except ValueError:
            raise ConfigError(f"--set {setting}: {value!r} is no number") from None
        if not 0 < found[name] < float("inf"):
            raise ConfigError(f"--set {setting}: {INPUTS[name].what} must be above 0")
    return found


def origin_of(name: str, *, given: Mapping[str, float]) -> str:
    """Where an input's value comes from, in a few words."""
    if name in given:
        return "--set"
    if name in _MODEL:
        return "the model's config.json"
    if name in _GPU:
        return "the table of GPUs"
    if name in _RUN:
        return "the run's settings"
    return f"assumed, ±{100 * INPUTS[name].spread:.0f} %: {INPUTS[name].source}"
