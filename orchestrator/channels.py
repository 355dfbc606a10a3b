"""The channels that join the stages, each bounded; a full one makes its giver wait."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.rollouts.rows import Row, StepEnd
from orchestrator.stages.environment import Turn
from orchestrator.stages.prompts import Drawn
from pipelinerl.messages import PolicyPublished, ScoredTrajectory, TrainerReady, Trajectory
from pipelinerl.runtime.stage import Channel
from pipelinerl.runtime.watch import Watch

PROMPTS_AHEAD = 64
"""Prompts tokenised before an engine has room for them. More only makes a resumed run repeat more tokenisation."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """One for each arrow of the picture in `orchestrator.pipeline`, in the order of the flow."""

    prompts: Channel[Drawn]
    completions: Channel[Trajectory]
    """From engines, to the collecting half of generation."""
    turns: Channel[Turn] | None
    """None in a run without an environment."""
    sampled: Channel[Trajectory]
    """From generation; the same as `generated` in a run without a script."""
    generated: Channel[Trajectory]
    """The same as `trajectories` in a run without a process reward model."""
    trajectories: Channel[Trajectory]
    scored: Channel[ScoredTrajectory]
    prm_scored: Channel[ScoredTrajectory]
    """The same as `scored` in a run without a process reward model."""
    group_scored: Channel[ScoredTrajectory]
    """The same as `prm_scored` in a run without rewards that compare siblings."""
    grouped: Channel[ScoredTrajectory]
    """To batching; the same as `group_scored` in a run without a script, which decides about groups itself."""
    packed: Channel[Row | StepEnd]
    """From the packing half of batching, to the half that waits for the ledger."""
    rows: Channel[Row | StepEnd]
    policies: Channel[TrainerReady | PolicyPublished]
    """From training; the same as `published` in a run without a script."""
    published: Channel[TrainerReady | PolicyPublished]

    @property
    def queues(self) -> list[Channel[Any]]:
        """The channels between stages that carry samples, for the gauges."""
        scored = (self.scored, self.prm_scored, self.group_scored)
        between = (self.prompts, self.sampled, self.generated, self.trajectories, *scored, self.rows)
        return list(dict.fromkeys(between))


def make_channels(
    *,
    watch: Watch,
    queue_bytes: int,
    num_policies: int,
    has_environment: bool = False,
    has_prm: bool = False,
    compares_siblings: bool = False,
    in_script: bool = False,
) -> Channels:
    """Make the channels of a run. `queue_bytes` bounds each channel of tokens; `num_policies` is how many there will be, each a few bytes.

    A stage that the run does not have has no channel of its own: its neighbours are joined directly.
    """

    def channel(name: str, giver: str, taker: str, *, most: int | None = None) -> Channel[Any]:
        """Make a channel that is bounded in bytes, or in items with `most`."""
        bound, size = (queue_bytes, _num_bytes) if most is None else (most, _one)
        return Channel(name, giver=giver, taker=taker, watch=watch, bound_bytes=bound, size=size, label=_about)

    before, after = ("script", "script") if in_script else ("generation", "batching")  # the stages around those that score
    trajectories = channel("trajectories", "prm" if has_prm else before, "scoring")
    generated = channel("generated", before, "prm") if has_prm else trajectories
    last = "group_rewards" if compares_siblings else after
    scored = channel("scored", "scoring", "prm" if has_prm else last)
    prm_scored = channel("prm_scored", "prm", last) if has_prm else scored
    group_scored = channel("group_scored", "group_rewards", after) if compares_siblings else prm_scored
    policies = channel("policies", "training", "script" if in_script else "weight_sync", most=num_policies)
    return Channels(
        prompts=channel("prompts", "script" if in_script else "prompts", "generation", most=PROMPTS_AHEAD),
        completions=channel("completions", "engines", "generation"),
        turns=channel("turns", "generation", "environment") if has_environment else None,
        sampled=channel("sampled", "generation", "script") if in_script else generated,
        generated=generated,
        trajectories=trajectories,
        scored=scored,
        prm_scored=prm_scored,
        group_scored=group_scored,
        grouped=channel("grouped", "script", "batching") if in_script else group_scored,
        packed=channel("packed", "batching", "ledger"),
        rows=channel("rows", "batching", "training"),
        policies=policies,
        published=channel("published", "script", "weight_sync", most=num_policies) if in_script else policies,
    )


def _one(item: Any) -> int:
    return 1


def _num_bytes(item: Any) -> int:
    match item:
        case ScoredTrajectory():
            return item.trajectory.num_bytes
        case Turn():
            return item.episode.num_bytes
        case _:
            return item.num_bytes


def _about(item: Any) -> str:
    """Name an item, for the verdict on a stall."""
    match item:
        case Drawn():
            return f"prompt {item.prompt.prompt_id}"
        case Row() | StepEnd():
            return f"of step {item.step}"
        case TrainerReady() | PolicyPublished():
            return f"version {item.version}"
        case Turn():
            rollout, engine_id = item.rollout, item.engine_id
        case _:
            rollout = item.trajectory if isinstance(item, ScoredTrajectory) else item
            engine_id = rollout.engine_id
    return f"rollout {rollout.rollout_id}, attempt {rollout.attempt}, of engine-{engine_id}"
