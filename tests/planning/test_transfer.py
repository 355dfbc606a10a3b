"""Seconds from shard to shard, by hand."""

from typing import Any

import pytest

from pipelinerl.planning.transfer import Transfer, predict

GB = 1e9
PLAIN: dict[str, Any] = {"policy_bytes": 80 * GB, "trainer_ranks": 8, "engine_ranks": 4, "link_bytes_per_s": 10 * GB}
PLAIN |= {"bucket_bytes": 0, "work_bytes_per_s": 1e15, "latency_s": 0, "efficiency": 1}


@pytest.mark.parametrize(
    ("changes", "seconds", "limit"),
    [
        ({}, 2.0, "into the engines"),
        ({"engine_ranks": 16}, 1.0, "out of the trainer"),
        ({"trainer_ranks_per_link": 8}, 8.0, "out of the trainer"),
        ({"engine_ranks_per_link": 2}, 4.0, "into the engines"),
        ({"replicated_fraction": 0.5, "engine_ranks": 8}, 4.5, "out of the trainer"),
        ({"work_bytes_per_s": 5 * GB}, 4.0, "checked and put in its place"),
        ({"latency_s": 0.5, "efficiency": 0.5}, 4.5, "into the engines"),
        ({"num_engines": 5, "bucket_bytes": GB}, 2.5, "into the engines"),
        ({"num_engines": 5}, 2.0, "into the engines"),
    ],
)
def test_what_takes_longest_counts_and_a_chain_of_engines_adds_a_bucket_each(changes: dict[str, Any], seconds: float, limit: str):
    found = predict(Transfer(**PLAIN | changes))
    assert found.seconds == pytest.approx(seconds)
    assert found.limit == limit


def test_no_ranks_are_refused():
    with pytest.raises(ValueError, match="ranks at both ends"):
        predict(Transfer(**PLAIN | {"trainer_ranks": 0}))
