"""Delta come back bit for bit, in few bytes; what is no message of changes is refused."""

import itertools
import math

import hypothesis.extra.numpy as arrays
import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given, settings

from pipelinerl.errors import WeightsError
from pipelinerl.weights.base import num_bytes, plan_layout
from pipelinerl.weights.codec import decode, encode
from pipelinerl.weights.delta import Delta, Space, union

MIXED = plan_layout(
    {
        "a": torch.zeros(300, dtype=torch.bfloat16),
        "b": torch.zeros(7, 5),
        "none": torch.zeros(0),
        "c": torch.zeros(11, dtype=torch.float16),
        "d": torch.zeros(3, dtype=torch.float64),
        "e": torch.zeros(13, dtype=torch.float8_e4m3fn),
    }
)
SPACE = Space(MIXED)


def random_policy(seed: int) -> torch.Tensor:
    return torch.randint(0, 256, (num_bytes(MIXED),), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


def same(one: Delta, other: Delta) -> bool:
    return all(
        np.array_equal(one.positions.get(size, []), other.positions.get(size, []))
        and np.array_equal(one.values.get(size, []), other.values.get(size, []))
        for size in (1, 2, 4, 8)
    )


@given(
    values=arrays.arrays(np.uint16, st.integers(0, 300), elements=st.integers(0, 65535)),
    seed=st.integers(0, 100),
    longest=st.sampled_from([1, 3, 100, 10**6, 10**10]),
)
@settings(max_examples=60)
def test_any_changes_come_back_bit_for_bit(values: np.ndarray, seed: int, longest: int):
    gaps = np.random.default_rng(seed).integers(1, longest + 1, size=len(values))
    changes = Delta(positions={2: np.cumsum(gaps) - 1}, values={2: values})
    assert same(decode(encode(changes)), changes)


@pytest.mark.parametrize("fraction", [0.0, 0.004, 0.3, 1.0])
def test_a_policy_is_the_one_before_with_its_changes_laid_over(fraction: float):
    old, other = random_policy(1), random_policy(2)
    is_new = torch.rand(len(old), generator=torch.Generator().manual_seed(3)) < fraction
    new = torch.where(is_new, other, old)
    changes = decode(encode(SPACE.take(new, SPACE.compare(old, new))))
    SPACE.check(changes)
    for _ in range(2):  # a second time changes nothing: values are absolute
        SPACE.lay_over(old, changes)
        assert SPACE.compare(old, new) == {size: pytest.approx([]) for size in (1, 2, 4, 8)}


def test_every_bit_pattern_counts_nans_and_signed_zeros_too():
    layout = plan_layout({"a": torch.zeros(4)})
    old = torch.tensor([0.0, float("nan"), 1.0, float("inf")]).view(torch.uint8)
    new = torch.tensor([-0.0, float("nan"), 1.0, float("-inf")]).view(torch.uint8).clone()
    new[4] ^= 1  # another NaN
    assert Space(layout).compare(old, new)[4].tolist() == [0, 1, 3]


def test_positions_count_over_tensors_of_one_size():
    old = random_policy(1)
    new = old.clone()
    for name, element in (("a", 299), ("c", 0), ("b", 34)):
        (tensor,) = [tensor for tensor in MIXED if tensor.name == name]
        new[tensor.offset_bytes + element * tensor.num_bytes // math.prod(tensor.shape)] ^= 1
    found = SPACE.compare(old, new)
    assert {size: positions.tolist() for size, positions in found.items()} == {2: [299, 300], 4: [34], 8: [], 1: []}
    by_tensor = SPACE.by_tensor(SPACE.take(new, found))
    assert {name: positions.tolist() for name, (positions, _) in by_tensor.items()} == {"a": [299], "c": [0], "b": [34]}


def test_changes_of_several_policies_together_hold_for_each_version_between():
    """1.5 of policy 1 is taken back by policy 2: only the union tells who holds policy 1 that it is gone."""
    policies = [random_policy(1)]
    for byte in (3, 3, 40):
        policies.append(policies[-1].clone())
        policies[-1][byte] ^= 1
    steps = [SPACE.compare(old, new) for old, new in itertools.pairwise(policies)]
    together = SPACE.take(policies[3], union(steps))
    for held in range(4):
        buffer = policies[held].clone()
        SPACE.lay_over(buffer, together)
        assert torch.equal(buffer, policies[3])


@pytest.mark.parametrize("fraction", [0.005, 0.01, 0.03, 0.05])
def test_bytes_stay_near_the_entropy_of_positions_and_values(fraction: float):
    """The bound: H(d) bits of position for each parameter and one byte of value for each changed one."""
    layout = plan_layout({"a": torch.zeros(1 << 20, dtype=torch.bfloat16)})
    generator = torch.Generator().manual_seed(0)
    old = (torch.randn(1 << 20, generator=generator) * 0.02).to(torch.bfloat16)
    is_new = torch.rand(1 << 20, generator=generator) < fraction
    new = torch.where(is_new, (old.view(torch.int16) + 1).view(torch.bfloat16), old)
    space = Space(layout)
    positions = space.compare(old.view(torch.uint8), new.view(torch.uint8))
    found = len(encode(space.take(new.view(torch.uint8), positions)))
    d = len(positions[2]) / (1 << 20)
    entropy = -d * math.log2(d) - (1 - d) * math.log2(1 - d)
    assert found <= 1.3 * (1 << 20) * (entropy / 8 + d)


def test_what_is_no_message_of_changes_is_refused():
    changes = Delta(positions={2: np.arange(0, 500, 5)}, values={2: np.arange(100, dtype=np.uint16)})
    good = encode(changes)
    (part,) = msgspec.msgpack.decode(good)
    bad = [
        b"",
        good[:-1],
        b"\xc1" * 50,
        msgspec.msgpack.encode([{**part, "count": 99}]),
        msgspec.msgpack.encode([part, part]),
        msgspec.msgpack.encode([{**part, "count": 1 << 50}]),
        msgspec.msgpack.encode([{**part, "low_bits": 60}]),
        msgspec.msgpack.encode([{**part, "itemsize": 3}]),
        msgspec.msgpack.encode([{**part, "planes": part["planes"][:1]}]),
        msgspec.msgpack.encode([{**part, "remainders": b"1"}]),
        msgspec.msgpack.encode([{**part, "quotients": b"not deflated"}]),
        msgspec.msgpack.encode([{**part, "more": 1}]),
    ]
    for data in bad:
        with pytest.raises(WeightsError, match=f"{len(data)} bytes are not the changes of a policy"):
            decode(data)


@pytest.mark.parametrize("positions", [[-1, 3], [3, 3], [5, 3], [0, 311]])
def test_positions_of_another_layout_are_refused(positions: list[int]):
    changes = Delta(positions={2: np.array(positions)}, values={2: np.zeros(2, np.uint16)})
    with pytest.raises(WeightsError, match="must ascend below 311: they belong to another layout"):
        SPACE.check(changes)
