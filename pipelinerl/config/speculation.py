"""Speculative decoding (`engine.speculation`): what it does not go with, and keys of it that would change nothing."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.config.engines import EngineSection
from pipelinerl.config.sections import ModelSection, RolloutSection


def speculation_goes_with(engine: EngineSection, model: ModelSection, rollout: RolloutSection) -> Iterator[str]:
    """Drafts are made between two passes of vLLM, of what the last one sampled."""
    if engine.speculation == "off":
        for name in ("speculate_below", "speculative_tokens"):
            if (value := getattr(engine, name)) != EngineSection.model_fields[name].default:
                yield f'engine.{name} is {value}, and engine.speculation is "off": it would change nothing. Set one of them.'
        return
    for is_there, other in (
        (engine.kind == "fake", 'engine.kind is "fake", which has no forward passes to save'),
        (engine.async_scheduling is True, "engine.async_scheduling is true: a pass would be scheduled before there are drafts for it"),
        (engine.num_stages > 1, f"engine.options.pipeline_parallel_size is {engine.num_stages}: passes of a pipeline overlap"),
        (model.replay_routing, "model.replay_routing records experts of every token that a pass computes, those of rejected drafts, too"),
        (
            engine.speculation == "siblings" and rollout.group_size == 1,
            'rollout.group_size is 1: a rollout has no siblings whose completions could serve as drafts ("ngram" needs none)',
        ),
    ):
        if is_there:
            yield f'engine.speculation is "{engine.speculation}", and {other}. Leave one of them out.'
