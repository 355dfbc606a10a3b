"""The channels that join the stages, each bounded; a full one makes its giver wait."""

from __future__ import annotations

import dataclasses
from typing import Any

from orchestrator.stages.batching import Row, Seal
from orchestrator.stages.prompts import Drawn
from pipelinerl.messages import PolicyPublished, ScoredTrajectory, TrainerReady, Trajectory
from pipelinerl.stages import Channel
from pipelinerl.watch import Watch

PROMPTS_AHEAD = 64
"""Prompts tokenised before an engine has room for them. More only makes a resumed run repeat more tokenisation."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Channels:
    """One for each arrow of the picture in `orchestrator.pipeline`."""

    prompts: Channel[Drawn]
    trajectories: Channel[Trajectory]
    scored: Channel[ScoredTrajectory]
    compared: Channel[ScoredTrajectory]
    """The same as `scored` in a run without rewards that compare siblings."""
    rows: Channel[Row | Seal]
    published: Channel[TrainerReady | PolicyPublished]

    @property
    def queues(self) -> list[Channel[Any]]:
        """Those that carry samples, for the gauges."""
        return [self.prompts, self.trajectories, self.scored, *([self.compared] if self.compares else []), self.rows]

    @property
    def compares(self) -> bool:
        """True where a stage between scoring and batching compares siblings."""
        return self.compared is not self.scored


def make_channels(*, watch: Watch, queue_bytes: int, num_policies: int, compares: bool = False) -> Channels:
    """`queue_bytes` bounds each channel of tokens; `num_policies` is how many there will be, each a few bytes."""
    scored = _scored("scored", giver="scoring", taker="comparing" if compares else "batching", watch=watch, queue_bytes=queue_bytes)
    compared = _scored("compared", giver="comparing", taker="batching", watch=watch, queue_bytes=queue_bytes) if compares else scored
    return Channels(
        prompts=Channel(
            "prompts",
            giver="prompts",
            taker="dispatch",
            watch=watch,
            bound_bytes=PROMPTS_AHEAD,
            label=lambda drawn: f"prompt {drawn.prompt.prompt_id}",
        ),
        trajectories=Channel(
            "trajectories",
            giver="dispatch",
            taker="scoring",
            watch=watch,
            bound_bytes=queue_bytes,
            size=_bytes_of_trajectory,
            label=_name_of_trajectory,
        ),
        scored=scored,
        compared=compared,
        rows=Channel(
            "rows",
            giver="batching",
            taker="delivery",
            watch=watch,
            bound_bytes=queue_bytes,
            size=lambda item: item.num_bytes,
            label=lambda item: f"of step {item.step}",
        ),
        published=Channel(
            "policies",
            giver="delivery",
            taker="refresh",
            watch=watch,
            bound_bytes=num_policies,
            label=lambda news: f"version {news.version}",
        ),
    )


def _scored(name: str, *, giver: str, taker: str, watch: Watch, queue_bytes: int) -> Channel[ScoredTrajectory]:
    return Channel(
        name,
        giver=giver,
        taker=taker,
        watch=watch,
        bound_bytes=queue_bytes,
        size=lambda item: _bytes_of_trajectory(item.trajectory),
        label=lambda item: _name_of_trajectory(item.trajectory),
    )


def _bytes_of_trajectory(trajectory: Trajectory) -> int:
    """Bytes of its token columns: ids, mask, log-probabilities, versions."""
    return 13 * trajectory.num_tokens


def _name_of_trajectory(trajectory: Trajectory) -> str:
    return f"rollout {trajectory.rollout_id}, attempt {trajectory.attempt}, of engine-{trajectory.engine_id}"
