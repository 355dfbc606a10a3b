"""Attention of a whole row in one call: the same numbers as block by block, over a stand-in for the kernel, which wants a GPU.

The stand-in has the signature of torch's own function; that one is called with memoryless tensors, down to the kernel's own checks.
"""

from __future__ import annotations

import inspect
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import varlen as torchs_varlen
from torch.nn.attention.varlen import varlen_attn

from tests.trainer.tiny import make_batch, make_sample
from trainer.model import attention, varlen
from trainer.rows.arrange import arrange
from trainer.rows.packed_row import Block, PackedRow

H, G, D = 4, 2, 8
CPU = torch.device("cpu")


def row_with_siblings() -> PackedRow:
    """Samples of several lengths, and four that share their prompt: pieces with a prefix, and without."""
    generator = np.random.default_rng(0)
    samples = [make_sample(generator, prompt=4, completion=completion) for completion in (3, 3, 9, 1)]
    siblings = [make_sample(generator, prompt=5, completion=completion) for completion in (3, 9, 3, 14)]
    for sibling in siblings:
        sibling["token_ids"][:5] = siblings[0]["token_ids"][:5]
    batch = make_batch(samples + siblings)
    row = arrange(batch.token_ids, loss_mask=batch.loss_mask, lengths=batch.lengths, names=batch.rollout_ids)
    assert row is not None
    assert {block.prefix is None for block in row.blocks} == {True, False}
    return row


def plain(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *positional: Any, **named: Any) -> torch.Tensor:
    """What torch's documentation says that `varlen_attn` computes, sequence by sequence, in plain products."""
    given = inspect.signature(varlen_attn).bind(query, key, value, *positional, **named).arguments
    begins = [given[name].tolist() for name in ("cu_seq_q", "cu_seq_k")]
    assert [max(np.diff(ends)) for ends in begins] == [given["max_q"], given["max_k"]]
    assert given["enable_gqa"]
    left, right = given["window_size"]
    outputs = []
    for q_first, q_end, k_first, k_end in zip(begins[0][:-1], begins[0][1:], begins[1][:-1], begins[1][1:], strict=True):
        keys, values = (tensor[k_first:k_end].repeat_interleave(H // G, 1) for tensor in (key, value))
        scores = torch.einsum("lhd,shd->hls", query[q_first:q_end], keys) * given["scale"]
        distance = (k_end - k_first - (q_end - q_first) + torch.arange(q_end - q_first))[:, None] - torch.arange(k_end - k_first)
        hidden = (distance < -right) | ((distance > left) if left >= 0 else False)
        outputs.append(torch.einsum("hls,shd->lhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values))
    return torch.cat(outputs)


@pytest.mark.parametrize("window", [None, 4])
def test_one_call_gives_what_blocks_give(monkeypatch: pytest.MonkeyPatch, window: int | None) -> None:
    row = row_with_siblings()
    generator = torch.Generator().manual_seed(0)
    num = len(row.token_ids)
    query, key, value = (torch.randn(1, heads, num, D, generator=generator, requires_grad=True) for heads in (H, G, G))
    toward = torch.randn(1, num, H, D, generator=generator)
    calls: list[int] = []
    monkeypatch.setattr(varlen, "varlen_attn", lambda *given, **named: calls.append(1) or plain(*given, **named))
    monkeypatch.setattr(varlen, "serves", lambda query, value: True)
    found = []
    for spans in (None, varlen.spans_of(row.blocks, device=CPU)):
        module: Any = torch.nn.Identity()
        output, _ = attention.packed_attention(
            module, query, key, value, None, scaling=0.3, blocks=row.blocks, spans=spans, sliding_window=window
        )
        found.append((output, *torch.autograd.grad((output * toward).sum(), (query, key, value))))
    assert len(calls) == 1
    for blockwise, at_once in zip(*found, strict=True):
        assert torch.allclose(blockwise, at_once, atol=1e-5)


def test_ranks_that_share_a_row_count_from_where_their_own_begins() -> None:
    prefix = torch.tensor([3, 4, 3, 4])
    blocks = (
        Block(start=0, num=1, length=2, prefix_length=0, prefix=None),
        Block(start=2, num=2, length=1, prefix_length=2, prefix=prefix),
    )
    spans = varlen.spans_of(blocks, device=CPU, first=10)
    assert spans.seen is not None
    assert spans.seen.tolist() == [10, 11, 3, 4, 12, 3, 4, 13]
    assert spans.queries.tolist() == [0, 2, 3, 4]
    assert spans.keys.tolist() == [0, 2, 5, 8]
    assert (spans.most_queries, spans.most_keys) == (2, 3)


def test_a_rank_that_shares_a_row_takes_the_keys_of_a_prefix_from_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second of two ranks of three tokens each; the first one's keys are where a piece's prefix lies."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 3, D, generator=generator) for heads in (H, G, G))
    other = torch.randn(3, 2, G, D, generator=generator)
    blocks = (Block(start=0, num=1, length=3, prefix_length=2, prefix=torch.tensor([0, 2])),)
    group: Any = SimpleNamespace(rank=lambda: 1)
    monkeypatch.setattr(attention, "gather", lambda own, group: torch.cat((other, own)))
    monkeypatch.setattr(varlen, "varlen_attn", plain)
    monkeypatch.setattr(varlen, "serves", lambda query, value: True)
    module: Any = torch.nn.Identity()
    blockwise, at_once = (
        attention.packed_attention(module, query, key, value, None, scaling=0.3, blocks=blocks, spans=spans, group=group)[0]
        for spans in (None, varlen.spans_of(blocks, device=CPU, first=3))
    )
    assert torch.allclose(blockwise, at_once, atol=1e-5)


@pytest.mark.parametrize("window", [None, 4])
def test_torchs_own_function_takes_what_it_is_given(window: int | None) -> None:
    """A wrong argument, dtype or shape is an error, and no number is computed.

    Forward on fake tensors of a CUDA device; backward, whose engine asks for the real device, on tensors without memory.
    """
    row = row_with_siblings()
    with FakeTensorMode():
        spans = varlen.spans_of(row.blocks[:1], device=torch.device("cuda"))
        num = row.blocks[0].num * row.blocks[0].length
        query, key, value = (torch.empty(num, heads, D, dtype=torch.bfloat16, device="cuda") for heads in (H, G, G))
        output = varlen.attend(query, key, value, spans, scaling=0.3, window=window)
        assert output.shape == (num, H, D)
        assert output.device.type == "cuda"
    meta = torch.device("meta")
    query, key, value = (torch.empty(num, heads, D, dtype=torch.bfloat16, device=meta, requires_grad=True) for heads in (H, G, G))
    output = varlen.attend(query, key, value, varlen.spans_of(row.blocks[:1], device=meta), scaling=0.3, window=window)
    gradients = torch.autograd.grad(output.sum(), (query, key, value))
    assert [gradient.shape for gradient in gradients] == [query.shape, key.shape, value.shape]


def test_the_kernel_itself_is_called_as_its_declaration_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is behind torch's function, on tensors without memory: its body ends in an operator whose own shape rule checks the call."""
    row = row_with_siblings()
    operator: Any = torch.ops.torch_attn._varlen_attn.default
    function: Any = torchs_varlen._varlen_attn
    body = function._init_fn
    bound: list[torch.Size] = []

    def run(*given: Any, **named: Any) -> torch.Tensor:
        values = inspect.signature(varlen_attn).bind(*given, **named)
        values.apply_defaults()
        one = values.arguments
        names = [argument.name for argument in operator._schema.arguments]
        window = list(one["window_size"])
        found = body(**{name: window if name == "window_size" else one[name] for name in names if name in one}, is_causal=window == [-1, 0])
        bound.append(found[0].shape)
        return found[0]

    monkeypatch.setattr(varlen, "varlen_attn", run)
    meta = torch.device("meta")
    blocks = tuple(block for block in row.blocks if block.prefix is None)
    num = sum(block.num * block.length for block in blocks)
    query, key, value = (torch.empty(num, heads, D, dtype=torch.bfloat16, device=meta) for heads in (H, G, G))
    varlen.attend(query, key, value, varlen.spans_of(blocks, device=meta), scaling=0.3, window=None)
    assert bound == [torch.Size((num, H, D))]


def test_kinds_that_the_kernel_lacks_go_on_block_by_block() -> None:
    half = torch.empty(3, H, D, dtype=torch.bfloat16)
    assert varlen.serves(half, half)
    assert not varlen.serves(half.float(), half.float()), "it computes in half precision alone"
    assert not varlen.serves(half, half[..., :4]), "keys and values of different sizes"
    assert not varlen.serves(half[..., :6], half[..., :6])
    assert not varlen.has_kernel(CPU)
