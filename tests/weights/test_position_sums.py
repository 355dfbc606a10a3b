"""The digest that a device computes, against the same sums in plain integers, and on what a damaged or shuffled policy looks like."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import msgspec
import pytest
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.weights import position_sums as module
from pipelinerl.weights.base import num_bytes, plan_layout
from pipelinerl.weights.delta import Space
from pipelinerl.weights.manifest import DigestKind, Manifest, Proof, digests, seal, verify
from pipelinerl.weights.position_sums import RunningSums, position_sums

MASK = (1 << 64) - 1


def by_hand(data: bytes) -> str:
    plain, weighted = module.LENGTH * len(data), 0
    for place in range(-(-len(data) // 8)):
        word = int.from_bytes(data[8 * place : 8 * place + 8], "little")
        word = (word + (place + 1) * module.PLACE) & MASK
        word = ((word ^ (word >> 30)) * module.FIRST) & MASK
        word = ((word ^ (word >> 27)) * module.SECOND) & MASK
        word ^= word >> 31
        plain, weighted = plain + word, weighted + word * (2 * place + 1)
    return f"{plain & MASK:016x}{weighted & MASK:016x}"


def of(data: bytes | bytearray) -> str:
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return next(position_sums(buffer, [slice(0, len(data))]))


@pytest.mark.parametrize("size", [1, 7, 8, 9, 64, 1000])
def test_the_sums_are_those_of_plain_integers(size: int, monkeypatch: pytest.MonkeyPatch):
    data = random.Random(size).randbytes(size)
    assert of(data) == by_hand(data)
    monkeypatch.setattr(module, "CHUNK_WORDS", 3)
    assert of(data) == by_hand(data), "however it is cut up"


def test_the_mixing_function_is_that_of_splitmix64():
    """The first two numbers of the generator seeded with 1234567, as its published reference gives them."""
    state, found = 1234567, []
    for place in range(2):
        word = torch.tensor([state]) + torch.tensor([place + 1]) * module._signed(module.PLACE)
        found.append(int(module._mixed(word)) & MASK)
    assert found == [6457827717110365317, 3203168211198807973]


def test_slices_of_a_buffer_have_their_own_digests_wherever_they_begin():
    data = random.Random(0).randbytes(300)
    buffer = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    places = [slice(0, 64), slice(64, 64), slice(67, 300)]
    assert list(position_sums(buffer, places)) == [by_hand(data[place]) for place in places]
    assert list(position_sums(buffer, [])) == []


def test_every_flipped_bit_and_every_swap_of_words_and_rows_is_found():
    weights = torch.randn(64, 32, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0))
    data = weights.view(-1).view(torch.uint8).numpy().tobytes()
    before = of(data)
    for byte in range(0, len(data), 37):
        for bit in range(8):
            changed = bytearray(data)
            changed[byte] ^= 1 << bit
            assert of(changed) != before
    for first in range(0, 64, 5):
        rows = weights.clone()
        rows[first], rows[(first + 1) % 64] = weights[(first + 1) % 64], weights[first]
        assert of(rows.view(-1).view(torch.uint8).numpy().tobytes()) != before
    top = bytearray(64)
    top[7], other = 0x40, bytearray(64)
    other[39] = 0x40
    assert of(top) != of(other), "a weight that is linear in the place, times a change of the top bits alone, would miss it"
    assert of(data) != of(data + bytes(8)), "zeros behind"


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bfloat16, torch.float32, torch.float64])
def test_sums_that_follow_what_changed_are_those_of_the_whole(dtype: torch.dtype):
    """Tensors that do not begin or end with a word; several elements of one word; the first word, the last and none."""
    sizes = {"a": 37, "b": 5, "c": 0, "d": 64}
    layout = tuple(
        msgspec.structs.replace(tensor, offset_bytes=tensor.offset_bytes + (dtype.itemsize if tensor.name == "b" else 0))
        for tensor in plan_layout({name: torch.zeros(size, dtype=dtype) for name, size in sizes.items()})
    )
    space, old = Space(layout), torch.randint(0, 256, (num_bytes(layout),), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    running = RunningSums(layout, old)
    for places in ([0, 1, 36], [36], [], [2, 3, 37, 41], [42, 105], list(range(106))):
        new = old.clone()
        for flat in places:
            tensor, place = next(
                (one, flat - first) for one, first in zip(layout, (0, 37, 42, 42), strict=True) if flat < first + sizes[one.name]
            )
            new[tensor.offset_bytes + place * dtype.itemsize] ^= 0x80
        running.follow(space.words_of(space.compare(old, new)), old=old, new=new)
        old = new
        whole = digests(new, layout, kind=DigestKind.SUMS)
        assert list(running.digests().values()) == list(whole)


def test_a_policy_sealed_on_a_device_is_verified_on_the_host_by_the_same_sums():
    layout = plan_layout({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16)})
    buffer = torch.arange(num_bytes(layout)).to(torch.uint8)
    found = digests(buffer, layout, kind=DigestKind.SUMS)
    proofs = tuple(Proof(tensor=tensor, digest=digest) for tensor, digest in zip(layout, found, strict=True))
    manifest = Manifest(version=7, proofs=proofs, num_bytes=len(buffer), digest_kind=DigestKind.SUMS)
    verify(manifest, buffer, name="s")
    buffer[layout[1].offset_bytes + 3] ^= 1
    with pytest.raises(WeightsError, match=r"1 of 2 tensors of policy 7: b \[5\] bfloat16: digest is"):
        verify(manifest, buffer, name="s")


def test_a_buffer_is_sealed_where_it_lies(monkeypatch: pytest.MonkeyPatch):
    layout = plan_layout({"a": torch.zeros(2, 3)})
    assert seal(1, torch.zeros(num_bytes(layout), dtype=torch.uint8), layout).digest_kind is DigestKind.XXH3
    monkeypatch.setattr("pipelinerl.weights.manifest.position_sums", lambda buffer, places: iter(["00"] * len(places)))
    assert seal(1, torch.zeros(num_bytes(layout), dtype=torch.uint8, device="meta"), layout).digest_kind is DigestKind.SUMS


class _Timeline:
    def __init__(self) -> None:
        self.asked: list[object] = []

    def mark(self) -> object:
        self.asked.append("marked")
        return "the mark"

    @contextlib.contextmanager
    def beside(self, after: object = None) -> Iterator[None]:
        self.asked.append(after)
        yield

    def finish(self) -> None: ...

    def pinned(self, num_bytes: int) -> torch.Tensor:
        raise NotImplementedError


def test_sums_are_computed_beside_the_forward_passes_after_what_wrote_the_bytes():
    timeline = _Timeline()
    list(position_sums(torch.zeros(8, dtype=torch.uint8), [slice(0, 8)], timeline=timeline))
    assert timeline.asked == ["marked", "the mark"]
