"""Settings that would do nothing in this run: what is printed acts, so they are refused or said.

Naming a model that nobody would load is refused: whoever names one believes that the run reads it. A number that has no part to act on
(`lora.alpha` where `lora.rank` is 0) is said, so that a file can keep its sections while a part is switched off.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from pipelinerl.algorithms.method import CRITICS, REFERENCE_OFFERS, Method
from pipelinerl.config import Config, Section
from pipelinerl.config.validation import no_quantised_engine


def refused(config: Config, *, method: Method, in_script: bool = False) -> Iterator[str]:
    """Models that are named and that this method would not load, and engines that could take no policy."""
    is_read = in_script or method.needs & REFERENCE_OFFERS  # a script asks for its log-probabilities, or for a loss that reads them
    for key, folder in config.reference.folders.items() if not is_read else ():
        yield (
            f"{key} is {folder}, and algorithm {method.name} reads no reference or teacher: nothing would change."
            ' Leave it out, or give the method a KL: algorithm.overrides = { kl = "k3" }'
        )
    quantisation = config.engine.options.get("quantization")
    if quantisation and (not config.lora.rank or config.weights.adapters == "merged"):
        yield no_quantised_engine("engine.options.quantization", str(quantisation))
    if config.critic.path is not None and not method.needs & CRITICS:
        yield f"critic.path is {config.critic.path}, and algorithm {method.name} trains no critic. Leave it out, or choose ppo or vapo."


def unused_keys(config: Config, *, method: Method) -> Iterator[str]:
    """One sentence for each reason, with the keys that were changed and will not act."""
    for keys, acts, reason in _conditions(config, method):
        changed = [] if acts else [key for key in keys if _is_changed(config, key)]
        if changed:
            yield f"{', '.join(changed)}: no effect here, because {reason}"


def _conditions(config: Config, method: Method) -> Iterator[tuple[tuple[str, ...], bool, str]]:
    """Keys, whether they act in this run, and why they do not."""
    yield ("lora.alpha", "lora.targets", "weights.adapter_versions"), config.lora.rank > 0, "lora.rank is 0: all weights are trained"
    yield ("weights.adapter_versions",), config.weights.adapters != "merged", 'weights.adapters is "merged"'
    yield (
        ("evaluation.every", "evaluation.limit", "evaluation.temperature", "evaluation.samples", "evaluation.deadline_s"),
        config.evaluation.source is not None,
        "evaluation.source names no held-out prompts",
    )
    yield (
        ("environment.max_turns", "environment.options", "environment.concurrency", "environment.deadline_s"),
        config.environment.is_used,
        "neither environment.function nor environment.cls names one",
    )
    calls_tools = config.gateway is not None or config.environment.cls is not None
    yield ("data.tool_call_parser",), calls_tools, "there is neither a gateway nor an environment.cls: nobody reads tool calls"
    prm = tuple(f"prm.{key}" for key in type(config.prm).model_fields if key not in ("path", "judge", "early_stop"))
    yield prm, config.prm.is_used, "neither prm.path nor prm.judge.url names what would score steps"
    yield ("prm.convention", "prm.tag", "prm.dtype", "prm.options"), config.prm.judge.url is None, "prm.judge scores steps by words"
    stop = tuple(f"prm.early_stop.{key}" for key in ("keep_probability", "min_steps", "max_false_stop_fraction"))
    yield stop, config.prm.early_stop.threshold is not None, "prm.early_stop.threshold is not set: no rollout is stopped"
    judge = tuple(f"prm.judge.{key}" for key in type(config.prm.judge).model_fields if key != "url")
    yield judge, config.prm.judge.url is not None, "prm.judge.url names no endpoint"
    yield ("trainer.min_ranks",), config.pipeline.elastic, "pipeline.elastic is false: ranks change where a person says so"
    yield (
        ("pipeline.elastic_tensor_parallel_sizes",),
        config.pipeline.elastic,
        "pipeline.elastic is false: engines get other ranks where a person says so",
    )
    yield ("trainer.parallel.schedule",), config.trainer.parallel.pipeline > 1, "trainer.parallel.pipeline is 1"
    gathers = config.trainer.layout.shard > 1 and config.trainer.layout.pipeline == 1 and config.trainer.backend == "fsdp2"
    why = "layers are gathered ahead where fsdp2 shards them (trainer.parallel.shard above 1) and no pipeline keeps them"
    yield ("trainer.prefetch_layers",), gathers, why
    yield ("critic.learning_rate", "critic.warmup_steps"), bool(method.needs & CRITICS), f"algorithm {method.name} trains no critic"
    yield ("reference.offload",), bool(config.reference.folders), "reference.path names no model"
    yield ("sft_stream.batch_size",), config.sft_stream.source is not None, "sft_stream.source names no rows"
    yield ("sft_stream.source", "sft_stream.batch_size"), config.sft_stream.coef != 0, "sft_stream.coef is 0"
    yield ("run.restart_wait_s",), config.run.restarts > 0, "run.restarts is 0"
    yield ("pipeline.max_staleness",), config.pipeline.mode == "streaming", f"pipeline.mode is {config.pipeline.mode}"
    yield ("tracking.project",), "wandb" in config.tracking.to, "tracking.to does not name wandb"
    prometheus = ("tracking.prometheus_interface", "tracking.prometheus_port")
    yield prometheus, "prometheus" in config.tracking.to, "tracking.to does not name prometheus"
    yield (
        ("engine.kv_cache_bytes", "engine.async_scheduling", "engine.quantization", "engine.options", "rollout.structured_outputs"),
        config.engine.kind == "vllm",
        f"engine.kind is {config.engine.kind}",
    )
    has_bfloat16 = config.model.dtype == "bfloat16"
    yield ("trainer.float32_head",), has_bfloat16, f"model.dtype is {config.model.dtype}"


def _is_changed(config: Config, key: str) -> bool:
    *sections, name = key.split(".")
    section: Any = config
    for part in sections:
        section = getattr(section, part)
    assert isinstance(section, Section)
    return getattr(section, name) != type(section).model_fields[name].get_default(call_default_factory=True)
