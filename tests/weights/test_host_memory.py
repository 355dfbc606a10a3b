"""Memory that is given back is the system's until it is written again."""

import torch

from pipelinerl.weights.host_memory import give_back, offer_zeros


def resident_bytes() -> int:
    """Of this process's own memory."""
    with open("/proc/self/smaps_rollup") as lines:
        return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Private_Dirty"))


def test_pages_given_back_are_no_longer_resident_and_read_as_zeros():
    memory = torch.ones(8 << 20)
    before = resident_bytes()
    given = give_back(memory)
    assert 32 << 20 >= given >= (32 << 20) - 2 * 4096
    assert before - resident_bytes() > 28 << 20
    assert memory[2000:-2000].sum() == 0
    memory.fill_(2.0)
    assert memory.sum() == 16 << 20


def test_of_memory_smaller_than_a_page_nothing_is_given_back():
    small = torch.ones(16)
    assert give_back(small) == 0
    assert small.sum() == 16


def test_zeros_that_are_offered_may_be_taken_and_are_zeros_still():
    memory = torch.ones(8 << 20).zero_()
    assert offer_zeros(memory) > 31 << 20
    with open("/proc/self/smaps_rollup") as lines:
        lazily = next(int(line.split()[1]) << 10 for line in lines if line.startswith("LazyFree"))
    assert lazily > 28 << 20, "the system may take them without writing them anywhere"
    assert not memory.any()
    assert memory.add_(1.0).sum() == 8 << 20
