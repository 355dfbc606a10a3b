"""Log-probabilities and entropies computed piece by piece are those of the whole table of logits, and so are their gradients."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from trainer.model import room
from trainer.model.head import linear_logprobs

K, H, V = 37, 16, 61


def _inputs(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    hidden, weight = torch.randn(K, H).to(dtype), torch.randn(V, H).to(dtype)
    return hidden.requires_grad_(), weight.requires_grad_(), torch.randint(0, V, (K,))


def _whole(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, ...]:
    table = ((hidden @ weight.t()).float() / 0.7).log_softmax(-1)
    return table.gather(-1, targets[:, None])[:, 0], -(table.exp() * table).sum(-1), table.exp().square().sum(-1)


def _gradients(outputs: tuple[torch.Tensor, ...], *leaves: torch.Tensor) -> tuple[torch.Tensor, ...]:
    to_logprobs, to_entropy = torch.randn(2, K, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad((outputs[0] * to_logprobs + outputs[1] * to_entropy).sum(), leaves)


@pytest.mark.parametrize("is_kept", [True, False], ids=["kept", "thrown away"])
@pytest.mark.parametrize("rows_at_once", [K, 5, 1])
def test_pieces_give_what_the_whole_table_gives(monkeypatch: pytest.MonkeyPatch, rows_at_once: int, is_kept: bool) -> None:
    monkeypatch.setattr(room, "piece_bytes", lambda device: 4 * rows_at_once * V)
    monkeypatch.setattr(room, "kept_bytes", lambda device: 4 * K * V if is_kept else 4 * K * V - 1)
    hidden, weight, targets = _inputs()
    ours = linear_logprobs(hidden, weight, targets, temperature=0.7, gives_square_sums=True)
    expected = _whole(hidden, weight, targets)
    for got, wanted in zip(ours, expected, strict=True):
        assert torch.allclose(got, wanted, atol=5e-6)
    for got, wanted in zip(_gradients(ours, hidden, weight), _gradients(expected, hidden, weight), strict=True):
        assert torch.allclose(got, wanted, atol=3e-5)


def test_a_table_that_is_kept_gives_the_very_bits_of_one_computed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "piece_bytes", lambda device: 4 * 5 * V)
    hidden, weight, targets = _inputs()
    found = []
    for most in (K * V, 0):
        monkeypatch.setattr(room, "kept_bytes", lambda device, most=most: 4 * most)
        with _Products() as products:
            outputs = linear_logprobs(hidden, weight, targets, temperature=0.7)
            found.append((*outputs, *_gradients(outputs, hidden, weight)))
        assert products.num_tables == (8 if most else 16)
    assert all(torch.equal(kept, again) for kept, again in zip(*found, strict=True))


class _Products(TorchDispatchMode):
    """Counts products with [.., V] results, which are tables of logits."""

    num_tables = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_tables += func is torch.ops.aten.mm.out and kwargs["out"].shape[-1] == V
        return func(*args, **(kwargs or {}))


def test_bfloat16_gives_float32_logprobs_and_gradients_as_near_as_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LEAST_BYTES", 4 * 4 * V)
    hidden, weight, targets = _inputs(torch.bfloat16)
    ours = linear_logprobs(hidden, weight, targets, temperature=0.7)
    exact = _gradients(_whole(hidden.float(), weight.float(), targets), hidden, weight)
    autograd = _gradients(_whole(hidden, weight, targets), hidden, weight)
    assert ours[0].dtype == torch.float32
    for got, theirs, wanted in zip(_gradients(ours, hidden, weight), autograd, exact, strict=True):
        assert got.dtype == torch.bfloat16
        assert float((got - wanted).float().norm()) < 1.3 * float((theirs - wanted).float().norm())


def test_logits_far_from_zero_lose_nothing() -> None:
    hidden, weight, targets = _inputs()
    with torch.no_grad():
        exact = _whole(hidden.double(), weight.double(), targets)
        shifted = torch.cat((weight, torch.full((V, 1), 300.0)), 1)
        ours = linear_logprobs(torch.cat((hidden, torch.ones(K, 1)), 1), shifted, targets, temperature=0.7, gives_square_sums=True)
    for got, wanted in zip(ours, exact, strict=True):
        assert torch.allclose(got, wanted.float(), atol=1e-3)  # float32 logits of 430 are 3e-5 apart


def test_a_frozen_embedding_costs_no_gradient() -> None:
    hidden, weight, targets = _inputs()
    logprobs, _ = linear_logprobs(hidden, weight.detach(), targets, temperature=1.0)
    logprobs.sum().backward()
    assert hidden.grad is not None
    assert weight.grad is None


def test_no_token_gives_a_gradient_of_zero() -> None:
    hidden, weight, _ = _inputs()
    outputs = linear_logprobs(hidden[:0], weight, torch.zeros(0, dtype=torch.int64), temperature=1.0)
    (outputs[0].sum() + outputs[1].sum()).backward()
    assert weight.grad is not None
    assert not weight.grad.any()
