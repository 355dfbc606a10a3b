"""What cannot travel from shard to shard (`weights.transport = "sharded"`), told before anything runs."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.config.engines import EngineSection
from pipelinerl.config.sections import TrainerSection, WeightsSection


def sharded_policies_can_be_sent(weights: WeightsSection, trainer: TrainerSection, engine: EngineSection) -> Iterator[str]:
    """Say each setting that does not go with it, and what to do."""
    if weights.transport != "sharded":
        return
    layout = trainer.layout
    if layout.shard * layout.tensor * layout.pipeline * layout.expert == 1:
        yield (
            'weights.transport is "sharded", and every rank of the trainer holds the whole model (trainer.parallel). Cut it by'
            ' trainer.parallel.shard, tensor, pipeline or expert, or set weights.transport = "gloo".'
        )
    if engine.quantization != "none":
        yield (
            f'weights.transport is "sharded", and engine.quantization is "{engine.quantization}", which is made of whole policies. Leave'
            " one of them out."
        )
