"""Joins the advantage rules of the method (`pipelinerl.algorithms.advantage`) with trajectories, for a group or a step of `rules.batch`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from orchestrator.rollouts.scorer_tasks import ENVIRONMENT
from orchestrator.rules.batch import Filtered, Siblings, StepRules, greedy_of, sampled_of
from pipelinerl.algorithms.advantage import group_advantages, keeps_group, step_advantages, token_columns
from pipelinerl.algorithms.advantage.batch_rule import Credit
from pipelinerl.algorithms.advantage.graph import leaves
from pipelinerl.algorithms.advantage.outcome import ScoredGroup, StepScores
from pipelinerl.algorithms.advantage.role_baseline import RoleBaselines
from pipelinerl.algorithms.method import Method, Need
from pipelinerl.algorithms.rules import makes_advantages_in_trainer
from pipelinerl.config import RewardSection
from pipelinerl.errors import DataError
from pipelinerl.messages import Float32, ScoredTrajectory
from pipelinerl.rewards.calls import reward_weights


class MethodAdvantages:
    """The advantages of scored siblings under one method: it is `rules.batch.GroupAdvantages`, and `over_step` is `StepAdvantages`."""

    def __init__(
        self,
        method: Method,
        rewards: tuple[RewardSection, ...],
        *,
        correct_reward: float = 1.0,
        baselines: Mapping[str, float] | None = None,
        remember: Callable[[Mapping[str, float]], None] = lambda baselines: None,
    ) -> None:
        """Count a completion with at least `correct_reward` as correct.

        `baselines` are those of an earlier process of the run, for a method that has some for each role; `remember` is given them whenever
        they have changed.
        """
        self._method = method
        self._remember = remember
        rule = method.advantage
        self._baselines = RoleBaselines(decay=float(rule.options["decay"] or 0.0), state=baselines) if rule.name == "rae" else None
        self._weights = reward_weights(rewards)
        self._correct_reward = correct_reward
        self._leaves_to_trainer = makes_advantages_in_trainer(method)

    def step_rules(self) -> StepRules:
        """The rules that the method adds to the batch cut, beyond the advantages of one group."""
        needs_step = self._method.batch.name != "none" and not self._leaves_to_trainer
        return StepRules(
            step_advantages=self.over_step if needs_step else None,
            refill_batches=int(self._method.group_filter.options.get("refill", 0) or 0),
            withhold=self._method.withhold_bound,
            adds_greedy=self._method.adds_greedy,
        )

    def __call__(self, siblings: Siblings) -> list[Float32] | Filtered:
        """Return one [L] float32 column for each sibling but the greedy one, or the reason why the method's filter would drop the group.

        The columns are zeros where the trainer computes the advantages, since it has their inputs.
        """
        greedy, siblings = greedy_of(siblings), sampled_of(siblings)
        group = self._group(siblings, greedy=greedy)
        credit = np.zeros(len(siblings))
        if not self._leaves_to_trainer:
            credit = group_advantages(group, method=self._method, baselines=self._baselines)
        if self._baselines is not None:
            self._remember(self._baselines.state())
        columns = _columns(credit, group=group, siblings=siblings)
        if keeps_group(group, method=self._method):
            return columns
        return Filtered(reason=self._method.group_filter.name, advantages=columns)

    def over_step(self, groups: Sequence[Siblings]) -> list[list[Float32]]:
        """Return the columns of all groups of a step, after the method's rule over the whole step."""
        sampled = [sampled_of(siblings) for siblings in groups]
        scored = [self._group(members, greedy=greedy_of(siblings)) for members, siblings in zip(sampled, groups, strict=True)]
        credits = step_advantages([group_advantages(group, method=self._method) for group in scored], scored, method=self._method)
        return [_columns(credit, group=group, siblings=members) for credit, group, members in zip(credits, scored, sampled, strict=True)]

    def _group(self, siblings: Siblings, *, greedy: ScoredTrajectory | None) -> ScoredGroup:
        masks = tuple(member.trajectory.loss_mask[len(member.trajectory.prompt.token_ids) :] for member in siblings)
        is_whole = np.array([member.score.reward is not None for member in siblings])
        rewards = np.array([member.score.reward or 0.0 for member in siblings], np.float64)  # 0.0 of stopped ones: weight 0, never read
        prompts = [member.trajectory.prompt for member in siblings]
        roles = None if self._baselines is None else tuple(role_of(one.columns, where=f"prompt {one.prompt_id}") for one in prompts)
        # A function may say that it does not apply to a completion: then it compares no siblings here.
        weights = self._weights | {ENVIRONMENT: 1.0}
        names = [name for name in weights if all(name in member.score.components for member in siblings)]
        return ScoredGroup(
            rewards=rewards,
            lengths=np.array([int(mask.sum()) for mask in masks], np.int64),
            components=np.array([[member.score.components[name] for name in names] for member in siblings]).reshape(
                len(siblings), len(names)
            ),
            component_weights=np.array([weights[name] for name in names]),
            greedy_reward=None if greedy is None else greedy.score.reward,
            roles=roles,
            correct=is_whole & (rewards >= self._correct_reward),
            sample_weights=np.array([member.weight for member in siblings]),
            predictions=np.array([_predicted(member) for member in siblings]),
            loss_mask=masks,
            steps=_steps(siblings, reads_scores=Need.STEP_SCORES in self._method.needs),
        )


def role_of(columns: Mapping[str, Any], *, where: str) -> str:
    """Return the role that a row names, for a method with a baseline for each. Raises `DataError` where it names none."""
    if not isinstance(role := columns.get("role"), str):
        raise DataError(f"{where}: column role is {role!r}, expected a text: the method has a baseline for each role")
    return role


def _predicted(member: ScoredTrajectory) -> float:
    """Return the predicted reward of a flagged rollout, and of any other its own reward."""
    return float(member.score.reward or 0.0) if member.early_stop is None else member.early_stop.predicted


def _steps(siblings: Siblings, *, reads_scores: bool) -> tuple[StepScores, ...] | None:
    """Return the step scores of all siblings, or turns of episodes; None in a run without a process reward model or an environment.

    Where a method `reads_scores`, the turns of an episode score what the process reward model said, else what the environment gave them.
    """
    if not reads_scores and any(member.trajectory.turns is not None for member in siblings):
        return _turns(siblings)
    found = [member.steps for member in siblings]
    scored = [StepScores(ends=steps.ends.astype(np.int64), scores=steps.scores.astype(np.float64)) for steps in found if steps is not None]
    return tuple(scored) if len(scored) == len(found) else None


def _turns(siblings: Siblings) -> tuple[StepScores, ...]:
    """Return a step for each turn: each scores what its environment gave it, and every last one also the rest of the reward, so that those
    of an episode in one line sum up to it. Equal states are equal anchors.
    """
    states = {state: number for number, state in enumerate(sorted({state for member in siblings for state in _states(member)}))}
    found = []
    for member in siblings:
        turns = member.trajectory.turns
        ends = np.zeros(0, np.int64) if turns is None else turns.ends.astype(np.int64)
        parents = None if turns is None or turns.parents is None else turns.parents.astype(np.int64)
        scores = np.zeros(len(ends)) if turns is None or turns.rewards is None else turns.rewards.astype(np.float64)
        rest = (member.score.reward or 0.0) - scores.sum()
        scores += np.where(leaves(len(ends), parents=parents), rest, 0.0)
        anchors = np.array([states[state] for state in _states(member)], np.int64)
        found.append(StepScores(ends=ends, scores=scores, anchors=anchors, parents=parents))
    return tuple(found)


def _states(member: ScoredTrajectory) -> tuple[str, ...]:
    turns = member.trajectory.turns
    return () if turns is None else turns.states


def _columns(credit: Credit, *, group: ScoredGroup, siblings: Siblings) -> list[Float32]:
    responses = token_columns(credit, group=group)
    return [_whole_length(column, member) for column, member in zip(responses, siblings, strict=True)]


def _whole_length(column: np.ndarray, member: ScoredTrajectory) -> Float32:
    """Put zeros for the prompt before the response's column."""
    whole = np.zeros(member.trajectory.num_tokens, np.float32)
    whole[len(member.trajectory.prompt.token_ids) :] = column
    return whole
