"""The layout of a published policy."""

import pytest
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.messages import Tensor
from pipelinerl.weights.base import check_layout, num_bytes, plan_layout, views
from pipelinerl.weights.manifest import digest_of_tensor


def _tensor(name: str, shape: tuple[int, ...], offset_bytes: int, *, dtype: str = "float32", size: int = 4) -> Tensor:
    count = 1
    for length in shape:
        count *= length
    return Tensor(name=name, shape=shape, dtype=dtype, offset_bytes=offset_bytes, num_bytes=count * size)


GOOD = (_tensor("a", (2, 3), 0), _tensor("b", (5,), 24, dtype="bfloat16", size=2))
SHAPES = {"a": (2, 3), "b": (5,)}


def test_views_are_the_bytes_of_the_buffer_themselves() -> None:
    buffer = torch.zeros(num_bytes(GOOD), dtype=torch.uint8)
    assert len(buffer) == 34
    found = views(buffer, GOOD)
    found["a"][1, 2] = 1.0
    found["b"][4] = 2.0
    assert buffer[20:24].tolist() == [0, 0, 0x80, 0x3F]
    assert buffer[32:34].tolist() == [0x00, 0x40]
    assert (found["a"].shape, found["b"].dtype) == ((2, 3), torch.bfloat16)


def test_a_planned_layout_holds_every_tensor_aligned() -> None:
    tensors = {"x": torch.randn(3), "scalar": torch.tensor(7.0, dtype=torch.float16), "y": torch.randn(2, 2), "empty": torch.zeros(0, 4)}
    layout = plan_layout(tensors)
    assert [tensor.offset_bytes for tensor in layout] == [0, 64, 128, 192]
    found = views(torch.zeros(num_bytes(layout), dtype=torch.uint8), layout)
    for name, tensor in tensors.items():
        found[name].copy_(tensor)
    assert all(torch.equal(found[name], tensor) for name, tensor in tensors.items())
    check_layout({name: tuple(tensor.shape) for name, tensor in tensors.items()}, layout)


def test_everything_wrong_with_a_layout_is_said_at_once() -> None:
    bad = (
        _tensor("a", (3, 2), 0),
        _tensor("extra", (1,), 20),
        _tensor("c", (2,), 64, dtype="pickle"),
        Tensor(name="d", shape=(4,), dtype="float32", offset_bytes=128, num_bytes=8),
        _tensor("e", (1,), 202),
        _tensor("e", (1,), 300),
    )
    with pytest.raises(WeightsError) as caught:
        check_layout(SHAPES | {"c": (2,), "d": (4,), "e": (1,), "tied": (2, 3)}, bad, optional=("tied",))
    lines = [line.strip() for line in str(caught.value).splitlines()]
    assert "- missing: b [5]" in lines
    assert "- extra: extra [1]: no such parameter" in lines
    assert "- misshapen: a is [3, 2] in the layout and [2, 3] in the model" in lines
    assert "- twice: e" in lines
    assert "- c: 'pickle' is not a torch dtype" in lines
    assert "- d: [4] of float32 is 16 bytes, but the layout says 8" in lines
    assert "- e: offset 202 is not a multiple of the 4 bytes of a float32" in lines
    assert "- overlap: extra starts at byte 20, inside a" in lines
    assert not any("tied" in line for line in lines)


def test_a_fitting_layout_passes_and_a_tied_name_may_be_there() -> None:
    check_layout(SHAPES, GOOD)
    check_layout(SHAPES | {"tied": (2, 3)}, (*GOOD, _tensor("tied", (2, 3), 36)), optional=("tied",))


def test_a_layout_beyond_the_buffer_is_refused() -> None:
    with pytest.raises(WeightsError, match="b ends at byte 34, but the buffer has 33"):
        views(torch.zeros(33, dtype=torch.uint8), GOOD)


def test_digest_is_xxh3_128_and_sees_every_byte() -> None:
    buffer = torch.arange(200, dtype=torch.uint8)
    assert digest_of_tensor(torch.tensor(list(b"a"), dtype=torch.uint8)) == "a96faf705af16834e6c632b61e964e1f"
    before = digest_of_tensor(buffer)
    buffer[137] ^= 1
    assert digest_of_tensor(buffer) != before
    assert digest_of_tensor(torch.tensor(1.5)) == digest_of_tensor(torch.tensor([1.5]))
    assert digest_of_tensor(torch.arange(50, dtype=torch.float32)) == digest_of_tensor(
        torch.arange(50, dtype=torch.float32).view(torch.uint8)
    )
