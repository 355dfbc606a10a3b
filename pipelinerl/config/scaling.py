"""Which runs may get other engines, or another number of trainer ranks, while they are live (`pipelinerl scale`)."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.config.modes import Placement
from pipelinerl.config.sections import EngineSection, LoraSection, PipelineSection, TrainerSection, WeightsSection
from pipelinerl.config.tinker import TinkerSection


def why_fixed(pipeline: PipelineSection, weights: WeightsSection, tinker: TinkerSection | None) -> str | None:
    """Say why a run keeps the engines that it began with; None where they may join and leave."""
    if pipeline.placement is Placement.COLOCATED:
        return 'pipeline.placement is "colocated": engines have the trainer\'s devices, and no others'
    if weights.transport == "sharded":
        return 'weights.transport is "sharded": its engines pass policies along among those that the trainer met at its start'
    if tinker is not None:
        return "`pipelinerl serve` keeps the engines that it begins with"
    return None


def why_trainer_fixed(pipeline: PipelineSection, weights: WeightsSection, tinker: TinkerSection | None, lora: LoraSection) -> str | None:
    """Say why a run's trainer keeps the ranks that it began with; None where it may get others."""
    if lora.rank:
        return f"lora.rank is {lora.rank}: a trainer of adapters keeps its ranks"
    return why_fixed(pipeline, weights, tinker)


def trainer_may_change(
    trainer: TrainerSection, pipeline: PipelineSection, weights: WeightsSection, tinker: TinkerSection | None, lora: LoraSection
) -> Iterator[str]:
    if trainer.max_ranks is None:
        return
    if trainer.max_ranks < trainer.ranks:
        yield f"trainer.max_ranks is {trainer.max_ranks} but trainer.ranks is {trainer.ranks}: raise it, or leave it out."
    elif trainer.max_ranks > trainer.ranks and (why := why_trainer_fixed(pipeline, weights, tinker, lora)) is not None:
        yield f"trainer.max_ranks is {trainer.max_ranks}, and no rank can join {trainer.ranks}: {why}. Leave it out."


def engines_may_join(
    engine: EngineSection, pipeline: PipelineSection, weights: WeightsSection, tinker: TinkerSection | None
) -> Iterator[str]:
    if engine.max_count is None:
        return
    if engine.max_count < engine.count:
        yield f"engine.max_count is {engine.max_count} but engine.count is {engine.count}: raise it, or leave it out."
    elif engine.max_count > engine.count and (why := why_fixed(pipeline, weights, tinker)) is not None:
        yield f"engine.max_count is {engine.max_count}, and no engine can join {engine.count}: {why}. Leave it out."
