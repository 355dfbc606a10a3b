"""The settings of a run made those of a server: what clients decide is theirs, and what a server cannot do is refused before it starts."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.config import Config, TinkerSection
from pipelinerl.config.modes import Placement
from pipelinerl.engine.kv import context_of
from pipelinerl.errors import ConfigError

NUM_ADAPTERS = 8
"""Adapters that engines hold side by side by default: those of as many samplers are there without being brought. Each takes memory."""


def served(config: Config) -> Config:
    """Return the settings of a server. Raises `ConfigError` with everything that it cannot do."""
    if problems := list(_problems(config)):
        raise ConfigError("pipelinerl serve:\n" + "\n".join(f"  - {problem}" for problem in problems))
    changes: dict[str, object] = {"tinker": config.tinker or TinkerSection()}  # pyright: ignore[reportCallIssue]
    if (context := context_of(config.model.path, max_tokens=config.model.max_tokens)) is not None:
        # How much is sampled is the clients' to say: here it is what the KV cache is sized by.
        changes["rollout"] = config.rollout.model_copy(update={"max_tokens": min(config.rollout.max_tokens, max(1, context // 2))})
    if config.lora.rank:
        separate = {"adapters": "separate", "adapter_versions": config.weights.adapter_versions or NUM_ADAPTERS}
        changes["weights"] = config.weights.model_copy(update=separate)
    return config.model_copy(update=changes)


def _problems(config: Config) -> Iterator[str]:
    if config.trainer.ranks > 1:
        yield f"trainer.ranks is {config.trainer.ranks}: a server trains on one rank. Set it to 1"
    if config.checkpoint.to is not None:
        yield "checkpoint.to: a server copies nothing to an object store, and what clients save is in <run.folder>/saved. Leave it out"
    if config.gateway is not None:
        yield "section gateway lends a run's rollouts to agents, and a server has none: leave it out"
    if config.lora.rank and config.weights.adapters == "merged":
        yield 'weights.adapters is "merged", and clients\' adapters are kept apart: leave it out'
    if config.weights.delta:
        yield "weights.delta sends what changed since the version before, which may be another client's: leave it out"
    if config.pipeline.placement is not Placement.APART:
        yield f'pipeline.placement is "{config.pipeline.placement}", and clients say themselves when to train: leave it out'
    if config.engine.num_stages > 1 and config.lora.rank:
        yield "engine.options makes a pipeline of several stages, which serves no adapters side by side: use one stage, or lora.rank = 0"
