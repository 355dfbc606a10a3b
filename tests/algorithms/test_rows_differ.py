"""Every row of the table is a method of its own: on one step sampled under older policies, no two have the same gradient.

The step is made once: groups of several sizes, answers of several lengths with tool tokens between, rewards on both sides of every
baseline, engine log-probabilities that have drifted with the age of each token and lie, for some tokens, beyond every bound that a row
has. What is left of each method is the direction of its gradient, so a row that only scales another's is a copy of it, too.
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.algorithms.advantage import group_advantages, keeps_group, step_advantages, token_columns
from pipelinerl.algorithms.advantage.optimal_baseline import energy
from pipelinerl.algorithms.advantage.outcome import ScoredGroup, StepScores
from pipelinerl.algorithms.advantage.role_baseline import RoleBaselines
from pipelinerl.algorithms.loss import TokenColumns, denominator, measure_step, policy_loss
from pipelinerl.algorithms.loss.probability import binary_kl
from pipelinerl.algorithms.method import Method
from pipelinerl.algorithms.methods import METHODS
from pipelinerl.algorithms.rules import with_columns
from tests.algorithms.every_method import filled
from tests.algorithms.rows import method_of

SAME_LOSS = "one loss under the names of its two derivations; the coefficient is to be stated in both"
ONE_SCALE = "a batch's std is one number for a whole step: it changes how far a step goes, and from step to step, not where"
EQUAL: dict[frozenset[str], str] = {frozenset({"kimi", "dro"}): SAME_LOSS, frozenset({"dr_grpo", "grpo_batch_std"}): ONE_SCALE}
"""Pairs that are allowed to have one gradient, and why."""
STATED: dict[str, dict[str, Any]] = {
    # The published fraction of 2e-4 takes one token of 5,000; the step here has a hundred and some.
    "clip_cov": {"objective": {"fraction": 0.2, "low": 0.1}},
    "kl_cov": {"objective": {"fraction": 0.1}},
}
TRAINED_VERSION, MAX_TOKENS = 5, 16
GROUPS: tuple[tuple[float, ...], ...] = ((1.0, 0.0, 0.25, 0.0), (1.0, 1.0, 0.0), (0.75, 0.5, 1.0, 0.0, 0.1), (1.0, 1.0), (0.3, 0.9))
"""Rewards by group; all siblings of the fourth earn the same, and of the last none is correct."""


class LaggedStep:
    """All columns that any row reads, of one step."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(7)
        self.lengths = [[int(self.generator.integers(4, 13)) for _ in rewards] for rewards in GROUPS]
        flat = list(itertools.chain.from_iterable(self.lengths))
        self.num_positions = sum(flat)
        self.sequence_ids = np.repeat(np.arange(len(flat)), flat)
        self.loss_mask = self.generator.uniform(size=self.num_positions) > 0.2
        starts: np.ndarray = np.cumsum(flat) - flat
        self.loss_mask[starts] = True
        self.versions = np.concatenate([np.sort(self.generator.integers(2, TRAINED_VERSION + 1, size)) for size in flat])
        self.logprobs = -self.generator.uniform(0.05, 3.0, self.num_positions)
        age = TRAINED_VERSION - self.versions
        drift = self.generator.normal(size=self.num_positions) * (0.05 + 0.25 * age)
        drift[::9] += 2.0  # pi beyond 3 and 5 times mu, and, where it is likely, by more than 0.2
        drift[4::18] += 1.6  # beyond 20 times
        drift[6::13] -= 1.8
        drift[2::11] = np.log(1.24)  # between the widths of a clip and of a higher one
        fresh = np.isin(self.sequence_ids, (0, 5, 8))  # whole answers that the policy being trained sampled: no mask drops these
        self.versions[fresh] = TRAINED_VERSION
        self.behaviour = np.where(fresh, self.logprobs - 1e-4, np.minimum(self.logprobs - drift, -0.01))
        self.old = np.minimum(self.logprobs - self.generator.normal(size=self.num_positions) * 0.3, -0.01)
        self.reference = np.minimum(self.logprobs + self.generator.normal(size=self.num_positions) * 0.5, -0.01)
        self.entropy = self.generator.uniform(0.1, 2.0, self.num_positions)
        self.groups = [self._group(number) for number in range(len(GROUPS))]

    def gradient(self, method: Method) -> np.ndarray:
        """The gradient of the step's loss by the log-probability of every token, as one vector of length 1."""
        kept = [number for number, group in enumerate(self.groups) if keeps_group(group, method=method)]
        groups = [self.groups[number] for number in kept]
        baselines = RoleBaselines(decay=0.9, state={"proposer": 0.3, "solver": 0.6})
        credits = [group_advantages(self._with_energies(group, method), method=method, baselines=baselines) for group in groups]
        credits = step_advantages(credits, groups, method=method)
        places = self._places()
        advantages = np.zeros(self.num_positions)
        for number, group, credit in zip(kept, groups, credits, strict=True):
            for place, column in zip(places[number], token_columns(credit, group=group), strict=True):
                advantages[place] = column
        inside = np.zeros(self.num_positions, bool)
        for place in itertools.chain.from_iterable(places[number] for number in kept):
            inside[place] = True
        columns = self._columns(advantages, loss_mask=self.loss_mask & inside)
        statistics = measure_step([columns], method=method, reduce=lambda tensor: tensor)
        loss = policy_loss(columns, method=method, statistics=statistics).loss / denominator(
            method.aggregation,
            num_tokens=int((self.loss_mask & inside).sum()),
            num_sequences=sum(len(group.rewards) for group in groups),
            max_tokens=MAX_TOKENS,
        )
        loss.backward()
        assert columns.logprobs.grad is not None
        found = columns.logprobs.grad.numpy()
        return found / np.linalg.norm(found)

    def _columns(self, advantages: np.ndarray, *, loss_mask: np.ndarray) -> TokenColumns:
        rewards = np.concatenate([np.array(rewards) for rewards in GROUPS])
        leaf, reference = torch.from_numpy(self.logprobs.copy()).requires_grad_(), torch.from_numpy(self.reference)
        return TokenColumns(
            logprobs=leaf,
            behaviour_logprobs=torch.from_numpy(self.behaviour),
            advantages=torch.from_numpy(advantages),
            loss_mask=torch.from_numpy(loss_mask),
            versions=torch.from_numpy(self.versions.astype(np.int32)),
            sequence_ids=torch.from_numpy(self.sequence_ids.astype(np.int64)),
            trained_version=TRAINED_VERSION,
            entropy=torch.from_numpy(self.entropy),
            reference_logprobs=reference,
            divergence=binary_kl(leaf, reference),  # of a vocabulary of two words
            old_logprobs=torch.from_numpy(self.old),
            correct=torch.from_numpy(rewards >= 1.0),
            truncated=torch.from_numpy(np.arange(len(rewards)) % 4 == 1),
        )

    def _places(self) -> list[list[np.ndarray]]:
        """By group and sibling, the positions of its tokens."""
        numbers = iter(range(len(self.sequence_ids)))
        return [[np.flatnonzero(self.sequence_ids == next(numbers)) for _ in rewards] for rewards in GROUPS]

    def _group(self, number: int) -> ScoredGroup:
        rewards, lengths = np.array(GROUPS[number]), self.lengths[number]
        places = self._places()[number]
        n, draw = len(rewards), self.generator
        ends = [np.unique(np.array([length // 3, length // 2, length - 1])) for length in lengths]
        masks = tuple(self.loss_mask[place] for place in places)
        return ScoredGroup(
            rewards=rewards,
            lengths=np.array([int(mask.sum()) for mask in masks]),
            components=np.stack((rewards, draw.uniform(size=n)), 1),
            component_weights=np.array([1.0, 0.3]),
            greedy_reward=0.4,
            correct=rewards >= 1.0,
            roles=tuple(("proposer", "solver")[index % 2] for index in range(n)),
            predictions=draw.uniform(size=n),
            sample_weights=np.ones(n),
            loss_mask=masks,
            token_kl=tuple(self.behaviour[place] - self.reference[place] for place in places),
            steps=tuple(
                StepScores(
                    ends=end,
                    scores=draw.uniform(size=len(end)),
                    anchors=np.arange(len(end)) * draw.integers(0, 2),
                    parents=np.array([-1, 0, 0])[: len(end)],  # the first branches
                )
                for end in ends
            ),
            values=tuple(draw.uniform(size=length) for length in lengths),
            process_rewards=tuple(draw.normal(size=length) * 0.3 for length in lengths),
            turns=tuple(np.unique(np.array([length // 2, length - 1])) for length in lengths),
            energies=tuple(np.ones(length) for length in lengths),
        )

    def _with_energies(self, group: ScoredGroup, method: Method) -> ScoredGroup:
        if method.advantage.name != "otb":
            return group
        number = next(index for index, other in enumerate(self.groups) if other is group)
        rho = np.minimum(np.exp(self.logprobs - self.behaviour), 2.0)
        found = []
        for place in self._places()[number]:
            p = np.exp(self.logprobs[place])
            found.append(energy(p, square_sums=p**2 + (1 - p) ** 2 / 5, importance=rho[place]) * self.loss_mask[place])
        return dataclasses.replace(group, energies=tuple(found))


@pytest.fixture(scope="module")
def gradients() -> dict[str, np.ndarray]:
    step = LaggedStep()
    return {name: step.gradient(chosen(name)) for name in METHODS}


def chosen(name: str) -> Method:
    return method_of(name, **filled(with_columns(METHODS[name], STATED.get(name, {}))))


def test_the_step_lies_beyond_every_bound_on_both_sides_of_every_baseline() -> None:
    step = LaggedStep()
    ratio = np.exp(step.logprobs - step.behaviour)[step.loss_mask]
    change = (np.exp(step.logprobs) - np.exp(step.behaviour))[step.loss_mask]
    for bound in (1.2, 1.28, 2.0, 3.0, 5.0, 20.0):
        assert (ratio > bound).any(), bound
    for bound in (0.5, 0.67, 0.8):
        assert (ratio < bound).any(), bound
    assert change.max() > 0.2
    assert change.min() < -0.2
    assert set(step.versions) == {2, 3, 4, 5}
    assert not step.loss_mask.all()


@pytest.mark.parametrize("name", METHODS)
def test_no_other_row_has_the_gradient_of_this_one(name: str, gradients: dict[str, np.ndarray]) -> None:
    for other in METHODS:
        if other == name:
            continue
        distance = float(np.linalg.norm(gradients[name] - gradients[other]))
        is_same = distance < 1e-4
        assert is_same == (frozenset({name, other}) in EQUAL), f"{name} and {other}: directions {distance:.2e} apart"
