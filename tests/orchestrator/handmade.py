"""Prompts, trajectories and scores made by hand: small enough that every expected number can be worked out beside the test."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np

from orchestrator.ledger.ledger import Ledger
from orchestrator.observe.sample_log import SampleLog
from orchestrator.rules.batch import Ended
from pipelinerl.messages import (
    UNSAMPLED,
    EarlyStopDecision,
    Finish,
    Group,
    Outcome,
    Prompt,
    Sample,
    Score,
    ScoredTrajectory,
    TerminalStatus,
    Trajectory,
)


def prompt(num_tokens: int = 2, *, prompt_id: str = "0:0") -> Prompt:
    """A prompt of the tokens 100, 101, ..."""
    return Prompt(prompt_id=prompt_id, text="", token_ids=np.arange(100, 100 + num_tokens, dtype=np.int32))


def trajectory(
    versions: Sequence[int] = (0, 0, 0),
    *,
    group_id: int = 0,
    sibling: int = 0,
    num_prompt: int = 2,
    finish: Finish = Finish.STOP,
    admitted_at: float = 0.0,
    finished_at: float = 0.0,
    is_greedy: bool = False,
) -> Trajectory:
    """A trajectory with one sampled token (10, 11, ...) for each of `versions`, after a prompt."""
    asked = prompt(num_prompt)
    num_sampled = len(versions)
    return Trajectory(
        rollout_id=f"{group_id}/{sibling}",
        group_id=group_id,
        sibling=sibling,
        attempt=0,
        prompt=asked,
        token_ids=np.concatenate((asked.token_ids, np.arange(10, 10 + num_sampled, dtype=np.int32))),
        loss_mask=np.array([False] * num_prompt + [True] * num_sampled),
        logprobs=np.array([0.0] * num_prompt + [-0.5] * num_sampled, np.float32),
        versions=np.array([UNSAMPLED] * num_prompt + list(versions), np.int32),
        finish=finish,
        admitted_at=admitted_at,
        finished_at=finished_at,
        is_greedy=is_greedy,
    )


def scored(of: Trajectory, reward: float | None = 1.0, *, outcome: Outcome = Outcome.OK, components: dict[str, float] | None = None):
    """A trajectory with its score; outcomes other than OK have no reward."""
    score = Score(
        rollout_id=of.rollout_id,
        attempt=0,
        outcome=outcome,
        reward=reward if outcome is Outcome.OK else None,
        components=components or {},
    )
    return ScoredTrajectory(trajectory=of, score=score)


def show(shown: SampleLog) -> None:
    """Have a sample shown that was trained in step 3, and one that failed; the answer to both stands in their row."""
    asked = msgspec.structs.replace(prompt(), columns={"answer": "<b>41"})
    right, late = (msgspec.structs.replace(trajectory(sibling=sibling), prompt=asked) for sibling in range(2))
    good, failed = scored(right, components={"right": 1.0}), scored(late, outcome=Outcome.TIMEOUT)
    failed = msgspec.structs.replace(failed, score=msgspec.structs.replace(failed.score, error="slow.py took 3 s"))
    shown.ended([Ended(scored=failed, status=TerminalStatus.FAILED, reason="timeout")], step=3, now_s=0.0)
    sample = Sample(trajectory=right, reward=1.0, advantages=np.where(right.loss_mask, np.float32(0.5), np.float32(0.0)))
    shown.trained(3, [sample], now_s=0.0, members={right.rollout_id: good})


def flagged(of: Trajectory, reward: float | None = None, *, predicted: float = 0.1, probability: float = 0.25) -> ScoredTrajectory:
    """A trajectory about which a coin has fallen: it was stopped, or went on to its reward."""
    decision = EarlyStopDecision(step=0, predicted=predicted, probability=probability, stops=reward is None)
    member = scored(of, reward, outcome=Outcome.STOPPED if reward is None else Outcome.OK)
    return ScoredTrajectory(trajectory=of, score=member.score, early_stop=decision)


def group(group_id: int, members: Sequence[ScoredTrajectory]) -> Group:
    return Group(group_id=group_id, members=tuple(members))


def admit(ledger: Ledger, group_id: int, *, group_size: int = 1, at_s: float = 0.0) -> list[str]:
    """Book a group of the prompt `0:<group_id>` as admitted; the source then stands behind that prompt."""
    asked = prompt(prompt_id=f"0:{group_id}")
    return ledger.admit(group_id, asked, group_size=group_size, position=(0, group_id + 1), now_s=at_s)


def plain_group(group_id: int, rewards: Sequence[float | Outcome], *, versions: Sequence[int] = (0, 0, 0)) -> Group:
    """A group with one sibling for each of `rewards`; an outcome instead of a number is a failed sibling."""
    members = []
    for sibling, reward in enumerate(rewards):
        of = trajectory(versions, group_id=group_id, sibling=sibling)
        members.append(scored(of, outcome=reward) if isinstance(reward, Outcome) else scored(of, reward))
    return group(group_id, members)


def sample(num_tokens: int, *, number: int = 0, group_id: int = 0) -> Sample:
    """A sample of that many tokens, one of them the prompt's; its advantage is 0.5 on every sampled token."""
    of = trajectory([0] * (num_tokens - 1), group_id=group_id, sibling=number, num_prompt=1)
    return Sample(trajectory=of, reward=1.0, advantages=np.where(of.loss_mask, 0.5, 0).astype(np.float32))


def centred(siblings: tuple[ScoredTrajectory, ...]) -> list[np.ndarray]:
    """An advantage rule for tests: reward minus the mean of the siblings' rewards, on the sampled tokens."""
    rewards = [member.score.reward or 0.0 for member in siblings]
    mean = sum(rewards) / len(rewards)
    return [
        np.where(member.trajectory.loss_mask, reward - mean, 0).astype(np.float32) for member, reward in zip(siblings, rewards, strict=True)
    ]
