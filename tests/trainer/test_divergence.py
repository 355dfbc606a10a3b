"""Divergences from a teacher over the whole vocabulary: TRL's, piece by piece, with the right slopes, in every layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from trainer.model import room
from trainer.model.divergence import divergences, linear_divergence
from trainer.rows.packed_row import TeacherStates

GOLDEN: dict[str, Any] = json.loads((Path(__file__).parents[1] / "algorithms/golden/trl_losses.json").read_text())["divergences"]
K, H, G, V = 11, 6, 4, 13
MIXES = (0.0, 0.1, 0.5, 0.9, 1.0)


@pytest.mark.parametrize("mix", MIXES)
def test_divergence_and_slopes_are_those_of_trl(mix: float) -> None:
    """Logits are hidden states here: the output embedding is the identity."""
    student, teacher = (torch.tensor(GOLDEN[name], dtype=torch.float64) for name in ("student", "teacher"))
    leaf, words = student.requires_grad_(), torch.eye(student.shape[1], dtype=torch.float64)
    values = linear_divergence(leaf, words, teacher, words, mix=mix, temperature=GOLDEN["temperature"])
    expected = GOLDEN["cases"][str(mix)]
    assert values.tolist() == pytest.approx(expected["values"], rel=1e-6)  # TRL's beta is in float32 where logits are not
    values.sum().backward()
    assert leaf.grad is not None
    for ours, theirs in zip(leaf.grad.tolist(), expected["slopes"], strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-8)


def _inputs(dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((K, H), (V, H), (K, G), (V, G))
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


@pytest.mark.parametrize("mix", MIXES)
def test_slopes_are_those_of_finite_differences(mix: float) -> None:
    hidden, weight, teacher_hidden, teacher_weight = _inputs()

    def of(hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return linear_divergence(hidden, weight, teacher_hidden, teacher_weight, mix=mix, temperature=0.7)

    assert torch.autograd.gradcheck(of, (hidden.requires_grad_(), weight.requires_grad_()))


@pytest.mark.parametrize("rows_at_once", [1, 4])
@pytest.mark.parametrize("mix", [0.0, 0.3, 1.0])
def test_pieces_give_what_the_whole_table_gives(monkeypatch: pytest.MonkeyPatch, rows_at_once: int, mix: float) -> None:
    hidden, weight, teacher_hidden, teacher_weight = _inputs()
    leaves = (hidden.requires_grad_(), weight.requires_grad_())
    slopes = torch.linspace(-1, 1, K, dtype=torch.float64)
    whole = linear_divergence(hidden, weight, teacher_hidden, teacher_weight, mix=mix, temperature=1.3)
    expected = torch.autograd.grad((whole * slopes).sum(), leaves)
    largest = 0
    made = torch.Tensor.__matmul__

    def watched(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        nonlocal largest
        product = made(left, right)
        largest = max(largest, product.numel() if product.shape[-1] == V else 0)
        return product

    monkeypatch.setattr(room, "LEAST_BYTES", 4 * rows_at_once * V)
    monkeypatch.setattr(torch.Tensor, "__matmul__", watched)
    pieces = linear_divergence(hidden, weight, teacher_hidden, teacher_weight, mix=mix, temperature=1.3)
    assert torch.allclose(pieces, whole, rtol=1e-12)
    for got, wanted in zip(torch.autograd.grad((pieces * slopes).sum(), leaves), expected, strict=True):
        assert torch.allclose(got, wanted, rtol=1e-10)
    assert largest == rows_at_once * V, "no table is larger than a piece"


def test_bfloat16_gives_float32_divergences() -> None:
    inputs = _inputs(torch.bfloat16)
    values = linear_divergence(*inputs, mix=0.5, temperature=1.0)
    assert values.dtype == torch.float32
    assert torch.allclose(values.double(), linear_divergence(*_inputs(), mix=0.5, temperature=1.0), atol=0.05)


def test_a_model_that_is_its_own_teacher_is_0_away_and_stays() -> None:
    hidden, weight, *_ = _inputs()
    for mix in MIXES:
        leaf = hidden.clone().requires_grad_()
        values = linear_divergence(leaf, weight, hidden, weight, mix=mix, temperature=1.0)
        values.sum().backward()
        assert leaf.grad is not None
        assert values.abs().max() < 1e-12
        assert leaf.grad.abs().max() < 1e-12


def test_each_token_is_judged_by_its_own_teacher() -> None:
    hidden, weight, teacher_hidden, teacher_weight = _inputs()
    other_weight = teacher_weight.flip(0)
    leaf = hidden.requires_grad_()
    of_first = torch.arange(K) % 3 != 0
    places = [of_first.nonzero()[:, 0], (~of_first).nonzero()[:, 0][:-1]]
    teachers = [
        TeacherStates(hidden=teacher_hidden[places[0]], head=teacher_weight, places=places[0]),
        TeacherStates(hidden=teacher_hidden[places[1]], head=other_weight, places=places[1]),
    ]
    values = divergences(leaf, weight, teachers, mix=0.4, temperature=1.0)
    by_teacher = [_by_definition(leaf, weight, teacher_hidden, head, mix=0.4) for head in (teacher_weight, other_weight)]
    expected = torch.where(of_first, *by_teacher)
    judged = torch.cat(places)
    assert torch.allclose(values[judged], expected[judged])
    assert values.sum().item() == pytest.approx(expected[judged].sum().item())
    got, wanted = (torch.autograd.grad(one.sum(), leaf)[0] for one in (values, expected[judged]))
    assert torch.allclose(got, wanted)


def _by_definition(
    hidden: torch.Tensor, weight: torch.Tensor, teacher_hidden: torch.Tensor, teacher_weight: torch.Tensor, *, mix: float
) -> torch.Tensor:
    p, q = F.softmax(hidden @ weight.t(), -1), F.softmax(teacher_hidden @ teacher_weight.t(), -1)
    m = mix * q + (1 - mix) * p
    return (mix * q * (q / m).log() + (1 - mix) * p * (p / m).log()).sum(-1)
