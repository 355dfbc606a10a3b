"""The proof that a policy is the one announced: whatever differs is named with what was got and what was expected."""

import msgspec
import pytest
import torch

from pipelinerl.errors import WeightsError
from pipelinerl.messages import Tensor
from pipelinerl.weights.base import num_bytes, plan_layout
from pipelinerl.weights.manifest import MAX_NAMED, Manifest, check, digest_of, encode, open_manifest, seal, verify, verify_alone

LAYOUT = plan_layout({"a": torch.zeros(2, 3), "b": torch.zeros(5, dtype=torch.bfloat16), "none": torch.zeros(0, 4)})


def policy(layout: tuple[Tensor, ...] = LAYOUT, *, version: int = 7) -> tuple[torch.Tensor, Manifest]:
    buffer = torch.arange(num_bytes(layout)).to(torch.uint8)
    return buffer, seal(version, buffer, layout)


def placed(name: str, *, dtype: str = "float32", shape: tuple[int, ...] = (2, 3), offset_bytes: int = 0) -> Tensor:
    size = getattr(torch, dtype).itemsize
    for length in shape:
        size *= length
    return Tensor(name=name, shape=shape, dtype=dtype, offset_bytes=offset_bytes, num_bytes=size)


def test_a_sealed_policy_passes_and_survives_the_wire():
    buffer, manifest = policy()
    encoded = encode(manifest)
    assert open_manifest(encoded, digest=digest_of(encoded), name="s") == manifest
    check(manifest, version=7, layout=LAYOUT, name="s")
    verify(manifest, buffer, name="s")


def test_every_flipped_bit_of_a_tensor_is_found_and_gaps_do_not_count():
    for tensor in LAYOUT:
        for byte in range(tensor.offset_bytes, tensor.offset_bytes + tensor.num_bytes):
            buffer, manifest = policy()
            buffer[byte] ^= 1 << byte % 8
            with pytest.raises(WeightsError, match=rf"^weight buffer s: 1 of 3 tensors of policy 7: {tensor.name} "):
                verify(manifest, buffer, name="s")
    buffer, manifest = policy()
    buffer[30] ^= 1  # between the 24 bytes of a and b at 64
    verify(manifest, buffer, name="s")


def test_a_damaged_tensor_is_named_with_both_digests():
    buffer, manifest = policy()
    buffer[64] ^= 1
    with pytest.raises(WeightsError) as caught:
        verify(manifest, buffer, name="buffer-3")
    got = seal(7, buffer, LAYOUT).proofs[1].digest
    expected = f"b [5] bfloat16: digest is {got}, published was {manifest.proofs[1].digest}; not taken"
    assert str(caught.value) == f"weight buffer buffer-3: 1 of 3 tensors of policy 7: {expected}"


def test_all_cores_take_the_digests_that_one_takes_and_find_what_it_finds():
    buffer, manifest = policy()
    assert seal(7, buffer, LAYOUT, is_alone=True) == manifest
    verify_alone(manifest, buffer, name="s")
    buffer[64] ^= 1
    with pytest.raises(WeightsError, match=r"^weight buffer s: 1 of 3 tensors of policy 7: b "):
        verify_alone(manifest, buffer, name="s")


def test_many_damaged_tensors_are_counted():
    layout = plan_layout({f"t{number}": torch.zeros(1) for number in range(9)})
    buffer, manifest = policy(layout)
    with pytest.raises(WeightsError, match=rf"9 of 9 tensors .*t{MAX_NAMED - 1} .*; and {9 - MAX_NAMED} more; not taken"):
        verify(manifest, buffer + 1, name="s")


def test_another_version_is_refused():
    with pytest.raises(WeightsError, match="weight buffer s holds policy 7, announced was policy 8; not taken"):
        check(policy()[1], version=8, layout=LAYOUT, name="s")


@pytest.mark.parametrize(
    ("layout", "said"),
    [
        (LAYOUT[:1] + LAYOUT[2:], r"missing: b \[5\]"),
        ((*LAYOUT, placed("c", offset_bytes=128)), r"extra: c \[2, 3\]"),
        ((placed("a", shape=(3, 2)), *LAYOUT[1:]), r"misshapen: a is \[3, 2\] in the layout and \[2, 3\] in the model"),
        ((placed("a", dtype="float16"), *LAYOUT[1:]), r"a: got \[2, 3\] float16 at byte 0, expected \[2, 3\] float32 at byte 0"),
        ((placed("a", offset_bytes=256), *LAYOUT[1:]), r"a: got .* at byte 256, expected .* at byte 0"),
        ((LAYOUT[1], LAYOUT[0], LAYOUT[2]), "its tensors are the right ones, in another order"),
        ((*LAYOUT, LAYOUT[1]), "has 4 tensors in another layout than the 3 .*twice: b"),
        ((), r"has 0 tensors .*missing: a \[2, 3\]; missing: b \[5\]"),
    ],
    ids=["missing", "extra", "misshapen", "dtype", "offset", "order", "twice", "empty"],
)
def test_whatever_differs_from_the_engines_layout_is_said(layout: tuple[Tensor, ...], said: str):
    with pytest.raises(WeightsError, match=said):
        check(policy(layout)[1], version=7, layout=LAYOUT, name="s")


def test_a_manifest_that_was_not_announced_or_is_none_is_refused():
    encoded = encode(policy()[1])
    with pytest.raises(WeightsError, match=f"weight buffer s: the digest of its manifest .* is {digest_of(encoded)}, announced was ff"):
        open_manifest(encoded, digest="ff", name="s")
    junk = msgspec.json.encode({"version": "seven"})
    with pytest.raises(WeightsError, match="weight buffer s: its manifest of 19 bytes is not one"):
        open_manifest(junk, digest=digest_of(junk), name="s")
