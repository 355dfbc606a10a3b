"""The channels that join the stages, each bounded; a full one makes its giver wait."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.rollouts.rows import Row, StepEnd
from orchestrator.stages.prompts import Drawn
from pipelinerl.messages import PolicyPublished, ScoredTrajectory, TrainerReady, Trajectory
from pipelinerl.runtime.stage import Channel
from pipelinerl.runtime.watch import Watch

PROMPTS_AHEAD = 64
"""Prompts tokenised before an engine has room for them. More only makes a resumed run repeat more tokenisation."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """One for each arrow of the picture in `orchestrator.pipeline`."""

    prompts: Channel[Drawn]
    generated: Channel[Trajectory]
    """The same as `trajectories` in a run without a process reward model."""
    trajectories: Channel[Trajectory]
    scored: Channel[ScoredTrajectory]
    prm_scored: Channel[ScoredTrajectory]
    """The same as `scored` in a run without a process reward model."""
    group_scored: Channel[ScoredTrajectory]
    """The same as `prm_scored` in a run without rewards that compare siblings."""
    rows: Channel[Row | StepEnd]
    published: Channel[TrainerReady | PolicyPublished]

    @property
    def queues(self) -> list[Channel[Any]]:
        """The channels that carry samples, for the gauges."""
        on_the_way = (self.prompts, self.generated, self.trajectories, self.scored, self.prm_scored, self.group_scored, self.rows)
        return list(dict.fromkeys(on_the_way))


def make_channels(*, watch: Watch, queue_bytes: int, num_policies: int, follows: bool = False, compares: bool = False) -> Channels:
    """Make the channels of a run. `queue_bytes` bounds each channel of tokens; `num_policies` is how many there will be, each a few bytes.

    With `follows` and `compares` there are stages of these names, with channels between them and their neighbours.
    """
    last = "group_rewards" if compares else "batching"
    trajectories = _trajectories(
        "trajectories", giver="prm" if follows else "generation", taker="scoring", watch=watch, queue_bytes=queue_bytes
    )
    generated = (
        _trajectories("generated", giver="generation", taker="prm", watch=watch, queue_bytes=queue_bytes) if follows else trajectories
    )
    scored = _scored("scored", giver="scoring", taker="prm" if follows else last, watch=watch, queue_bytes=queue_bytes)
    prm_scored = _scored("prm_scored", giver="prm", taker=last, watch=watch, queue_bytes=queue_bytes) if follows else scored
    group_scored = (
        _scored("group_scored", giver="group_rewards", taker="batching", watch=watch, queue_bytes=queue_bytes) if compares else prm_scored
    )
    return Channels(
        prompts=Channel(
            "prompts",
            giver="prompts",
            taker="generation",
            watch=watch,
            bound_bytes=PROMPTS_AHEAD,
            label=lambda drawn: f"prompt {drawn.prompt.prompt_id}",
        ),
        generated=generated,
        trajectories=trajectories,
        scored=scored,
        prm_scored=prm_scored,
        group_scored=group_scored,
        rows=Channel(
            "rows",
            giver="batching",
            taker="training",
            watch=watch,
            bound_bytes=queue_bytes,
            size=lambda item: item.num_bytes,
            label=lambda item: f"of step {item.step}",
        ),
        published=Channel(
            "policies",
            giver="training",
            taker="weight_sync",
            watch=watch,
            bound_bytes=num_policies,
            label=lambda news: f"version {news.version}",
        ),
    )


def _trajectories(name: str, *, giver: str, taker: str, watch: Watch, queue_bytes: int) -> Channel[Trajectory]:
    return Channel(
        name,
        giver=giver,
        taker=taker,
        watch=watch,
        bound_bytes=queue_bytes,
        size=lambda trajectory: trajectory.num_bytes,
        label=_name_of_trajectory,
    )


def _scored(name: str, *, giver: str, taker: str, watch: Watch, queue_bytes: int) -> Channel[ScoredTrajectory]:
    return Channel(
        name,
        giver=giver,
        taker=taker,
        watch=watch,
        bound_bytes=queue_bytes,
        size=lambda item: item.trajectory.num_bytes,
        label=lambda item: _name_of_trajectory(item.trajectory),
    )


def _name_of_trajectory(trajectory: Trajectory) -> str:
    return f"rollout {trajectory.rollout_id}, attempt {trajectory.attempt}, of engine-{trajectory.engine_id}"
