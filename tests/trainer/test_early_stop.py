"""An early stop leaves the expected gradient of a step as it is, from the cut of the batch to the loss: by enumeration.

The toy: three binary tokens, the t-th a 1 with probability sigmoid(theta_t); a trace that begins with 1 is flagged after its first token.
Every pair of siblings and every fall of their coins goes through the rules, the wire and the loss that a run goes through.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from orchestrator.advantages import MethodAdvantages
from orchestrator.rollouts.micro_batch import micro_batch_of
from orchestrator.rules.batch import BatchCut
from pipelinerl.algorithms.loss import denominator, policy_loss
from pipelinerl.algorithms.method import ALWAYS_OFFERED, REFERENCE_OFFERS, TRAINER_OFFERS, Need
from pipelinerl.algorithms.methods import resolve
from pipelinerl.config import RewardSection
from pipelinerl.messages import UNSAMPLED, EarlyStopDecision, Finish, Group, Outcome, Prompt, Score, ScoredTrajectory, Trajectory
from trainer.backend import Outputs
from trainer.data.token_columns import columns_of
from trainer.rows.arrange import arrange

THETA = torch.tensor([0.3, -0.4, 0.8], dtype=torch.float64)
REFERENCE = torch.tensor([0.1, 0.2, -0.5], dtype=torch.float64)
TRACES = list(itertools.product((0, 1), repeat=3))
REWARD: dict[tuple[int, ...], float] = dict(zip(TRACES, (0.0, 1.0, 1.0, 0.5, 0.0, 0.25, 0.0, 1.0), strict=True))
PREDICTED = 0.2
PROMPT = Prompt(prompt_id="0:0", text="", token_ids=np.array([9], np.int32))
METHOD = resolve(
    "rloo_early_stop",
    {"kl": {"name": "k3", "beta": 0.3}, "auxiliary": {"name": "entropy_bonus", "coef": 0.1}},
    group_size=2,
    offers=ALWAYS_OFFERED | TRAINER_OFFERS | REFERENCE_OFFERS | {Need.PREDICTIONS},
    stops_early=True,
)


def logprobs(tokens: np.ndarray, theta: torch.Tensor, places: np.ndarray) -> torch.Tensor:
    """Of tokens 0 or 1 at these places of their trace."""
    picked = theta[torch.from_numpy(places)]
    return torch.nn.functional.logsigmoid(torch.where(torch.from_numpy(tokens == 1), picked, -picked))


def member(trace: tuple[int, ...], sibling: int, flag: EarlyStopDecision | None) -> ScoredTrajectory:
    stops = flag is not None and flag.stops
    tokens = np.array(trace[:1] if stops else trace, np.int32)
    mu = logprobs(tokens, THETA, np.arange(len(tokens))).numpy()
    trajectory = Trajectory(
        rollout_id=f"0/{sibling}",
        group_id=0,
        sibling=sibling,
        attempt=0,
        prompt=PROMPT,
        token_ids=np.concatenate((PROMPT.token_ids, tokens)),
        loss_mask=np.array([False] + [True] * len(tokens)),
        logprobs=np.concatenate(([0.0], mu)).astype(np.float32),
        versions=np.array([UNSAMPLED] + [0] * len(tokens), np.int32),
        finish=Finish.CANCELLED if stops else Finish.STOP,
    )
    outcome, reward = (Outcome.STOPPED, None) if stops else (Outcome.OK, REWARD[trace])
    score = Score(rollout_id=f"0/{sibling}", attempt=0, outcome=outcome, reward=reward)
    return ScoredTrajectory(trajectory=trajectory, score=score, early_stop=flag)


def rollouts(epsilon: float, sibling: int) -> Iterator[tuple[ScoredTrajectory, float]]:
    """Each with its probability, that of the coin included."""
    for trace in TRACES:
        chance = float(logprobs(np.array(trace), THETA, np.arange(3)).sum().exp())
        if trace[0] == 0 or epsilon == 1.0:
            yield member(trace, sibling, None), chance
            continue
        for stops in (True, False):
            flag = EarlyStopDecision(step=0, predicted=PREDICTED, probability=epsilon, stops=stops)
            yield member(trace, sibling, flag), chance * (1 - epsilon if stops else epsilon)


def gradient(group: Group, *, divides_by_survivors: bool = False) -> torch.Tensor:
    """[3] of the step that the group makes."""
    credit = MethodAdvantages(METHOD, (RewardSection.model_validate({"function": "rewards.py:right"}),))
    verdict = BatchCut(groups_per_step=1, max_staleness=0, min_group_size=2, group_advantages=credit).take(group)
    assert verdict.closes_step
    if not verdict.samples:
        return torch.zeros(3, dtype=torch.float64)
    batch = micro_batch_of(verdict.delivered or verdict.samples, step=0, index=0)
    row = arrange(batch.token_ids, loss_mask=batch.loss_mask, lengths=batch.lengths, names=batch.rollout_ids)
    assert row is not None
    theta = THETA.clone().requires_grad_()
    places = np.concatenate([np.arange(length - 1) for length in batch.lengths])
    tokens = batch.token_ids[batch.loss_mask]
    outputs = Outputs(logprobs=logprobs(tokens, theta, places), entropy=entropy(theta)[torch.from_numpy(places)])
    reference = logprobs(tokens, REFERENCE, places)
    columns = columns_of(batch, row, outputs, correct_reward=1.0, reference_logprobs=reference)
    num_samples = len(verdict.samples) if divides_by_survivors else verdict.num_samples
    by = denominator(METHOD.aggregation, num_tokens=verdict.num_tokens, num_sequences=num_samples, max_tokens=3)
    (found,) = torch.autograd.grad(policy_loss(columns, method=METHOD).loss / by, theta)
    return found


def entropy(theta: torch.Tensor) -> torch.Tensor:
    one = theta.sigmoid()
    return -(one * one.log() + (1 - one) * (1 - one).log())


def expected(epsilon: float, **options: bool) -> np.ndarray:
    total = torch.zeros(3, dtype=torch.float64)
    for first, second in itertools.product(rollouts(epsilon, 0), rollouts(epsilon, 1)):
        total += first[1] * second[1] * gradient(Group(group_id=0, members=(first[0], second[0])), **options)
    return total.numpy()


def test_gradient_of_a_step_is_expected_to_be_the_same_with_and_without_an_early_stop() -> None:
    """Policy, KL and entropy terms alike, which all weigh by the same number; advantages travel as float32."""
    assert expected(0.25) == pytest.approx(expected(1.0), abs=1e-6)


def test_division_by_survivors_in_place_of_rollouts_started_is_biased() -> None:
    right = expected(1.0)
    assert np.abs(expected(0.25, divides_by_survivors=True) - right).max() > 0.3 * np.abs(right).max()
