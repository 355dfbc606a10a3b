"""What contexts are expected to be, on numbers worked by hand."""

from __future__ import annotations

import pytest

from orchestrator.rules.drift import Drift


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        ((1000,), (1000, 1000)),
        ((1000, 1200), (1200, 1200)),  # once is not twice
        ((1000, 1200, 1320), (1452, 1597.2)),  # by the smaller factor, 1.1
        ((1000, 1100, 1320), (1452, 1597.2)),
        ((1000, 900, 720), (648, 583.2)),  # 0.9, and not 0.8
        ((1000, 900, 990), (990, 990)),  # down, and up
        ((1000, 1200, 1200), (1200, 1200)),
        ((1000, 1100, 1650), (1650, 1650)),  # a jump
        ((1000, 1500, 1650), (1650, 1650)),  # nor does it go on from one
        ((1000, 500, 475), (475, 475)),
    ],
)
def test_what_has_grown_twice_goes_on_and_a_jump_does_not(seen: tuple[float, ...], expected: tuple[float, ...]):
    drift = Drift()
    for context in seen[:-1]:
        drift.contexts(context, number=0)
    assert drift.contexts(seen[-1], number=2) == pytest.approx(expected)
    assert drift.is_known is (len(seen) > 1)
