"""The losses that clients ask for by name: values and gradients worked by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from pipelinerl.algorithms.loss.client_losses import LOSSES, client_loss
from pipelinerl.errors import DataError

LOGPROBS = [math.log(0.6), math.log(0.2), math.log(0.5)]
SAMPLED_WITH = [math.log(0.4), math.log(0.4), math.log(0.5)]
"""So the ratios are 1.5, 0.5 and 1."""
ADVANTAGES = [1.0, -2.0, 3.0]


def loss_and_gradient(name: str, *, ids: tuple[int, ...] = (0, 0, 0), mask: list[float] | None = None, **options: float):
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    columns = {"logprobs": SAMPLED_WITH, "advantages": ADVANTAGES, "weights": [0.5, 0.0, 2.0]}
    columns |= {} if mask is None else {"sequence_ratio_mask": mask}
    value = client_loss(
        name,
        logprobs=logprobs,
        columns={
            key: torch.tensor(column, dtype=torch.float64) for key, column in columns.items() if key != "weights" or name == "cross_entropy"
        },
        sequence_ids=torch.tensor(ids),
        num_sequences=max(ids) + 1,
        options=options,
    )
    value.backward()
    assert logprobs.grad is not None
    return float(value.detach()), logprobs.grad.tolist()


def test_cross_entropy_is_minus_the_weighted_log_probability():
    columns = {"weights": torch.tensor([0.5, 0.0, 2.0], dtype=torch.float64)}
    logprobs = torch.tensor(LOGPROBS, dtype=torch.float64, requires_grad=True)
    value = client_loss(
        "cross_entropy", logprobs=logprobs, columns=columns, sequence_ids=torch.zeros(3, dtype=torch.int64), num_sequences=1, options={}
    )
    value.backward()
    assert float(value.detach()) == pytest.approx(-0.5 * math.log(0.6) - 2 * math.log(0.5))
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == [-0.5, 0.0, -2.0]


def test_importance_sampling_weighs_by_the_ratio():
    value, gradient = loss_and_gradient("importance_sampling")
    assert value == pytest.approx(-(1.5 * 1 + 0.5 * -2 + 1 * 3))
    assert gradient == pytest.approx([-1.5, 1.0, -3.0])


def test_ppo_takes_the_worse_of_the_ratio_and_its_clipped_self():
    value, gradient = loss_and_gradient("ppo")
    assert value == pytest.approx(-(1.2 * 1 + 0.8 * -2 + 3)), "1.5 is cut at 1.2 for a good token, 0.5 raised to 0.8 for a bad one"
    assert gradient == pytest.approx([0.0, 0.0, -3.0])


def test_ppo_takes_its_bounds_from_the_client():
    value, _ = loss_and_gradient("ppo", clip_low_threshold=0.1, clip_high_threshold=9.0)
    assert value == pytest.approx(-(1.5 * 1 + 0.5 * -2 + 3))


def test_thresholds_of_each_token_take_the_place_of_those_for_all():
    logprobs = torch.tensor(LOGPROBS, requires_grad=True)
    columns = {"logprobs": torch.tensor(SAMPLED_WITH), "advantages": torch.tensor(ADVANTAGES)}
    columns["clip_high_threshold"] = torch.tensor([1.1, 9.0, 9.0])
    value = client_loss(
        "ppo", logprobs=logprobs, columns=columns, sequence_ids=torch.zeros(3, dtype=torch.int64), num_sequences=1, options={}
    )
    assert float(value.detach()) == pytest.approx(-(1.1 * 1 + 0.8 * -2 + 3), abs=1e-6)


def test_cispo_bounds_the_weight_of_the_gradient():
    value, gradient = loss_and_gradient("cispo")
    assert value == pytest.approx(-(1.2 * 1 * LOGPROBS[0] + 0.8 * -2 * LOGPROBS[1] + 3 * LOGPROBS[2]))
    assert gradient == pytest.approx([-1.2, 1.6, -3.0])


def test_dro_pulls_towards_what_was_sampled_with():
    value, gradient = loss_and_gradient("dro", beta=0.1)
    ratios = [math.log(1.5), math.log(0.5), 0.0]
    terms = [a * lp - 0.05 * ratio**2 for a, lp, ratio in zip(ADVANTAGES, LOGPROBS, ratios, strict=True)]
    assert value == pytest.approx(-sum(terms))
    assert gradient == pytest.approx([-(a - 0.1 * ratio) for a, ratio in zip(ADVANTAGES, ratios, strict=True)])


def test_gspo_has_one_ratio_for_a_datum_of_the_tokens_in_its_mask():
    wide: dict[str, Any] = {"clip_low_threshold": 0.0, "clip_high_threshold": 9.0}
    value, gradient = loss_and_gradient("gspo", mask=[1.0, 1.0, 0.0], **wide)
    ratio = math.sqrt(1.5 * 0.5)
    assert value == pytest.approx(-ratio * sum(ADVANTAGES))
    assert gradient == pytest.approx([-ratio * a for a in ADVANTAGES])
    apart, _ = loss_and_gradient("gspo", ids=(0, 1, 1), mask=[1.0, 1.0, 0.0], **wide)
    assert apart == pytest.approx(-(1.5 * 1 + 0.5 * (-2 + 3))), "two data, two ratios"


@pytest.mark.parametrize(
    ("name", "columns", "options", "words"),
    [
        ("stable_reinforce", {}, {}, "not published"),
        ("mse", {}, {}, "not known"),
        ("ppo", {"advantages"}, {}, "got none of logprobs"),
        ("ppo", {"advantages", "logprobs"}, {"beta": 1.0}, "no option beta"),
        ("gspo", {"advantages", "logprobs"}, {}, "sequence_ratio_mask"),
    ],
)
def test_what_cannot_be_computed_is_refused_by_name(name: str, columns: set[str], options: dict[str, float], words: str):
    with pytest.raises(DataError, match=words):
        client_loss(
            name,
            logprobs=torch.zeros(1),
            columns=dict.fromkeys(columns, torch.zeros(1)),
            sequence_ids=torch.zeros(1, dtype=torch.int64),
            num_sequences=1,
            options=options,
        )


def test_every_loss_of_the_sdk_but_those_that_are_refused_is_there():
    assert set(LOSSES) == {"cross_entropy", "importance_sampling", "ppo", "cispo", "dro", "gspo"}
