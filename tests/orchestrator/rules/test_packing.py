"""Packing: every sample once, no row too long, rows full and early."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipelinerl.data.packing import Packing
from pipelinerl.messages import Sample
from tests.orchestrator import handmade


def lengths_of(rows: list[list[Sample]]) -> list[list[int]]:
    return [[sample.trajectory.num_tokens for sample in row] for row in rows]


def pack(lengths: list[int], *, max_tokens: int, open_rows: int = 4) -> list[list[Sample]]:
    """Add samples of these lengths and flush; all rows in the order in which they left."""
    packing = Packing(max_tokens=max_tokens, open_rows=open_rows)
    rows = [row for number, length in enumerate(lengths) for row in packing.add(handmade.sample(length, number=number))]
    return rows + packing.flush()


@given(lengths=st.lists(st.integers(2, 50), max_size=60), open_rows=st.integers(1, 6))
def test_every_sample_leaves_exactly_once_and_no_row_is_too_long(lengths: list[int], open_rows: int):
    rows = pack(lengths, max_tokens=50, open_rows=open_rows)
    names = sorted(sample.trajectory.sibling for row in rows for sample in row)
    assert names == list(range(len(lengths)))
    assert all(0 < sum(row) <= 50 for row in lengths_of(rows))


def test_a_row_leaves_the_moment_nothing_fits_it_any_more():
    """Full to the last token, or with less room than the shortest sample so far would need."""
    packing = Packing(max_tokens=10)
    assert packing.add(handmade.sample(4)) == []
    assert packing.add(handmade.sample(3)) == []
    assert lengths_of(packing.add(handmade.sample(3))) == [[4, 3, 3]]
    assert packing.add(handmade.sample(3)) == []
    assert lengths_of(packing.add(handmade.sample(5))) == [[3, 5]]
    assert packing.flush() == []


def test_a_sample_goes_where_it_leaves_the_least_room():
    packing = Packing(max_tokens=20)
    packing.add(handmade.sample(3))
    packing.flush()  # 3 is the shortest seen, so rows with 3 free tokens stay open
    for length in (12, 16, 15):  # rooms 8, 4, 5
        assert packing.add(handmade.sample(length)) == []
    assert lengths_of(packing.add(handmade.sample(4))) == [[16, 4]]
    assert lengths_of(packing.add(handmade.sample(5))) == [[15, 5]]
    assert lengths_of(packing.flush()) == [[12]]


def test_with_no_row_left_to_open_the_fullest_makes_way():
    packing = Packing(max_tokens=20, open_rows=2)
    packing.add(handmade.sample(2))
    packing.flush()
    packing.add(handmade.sample(12))
    packing.add(handmade.sample(15))
    assert lengths_of(packing.add(handmade.sample(11))) == [[15]]
    assert lengths_of(packing.flush()) == [[12], [11]]


def test_a_flush_empties_everything_and_the_next_step_starts_afresh():
    packing = Packing(max_tokens=10)
    packing.add(handmade.sample(2))
    assert lengths_of(packing.flush()) == [[2]]
    for length in (7, 8):
        packing.add(handmade.sample(length))
    assert lengths_of(packing.flush()) == [[7], [8]]
    assert packing.flush() == []
    packing.add(handmade.sample(5))
    assert lengths_of(packing.flush()) == [[5]]


def test_a_sample_that_fills_a_row_leaves_alone_and_a_longer_one_is_our_own_mistake():
    packing = Packing(max_tokens=10)
    assert lengths_of(packing.add(handmade.sample(10))) == [[10]]
    with pytest.raises(ValueError, match="a sample of 11 tokens does not fit a row of 10"):
        packing.add(handmade.sample(11, number=7))


def test_rows_are_97_percent_full_on_long_tailed_lengths():
    """Log-normal lengths with a median of 300 tokens, every eighth over 1000, in rows of 8192; 2000 samples, seed 0."""
    drawn = np.random.default_rng(0).lognormal(mean=np.log(300), sigma=1.0, size=2000)
    lengths = np.clip(drawn, 16, 8192).astype(int).tolist()
    rows = lengths_of(pack(lengths, max_tokens=8192))
    fullness = sum(map(sum, rows)) / (8192 * len(rows))
    assert fullness >= 0.97, f"{fullness:.4f} in {len(rows)} rows"


def test_the_last_rows_of_a_step_are_dealt_anew_to_a_whole_wave():
    """Three replicas and one row gone: best fit made 9 5 4 and 3 of the others, a wave in which one waits for the other."""
    packing = Packing(max_tokens=20, num_replicas=3)
    packing.add(handmade.sample(1))
    packing.flush()  # 1 is the shortest seen, so rows with a free token stay open
    assert lengths_of(packing.add(handmade.sample(20))) == [[20]]
    for length in (9, 5, 4, 3):
        assert packing.add(handmade.sample(length)) == []
    assert lengths_of(packing.flush()) == [[9], [5, 4, 3]]
    for length in (9, 5):
        packing.add(handmade.sample(length))
    assert lengths_of(packing.flush()) == [[9], [5]], "the count starts afresh, and there are never more rows than samples"


def test_costs_are_dealt_not_tokens():
    """A sample of 32768 tokens costs as much as 65536 tokens in short ones."""
    packing = Packing(max_tokens=100_000, num_replicas=2)
    for length in (32_768, *[1000] * 60):
        packing.add(handmade.sample(length))
    long, short = sorted(lengths_of(packing.flush()), key=len)
    assert long == [32_768]
    assert short == [1000] * 60


def test_what_finds_no_room_when_dealt_by_cost_stays_as_it_was_packed():
    """10 8 and 8 6 5 fit two rows of 20; dealt by cost, 10 6 and 8 8 leave room for 4 and 4, and the 5 finds none."""
    packing = Packing(max_tokens=20, num_replicas=2)
    packing.add(handmade.sample(1))
    packing.flush()  # 1 is the shortest seen, so rows with a free token stay open
    for length in (8, 10, 8, 6, 5):
        assert packing.add(handmade.sample(length)) == []
    assert lengths_of(packing.flush()) == [[8, 10], [8, 6, 5]]


def test_a_sample_larger_than_a_row_is_a_row_by_itself_where_that_may_be():
    packing = Packing(max_tokens=10, max_sample_tokens=30)
    assert packing.add(handmade.sample(4)) == []
    assert lengths_of(packing.add(handmade.sample(12))) == [[12]]
    assert lengths_of(packing.add(handmade.sample(6))) == [[4, 6]]
    with pytest.raises(ValueError, match="a sample of 31 tokens does not fit a row of 30"):
        packing.add(handmade.sample(31))
