"""Which attention a row gets on a device, forward and backward: by the kind that the layer asks for, and the dtype.

Run by `tests/test_on_a_device.py`, in a process where torch has the pretended device.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.pretended.on_a_device.training import samples
from tests.pretended.traffic import CUDA, Traffic, on_a_device
from tests.trainer.tiny import make_batch
from trainer.model import attention, varlen
from trainer.rows.arrange import arrange
from trainer.rows.packed_row import PackedRow

H, G, D = 4, 2, 16
TORCHS, OURS = "_safe_softmax", "_softmax"
"""Of `scaled_dot_product_attention`, which torch takes apart where it has no kernel to choose, and of products of our own."""


@pytest.fixture
def device() -> Iterator[Traffic]:
    with on_a_device() as traffic:
        yield traffic


def row_of(*, device: torch.device = CUDA) -> PackedRow:
    batch = make_batch(samples()[2:5])
    row = arrange(batch.token_ids, loss_mask=batch.loss_mask, lengths=batch.lengths, names=batch.rollout_ids, device=device)
    assert row is not None
    assert {block.prefix is None for block in row.blocks} == {True, False}, "pieces with a prefix, and without"
    return row


def attended(traffic: Traffic, *, dtype: torch.dtype = torch.bfloat16, size: int = D, **kind: Any) -> list[str]:
    """The operations of one layer's attention, forward and backward."""
    row = row_of()
    spans = varlen.spans_of(row.blocks, device=CUDA) if varlen.has_kernel(CUDA) else None
    num = len(row.token_ids)
    given = [torch.empty(1, heads, num, size, dtype=dtype, device=CUDA, requires_grad=True) for heads in (H, G, G)]
    traffic.forget()
    module: Any = torch.nn.Identity()
    query, key, value = given
    output, _ = attention.packed_attention(module, query, key, value, None, scaling=0.3, blocks=row.blocks, spans=spans, **kind)
    gradients = torch.autograd.grad(output.sum(), given)
    assert (output.shape, output.dtype, output.device) == ((1, num, H, size), dtype, CUDA)
    assert [one.device for one in gradients] == [CUDA] * 3
    assert traffic.fetched == [], "a layer whose host waits launches nothing meanwhile"
    return [name for _, name in traffic.launched]


@pytest.mark.parametrize("window", [None, 4])
def test_half_precision_is_one_call_of_the_kernel_for_all_pieces(window: int | None, device: Traffic):
    launched = attended(device, sliding_window=window)
    assert (launched.count("_varlen_attn"), launched.count("_varlen_attn_backward")) == (1, 1)
    assert not {TORCHS, OURS, "bmm"} & set(launched)


@pytest.mark.parametrize(
    ("kind", "operation"),
    [
        ({"dtype": torch.float32}, TORCHS),
        ({"size": 12}, TORCHS),
        ({"dtype": torch.float32, "sliding_window": 4}, TORCHS),
        ({"softcap": 30.0}, OURS),
        ({"s_aux": H}, OURS),
    ],
)
def test_what_the_kernel_lacks_is_computed_block_by_block_on_the_device(kind: dict[str, Any], operation: str, device: Traffic):
    if "s_aux" in kind:
        kind = {"s_aux": torch.empty(H, dtype=torch.bfloat16, device=CUDA)}
    launched = attended(device, **kind)
    assert operation in launched, sorted(set(launched))
    assert not any("varlen" in name for name in launched)


def test_an_older_gpu_has_no_kernel_and_a_cpu_neither(device: Traffic, monkeypatch: pytest.MonkeyPatch):
    assert varlen.has_kernel(CUDA)
    assert not varlen.has_kernel(torch.device("cpu"))
    varlen._has_kernel.cache_clear()
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    assert not varlen.has_kernel(CUDA)
    varlen._has_kernel.cache_clear()
