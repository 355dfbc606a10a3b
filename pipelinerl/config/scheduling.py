"""Refuses settings of who is stopped early, and of who goes to which engine, that would bias what is trained or change nothing."""

from __future__ import annotations

from collections.abc import Iterator

from pipelinerl.config.engines import EngineSection
from pipelinerl.config.gateway import GatewaySection
from pipelinerl.config.scoring import EnvironmentSection, PrmSection, RewardSection
from pipelinerl.config.sections import ModelSection, PipelineSection, RolloutSection
from pipelinerl.config.tinker import TinkerSection


def early_stop_is_unbiased(prm: PrmSection, reward: tuple[RewardSection, ...]) -> Iterator[str]:
    if prm.early_stop.threshold is None:
        return
    if not prm.is_used:
        threshold = prm.early_stop.threshold
        yield f"prm.early_stop.threshold is {threshold:g} and no process reward model says which rollouts are hopeless. Set prm.path."
    if any(one.per == "group" for one in reward):
        yield (
            'prm.early_stop.threshold is set and a reward has per = "group": siblings would be compared with those only that were not'
            " stopped. Leave one of them out."
        )


def cut_is_unbiased(
    rollout: RolloutSection,
    prm: PrmSection,
    reward: tuple[RewardSection, ...],
    environment: EnvironmentSection,
    gateway: GatewaySection | None,
) -> Iterator[str]:
    cut_after = rollout.cut_after
    if cut_after is None:
        return
    if cut_after >= rollout.group_size:
        yield f"rollout.cut_after is {cut_after}, and no sibling of {rollout.group_size} (rollout.group_size) is left then. Lower it."
    for is_there, other in (
        (prm.is_used, "a process reward model scores rollouts while they are written; it has a stop of its own, prm.early_stop"),
        (any(one.per == "group" for one in reward), 'a reward with per = "group" would compare those only that were not stopped'),
        (environment.is_used or gateway is not None, "an episode of several turns may be between two of them"),
    ):
        if is_there:
            yield f"rollout.cut_after is {cut_after}, and {other}. Leave one of them out."


def dispatch_is_for_completions(
    pipeline: PipelineSection, environment: EnvironmentSection, gateway: GatewaySection | None
) -> Iterator[str]:
    used = {"dispatch": pipeline.dispatch != "in_order", "routing": pipeline.routing != "least_busy", "kv_admission": pipeline.kv_admission}
    plays = environment.key if environment.is_used else "a [gateway] section" if gateway is not None else ""
    for key in (key for key, is_used in used.items() if is_used and plays):
        yield (
            f"pipeline.{key} is {getattr(pipeline, key)}, and {plays} makes rollouts of several turns, whose lengths and pauses nothing"
            " predicts. Leave it out."
        )


def why_sequences_stay(
    rollout: RolloutSection,
    model: ModelSection,
    prm: PrmSection,
    environment: EnvironmentSection,
    gateway: GatewaySection | None,
    tinker: TinkerSection | None,
) -> Iterator[str]:
    """Yield each reason for which no sequence of a run goes on in another engine with its tokens."""
    for is_there, why in (
        (prm.is_used, "a process reward model (prm) follows rollouts in their engines"),
        (rollout.cut_after is not None, "rollout.cut_after decides about the attempt that is being written"),
        (environment.is_used, f"{environment.key} makes rollouts of several turns, which stay where their turns before are"),
        (gateway is not None, "agents ([gateway]) speak in turns, which stay where their turns before are"),
        (model.replay_routing, "model.replay_routing records the experts that one engine has chosen"),
        (bool(rollout.structured_outputs), "rollout.structured_outputs holds a completion to a constraint from its beginning"),
        (tinker is not None, "[tinker] has clients say what is sampled"),
    ):
        if is_there:
            yield why


def sequences_may_move(
    pipeline: PipelineSection,
    engine: EngineSection,
    rollout: RolloutSection,
    model: ModelSection,
    prm: PrmSection,
    environment: EnvironmentSection,
    gateway: GatewaySection | None,
    tinker: TinkerSection | None,
) -> Iterator[str]:
    if pipeline.migration == "off":
        return
    alone = [f"engine.count is {engine.count}, so there is no other engine"] if engine.count < 2 else []
    for why in (*alone, *why_sequences_stay(rollout, model, prm, environment, gateway, tinker)):
        yield f'pipeline.migration is "{pipeline.migration}", and {why}: no sequence would move. Leave one of them out.'
