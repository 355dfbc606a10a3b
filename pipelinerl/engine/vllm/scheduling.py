"""Asynchronous scheduling: vLLM schedules the next forward pass while one computes, so that a GPU does not wait for Python in between.

Where it can be had is vLLM's to say: it turns it on by itself where nothing stands against it, and raises what does where it is asked for.
Two of its answers are silent, and are found here. On a CPU it is turned off whatever was asked for, because it "is not required on CPU"
(`vllm.platforms.cpu`): a pass there computes in the call that launches it, or in ranks that take the cores which scheduling would have. It
works all the same, so a run that asks for it has it. And along a pipeline it is let through for vLLM's first model runner, which "does not
support it with pipeline parallelism" (`vllm.config.vllm`): that is refused.
"""

from __future__ import annotations

from typing import Any

from pipelinerl.errors import ConfigError

ON_CPU = "async scheduling is not required on CPU"
"""vLLM's reason for turning it off there."""
ALONG_A_PIPELINE = "the V1 model runner does not support it with pipeline parallelism"
"""vLLM's reason for leaving it off there, in its own words."""


def choose_scheduling(config: Any, wanted: bool | None) -> str:
    """Have vLLM's config, which its platform has completed, schedule as wanted; the choice in a sentence, with its reason.

    `wanted`: `engine.async_scheduling`. Raises `ConfigError` where the model runner here cannot follow.
    """
    settings = config.scheduler_config
    is_along_a_pipeline = config.parallel_config.pipeline_parallel_size > 1 and not config.use_v2_model_runner
    if wanted and is_along_a_pipeline:
        raise ConfigError(
            "engine.async_scheduling is true, and engine.options.pipeline_parallel_size is"
            f" {config.parallel_config.pipeline_parallel_size}: {ALONG_A_PIPELINE}, says vLLM, and its second one needs a GPU and Triton."
            " Leave engine.async_scheduling out: the passes of a pipeline overlap without it."
        )
    if wanted and not settings.async_scheduling:
        settings.async_scheduling = True
    if settings.async_scheduling:
        asked = "engine.async_scheduling says so" if wanted else "nothing stands against it"
        return f"forward passes are scheduled while the one before computes, and stamped when they are launched: {asked}"
    if wanted is False:
        why = "engine.async_scheduling says so"
    elif is_along_a_pipeline:
        why = ALONG_A_PIPELINE
    elif config.speculative_config is not None:
        why = "drafts are made of what the pass before has sampled (engine.speculation)"
    else:
        why = ON_CPU if config.device_config.device_type == "cpu" else "vLLM's log says why"
    return f"a forward pass is scheduled when the one before has ended: {why}"
