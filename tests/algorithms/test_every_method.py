"""Every row of the table, whole: its loss and gradient against plain Python, its advantages at the edges. A new row is tested by being one.

What packing, padding, order and ranks must not change is in `test_loss`, for the same rows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from pipelinerl.algorithms.advantage import group_advantages, keeps_group, step_advantages, token_columns
from pipelinerl.algorithms.advantage.batch_rule import Credit
from pipelinerl.algorithms.advantage.outcome import Float64, ScoredGroup, StepScores
from pipelinerl.algorithms.advantage.role_baseline import RoleBaselines
from pipelinerl.algorithms.loss import measure_step, policy_loss
from pipelinerl.algorithms.loss.call import call_rule
from pipelinerl.algorithms.loss.columns import LOG_LIMIT
from pipelinerl.algorithms.loss.correction import terms_of
from pipelinerl.algorithms.loss.step_statistics import uniform_draws
from pipelinerl.algorithms.method import Method
from pipelinerl.algorithms.methods import METHODS
from pipelinerl.algorithms.rules import COLUMNS
from tests.algorithms import reference
from tests.algorithms.every_method import EVERY_METHOD, EVERY_RULE, sample
from tests.algorithms.rows import Seq, changed, method_of, pack

# --- the trainer's side: loss and gradient --------------------------------------------------------------------------------------

MU = 0.3
EMPTY = Seq(logprobs=[], behaviour=[], advantages=[])


def drifted(sequences: list[Seq], by: float) -> list[Seq]:
    """The same with the policy `by` nats further from the engine's at every other token, but no log-probability above 0."""
    return [
        changed(seq, behaviour=[x - by if index % 2 else min(-1e-3, x + by) for index, x in enumerate(seq.behaviour)]) for seq in sequences
    ]


CASES: dict[str, list[Seq]] = {
    "random": sample(3),
    "another": sample(11),
    "equal rewards": [changed(seq, advantages=[0.0] * len(seq.logprobs)) for seq in sample(4)],
    "one sequence of one token": sample(6, lengths=(1,)),
    "an empty completion": [*sample(7)[:2], changed(EMPTY, versions=[], old=[], reference=[], entropy=[]), *sample(7)[2:]],
    "far from the engine": drifted(sample(8), 2.5),
    "ratios beyond every bound, below": [
        changed(seq, **{name: [x - 12 for x in getattr(seq, name)] for name in ("logprobs", "old")}) for seq in sample(10)
    ],
    "ratios beyond the limit": drifted([changed(seq, logprobs=[x - 1 for x in seq.logprobs]) for seq in sample(9)], 1.5 * LOG_LIMIT),
}


def product_loss(method: Method, sequences: Sequence[Seq]) -> tuple[float, list[float]]:
    columns = pack(sequences)
    statistics = measure_step([columns], method=method, reduce=lambda tensor: tensor)
    loss = policy_loss(columns, method=method, statistics=statistics).loss
    loss.backward()
    assert columns.logprobs.grad is not None
    return float(loss.detach()), columns.logprobs.grad.tolist()


def draws_of(sequences: Sequence[Seq]) -> list[list[float]]:
    flat = uniform_draws(pack(sequences)).tolist()
    ends = np.cumsum([len(seq.logprobs) for seq in sequences]).tolist()
    return [flat[end - len(seq.logprobs) : end] for seq, end in zip(sequences, ends, strict=True)]


def test_every_rule_has_a_form_in_plain_python() -> None:
    written = {
        "objective": reference.OBJECTIVES,
        "proximal": reference.PROXIMAL,
        "weight": reference.WEIGHTS,
        "masks": reference.MASKS,
        "kl": {"none", *reference.KLS},
        "auxiliary": reference.AUXILIARY,
    }
    for column, forms in written.items():
        assert set(forms) == set(COLUMNS[column]), f"write the form of {set(COLUMNS[column]) ^ set(forms)} into reference.py"


@pytest.mark.slow
@pytest.mark.parametrize("name", EVERY_METHOD | EVERY_RULE)
def test_loss_and_gradient_are_those_of_the_formula(name: str) -> None:
    """In value, and in the difference quotient of each log-probability, wherever the ratio stands."""
    method, step = (EVERY_METHOD | EVERY_RULE)[name], 1e-6
    for case, sequences in CASES.items():
        draws = draws_of(sequences)
        got, gradient = product_loss(method, sequences)
        expected = reference.loss(method, sequences, moved={}, draws=draws)
        assert got == pytest.approx(expected, rel=1e-8, abs=1e-9), case
        assert all(map(math.isfinite, gradient)), case
        if "beyond" in case:
            continue  # e^20 beside 1: no difference quotient has the digits
        places = [(number, t) for number, seq in enumerate(sequences) for t in range(len(seq.logprobs))]
        for place, slope in zip(places, gradient, strict=True):
            up, down = (reference.loss(method, sequences, moved={place: by}, draws=draws) for by in (step, -step))
            assert slope == pytest.approx((up - down) / (2 * step), rel=2e-5, abs=2e-6), (case, place)


@pytest.mark.parametrize("name", [name for name in EVERY_RULE if name.startswith("masks")])
def test_every_mask_keeps_and_drops_in_these_cases(name: str) -> None:
    """A mask that never acted would pass every comparison above."""
    method = EVERY_RULE[name]
    (rule,) = method.masks
    found = set()
    for sequences in CASES.values():
        columns = pack(sequences)
        statistics = measure_step([columns], method=method, reduce=lambda tensor: tensor)
        keep = call_rule(rule, terms_of(columns, proximal=method.proximal, statistics=statistics), column="masks")
        found |= set(keep[columns.loss_mask].tolist())
    assert found == {True, False}


EDGES: dict[str, tuple[dict[str, Any], tuple[float, ...]]] = {
    "clip": ({"clip_low": 0.2, "clip_high": 0.3}, (0.8 * MU, 1.3 * MU)),
    "dual clip": ({"name": "clip", "dual_clip": 3.0}, (3 * MU,)),
    "gspo": ({"clip_low": 0.02, "clip_high": 0.03}, (0.98 * MU, 1.03 * MU)),
    "gmpo": ({"clip_low": 0.3, "clip_high": 0.4}, (math.exp(-0.3) * MU, math.exp(0.4) * MU)),
    "dppo_tv": ({"clip_low": 0.1, "clip_high": 0.15}, (MU - 0.1, MU + 0.15)),
    "prime_rl": ({"clip_low": 0.1, "clip_high": 0.15}, (MU - 0.1, MU + 0.15)),
    "ipo": ({"threshold": 0.1}, (MU - 0.1, MU + 0.1)),
}
"""Objectives whose gradient jumps: options, and the probabilities of a token with mu = `MU` at which it does."""


@pytest.mark.parametrize("name", EDGES)
def test_the_gradient_jumps_where_the_formula_says_and_there_is_that_of_one_side_or_between(name: str) -> None:
    options, edges = EDGES[name]
    method = method_of("grpo", proximal="engine", weight="none", objective={"name": name} | options)
    (token,) = sample(6, lengths=(1,))

    def slopes(probability: float, advantage: float) -> tuple[float, float]:
        """The product's, and the formula's."""
        mu = math.log(MU)
        seq = changed(token, logprobs=[math.log(probability)], behaviour=[mu], advantages=[advantage], loss_mask=[True], weight=1.0)
        up, down = (reference.loss(method, [seq], moved={(0, 0): by}, draws=[[0.0]]) for by in (1e-6, -1e-6))
        return product_loss(method, [seq])[1][0], (up - down) / 2e-6

    for edge in edges:
        jumps = 0
        for advantage in (1.0, -1.0):
            (below, _), (above, _) = sides = [slopes(edge * factor, advantage) for factor in (1 - 1e-5, 1 + 1e-5)]
            assert [got for got, _ in sides] == pytest.approx([expected for _, expected in sides], abs=1e-5)
            at, _ = slopes(edge, advantage)
            assert any(at == pytest.approx(side, abs=1e-3) for side in (below, above, (below + above) / 2))
            jumps += abs(above - below) > 0.5
        assert jumps, "no edge"


# --- the orchestrator's side: advantages ----------------------------------------------------------------------------------------

ADVANTAGE = COLUMNS["advantage"]
ORCHESTRATOR_ROWS = [name for name, method in EVERY_METHOD.items() if not ADVANTAGE[method.advantage.name].on_trainer and name in METHODS]


def group_of(rewards: Sequence[float], *, seed: int = 0, empty: int | None = None) -> ScoredGroup:
    """A group with every column a rule may read; sibling `empty` has no token."""
    generator = np.random.default_rng(seed)
    lengths = [0 if number == empty else int(generator.integers(2, 7)) for number in range(len(rewards))]
    ends = [np.array([length // 2, length - 1]) if length > 1 else np.zeros(0, np.int64) for length in lengths]
    return ScoredGroup(
        rewards=np.array(rewards, dtype=np.float64),
        lengths=np.array(lengths),
        components=np.stack([rewards, generator.normal(size=len(rewards))], axis=1) if rewards else np.zeros((0, 2)),
        component_weights=np.array([1.0, 0.5]),
        greedy_reward=0.5,
        correct=np.array(rewards) > 0.5,
        roles=tuple("ab"[number % 2] for number in range(len(rewards))),
        predictions=np.full(len(rewards), 0.4),
        sample_weights=np.ones(len(rewards)),
        token_kl=tuple(generator.normal(size=length) for length in lengths),
        steps=tuple(StepScores(ends=end, scores=generator.uniform(size=len(end)), anchors=np.arange(len(end))) for end in ends),
    )


def reordered(group: ScoredGroup, order: Sequence[int]) -> ScoredGroup:
    def taken(name: str, value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(value[index] for index in order)
        return value[list(order)] if isinstance(value, np.ndarray) and name != "component_weights" else value

    return ScoredGroup(**{field.name: taken(field.name, getattr(group, field.name)) for field in dataclasses.fields(group)})


def advantages(name: str, group: ScoredGroup) -> Credit:
    method = EVERY_METHOD[name]
    return group_advantages(group, method=method, baselines=RoleBaselines(decay=0.9, state={"a": 0.3}))


def rows_of(credit: Credit) -> list[Float64]:
    return [np.atleast_1d(part) for part in credit]


@pytest.mark.parametrize("name", ORCHESTRATOR_ROWS)
def test_the_order_of_siblings_does_not_matter(name: str) -> None:
    group, order = group_of([1.0, 0.0, 0.25, 0.75], empty=2), [2, 0, 3, 1]
    straight, turned = rows_of(advantages(name, group)), rows_of(advantages(name, reordered(group, order)))
    for place, sibling in enumerate(order):
        np.testing.assert_allclose(turned[place], straight[sibling], atol=1e-12)


@pytest.mark.parametrize("name", ORCHESTRATOR_ROWS)
def test_a_group_of_one_and_an_empty_completion_have_finite_advantages(name: str) -> None:
    method = EVERY_METHOD[name]
    (alone,) = rows_of(advantages(name, group_of([1.0])))
    if ADVANTAGE[method.advantage.name].min_group > 1 and not ADVANTAGE[method.advantage.name].per_token:
        assert not alone.any(), "without a sibling there is no baseline, and the raw reward is no advantage"
    for group in (group_of([1.0, 0.0, 0.0], empty=0), group_of([1.0], empty=0)):
        columns = token_columns(advantages(name, group), group=group)
        assert [len(column) for column in columns] == group.lengths.tolist()
        assert all(np.isfinite(column).all() for column in columns)


@pytest.mark.parametrize("name", ORCHESTRATOR_ROWS)
def test_equal_rewards_teach_nothing_where_siblings_are_compared(name: str) -> None:
    rule = ADVANTAGE[EVERY_METHOD[name].advantage.name]
    group = dataclasses.replace(group_of([0.7, 0.7, 0.7]), components=np.full((3, 2), 0.7))
    credit = advantages(name, group)
    assert all(np.isfinite(row).all() for row in rows_of(credit))
    if rule.min_group > 1 and not rule.per_token:
        np.testing.assert_array_equal(credit, np.zeros(3))


@pytest.mark.parametrize("name", ORCHESTRATOR_ROWS)
def test_the_order_of_groups_and_a_step_without_signal_change_no_advantage(name: str) -> None:
    """Nor does a step of which the filter would set everything aside: it ends in zeros, not in a division by none of them."""
    method = EVERY_METHOD[name]
    groups = [group_of(rewards, seed=seed) for seed, rewards in enumerate([[1.0, 0.0], [0.5, 0.5, 0.0], [0.2, 0.9]])]
    credits = [advantages(name, group) for group in groups]
    straight = step_advantages(credits, groups, method=method)
    turned = step_advantages(credits[::-1], groups[::-1], method=method)
    for one, other in zip(straight, turned[::-1], strict=True):
        for row, other_row in zip(rows_of(one), rows_of(other), strict=True):
            np.testing.assert_allclose(row, other_row, atol=1e-12)
    flat = [dataclasses.replace(group_of([0.0, 0.0]), components=np.zeros((2, 2))) for _ in range(2)]
    if method.group_filter.name != "none":
        assert not any(keeps_group(group, method=method) for group in flat)
    whole = step_advantages([advantages(name, group) for group in flat], flat, method=method)
    assert all(np.isfinite(row).all() for credit in whole for row in rows_of(credit))


def test_rows_made_in_the_trainer_are_not_guessed_at_here() -> None:
    for name in set(METHODS) - set(ORCHESTRATOR_ROWS):
        with pytest.raises(ValueError, match=r"reads (values|turns|process_rewards|energies)"):
            advantages(name, group_of([1.0, 0.0]))


def test_this_file_runs_in_float64() -> None:
    assert pack(sample(3)).logprobs.dtype == torch.float64
