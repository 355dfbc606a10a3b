"""Refuses settings that do not go with engines and trainer on the same devices, in turns (`pipeline.placement = "colocated"`), be it all
engines or all but some (`engine.apart`)."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.config.engines import EngineSection
from pipelinerl.config.modes import Mode, Placement
from pipelinerl.config.sections import LoraSection, PipelineSection, WeightsSection
from pipelinerl.config.tinker import TinkerSection

TRANSPORTS = ("auto", "shared_memory", "cuda_ipc")
"""Those by which an engine reads the trainer's own memory."""


def devices_can_be_shared(
    pipeline: PipelineSection,
    engine: EngineSection,
    weights: WeightsSection,
    lora: LoraSection,
    tinker: TinkerSection | None,
) -> Iterator[str]:
    if pipeline.placement is not Placement.COLOCATED:
        if engine.sleep_kv != "drop":
            yield f'engine.sleep_kv is "{engine.sleep_kv}", and no engine sleeps: pipeline.placement is "apart". Leave it out.'
        if engine.apart:
            yield f'engine.apart is {engine.apart}, and every engine stands apart: pipeline.placement is "apart". Leave it out.'
        return
    if engine.apart >= engine.count:
        yield (
            f"engine.apart is {engine.apart} and engine.count is {engine.count}: no engine would take turns with the trainer. Raise"
            ' engine.count, or set pipeline.placement to "apart".'
        )
    drops_kv = engine.sleep_kv == "drop" and (weights.kv_max_staleness is not None or weights.kv_max_kl is not None)
    for is_there, other, do in (
        (
            pipeline.mode is Mode.ONE_STEP_OFF,
            'pipeline.mode is "one_step_off", which trains a batch while the next is generated',
            'Set it to "streaming" or "sync".',
        ),
        (
            weights.transport not in TRANSPORTS,
            f'weights.transport is "{weights.transport}", which copies policies that engines could read where they are',
            'Set it to "auto".',
        ),
        (weights.delta, "weights.delta is true, which keeps two more copies of the policy to send less", "Leave it out."),
        (
            lora.rank > 0,
            f"lora.rank is {lora.rank}: the weights under the adapters would be held twice, by engines and by the trainer",
            'Train all weights, or set pipeline.placement to "apart".',
        ),
        (
            engine.quantization != "none",
            f'engine.quantization is "{engine.quantization}", a second copy of the weights',
            "Leave it out.",
        ),
        (
            engine.elsewhere > 0,
            f"engine.elsewhere is {engine.elsewhere}: their devices would not be the trainer's",
            "Leave it out.",
        ),
        (
            engine.num_stages > 1,
            "engine.options.pipeline_parallel_size lets passes begin before others end, and an engine falls asleep between two",
            "Use tensor_parallel_size.",
        ),
        (
            engine.async_scheduling is True,
            "engine.async_scheduling is true: a forward pass would be under way when an engine falls asleep",
            "Leave it out.",
        ),
        (
            drops_kv,
            'weights.kv_max_staleness or kv_max_kl is set, and every KV cache is computed anew (engine.sleep_kv = "drop")',
            'Leave them out, or set engine.sleep_kv to "keep".',
        ),
        (tinker is not None, "`pipelinerl serve` trains when its clients say so", "Leave one of them out."),
    ):
        if is_there:
            yield f'pipeline.placement is "colocated", and {other}. {do}'
