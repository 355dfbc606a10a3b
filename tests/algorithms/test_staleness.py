"""How old tokens are."""

from __future__ import annotations

import numpy as np
import pytest

from pipelinerl.algorithms.staleness import Staleness, measure, split
from pipelinerl.messages import UNSAMPLED

VERSIONS = np.array([UNSAMPLED, 3, 3, UNSAMPLED, 4, 6], dtype=np.int32)


def test_staleness_counts_versions_per_token_and_ignores_what_no_policy_sampled() -> None:
    assert measure(VERSIONS, trained_version=7) == Staleness(oldest=4, newest=1)
    assert measure(VERSIONS[:1], trained_version=7) is None


def test_every_token_knows_how_much_of_its_age_is_flight_and_how_much_queue() -> None:
    parts = split([VERSIONS, VERSIONS[:1], VERSIONS[:2]], trained_version=7)
    assert (parts.in_flight + parts.in_queue).tolist() == [4, 4, 3, 1, 4]
    assert parts.in_flight.tolist() == [3, 3, 2, 0, 0]
    assert parts.in_queue.tolist() == [1, 1, 1, 1, 4]
    nothing = split([], trained_version=7)
    assert [(len(part), part.dtype) for part in (nothing.in_flight, nothing.in_queue)] == [(0, np.int64)] * 2


def test_a_token_from_the_future_is_an_error_not_a_negative_age() -> None:
    with pytest.raises(ValueError, match="newer than version 5"):
        measure(VERSIONS, trained_version=5)
    with pytest.raises(ValueError, match="newer than version 5"):
        split([VERSIONS], trained_version=5)
