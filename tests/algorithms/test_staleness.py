"""How old tokens are."""

from __future__ import annotations

import numpy as np
import pytest

from pipelinerl.algorithms.staleness import (
    Staleness,
    StalenessParts,
    fits_bound,
    measure,
    never_falls,
    split,
    token_staleness,
    withhold_mask,
)
from pipelinerl.messages import UNSAMPLED

VERSIONS = np.array([UNSAMPLED, 3, 3, UNSAMPLED, 4, 6], dtype=np.int32)


def test_staleness_counts_versions_per_token_and_ignores_what_no_policy_sampled() -> None:
    np.testing.assert_array_equal(token_staleness(VERSIONS, trained_version=7), [0, 4, 4, 0, 3, 1])
    assert measure(VERSIONS, trained_version=7) == Staleness(num_tokens=4, oldest=4, newest=1, mean=3.0, spread=3)
    assert measure(VERSIONS[:1], trained_version=7) is None


def test_the_parts_sum_to_the_staleness_of_the_oldest_token() -> None:
    assert split(VERSIONS, trained_version=7) == StalenessParts(in_flight=3, in_queue=1)
    assert split(VERSIONS[:1], trained_version=7) is None


def test_the_oldest_token_governs_the_bound() -> None:
    assert fits_bound(VERSIONS, trained_version=7, bound=4)
    assert not fits_bound(VERSIONS, trained_version=7, bound=3)
    assert fits_bound(VERSIONS[:1], trained_version=70, bound=0)


def test_withholding_keeps_the_young_tokens_of_an_old_row() -> None:
    np.testing.assert_array_equal(withhold_mask(VERSIONS, trained_version=7, bound=3), [False, False, False, False, True, True])


def test_a_token_from_the_future_is_an_error_not_a_negative_age() -> None:
    with pytest.raises(ValueError, match="newer than version 5"):
        token_staleness(VERSIONS, trained_version=5)


def test_versions_may_rise_along_a_sequence_but_never_fall() -> None:
    assert never_falls(VERSIONS)
    assert not never_falls(np.array([3, UNSAMPLED, 2]))
