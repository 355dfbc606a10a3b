"""What the trainer sends of a policy, for engines at any version since the delta_base."""

# pyright: reportPossiblyUnboundVariable=false

import pytest
import torch

from pipelinerl.weights.base import num_bytes, plan_layout
from pipelinerl.weights.delta import Space
from pipelinerl.weights.delta_base import DeltaBase

LAYOUT = plan_layout({"a": torch.zeros(96, dtype=torch.bfloat16), "b": torch.zeros(8)})
SPACE = Space(LAYOUT)


def policies(*changed: int) -> list[torch.Tensor]:
    """Policies 0, 1, ...: each changes one byte, by number, of the one before."""
    made = [torch.zeros(num_bytes(LAYOUT), dtype=torch.uint8)]
    for byte in changed:
        made.append(made[-1].clone())
        made[-1][byte] += 1
    return made


def test_the_first_policies_are_whole_until_every_engine_holds_one():
    delta_base = DeltaBase(LAYOUT)
    buffers = policies(0, 2, 4)
    assert delta_base.delta_of(1, buffers[1]) is None
    assert delta_base.delta_of(2, buffers[2]) is None
    delta_base.move(1)
    changes = delta_base.delta_of(3, buffers[3])
    assert changes is not None
    assert changes.positions[2].tolist() == [1, 2], "policies 2 and 3 against 1"


def test_changes_hold_over_every_policy_since_the_baseline_and_the_baseline_moves_only_when_told():
    delta_base = DeltaBase(LAYOUT)
    buffers = policies(0, 2, 2, 4, 6)
    delta_base.delta_of(1, buffers[1])
    delta_base.move(1)
    for version in (2, 3, 4):
        changes = delta_base.delta_of(version, buffers[version])
        assert changes is not None
        assert delta_base.version == 1
        for held in range(1, version + 1):
            buffer = buffers[held].clone()
            SPACE.lay_over(buffer, changes)
            assert torch.equal(buffer, buffers[version]), (held, version)
    delta_base.move(3)
    changes = delta_base.delta_of(5, buffers[5])
    assert changes is not None
    assert changes.positions[2].tolist() == [2, 3], "policies 4 and 5 against 3"


@pytest.mark.parametrize("news", [None, 0, 2])
def test_an_engine_that_lost_its_policy_makes_the_next_one_whole(news: int | None):
    """None: it needs a whole one; 0: it was replaced and holds the first; 2: it holds one whose steps are forgotten."""
    delta_base = DeltaBase(LAYOUT)
    buffers = policies(0, 2, 4, 6, 8)
    for version in (1, 2, 3):
        delta_base.delta_of(version, buffers[version])
    delta_base.move(3)
    delta_base.move(news)
    assert delta_base.delta_of(4, buffers[4]) is None
    delta_base.move(4)
    changes = delta_base.delta_of(5, buffers[5])
    assert changes is not None
    assert changes.positions[2].tolist() == [4]


def test_a_policy_that_changes_much_is_sent_whole_and_nothing_grows_without_end():
    delta_base = DeltaBase(LAYOUT)
    buffers = policies(0, 2)
    delta_base.delta_of(1, buffers[1])
    delta_base.move(1)
    assert delta_base.delta_of(2, buffers[1] + 1) is None, "all of it changed"
    delta_base.move(2)
    for version in range(3, 100):
        buffer = buffers[1] + 1
        buffer[2 * (version % 96)] = 7
        delta_base.delta_of(version, buffer)
    assert sum(len(found) for step in delta_base._steps.values() for found in step.values()) <= 26
    assert delta_base.version is None
    delta_base.move(99)
    assert delta_base.delta_of(100, buffer) is not None
