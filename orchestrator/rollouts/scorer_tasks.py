"""The tasks of scorers, made from trajectories and episodes, and the scores that their results give."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from orchestrator.rollouts.multi_turn import Episode
from orchestrator.rollouts.trajectories import last_line
from pipelinerl.messages import EarlyStopDecision, Finish, Outcome, RequestKind, Result, Score, ScorerTask, Trajectory


def reward_task(trajectory: Trajectory) -> ScorerTask:
    """Return the task to score the tokens after the prompt, of an episode that branches those up to its last turn."""
    return _task(RequestKind.REWARD, (trajectory,))


def group_reward_task(siblings: Sequence[Trajectory]) -> ScorerTask:
    """Return the task to compare siblings, at least two."""
    return _task(RequestKind.GROUP_REWARD, siblings)


def environment_task(rollout_id: str, *, attempt: int, episode: Episode) -> ScorerTask:
    """Return the task to have the environment reply to the last turn of an episode, or, before its first, begin it."""
    assert episode.turns is not None or episode.is_stateful, "an environment without state replies to a turn"
    return ScorerTask(
        kind=RequestKind.ENVIRONMENT,
        rollout_id=rollout_id,
        attempt=attempt,
        prompt=episode.prompt,
        completions=(episode.token_ids,),
        finishes=(episode.finish,),
        turns=(episode.turns,),
    )


ENVIRONMENT = "environment"
"""The component of a score that the environment itself gave."""


def score_of(trajectory: Trajectory, result: Result) -> Score:
    """Return the score of a trajectory, from the result of its `reward_task` and the rewards that its environment gave its turns."""
    is_ok = result.outcome is Outcome.OK
    own: dict[str, float] = {}
    if trajectory.turns is not None and trajectory.turns.rewards is not None:
        own[ENVIRONMENT] = float(trajectory.turns.rewards.sum(dtype=np.float64))
    return Score(
        rollout_id=trajectory.rollout_id,
        attempt=trajectory.attempt,
        outcome=result.outcome,
        reward=result.rewards[0] + sum(own.values()) if is_ok else None,
        components=result.components[0] | own if is_ok else {},
        error=result.error,
        duration_s=result.duration_s,
    )


def failed_score(trajectory: Trajectory) -> Score | None:
    """Return the score of a trajectory that no scorer is asked about, because its engine or environment failed; None for any other."""
    is_engine = trajectory.outcome is Outcome.OK
    if is_engine and trajectory.finish is not Finish.ERROR:
        return None
    return Score(
        rollout_id=trajectory.rollout_id,
        attempt=trajectory.attempt,
        outcome=Outcome.ERROR if is_engine else trajectory.outcome,
        reward=None,
        error=f"engine {trajectory.engine_id}: {trajectory.error}" if is_engine else trajectory.error,
    )


def posted_score(trajectory: Trajectory) -> Score | None:
    """Return the score that an agent has posted itself; None where the run's functions are to score the trajectory."""
    if trajectory.lent is None or (reward := trajectory.lent.reward) is None:
        return None
    return Score(
        rollout_id=trajectory.rollout_id, attempt=trajectory.attempt, outcome=Outcome.OK, reward=reward, components={"agent": reward}
    )


def stopped_score(trajectory: Trajectory, decision: EarlyStopDecision | None) -> Score | None:
    """Return the score of a trajectory that a coin has ended; None for any other."""
    if decision is None or not decision.stops:
        return None
    return Score(rollout_id=trajectory.rollout_id, attempt=trajectory.attempt, outcome=Outcome.STOPPED, reward=None)


def unscored(trajectory: Trajectory) -> Score:
    """Return the score of a trajectory that an agent has finished without a reward, in a run without a function that could make one."""
    return Score(
        rollout_id=trajectory.rollout_id,
        attempt=trajectory.attempt,
        outcome=Outcome.INVALID,
        reward=None,
        error="the agent posted no reward, and the config names no [[reward]] that could score it",
    )


def _task(kind: RequestKind, trajectories: Sequence[Trajectory]) -> ScorerTask:
    first, shown = trajectories[0], [last_line(each) for each in trajectories]
    return ScorerTask(
        kind=kind,
        rollout_id=first.rollout_id,
        attempt=first.attempt,
        prompt=msgspec.structs.replace(first.prompt, images=()),  # rewards are told what was said, not what was seen
        completions=tuple(token_ids for token_ids, _ in shown),
        finishes=tuple(each.finish for each in trajectories),
        turns=tuple(turns for _, turns in shown),
    )
