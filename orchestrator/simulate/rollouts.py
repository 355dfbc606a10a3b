"""A rollout in a simulation, and the trajectory that the live rules are given of it.

The rules read of a trajectory which versions sampled it, how many tokens it has and whether it is greedy. A column of a million tokens in a
thousand runs would be memory and time for nothing, so a simulated trajectory has one entry for each run of tokens that one version sampled:
`versions` holds them in order, and the counts are told apart. What the rules compute of it, its oldest and newest version and its sizes, is
what they would compute of the whole columns (a test compares the two).
"""

from __future__ import annotations

import dataclasses

import numpy as np

from orchestrator.simulate.draws import GroupDraws
from orchestrator.simulate.sequence import Sequence
from pipelinerl.messages import EarlyStopDecision, Finish, Float32, Outcome, Prompt, Score, ScoredTrajectory, Trajectory

NO_TOKENS = np.zeros(0, np.int32)
_ALL = np.ones(64, bool)
_PROMPT = Prompt(prompt_id="0:0", text="", token_ids=NO_TOKENS)
_columns: dict[float, Float32] = {}


class SimulatedTrajectory(Trajectory, frozen=True, kw_only=True):
    """A trajectory whose columns have one entry for each run of tokens of one version."""

    num_prompt: int
    """Tokens that it did not sample: the prompt, and what an environment said."""
    num_shared: int
    """Of these, tokens of the prompt, which its siblings share."""
    num_sampled: int
    run_tokens: tuple[int, ...]
    """Tokens of each run."""

    @property
    def num_tokens(self) -> int:
        return self.num_prompt + self.num_sampled

    @property
    def num_bytes(self) -> int:
        return 13 * (self.num_prompt + self.num_sampled)

    @property
    def num_trained_tokens(self) -> int:
        return self.num_sampled


@dataclasses.dataclass(slots=True, eq=False, kw_only=True)
class Rollout:
    """One rollout, from its admission to its end."""

    group_id: int
    sibling: int
    name: str
    prompt_id: str
    draws: GroupDraws
    is_greedy: bool
    admitted_s: float
    version: int
    """The newest version that it was asked for under."""
    attempt: int = 0
    engine_id: int = -1
    sequence: Sequence | None = None
    """The request that an engine has; None between two turns and after the last."""
    finished_s: float = 0.0
    finish: Finish = Finish.STOP
    turn: int = 0
    num_observed: int = 0
    """Tokens that an environment has said."""
    runs: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    """(version, tokens) of all turns."""
    num_sampled: int = 0
    """Tokens of all turns."""
    cached_under: tuple[int, int] | None = None
    """Engine and version that hold the cache of its earlier turns."""
    num_moved: int = 0
    """Tokens of this turn that were written before it moved to another engine."""
    moves_to: int | None = None
    """The engine to which it moves once the one that writes it has ended it."""
    decision: EarlyStopDecision | None = None
    num_at_prm: int = 0
    """Steps of it that the process reward model has to answer for."""
    num_traced: int = 0
    """Tokens of it that the process reward model was sent."""
    waiting: ScoredTrajectory | None = None
    """Its score, while it waits for that."""

    def begin_anew(self) -> None:
        """Begin the next attempt: an earlier one was lost with its engine."""
        self.attempt += 1
        self.sequence, self.turn, self.num_observed, self.cached_under, self.decision = None, 0, 0, None, None
        self.runs, self.num_sampled, self.num_traced, self.num_moved, self.moves_to = [], 0, 0, 0, None

    def trajectory(self) -> SimulatedTrajectory:
        """Return what the rules are given of it."""
        runs: list[list[int]] = []
        for version, tokens in self.runs:
            if runs and runs[-1][0] == version:
                runs[-1][1] += tokens
            else:
                runs.append([version, tokens])
        versions = np.array([version for version, _ in runs], np.int32)
        return SimulatedTrajectory(
            rollout_id=self.name,
            group_id=self.group_id,
            sibling=self.sibling,
            attempt=self.attempt,
            prompt=_PROMPT,
            token_ids=versions,
            loss_mask=_ALL[: len(runs)] if len(runs) <= len(_ALL) else np.ones(len(runs), bool),
            logprobs=column(0.0, len(runs)),
            versions=versions,
            finish=self.finish,
            engine_id=self.engine_id,
            admitted_at=self.admitted_s,
            finished_at=self.finished_s,
            is_greedy=self.is_greedy,
            num_prompt=self.draws.prompt_tokens + self.num_observed,
            num_shared=self.draws.prompt_tokens,
            num_sampled=self.num_sampled,
            run_tokens=tuple(tokens for _, tokens in runs),
        )

    def scored(self, *, failed_fraction: float, deadline: bool = False) -> ScoredTrajectory:
        """Return it with its score: `deadline` says that the call took too long."""
        trajectory, draws = self.trajectory(), self.draws
        outcome, error = Outcome.OK, ""
        if trajectory.finish is Finish.ERROR:
            outcome, error = Outcome.ERROR, "it was not sampled"
        elif self.decision is not None and self.decision.stops:
            outcome = Outcome.STOPPED
        elif deadline:
            outcome, error = Outcome.TIMEOUT, "simulated: beyond scorer.deadline_s"
        elif draws.luck[self.sibling, 0] < failed_fraction:
            outcome, error = Outcome.ERROR, "simulated failure of a reward"
        success = draws.truncated_success if trajectory.finish is Finish.LENGTH else draws.success
        reward = float(draws.chances[self.sibling] < success) if outcome is Outcome.OK else None
        score = Score(rollout_id=self.name, attempt=self.attempt, outcome=outcome, reward=reward, error=error)
        return ScoredTrajectory(trajectory=trajectory, score=score, early_stop=self.decision)


def column(value: float, num: int) -> Float32:
    """Return a column of one value. All columns of a value share memory: nothing may be written into it."""
    held = _columns.get(value)
    if held is None or num > len(held):
        held = _columns[value] = np.full(max(1 << 12, 2 * num), value, np.float32)
    return held[:num]
