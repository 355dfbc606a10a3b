"""What episodes that are larger than a packed row do not go with."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.config.backends import TrainerBackend
from pipelinerl.config.gateway import GatewaySection
from pipelinerl.config.sections import BatchSection, ReferenceSection, TrainerSection


def large_episodes_go_with(
    gateway: GatewaySection | None, batch: BatchSection, trainer: TrainerSection, reference: ReferenceSection
) -> Iterator[str]:
    """Yield the problems of a run whose agents' episodes may have more tokens than a row of the trainer."""
    if gateway is None or gateway.max_episode_tokens is None:
        return
    what = f"gateway.max_episode_tokens is {gateway.max_episode_tokens}"
    if gateway.max_episode_tokens < batch.max_tokens:
        yield f"{what}, and batch.max_tokens {batch.max_tokens}: a packed row takes more. Raise it, or leave it out."
    layout = trainer.layout
    asked = {f"trainer.parallel.{kind}": getattr(layout, kind) > 1 for kind in ("shard", "context", "tensor", "pipeline", "expert")}
    asked |= {
        f'trainer.backend = "{trainer.backend}"': trainer.backend is not TrainerBackend.FSDP2,
        "reference.teachers": bool(reference.teachers),
    }
    if found := [key for key, is_asked in asked.items() if is_asked]:
        yield f"{what}: the trainer computes such an episode in parts, which is not written with {', '.join(found)}. Leave one out."
