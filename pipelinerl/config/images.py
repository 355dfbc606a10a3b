"""What models that take images do not go with."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.config.backends import TrainerBackend
from pipelinerl.config.engines import EngineSection
from pipelinerl.config.families import takes_images
from pipelinerl.config.gateway import GatewaySection
from pipelinerl.config.modes import Placement
from pipelinerl.config.scoring import EnvironmentSection, PrmSection
from pipelinerl.config.sections import LoraSection, ModelSection, PipelineSection, TrainerSection
from pipelinerl.config.tinker import TinkerSection
from pipelinerl.config.trainer_memory import ActivationCheckpointing, Offload


def images_go_with(
    model: ModelSection,
    engine: EngineSection,
    trainer: TrainerSection,
    lora: LoraSection,
    environment: EnvironmentSection,
    prm: PrmSection,
    gateway: GatewaySection | None,
    tinker: TinkerSection | None,
    pipeline: PipelineSection,
) -> Iterator[str]:
    """Yield the problem of a run whose model takes images, whether or not its prompts have some: what was not written for such models."""
    if not takes_images(model.path):
        return
    layout = trainer.layout
    asked = {f"trainer.parallel.{kind}": getattr(layout, kind) > 1 for kind in ("shard", "context", "tensor", "pipeline", "expert")}
    asked |= {
        f'trainer.backend = "{trainer.backend}"': trainer.backend is not TrainerBackend.FSDP2,
        f'trainer.offload = "{trainer.offload}"': trainer.offload is Offload.WEIGHTS,
        "trainer.activation_checkpointing": trainer.activation_checkpointing is not ActivationCheckpointing.NONE,
        "trainer.compile": trainer.compile,
        "engine.options.tensor_parallel_size or pipeline_parallel_size": engine.num_ranks > 1,
        'engine.quantization = "int8"': engine.quantization == "int8",
        "lora.rank": lora.rank > 0,
        environment.key: environment.is_used,
        "prm": prm.is_used,
        "gateway": gateway is not None,
        "pipelinerl serve": tinker is not None,
        'pipeline.placement = "colocated"': pipeline.placement is Placement.COLOCATED,
    }
    if found := [key for key, is_asked in asked.items() if is_asked]:
        yield f"model.path {model.path} takes images, and {', '.join(found)} is not written for such models. Leave it out."
