"""Sampling under constraints (`rollout.structured_outputs`) draws from another distribution than the trainer computes: what it asks for."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.config.engines import EngineSection
from pipelinerl.config.sections import RolloutSection, TrainerSection

BOUNDS = ("max_logprob_gap", "max_mismatch_kl")


def constraints_are_accounted_for(rollout: RolloutSection, trainer: TrainerSection, engine: EngineSection) -> Iterator[str]:
    """The bounds that would end the run are set, and passes are not launched before those that they stand on have ended."""
    if not rollout.structured_outputs:
        return
    if unset := [f"trainer.{name}" for name in BOUNDS if name not in trainer.model_fields_set]:
        yield (
            "rollout.structured_outputs: tokens carry the log-probability under the constraint, the trainer computes it without one, and"
            f" the run would end over the difference. Set {' and '.join(unset)} to what you accept (in nats; 100 accepts all)."
        )
    overlapping = {"engine.async_scheduling": engine.async_scheduling, "engine.options.pipeline_parallel_size": engine.num_stages > 1}
    for key in (key for key, is_set in overlapping.items() if is_set):
        yield f"{key} lets passes overlap, and under rollout.structured_outputs each needs what the last sampled. Leave one out."
