"""Room that is given out and given back in the same order: parts never overlap, and all of it is used."""

from __future__ import annotations

import collections
import random

import torch

from pipelinerl.weights.sharded.ring import ALIGNMENT_BYTES, Ring


def test_parts_that_are_under_way_never_share_a_byte_and_whatever_fits_is_given():
    dice = random.Random(0)
    ring = Ring(16 * ALIGNMENT_BYTES)
    under_way: collections.deque[tuple[int, torch.Tensor]] = collections.deque()
    for number in range(2000):
        size = dice.randint(1, len(ring.memory))
        while (part := ring.take(size)) is None:
            assert under_way, "an empty ring has room for all that it is as large as"
            mark, oldest = under_way.popleft()
            assert (oldest == mark).all()
            ring.give_back()
        assert part.numel() == size
        part.fill_(number % 256)
        under_way.append((number % 256, part))


def test_parts_that_fit_side_by_side_are_under_way_at_once():
    ring = Ring(4 * ALIGNMENT_BYTES)
    assert all(ring.take(ALIGNMENT_BYTES) is not None for _ in range(4))
    assert ring.take(1) is None
    ring.give_back()
    assert ring.take(ALIGNMENT_BYTES) is not None, "at its beginning again"
    assert ring.take(1) is None


def test_what_is_larger_than_all_of_it_is_never_given():
    assert Ring(ALIGNMENT_BYTES).take(ALIGNMENT_BYTES + 1) is None
